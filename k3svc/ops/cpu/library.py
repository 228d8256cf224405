"""The C library of the cpu backend: its structures (csrc/kernels.h) and the signatures of its functions."""

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from k3svc.errors import BackendError
from k3svc.ops.cpu.build import LIBRARY

ABI_VERSION = 9
BUILD_COMMAND = "python -m k3svc.ops.cpu"
LIBRARY_PATH = Path(__file__).parent / LIBRARY


class Weight(Structure):
    """Packed matrix or a row of packed matrices of one shape."""

    _fields_ = (
        ("data", c_void_p),
        ("in", c_int64),
        ("out", c_int64),
        ("is_bf16", c_int64),
        ("num_bytes", c_int64),
    )


class Glu(Structure):
    """Kind of a gated unit."""

    _fields_ = (("is_situ", c_int32), ("has_linear_beta", c_int32), ("beta", c_float), ("linear_beta", c_float))


class Step(Structure):
    """A step; sequences are rows of int64 (slot, row, length, start, is_fresh, table)."""

    _fields_ = (
        ("sequences", c_void_p),
        ("num_sequences", c_int64),
        ("num_rows", c_int64),
        ("slot_mapping", c_void_p),
        ("block_tables", c_void_p),
        ("table_width", c_int64),
        ("page_size", c_int64),
        ("keeps_states", c_int64),
    )


class Conv(Structure):
    """Weights and states of a convolution."""

    _fields_ = (("weight", c_void_p), ("state", c_void_p), ("channels", c_int64), ("width", c_int64))


class Kda(Structure):
    """Gate and states of a KDA layer."""

    _fields_ = (
        ("a", c_void_p),
        ("dt_bias", c_void_p),
        ("state", c_void_p),
        ("heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("lower_bound", c_float),
        ("has_lower_bound", c_int32),
    )


class Mla(Structure):
    """Weights and cache rows of an MLA layer."""

    _fields_ = (
        ("w_kc", c_void_p),
        ("w_vc", c_void_p),
        ("rows", c_void_p),
        ("heads", c_int64),
        ("nope", c_int64),
        ("rank", c_int64),
        ("rope", c_int64),
        ("value_dim", c_int64),
        ("scale", c_float),
    )


class Router(Structure):
    """How experts are chosen."""

    _fields_ = (
        ("bias", c_void_p),
        ("top_k", c_int64),
        ("num_groups", c_int64),
        ("top_groups", c_int64),
        ("scale", c_float),
        ("renormalize", c_int32),
    )


class NormRope(Structure):
    """Heads of grouped-query rows of a draft."""

    _fields_ = (
        ("q_weight", c_void_p),
        ("k_weight", c_void_p),
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("width", c_int64),
        ("eps", c_float),
    )


class Blocks(Structure):
    """A step of draft blocks."""

    _fields_ = (
        ("slots", c_void_p),
        ("base_lens", c_void_p),
        ("starts", c_void_p),
        ("num_blocks", c_int64),
        ("num_rows", c_int64),
        ("window", c_int64),
        ("capacity", c_int64),
    )


class BlockAttention(Structure):
    """Context cells and heads of a draft layer."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_slot_stride", c_int64),
        ("key_cell_stride", c_int64),
        ("value_slot_stride", c_int64),
        ("value_cell_stride", c_int64),
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("key_width", c_int64),
        ("value_width", c_int64),
        ("scale", c_float),
        ("is_causal", c_int32),
    )


class Draws(Structure):
    """Sampling parameters of rows."""

    _fields_ = (
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seed", c_void_p),
        ("sample_index", c_void_p),
        ("position", c_void_p),
    )


class NumRows(c_int64):
    """The argument that counts the rows of a call, where a `Step` does not."""


_P, _N = c_void_p, c_int64
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "k3_linear": (POINTER(Weight), _P, _N, NumRows, _P),
    "k3_rms_norm": (_P, _N, _P, NumRows, _N, c_float, _P),
    "k3_gated_norm": (_P, _P, _N, _P, NumRows, _N, _N, c_float, _P),
    "k3_mix_residual": (_P, _P, _N, _P, NumRows, _N, c_float, _P),
    "k3_add_rows": (_P, _N, _P, _N, NumRows, _N, _P),
    "k3_take_rows": (_P, _N, _P, _N, NumRows, _N, _P, _N),
    "k3_glu": (POINTER(Glu), _P, _N, NumRows, _N, _P),
    "k3_sigmoid_gate": (_P, _N, _P, _N, NumRows, _N, _P),
    "k3_route": (POINTER(Weight), POINTER(Router), _P, _N, NumRows, _P, _P),
    "k3_experts": (POINTER(Weight), POINTER(Weight), _N, POINTER(Glu), _P, _N, NumRows, _P, _P, _N, _P),
    "k3_conv": (POINTER(Conv), POINTER(Step), _P, _N, _P),
    "k3_kda_extend": (POINTER(Kda), POINTER(Step), _P, _N, _P, _N, _P, _N, _P),
    "k3_kda_decode": (POINTER(Kda), POINTER(Step), _P, _N, _P, _N, _P, _N, _P),
    "k3_mla_write": (POINTER(Step), _P, _N, _N, _P),
    "k3_mla_extend": (POINTER(Mla), POINTER(Step), _P, _N, _P),
    "k3_mla_decode": (POINTER(Mla), POINTER(Step), _P, _N, _P),
    "k3_rotation": (_P, NumRows, _N, _P, _N, c_float, _P, _P),
    "k3_norm_rope": (POINTER(NormRope), _P, _N, NumRows, _P, _P, _P, _P),
    "k3_rotate": (_P, _N, _N, NumRows, _N, _N, _P, _P, _N, _P),
    "k3_block_attention": (POINTER(BlockAttention), POINTER(Blocks), _P, _N, _P, _N, _P, _N, _P),
    "k3_write_context": (_P, _N, NumRows, _N, _P, _P, _P, _N, _N, _N),
    "k3_recur": (_P, _N, _P, _N, NumRows, _N, _P, _P),
    "k3_confidences": (_P, _N, _P, _N, _P, c_float, _P, NumRows, _N, _P),
    "k3_choose": (POINTER(Draws), _P, _N, _P, _N, _N, NumRows, _N, _P, _P),
}
"""Functions that a program can call: their arguments after the context."""


def load_library(path: Path | None = None) -> ctypes.CDLL:
    """The library with its signatures. Raises BackendError when it is missing, broken or of another version."""
    path = path or LIBRARY_PATH
    if not path.exists():
        raise BackendError(
            f"model.device: the cpu backend is not built ({path} is missing). It needs a C++ compiler: install g++ "
            f"(apt-get install g++), then run `{BUILD_COMMAND}`; or choose the backend reference"
        )
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.k3_abi_version())
    except (OSError, AttributeError) as error:
        raise BackendError(f"cannot load {path}: {error}; run `{BUILD_COMMAND}` again") from error
    if version != ABI_VERSION:
        raise BackendError(f"{path} has ABI version {version}, {ABI_VERSION} is needed; run `{BUILD_COMMAND}` again")
    library.k3_best_isa.restype = c_char_p
    library.k3_open.argtypes = (c_char_p, c_int)
    library.k3_open.restype = c_void_p
    library.k3_close.argtypes = (c_void_p,)
    library.k3_close.restype = None
    library.k3_replayed.argtypes = (c_char_p,)
    library.k3_replayed.restype = c_void_p
    library.k3_replay.argtypes = (c_void_p, _P, _N, _N)
    library.k3_replay.restype = None
    library.k3_sample.argtypes = (c_void_p, POINTER(Draws), _P, _N, _N, _N, _P)
    library.k3_sample.restype = None
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = (c_void_p, *arguments)
        function.restype = None
    return library


CheckedCopy = Callable[[int, int, int, int], int]
"""(address of the target, of the source, number of bytes, checksum to go on from): the CRC32C of what was copied
(csrc/checked_copy.h). The addresses must be valid.
"""


def load_checked_copy() -> tuple[CheckedCopy, CheckedCopy]:
    """The copy that lets other threads run meanwhile, and the one that does not. Raises BackendError when the library
    or the instruction of the processor is missing.
    """
    if not LIBRARY_PATH.exists():
        raise BackendError(f"{LIBRARY_PATH} is not built; it takes g++ (apt-get install g++) and `{BUILD_COMMAND}`")
    try:
        freely, alone = ctypes.CDLL(str(LIBRARY_PATH)), ctypes.PyDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise BackendError(f"cannot load {LIBRARY_PATH}: {error}; run `{BUILD_COMMAND}` again") from error
    if not hasattr(freely, "k3_copy_crc32c"):
        raise BackendError(f"{LIBRARY_PATH} was built before its sources changed; run `{BUILD_COMMAND}` again")
    if not freely.k3_has_crc32c():
        raise BackendError("this processor has no CRC32C instruction that the library knows")
    for library in (freely, alone):
        library.k3_copy_crc32c.argtypes = (c_void_p, c_void_p, c_int64, c_uint32)
        library.k3_copy_crc32c.restype = c_uint32
    return freely.k3_copy_crc32c, alone.k3_copy_crc32c
