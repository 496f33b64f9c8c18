import subprocess
import sys
import warnings

import pytest

from anabranch.kernels import build, registry
from anabranch.kernels.reference import ReferenceBackend


def test_backends_are_found_by_name() -> None:
    assert isinstance(registry.backend("reference"), ReferenceBackend)
    with pytest.raises(ValueError, match="backend must be one of auto, cpu, reference, flashinfer, got 'cuda'"):
        registry.backend("cuda")
    with pytest.raises(registry.BackendUnavailable, match="use 'cpu' or 'reference'"):
        registry.backend("flashinfer")


def test_without_a_compiler_auto_falls_back_with_one_warning_and_cpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(**options: object) -> None:
        raise registry.BackendUnavailable("The native CPU kernels could not be built: no C++ compiler found.")

    monkeypatch.setattr(registry, "_native", unavailable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert registry.backend("auto").name == "reference"
    assert len(caught) == 1 and "no C++ compiler" in str(caught[0].message)
    with pytest.raises(registry.BackendUnavailable, match="no C\\+\\+ compiler"):
        registry.backend("cpu")


@pytest.mark.skipif(not any(map(build.shutil.which, build.COMPILERS)), reason="no C++ compiler")
def test_the_native_backend_does_not_wait_for_torch_to_be_imported() -> None:
    script = "import sys; from anabranch.kernels import registry; registry.backend('cpu'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 0
