"""The structure that the design promises: who may import whom, and that wheel and tree hold the same files."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("radix", "kernels", "runtime", "lang")
OURS = "anabranch"

# layer or part of one -> prefixes that it must never import
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "radix": (
        "torch",
        "zmq",
        "time",
        "datetime",
        "random",
        "os",
        "pathlib",
        "socket",
        "asyncio",
        "msgspec",
        "anabranch.kernels",
        "anabranch.runtime",
        "anabranch.lang",
    ),
    "kernels": ("zmq", "msgspec", "anabranch.radix", "anabranch.runtime", "anabranch.lang"),
    "lang": ("torch", "zmq", "numpy", "msgspec", "anabranch.radix", "anabranch.kernels", "anabranch.runtime"),
    "runtime": ("anabranch.lang",),
    "runtime/scheduler": (
        *("torch", "anabranch.kernels", "anabranch.lang", "anabranch.runtime.worker", "anabranch.runtime.tokenizer"),
        *("zmq", "time", "datetime", "random", "secrets", "os", "pathlib", "socket", "threading", "asyncio"),  # a pure function
    ),
    "runtime/worker": ("anabranch.radix", "anabranch.lang"),
}


def sources(part: str) -> list[Path]:
    return sorted((ROOT / part).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything a module imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which layer is meant"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaks(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("part", FORBIDDEN)
def test_each_layer_imports_only_what_it_may(part: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(part)
        for name in imports(path)
        if any(breaks(name, prefix) for prefix in FORBIDDEN[part])
    ]
    assert sources(part), f"no sources under {part}"
    assert not wrong, "\n".join(wrong)


THIRD_PARTY = {"radix": {"numpy"}, "kernels": {"numpy", "torch"}, "lang": set()}


@pytest.mark.parametrize("part", THIRD_PARTY)
def test_layers_below_need_only_what_they_may_at_import(part: str) -> None:
    """What is imported inside a function of lang is optional (IPython, tqdm, pydantic)."""
    allowed = set(sys.stdlib_module_names) | {OURS} | THIRD_PARTY[part]
    wrong = []
    for path in sources(part):
        for node in ast.parse(path.read_text()).body:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in names if name.split(".")[0] not in allowed]
    assert not wrong, "\n".join(wrong)


def test_the_schedulers_process_loads_neither_torch_nor_kernels() -> None:
    """Not through others either: it would cost a second and 200 MB."""
    script = (
        "import sys, anabranch.runtime.stages, anabranch.runtime.trace, anabranch.runtime.scheduler.scheduler as _; "
        "print(sorted(n for n in sys.modules if n == 'torch' or n.startswith('anabranch.kernels')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_folders_are_linked_and_have_no_package_marker(layer: str) -> None:
    assert not (ROOT / layer / "__init__.py").exists(), (
        f"{layer}/__init__.py would shadow an installed package named {layer}"
    )
    link = ROOT / "src" / OURS / layer
    assert link.is_symlink() and link.resolve() == (ROOT / layer).resolve()


def test_nothing_unpickles_or_evaluates() -> None:
    """No pickle, marshal or eval anywhere in the product: what arrives is data (torch.load would unpickle, too)."""
    banned_modules = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
    banned_calls = {"eval", "exec", "__import__"}
    wrong = []
    for path in (p for layer in LAYERS for p in sources(layer)):
        tree = ast.parse(path.read_text())
        wrong += [f"{path}: imports {n}" for n in imports(path) if n.split(".")[0] in banned_modules or n == "torch.load"]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                f = node.func
                if isinstance(f, ast.Name) and f.id in banned_calls:
                    wrong.append(f"{path}:{node.lineno}: calls {f.id}")
                wrong += [f"{path}:{node.lineno}: allows pickle" for keyword in node.keywords if keyword.arg == "allow_pickle"]
                if isinstance(f, ast.Attribute) and f.attr in {"send_pyobj", "recv_pyobj", "import_module"}:
                    wrong.append(f"{path}:{node.lineno}: calls {f.attr}")
                if (
                    isinstance(f, ast.Attribute)
                    and f.attr == "load"
                    and isinstance(f.value, ast.Name)
                    and f.value.id == "torch"
                ):
                    wrong.append(f"{path}:{node.lineno}: calls torch.load")
    assert not wrong, "\n".join(wrong)


ENTRY_POINTS = {"runtime/cli.py", "runtime/stages.py", "runtime/bench/peer_openvino.py"}  # what `python -m` or a shell starts


def test_only_config_reads_the_environment_and_argv() -> None:
    allowed = {"runtime/config.py"} | ENTRY_POINTS
    wrong = []
    for path in (p for layer in LAYERS for p in sources(layer)):
        name = str(path.relative_to(ROOT))
        if name not in allowed:
            wrong += [f"{name} imports {n}" for n in imports(path) if n in {"os.environ", "os.getenv", "sys.argv"}]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                pair = (node.value.id, node.attr)
                if pair in {("os", "environ"), ("os", "getenv"), ("sys", "argv")} and name not in allowed:
                    wrong.append(f"{name}:{node.lineno}: {'.'.join(pair)}")
    assert not wrong, "\n".join(wrong)
