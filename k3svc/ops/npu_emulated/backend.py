"""NpuOps whose table functions run on the emulated device."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

import k3svc
from k3svc.ops.npu.backend import NpuOps
from k3svc.ops.npu.draft import NpuDraft
from k3svc.ops.npu.options import NpuOptions, split_options
from k3svc.ops.npu.vendor import MODULES, OPERATORS, Need, Vendor, called
from k3svc.ops.npu_emulated import (
    attention,
    convolution,
    graphs,
    grouped,
    kda,
    kda_decomposed,
    kda_verify,
    mixture,
    registry,
    rowwise,
)
from k3svc.ops.npu_emulated.contract import Rules, Session
from k3svc.ops.npu_emulated.device import on_device

EMULATIONS = (attention, convolution, grouped, kda, kda_decomposed, kda_verify, mixture, rowwise)
"""Importing these declares the operators."""

TABLE = tuple(name for name, value in vars(NpuOps).items() if callable(value) and not name.startswith("_"))


DRAFT_TABLE = tuple(name for name, value in vars(NpuDraft).items() if callable(value) and not name.startswith("_"))


def emulated_vendor() -> Vendor:
    """The Python kernels, emulated."""
    return Vendor(
        situ=rowwise.situ,
        mix_fused=rowwise.mix_fused,
        fused_kda_gate_npu=kda.fused_kda_gate_npu,
        kda_target_verify_npu=kda_verify.kda_target_verify_npu,
        speculative_state_scatter_npu=kda_verify.speculative_state_scatter_npu,
        split_qkv_rmsnorm_rope=rowwise.split_qkv_rmsnorm_rope,
        fused_split_qk_norm=rowwise.fused_split_qk_norm,
        store_kv_cache_prefix_valid_npu_triton=attention.store_kv_cache_prefix_valid_npu_triton,
        prepare_chunk_indices=kda_decomposed.prepare_chunk_indices,
        solve_tril_npu=kda_decomposed.solve_tril_npu,
        recompute_w_u_fwd_npu=kda_decomposed.recompute_w_u_fwd_npu,
        chunk_gated_delta_rule_fwd_h_npu=kda_decomposed.chunk_gated_delta_rule_fwd_h_npu,
        chunk_gla_fwd_o_gk_npu=kda_decomposed.chunk_gla_fwd_o_gk_npu,
        l2norm_fwd=kda_decomposed.l2norm_fwd,
        chunk_local_cumsum=kda_decomposed.chunk_local_cumsum,
        chunk_kda_scaled_dot_kkt_fwd=kda_decomposed.chunk_kda_scaled_dot_kkt_fwd,
        fused_sigmoid_gating_delta_rule_update=kda.fused_sigmoid_gating_delta_rule_update,
    )


def emulated_needs(options: NpuOptions) -> list[Need]:
    """Every operator and kernel that the adapters call under the options, all of them served by this package."""
    return [
        Need(name=name, package=__package__, version=k3svc.__version__, problem=None)
        for name in called((*OPERATORS, *MODULES), options)
    ]


class NpuEmulated(NpuOps):
    """`session` holds the rules, the calls so far, and whether a graph is being captured."""

    name = "npu-emulated"

    def __init__(self, dtype: torch.dtype, *, options: NpuOptions, rules: Rules) -> None:
        registry.install()
        api: Any = graphs
        super().__init__(dtype, vendor=emulated_vendor(), options=options, device=torch.device("cpu"), api=api)
        self.session = Session(rules=rules)
        self.draft = EmulatedDraft(self._vendor, self._mask, self.rms_norm, self.sample, session=self.session)
        if rules.fp32:
            self.dtypes = (torch.bfloat16, torch.float32)


def load_npu_emulated(text: str, dtype: torch.dtype) -> NpuEmulated:
    """The backend on the emulated device; text as for npu, and the relaxations. Raises BackendError."""
    options, relaxations = split_options(text)
    return NpuEmulated(dtype, options=options, rules=Rules.parse(relaxations))


def _emulated(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(self: "NpuEmulated | EmulatedDraft", *args: Any, **kwargs: Any) -> Any:
        with on_device(self.session):
            return function(self, *args, **kwargs)

    return run


for _name in TABLE:
    setattr(NpuEmulated, _name, _emulated(getattr(NpuOps, _name)))


class EmulatedDraft(NpuDraft):
    """Its functions run on the emulated device too."""

    def __init__(self, *args: Any, session: Session) -> None:
        super().__init__(*args)
        self.session = session


for _name in DRAFT_TABLE:
    setattr(EmulatedDraft, _name, _emulated(getattr(NpuDraft, _name)))
