"""The kernels of decomposed KDA prefill (of sgl_kernel_npu and sglang). Gates are cumulative and in log2 here."""

from itertools import pairwise

import torch
from torch import Tensor

from k3svc.ops.npu_emulated.contract import require, require_contiguous, require_dtype, require_eager, require_size
from k3svc.ops.npu_emulated.delta_rule import chunk_rows, decayed_products
from k3svc.ops.npu_emulated.device import kernel

_FP32 = torch.float32
_LN2 = 0.6931471805599453
_TILE = 64


def _ends(name: str, cu_seqlens: Tensor | None, count: int, chunk_indices: Tensor | None = None) -> list[int]:
    require(cu_seqlens is not None, name, "only packed sequences (cu_seqlens) are emulated")
    assert cu_seqlens is not None
    bounds: list[int] = cu_seqlens.tolist()
    require(bounds[0] == 0 and bounds[-1] == count and bounds == sorted(bounds), name, f"cu_seqlens {bounds}")
    if chunk_indices is not None:
        lengths = [end - begin for begin, end in pairwise(bounds)]
        pairs = [[n, chunk] for n, length in enumerate(lengths) for chunk in range(-(-length // _TILE))]
        require(
            chunk_indices.tolist() == pairs, name, "chunk_indices name other chunks than cu_seqlens (empty sequence?)"
        )
    return bounds[1:]


@kernel
def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """Pairs (sequence, chunk in it), int64 [NC, 2]. A sequence's number is counted from the chunks with number 0."""
    require_eager("prepare_chunk_indices")
    bounds = cu_seqlens.tolist()
    chunks = [index for a, b in pairwise(bounds) for index in range(-(-(b - a) // chunk_size))]
    index = torch.tensor(chunks, dtype=torch.int64)
    return torch.stack([(index == 0).cumsum(0) - 1, index], dim=1).to(cu_seqlens.dtype)


@kernel
def l2norm_fwd(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x · rsqrt(Σ x² + eps) over the last axis."""
    require_contiguous("l2norm_fwd", x=x)
    if x.shape[-1] * x.element_size() > 65536:
        raise RuntimeError("l2norm_fwd: rows past 64 KB")
    wide = x.double()
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(output_dtype or x.dtype)


@kernel
def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    output_dtype: torch.dtype = torch.float32,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Cumulative sum of [1, T, H, K] inside each chunk, times scale."""
    name = "chunk_local_cumsum"
    require(g.dim() == 4 and g.shape[0] == 1, name, f"g has shape {tuple(g.shape)}, [1, T, H, K] is emulated")
    require(chunk_size & (chunk_size - 1) == 0, name, f"chunk_size {chunk_size} is no power of two")
    require(not reverse and not head_first, name, "reverse and head_first are not emulated")
    require(chunk_indices is None, name, "chunk_indices are not emulated")
    require_contiguous(name, g=g)
    out = torch.empty_like(g, dtype=torch.float64)
    for first, last in chunk_rows(_ends(name, cu_seqlens, g.shape[1]), chunk_size):
        out[:, first:last] = g[:, first:last].double().cumsum(1)
    return (out if scale is None else out * scale).to(output_dtype)


@kernel
def chunk_kda_scaled_dot_kkt_fwd(
    q: Tensor,
    k: Tensor,
    gk: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    gk_scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """A (strictly lower) and Aqk (lower, times scale), [1, T, H, chunk]."""
    name = "chunk_kda_scaled_dot_kkt_fwd"
    require(gk is not None and beta is not None and gk_scale == 1.0, name, "gk and beta are needed")
    assert gk is not None and beta is not None
    require(k.shape[-1] <= 256, name, f"K {k.shape[-1]}, at most 256")
    require(beta.shape == k.shape[:3], name, f"beta has shape {tuple(beta.shape)}")
    require_contiguous(name, q=q, k=k, gk=gk, beta=beta)
    _, count, heads, _ = k.shape
    a = torch.zeros(1, count, heads, chunk_size, dtype=torch.float64)
    aqk = torch.zeros_like(a)
    for first, last in chunk_rows(_ends(name, cu_seqlens, count), chunk_size):
        own = slice(first, last)
        exponent = gk[0, own].double() * _LN2
        keys = k[0, own].double()
        products = decayed_products(keys, keys, exponent).tril(-1) * beta[0, own].double().t()[..., None]
        a[0, own, :, : last - first] = products.transpose(0, 1)
        scores = decayed_products(q[0, own].double(), keys, exponent) * (1.0 if scale is None else scale)
        aqk[0, own, :, : last - first] = scores.transpose(0, 1)
    return a.to(output_dtype), aqk.to(output_dtype)


@kernel
def solve_tril_npu(A: Tensor, cu_seqlens: Tensor | None = None, output_dtype: torch.dtype = torch.float32) -> Tensor:
    """(I + A)^-1 of each chunk's strictly lower triangle; A [1, T, H, BT]."""
    name = "solve_tril_npu"
    tile = A.shape[-1]
    require(tile in (16, 32, 64), name, f"tiles of {tile}: 16, 32 or 64")
    require_contiguous(name, A=A)
    out = torch.zeros_like(A, dtype=torch.float64)
    for first, last in chunk_rows(_ends(name, cu_seqlens, A.shape[1]), tile):
        size = last - first
        lower = A[0, first:last, :, :size].double().transpose(0, 1).tril(-1)
        eye = torch.eye(size, dtype=torch.float64)
        solved = torch.linalg.solve_triangular(eye + lower, eye.expand_as(lower), upper=False, unitriangular=True)
        out[0, first:last, :, :size] = solved.transpose(0, 1)
    return out.to(output_dtype)


@kernel
def recompute_w_u_fwd_npu(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    gk: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """w = A (β k 2^gk), u = A (β v), kg = k 2^(gk_last - gk)."""
    name = "recompute_w_u_fwd_npu"
    require(A.shape[-1] == _TILE, name, f"tiles of {A.shape[-1]}, must be {_TILE}")
    require(A.dtype == k.dtype == v.dtype, name, "A, k and v differ in dtype")
    require_contiguous(name, k=k, v=v, beta=beta, A=A, gk=gk)
    w, u, kg = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(k)
    for first, last in chunk_rows(_ends(name, cu_seqlens, k.shape[1], chunk_indices), _TILE):
        own = slice(first, last)
        matrix = A[0, own, :, : last - first].double().transpose(0, 1)
        total = gk[0, own].double()
        scaled = beta[0, own].double()[..., None]
        keys = k[0, own].double()
        w[0, own] = (matrix @ (scaled * keys * total.exp2()).transpose(0, 1)).transpose(0, 1).to(w.dtype)
        u[0, own] = (matrix @ (scaled * v[0, own].double()).transpose(0, 1)).transpose(0, 1).to(u.dtype)
        kg[0, own] = (keys * (total[-1:] - total).exp2()).to(kg.dtype)
    return w, u, kg


@kernel
def chunk_gated_delta_rule_fwd_h_npu(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    save_new_value: bool = True,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    use_exp2: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """States at chunk starts [1, NC, H, K, V] and v_new. Rows of the pool are read and written with raw indices.

    An index of -1 is the last slot.
    """
    name = "chunk_gated_delta_rule_fwd_h_npu"
    if k.shape[-1] > 128:
        raise ValueError(f"{name}: K {k.shape[-1]}, at most 128")
    require(g is None and gk is not None and use_exp2, name, "gk with use_exp2 is emulated")
    require(initial_state is not None and initial_state_indices is not None, name, "the pool and indices are needed")
    assert gk is not None and initial_state is not None and initial_state_indices is not None
    require_contiguous(name, k=k, w=w, u=u, gk=gk, initial_state=initial_state)
    heads, width, value_width = k.shape[2], k.shape[3], u.shape[3]
    pool_shape = tuple(initial_state.shape[1:])
    require(pool_shape == (heads, value_width, width), name, f"the pool has {pool_shape}, must be [H, V, K]")
    ends = _ends(name, cu_seqlens, k.shape[1], chunk_indices)
    index = initial_state_indices[: len(ends)].long()
    require(not bool((index >= initial_state.shape[0]).any()), name, "an index past the last slot")
    starts = torch.zeros(1, len(chunk_rows(ends, _TILE)), heads, width, value_width, dtype=k.dtype)
    v_new = torch.zeros_like(u)
    finals = []
    chunk = begin = 0
    for slot, end in zip(index.tolist(), ends, strict=True):
        state = initial_state[slot].double().transpose(-1, -2).contiguous()
        for first, last in chunk_rows([end - begin], _TILE):
            own = slice(begin + first, begin + last)
            starts[0, chunk] = state.to(starts.dtype)
            values = u[0, own].double().transpose(0, 1) - w[0, own].double().transpose(0, 1) @ state
            v_new[0, own] = values.transpose(0, 1).to(v_new.dtype)
            state = state * gk[0, own][-1].double().exp2()[..., None]
            state = state + k[0, own].double().permute(1, 2, 0) @ values
            chunk += 1
        finals.append(state.transpose(-1, -2))
        begin = end
    for slot, final in zip(index.tolist(), finals, strict=True):
        initial_state[slot] = final.to(initial_state.dtype)
    return starts, v_new if save_new_value else None


@kernel
def chunk_gla_fwd_o_gk_npu(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    A: Tensor,
    h: Tensor,
    out: Tensor,
    scale: float,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """scale · (q 2^g) h + A v, with h [1, NC, H, K, V] and A already scaled; written into `out`."""
    name = "chunk_gla_fwd_o_gk_npu"
    require_contiguous(name, q=q, v=v, g=g, A=A, h=h, out=out)
    require_dtype(name, "q", q, torch.bfloat16)
    require(out.dtype == v.dtype and out.shape == v.shape, name, "out must be like v")
    require_size(A.shape[-1] == chunk_size == _TILE, name, f"tiles of {A.shape[-1]}, must be {_TILE}")
    require(h.shape[3:] == (q.shape[3], v.shape[3]), name, f"h has {tuple(h.shape[3:])}, must be [K, V]")
    result = torch.zeros_like(out, dtype=torch.float64)
    for index, (first, last) in enumerate(chunk_rows(_ends(name, cu_seqlens, q.shape[1], chunk_indices), chunk_size)):
        own = slice(first, last)
        queries = (q[0, own].double() * g[0, own].double().exp2()).transpose(0, 1)
        matrix = A[0, own, :, : last - first].double().transpose(0, 1).tril()
        rows = scale * (queries @ h[0, index].double()) + matrix @ v[0, own].double().transpose(0, 1)
        result[0, own] = rows.transpose(0, 1)
    return out.copy_(result)
