"""What a model's files are refused with."""

from os import PathLike
from pathlib import Path
from typing import Never

from anabranch.runtime.errors import AnabranchError


class CheckpointError(AnabranchError, ValueError):
    """A model's files are missing, damaged, hostile or not supported. Names file, field, value and limit."""


def refuse(path: str | PathLike[str], problem: str) -> Never:
    """Raise `CheckpointError` for one file; long values that came out of the file are cut."""
    raise CheckpointError(f"{Path(path)}: {problem}")


def shown(value: object, limit: int = 80) -> str:
    """A value from a file, safe to print: quoted, ASCII, cut."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = ascii(value) if not isinstance(value, str) else ascii(value[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "..."
