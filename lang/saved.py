"""Finished runs on disk, one JSON line each, and how they read when they come back."""

import dataclasses
import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.lang.errors import UndefinedVariable

if TYPE_CHECKING:
    from anabranch.lang.state import State


class SavedState:
    """A finished run that was read back: variables, text and messages, as they were. Typed values are their JSON."""

    def __init__(self, line: dict[str, Any]) -> None:
        self._line = line
        self.ret_value = line.get("returned")

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __contains__(self, name: object) -> bool:
        return name in self._line["variables"]

    def get_var(self, name: str) -> Any:
        variables = self._line["variables"]
        if name not in variables:
            raise UndefinedVariable(name, list(variables))
        return variables[name]

    def get_meta_info(self, name: str) -> Any:
        self.get_var(name)
        return self._line["meta"].get(name)

    def variables(self) -> dict[str, Any]:
        return dict(self._line["variables"])

    def text(self) -> str:
        return str(self._line["text"])

    def messages(self) -> list[dict[str, str]]:
        return list(self._line["messages"])

    def error(self) -> None:
        return None

    def sync(self) -> "SavedState":
        return self

    def __repr__(self) -> str:
        return f"<SavedState {self.text()[:200]!r}>"


def save(path: Path, key: str, index: int, state: "State") -> None:
    """Append one line, whole or not at all as far as `load` is concerned."""
    line = {
        "key": key,
        "index": index,
        "variables": {name: as_json(value) for name, value in state.variables().items()},
        "meta": {name: as_json(state.get_meta_info(name)) for name in state._generated},
        "text": state.text(),
        "messages": state.messages(),
        "returned": as_json(state.ret_value),
    }
    text = json.dumps(line, ensure_ascii=False)
    with path.open("a+b") as file:
        # A line that a crash cut off must not swallow the next one.
        if file.tell() and not _ends_with_newline(file):
            file.write(b"\n")
        file.write(text.encode() + b"\n")


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")


def load(path: Path) -> dict[str, SavedState]:
    """Finished runs by key. A line that is cut off or is no JSON counts as not there: its item runs again."""
    if not path.exists():
        return {}
    found: dict[str, SavedState] = {}
    for raw in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(raw)
            found[line["key"]] = SavedState({"meta": {}, "messages": [], **line})
        except (ValueError, KeyError, TypeError):
            continue
    return found


def as_json(value: Any) -> Any:
    """The value as JSON can hold it; what it cannot hold becomes its repr."""
    if value is None or isinstance(value, str | int | float | bool):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, dict):
        return {str(k): as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [as_json(v) for v in value]
    if isinstance(value, enum.Enum):
        return as_json(value.value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return repr(value)
