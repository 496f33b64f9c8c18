"""Real English prose for prompts: Python's own reference documentation, which every installation carries (PSF licence)."""

import random
from functools import cache

from anabranch.runtime.tokenizer.vocabulary import Vocabulary


@cache
def prose() -> str:
    """About 450 kB of English with code in it, the same on every machine with this Python version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class Texts:
    """Cuts passages of exact token length out of the prose. Passages of one `Texts` do not repeat: no accidental cache hits.

    seed   names the run: what runs on one engine must have seeds of its own, or it finds the other's text in the cache
    """

    def __init__(self, vocabulary: Vocabulary, seed: int | str) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._num_cut = 0

    def passage(self, num_tokens: int) -> str:
        """Text that tokenizes to `num_tokens` tokens, give or take one where the cut falls inside a word."""
        self._num_cut += 1
        text = prose()
        start = text.index(" ", self._random.randrange(len(text) // 2)) + 1  # a word's: passages that began alike would share a prefix
        word, _, rest = text[start : start + 8 * num_tokens + 64].partition(" ")
        excerpt = f"{word} ({self._random.randrange(10**6)}.{self._num_cut}) {rest}"
        ids = self._vocabulary.encode_plain(excerpt, at_start=True)
        assert len(ids) >= num_tokens, f"the excerpt has {len(ids)} tokens, {num_tokens} are needed"
        return b"".join(self._vocabulary.token_bytes(i) for i in ids[:num_tokens]).decode("utf-8", "ignore")
