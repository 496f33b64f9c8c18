"""The wheel holds what the tree holds: a forgotten package-data pattern shows here, not at a user's first step."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = {".py", ".cpp", ".h", ".S", ".typed"}


@pytest.mark.slow
def test_wheel_and_tree_hold_the_same_files(tmp_path: Path) -> None:
    clean = tmp_path / "tree"  # a build in the checkout would leave a folder whose stale files the next one packs
    shutil.copytree(ROOT, clean, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(clean)],
        check=True,
        timeout=280,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("anabranch/") and not n.endswith("/")}
    tree = {f"anabranch/{p.name}" for p in (ROOT / "src/anabranch").iterdir() if p.is_file() and p.suffix in SHIPPED}
    for layer in ("radix", "kernels", "runtime", "lang"):
        tree |= {f"anabranch/{p.relative_to(ROOT)}" for p in (ROOT / layer).rglob("*") if p.suffix in SHIPPED}
    assert packed == tree, f"only in the tree: {sorted(tree - packed)}; only in the wheel: {sorted(packed - tree)}"
