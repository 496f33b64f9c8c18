"""The exact bytes behind each token, read off a tokenizer's decoder.

Two families cover the supported models: byte-level BPE, whose tokens spell bytes in printable stand-ins, and
SentencePiece style, whose tokens are text with a mark for the space, beside <0xNN> tokens for single bytes.
"""

import json
import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(ValueError):
    """The tokenizer decodes in a way that has no bytes per token. Names the step."""


def byte_stand_ins() -> list[str]:
    """What stands for each byte in byte-level vocabularies: itself where printable, others from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


_TO_BYTE = {stand_in: byte for byte, stand_in in enumerate(byte_stand_ins())}


class TokenDecoder:
    """bytes_of(token) for one tokenizer; `strip_left` is how many leading spaces a whole text loses."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.strip_left = 0
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = self._byte_fallback = False
        state: dict[str, Any] = {"type": "Fuse"}
        if tokenizer.decoder is not None:
            state = json.loads(tokenizer.decoder.__getstate__())
        for step in state["decoders"] if state["type"] == "Sequence" else [state]:
            self._add(step)

    def _add(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                self._replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                self._replacements.append((mark, " "))
                self.strip_left = 0 if scheme == "never" else 1
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                self.strip_left = start
            case _:
                raise UnsupportedTokenizer(f"decoder step {step.get('type')!r} is not supported")

    @property
    def covers_all_bytes(self) -> bool:
        """Whether every text has tokens that spell it, so that none is folded into an unknown token."""
        return self._byte_level or self._byte_fallback

    def bytes_of(self, token: str) -> bytes:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_level:
            return self._from_stand_ins(token)
        if self._byte_fallback and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(found[1], 16)])
        return token.encode()

    def _from_stand_ins(self, token: str) -> bytes:
        if token.isascii():  # ASCII stands for itself
            return token.encode()
        try:
            return bytes([_TO_BYTE[character] for character in token])
        except KeyError:  # a token added as text, with characters that stand for no byte
            return token.encode()
