"""A tokenizer from the metadata of a GGUF file, equal to the one its model was published with.

`tokenizer.ggml.pre` names a splitting rule; the rules are those in the original `tokenizer.json` files of these models.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from anabranch.runtime.worker.loading.errors import refuse, shown

MAX_TOKENS = 1 << 22
MAX_TOKEN_CHARS = 4096

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SPLITS = {
    "gpt-2": (),
    "smollm": ("digits",),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "default": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "phi-2": "gpt-2", "gpt2": "gpt-2"}


def gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Raises CheckpointError if the vocabulary is damaged or of a kind that is not supported."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        refuse(path, "field 'tokenizer.ggml.tokens' is missing; the file has no vocabulary")
    if len(tokens) > MAX_TOKENS or max(map(len, tokens)) > MAX_TOKEN_CHARS:
        refuse(path, f"the vocabulary exceeds {MAX_TOKENS} tokens or {MAX_TOKEN_CHARS} characters in one")
    kinds = _column(path, metadata, "token_type", len(tokens))
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer = _byte_level(path, metadata, tokens)
        case "llama":
            tokenizer = _sentencepiece(path, metadata, tokens, kinds)
        case other:
            refuse(path, f"field 'tokenizer.ggml.model' is {shown(other)}; supported are gpt2 and llama")
    if kinds is not None:
        control = [tokens[i] for i, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN) and tokens[i]]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        user = [tokens[i] for i, kind in enumerate(kinds) if kind == _USER and tokens[i]]
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])
    return tokenizer


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a BOS goes before plain text: as the file says, or as its kind of tokenizer usually does."""
    said = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(said, bool):
        return said
    pre = metadata.get("tokenizer.ggml.pre")
    return metadata.get("tokenizer.ggml.model") == "llama" or _SAME.get(str(pre), pre) == "llama-bpe"


def unused_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that the file calls unused: rows of the embedding that only fill it up."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    return [] if kinds is None else [i for i, kind in enumerate(kinds.tolist()) if kind == _UNUSED]


def _column(path: Path, metadata: Mapping[str, Any], name: str, length: int) -> list[Any] | None:
    """A per-token array of numbers as a list."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return None
    if not hasattr(values, "tolist") or len(values) != length:
        refuse(path, f"field 'tokenizer.ggml.{name}' is not an array of {length} numbers, one per token")
    return list(values.tolist())


def _index(path: Path, tokens: list[str]) -> dict[str, int]:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        refuse(path, f"the vocabulary has the token {shown(twice)} twice")
    return vocab


def _byte_level(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    pre = _SAME.get(pre, pre)
    if pre not in _SPLITS:
        refuse(path, f"field 'tokenizer.ggml.pre' is {shown(pre)}; supported are {', '.join((*_SPLITS, *_SAME))}")
    vocab = _index(path, tokens)
    merges = _merges(path, metadata, vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    for split in _SPLITS[pre]:
        digits = split == "digits"
        steps.append(pre_tokenizers.Digits(True) if digits else pre_tokenizers.Split(Regex(split), "isolated"))
    own_regex = pre in ("gpt-2", "smollm")
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(path: Path, metadata: Mapping[str, Any], vocab: dict[str, int]) -> list[tuple[str, str]]:
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        refuse(path, "field 'tokenizer.ggml.merges' is missing; a gpt2 vocabulary needs it")
    merges = []
    for line in lines:
        left, space, right = str(line).partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            refuse(
                path, f"field 'tokenizer.ggml.merges' has {shown(line)}, which is no pair of tokens that join to one"
            )
        merges.append((left, right))
    return merges


def _sentencepiece(
    path: Path, metadata: Mapping[str, Any], tokens: list[str], kinds: list[Any] | None
) -> tokenizers.Tokenizer:
    scores = _column(path, metadata, "scores", len(tokens))
    if scores is None or kinds is None:
        missing = "scores" if scores is None else "token_type"
        refuse(path, f"field 'tokenizer.ggml.{missing}' is missing; a llama vocabulary needs it")
    vocab = _index(path, tokens)
    ordinary = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (_NORMAL, _USER)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_from_scores(vocab, scores, ordinary)
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=_BYTE in kinds, unk_token=unknown, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    with_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    prefix: list[Any] = [normalizers.Prepend("▁")] if with_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if with_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float], ordinary: set[str]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose piece scores highest: merges in the order of the score of their result.

    Among ways to make one piece, that with the smaller ids comes first.
    """
    found = []
    for piece in ordinary:
        rank = -scores[vocab[piece]]
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                found.append((rank, vocab[piece], left, right, piece[:cut], piece[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]
