"""Weights from their file form to the panels that native kernels stream: which panel kind a format takes, and packing.

Block formats are repacked, never requantized: a panel holds the file's own codes, with its scales widened where half precision would
lose (k-quants). Float checkpoints become 8-bit codes with one scale per 32 weights. In exact mode every format becomes f32.
The kinds and their layouts: `csrc/cpu/linear.h`.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.formats import FORMATS, RawTensor
from anabranch.kernels.layout import LayoutError
from anabranch.kernels.packed_cache import HUGE_PAGE_BYTES, PackedCache

Bytes = NDArray[np.uint8]
PANEL_COLUMNS = 32
SLAB_BYTES = 64 << 20
ALIGNMENT = 4096

FORMAT_CODES = {name: code for code, name in enumerate(
    ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"))}  # fmt: skip


class PanelKind(IntEnum):
    """As in `csrc/cpu/linear.h`."""

    SYM4 = 0
    AFFINE4 = 1
    AFFINE4_WIDE = 2
    SYM8 = 3
    SYM8_WIDE = 4
    AFFINE8 = 5
    AFFINE8_WIDE = 6
    HALVES8 = 7
    F32 = 8


KIND_OF = {
    "F32": PanelKind.SYM8, "F16": PanelKind.SYM8, "BF16": PanelKind.SYM8, "Q8_0": PanelKind.SYM8, "Q4_0": PanelKind.SYM4,
    "Q4_1": PanelKind.AFFINE4, "Q5_0": PanelKind.SYM8, "Q5_1": PanelKind.AFFINE8, "Q4_K": PanelKind.AFFINE4_WIDE,
    "Q5_K": PanelKind.AFFINE8_WIDE, "Q6_K": PanelKind.HALVES8,
}  # fmt: skip


class Arena:
    """Memory for weights: zeroed, on huge pages where the system has them, handed out in order, freed as a whole."""

    def __init__(self) -> None:
        self._slab = np.empty(0, np.uint8)
        self.num_bytes = 0

    def take(self, num_bytes: int) -> Bytes:
        """A zeroed array that starts at a page. Raises MemoryError."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._slab):
            self._slab = _map_zeros(max(size, SLAB_BYTES))
        taken, self._slab = self._slab[:num_bytes], self._slab[size:]
        self.num_bytes += size
        return taken


def _map_zeros(num_bytes: int) -> Bytes:
    """Fresh zeroed memory. Aligned to a huge page, or the first and last one of a slab could not be one."""
    try:
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise MemoryError(f"cannot allocate {num_bytes / 2**20:.0f} MiB for weights: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: small pages do as well
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE_BYTES
    return array[start : start + num_bytes]


@dataclass(frozen=True, slots=True)
class PackedPart:
    """One RawTensor in panels: kind, and bytes [num_panels, bytes per panel]."""

    kind: PanelKind
    num_rows: int
    panels: Bytes


def check_matrix(raw: RawTensor) -> None:
    """Raises LayoutError if `raw` is not a matrix whose bytes are all there."""
    if raw.format not in FORMATS:
        raise LayoutError(f"{raw.name}: unknown format {raw.format!r}, expected one of {', '.join(FORMATS)}")
    form = FORMATS[raw.format]
    if len(raw.shape) != 2 or 0 in raw.shape or raw.shape[1] % form.block:
        raise LayoutError(f"{raw.name}: a {form.name} matrix needs rows of whole blocks of {form.block}, got shape {raw.shape}")
    expected = (raw.shape[0], raw.shape[1] // form.block * form.num_bytes)
    if raw.data.shape != expected or raw.data.dtype != np.uint8:
        raise LayoutError(f"{raw.name}: {form.name} of shape {raw.shape} takes uint8 {expected}, got {raw.data.dtype} {raw.data.shape}")
    if raw.data.strides[1] != 1:
        raise LayoutError(f"{raw.name}: the bytes of a row must be contiguous")


class Packer:
    """Packs the matrices of one model, on all threads of the pool, or finds them packed in a cache."""

    def __init__(self, library: ctypes.CDLL, *, is_exact: bool, cache: PackedCache | None = None) -> None:
        self.library, self.is_exact, self._cache = library, is_exact, cache
        self.arena = Arena()

    def pack(self, parts: Sequence[RawTensor], *, interleave: bool = False) -> list[PackedPart]:
        """Each part in panels, one part after the other; interleaved, panel i of every part comes before panel i + 1 of any."""
        are_alike = len({(part.shape, KIND_OF[part.format]) for part in parts}) == 1
        runs = [parts] if interleave and are_alike else [[part] for part in parts]
        return [packed for run in runs for packed in self._pack_run(run)]

    def finish(self) -> None:
        """Keep for the next start what had to be packed."""
        if self._cache is not None:
            self._cache.save()

    def _pack_run(self, run: Sequence[RawTensor]) -> list[PackedPart]:
        """Parts of one shape, interleaved."""
        kinds = self._kinds_of(run[0].format)
        name = "+".join(part.name for part in run)
        found = self._find(name, run, kinds)
        if found is None:
            kind, panels = self._pack_new(run, kinds)
            if self._cache is not None:
                self._cache.add(name, kind, panels)
        else:
            kind, panels = found
        return [PackedPart(kind, part.shape[0], panels[:, i]) for i, part in enumerate(run)]

    def _find(self, name: str, run: Sequence[RawTensor], kinds: tuple[PanelKind, ...]) -> tuple[PanelKind, Bytes] | None:
        """The run as the cache has it, if the first panel of each part is, bit for bit, what packing gives now."""
        found = self._cache.find(name, {kind: self._shape(run, kind) for kind in kinds}) if self._cache else None
        if self._cache is None or found is None:
            return None
        kind, panels = PanelKind(found[0]), found[1]
        expected = np.zeros((len(run), panels.shape[2]), np.uint8)
        for raw, panel in zip(run, expected):
            self._pack_rows(raw, min(PANEL_COLUMNS, raw.shape[0]), kind, panel[None])
        if not np.array_equal(expected, panels[0]):
            self._cache.reject(name)
            return None
        return kind, panels

    def _pack_rows(self, raw: RawTensor, num_rows: int, kind: PanelKind, panels: Bytes) -> int:
        """Pack the first rows of `raw` into zeroed `panels`; returns how many scales do not fit the kind."""
        return int(self.library.anb_pack(
            FORMAT_CODES[raw.format], raw.data.ctypes.data, num_rows, raw.shape[1], raw.data.strides[0], kind, panels.ctypes.data,
            panels.strides[0],
        ))  # fmt: skip

    def _kinds_of(self, form: str) -> tuple[PanelKind, ...]:
        if self.is_exact:
            return (PanelKind.F32,)
        # Scales beyond half precision are rare, and only in float checkpoints.
        return (PanelKind.SYM8, PanelKind.SYM8_WIDE) if FORMATS[form].block == 1 else (KIND_OF[form],)

    def _shape(self, run: Sequence[RawTensor], kind: PanelKind) -> tuple[int, ...]:
        num_rows, k = run[0].shape
        return -(-num_rows // PANEL_COLUMNS), len(run), int(self.library.anb_panel_bytes(kind, k))

    def _pack_new(self, run: Sequence[RawTensor], kinds: tuple[PanelKind, ...]) -> tuple[PanelKind, Bytes]:
        """In the first of `kinds` that all scales fit."""
        for kind in kinds:
            shape = self._shape(run, kind)
            panels = self.arena.take(prod(shape)).reshape(shape)
            num_misfits = 0
            for i, raw in enumerate(run):
                num_misfits += self._pack_rows(raw, raw.shape[0], kind, panels[:, i])
            if num_misfits == 0:
                break
        return kind, panels
