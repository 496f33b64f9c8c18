"""Text to token ids and ids to bytes, for every tokenizer family that the supported models use.

Plain text never becomes a special token; control text may. Around that difference stands one rule: text between two
special tokens is tokenized as one piece, whoever wrote which part of it, so ids equal those of the whole rendered
prompt.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tokenizers

from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.tokenizer.token_bytes import TokenDecoder


class VocabularyError(InvalidRequest):
    """A text or token id that this vocabulary cannot take. Names it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt. Only in a `control` part are special tokens recognised."""

    text: str
    control: bool = False


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What a tokenizer puts before a text of its own accord (SentencePiece's dummy space), and when."""

    text: str
    unless_space: bool  # not before a text that begins with a space already
    each: bool  # also after a special token, not only at the very start


class Vocabulary:
    """One model's tokens.

    vocab_size       rows of the embedding; ids are below it
    num_tokens       1 + the highest id below vocab_size that has a token; ids from there on are padding, as are those that
                     the model's files call unused
    bos_token_id     or None; `adds_bos` says whether the model expects it before plain text
    eos_token_ids    ids that end a generation
    unusable         tokens whose id has no embedding, by text; a text that needs one is refused
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        vocab_size: int | None = None,
        special_names: Iterable[str] = (),
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        adds_bos: bool | None = None,
        unused: Iterable[int] = (),
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        missing = [name for name in special_names if name not in known and tokenizer.token_to_id(name) is not None]
        tokenizer.add_special_tokens(missing)
        tokens = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = vocab_size if vocab_size is not None else max(tokens) + 1
        without = frozenset(unused)
        self._tokens = {i: token for i, token in tokens.items() if i < self.vocab_size and i not in without}
        self.num_tokens = max(self._tokens) + 1
        self.unusable = {token: i for i, token in tokens.items() if i >= self.vocab_size}
        self._decoder = TokenDecoder(tokenizer)
        self._bytes = [self._decoder.bytes_of(self._tokens.get(i, "")) for i in range(self.num_tokens)]
        self.max_token_bytes = max(map(len, self._bytes))
        self.strips_leading_space = self._decoder.strip_left
        self.special = _special_tokens(tokenizer)
        self._special_ids = frozenset(self.special.values())
        self._finder, self._flags = _special_finder(tokenizer, self.special)
        expected = _leading_id(tokenizer)
        self.bos_token_id = bos_token_id if expected is None else expected
        self.adds_bos = expected is not None if adds_bos is None else adds_bos and self.bos_token_id is not None
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._shrink = _most_shrinking(tokenizer) if self._decoder.covers_all_bytes else 0
        self._prefix = _take_prefix(tokenizer)
        tokenizer.encode_special_tokens = True  # the native matcher never sees them: we find them ourselves
        self._tokenizer = tokenizer

    # ---------------------------------------------------------------- text to ids

    def encode_plain(self, text: str, *, at_start: bool = False) -> list[int]:
        """Ids of text in which nothing is special. `at_start`: it begins the sequence (some families then add a space).

        Raises VocabularyError for text that is not Unicode, or that needs a token without an embedding.
        """
        return self.encode((Part(text),), at_start=at_start)

    def encode_control(self, text: str, *, at_start: bool = False) -> list[int]:
        """Ids of text in which special tokens are recognised. No BOS is added."""
        return self.encode((Part(text, control=True),), at_start=at_start)

    def encode(self, parts: Sequence[Part], *, at_start: bool = False, previous: int | None = None) -> list[int]:
        """Ids of adjacent parts. `previous` is the id before them, if there is one and it is known.

        Raises VocabularyError. Cost linear in the text.
        """
        ids: list[int] = []
        fresh, after_special = at_start, previous is not None and previous in self._special_ids
        for piece in self._pieces(parts):
            if isinstance(piece, int):
                ids.append(piece)
                fresh, after_special = False, True
            elif piece:
                ids += self._encode_piece(self._prefixed(piece, fresh, after_special))
                fresh, after_special = False, False
        self._check_embeddings(ids)
        return ids

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, without tokenizing it: to refuse huge texts at once.

        0 where the tokenizer may drop or fold text, so that nothing can be said.
        """
        if not self._shrink:
            return 0
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return -(-num_bytes // (self.max_token_bytes * self._shrink))

    def _pieces(self, parts: Sequence[Part]) -> list[str | int]:
        """Special ids, and the texts between them."""
        pieces: list[str | int] = [""]
        for part in parts:
            at = 0
            for found in self._finder.finditer(part.text) if part.control and self._finder else ():
                pieces[-1] = str(pieces[-1]) + part.text[at : found.start()]
                pieces += [self.special[found[0]], ""]
                at = found.end()
            pieces[-1] = str(pieces[-1]) + part.text[at:]
        for i in range(1, len(pieces), 2):
            left, right = self._flags[pieces[i]]  # type: ignore[index]  # odd entries are ids
            if left:
                pieces[i - 1] = str(pieces[i - 1]).rstrip()
            if right:
                pieces[i + 1] = str(pieces[i + 1]).lstrip()
        return pieces

    def _prefixed(self, text: str, fresh: bool, after_special: bool) -> str:
        prefix = self._prefix
        if prefix is None or not (fresh or (after_special and prefix.each)):
            return text
        if prefix.unless_space and text.startswith((" ", prefix.text)):
            return text
        return prefix.text + text

    def _encode_piece(self, text: str) -> list[int]:
        """Ids of text between special tokens.

        Where the tokenizer's own model makes a special token of plain text (unigram models can), the text is cut inside it
        and its parts are tokenized apart.
        """
        ids: list[int] = []
        waiting = [text]
        while waiting:
            piece = waiting.pop()
            try:
                encoding = self._tokenizer.encode(piece, add_special_tokens=False)
            except TypeError:
                raise VocabularyError("the text holds half of a surrogate pair; it is not valid Unicode") from None
            except BaseException as fault:  # a panic of the native library (a pattern that gives up) is no Exception
                if type(fault).__name__ != "PanicException":
                    raise
                raise VocabularyError("the model's tokenizer gave up on this text: a pattern of it takes too long there") from None
            cuts = [] if self._special_ids.isdisjoint(encoding.ids) else self._middles_of_special(encoding)
            if cuts:
                waiting += [piece[a:b] for a, b in pairwise([0, *cuts, len(piece)])][::-1]
            else:
                ids += encoding.ids
        return ids

    def _middles_of_special(self, encoding: tokenizers.Encoding) -> list[int]:
        return [
            (begin + end) // 2
            for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in self._special_ids and token_id != self._unknown_id and end - begin > 1
        ]

    @property
    def _unknown_id(self) -> int | None:
        name = getattr(self._tokenizer.model, "unk_token", None)
        return self._tokenizer.token_to_id(name) if name else None

    def _check_embeddings(self, ids: list[int]) -> None:
        if ids and self.unusable and max(ids) >= self.vocab_size:
            bad = max(ids)
            token = self._tokenizer.id_to_token(bad)
            raise VocabularyError(
                f"the text needs token {token!r} with id {bad}, but the model has only {self.vocab_size} embeddings"
            )

    # ---------------------------------------------------------------- ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, in the middle of a text; b"" for an id without a token."""
        return self._bytes[token_id] if token_id < self.num_tokens else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own name of an id, e.g. "Ġthe"; None if it has no token."""
        return self._tokens.get(token_id)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are no UTF-8 become U+FFFD."""
        kept = [i for i in ids if not (skip_special_tokens and i in self._special_ids)]
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text[_leading_spaces(text, self.strips_leading_space) :]

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raises VocabularyError naming the first id that is not a token of this model."""
        for token_id in ids:
            if token_id not in self._tokens:
                raise VocabularyError(
                    f"token id {token_id} is not in the vocabulary (ids 0 to {self.num_tokens - 1}, "
                    f"of {self.vocab_size} embeddings)",
                    code="invalid_token_id",
                )


def _leading_spaces(text: str, limit: int) -> int:
    return min(limit, len(text) - len(text.lstrip(" ")))


def _special_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    return {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special and t.content}


def _special_finder(
    tokenizer: tokenizers.Tokenizer, special: dict[str, int]
) -> tuple[re.Pattern[str] | None, dict[int, tuple[bool, bool]]]:
    """A pattern that finds special tokens, leftmost, longest; and which swallow the white space on each side."""
    added = tokenizer.get_added_tokens_decoder()
    flags = {i: (added[i].lstrip, added[i].rstrip) for i in special.values()}
    if not special:
        return None, flags

    def pattern(name: str) -> str:
        alone = added[special[name]].single_word
        return rf"(?<!\w){re.escape(name)}(?!\w)" if alone else re.escape(name)

    return re.compile("|".join(pattern(name) for name in sorted(special, key=len, reverse=True))), flags


def _leading_id(tokenizer: tokenizers.Tokenizer) -> int | None:
    """The one id that the post-processor puts before a text, if it does."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    return full[0] if len(full) > len(plain) and full[1 : 1 + len(plain)] == plain else None


def _state(component: Any) -> dict[str, Any]:
    return json.loads(component.__getstate__()) if component is not None else {}


def _most_shrinking(tokenizer: tokenizers.Tokenizer) -> int:
    """By which factor normalization can make UTF-8 shorter; 0 for steps of which nothing is known."""
    factor = 1
    for step in _steps(tokenizer.normalizer, "normalizers"):
        match step:
            case {"type": "NFC"}:
                factor = 4  # a base and three marks may become one character
            case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case _:
                return 0
    for step in _steps(tokenizer.pre_tokenizer, "pretokenizers"):
        if step["type"] not in ("ByteLevel", "Metaspace", "Digits", "Split") or step.get("behavior") == "Removed":
            return 0
    return factor


def growth(tokenizer: tokenizers.Tokenizer) -> float:
    """By which factor the replacements of a normalizer can make text longer, at most; other steps add little."""
    factor, steps = 1.0, _steps(tokenizer.normalizer, "normalizers")
    while steps:
        step = steps.pop()
        steps += step.get("normalizers", [])  # a sequence in a sequence
        if step["type"] == "Replace":
            replaced = len(step["pattern"].get("String", "")) or 1  # a regular expression may match one character
            factor *= max(1.0, len(step["content"]) / replaced)
    return factor


def _steps(component: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as it serializes itself."""
    state = _state(component)
    return list(state.get(name, [state])) if state else []


def _take_prefix(tokenizer: tokenizers.Tokenizer) -> _Prefix | None:
    """Switch off the tokenizer's own prefix and return it, so that `Vocabulary` decides when it applies."""
    steps = _steps(tokenizer.normalizer, "normalizers")
    for step in steps:
        if step["type"] == "Prepend":
            rest = [other for other in steps if other is not step]
            replacement = tokenizers.normalizers.Sequence([])
            replacement.__setstate__(json.dumps({"type": "Sequence", "normalizers": rest}).encode())
            tokenizer.normalizer = replacement
            return _Prefix(step["prepend"], unless_space=False, each=True)
    splits = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    step = splits[0] if splits else {}
    prefix = None
    if step.get("type") == "Metaspace" and step["prepend_scheme"] != "never":
        prefix = _Prefix(step["replacement"], unless_space=True, each=step["prepend_scheme"] == "always")
        step["prepend_scheme"] = "never"
    elif step.get("type") == "ByteLevel" and step["add_prefix_space"]:
        prefix = _Prefix(" ", unless_space=True, each=True)
        step["add_prefix_space"] = False
    if prefix is not None:
        replaced = tokenizers.pre_tokenizers.Sequence([])
        replaced.__setstate__(json.dumps({"type": "Sequence", "pretokenizers": splits}).encode())
        tokenizer.pre_tokenizer = replaced
    return prefix
