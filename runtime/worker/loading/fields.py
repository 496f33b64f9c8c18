"""Typed, bounded access to the numbers of a config file."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabranch.runtime.worker.loading.errors import refuse, shown

_REQUIRED: Any = object()


class Fields:
    """The fields of one config; each read checks type and range, and refuses with file, field, value and limit."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def __contains__(self, name: str) -> bool:
        return self.values.get(self.prefix + name) is not None

    def raw(self, name: str) -> Any:
        return self.values.get(self.prefix + name)

    def refuse(self, name: str, problem: str) -> Any:
        refuse(self.path, f"field {self.prefix + name!r} {problem}")

    def integer(self, name: str, low: int, high: int, default: Any = _REQUIRED) -> Any:
        """An int in [low, high]; `default` (which may be None) if the field is absent or null."""
        value = self._get(name, default)
        if value is default and name not in self:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, f"is {shown(value)}; it must be an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: Any = _REQUIRED) -> Any:
        """A finite float in [low, high]."""
        value = self._get(name, default)
        if value is default and name not in self:
            return default
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            self.refuse(name, f"is {shown(value)}; it must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            self.refuse(name, f"is {shown(value)}; it must be true or false")
        return bool(value)

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._get(name, default)
        if value is default and name not in self:
            return default
        if not isinstance(value, str):
            self.refuse(name, f"is {shown(value)}; it must be a string")
        return value

    def integers(self, name: str, low: int, high: int, most: int) -> tuple[int, ...]:
        """An int, or a list of at most `most`; () if absent."""
        value = self.raw(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if len(values) > most or any(type(v) is not int or not low <= v <= high for v in values):
            self.refuse(name, f"is {shown(value)}; it must be one or up to {most} integers from {low} to {high}")
        return tuple(values)

    def section(self, name: str) -> "Fields | None":
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, f"is {shown(value)}; it must be an object")
        return Fields(self.path, value)

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        if value is not None:
            return value
        return self.refuse(name, "is missing") if default is _REQUIRED else default
