"""Backends of the operation table. `load` is the only branch on hardware in the project."""

import torch

from k3svc.errors import BackendError
from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.npu.backend import load_npu
from k3svc.ops.reference import Reference
from k3svc.ops.table import Ops

BACKENDS = ("reference", "cpu", "npu", "npu-emulated")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(device: str, *, dtype: str, threads: int) -> Ops:
    """The backend of this name with float32 or bfloat16 activations and `threads` compute threads in this process.

    The name may carry options of the backend behind a colon, such as `npu:kda-extend=decomposed`.
    Raises BackendError when this build lacks the backend or does not know the dtype.
    """
    if dtype not in DTYPES:
        raise BackendError(f"model.dtype: got {dtype!r}; allowed: {', '.join(DTYPES)}", dtype=dtype)
    name, _, options = device.partition(":")
    if name not in BACKENDS or (options and not name.startswith("npu")):
        raise BackendError(
            f"model.device: this build has no backend {device!r}; it has: {', '.join(BACKENDS)}", device=device
        )
    torch.set_num_threads(threads)
    if name == "cpu":
        if dtype != "float32":
            raise BackendError(f"model.dtype: got {dtype!r}; the cpu backend computes in float32", dtype=dtype)
        return Cpu(threads=threads)
    if name == "npu":
        return load_npu(options, DTYPES[dtype])
    if name == "npu-emulated":
        # Loading the emulator registers operators in the process.
        from k3svc.ops.npu_emulated.backend import load_npu_emulated

        return load_npu_emulated(options, DTYPES[dtype])
    return Reference(DTYPES[dtype], threads=threads)
