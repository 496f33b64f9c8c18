"""Every test gets a scripted backend of its own as the default one, and none may leave branches or threads behind."""

import gc
import threading
from collections.abc import Iterator

import pytest

from anabranch.lang import api as ab
from anabranch.lang import events
from anabranch.lang.testing import ScriptedBackend


@pytest.fixture
def backend() -> Iterator[ScriptedBackend]:
    backend = ScriptedBackend()
    yield from use(backend)


def use(backend: ScriptedBackend) -> Iterator[ScriptedBackend]:
    ab.set_default_backend(backend)
    yield backend
    ab.set_default_backend(None)
    assert not events.watched()


@pytest.fixture(autouse=True)
def no_program_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("anabranch-") and thread.name != "anabranch-branches":
            thread.join(5)
            assert not thread.is_alive(), f"thread left behind: {thread.name}"
