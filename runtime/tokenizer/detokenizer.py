"""Ids to text as they come, so that the pieces joined are the text of the whole at every moment."""

import codecs
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from anabranch.runtime.tokenizer.vocabulary import Vocabulary


class Detokenizer:
    """The text that generated ids add after a context: text(context + ids) minus text(context).

    Bytes are held until they form a character; only `finish` gives up on one (U+FFFD). Where a family drops the space
    before a text's first word, that happens once per sequence: not again after a context that has text.
    """

    def __init__(
        self, vocabulary: Vocabulary, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._spaces_to_strip = vocabulary.strips_leading_space
        self._ends: list[int] = []  # of each pushed id: characters of the text that are settled after it
        self._length = 0
        self._context_is_cut = False  # inside a character
        self._take_context(context)

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that these ids settle."""
        pieces = []
        for token_id in token_ids:
            text = self._decode(token_id)
            self._length += len(text)
            self._ends.append(self._length)
            pieces.append(text)
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that never became complete, else nothing."""
        text = self._without_context(self._decoder.decode(b"", final=True))
        self._length += len(text)
        if text and self._ends:
            self._ends[-1] = self._length
        return text

    @property
    def num_tokens(self) -> int:
        return len(self._ends)

    def tokens_for(self, num_chars: int) -> int:
        """How many of the pushed ids it takes to have the first `num_chars` characters of the pushed text.

        The last of them may reach beyond; ids without text at the end are not counted. O(log n).
        """
        assert 0 <= num_chars <= self._length, f"{num_chars} is outside the text of {self._length} characters"
        return bisect_left(self._ends, num_chars) + 1 if num_chars else 0

    def chars_before(self, num_tokens: int) -> int:
        """How many characters the first `num_tokens` pushed ids settle."""
        return self._ends[num_tokens - 1] if num_tokens else 0

    def _decode(self, token_id: int) -> str:
        if self._skip_special and self._vocabulary.is_special(token_id):
            return ""
        text = self._without_context(self._decoder.decode(self._vocabulary.token_bytes(token_id)))
        while self._spaces_to_strip and text:
            if not text.startswith(" "):
                self._spaces_to_strip = 0
                break
            text = text[1:]
            self._spaces_to_strip -= 1
        return text

    def _take_context(self, context: Sequence[int]) -> None:
        """Only the end of the context matters: whether it has text, and the bytes of an incomplete character."""
        held: list[int] = []
        num_bytes = 0
        # A character has at most four bytes, so the last four bytes of text settle everything.
        for token_id in reversed(context):
            held.append(token_id)
            if not (self._skip_special and self._vocabulary.is_special(token_id)):
                num_bytes += len(self._vocabulary.token_bytes(token_id))
            if num_bytes >= 4 + self._spaces_to_strip:
                self._spaces_to_strip = 0
                break
        for token_id in reversed(held):
            self._decode(token_id)
        self._context_is_cut = bool(self._decoder.getstate()[0])

    def _without_context(self, text: str) -> str:
        """A character that the context left incomplete, and that stays so, was U+FFFD in the context's text already."""
        if self._context_is_cut and text:
            self._context_is_cut = False
            return text.removeprefix("\ufffd")
        return text
