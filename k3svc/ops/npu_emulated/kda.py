"""chunk_kda_fwd of sgl-kernel-npu, and the recurrent kernel that decode uses."""

import math

import torch
from torch import Tensor

from k3svc.ops.npu_emulated.contract import (
    require,
    require_contiguous,
    require_dtype,
    require_eager,
    require_size,
)
from k3svc.ops.npu_emulated.delta_rule import chunk_rows, decayed_products, log_decay, recurrence
from k3svc.ops.npu_emulated.device import kernel
from k3svc.ops.npu_emulated.registry import operator

_BF16, _FP32 = torch.bfloat16, torch.float32
_MAX_SEQUENCES = 1024


@operator("chunk_kda_fwd")
def chunk_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    layout: str,
    scale: float,
    chunk_size: int,
    safe_gate: bool,
    lower_bound: float,
    use_gate_in_kernel: bool,
    state_v_first: bool,
    output_final_state: bool,
    output_gk: bool,
    output_w: bool,
    output_u: bool,
    output_qg: bool,
    output_kg: bool,
    output_v_new: bool,
    output_h: bool,
) -> tuple[Tensor | None, ...]:
    """An 11-tuple with None where nothing was asked for. Layout BSND with one row of packed sequences is emulated."""
    name = "chunk_kda_fwd"
    require_eager(name)
    require(layout == "BSND", name, f"layout {layout!r} is not emulated, BSND is")
    for letter, tensor in (("q", q), ("k", k), ("v", v)):
        require_dtype(name, letter, tensor, _BF16)
        require(tensor.dim() == 4, name, f"{letter} has rank {tensor.dim()}, must be 4 in BSND")
    require_dtype(name, "g", g, _FP32, _BF16)
    require_dtype(name, "beta", beta, _FP32, _BF16)
    batch, count, heads, width = q.shape
    value_heads, value_width = v.shape[2:]
    require(k.shape == q.shape, name, "q and k differ in shape")
    require(v.shape[:2] == q.shape[:2], name, "v has other tokens than q")
    require(g.shape == (batch, count, value_heads, width), name, f"g has shape {tuple(g.shape)}")
    require(beta.shape == (batch, count, value_heads), name, f"beta has shape {tuple(beta.shape)}")
    require(0 < heads <= 128 and 0 < value_heads <= 128 and value_heads % heads == 0, name, "illegal head counts")
    require_size(width == value_width and width in (64, 128), name, f"K {width}, V {value_width}: both 64 or both 128")
    require_size(chunk_size in (64, 128), name, f"chunk_size {chunk_size}: 64 or 128")
    require(count > 0, name, "no tokens")
    require(batch == 1 and cu_seqlens is not None, name, "packed sequences (B = 1 and cu_seqlens) are emulated")
    assert cu_seqlens is not None
    require(cu_seqlens.dtype == torch.int64, name, f"cu_seqlens is {cu_seqlens.dtype}, must be int64")
    require(cu_seqlens.dim() == 1 and cu_seqlens.numel() >= 2, name, "cu_seqlens needs two entries")
    bounds = cu_seqlens.tolist()
    require(bounds[0] == 0 and bounds[-1] == count and bounds == sorted(bounds), name, f"cu_seqlens {bounds}")
    require(len(bounds) - 1 <= _MAX_SEQUENCES, name, f"{len(bounds) - 1} sequences, at most {_MAX_SEQUENCES}")

    gate = g.double()[0]
    if use_gate_in_kernel:
        require(a_log is not None and a_log.dtype == _FP32, name, "use_gate_in_kernel needs a_log in float32")
        require(not safe_gate or -5.0 <= lower_bound < 0.0, name, f"lower_bound {lower_bound} outside of [-5, 0)")
        assert a_log is not None
        bias = 0.0 if dt_bias is None else dt_bias.double().view(value_heads, width)
        gate = log_decay(gate + bias, a_log.double(), lower_bound if safe_gate else None)
    sequences = len(bounds) - 1
    shape = (sequences, value_heads, value_width, width)
    state = torch.zeros(shape, dtype=torch.float64)
    if initial_state is not None:
        require(initial_state.dtype == _FP32, name, f"initial_state is {initial_state.dtype}, must be float32")
        want = shape if state_v_first else (*shape[:2], width, value_width)
        require(
            initial_state.shape == want,
            name,
            f"initial_state {tuple(initial_state.shape)}, must be {want}: one a sequence",
        )
        state = initial_state.double() if state_v_first else initial_state.double().transpose(-1, -2)
    queries, keys, values, betas = q.double()[0], k.double()[0], v.double()[0], beta.double()[0]
    out, final, starts = recurrence(queries * scale, keys, values, gate, betas, state, bounds[1:], chunk_size)
    parts = _within_chunks(queries, keys, values, gate, betas, starts, bounds[1:], chunk_size, scale)
    wanted = (output_gk, True, True, output_w, output_u, output_qg, output_kg, output_v_new)
    types = (_FP32, *[q.dtype] * 7)
    if not state_v_first:
        final, starts = final.transpose(-1, -2), starts.transpose(-1, -2)
    return (
        out.to(q.dtype)[None],
        final.to(_FP32).contiguous() if output_final_state else None,
        *(part.to(kind)[None] if want else None for part, kind, want in zip(parts, types, wanted, strict=True)),
        starts.to(q.dtype).contiguous()[None] if output_h else None,
    )


def _within_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor,
    ends: list[int],
    chunk: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """gk, Aqk, Akk, w, u, qg, kg, v_new, head-major; columns past a chunk's end are poison."""
    count, value_heads, width = g.shape
    group = value_heads // q.shape[1]
    q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    wide = [torch.full((value_heads, count, chunk), torch.nan, dtype=torch.float64) for _ in range(2)]
    narrow = [torch.zeros(value_heads, count, size, dtype=torch.float64) for size in (width, width, width, width)]
    values = [torch.zeros(value_heads, count, v.shape[2], dtype=torch.float64) for _ in range(2)]
    for index, (first, last) in enumerate(chunk_rows(ends, chunk)):
        own = slice(first, last)
        total = g[own].cumsum(0)
        aqk = scale * decayed_products(q[own], k[own], total)
        kk = decayed_products(k[own], k[own], total).tril(-1) * beta[own].t()[..., None]
        eye = torch.eye(last - first, dtype=torch.float64)
        akk = torch.linalg.solve_triangular(eye + kk, eye.expand_as(kk), upper=False, unitriangular=True)
        by_head = [x.transpose(0, 1) for x in (q[own], k[own], v[own], total)]
        b = beta[own].t()[..., None]
        grown = by_head[3].exp()
        w, u = akk @ (b * by_head[1] * grown), akk @ (b * by_head[2])
        parts = (
            by_head[3] / math.log(2.0),
            w,
            by_head[0] * grown,
            by_head[1] * (by_head[3][:, -1:] - by_head[3]).exp(),
        )
        wide[0][:, own, : last - first], wide[1][:, own, : last - first] = aqk, akk
        for target, part in zip(narrow, parts, strict=True):
            target[:, own] = part
        values[0][:, own] = u
        values[1][:, own] = u - w @ starts[index].transpose(-1, -2)
    gk, w_all, qg, kg = narrow
    return gk, wide[0], wide[1], w_all, values[0], qg, kg, values[1]


@kernel
def fused_kda_gate_npu(
    gate: Tensor,
    A_log: Tensor,
    head_dim: int,
    *,
    gate_bias: Tensor | None = None,
    beta: float = 1.0,
    threshold: float = 20.0,
    lower_bound: float | None = None,
) -> Tensor:
    """gate [..., H·D] → log decay float32 [..., H, D]."""
    name = "fused_kda_gate_npu"
    hidden = gate.shape[-1]
    if A_log.numel() * head_dim != hidden:
        raise ValueError(f"{name}: A_log of {A_log.numel()} heads of {head_dim} and gate of {hidden}")
    if gate_bias is not None and gate_bias.numel() != hidden:
        raise ValueError(f"{name}: gate_bias of {gate_bias.numel()} and gate of {hidden}")
    require(beta == 1.0 and threshold == 20.0, name, "another softplus than 1 and 20 is not emulated")
    x = gate.double().view(*gate.shape[:-1], -1, head_dim)
    if gate_bias is not None:
        x = x + gate_bias.double().view(-1, head_dim)
    return log_decay(x, A_log.double().view(-1), lower_bound).to(_FP32)


@kernel
def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
) -> Tensor:
    """q, k [1, T, H, K], v [1, T, HV, V], a [T, HV·K], b [T, HV] raw → [1, T, HV, V]; the pool is updated in place.

    A negative index starts from zeros and writes nothing. Tokens may be strided, heads and channels not.
    """
    name = "fused_sigmoid_gating_delta_rule_update"
    require(is_kda, name, "is_kda=False has one gate a head, which is not emulated")
    require(softplus_beta == 1.0 and softplus_threshold == 20.0, name, "another softplus is not emulated")
    _heads, width = q.shape[2:]
    value_heads, value_width = v.shape[2:]
    require(q.dim() == 4 and q.shape[0] == 1 and k.shape == q.shape, name, "q, k [1, T, H, K]")
    for letter, x in (("q", q), ("k", k), ("v", v)):
        require(x.stride()[2:] == (x.shape[3], 1), name, f"heads and channels of {letter} must be contiguous")
    require(a.shape == (q.shape[1], value_heads * width) and a.stride(-1) == 1, name, f"a has shape {tuple(a.shape)}")
    require(b.shape == (q.shape[1], value_heads) and b.stride(-1) == 1, name, f"b has shape {tuple(b.shape)}")
    require_contiguous(name, initial_state_source=initial_state_source, A_log=A_log, dt_bias=dt_bias)
    pool_shape = tuple(initial_state_source.shape[1:])
    require(pool_shape == (value_heads, value_width, width), name, f"the pool has {pool_shape}, must be [HV, V, K]")
    require_size(width <= 256, name, f"K {width}, at most 256")
    assert cu_seqlens is not None
    index = initial_state_indices
    require(not bool((index >= initial_state_source.shape[0]).any()), name, "an index past the last slot")
    queries, keys = q.double()[0], k.double()[0]
    if use_qk_l2norm_in_kernel:
        queries, keys = (x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6) for x in (queries, keys))
    is_live = index >= 0
    state = initial_state_source[index.clamp_min(0).long()].double()
    state = torch.where(is_live[:, None, None, None], state, 0.0)
    gate = log_decay(
        a.double().view(-1, value_heads, width) + dt_bias.double().view(-1, width), A_log.double(), lower_bound
    )
    factor = width**-0.5 if scale is None else scale
    ends = cu_seqlens.tolist()[1:]
    out, final, _ = recurrence(queries * factor, keys, v.double()[0], gate, b.double().sigmoid(), state, ends, 64)
    rows = is_live.nonzero()[:, 0]
    initial_state_source[index[rows].long()] = final[rows].to(initial_state_source.dtype)
    return out.to(q.dtype)[None]
