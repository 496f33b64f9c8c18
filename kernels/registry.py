"""Backends by name."""

import warnings
from pathlib import Path

from anabranch.kernels.interface import Backend
from anabranch.kernels.packed_cache import WeightStore

NAMES = ("auto", "cpu", "reference", "flashinfer")


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name and cannot run here. Says why, and what to do."""


def backend(
    name: str = "auto", *, precision: str = "fast", num_threads: int | None = None, cache_dir: Path | None = None,
    store: WeightStore | None = None,
) -> Backend:  # fmt: skip
    """The backend of that name. `auto` is `cpu`, or `reference`, with one warning, where `cpu` cannot be built.

    precision   "fast" | "exact" (activations are not rounded); `reference` is always exact
    cache_dir   where native code is built; None: the user's cache
    store       where packed weights are kept for the next start, by backends that pack any; None: nowhere
    Raises      BackendUnavailable, ValueError for an unknown name
    """
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "flashinfer":
        raise BackendUnavailable(
            "backend 'flashinfer' is not available in this version: use 'cpu' or 'reference' (or leave it at 'auto')"
        )
    if name == "reference":
        return _reference(num_threads)
    try:
        return _native(precision=precision, num_threads=num_threads, cache_dir=cache_dir, store=store)
    except BackendUnavailable as fault:
        if name == "cpu":
            raise
        warnings.warn(
            f"{fault} Falling back to the 'reference' backend, which is many times slower.",
            RuntimeWarning,
            stacklevel=2,
        )
        return _reference(num_threads)


def _reference(num_threads: int | None) -> Backend:
    # Here, since torch takes a second to import and the other backends do without it.
    from anabranch.kernels.reference import ReferenceBackend

    return ReferenceBackend(num_threads=num_threads)


def _native(*, precision: str, num_threads: int | None, cache_dir: Path | None, store: WeightStore | None) -> Backend:
    try:
        from anabranch.kernels.backends.cpu import CpuBackend
        from anabranch.kernels.build import BuildError
    except ImportError as fault:
        raise BackendUnavailable(f"The native CPU backend cannot be imported: {fault}.") from fault
    try:
        return CpuBackend(precision=precision, num_threads=num_threads, cache_dir=cache_dir, store=store)
    except BuildError as fault:
        raise BackendUnavailable(f"The native CPU kernels could not be built: {fault}.") from fault
