"""What happens in programs, for whoever watches: traces, live displays, progress. Costs one check when nobody does."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["open", "start", "finish", "fork", "join", "rollback", "close"]


@dataclass(frozen=True, slots=True)
class Event:
    """`branch` is the record's id, unique in this process; `op` pairs a finish with its start."""

    kind: Kind
    program: int
    branch: int
    name: str = ""
    op: int = 0
    at: float = field(default_factory=time.perf_counter)
    data: Mapping[str, Any] = field(default_factory=dict)


Observer = Callable[[Event], None]
_observers: tuple[Observer, ...] = ()


def watched() -> bool:
    return bool(_observers)


def add_observer(observer: Observer) -> None:
    global _observers
    _observers = (*_observers, observer)


def remove_observer(observer: Observer) -> None:
    global _observers
    _observers = tuple(o for o in _observers if o != observer)


def emit(event: Event) -> None:
    """Tell every observer. Called from program threads and from the runtime's; observers must not block."""
    for observer in _observers:
        observer(event)
