"""What fast costs: per-token KL divergence and perplexity against exact activations and float32 KV, on real English.

Windows of `WINDOW` tokens, each behind nothing; the second half of a window is judged, so that every judged token sees at least half a
window. This is also what llama.cpp's `llama-perplexity --kl-divergence` does, which runs on the same text where it is asked for: its own
path (the same file, its 8-bit activations, f16 KV) against the same weights as float32.
"""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels import registry
from anabranch.kernels.layout import KVSpec, StepBatch
from anabranch.runtime.bench.figures import table
from anabranch.runtime.bench.peer_setup import LlamaCpp
from anabranch.runtime.bench.texts import prose
from anabranch.runtime.worker.loading.checkpoint import open_checkpoint
from anabranch.runtime.worker.models.registry import build_model

WINDOW = 512
NUM_WINDOWS = 10  # 2,550 judged tokens
PAGE_SIZE = 16
CASES = (  # (name, precision, kv dtype); the first is what all are judged against
    ("exact, KV f32", "exact", "f32"),
    ("exact, KV int16", "exact", "int16"),
    ("exact, KV f16", "exact", "f16"),
    ("exact, KV bf16", "exact", "bf16"),
    ("exact, KV int8", "exact", "int8"),
    ("fast, KV int16", "fast", "int16"),
    ("fast, KV f16", "fast", "f16"),
    ("fast, KV int8", "fast", "int8"),
)
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Forward = Callable[[Ints], Floats]


@dataclass(slots=True)
class Tally:
    """Sums over judged tokens."""

    count: int = 0
    kl: float = 0.0
    kl_squares: float = 0.0
    loss: float = 0.0
    same_top: int = 0

    def add(self, base: Floats, other: Floats, targets: Ints) -> None:
        """Log-probabilities [n, vocab] of the reference and the candidate, and the tokens that did follow [n]."""
        kl = (np.exp(base, dtype=np.float64) * (base.astype(np.float64) - other)).sum(axis=1)
        self.count += len(targets)
        self.kl += float(kl.sum())
        self.kl_squares += float((kl**2).sum())
        self.loss -= float(other[np.arange(len(targets)), targets].sum(dtype=np.float64))
        self.same_top += int((base.argmax(axis=1) == other.argmax(axis=1)).sum())

    def as_dict(self) -> dict[str, float]:
        mean = self.kl / self.count
        error = float(np.sqrt(max(self.kl_squares / self.count - mean**2, 0.0) / self.count))
        return {
            "kl": mean, "kl_error": error, "perplexity": float(np.exp(self.loss / self.count)),
            "same_top": self.same_top / self.count, "tokens": self.count,
        }  # fmt: skip


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis, in float64 inside."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return (x - np.log(np.exp(x).sum(axis=-1, keepdims=True))).astype(np.float32)


def forward_of(model: Path, precision: str, kv_dtype: str, *, window: int, backend: str = "auto", num_threads: int | None = None) -> Forward:
    """A function from a window's ids to the logits of its second half's predecessors [window - window // 2 - 1, vocab]: no engine around it."""
    made = registry.backend(backend, precision=precision, num_threads=num_threads)
    built, _ = build_model(open_checkpoint(model), made)
    c = built.config
    num_pages = -(-window // PAGE_SIZE)
    spec = KVSpec(
        num_layers=c.num_layers, num_pages=num_pages, page_size=PAGE_SIZE, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=kv_dtype
    )
    step = made.compile(built.forward, made.kv_pool(spec))
    pages = np.arange(num_pages, dtype=np.int32)

    def forward(ids: Ints) -> Floats:
        n = len(ids)
        batch = StepBatch(
            token_ids=ids, positions=np.arange(n, dtype=np.int32), q_indptr=np.array([0, n], np.int32), kv_lens=np.array([n], np.int32),
            page_indptr=np.array([0, num_pages], np.int32), page_ids=pages, logit_rows=np.arange(n // 2, n - 1, dtype=np.int32),
        )  # fmt: skip
        return np.asarray(step(batch), np.float32)

    return forward


def judge(windows: Sequence[Ints], base: Forward, others: Mapping[str, Forward]) -> dict[str, Tally]:
    """Each candidate against the reference, window by window: no more than one window's logits of each are held."""
    tallies = {name: Tally() for name in others}
    for ids in windows:
        targets = ids[len(ids) // 2 + 1 :]
        reference = log_softmax(base(ids).copy())
        for name, forward in others.items():
            tallies[name].add(reference, log_softmax(forward(ids)), targets)
    return tallies


def windows_of(encode: Callable[[str], Sequence[int]], count: int, window: int) -> tuple[list[Ints], str]:
    """`count` windows of consecutive tokens, and their text: paragraphs from evenly spaced places in the prose."""
    text, parts = prose(), []
    for i in range(count + 2):
        start = text.index("\n\n", i * (len(text) // (count + 3))) + 2
        parts.append(text[start : start + 5 * window])
    joined = "\n\n".join(parts)
    ids = np.asarray(encode(joined), np.int32)
    assert len(ids) >= count * window, f"the text has {len(ids)} tokens, {count * window} are needed"
    return [ids[i * window : (i + 1) * window] for i in range(count)], joined


def run(
    model: Path, encode: Callable[[str], Sequence[int]], *, small: bool, num_threads: int | None = None, llama: LlamaCpp | None = None
) -> dict[str, Any]:
    """Every case against exact activations with float32 KV; llama.cpp's path on the same text, if it is given."""
    window, count = (64, 4) if small else (WINDOW, NUM_WINDOWS)
    windows, text = windows_of(encode, count, window)
    cases = {name: forward_of(model, precision, dtype, window=window, num_threads=num_threads) for name, precision, dtype in CASES}
    tallies = judge(windows, cases[CASES[0][0]], cases)
    report: dict[str, Any] = {"window": window, "cases": {name: tally.as_dict() for name, tally in tallies.items()}}
    if llama is not None:
        report["cases"] |= llama_cpp(llama, text, window=window, chunks=count)
    return report


# ---------------------------------------------------------------- llama.cpp


def llama_cpp(llama: LlamaCpp, text: str, *, window: int, chunks: int) -> dict[str, dict[str, float]]:
    """Its own path on our file, and on the Q8_0 file that it is measured with, each against the same weights as float32 with float32 KV."""
    with TemporaryDirectory(prefix="anabranch-accuracy-") as folder:
        file, logits = Path(folder) / "text.txt", Path(folder) / "base.logits"
        file.write_text(text)
        common: list[str | Path] = ["-f", file, "-c", str(window), "--chunks", str(chunks), "--kl-divergence-base", logits]
        _perplexity(llama, ["-m", llama.weights("F32"), "-ctk", "f32", "-ctv", "f32", "-fa", "off", *common])
        found = {}
        q8: list[str | Path] = ["-ctk", "q8_0", "-ctv", "q8_0"]
        for name, weights, extra in (
            ("llama.cpp, this file, KV f16", llama.source, []),
            ("llama.cpp, this file, KV q8_0", llama.source, q8),
            ("llama.cpp, as Q8_0, KV f16", llama.weights("Q8_0"), []),
        ):
            said = _perplexity(llama, ["-m", weights, "-fa", "on", *extra, *common, "--kl-divergence"])
            found[name] = read_statistics(said) | {"tokens": chunks * (window - window // 2 - 1)}
        return found


def _perplexity(llama: LlamaCpp, words: Sequence[str | Path]) -> str:
    command = [str(llama.program("llama-perplexity")), *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=llama.environment(), stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"llama-perplexity ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return done.stdout + done.stderr


_LINES = {
    "kl": re.compile(r"^Mean\s+KLD:\s*([-\d.e]+)\s*±\s*([-\d.e]+)", re.MULTILINE),
    "perplexity": re.compile(r"^Mean PPL\(Q\)\s*:\s*([-\d.e]+)", re.MULTILINE),
    "same_top": re.compile(r"^Same top p:\s*([\d.]+)", re.MULTILINE),
}


def read_statistics(said: str) -> dict[str, float]:
    """The figures that `llama-perplexity --kl-divergence` prints at its end. Raises RuntimeError if they are not there."""
    matches = {name: pattern.search(said) for name, pattern in _LINES.items()}
    kl, perplexity, same = matches["kl"], matches["perplexity"], matches["same_top"]
    if kl is None or perplexity is None or same is None:
        raise RuntimeError(f"llama-perplexity printed no statistics: {said[-500:]}")
    return {
        "kl": float(kl.group(1)), "kl_error": float(kl.group(2)), "perplexity": float(perplexity.group(1)),
        "same_top": float(same.group(1)) / 100,
    }  # fmt: skip


def show(result: Mapping[str, Any]) -> str:
    rows = [
        (name, f"{c['kl']:.2e} ± {c['kl_error']:.0e}" if "kl_error" in c else f"{c['kl']:.2e}", f"{c['perplexity']:.3f}",
         f"{c['same_top']:.1%}", f"{int(c['tokens']):,}")
        for name, c in result["cases"].items()
    ]  # fmt: skip
    return table(rows, ("what computes", "KL per token", "perplexity", "same top", "tokens"))
