"""What can go wrong in a program, drawn as a tree.

```
ProgramError
├── StateClosed          an operation on a state that was joined, dropped or closed
├── TurnError            a turn opened inside another, or closed without being open
├── Cancelled            the operation, the branch or the program was cancelled
├── WouldBlock           a blocking read inside a running `async def` program
├── Unsupported          a feature that exists elsewhere and not here; names the way out
├── UndefinedVariable    a name that the state does not have (also a KeyError)
└── TypedValueError      generated text that is not a value of the asked type (also a ValueError)
BranchErrors             several branches failed at a join; an ExceptionGroup
BatchErrors              several items of a batch failed; an ExceptionGroup
```
What the runtime refuses or loses arrives as the runtime's own exception, unchanged: it is the first cause.
Time limits raise the built-in `TimeoutError`.
"""

from collections.abc import Sequence
from typing import Any


class ProgramError(Exception):
    """Base of what the language raises."""


class StateClosed(ProgramError):
    pass


class TurnError(ProgramError):
    pass


class Cancelled(ProgramError):
    pass


class WouldBlock(ProgramError):
    pass


class Unsupported(ProgramError):
    pass


class UndefinedVariable(ProgramError, KeyError):
    def __init__(self, name: str, known: Sequence[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(name)

    def __str__(self) -> str:
        known = ", ".join(repr(k) for k in self.known) or "none"
        return f"the state has no variable {self.name!r}; it has: {known}"


class TypedValueError(ProgramError, ValueError):
    """The generated text is no value of the type that was asked for. `text` holds it."""

    def __init__(self, message: str, text: str) -> None:
        self.text = text
        super().__init__(message)


class BranchErrors(ExceptionGroup):
    """Failures of several branches, at a join. `branches[i]` is the index of the branch that `exceptions[i]` ended.

    What the other branches produced is kept: their states stay readable, and gathered lists hold None for the failed
    ones.
    """

    branches: tuple[int, ...] = ()

    @classmethod
    def of(cls, failures: Sequence[tuple[int, Exception]], width: int) -> "BranchErrors":
        for index, error in failures:
            note = f"in branch {index} of {width}"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        told = "; ".join(f"branch {i}: {type(e).__name__}: {e}" for i, e in failures)
        group = cls(f"{len(failures)} of {width} branches failed ({told})", [e for _, e in failures])
        group.branches = tuple(i for i, _ in failures)
        return group

    def derive(self, excs: Sequence[Any]) -> "BranchErrors":  # type: ignore[override]
        return BranchErrors(self.message, excs)


class BatchErrors(ExceptionGroup):
    """Failures of a batch run with on_error="raise". `results` holds everything, in order, failures included."""

    results: tuple[Any, ...] = ()

    @classmethod
    def of(cls, failures: Sequence[Any], results: Sequence[Any]) -> "BatchErrors":
        errors = [f.exception for f in failures if isinstance(f.exception, Exception)]
        for failure in failures:
            failure.exception.add_note(f"in item {failure.index} of the batch")
        group = cls(f"{len(failures)} of {len(results)} items failed", errors)
        group.results = tuple(results)
        return group

    def derive(self, excs: Sequence[Any]) -> "BatchErrors":  # type: ignore[override]
        return BatchErrors(self.message, excs)
