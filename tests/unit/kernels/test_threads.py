"""The native thread pool, through a harness in C++ (tests/support/pool_harness.cpp), and across fork and exit."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.kernels import build

SUPPORT = Path(__file__).resolve().parents[2] / "support"
pytestmark = pytest.mark.skipif(not any(map(build.shutil.which, build.COMPILERS)), reason="no C++ compiler")


@pytest.fixture(scope="module")
def harness_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = tmp_path_factory.mktemp("sources")
    for path in (build.SOURCES / "threads.h", build.SOURCES / "threads.cpp", SUPPORT / "pool_harness.cpp"):
        (sources / path.name).write_bytes(path.read_bytes())
    return build.build(tmp_path_factory.mktemp("cache"), sources=sources)


@pytest.fixture(scope="module")
def harness(harness_path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(harness_path))


def test_every_task_runs_once_on_a_thread_of_its_own(harness: ctypes.CDLL) -> None:
    assert harness.harness_tasks() == 0


def test_results_are_seen_by_the_caller_also_after_the_workers_slept(harness: ctypes.CDLL) -> None:
    assert harness.harness_sleep() == 0


def test_a_loop_inside_a_task_runs_inline(harness: ctypes.CDLL) -> None:
    assert harness.harness_nested() == 0


def test_one_long_task_does_not_keep_the_others_from_being_done(harness: ctypes.CDLL) -> None:
    assert harness.harness_straggler() == 0


def test_callers_of_one_pool_take_turns(harness: ctypes.CDLL) -> None:
    assert harness.harness_lease() == 0


def test_several_pools_live_side_by_side(harness: ctypes.CDLL) -> None:
    assert harness.harness_pools() == 0


def test_stalling_barriers_switch_to_one_thread_for_a_while(harness: ctypes.CDLL) -> None:
    assert harness.harness_inflated() == 0


def test_the_number_of_threads_can_change_between_calls(harness: ctypes.CDLL) -> None:
    for num_threads in (1, 4, 2, 0):
        assert harness.anb_set_num_threads(num_threads) == max(1, num_threads) == harness.anb_num_threads()
        assert harness.harness_sum(100) == 4950


FORK = """
import ctypes, os, sys
lib = ctypes.CDLL(sys.argv[1])
lib.anb_set_num_threads(3)
assert lib.harness_sum(1000) == 499500
child = os.fork()
if child == 0:
    os._exit(0 if lib.harness_sum(1000) == 499500 and lib.anb_num_threads() == 3 else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert lib.harness_sum(1000) == 499500
print("done", flush=True)
"""


def test_a_forked_child_computes_and_the_interpreter_exits(harness_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", FORK, str(harness_path)], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
