"""What the tests of the Ascend backend share: backends, small pools, steps, and a record of raw operator arguments."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from k3svc.ops.npu.options import NpuOptions
from k3svc.ops.npu_emulated.backend import NpuEmulated
from k3svc.ops.npu_emulated.contract import Rules
from k3svc.ops.reference import Reference
from k3svc.ops.table import CacheSpec, KdaGate, StepMeta
from tests.oracles.loop import Tracked, step_meta

RELAXED = Rules(fp32=True, shape_relaxed=True)
CONTRACT = Rules()
PAGE = 16
EXTENDS = ("fused", "decomposed")
STORES = ("scatter", "prefix")


def emulated(
    kda_extend: str = "fused", *, rules: Rules = RELAXED, dtype: torch.dtype = torch.float32, **options: str
) -> NpuEmulated:
    """The adapters on the emulated device."""
    return NpuEmulated(dtype, options=NpuOptions(kda_extend=kda_extend, **options), rules=rules)


def reference(dtype: torch.dtype = torch.float32) -> Reference:
    """The oracle."""
    return Reference(dtype, threads=1)


def small_spec(**changes: Any) -> CacheSpec:
    """One KDA layer (0) with K != V and one MLA layer (1)."""
    values: dict[str, Any] = {
        "kda_layers": (0,),
        "mla_layers": (1,),
        "kda_heads": 2,
        "kda_key_dim": 16,
        "kda_value_dim": 8,
        "conv_width": 4,
        "kv_lora_rank": 32,
        "rope_dim": 16,
        "vocab_size": 64,
        "num_slots": 6,
        "num_pages": 40,
        "page_size": PAGE,
        "state_dtype": torch.float32,
        "kv_dtype": torch.float32,
    }
    return CacheSpec(**{**values, **changes})


def real_spec(**changes: Any) -> CacheSpec:
    """Head and latent sizes that the device takes."""
    sizes = {"kda_key_dim": 128, "kda_value_dim": 128, "kv_lora_rank": 512, "rope_dim": 64, "page_size": 128}
    return small_spec(**{**sizes, "kv_dtype": torch.bfloat16, "num_pages": 8, **changes})


def steps(rows: Sequence[tuple[int, int, int]], *, page: int = PAGE, num_rows: int | None = None) -> StepMeta:
    """StepMeta of (slot, start, rows); each sequence gets pages of its own, descending."""
    tracked = []
    first = 1
    for slot, start, count in rows:
        needed = -(-(start + count) // page)
        tracked.append((Tracked(slot=slot, pages=list(range(first, first + needed))[::-1], length=start), count))
        first += needed if slot >= 0 else 0
    return step_meta(tracked, page, num_rows)


def random_gate(spec: CacheSpec, generator: torch.Generator, *, lower_bound: float | None = -5.0) -> KdaGate:
    """Gate parameters of all magnitudes."""
    return KdaGate(
        a=torch.rand(spec.kda_heads, generator=generator) * 8 + 0.5,
        dt_bias=torch.randn(spec.kda_heads, spec.kda_key_dim, generator=generator),
        lower_bound=lower_bound,
    )


def fill(pool: Any, generator: torch.Generator) -> None:
    """Random content for every tensor of a layer's pool."""
    for tensor in vars(pool).values():
        if isinstance(tensor, Tensor):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)


class NoKernels:
    """A finder, for the head of sys.meta_path, that lets no package with Python kernels be found."""

    def find_spec(self, name: str, *_: object) -> None:
        if name in ("sgl_kernel_npu", "sglang"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextmanager
def capturing(ops: NpuEmulated) -> Iterator[None]:
    """Whatever the backend does inside is part of a captured graph."""
    ops.session.is_capturing = True
    try:
        yield
    finally:
        ops.session.is_capturing = False


class RawCalls(TorchFunctionMode):
    """Records operator calls as the adapter wrote them: the dispatcher drops arguments that equal their default."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name.startswith("npu."):
            self.calls.append((name.split(".")[1], args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def keywords(self, name: str) -> dict[str, Any]:
        """Keyword arguments of the only call of npu.name."""
        (found,) = [keywords for called, _, keywords in self.calls if called == name]
        return found
