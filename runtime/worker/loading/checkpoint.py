"""A model's weights and config from a directory of safetensors or a GGUF file, every tensor accounted for."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Never

import numpy as np

from anabranch.kernels.formats import RawTensor
from anabranch.runtime.worker.loading.config import ModelConfig, config_from_gguf, config_from_json
from anabranch.runtime.worker.loading.errors import CheckpointError, refuse, shown
from anabranch.runtime.worker.loading.files import MAX_INDEX_BYTES, digest_of_state, inside, read_json
from anabranch.runtime.worker.loading.gguf import GgufFile, read_gguf
from anabranch.runtime.worker.loading.gguf_names import CanonicalTensors
from anabranch.runtime.worker.loading.rope import RopeScaling
from anabranch.runtime.worker.loading.safetensors import is_weight, read_safetensors

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".joblib")
MAX_SHARDS = 4096

# Buffers that old checkpoints store although they follow from the config.
_DERIVED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)|rope_freqs\.weight")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Which tensor set each parameter, once. `ignored` are derived buffers that no parameter needs."""

    path: Path
    taken: tuple[RawTensor, ...]
    ignored: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(raw.data.nbytes for raw in self.taken)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(Counter(raw.format for raw in self.taken).items()))
        lines = [
            f"{self.path}: {len(self.taken)} tensors ({kinds}), {self.num_bytes / 1e6:.1f} MB, each set one parameter"
        ]
        lines += [f"  {raw.name}  {raw.format}  {list(raw.shape)}" for raw in self.taken]
        lines += [f"  {name}  not needed" for name in self.ignored]
        return "\n".join(lines)


class Checkpoint:
    """An opened model. Whoever builds it takes each tensor once, and ends with `finish`.

    source   a digest of the files' state before they were opened, under which what is derived from them may be kept
    """

    def __init__(self, path: Path, config: ModelConfig, tensors: Mapping[str, RawTensor], source: str | None = None) -> None:
        self.path, self.config, self.tensors, self.source = path, config, tensors, source
        self._taken: dict[str, RawTensor] = {}

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> RawTensor:
        """The tensor of a parameter of `shape`. Raises CheckpointError if it is missing, misshapen, or no weight."""
        assert name not in self._taken, f"{name} was taken twice"
        if name not in self.tensors:
            refuse(self.path, f"tensor {name!r} of shape {list(shape)} is missing{self._nearby(name)}")
        raw = self.tensors[name]
        if not is_weight(raw) and "Q" not in raw.format:
            refuse(
                self.path,
                f"tensor {name!r} has dtype {raw.format}; a weight must be F32, F16, BF16 or a GGUF quantization",
            )
        if raw.shape != shape:
            refuse(self.path, f"tensor {name!r} has shape {list(raw.shape)}; the config asks for {list(shape)}")
        self._taken[name] = raw = replace(raw, name=name)
        return raw

    def finish(self) -> LoadReport:
        """Every tensor has been taken, or is known to be derived. Raises CheckpointError naming those that are left."""
        left = [name for name in self.tensors if name not in self._taken]
        ignored = [name for name in left if _DERIVED.fullmatch(name) or self._repeats_embedding(name)]
        unknown = [name for name in left if name not in ignored]
        if unknown:
            listed = ", ".join(shown(name) for name in unknown[:5])
            refuse(
                self.path, f"{len(unknown)} tensors belong to no parameter of a {self.config.family} model: {listed}"
            )
        return LoadReport(self.path, tuple(self._taken.values()), tuple(ignored))

    def _repeats_embedding(self, name: str) -> bool:
        """Whether it is an lm_head that tied embeddings make redundant; a different one must not just be dropped."""
        if name != "lm_head.weight" or not self.config.tie_embeddings:
            return False
        head, embedding = self.tensors[name], self.tensors["model.embed_tokens.weight"]
        if head.format != embedding.format or not np.array_equal(head.data, embedding.data):
            refuse(self.path, "'lm_head.weight' differs from the embedding, but the config says tie_word_embeddings")
        return True

    def _nearby(self, name: str) -> str:
        """A hint for files that wrap or strip the usual names."""
        tail = name.removeprefix("model.")
        similar = [other for other in self.tensors if other.endswith(tail)][:1]
        return f"; there is {shown(similar[0])}" if similar else f"; there are {len(self.tensors)} others"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a directory with safetensors (one file, or shards with an index), or a GGUF file (or a directory with one).

    Files are validated and mapped; weights are not read. Raises CheckpointError.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        refuse(path, "does not exist")
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in PICKLES:
        _refuse_pickles(path.parent, [path.name])
    refuse(path, "is not a model: give a directory with config.json and safetensors, or a .gguf file")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or holds as its only weights; None if it is a safetensors directory.

    Raises CheckpointError.
    """
    if not path.is_dir():
        return path if path.suffix == ".gguf" else None
    names = sorted(entry.name for entry in path.iterdir())
    found = [name for name in names if name.endswith(".gguf")]
    if not found or any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    if len(found) > 1:
        refuse(path, f"holds {len(found)} GGUF files; name one of them: {', '.join(found[:8])}")
    return inside(path, found[0])


def _open_directory(path: Path) -> Checkpoint:
    gguf = find_gguf(path)
    if gguf is not None:
        return _open_gguf(gguf)
    names = sorted(entry.name for entry in path.iterdir())
    source = digest_of_state(path / name for name in names if name.endswith(".safetensors"))
    tensors = _read_safetensors_of(path, names)
    return Checkpoint(path, read_config(path), tensors, source)


def read_config(directory: Path) -> ModelConfig:
    """The config of a safetensors directory: config.json, and generation_config.json if there is one."""
    config_path = inside(directory, "config.json")
    has_generation = (directory / "generation_config.json").exists()
    generation = read_json(inside(directory, "generation_config.json")) if has_generation else None
    return config_from_json(config_path, read_json(config_path), generation)


def _read_safetensors_of(path: Path, names: list[str]) -> dict[str, RawTensor]:
    single = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in names:
        return read_safetensors(inside(path, "model.safetensors"))
    if "model.safetensors.index.json" in names:
        return _read_shards(path)
    if len(single) == 1:
        return read_safetensors(inside(path, single[0]))
    pickles = [name for name in names if name.endswith(PICKLES)]
    if single:
        refuse(
            path,
            f"holds {len(single)} safetensors files and no model.safetensors.index.json that says what is in which",
        )
    if pickles:
        _refuse_pickles(path, pickles)
    refuse(path, f"holds no weights: neither *.safetensors nor *.gguf (it holds {', '.join(names[:8]) or 'nothing'})")


def _read_shards(path: Path) -> dict[str, RawTensor]:
    """The tensors of all shards; the index and the shards must tell the same story."""
    index_path = inside(path, "model.safetensors.index.json")
    weight_map = read_json(index_path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        refuse(index_path, f"field 'weight_map' is {shown(weight_map)}; it must map tensors to files")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            refuse(index_path, f"lists the tensor {shown(name)} in {shown(file)}, which is not a plain file name")
    files: list[str] = list(dict.fromkeys(weight_map.values()))
    if len(files) > MAX_SHARDS:
        refuse(index_path, f"names {len(files)} files, over the limit of {MAX_SHARDS}")
    _refuse_missing_shards(index_path, files)
    tensors: dict[str, RawTensor] = {}
    for file in files:
        if not file.endswith(".safetensors"):
            refuse(index_path, f"names the shard {shown(file)}; shards are .safetensors files")
        shard_path = inside(path, file)
        shard = read_safetensors(shard_path)
        listed = {name for name, where in weight_map.items() if where == file}
        for name in listed ^ shard.keys():
            fault = "lists a tensor that is not in it" if name in listed else "does not list its tensor"
            refuse(shard_path, f"the index {fault}: {shown(name)}")
        tensors |= shard
    return tensors


def _refuse_missing_shards(index_path: Path, files: list[str]) -> None:
    missing = []
    for file in files:
        try:
            inside(index_path.parent, file)
        except CheckpointError as fault:
            if "does not exist" not in str(fault):
                raise
            missing.append(str(fault).removeprefix(f"{index_path.parent}/"))
    if missing:
        refuse(index_path, f"{len(missing)} of {len(files)} shards are missing: {'; '.join(missing[:8])}")


def _refuse_pickles(directory: Path, names: list[str]) -> Never:
    convert = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"[x.from_pretrained('{directory}').save_pretrained('{directory}-safetensors') for x in (M, T)]"
    )
    refuse(
        directory,
        f"holds weights only as {', '.join(names[:3])}: such files are programs that run when they are loaded, "
        f'and are never opened here. If you trust where they come from, convert them once: python -c "{convert}"',
    )


def _open_gguf(path: Path) -> Checkpoint:
    source = digest_of_state([path])  # first: a file that is replaced meanwhile is not taken for the one that was there
    return from_gguf(read_gguf(path), source)


def from_gguf(file: GgufFile, source: str | None = None) -> Checkpoint:
    """The checkpoint in a GGUF file that has been read. Raises CheckpointError."""
    path = file.path
    family = file.metadata.get("general.architecture")
    embedding = file.tensors.get("token_embd.weight")
    if family not in ("llama", "qwen2", "qwen3") or embedding is None or len(embedding.shape) != 2:
        # The config's own refusals name an unknown architecture; then the embedding is what is wrong.
        config_from_gguf(path, file.metadata, vocab_size=1, tensor_names=frozenset())
        refuse(path, "tensor 'token_embd.weight' is missing or no matrix")
    names = CanonicalTensors(path, file.tensors, reordered_head_dim=None)
    config = config_from_gguf(path, file.metadata, vocab_size=embedding.shape[0], tensor_names=frozenset(names))
    config = _with_rope_factors(file, config)
    head_dim = config.head_dim if family == "llama" else None
    return Checkpoint(path, config, CanonicalTensors(path, file.tensors, reordered_head_dim=head_dim), source)


def _with_rope_factors(file: GgufFile, config: ModelConfig) -> ModelConfig:
    """Llama 3's scaling comes as one divisor per frequency, in a tensor."""
    raw = file.tensors.get("rope_freqs.weight")
    if raw is None:
        return config
    if raw.format != "F32" or raw.shape != (config.head_dim // 2,):
        refuse(
            file.path,
            f"tensor 'rope_freqs.weight' is {raw.format} {list(raw.shape)}; it must be F32 [{config.head_dim // 2}]",
        )
    factors = raw.data.reshape(-1).view("<f4").astype(np.float64)
    if not np.all((factors >= 1e-4) & (factors <= 1e4)):
        refuse(file.path, "tensor 'rope_freqs.weight' has values outside 0.0001 to 10000")
    if config.rope_scaling.kind != "none":
        refuse(file.path, "has both 'rope_freqs.weight' and a rope scaling type, which is not supported")
    return replace(config, rope_scaling=RopeScaling(kind="factors", factors=tuple(factors.tolist())))
