"""The interface that every backend implements, and that models and the worker use.

A model describes its architecture once, against `Ops`, in coarse operations that a backend may run eagerly (`reference`), fuse and
replay natively (`cpu`), or capture into a CUDA graph (`flashinfer`). Arithmetic of one row never depends on the other rows of a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.formats import RawTensor
from anabranch.kernels.layout import KVSpec, Sampled, SamplingBatch, StepBatch

Weight = Any  # what a backend's own `matrix` or `vector` returned
Hidden = Any  # activations [num_tokens, width], in whatever form the backend keeps them
Logits = Any  # [num_logits, vocab] f32, owned by the backend until its next forward


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first 2 * len(inv_freq) dims of each head, half-split (Hugging Face) pairing.

    Angle of pair i at position p is p * inv_freq[i]; cos and sin are multiplied by `magnitude` (YaRN's attention factor).
    Backends tabulate cos and sin per position, in float64 rounded once, so that a position's values never depend on the batch.
    """

    inv_freq: NDArray[np.float64]
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q.k
    eps: float  # of every RMS norm
    sliding_window: int | None = None  # tokens seen back, itself included


class Ops(Protocol):
    """The operations of one forward. Order of calls is the order of execution; each call may assume the ones before it."""

    def embed(self, table: Weight) -> Hidden:
        """Rows of `table` [vocab, width] for the batch's token ids."""

    def attention_input(
        self, h: Hidden, layer: int, norm: Weight, qkv: Weight, shape: AttentionShape, rope: Rope,
        q_norm: Weight | None = None, k_norm: Weight | None = None,
    ) -> Hidden:  # fmt: skip
        """RMS norm of h, project with qkv [(q + 2 kv heads) * head_dim, width] (+ bias), per-head norms if given, rotate q and k.

        Writes k and v to the KV pages of `layer`; returns q [num_tokens, num_q_heads * head_dim].
        """

    def attention(self, q: Hidden, layer: int, shape: AttentionShape) -> Hidden:
        """Causal (or tree) attention of q over the pages of `layer`; same shape as q."""

    def linear_add(self, x: Hidden, weight: Weight, residual: Hidden) -> Hidden:
        """residual + x @ weight.T (+ bias). The residual may be updated in place."""

    def gated_mlp_input(self, h: Hidden, norm: Weight, gate_up: Weight, eps: float) -> Hidden:
        """silu(gate) * up of the RMS-normed h; gate_up [2 * inner, width] holds gate's rows, then up's."""

    def logits(self, h: Hidden, norm: Weight, lm_head: Weight, eps: float) -> Logits:
        """RMS norm and output projection of the batch's `logit_rows` only."""


Forward = Callable[[Ops], Logits]


class KVPool(Protocol):
    """The KV pages of every layer. Pages start as zeros; who wrote what is the scheduler's business."""

    spec: KVSpec

    def copy_pages(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        """Copy whole pages in every layer, in order. src and dst are disjoint."""

    def poison_pages(self, pages: NDArray[np.int32]) -> None:
        """Fill pages with NaN (debug): whatever reads a slot before it was written shows."""


class Backend(Protocol):
    name: str

    def matrix(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = ()) -> Weight:
        """A matrix [sum of rows, columns] from parts stacked by rows (q, k, v; gate, up), kept quantized where the backend can."""

    def vector(self, raw: RawTensor) -> Weight:
        """A norm weight."""

    def kv_pool(self, spec: KVSpec) -> KVPool:
        """Allocate. Raises MemoryError with the sizes if it cannot."""

    def compile(self, forward: Forward, kv: Any) -> Callable[[StepBatch], Logits]:
        """Bind a model's forward to this backend and one of its own KV pools.

        The result runs one batch; it validates the batch's shapes cheaply (LayoutError).
        """

    def sample(self, logits: Logits, batch: SamplingBatch) -> Sampled:
        """Choose one token per row of logits."""

    def logprobs_of(
        self, logits: Logits, rows: NDArray[np.int32], ids: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Raw log-softmax of logits[rows[j], ids[j]], and whether ids[j] is that row's argmax. Shapes [len(rows)]."""

    def top_logprobs(
        self, logits: Logits, rows: NDArray[np.int32], k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and raw logprobs of the k most likely tokens of each row, descending, ties by id: [len(rows), k] each."""
