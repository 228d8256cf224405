"""Kimi Delta Attention on Ascend: convolution, two forms of extend, packed decode."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from k3svc.ops.npu.cache import KdaPool
from k3svc.ops.npu.steps import DecodeStep, ExtendStep
from k3svc.ops.npu.vendor import Vendor
from k3svc.ops.table import KdaGate

SILU = 1
PREFILL, UPDATE = 0, 1


def conv_extend(u: Tensor, weight: Tensor, pool: KdaPool, step: ExtendStep) -> Tensor:
    """`Ops.kda_conv_extend`. Rows of the pool are read and written in place; no other slot is touched."""
    if step.num_live == 0:
        return torch.zeros_like(u)
    out = torch.ops.npu.causal_conv1d(
        step.take(u).contiguous(),
        taps(weight, u.dtype),
        pool.conv,
        query_start_loc=step.cu_seqlens,
        cache_indices=step.slots,
        has_initial_state=step.has_state,
        activation_mode=SILU,
        run_mode=PREFILL,
    )
    return step.put(out)


def conv_decode(u: Tensor, weight: Tensor, pool: KdaPool, step: DecodeStep) -> Tensor:
    """`Ops.kda_conv_decode`. Without a count of accepted tokens the window must be the plain one."""
    assert pool.conv.shape[1] == weight.shape[1] - 1, "a window longer than W - 1 needs num_accepted_tokens"
    out = torch.ops.npu.causal_conv1d(
        u[:, None].contiguous(),
        taps(weight, u.dtype),
        pool.conv,
        cache_indices=step.slots,
        activation_mode=SILU,
        run_mode=UPDATE,
    )
    return step.hide_padding(out[:, 0])


def taps(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[channels, W] → [W, channels] in the dtype of the rows."""
    return weight.t().to(dtype).contiguous()


def extend(
    vendor: Vendor,
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: KdaGate,
    pool: KdaPool,
    step: ExtendStep,
    *,
    chunk: int,
    is_fused: bool,
) -> Tensor:
    """`Ops.kda_extend`."""
    _, heads, value_dim, key_dim = pool.state.shape
    if step.num_live == 0:
        return qkv.new_zeros(step.num_rows, heads, value_dim, dtype=torch.float32)
    q, k, v = split_heads(step.take(qkv), heads, key_dim, value_dim)
    rows = _Rows(
        q=vendor.l2norm_fwd(q.contiguous()),
        k=vendor.l2norm_fwd(k.contiguous()),
        v=v.contiguous(),
        g=log_decay(vendor, step.take(f), gate, key_dim),
        beta=step.take(b).float().sigmoid()[None],
    )
    run = _extend_fused if is_fused else _extend_decomposed
    return step.put(run(vendor, rows, pool, step, chunk)[0].float())


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Normalised q and k, v, natural log decay and sigmoided beta, each [1, T, ...] and contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@dataclass(frozen=True, kw_only=True)
class ChunkKdaOutputs:
    """What is read of chunk_kda_fwd's 11-tuple. The one place that knows its positions."""

    out: Tensor
    """[1, T, HV, V]."""
    final_state: Tensor
    """float32 [B, HV, V, K]."""

    @classmethod
    def of(cls, outputs: tuple[Tensor | None, ...]) -> "ChunkKdaOutputs":
        """Names the outputs that `_extend_fused` asks for."""
        out, final_state = outputs[0], outputs[1]
        assert out is not None and final_state is not None
        return cls(out=out, final_state=final_state)


def _extend_fused(_vendor: Vendor, rows: _Rows, pool: KdaPool, step: ExtendStep, chunk: int) -> Tensor:
    """The operator takes one state a sequence and leaves the pool alone: gather the live slots, scatter them back."""
    initial = pool.state.index_select(0, step.slots).float().contiguous()
    initial.index_fill_(0, step.fresh, 0)
    outputs = ChunkKdaOutputs.of(
        torch.ops.npu.chunk_kda_fwd(
            rows.q,
            rows.k,
            rows.v,
            rows.g,
            rows.beta,
            initial_state=initial,
            cu_seqlens=step.cu_seqlens,
            layout="BSND",
            scale=rows.q.shape[-1] ** -0.5,
            chunk_size=chunk,
            use_gate_in_kernel=False,
            state_v_first=True,
            output_final_state=True,
        )
    )
    pool.state.index_copy_(0, step.slots, outputs.final_state.to(pool.state.dtype))
    return outputs.out


def _extend_decomposed(vendor: Vendor, rows: _Rows, pool: KdaPool, step: ExtendStep, chunk: int) -> Tensor:
    """Seven kernels. Their gate is the chunk's running sum in log2; the h kernel reads and writes the pool itself."""
    packed = {"cu_seqlens": step.cu_seqlens}
    indices = vendor.prepare_chunk_indices(step.cu_seqlens, chunk)
    scale = rows.q.shape[-1] ** -0.5
    pool.state.index_fill_(0, step.slots.index_select(0, step.fresh), 0)
    total = vendor.chunk_local_cumsum(rows.g, chunk, scale=math.log2(math.e), **packed)
    a, scores = vendor.chunk_kda_scaled_dot_kkt_fwd(
        rows.q, rows.k, gk=total, beta=rows.beta, scale=scale, chunk_size=chunk, **packed
    )
    inverse = vendor.solve_tril_npu(a, output_dtype=rows.k.dtype, **packed)
    w, u, k_rest = vendor.recompute_w_u_fwd_npu(
        rows.k, rows.v, rows.beta, inverse, total, chunk_indices=indices, **packed
    )
    h, v_new = vendor.chunk_gated_delta_rule_fwd_h_npu(
        k_rest,
        w,
        u,
        gk=total,
        initial_state=pool.state,
        initial_state_indices=step.slots,
        chunk_indices=indices,
        use_exp2=True,
        **packed,
    )
    # Not v itself: for a single token it is a view of the caller's rows.
    out: Tensor = torch.empty_like(rows.v)
    vendor.chunk_gla_fwd_o_gk_npu(
        rows.q, v_new, total, scores, h, out, scale, chunk_size=chunk, chunk_indices=indices, **packed
    )
    return out


def decode(vendor: Vendor, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, pool: KdaPool, step: DecodeStep) -> Tensor:
    """`Ops.kda_decode`: all rows in one launch; norm, gate, beta and scale happen inside."""
    _, heads, value_dim, key_dim = pool.state.shape
    q, k, v = split_heads(qkv, heads, key_dim, value_dim)
    out: Tensor = vendor.fused_sigmoid_gating_delta_rule_update(
        A_log=gate.a.log(),
        a=f,
        dt_bias=gate.dt_bias.flatten(),
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=q,
        k=k,
        v=v,
        b=b,
        initial_state_source=pool.state,
        initial_state_indices=step.slots,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=step.cu_seqlens,
        is_kda=True,
        lower_bound=gate.lower_bound,
    )
    return step.hide_padding(out[0].float())


def split_heads(qkv: Tensor, heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views [1, T, HV, K] of q and k, and [1, T, HV, V] of v."""
    q, k, v = torch.split(qkv, [heads * key_dim, heads * key_dim, heads * value_dim], dim=-1)
    return (
        torch.unflatten(q, -1, (heads, key_dim))[None],
        torch.unflatten(k, -1, (heads, key_dim))[None],
        torch.unflatten(v, -1, (heads, value_dim))[None],
    )


def log_decay(vendor: Vendor, f: Tensor, gate: KdaGate, key_dim: int) -> Tensor:
    """float32 [1, T, HV, K], natural log, a token at a time."""
    g: Tensor = vendor.fused_kda_gate_npu(
        f, gate.a.log(), key_dim, gate_bias=gate.dt_bias.flatten(), lower_bound=gate.lower_bound
    )
    return g[None].contiguous()
