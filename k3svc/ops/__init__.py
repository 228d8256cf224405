"""Backends of the operation table. `load` is the only branch on hardware in the project."""

import torch

from k3svc.errors import BackendError
from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.npu.backend import load_npu
from k3svc.ops.npu.options import split_options
from k3svc.ops.npu.vendor import Need, probe
from k3svc.ops.reference import Reference
from k3svc.ops.table import Ops

BACKENDS = ("reference", "cpu", "cuda", "npu", "npu-emulated")
WITH_OPTIONS = ("cuda", "npu", "npu-emulated")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(device: str, *, dtype: str, threads: int) -> Ops:
    """The backend of this name with float32 or bfloat16 activations and `threads` compute threads in this process.

    The name may carry options of the backend behind a colon, such as `npu:kda-extend=decomposed`.
    Raises BackendError when this build lacks the backend or does not know the dtype.
    """
    if dtype not in DTYPES:
        raise BackendError(f"model.dtype: got {dtype!r}; allowed: {', '.join(DTYPES)}", dtype=dtype)
    name, _, options = device.partition(":")
    if name not in BACKENDS or (options and name not in WITH_OPTIONS):
        raise BackendError(
            f"model.device: this build has no backend {device!r}; it has: {', '.join(BACKENDS)}", device=device
        )
    torch.set_num_threads(threads)
    if name == "cpu":
        if dtype != "float32":
            raise BackendError(
                f"model.dtype: got {dtype!r}; the cpu backend computes in float32, model.device=reference in both",
                dtype=dtype,
            )
        return Cpu(threads=threads)
    if name == "cuda":
        return _load_cuda(options, DTYPES[dtype])
    if name == "npu":
        return load_npu(options, DTYPES[dtype])
    if name == "npu-emulated":
        # Loading the emulator registers operators in the process.
        from k3svc.ops.npu_emulated.backend import load_npu_emulated

        return load_npu_emulated(options, DTYPES[dtype])
    return Reference(DTYPES[dtype], threads=threads)


def needs(device: str) -> list[Need]:
    """The vendor's operators and kernels that a backend calls under its options and what serves each; none of a backend
    without any. Raises BackendError for an option's value that is none.
    """
    name, _, options = device.partition(":")
    if name == "npu":
        return probe(split_options(options)[0])
    if name == "npu-emulated":
        from k3svc.ops.npu_emulated.backend import emulated_needs

        return emulated_needs(split_options(options)[0])
    return []


def _load_cuda(options: str, dtype: torch.dtype) -> Ops:
    try:
        # Triton is not installed where there is no GPU.
        import triton  # noqa: F401 - asked for here, so that only its own absence is reported
    except ImportError as error:
        raise BackendError(
            "model.device: the cuda backend needs triton; pip install 'k3svc[cuda]'", device="cuda"
        ) from error
    from k3svc.ops.cuda.backend import load_cuda

    return load_cuda(options, dtype)
