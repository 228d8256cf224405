"""causal_conv1d of sgl-kernel-npu: token-major, state rows oldest first, the pool updated in place."""

import torch
from torch import Tensor

from k3svc.ops.npu_emulated.contract import poisoned, require, require_contiguous, require_dtype, require_indices
from k3svc.ops.npu_emulated.registry import operator

_PREFILL, _UPDATE = 0, 1
_SILU = 1


@operator("causal_conv1d")
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    bias: Tensor | None,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> Tensor:
    """x [total, dim] with query_start_loc, or [B, S, dim]; weight [width, dim]. Mutates conv_states unannounced.

    The rows of a sequence whose index is pad_slot_id are left unwritten.
    """
    name = "causal_conv1d"
    require_dtype(name, "x", x, torch.bfloat16, torch.float16)
    require(
        weight.dtype == conv_states.dtype == x.dtype,
        name,
        f"weight {weight.dtype}, states {conv_states.dtype}, x {x.dtype}",
    )
    require_contiguous(name, x=x, weight=weight, conv_states=conv_states)
    dim = x.shape[-1]
    require(weight.dim() == 2 and weight.shape[1] == dim, name, f"weight {tuple(weight.shape)}, must be [width, {dim}]")
    width = weight.shape[0]
    require(2 <= width <= 4, name, f"width {width}, must be 2 to 4")
    require(conv_states.dim() == 3 and conv_states.shape[2] == dim, name, f"conv_states {tuple(conv_states.shape)}")
    require(conv_states.shape[1] >= width - 1, name, f"{conv_states.shape[1]} state rows, at least {width - 1}")
    require(run_mode in (_PREFILL, _UPDATE) and activation_mode in (0, _SILU), name, "illegal mode")
    if x.dim() == 2:
        require(query_start_loc is not None, name, "x [total, dim] needs query_start_loc")
        assert query_start_loc is not None
        require(query_start_loc.numel() >= 2, name, "query_start_loc needs two entries")
        bounds = query_start_loc.tolist()
    else:
        require(x.dim() == 3, name, f"x has rank {x.dim()}")
        bounds = list(range(0, x.shape[0] * x.shape[1] + 1, x.shape[1]))
    require(bounds[0] == 0 and bounds == sorted(bounds), name, f"query_start_loc {bounds}")
    rows = x.reshape(-1, dim)
    require(bounds[-1] <= rows.shape[0], name, f"query_start_loc ends at {bounds[-1]} of {rows.shape[0]} rows")
    sequences = len(bounds) - 1
    slots = torch.arange(sequences) if cache_indices is None else cache_indices
    require(slots.shape == (sequences,), name, f"{slots.numel()} cache_indices for {sequences} sequences")
    require_indices(name, "cache_indices", slots, conv_states.shape[0], pad=pad_slot_id)
    keeps = [run_mode == _UPDATE] * sequences if has_initial_state is None else has_initial_state.bool().tolist()
    if run_mode == _UPDATE:
        keeps = [True] * sequences
    out = poisoned(rows.shape, x.dtype)
    taps = weight.double()
    for n, slot in enumerate(slots.tolist()):
        begin, end = bounds[n], bounds[n + 1]
        if slot == pad_slot_id:
            continue
        window = conv_states[slot, : width - 1].double()
        window = window if keeps[n] else torch.zeros_like(window)
        stream = torch.cat([window, rows[begin:end].double()])
        y = sum(taps[tap] * stream[tap : tap + end - begin] for tap in range(width))
        assert isinstance(y, Tensor)
        y = y if bias is None else y + bias.double()
        out[begin:end] = (y * y.sigmoid() if activation_mode == _SILU else y).to(x.dtype)
        conv_states[slot, : width - 1] = stream[stream.shape[0] - width + 1 :].to(conv_states.dtype)
    return out.view(x.shape)
