"""Verification of drafts in the KDA layers of Ascend: all rows of a step from read-only states, then a commit.

The kernel of the recurrence leaves the pool alone and keeps the state after every row; the anchor's is moved into the
pool at once, and that of the last accepted draft by `commit`, for all layers in one launch. The convolution runs on a
copy of the states, beside which its rows are kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from k3svc.ops.npu.cache import KdaPool, NpuCache
from k3svc.ops.npu.kda import SILU, UPDATE, log_decay, split_heads, taps
from k3svc.ops.npu.steps import VerifyStep
from k3svc.ops.npu.vendor import Vendor
from k3svc.ops.table import KdaGate


def conv_verify(u: Tensor, weight: Tensor, pool: KdaPool, step: VerifyStep) -> Tensor:
    """`Ops.kda_conv_verify`."""
    sequences, cached = step.slots.shape[0], pool.conv.shape[1]
    rows = step.take(u).view(sequences, step.width, -1)
    states = pool.conv.index_select(0, step.slots)
    windows = step.scratch.windows[pool.index]
    windows[:, :cached] = states
    windows[:, cached:] = rows
    out = torch.ops.npu.causal_conv1d(rows, taps(weight, u.dtype), states, activation_mode=SILU, run_mode=UPDATE)
    pool.conv.index_copy_(0, step.slots, windows[:, 1 : 1 + cached])
    return step.put(out.flatten(0, 1))


def verify(vendor: Vendor, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, pool: KdaPool, step: VerifyStep) -> Tensor:
    """`Ops.kda_verify`: decay and beta are activated here, norm and scale happen inside."""
    _, heads, value_dim, key_dim = pool.state.shape
    q, k, v = split_heads(step.take(qkv), heads, key_dim, value_dim)
    snapshots = step.scratch.snapshots[pool.index]
    out: Tensor = vendor.kda_target_verify_npu(
        A_log=gate.a.log(),
        dt_bias=gate.dt_bias.flatten(),
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        a=log_decay(vendor, step.take(f), gate, key_dim),
        b=step.take(b).float().sigmoid()[None],
        initial_state_source=pool.state,
        initial_state_indices=step.slots,
        intermediate_states_buffer=snapshots,
        intermediate_state_indices=step.scratch_rows,
        cache_steps=step.width,
        scale=key_dim**-0.5,
        gates_are_preactivated=True,
        lower_bound=None,
    )
    vendor.speculative_state_scatter_npu(
        pool.state[None], snapshots[None], step.slots.int(), step.scratch_rows, step.anchors
    )
    return step.put(out[0].float())


def commit(vendor: Vendor, cache: NpuCache, step: VerifyStep, accepted: Sequence[int]) -> None:
    """`Ops.commit`. Sequences without an accepted draft stay as their anchors left them."""
    (count,) = step.num_sequences
    assert len(accepted) == count, f"{len(accepted)} numbers for {count} sequences"
    moved = [b for b, number in enumerate(accepted) if number > 0 and step.layout[b][0] >= 0]
    if not moved:
        return
    device = step.slots.device
    rows = torch.tensor(moved, dtype=torch.int32).to(device)
    counts = torch.tensor([accepted[b] for b in moved], dtype=torch.int32).to(device)
    slots = step.slots.index_select(0, rows)
    vendor.speculative_state_scatter_npu(cache.states, step.scratch.snapshots, slots.int(), rows, counts)
    layers, _, cached, channels = cache.convs.shape
    first = rows * step.scratch.windows.shape[2] + counts + 1
    places = first[:, None] + torch.arange(cached, device=device)
    windows = step.scratch.windows.flatten(1, 2).index_select(1, places.flatten())
    cache.convs.index_copy_(1, slots, windows.view(layers, -1, cached, channels))
