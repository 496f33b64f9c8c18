"""From produced tokens to text: the one assembler behind streams and whole answers. What it returns at the end is, by
construction, the fold of the deltas before.

Text is given out when it is settled: its bytes form characters, and it can no longer become part of a stop. Token ids are
given out with the text that they stand for. At a stop, the tokens wholly before it are kept; of a token that reaches into
it, the text before is returned as `remainder`, for the branch to tokenize anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from anabranch.runtime.messages import GenerateParams, Produced, TokenLogprobs
from anabranch.runtime.tokenizer.detokenizer import Detokenizer
from anabranch.runtime.tokenizer.stops import StopMatcher, StopStrings
from anabranch.runtime.tokenizer.validation import Stops
from anabranch.runtime.tokenizer.vocabulary import Vocabulary

stop_strings = lru_cache(maxsize=256)(StopStrings)  # the automaton is the same for every request with these stops


@dataclass(slots=True)
class Piece:
    """What a delta carries."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: TokenLogprobs | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids)


class _Text(Detokenizer):
    """Knows besides whether the last id completed its characters."""

    @property
    def is_complete(self) -> bool:
        return not self._decoder.getstate()[0]


@dataclass(slots=True)
class Whole:
    """A finished generation: the fold of its pieces.

    num_tokens   generated tokens that stay on the branch
    remainder    text after them that a stop cut out of a token
    num_forced   for each kept token, whether the grammar dictated it
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: TokenLogprobs | None
    matched: str | None
    num_tokens: int
    remainder: str
    forced: bytes


@dataclass(slots=True)
class Assembler:
    """One generation as it comes in. `push` until it returns a stop or the scheduler is done, then `finish`."""

    vocabulary: Vocabulary
    params: GenerateParams
    stops: Stops
    context: Sequence[int]  # the last tokens before the generation
    has_stopped: bool = False
    matched: str | None = None
    _ids: list[int] = field(default_factory=list)
    _forced: bytearray = field(default_factory=bytearray)
    _whole_ends: list[tuple[int, int]] = field(default_factory=list)  # (tokens, characters) where both are complete
    _logprobs: list[float | None] = field(default_factory=list)
    _tops: list[tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)  # as produced, held back or not
    _num_sent: int = 0  # tokens given out
    _num_chars: int = 0  # characters given out
    _unsearched: int = 0  # characters before min_tokens, where stops do not count
    _cut: int = -1  # where the text stops, in characters
    _settled: list[str] = field(default_factory=list)
    _detokenizer: _Text = field(init=False)
    _matcher: StopMatcher = field(init=False)

    def __post_init__(self) -> None:
        skip = self.params.skip_special_tokens
        self._detokenizer = _Text(self.vocabulary, self.context, skip_special_tokens=skip)
        strings = stop_strings(self.stops.strings)
        self._matcher = StopMatcher(strings, self.stops.regexes, keep_stop=self.params.keep_stop_text)

    def push(self, produced: Produced) -> Piece:
        """Take tokens; returns what is settled. Sets `has_stopped` when the text stops within them."""
        first_forced = len(produced.token_ids) - produced.num_forced
        settled = []
        self._take_logprobs(produced.logprobs)
        for i, token_id in enumerate(produced.token_ids):
            if self.has_stopped:
                break
            self._ids.append(token_id)
            self._forced.append(i >= first_forced)
            text = self._detokenizer.push((token_id,))
            settled.append(self._search(text))
            if self._detokenizer.is_complete:
                self._whole_ends.append((len(self._ids), self._detokenizer.chars_before(len(self._ids))))
        return self._give("".join(settled))

    def finish(self, num_tokens: int) -> tuple[Piece, Whole]:
        """The generation ended after `num_tokens`. Returns the last piece, and the whole."""
        settled = ""
        if not self.has_stopped:
            num_tokens = min(num_tokens, len(self._ids))
            settled = self._search(self._detokenizer.finish())
            if not self.has_stopped:
                more, match = self._matcher.finish()
                settled += more
                if match is not None:
                    self._stop(match.stop, match.end if self.params.keep_stop_text else match.begin)
        if self.has_stopped:
            num_tokens, chars = self._kept()
        piece = self._give(settled, num_tokens)
        text = "".join(self._settled)
        remainder = text[chars:] if self.has_stopped else ""
        whole = Whole(
            text, tuple(self._ids[:num_tokens]), self._run(0, num_tokens), self.matched, num_tokens, remainder,
            bytes(self._forced[:num_tokens]),
        )  # fmt: skip
        return piece, whole

    @property
    def num_kept(self) -> int:
        """Tokens that stay, once the text has stopped."""
        return self._kept()[0]

    def _search(self, text: str) -> str:
        if len(self._ids) < self.params.min_tokens:
            self._unsearched += len(text)
            return text
        settled, match = self._matcher.push(text)
        if match is not None:
            self._stop(match.stop, match.end if self.params.keep_stop_text else match.begin)
        return settled

    def _stop(self, matched: str, cut: int) -> None:
        self.has_stopped, self.matched = True, matched
        self._cut = self._unsearched + cut

    def _kept(self) -> tuple[int, int]:
        """The most tokens whose text is whole and ends at or before the cut, and its characters."""
        best = (0, 0)
        for tokens, chars in self._whole_ends:
            if chars > self._cut:
                break
            best = (tokens, chars)
        return best

    def _give(self, text: str, upto: int | None = None) -> Piece:
        """Text that is settled, with the ids whose text is wholly given out (at the end: all up to `upto`)."""
        self._settled.append(text)
        self._num_chars += len(text)
        first = self._num_sent
        if upto is None:
            upto = first
            for tokens, chars in reversed(self._whole_ends):
                if tokens <= first:
                    break
                if chars <= self._num_chars:
                    upto = tokens
                    break
        self._num_sent = max(first, upto)
        return Piece(text, tuple(self._ids[first : self._num_sent]), self._run(first, self._num_sent))

    def _take_logprobs(self, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None:
            self._logprobs += logprobs.logprobs
            self._tops += logprobs.tops

    def _run(self, first: int, last: int) -> TokenLogprobs | None:
        if self.params.num_top_logprobs is None:
            return None
        return TokenLogprobs(
            tuple(self._ids[first:last]), tuple(self._logprobs[first:last]), tuple(self._tops[first:last])
        )
