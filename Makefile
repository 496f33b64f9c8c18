# Two commands: `make demo` runs the main job, `make test` the tests. Each sets up what it needs; a second run starts at once.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo checked test quick lint types examples clean

demo: $(READY)
	$(BIN)/python examples/02_tree_search.py

# The main job once more, with the cache checked after each step and the scheduler's inbox recorded; then the record runs again.
checked: $(READY)
	@mkdir -p build
	anabranch_DEBUG=5 $(BIN)/python examples/02_tree_search.py 2> build/checked.log || { tail -n 40 build/checked.log; exit 1; }
	$(BIN)/anabranch replay "$$(sed -n "s/^anabranch: recording the scheduler's inbox to //p" build/checked.log)" > build/replayed.log
	@tail -n 1 build/replayed.log

test: $(READY)
	$(BIN)/python -m pytest

quick: $(READY)
	$(BIN)/python -m pytest -m "not slow" -x -q

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

examples: $(READY)
	$(BIN)/python -m pytest tests/e2e/test_examples.py

# torch comes first and pinned, so that no later dependency pulls another build of it.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "anabranch needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "python3-venv is missing: install it (Debian: apt-get install python3-venv)"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || echo "note: no C++ compiler ($${CXX:-g++}) found; the native CPU kernels will not be built and everything runs slowly"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info
