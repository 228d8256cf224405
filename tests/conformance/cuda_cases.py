"""What the tests of the cuda backend share: the backend on a GPU, or interpreted on the CPU where there is none."""

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.table import CacheSpec, KdaGate, Mode, Ops, Step, StepMeta
from tests.conformance.cpu_cases import cache_spec, rand

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cuda_ops(dtype: torch.dtype = torch.float32, *, is_fast: bool = False) -> Ops:
    """The backend; Triton, which few machines have, is imported here."""
    if DEVICE.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from k3svc.ops.cuda.backend import CudaOps

    return CudaOps(dtype, device=DEVICE, is_fast=is_fast)


def on_device(meta: StepMeta) -> StepMeta:
    names = ("slots", "starts", "cu_seqlens", "slot_mapping", "block_tables")
    return replace(meta, **{name: getattr(meta, name).to(DEVICE) for name in names})


class KdaLayer:
    """Inputs of a KDA layer for some rows, and its weights; the same numbers for every backend."""

    def __init__(
        self, num_rows: int, *, heads: int, key: int, value: int, bound: float | None, dtype: torch.dtype, seed: int = 0
    ) -> None:
        source = torch.Generator().manual_seed(seed)
        self.spec: CacheSpec = cache_spec(
            kda_heads=heads, kda_key_dim=key, kda_value_dim=value, num_slots=8, kv_dtype=dtype, kda_layers=(0,)
        )
        channels = self.spec.conv_channels
        self.conv = rand(source, channels, 4)
        self.u = rand(source, num_rows, channels).to(dtype)
        self.f = rand(source, num_rows, heads * key).to(dtype)
        self.b = rand(source, num_rows, heads).to(dtype)
        self.gate = KdaGate(a=rand(source, heads).exp(), dt_bias=rand(source, heads, key), lower_bound=bound)
        self.states = rand(source, 9, heads, value, key)
        self.convs = rand(source, 9, 3, channels).to(dtype)

    def new_cache(self, ops: Ops) -> Any:
        cache = ops.new_cache(self.spec)
        pool = cache.layer(0)
        pool.state.copy_(self.states)
        pool.conv.copy_(self.convs)
        return cache

    def run(self, ops: Ops, cache: Any, mode: Mode, meta: StepMeta, rows: slice = slice(None)) -> tuple[Tensor, Step]:
        """[N, HV, V] of convolution and recurrence."""
        to = ops.device
        gate = KdaGate(a=self.gate.a.to(to), dt_bias=self.gate.dt_bias.to(to), lower_bound=self.gate.lower_bound)
        step = ops.prepare(on_device(meta) if to == DEVICE else meta, mode, self.spec)
        kinds = {
            "extend": (ops.kda_conv_extend, ops.kda_extend),
            "decode": (ops.kda_conv_decode, ops.kda_decode),
            "verify": (ops.kda_conv_verify, ops.kda_verify),
        }
        conv, kda = kinds[mode]
        layer = cache.layer(0)
        qkv = conv(self.u[rows].to(to), self.conv.to(to), layer, step)
        return kda(qkv, self.f[rows].to(to), self.b[rows].to(to), gate, layer, step), step


def close(actual: Tensor, expected: Tensor, bound: float) -> None:
    """|actual - expected| over |expected|, as norms; NaN never passes."""
    actual, expected = actual.cpu().double(), expected.cpu().double()
    error = float((actual - expected).norm() / expected.norm())
    assert error < bound, error
