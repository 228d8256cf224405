"""Kimi Delta Attention in plain torch: convolution, chunk form for prompts, one step for decode (model.md 2.3 to 2.5).

Matrix products are torch.bmm over matrices of one shape and layout, so that none depends on the others; `reshape`,
whose layout may depend on the number of sequences, is avoided before them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from k3svc.ops.reference_cache import KdaPool
from k3svc.ops.reference_math import ONE, cast, inverse_norm, scalar, scaled_by_sigmoid, sigmoid
from k3svc.ops.reference_steps import GRID, ChunkSlice, ConvRecord, DecodeStep, ExtendStep, KdaRecord, VerifyStep
from k3svc.ops.table import KdaGate

VANISHED = 4e-18
"""Decay factors below this (exp(-40)) count as zero: 11 digits under fp32's, and products never get denormal."""
NORM_EPS = 1e-6
"""Inside the root of the norm of q and k."""


def log_decay(f: Tensor, gate: KdaGate) -> Tensor:
    """float32 [N, HV, K] decay logits → log decay g <= 0 (model.md 2.3 step 5)."""
    x = f + gate.dt_bias
    if gate.lower_bound is None:
        # Above 20 softplus is the identity.
        return torch.where(x > scalar(20.0), x, x.exp().log1p_()).mul_(gate.a.neg()[:, None])
    return x.mul_(gate.a.neg()[:, None]).exp_().add_(ONE).reciprocal_().mul_(scalar(gate.lower_bound))


def conv_extend(u: Tensor, weight: Tensor, pool: KdaPool, step: ExtendStep) -> Tensor:
    """`Ops.kda_conv_extend`. Rows are rounded to the dtype of the state first, so that cuts of a prompt do not show."""
    plan = step.conv
    states = pool.conv.index_select(0, step.slots).index_fill_(0, step.fresh, 0)
    rows = torch.cat([states.flatten(0, 1), cast(step.live.take(u), states.dtype)])
    if plan.gather is not None:
        rows = rows.index_select(0, plan.gather)
    pool.conv.index_copy_(0, step.slots, rows.index_select(0, plan.tails).view(states.shape))
    rows = rows.float()
    width = weight.shape[1]
    count = max(rows.shape[0] - width + 1, 0)
    y = _taps([rows[tap : tap + count] for tap in range(width)], weight)
    if plan.windows is not None:
        y = y.index_select(0, plan.windows)
    return step.live.put(cast(y, u.dtype), step.num_rows)


def conv_decode(u: Tensor, weight: Tensor, pool: KdaPool, step: DecodeStep) -> Tensor:
    """`Ops.kda_conv_decode`."""
    states = pool.conv.index_select(0, step.slots)
    windows = _shift(states, step.live.take(u))
    pool.conv.index_copy_(0, step.slots, states)
    y = _taps(list(windows.float().unbind(1)), weight)
    return step.live.put(cast(y, u.dtype), step.num_rows)


def _shift(states: Tensor, rows: Tensor) -> Tensor:
    """Puts rows [B, channels] behind conv states [B, W - 1, channels] in place; [B, W, channels], oldest row first."""
    windows = torch.cat([states, cast(rows, states.dtype)[:, None]], dim=1)
    states.copy_(windows[:, 1:])
    return windows


def _taps(rows: list[Tensor], weight: Tensor) -> Tensor:
    """silu(Σ_j weight[:, j] · rows[j]), oldest first."""
    taps = weight.t().contiguous()
    y = rows[0] * taps[0]
    for tap in range(1, len(rows)):
        y.addcmul_(rows[tap], taps[tap])
    return scaled_by_sigmoid(y, y)


def extend(qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, pool: KdaPool, step: ExtendStep) -> Tensor:
    """`Ops.kda_extend`: chunk form on the grid, all chunks of a slice at once but for the scan of the state."""
    _, heads, value_dim, _ = pool.state.shape
    state = pool.state.index_select(0, step.slots).float().index_fill_(0, step.fresh, 0)
    out = qkv.new_zeros(step.num_rows + 1, heads, value_dim, dtype=torch.float32)
    for part in step.chunks:
        out.index_copy_(0, part.targets, _extend_slice(qkv, f, b, gate, state, part))
    pool.state.index_copy_(0, step.slots, cast(state, pool.state.dtype))
    return out[: step.num_rows]


def _extend_slice(qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, state: Tensor, part: ChunkSlice) -> Tensor:
    """float32 [n·64, HV, V]; advances state [B, HV, V, K] in place.

    Padding has k = 0, β = 0 and g = 0, so that it leaves the state alone.
    """
    _, H, V, K = state.shape
    rows = qkv.index_select(0, part.rows).float().index_fill_(0, part.padding, 0)
    n = rows.shape[0] // GRID
    m = n * H
    qk = rows[:, : 2 * H * K].view(-1, 2, H, K)
    norm = inverse_norm(qk, NORM_EPS)
    norm[:, 0].mul_(scalar(K**-0.5))
    # [2, n, H, 64, K]: q and k, heads before tokens
    qk = torch.mul(_by_head(qk, n), _by_head(norm, n), out=rows.new_empty(2, n, H, GRID, K)).view(2, m, GRID, K)
    g = log_decay(f.index_select(0, part.rows).float().view(-1, H, K), gate).index_fill_(0, part.padding, 0)
    g = g.view(n, GRID, H, K).transpose(1, 2).contiguous().view(m, GRID, K)
    beta = sigmoid(b.index_select(0, part.rows).float()).index_fill_(0, part.padding, 0)
    beta = beta.view(n, GRID, H).transpose(1, 2).contiguous().view(m, GRID, 1)
    scores, kk, before, after = _within_chunk(qk, g)

    # (I + L) [W | U] = β [K̂ exp(G) | V], by forward substitution.
    rhs = rows.new_empty(m, GRID, K + V)
    torch.mul(qk[1], before, out=rhs[..., :K])
    rhs[..., K:].view(n, H, GRID, V).copy_(rows[:, 2 * H * K :].view(n, GRID, H, V).transpose(1, 2))
    rhs.mul_(beta)
    solved = torch.linalg.solve_triangular(kk.mul_(beta), rhs, upper=False, unitriangular=True)
    w, values = solved[..., :K].contiguous(), solved[..., K:].contiguous()

    q_decayed = qk[0] * before
    k_decayed = qk[1] * after
    total = before[:, -1:]
    out = rows.new_empty(m, GRID, V)
    flat = state.view(-1, V, K)
    for first, count in part.scan:
        own = slice(first * H, (first + count) * H)
        entering = flat[: count * H]
        values[own].baddbmm_(w[own], entering.transpose(1, 2), alpha=-1)
        torch.bmm(q_decayed[own], entering.transpose(1, 2), out=out[own])
        entering.mul_(total[own]).baddbmm_(values[own].transpose(1, 2), k_decayed[own])
    out.baddbmm_(scores, values)
    return out.view(n, H, GRID, V).transpose(1, 2).reshape(n * GRID, H, V)


def _by_head(x: Tensor, n: int) -> Tensor:
    """[n·64, 2, H, D] → view [2, n, H, 64, D]."""
    return x.view(n, GRID, *x.shape[1:]).permute(2, 0, 3, 1, 4)


def _within_chunk(qk: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decayed products inside chunks: qk [2, m, 64, K] and log decay g [m, 64, K] → (A, L, before, after).

    A[i, j] = Σ_c q_ic k_jc exp(Σ_{j<t<=i} g_tc) for i >= j, L the same of k and k for i > j;
    before[i] = exp(Σ_{t<=i} g), after[i] = exp(Σ_{t>i} g).

    Blocks of 1, 2, 4, .. 32 tokens are joined in pairs: from a token of the earlier block to one of the later, the
    decay is exp(sum to the end of the earlier block) · exp(sum from the start of the later one). Both exponents are
    <= 0, so neither gate can overflow, and both are sums of the terms between, so large gates elsewhere cost no digits.
    """
    _, m, C, K = qk.shape
    products = qk.new_zeros(2, m, C, C)
    products[0].diagonal(dim1=1, dim2=2).copy_((qk[0] * qk[1]).sum(-1))
    # Sums inside the block: to[i] = Σ_{t<=i} g, rest[i] = Σ_{t>i} g.
    to, rest = g.clone(), torch.zeros_like(g)
    size = 1
    while size < C:
        pairs = C // (2 * size)
        to_half, rest_half = to.view(m, pairs, 2, size, K), rest.view(m, pairs, 2, size, K)
        halves = qk.view(2, m, pairs, 2, size, K)
        earlier = qk.new_empty(m, pairs, size, K)
        torch.mul(halves[1, :, :, 0], _decay(rest_half[:, :, 0]), out=earlier)
        later = qk.new_empty(m, pairs, 2, size, K)
        torch.mul(halves[:, :, :, 1].permute(1, 2, 0, 3, 4), _decay(to_half[:, :, 1]).unsqueeze(2), out=later)
        joined = torch.bmm(later.view(m * pairs, 2 * size, K), earlier.view(m * pairs, size, K).transpose(1, 2))
        blocks = products.view(2, m, pairs, 2, size, pairs, 2, size)[:, :, :, 1, :, :, 0]
        blocks.diagonal(dim1=2, dim2=4).copy_(joined.view(m, pairs, 2, size, size).permute(2, 0, 3, 4, 1))
        earlier_sum, later_sum = to_half[:, :, 0, -1:].clone(), to_half[:, :, 1, -1:].clone()
        to_half[:, :, 1].add_(earlier_sum)
        rest_half[:, :, 0].add_(later_sum)
        size *= 2
    return products[0], products[1], _decay(to), _decay(rest)


def _decay(exponent: Tensor) -> Tensor:
    return torch.threshold_(exponent.exp(), VANISHED, 0.0)


def decode(qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, pool: KdaPool, step: DecodeStep) -> Tensor:
    """`Ops.kda_decode`."""
    state = pool.state.index_select(0, step.slots).float()
    out = _advance(step.live.take(qkv), step.live.take(f), step.live.take(b), gate, state)
    pool.state.index_copy_(0, step.slots, cast(state, pool.state.dtype))
    return step.live.put(out, step.num_rows)


def _advance(qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, state: Tensor) -> Tensor:
    """One row a sequence: float32 state [B, HV, V, K] in place → float32 [B, HV, V].

    Reads the state once, through S α k̂ and S α q̂; o = S α q̂ + r (k̂·q̂) for r = β (v - S α k̂).
    """
    count, H, V, K = state.shape
    rows = qkv.float()
    qk = rows[:, : 2 * H * K].view(-1, 2, H, K)
    norm = inverse_norm(qk, NORM_EPS)
    norm[:, 0].mul_(scalar(K**-0.5))
    qk = qk * norm
    q, k = qk.unbind(1)
    alpha = log_decay(f.float().view(-1, H, K), gate).exp_()
    beta = sigmoid(b.float())[..., None]
    decayed = (qk * alpha[:, None]).permute(0, 2, 3, 1).contiguous().view(count * H, K, 2)
    read_q, read_k = torch.bmm(state.view(-1, V, K), decayed).view(count, H, V, 2).unbind(-1)
    r = (rows[:, 2 * H * K :].view(-1, H, V) - read_k).mul_(beta)
    out = torch.addcmul(read_q, r, (q * k).sum(-1, keepdim=True))
    state.mul_(alpha[:, :, None]).addcmul_(r[..., None], k[:, :, None])
    return out


def conv_verify(u: Tensor, weight: Tensor, pool: KdaPool, step: VerifyStep) -> Tensor:
    """`Ops.kda_conv_verify`: decode round by round on a copy of the states; the pool gets those of the anchors."""
    states = pool.conv.index_select(0, step.slots)
    out = u.new_zeros(u.shape)
    for index, rows in enumerate(step.rounds):
        windows = _shift(states[: rows.shape[0]], u.index_select(0, rows))
        out.index_copy_(0, rows, cast(_taps(list(windows.float().unbind(1)), weight), u.dtype))
        if index == 0:
            pool.conv.index_copy_(0, step.slots, states)
    step.conv_records.append(ConvRecord(pool=pool, u=u))
    return out


def verify(qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, pool: KdaPool, step: VerifyStep) -> Tensor:
    """`Ops.kda_verify`: decode round by round on a copy of the states; the pool gets those of the anchors."""
    states = pool.state.index_select(0, step.slots)
    out = qkv.new_zeros(step.num_rows, *states.shape[1:3], dtype=torch.float32)
    for index, rows in enumerate(step.rounds):
        entering = states[: rows.shape[0]].float()
        own = _advance(qkv.index_select(0, rows), f.index_select(0, rows), b.index_select(0, rows), gate, entering)
        out.index_copy_(0, rows, own)
        states[: rows.shape[0]] = cast(entering, states.dtype)
        if index == 0:
            pool.state.index_copy_(0, step.slots, states)
    step.kda_records.append(KdaRecord(pool=pool, qkv=qkv, f=f, b=b, gate=gate))
    return out


def commit(step: VerifyStep, accepted: Sequence[int]) -> None:
    """`Ops.commit`: the recorded rows again, those of accepted drafts alone."""
    assert len(accepted) == len(step.host_lengths), f"{len(accepted)} numbers for {len(step.host_lengths)} sequences"
    for number, length in zip(accepted, step.host_lengths, strict=True):
        assert 0 <= number < max(length, 1), f"{number} accepted drafts of a sequence of {length} rows"
    for place, rows in enumerate(step.rounds[1:], start=1):
        members = torch.tensor([i for i in range(rows.shape[0]) if accepted[step.order[i]] >= place])
        if members.shape[0] == 0:
            break
        _commit_round(step, rows[members], step.slots[members])
    step.conv_records.clear()
    step.kda_records.clear()


def _commit_round(step: VerifyStep, rows: Tensor, slots: Tensor) -> None:
    for conv in step.conv_records:
        windows = conv.pool.conv.index_select(0, slots)
        _shift(windows, conv.u.index_select(0, rows))
        conv.pool.conv.index_copy_(0, slots, windows)
    for kda in step.kda_records:
        state = kda.pool.state.index_select(0, slots).float()
        qkv, f, b = (x.index_select(0, rows) for x in (kda.qkv, kda.f, kda.b))
        _advance(qkv, f, b, kda.gate, state)
        kda.pool.state.index_copy_(0, slots, cast(state, kda.pool.state.dtype))
