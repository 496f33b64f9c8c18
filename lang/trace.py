"""`with ab.trace("file.json")`: a timeline of all branches, for ui.perfetto.dev or chrome://tracing."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from anabranch.lang import events


class Trace:
    """Collects what programs do while it is open and writes the file when it closes, also after an error.

    Each run is a process, each branch a thread of it, each operation a slice with its cost; arrows lead from a fork
    to its children. Times are microseconds since the trace began.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.events: list[events.Event] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Trace":
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"the folder of the trace file {self.path} does not exist")
        events.add_observer(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        events.remove_observer(self._record)
        self.path.write_text(json.dumps(self.chrome(), ensure_ascii=False), encoding="utf-8")

    def _record(self, event: events.Event) -> None:
        with self._lock:
            self.events.append(event)

    def chrome(self) -> dict[str, Any]:
        """The events in the Chrome trace format."""
        with self._lock:
            recorded = list(self.events)
        out: list[dict[str, Any]] = []
        began: dict[tuple[int, int], events.Event] = {}
        first = recorded[0].at if recorded else 0.0
        for event in recorded:
            at = round((event.at - first) * 1e6, 1)
            place = {"pid": event.program, "tid": event.branch}
            match event.kind:
                case "open":
                    out += _names(event, place)
                case "start":
                    began[event.program, event.op] = event
                case "finish":
                    start = began.pop((event.program, event.op), event)
                    out.append(_slice(event, start, place, first))
                case "fork":
                    out += _arrows(event, place, at)
                case _:
                    args = dict(event.data)
                    out.append(
                        {"name": event.kind, "ph": "i", "s": "t", "ts": at, "cat": "branch", "args": args, **place}
                    )
        for start in began.values():  # still running when the trace was closed
            end = events.Event(
                "finish", start.program, start.branch, start.name, start.op, recorded[-1].at, {"unfinished": True}
            )
            out.append(_slice(end, start, {"pid": start.program, "tid": start.branch}, first))
        return {"traceEvents": out, "displayTimeUnit": "ms"}


def _names(event: events.Event, place: dict[str, int]) -> list[dict[str, Any]]:
    path = event.data["path"]
    named = [{"name": "thread_name", "ph": "M", "args": {"name": f"branch {list(path)}" if path else "main"}, **place}]
    if not path:
        named.append({"name": "process_name", "ph": "M", "args": {"name": event.name or "program"}, **place})
    return named


def _slice(end: events.Event, start: events.Event, place: dict[str, int], first: float) -> dict[str, Any]:
    return {
        "name": end.name,
        "cat": "op",
        "ph": "X",
        "ts": round((start.at - first) * 1e6, 1),
        "dur": round((end.at - start.at) * 1e6, 1),
        "args": dict(end.data),
        **place,
    }


def _arrows(event: events.Event, place: dict[str, int], at: float) -> list[dict[str, Any]]:
    arrows: list[dict[str, Any]] = [
        {"name": "fork", "ph": "i", "s": "t", "ts": at, "cat": "branch", "args": dict(event.data), **place}
    ]
    for child in event.data["children"]:
        common = {"name": "fork", "cat": "fork", "id": child, "ts": at, "pid": event.program}
        arrows.append({**common, "ph": "s", "tid": event.branch})
        arrows.append({**common, "ph": "f", "bp": "e", "tid": child})
    return arrows


def trace(path: str | os.PathLike[str]) -> Trace:
    """`with ab.trace("file.json"): ...` records every program that runs inside, and writes a trace for
    ui.perfetto.dev.
    """
    return Trace(path)
