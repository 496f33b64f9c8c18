"""Small tokenizers of each family that models use, made by plain code: no downloads, the same bytes every time."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Alternating turns, no system role, content trimmed, the template itself writes the BOS.
INST = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}"
    "{% endfor %}"
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog. How many apples does she have left after the market? "
    "A branch shares the pages of its parent; the first write copies one page. She said: it's fine, we'll see. "
    "Once upon a time there was a river that left its bed and came back to it further down the valley. "
    "Think step by step. The answer is 42. Let us count again: one, two, three, four, five, six, seven, eight, nine, "
    "ten. "
    "def main(): return {'name': 'value', 'list': [1, 2, 3], 'flag': true, 'text': \"a b c\"} # comment\n"
    "Question: what is the capital of France?\n"
    "Answer: the capital of France is Paris, and the river there is the Seine.\n"
    "Über den Fluß führt eine alte Brücke. Où est la bibliothèque? El niño comió una manzana.\n"
)

DUPLICATE = "\ue000"  # a mark that decoding removes: "word", "word\ue000" ... are several ids with one text


@dataclass
class TokenizerFiles:
    """A tokenizer and its `tokenizer_config.json`, as a model directory holds them."""

    tokenizer: tokenizers.Tokenizer
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def id(self, token: str) -> int:
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None, f"no token {token!r}"
        return token_id

    @property
    def eos_id(self) -> int:
        return self.id(self.config["eos_token"])

    def save(self, directory: Path) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps(self.config, indent=1, ensure_ascii=False))


def _special(names: Iterable[str]) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def _config(*, bos: str | None, eos: str, template: str | None, add_bos: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    if bos is not None:
        config["bos_token"] = bos
    if template is not None:
        config["chat_template"] = template
    return config


def byte_bpe_tokenizer(
    vocab_size: int = 512, *, template: str | None = CHATML, add_bos: bool = False, corpus: str = CORPUS
) -> TokenizerFiles:
    """Byte-level BPE like GPT-2's and SmolLM's: ids 0, 1, 2 are <|endoftext|>, <|im_start|>, <|im_end|>, then bytes.

    With `add_bos` its post-processor puts <|endoftext|> first, as Llama 3's does.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_special(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus], trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    files = TokenizerFiles(
        tokenizer, _config(bos="<|endoftext|>", eos="<|im_end|>", template=template, add_bos=add_bos)
    )
    assert files.vocab_size == vocab_size, f"the corpus yields only {files.vocab_size} tokens of {vocab_size}"
    return files


def sentencepiece_style_tokenizer(
    vocab_size: int = 512, *, template: str | None = INST, legacy: bool = True
) -> TokenizerFiles:
    """SentencePiece BPE like Llama 2's: <unk> <s> </s>, 256 byte-fallback tokens, then pieces with the space mark.

    `legacy` True: the normalizer prepends and replaces spaces (Llama 2). False: a Metaspace pre-tokenizer does.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_special(["<unk>", "<s>", "</s>"]) + fallback, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS.split("\n"), trainer)
    tokenizer = _without_added(tokenizer, set(fallback))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    files = TokenizerFiles(tokenizer, _config(bos="<s>", eos="</s>", template=template, add_bos=True))
    assert files.vocab_size == vocab_size, f"the corpus yields only {files.vocab_size} tokens of {vocab_size}"
    return files


def _without_added(tokenizer: tokenizers.Tokenizer, names: set[str]) -> tokenizers.Tokenizer:
    """The trainer makes its special tokens 'added' ones; byte-fallback tokens are ordinary vocabulary entries."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in names]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def puppet_tokenizer(
    pieces: Sequence[str | bytes] = (), *, template: str | None = CHATML, vocab_size: int | None = None
) -> tuple[TokenizerFiles, list[int]]:
    """A tokenizer without merges in which each of `pieces` is one id of its own, also when pieces repeat, and its ids.

    Prompts are encoded byte by byte. A piece that is the name of a special token stands for that token. Pieces may be
    incomplete UTF-8 (bytes). Padded up to `vocab_size` with unused tokens if given.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = byte_alphabet()
    vocab = {name: i for i, name in enumerate(special)}
    for character in alphabet:
        vocab[character] = len(vocab)
    ids = []
    for piece in pieces:
        if piece in special:
            ids.append(vocab[str(piece)])
            continue
        data = piece.encode() if isinstance(piece, str) else piece
        name = "".join(alphabet[byte] for byte in data) + DUPLICATE
        while name in vocab:
            name += DUPLICATE
        ids.append(vocab.setdefault(name, len(vocab)))
    while vocab_size is not None and len(vocab) < vocab_size:
        vocab[f"unused{len(vocab)}"] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(DUPLICATE, ""), decoders.ByteLevel()])
    tokenizer.add_special_tokens(_special(special))
    return TokenizerFiles(
        tokenizer, _config(bos="<|endoftext|>", eos="<|im_end|>", template=template, add_bos=False)
    ), ids


def byte_alphabet() -> list[str]:
    """The stand-in of each byte in byte-level BPE vocabularies: itself where printable, else from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    extra = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(256)]
