"""All that the tokenizer process reads of a model: config, vocabulary, chat template. Never the weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers

from anabranch.runtime.tokenizer.gguf_vocabulary import adds_bos, gguf_tokenizer, unused_ids
from anabranch.runtime.tokenizer.token_bytes import UnsupportedTokenizer
from anabranch.runtime.tokenizer.vocabulary import Vocabulary, growth
from anabranch.runtime.worker.loading.checkpoint import find_gguf, from_gguf, read_config
from anabranch.runtime.worker.loading.config import ModelConfig
from anabranch.runtime.worker.loading.errors import refuse, shown
from anabranch.runtime.worker.loading.files import MAX_INDEX_BYTES, inside, read_bytes, read_json
from anabranch.runtime.worker.loading.gguf import GgufFile, read_gguf

MAX_TOKENIZER_CONFIG_BYTES = 16 << 20
MAX_GROWTH = 256  # times that a normalizer may lengthen text; published ones stay below 10
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelText:
    """`named_tokens` are the special tokens that templates may ask for, e.g. {"bos_token": "<s>"}."""

    config: ModelConfig
    vocabulary: Vocabulary
    template: str | None
    named_tokens: dict[str, str]
    warnings: tuple[str, ...] = ()


def open_model_text(path: str | Path, *, tokenizer: str | Path | None = None, chat_template: str | Path | None = None) -> ModelText:
    """Read the text side of a model directory or GGUF file; vocabulary and template from `tokenizer` instead, if given.

    chat_template  a Jinja file that replaces the model's
    Raises         CheckpointError
    """
    text = _open(Path(path), tokenizer)
    return text if chat_template is None else replace(text, template=_read_template(Path(chat_template)))


def _open(path: Path, tokenizer: str | Path | None) -> ModelText:
    gguf = _find(path)
    file = read_gguf(gguf) if gguf is not None else None
    config = from_gguf(file).config if file is not None else read_config(path)
    if tokenizer is None:
        return _from_gguf(file, config) if file is not None else _from_directory(path, config)
    other = Path(tokenizer)
    gguf = _find(other)
    return _from_directory(other, config) if gguf is None else _from_gguf(read_gguf(gguf, with_tensors=False), config)


def _find(path: Path) -> Path | None:
    if not path.exists():
        refuse(path, "does not exist")
    gguf = find_gguf(path)
    if gguf is None and not path.is_dir():
        refuse(path, "is not a model: give a directory with config.json and safetensors, or a .gguf file")
    return gguf


def _from_gguf(file: GgufFile, config: ModelConfig) -> ModelText:
    path, metadata = file.path, file.metadata
    tokenizer = gguf_tokenizer(path, metadata)
    ends = config.eos_token_ids
    vocabulary = _vocabulary(
        path, tokenizer, config, (), config.bos_token_id, ends, adds_bos=adds_bos(metadata), unused=unused_ids(metadata)
    )
    named = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        token = vocabulary.token(token_id) if isinstance(token_id, int) else None
        if token is not None:
            named[name] = token
    template = metadata.get("tokenizer.chat_template")
    return _model_text(config, vocabulary, template if isinstance(template, str) else None, named)


def _from_directory(path: Path, config: ModelConfig) -> ModelText:
    names = {entry.name for entry in path.iterdir()}
    if "tokenizer.json" not in names:
        found = sorted(names & {"tokenizer.model", "vocab.json", "tekken.json", "spiece.model"})
        have = f"it has {', '.join(found)}; " if found else ""
        make = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        refuse(path, f"has no tokenizer.json; {have}write one with transformers: {make}")
    settings: dict[str, Any] = {}
    if "tokenizer_config.json" in names:
        settings = read_json(inside(path, "tokenizer_config.json"), MAX_TOKENIZER_CONFIG_BYTES)
    tokenizer = _load_tokenizer(inside(path, "tokenizer.json"))
    named = {name: text for name in _NAMED if (text := _token_text(settings.get(name))) is not None}
    bos, ends = config.bos_token_id, list(config.eos_token_ids)
    if "bos_token" in named and tokenizer.token_to_id(named["bos_token"]) is not None:
        bos = tokenizer.token_to_id(named["bos_token"])
    end = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    if end is not None and end < config.vocab_size:
        ends.append(end)
    vocabulary = _vocabulary(path, tokenizer, config, named.values(), bos, ends, adds_bos=None)
    return _model_text(config, vocabulary, _template(path, names, settings), named)


def _load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    text = read_bytes(path, MAX_INDEX_BYTES)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(text)
    except Exception as fault:
        refuse(path, f"is not a usable tokenizer: {shown(str(fault), 200)}")
    except BaseException as fault:  # a panic of the native library is no Exception
        if type(fault).__name__ != "PanicException":
            raise
        refuse(path, "is not a usable tokenizer: the tokenizer library gave up on it")
    if (factor := growth(tokenizer)) > MAX_GROWTH:
        refuse(path, f"its normalizer makes text {factor:.3g} times longer; the limit is {MAX_GROWTH} times")
    return tokenizer


def _vocabulary(
    path: Path,
    tokenizer: tokenizers.Tokenizer,
    config: ModelConfig,
    names: Iterable[str],
    bos: int | None,
    ends: Iterable[int],
    *,
    adds_bos: bool | None,
    unused: Iterable[int] = (),
) -> Vocabulary:
    own = tokenizer.get_vocab_size(with_added_tokens=False)
    if own > config.vocab_size:
        refuse(path, f"the tokenizer has {own} tokens, the model {config.vocab_size}: they do not belong together")
    if bos is not None and bos >= config.vocab_size:
        refuse(path, f"the beginning-of-sequence token has id {bos}, but the model has {config.vocab_size} embeddings")
    try:
        return Vocabulary(
            tokenizer,
            vocab_size=config.vocab_size,
            special_names=names,
            bos_token_id=bos,
            eos_token_ids=ends,
            adds_bos=adds_bos,
            unused=unused,
        )
    except UnsupportedTokenizer as fault:
        refuse(path, f"the tokenizer cannot be used: {fault}")


def _model_text(
    config: ModelConfig, vocabulary: Vocabulary, template: str | None, named: Mapping[str, str]
) -> ModelText:
    warnings = []
    if vocabulary.unusable:
        listed = ", ".join(f"{token!r} ({i})" for token, i in list(vocabulary.unusable.items())[:5])
        warnings.append(
            f"{len(vocabulary.unusable)} tokens have ids beyond the model's {config.vocab_size} embeddings "
            f"and cannot be used: {listed}"
        )
    if not vocabulary.eos_token_ids:
        warnings.append("the model names no end-of-sequence token; generations end by length or stop strings only")
    return ModelText(config, vocabulary, template, dict(named), tuple(warnings))


def _token_text(value: object) -> str | None:
    """A token in tokenizer_config.json: its text, or an object with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_template(file: Path) -> str:
    try:
        return read_bytes(file, MAX_TOKENIZER_CONFIG_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        refuse(file, "is not UTF-8")


def _template(path: Path, names: set[str], settings: Mapping[str, Any]) -> str | None:
    """The default chat template, from where transformers looks for it: its own file first."""
    if "chat_template.jinja" in names:
        return _read_template(inside(path, "chat_template.jinja"))
    value: Any = settings.get("chat_template")
    if "chat_template.json" in names:
        value = read_json(inside(path, "chat_template.json"), MAX_TOKENIZER_CONFIG_BYTES).get("chat_template", value)
    if isinstance(value, list):
        by_name = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = by_name.get("default")
    if value is not None and not isinstance(value, str):
        refuse(path, f"field 'chat_template' is {shown(value)}; it must be a string")
    return value
