"""The C interface of the native library, mirrored: structs of `csrc/cpu/{cpu_api,attention,linear}.h` and the functions' types."""

import ctypes
from ctypes import c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from anabranch.kernels import build

PANEL_DTYPE = np.dtype([("data", np.uint64), ("first_column", np.int32), ("num_columns", np.int16), ("kind", np.int16)])


class Matrix(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p), ("bias", c_void_p), ("num_panels", c_int32), ("num_columns", c_int32), ("k", c_int32),
        ("is_exact", c_int32),
    )  # fmt: skip


class Table(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p), ("row_bytes", c_int64), ("num_rows", c_int32), ("k", c_int32), ("format", c_int32),
        ("reserved", c_int32),
    )  # fmt: skip


class KVLayout(ctypes.Structure):
    """`KVPool` of attention.h."""

    _fields_ = (
        ("data", c_void_p), ("num_pages", c_int64), ("page_size", c_int32), ("num_layers", c_int32), ("num_kv_heads", c_int32),
        ("head_dim", c_int32), ("type", c_int32), ("chunk", c_int32), ("padded_dim", c_int32), ("v_offset", c_int32),
        ("scale_offset", c_int32), ("head_bytes", c_int64), ("page_bytes", c_int64), ("layer_bytes", c_int64),
    )  # fmt: skip


class OpKind:
    EMBED, ATTENTION_INPUT, ATTENTION, LINEAR_ADD, GATED_MLP_INPUT, LOGITS = range(6)


class OpSpec(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32), ("layer", c_int32), ("source", c_int32), ("target", c_int32), ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32), ("head_dim", c_int32), ("window", c_int32), ("eps", c_float), ("scale", c_float),
        ("matrix", ctypes.POINTER(Matrix)), ("table", ctypes.POINTER(Table)), ("norm", c_void_p), ("q_norm", c_void_p),
        ("k_norm", c_void_p), ("rope", c_void_p),
    )  # fmt: skip


class StepArgs(ctypes.Structure):
    """`StepView` of attention.h comes first, as `view`."""

    _fields_ = (
        ("num_rows", c_int32), ("num_tokens", c_int32), ("num_trees", c_int32), ("num_groups", c_int32), ("num_page_ids", c_int32),
        ("view_reserved", c_int32), ("q_indptr", c_void_p), ("kv_lens", c_void_p), ("page_indptr", c_void_p), ("page_ids", c_void_p),
        ("tree_rows", c_void_p), ("tree_indptr", c_void_p), ("tree_parents", c_void_p), ("groups", c_void_p),
        ("num_logits", c_int32), ("reserved", c_int32), ("token_ids", c_void_p), ("positions", c_void_p), ("logit_rows", c_void_p),
        ("logits", c_void_p),
    )  # fmt: skip


_SIGNATURES = {
    "anb_isa": (c_int, ()),
    "anb_set_isa": (c_int, (c_int,)),
    "anb_num_threads": (c_int, ()),
    "anb_set_num_threads": (c_int, (c_int,)),
    "anb_pool_stats": (None, (c_void_p,)),
    "anb_float_peak": (c_double, ()),
    "anb_byte_peak": (c_double, ()),
    "anb_read_rate": (c_double, (c_void_p, c_int64)),
    "anb_panel_bytes": (c_int64, (c_int, c_int)),
    "anb_pack": (c_int64, (c_int, c_void_p, c_int, c_int, c_int64, c_int, c_void_p, c_int64)),
    "anb_matmul": (None, (ctypes.POINTER(Matrix), c_void_p, c_int, c_void_p)),
    "anb_read_rows": (None, (ctypes.POINTER(Table), c_void_p, c_int, c_void_p)),
    "anb_kv_layout": (c_int64, (ctypes.POINTER(KVLayout),)),
    "anb_copy_pages": (None, (ctypes.POINTER(KVLayout), c_void_p, c_void_p, c_int)),
    "anb_poison_pages": (None, (ctypes.POINTER(KVLayout), c_void_p, c_int)),
    "anb_rope_new": (c_void_p, (c_void_p, c_int, c_double)),
    "anb_rope_free": (None, (c_void_p,)),
    "anb_program_new": (c_void_p, (ctypes.POINTER(KVLayout),)),
    "anb_program_free": (None, (c_void_p,)),
    "anb_program_buffer": (c_int, (c_void_p, c_int, c_int)),
    "anb_program_add": (None, (c_void_p, ctypes.POINTER(OpSpec))),
    "anb_program_times": (None, (c_void_p, c_void_p)),
    "anb_program_run": (c_char_p, (c_void_p, ctypes.POINTER(StepArgs))),
}


@cache
def library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """The native library with its functions typed. Raises build.BuildError."""
    loaded = build.load(cache_dir)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


__all__ = ["PANEL_DTYPE", "KVLayout", "Matrix", "OpKind", "OpSpec", "StepArgs", "Table", "library"]
