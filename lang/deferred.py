"""A `select` by a rule of the user's own: Python decides once the runtime has measured, and nobody waits for it.

What is added to the state meanwhile is held back here, in order, and sent right after the choice.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from anabranch.lang import backend as wire
from anabranch.lang import ir, meta
from anabranch.lang.pending import failure


class Undecided:
    """The end of a branch that waits for a choice. Takes what a branch takes that needs no answer at once.

    before    the branch, or the Undecided of an earlier select on it
    decided   the Scores, `best` being the rule's choice; done once the choice and all that was held back are sent
    """

    def __init__(
        self,
        before: "wire.BackendBranch | Undecided",
        select: ir.Select,
        bare: Future[Any] | None,
        timeout: float | None,
    ) -> None:
        self.before, self.select, self.bare = before, select, bare
        self.decided: Future[Any] = Future()
        self._held: list[Callable[[BaseException | None], None]] = []
        self._lock = threading.Lock()
        self._is_open = False
        self._error: BaseException | None = None
        self._measured = before.score(select.choices, "sum", append=False, timeout=timeout)
        self._missing = [f for f in (self._measured, bare) if f is not None]
        self.decided.add_done_callback(self._forward_cancel)
        for future in list(self._missing):
            future.add_done_callback(self._arrived)

    def append(self, segments: Sequence[wire.Segment]) -> None:
        self._later(lambda error: None if error else self.before.append(segments))

    def generate(self, sampling: wire.Sampling, on_text: Callable[[str], None] | None = None) -> Future[Any]:
        return self._ask(lambda: self.before.generate(sampling, on_text))

    def score(
        self, choices: Sequence[str], method: wire.Method, *, append: bool = True, timeout: float | None = None
    ) -> Future[Any]:
        return self._ask(lambda: self.before.score(choices, method, append=append, timeout=timeout))

    def _ask(self, send: Callable[[], Future[Any]]) -> Future[Any]:
        answer: Future[Any] = Future()

        def run(error: BaseException | None) -> None:
            if error is not None:
                _settle(answer, error=error)
            elif not answer.cancelled():
                sent = send()
                answer.add_done_callback(lambda _: sent.cancel() if answer.cancelled() else None)
                sent.add_done_callback(lambda _: _pass_on(sent, answer))

        self._later(run)
        return answer

    def _later(self, work: Callable[[BaseException | None], None]) -> None:
        with self._lock:
            if not self._is_open:
                self._held.append(work)
                return
        work(self._error)

    def _arrived(self, future: Future[Any]) -> None:
        with self._lock:
            self._missing.remove(future)
            if self._missing:
                return
        scores = None
        try:
            scores = self._decide()
        except BaseException as fault:
            self._error = fault
        self._send_held()
        _settle(self.decided, scores, self._error)

    def _decide(self) -> Any:
        """Apply the rule and send its choice. Runs on the runtime's thread."""
        for future in (self._measured, self.bare):
            if future is not None and (error := failure(future, "select")) is not None:
                raise error
        scores = self._measured.result(0)
        decision = meta.decide(self.select, scores, self.bare.result(0) if self.bare is not None else None)
        self.before.append([wire.Text(decision.decision)])
        return dataclasses.replace(scores, best=self.select.choices.index(decision.decision))

    def _send_held(self) -> None:
        """Send what was held back, in order, also what comes while that goes on; or tell it why not."""
        while True:
            with self._lock:
                if not self._held:
                    self._is_open = True
                    return
                held, self._held = self._held, []
            for work in held:
                try:
                    work(self._error)
                except BaseException as fault:  # the branch was closed meanwhile: what follows is told the same
                    self._error = self._error or fault

    def _forward_cancel(self, decided: Future[Any]) -> None:
        if decided.cancelled():
            self._measured.cancel()


def _pass_on(source: Future[Any], target: Future[Any]) -> None:
    if source.cancelled():
        target.cancel()
    elif (error := source.exception(0)) is not None:
        _settle(target, error=error)
    else:
        _settle(target, source.result(0))


def _settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:  # cancelled meanwhile
        pass
