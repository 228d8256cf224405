"""What verification of drafts uses of sgl-kernel-npu: the read-only recurrence with snapshots, and the state mover."""

import torch
from torch import Tensor

from k3svc.ops.npu_emulated.contract import require, require_contiguous, require_dtype, require_size
from k3svc.ops.npu_emulated.delta_rule import log_decay, recurrence
from k3svc.ops.npu_emulated.device import kernel

_INDEX = (torch.int32, torch.int64)


@kernel
def kda_target_verify_npu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    cache_steps: int,
    scale: float | None = None,
    gates_are_preactivated: bool | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """q, k [1, T, H, K], v [1, T, HV, V] with cache_steps tokens of each row of the batch → [1, T, HV, V].

    The pool [slots, HV, V, K] is read only; the state after step s of row r goes to buffer [r's index, s]. A negative
    index starts from zeros, or keeps no snapshot.
    """
    name = "kda_target_verify_npu"
    for letter, x in (("q", q), ("k", k), ("v", v)):
        require_dtype(name, letter, x, torch.bfloat16, torch.float16)
    require(q.dim() == 4 and q.shape[0] == 1 and k.shape == q.shape, name, "q, k [1, T, H, K]")
    _, count, _, width = q.shape
    value_heads, value_width = v.shape[2:]
    require(v.shape[:2] == q.shape[:2], name, f"v has shape {tuple(v.shape)}")
    require_contiguous(name, q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    require_contiguous(name, pool=initial_state_source, buffer=intermediate_states_buffer)
    require(cache_steps > 0 and count % cache_steps == 0, name, f"{count} tokens in steps of {cache_steps}")
    rows = count // cache_steps
    require(a.dim() - b.dim() == 1, name, "a and b come both with the leading 1 or both without")
    require(tuple(a.shape[-3:]) == (count, value_heads, width), name, f"a has shape {tuple(a.shape)}")
    require(tuple(b.shape[-2:]) == (count, value_heads), name, f"b has shape {tuple(b.shape)}")
    require(gates_are_preactivated is not None, name, "gates_are_preactivated is not said")
    require(not gates_are_preactivated or lower_bound is None, name, "preactivated gates have no lower_bound")
    state_shape = (value_heads, value_width, width)
    pool, buffer = initial_state_source, intermediate_states_buffer
    require(tuple(pool.shape[1:]) == state_shape, name, f"the pool has {tuple(pool.shape[1:])}, must be [HV, V, K]")
    require(tuple(buffer.shape[1:]) == (cache_steps, *state_shape), name, f"the buffer has {tuple(buffer.shape)}")
    require(pool.dtype == buffer.dtype, name, f"pool {pool.dtype}, buffer {buffer.dtype}")
    require_size(width <= 256, name, f"K {width}, at most 256")
    sources, targets = initial_state_indices, intermediate_state_indices
    for index, size in ((sources, pool.shape[0]), (targets, buffer.shape[0])):
        require(index.dtype in _INDEX and index.shape == (rows,), name, f"index {index.dtype} {tuple(index.shape)}")
        require(not bool((index >= size).any()), name, f"index {index.tolist()} past {size}")
    queries, keys = (x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6) for x in (q.double()[0], k.double()[0]))
    gate, beta = a.double().view(count, value_heads, width), b.double().view(count, value_heads)
    if not gates_are_preactivated:
        gate, beta = log_decay(gate + dt_bias.double().view(-1, width), A_log.double(), lower_bound), beta.sigmoid()
    state = pool[sources.clamp_min(0).long()].double()
    state = torch.where((sources >= 0)[:, None, None, None], state, 0.0)
    factor = width**-0.5 if scale is None else scale
    out = torch.empty(rows, cache_steps, value_heads, value_width, dtype=torch.float64)
    parts = [x.reshape(rows, cache_steps, *x.shape[1:]) for x in (queries * factor, keys, v.double()[0], gate, beta)]
    kept = (targets >= 0).nonzero()[:, 0]
    for step in range(cache_steps):
        now_q, now_k, now_v, now_g, now_b = (part[:, step] for part in parts)
        out[:, step], state, _ = recurrence(now_q, now_k, now_v, now_g, now_b, state, list(range(1, rows + 1)), 64)
        buffer[targets[kept].long(), step] = state[kept].to(buffer.dtype)
    return out.flatten(0, 1).to(q.dtype)[None]


@kernel
def speculative_state_scatter_npu(dst: Tensor, src: Tensor, dst_idx: Tensor, src_idx: Tensor, step_idx: Tensor) -> None:
    """dst[:, dst_idx[i]] = src[:, src_idx[i], step_idx[i]], skipped where any of the three is negative.

    dst [layers, slots, ...], src [layers, scratch, steps, ...].
    """
    name = "speculative_state_scatter_npu"
    require_contiguous(name, dst=dst, src=src)
    require(dst.dtype == src.dtype, name, f"dst {dst.dtype}, src {src.dtype}")
    require(
        dst.shape[0] == src.shape[0] and dst.shape[2:] == src.shape[3:],
        name,
        f"dst {tuple(dst.shape)}, src {tuple(src.shape)}",
    )
    index = (dst_idx, src_idx, step_idx)
    for tensor, size in zip(index, (dst.shape[1], src.shape[1], src.shape[2]), strict=True):
        require(tensor.dtype == torch.int32 and tensor.dim() == 1, name, f"index {tensor.dtype}, must be int32")
        require(tensor.shape == dst_idx.shape, name, "indices of different lengths")
        require(not bool((tensor >= size).any()), name, f"index {tensor.tolist()} past {size}")
    kept = torch.stack(index).ge(0).all(0).nonzero()[:, 0]
    target, source, step = (tensor[kept].long() for tensor in index)
    dst[:, target] = src[:, source, step]
