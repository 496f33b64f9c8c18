"""The least time a workload can take on a machine: what its reports are judged against. Pure arithmetic, no engine.

Model of a step (Williams et al. 2009, "Roofline"): every weight and every visible KV slot is read at least once, at the rate of the memory that
they fit in; every multiply-add is done once, at the peak of its kind; both overlap perfectly. So

    seconds = max(bytes / read rate, 2 * matrix multiply-adds / their peak + 2 * attention multiply-adds / their peak)

The rates come from `kernels/limits.py` (measured), the sizes from the model's file. A workload's floor adds up the fewest steps that can do
it, with each distinct token computed once and shared prefixes read once a step: what a perfect cache and scheduler would do.
Not counted: activations, KV writes, sampling, tokenization, everything outside the forward. So nothing reaches 1.0 x floor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from anabranch.kernels.formats import RawTensor


class Rates(Protocol):
    """What `kernels.limits.Limits` measures. A multiply-add counts as two operations."""

    @property
    def float_ops_per_s(self) -> float: ...

    @property
    def byte_ops_per_s(self) -> float: ...

    def read_rate(self, num_bytes: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model, as far as its cost goes.

    matrix_bytes        weights of all layers, as they lie in the file;  matrix_values  how many: multiply-adds per token
    head_bytes          the matrix that makes logits (the embedding, where tied);  head_values  multiply-adds per row of logits
    kv_bytes_per_token  keys and values of one token in all layers
    attention_per_pair  multiply-adds for one query token and one visible token, all layers: q.k and p*v over all query heads
    """

    matrix_bytes: int
    matrix_values: int
    head_bytes: int
    head_values: int
    kv_bytes_per_token: int
    attention_per_pair: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward; on average, where a plan's steps differ.

    new_tokens  tokens through the layers;  logits  rows through the head
    kv_read     cached tokens whose KV must be read, each once, however many rows see it
    pairs       (query token, visible token) pairs over all rows
    times       how many steps like this one
    """

    new_tokens: float
    logits: float
    kv_read: float
    pairs: float
    times: int = 1


def prefill(rows: int, new_tokens: int, *, shared: int = 0, own: int = 0) -> Step:
    """`rows` prompts, each with so many new tokens behind `own` cached ones behind a prefix of `shared` that all of them have."""
    seen = shared + own
    pairs = rows * (new_tokens * seen + new_tokens * (new_tokens + 1) / 2)
    return Step(rows * new_tokens, rows, shared + rows * own, pairs)


def decode(rows: int, steps: int, *, shared: int = 0, own: int) -> Step:
    """`steps` steps of one token for each of `rows` rows, whose own context behind the shared prefix has `own` tokens at first.

    The cost grows evenly with the context, so all of them cost what the middle one does.
    """
    middle = own + steps // 2
    return Step(rows, rows, shared + rows * middle, rows * (shared + middle), steps)


@dataclass(frozen=True, slots=True)
class Products:
    """What is multiplied: "byte" (8-bit integers), "word" (16-bit integers, half as many at once), "float" (float32)."""

    matrix: Literal["byte", "word", "float"] = "byte"
    attention: Literal["byte", "word", "float"] = "word"

    @classmethod
    def of(cls, *, precision: str, kv_dtype: str) -> "Products":
        """Exact activations stay float32. Keys and values that are kept as integers are multiplied as words, others as float32."""
        return cls("float" if precision == "exact" else "byte", "word" if kv_dtype in ("int16", "int8") else "float")


def peak(kind: str, rates: Rates) -> float:
    """Operations per second of that kind."""
    return {"byte": rates.byte_ops_per_s, "word": rates.byte_ops_per_s / 2, "float": rates.float_ops_per_s}[kind]


def step_seconds(step: Step, sizes: Sizes, rates: Rates, products: Products = Products()) -> float:
    """The least time of one such step."""
    weights = sizes.matrix_bytes + (sizes.head_bytes if step.logits else 0)
    num_bytes = weights + int(step.kv_read * sizes.kv_bytes_per_token)
    matrix = step.new_tokens * sizes.matrix_values + step.logits * sizes.head_values
    attention = step.pairs * sizes.attention_per_pair
    compute = 2 * matrix / peak(products.matrix, rates) + 2 * attention / peak(products.attention, rates)
    return max(num_bytes / rates.read_rate(num_bytes), compute)


def seconds(plan: Iterable[Step], sizes: Sizes, rates: Rates, products: Products = Products()) -> float:
    """The least time of a whole plan."""
    return sum(step.times * step_seconds(step, sizes, rates, products) for step in plan)


def sizes_of(
    tensors: Mapping[str, RawTensor], *, num_layers: int, num_heads: int, head_dim: int, kv_bytes_per_token: int
) -> Sizes:
    """Sizes from a checkpoint's tensors by their canonical names.

    2-d tensors of layers are matrices, and the head is `lm_head`, or the embedding. Of an embedding that
    is not the head, a step reads a row per token: nothing.
    """
    layers = [t for name, t in tensors.items() if ".layers." in name and len(t.shape) == 2]
    head = tensors.get("lm_head.weight") or tensors["model.embed_tokens.weight"]
    return Sizes(
        matrix_bytes=sum(t.data.nbytes for t in layers),
        matrix_values=sum(t.shape[0] * t.shape[1] for t in layers),
        head_bytes=head.data.nbytes,
        head_values=head.shape[0] * head.shape[1],
        kv_bytes_per_token=kv_bytes_per_token,
        attention_per_pair=2 * num_layers * num_heads * head_dim,
    )
