"""What the adapters need from vendor packages, where it comes from, and what to install when it is missing.

Operators are called as torch.ops.npu.*; Python kernels are called through the Vendor value that `load` fills. `probe`
checks both without running anything, for start-up and for `k3svc doctor`. This is the one place that knows where a
name comes from.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import _jit_get_schemas_for_operator

from k3svc.errors import BackendError
from k3svc.ops.npu.options import NpuOptions

Kernel = Callable[..., Any]

INSTALL = {
    "torch_npu": "pip install 'k3svc[npu]' (torch_npu pinned to the minor version of torch), with CANN installed",
    "sgl-kernel-npu": "pip install FILE.whl, the wheel for this CANN version, not older than 2026-09, of "
    "https://github.com/sgl-project/sgl-kernel-npu/releases",
    "sglang": "pip install 'k3svc[npu]' (what it imports) and pip install --no-deps sglang==0.5.23 (its Triton kernels "
    "of linear attention), with triton-ascend",
}
"""How to get each package."""

OPERATORS = {
    "npu_rms_norm": "torch_npu",
    "npu_fused_infer_attention_score": "torch_npu",
    "npu_scatter_nd_update_": "torch_npu",
    "npu_transpose_batchmatmul": "torch_npu",
    "npu_top_k_top_p": "torch_npu",
    "npu_moe_gating_top_k": "torch_npu",
    "npu_moe_init_routing_v2": "torch_npu",
    "npu_grouped_matmul": "torch_npu",
    "npu_moe_finalize_routing": "torch_npu",
    "npu_swiglu": "torch_npu",
    "npu_dynamic_quant": "torch_npu",
    "npu_quant_matmul": "torch_npu",
    "npu_format_cast": "torch_npu",
    "causal_conv1d": "sgl-kernel-npu",
    "chunk_kda_fwd": "sgl-kernel-npu",
}
"""Operators of the namespace npu and the package that registers each."""

MODULES = {
    "situ": "sgl_kernel_npu.activation.situ",
    "mix_fused": "sgl_kernel_npu.kimi_k3.attn_residual",
    "fused_kda_gate_npu": "sgl_kernel_npu.fla.kda_gate",
    "kda_target_verify_npu": "sgl_kernel_npu.fla.kda_target_verify",
    "speculative_state_scatter_npu": "sgl_kernel_npu.mamba.speculative_state_scatter",
    "split_qkv_rmsnorm_rope": "sgl_kernel_npu.norm.split_qkv_rmsnorm_rope",
    "fused_split_qk_norm": "sgl_kernel_npu.norm.fused_split_qk_norm",
    "store_kv_cache_prefix_valid_npu_triton": "sgl_kernel_npu.mem_cache.kv_cache_store",
    "prepare_chunk_indices": "sgl_kernel_npu.fla.utils",
    "solve_tril_npu": "sgl_kernel_npu.fla.solve_tril",
    "recompute_w_u_fwd_npu": "sgl_kernel_npu.fla.kda_prefill",
    "chunk_gated_delta_rule_fwd_h_npu": "sgl_kernel_npu.fla.kda_chunk_delta_h",
    "chunk_gla_fwd_o_gk_npu": "sgl_kernel_npu.fla.kda_prefill",
    "l2norm_fwd": "sglang.kernels.ops.attention.fla.l2norm",
    "chunk_local_cumsum": "sglang.kernels.ops.attention.fla.cumsum",
    "chunk_kda_scaled_dot_kkt_fwd": "sglang.kernels.ops.attention.fla.kda",
    "fused_sigmoid_gating_delta_rule_update": "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",
}
"""Python kernels and the module of each: where sglang 0.5.23 imports it from, or an earlier version, of those of the
decomposed extend that sgl-kernel-npu has."""

CHOSEN = {
    "npu_scatter_nd_update_": "mla-store=scatter",
    "store_kv_cache_prefix_valid_npu_triton": "mla-store=prefix",
    "fused_split_qk_norm": "mla-split-norm=fused",
    "chunk_kda_fwd": "kda-extend=fused",
    "prepare_chunk_indices": "kda-extend=decomposed",
    "chunk_local_cumsum": "kda-extend=decomposed",
    "chunk_kda_scaled_dot_kkt_fwd": "kda-extend=decomposed",
    "solve_tril_npu": "kda-extend=decomposed",
    "recompute_w_u_fwd_npu": "kda-extend=decomposed",
    "chunk_gated_delta_rule_fwd_h_npu": "kda-extend=decomposed",
    "chunk_gla_fwd_o_gk_npu": "kda-extend=decomposed",
}
"""What is called under one choice of `model.device` alone, and so may be missing under another."""

CHUNK_KDA_ARGUMENTS = (
    "q k v g beta a_log dt_bias initial_state cu_seqlens chunk_indices layout scale chunk_size safe_gate lower_bound "
    "use_gate_in_kernel state_v_first output_final_state output_gk output_w output_u output_qg output_kg output_v_new "
    "output_h"
)
CHUNK_KDA_RETURNS = 11


class Vendor(SimpleNamespace):
    """The Python kernels that are called under the options, by name."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """One operator or kernel: what serves it, or why nothing does."""

    name: str
    package: str
    version: str | None
    """Of the installed package; None: not installed."""
    problem: str | None
    """None: usable."""


def load(options: NpuOptions) -> Vendor:
    """Imports the vendor packages. Raises BackendError that names what is missing and what to install."""
    missing: dict[tuple[str, str], list[str]] = {}
    for need in probe(options):
        if need.problem is not None:
            name = f"{need.name} ({CHOSEN[need.name]})" if need.name in CHOSEN else need.name
            missing.setdefault((need.package, need.problem), []).append(name)
    if missing:
        lines = [
            f"{', '.join(names)}: {problem}.\n  Needs {package}: {INSTALL[package]}"
            for (package, problem), names in missing.items()
        ]
        raise BackendError("model.device: npu lacks\n  " + "\n  ".join(lines), device="npu")
    return Vendor(**{name: getattr(importlib.import_module(MODULES[name]), name) for name in called(MODULES, options)})


def called(names: Iterable[str], options: NpuOptions) -> list[str]:
    """Those of the operators or kernels that are called under the options."""
    return [name for name in names if CHOSEN.get(name) in (None, *options.words)]


def probe(options: NpuOptions) -> list[Need]:
    """Every operator and kernel that the adapters call under the options, in the order of the tables above."""
    failures = {"torch_npu": _import("torch_npu"), "sgl-kernel-npu": _import("sgl_kernel_npu")}
    found = _version("torch_npu")
    if found is not None:
        failures["torch_npu"] = check_torch_npu_version(found, torch.__version__) or failures["torch_npu"]
    needs = [_operator(name, OPERATORS[name], failures[OPERATORS[name]]) for name in called(OPERATORS, options)]
    return needs + [_kernel(name, MODULES[name]) for name in called(MODULES, options)]


def check_chunk_kda_schema(arguments: Sequence[str], num_returns: int) -> str | None:
    """Why this chunk_kda_fwd is another than the one the adapter reads; siblings of the same name exist."""
    if " ".join(arguments) != CHUNK_KDA_ARGUMENTS:
        return f"has arguments {', '.join(arguments)}"
    if num_returns != CHUNK_KDA_RETURNS:
        return f"returns {num_returns} values, not {CHUNK_KDA_RETURNS}"
    return None


def check_torch_npu_version(found: str, torch_version: str) -> str | None:
    """Why this torch_npu does not go with this torch: it is built for one minor version."""
    if found.split(".")[:2] == torch_version.split(".")[:2]:
        return None
    return f"torch_npu {found} is built for another minor version than that of torch {torch_version}"


def _import(module: str) -> str | None:
    """Why a module cannot be imported."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _operator(name: str, package: str, failure: str | None) -> Need:
    schemas = _jit_get_schemas_for_operator(f"npu::{name}")
    problem = failure
    if problem is None and not schemas:
        problem = "the installed version does not register it"
    elif problem is None and name == "chunk_kda_fwd":
        problem = check_chunk_kda_schema([argument.name for argument in schemas[0].arguments], len(schemas[0].returns))
    return Need(name=name, package=package, version=_version(package), problem=problem)


def _kernel(name: str, module: str) -> Need:
    package = "sglang" if module.startswith("sglang") else "sgl-kernel-npu"
    problem = _import(module)
    if problem is None and not hasattr(importlib.import_module(module), name):
        problem = f"{module} has no {name}"
    return Need(name=name, package=package, version=_version(package), problem=problem)
