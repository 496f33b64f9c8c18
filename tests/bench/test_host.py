"""What else the machine does is seen, and what we do ourselves is not taken for it."""

import subprocess
import sys
import time

import pytest

from anabranch.runtime.bench import host
from anabranch.runtime.bench.host import Shares, Watch

needs_proc = pytest.mark.skipif(host.busy_seconds() is None, reason="this system has no /proc/stat")
SPIN = "import time\nwhile time.process_time() < 0.5: pass"


def spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_our_own_work_is_ours() -> None:
    with Watch() as watch:
        spin(0.3)
    assert watch.shares.ours > 0.1 and watch.shares.seconds >= 0.29


@needs_proc
def test_work_of_a_process_that_takes_part_is_theirs() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN + "\nprint('done', flush=True)\ninput()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        with Watch(lambda: [child.pid]) as watch:
            child.stdout.readline()
        child.kill()
    assert watch.shares.theirs * watch.shares.seconds > 0.4


@needs_proc
def test_work_of_a_process_that_nobody_named_is_that_of_others() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN + "\nprint('done', flush=True)\ninput()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        with Watch() as watch:
            child.stdout.readline()
        child.kill()
    assert watch.shares.others is not None and watch.shares.others * watch.shares.seconds > 0.3 and watch.shares.is_disturbed


def test_a_process_that_is_gone_used_nothing() -> None:
    assert host.process_seconds(2**22 + 1) == 0.0


def test_a_system_that_does_not_say_is_not_disturbed() -> None:
    assert host.busy_seconds("/nonexistent") is None
    assert not Shares(1.0, 0.5, 0.0, None).is_disturbed


def test_memory_is_touched_up_to_half_of_what_is_free_and_it_is_said() -> None:
    said: list[str] = []
    assert host.prepare_memory(64 << 20, 8 << 20, say=said.append) > 0
    assert "touched 0.00 GiB" in said[0] and len(said) == 1
