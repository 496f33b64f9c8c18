"""A generation as it arrives: ids to settled text, stops, logprobs. The whole answer is the fold of its deltas."""

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.runtime.messages import Delta, Finished, Generated, Produced, TokenLogprobs
from anabranch.runtime.tokenizer.detokenizer import Detokenizer
from anabranch.runtime.tokenizer.stops import StopMatch, StopMatcher, StopStrings
from anabranch.runtime.tokenizer.validation import Checked
from anabranch.runtime.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Ending:
    """What the end of a generation means for its branch: `rest` is text kept of a token that the stop begins in."""

    generated: Generated
    rest: str


class Answer:
    """One generation's assembler. `push` and `finish` return the deltas; `cut` says where a stop ended it."""

    def __init__(self, op: int, checked: Checked, vocabulary: Vocabulary, context: Sequence[int]) -> None:
        params = checked.params
        self.op, self.checked = op, checked
        self.token_ids: list[int] = []
        self.num_forced = 0
        self._detokenizer = Detokenizer(vocabulary, context, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(StopStrings(params.stop), checked.stop_regexes, keep_stop=params.keep_stop_text)
        self._text: list[str] = []  # emitted
        self._num_chars = 0
        self._num_sent = 0  # ids that went out with deltas
        self._logprobs: list[float | None] = []
        self._tops: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        self._whole: list[str] = []  # all text that the ids settled

    @property
    def match(self) -> StopMatch | None:
        return self._matcher.match

    def push(self, produced: Produced) -> Delta | None:
        """What these tokens settle. Nothing more is read once a stop has matched."""
        if self.match is not None:
            return None
        self.token_ids += produced.token_ids
        self.num_forced += produced.num_forced
        if produced.logprobs is not None:
            self._logprobs += produced.logprobs.logprobs
            self._tops += produced.logprobs.tops
        return self._emit(self._detokenizer.push(produced.token_ids))

    @property
    def num_kept(self) -> int:
        """Ids that lie wholly before the stop (or before its end, where the stop is kept)."""
        if self.match is None:
            return len(self.token_ids)
        end = self._end_of_text()
        count = self._detokenizer.tokens_for(end)
        return count - 1 if self._detokenizer.chars_before(count) > end else count

    def finish(self, finished: Finished) -> tuple[Delta | None, Ending]:
        """The last delta, and the whole."""
        had_match = self.match is not None
        delta = None
        if not had_match:
            delta = self._emit(self._detokenizer.finish())
            rest, _ = self._matcher.finish()
            delta = self._merge(delta, self._delta(rest))
        kept = self.num_kept
        tail = self._flush(kept)
        delta = self._merge(delta, tail)
        text, matched, reason = "".join(self._text), finished.matched_token_id, finished.reason
        left = ""
        if self.match is not None:
            matched, reason = self.match.stop, "stop"  # type: ignore[assignment]
            left = "".join(self._whole)[self._detokenizer.chars_before(kept) : self._end_of_text()]
        generated = Generated(
            self.op,
            text,
            tuple(self.token_ids[:kept]),
            reason,
            matched,
            finished.usage,
            self._logprobs_of(0, kept),
            finished.prompt_logprobs,
            self.checked.sampling.seed,
        )
        return delta, Ending(generated, left)

    def _end_of_text(self) -> int:
        assert self.match is not None, "only a matched stop ends the text early"
        return self.match.end if self.checked.params.keep_stop_text else self.match.begin

    def _emit(self, text: str) -> Delta | None:
        self._whole.append(text)
        settled, _ = self._matcher.push(text)
        return self._delta(settled)

    def _delta(self, text: str) -> Delta | None:
        """Text goes out with the ids that lie wholly within what is out."""
        if not text:
            return None
        self._text.append(text)
        self._num_chars += len(text)
        count = self._detokenizer.tokens_for(self._num_chars)
        if self._detokenizer.chars_before(count) > self._num_chars:
            count -= 1
        return self._ids_until(text, max(count, self._num_sent))

    def _ids_until(self, text: str, count: int) -> Delta:
        first, self._num_sent = self._num_sent, count
        return Delta(self.op, text, tuple(self.token_ids[first:count]), self._logprobs_of(first, count))

    def _flush(self, kept: int) -> Delta | None:
        return self._ids_until("", kept) if kept > self._num_sent else None

    def _logprobs_of(self, first: int, last: int) -> TokenLogprobs | None:
        if self.checked.params.num_top_logprobs is None:
            return None
        return TokenLogprobs(
            tuple(self.token_ids[first:last]), tuple(self._logprobs[first:last]), tuple(self._tops[first:last])
        )

    @staticmethod
    def _merge(a: Delta | None, b: Delta | None) -> Delta | None:
        if a is None or b is None:
            return a or b
        logprobs = None
        if a.logprobs is not None and b.logprobs is not None:
            logprobs = TokenLogprobs(
                a.logprobs.token_ids + b.logprobs.token_ids,
                a.logprobs.logprobs + b.logprobs.logprobs,
                a.logprobs.tops + b.logprobs.tops,
            )
        return Delta(a.op, a.text + b.text, a.token_ids + b.token_ids, logprobs)
