"""A peer's process stands still when told to, and is gone when we are, however that happens."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.runtime.bench import children
from anabranch.runtime.bench.children import Child

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
FOREVER = [sys.executable, "-c", "import signal, sys\nprint('up', flush=True)\nsignal.pause()"]
STUBBORN = [sys.executable, "-c", "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\nwhile 1: signal.pause()"]


def wait_until_up(child: Child) -> None:
    assert child.process.stdout is not None
    assert child.process.stdout.readline() == b"up\n"


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("is_tied", [True, False])
def test_it_is_one_process_that_ends_when_told(is_tied: bool) -> None:
    child = Child(FOREVER, is_tied=is_tied, stdout=subprocess.PIPE)
    wait_until_up(child)
    assert child.is_alive
    child.end()
    child.end()
    assert not child.is_alive and child.process.returncode == -signal.SIGTERM


def test_one_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "END_TIMEOUT_S", 0.05)
    child = Child(STUBBORN, stdout=subprocess.PIPE)
    wait_until_up(child)
    child.end()
    assert child.process.returncode == -signal.SIGKILL


@linux
def test_a_paused_one_stands_still_and_can_be_resumed_or_ended() -> None:
    child = Child(FOREVER, stdout=subprocess.PIPE)
    wait_until_up(child)
    child.pause()
    assert os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT) is not None and state(child.pid) == "T"
    child.resume()
    assert os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT) is not None and state(child.pid) != "T"
    child.pause()
    child.end()
    assert not child.is_alive


@linux
@pytest.mark.parametrize("how", ["running", "paused"])
def test_it_does_not_outlive_a_parent_that_was_killed(how: str) -> None:
    script = f"""
import subprocess, sys
from anabranch.runtime.bench.children import Child
child = Child({FOREVER!r}, stdout=subprocess.PIPE)
child.process.stdout.readline()
if {how!r} == "paused":
    child.pause()
print(child.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([pidfd], [], [], 30)[0], "the child still runs"
    finally:
        os.close(pidfd)


def test_what_it_says_is_kept_in_its_log(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "print('hello')"], log=tmp_path / "log")
    child.process.wait()
    child.end()
    assert (tmp_path / "log").read_text() == "hello\n"
