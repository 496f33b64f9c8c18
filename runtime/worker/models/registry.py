"""Which module builds which family of models."""

from collections.abc import Callable
from typing import Protocol

from anabranch.kernels.interface import Backend, Logits, Ops
from anabranch.runtime.worker.loading.checkpoint import Checkpoint, LoadReport
from anabranch.runtime.worker.loading.config import ModelConfig
from anabranch.runtime.worker.loading.errors import refuse
from anabranch.runtime.worker.models.llama import build_llama


class Model(Protocol):
    """What the worker asks of a model: its config, and one forward over a backend's operations."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, ops: Ops) -> Logits: ...


BUILDERS: dict[str, Callable[[Checkpoint, Backend], Model]] = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3"), build_llama
)


def build_model(checkpoint: Checkpoint, backend: Backend) -> tuple[Model, LoadReport]:
    """The model, and the proof that each parameter was set once and no tensor is left. Raises CheckpointError."""
    build = BUILDERS.get(checkpoint.config.family)
    if build is None:
        refuse(
            checkpoint.path, f"no module builds {checkpoint.config.family!r} models; known are {', '.join(BUILDERS)}"
        )
    return build(checkpoint, backend), checkpoint.finish()
