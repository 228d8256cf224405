"""Norms, gated units, mixtures and the router: one program a row, or a head of a row, float32 inside."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3svc.ops.cuda.overlap import OVERLAP, begin
from k3svc.ops.table import Activation


@triton.jit
def tanh(x):
    """From exp of a number <= 0, so that nothing overflows; near 0, where 1 - exp has lost its digits, a series."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    square = x * x
    series = tl.fma(square, tl.fma(square, tl.fma(square, 62 / 2835, -17 / 315), 2 / 15), -1 / 3)
    return tl.where(tl.abs(x) < 0.25, tl.fma(x * square, series, x), tl.where(x < 0, -t, t))


@triton.jit
def gated_unit(gate, up, beta, linear_beta, SITU: tl.constexpr, LINEAR: tl.constexpr):
    """SwiGLU or SiTU-GLU (model.md 2.7) of float32 numbers."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    if SITU:
        up_part = up if LINEAR else linear_beta * tanh(up / linear_beta)
        return beta * tanh(gate / beta) * sigmoid * up_part
    return gate * sigmoid * up


@triton.jit
def _rms_norm(x, weight, y, stride, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    values = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / D + eps)
    out = values * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * D + columns, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gated_norm(o, z, weight, y, z_stride, eps, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < V
    values = tl.load(o + (row * H + head) * V + columns, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / V + eps)
    gate = tl.load(z + row * z_stride + head * V + columns, mask=mask, other=0.0).to(tl.float32)
    normed = values * scale * tl.load(weight + columns, mask=mask, other=0.0)
    out = normed / (1.0 + tl.exp(-gate))
    tl.store(y + (row * H + head) * V + columns, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _glu(
    x, y, stride, beta, linear_beta, D: tl.constexpr, BLOCK: tl.constexpr, SITU: tl.constexpr, LINEAR: tl.constexpr
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D
    gate = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + D + columns, mask=mask, other=0.0).to(tl.float32)
    out = gated_unit(gate, up, beta, linear_beta, SITU, LINEAR)
    tl.store(y + row * D + columns, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _sigmoid_gate(x, gate, y, x_stride, gate_stride, D: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * D + columns, (values / (1.0 + tl.exp(-gates))).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _mix(rows, score, y, row_stride, eps, M: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """rows [M, N, D]. Two passes: the scores with a running softmax, in the order of the rows."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    weight = tl.load(score + columns, mask=mask, other=0.0)
    best = -float("inf")
    mass = 0.0
    out = tl.zeros([BLOCK], tl.float32)
    for m in range(M):
        values = tl.load(rows + tl.cast(m, tl.int64) * row_stride + row * D + columns, mask=mask, other=0.0)
        values = values.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / D + eps)
        value = tl.sum(values * weight, 0) * scale
        top = tl.maximum(best, value)
        fade, own = tl.exp(best - top), tl.exp(value - top)
        out = out * fade + values * own
        mass = mass * fade + own
        best = top
    tl.store(y + row * D + columns, (out / mass).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _route(
    logits,
    bias,
    ids,
    weights,
    scale,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """The best by score + bias, one after the other; the lowest id on ties."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    mask = expert < E
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + row * E + expert, mask=mask, other=0.0)))
    ranked = tl.where(mask, score + tl.load(bias + expert, mask=mask, other=0.0), -float("inf"))
    if GROUPS > 1:
        size: tl.constexpr = E // GROUPS
        group = expert // size
        # A group is worth its two best; those that are not among the best TOP_GROUPS drop out.
        kept = tl.zeros([BLOCK], tl.int1)
        value = tl.full([BLOCK], -float("inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            own = tl.where(group == g, ranked, -float("inf"))
            first = tl.max(own, 0)
            place = tl.min(tl.where(own == first, expert, BLOCK), 0)
            second = tl.max(tl.where(expert == place, -float("inf"), own), 0)
            value = tl.where((group == g) & mask, first + second, value)
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(tl.where(kept, -float("inf"), value), 0)
            chosen = tl.min(tl.where((value == best) & ~kept & mask, group, BLOCK), 0)
            kept = kept | (group == chosen)
        ranked = tl.where(kept, ranked, -float("inf"))
    # What is ranked as a whole number of the same order, above the id, so that one maximum finds both.
    bits = ranked.to(tl.int32, bitcast=True)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (BLOCK - 1 - expert)
    place = tl.arange(0, BLOCK_TOP)
    chosen = tl.zeros([BLOCK_TOP], tl.int64)
    for k in tl.static_range(TOP):
        best = tl.max(keys, 0)
        chosen = tl.where(place == k, BLOCK - 1 - (best & 0xFFFFFFFF), chosen)
        keys = tl.where(keys == best, -(2**63), keys)
    # Rows that hold NaN may choose ids past the end.
    chosen = tl.minimum(chosen, E - 1)
    chosen_scores = 1.0 / (1.0 + tl.exp(-tl.load(logits + row * E + chosen)))
    chosen_scores = tl.where(place < TOP, chosen_scores, 0.0)
    if RENORMALIZE:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, 0) + 1e-20)
    tl.store(ids + row * TOP + place, chosen, mask=place < TOP)
    tl.store(weights + row * TOP + place, chosen_scores * scale, mask=place < TOP)


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Ops.rms_norm`."""
    count, width = x.shape
    y = torch.empty(count, width, dtype=x.dtype, device=x.device)
    if count:
        x = unit_stride(x)
        block = triton.next_power_of_2(width)
        _rms_norm[(count,)](x, weight, y, x.stride(0), eps, D=width, BLOCK=block, num_warps=_warps(block), **OVERLAP)
    return y


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Ops.gated_norm`."""
    count, heads, width = o.shape
    y = torch.empty(count, heads * width, dtype=z.dtype, device=z.device)
    if count:
        z = unit_stride(z)
        _gated_norm[(count, heads)](
            o.contiguous(),
            z,
            weight,
            y,
            z.stride(0),
            eps,
            H=heads,
            V=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
            **OVERLAP,
        )
    return y


def glu(gate_up: Tensor, activation: Activation, beta: float, linear_beta: float | None) -> Tensor:
    """`Ops.glu`."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    if count:
        gate_up = unit_stride(gate_up)
        _glu[(count, triton.cdiv(width, 1024))](
            gate_up,
            y,
            gate_up.stride(0),
            beta,
            linear_beta or 1.0,
            D=width,
            BLOCK=1024,
            SITU=activation == "situ",
            LINEAR=linear_beta is None,
            **OVERLAP,
        )
    return y


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`Ops.sigmoid_gate`."""
    count, width = x.shape
    y = torch.empty(count, width, dtype=x.dtype, device=x.device)
    if count:
        x, gate = unit_stride(x), unit_stride(gate)
        _sigmoid_gate[(count, triton.cdiv(width, 1024))](
            x, gate, y, x.stride(0), gate.stride(0), D=width, BLOCK=1024, **OVERLAP
        )
    return y


def mix_residual(prefix: Tensor, bank: Sequence[Tensor], score: Tensor, eps: float) -> Tensor:
    """`Ops.mix_residual`."""
    count, width = prefix.shape
    y = torch.empty_like(prefix, memory_format=torch.contiguous_format)
    if count:
        rows = torch.stack([*bank, prefix])
        block = triton.next_power_of_2(width)
        _mix[(count,)](
            rows,
            score,
            y,
            rows.stride(0),
            eps,
            M=len(bank) + 1,
            D=width,
            BLOCK=block,
            num_warps=_warps(block),
            **OVERLAP,
        )
    return y


def route(
    logits: Tensor, bias: Tensor, *, top_k: int, renormalize: bool, scale: float, num_groups: int, top_groups: int
) -> tuple[Tensor, Tensor]:
    """Router logits float32 [N, experts] → ids int64 [N, top_k] and weights float32 [N, top_k]."""
    count, experts = logits.shape
    ids = torch.empty(count, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(count, top_k, dtype=torch.float32, device=logits.device)
    if count:
        _route[(count,)](
            logits,
            bias,
            ids,
            weights,
            scale,
            E=experts,
            BLOCK=triton.next_power_of_2(experts),
            TOP=top_k,
            BLOCK_TOP=triton.next_power_of_2(top_k),
            RENORMALIZE=renormalize,
            GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            num_warps=1 if experts <= 256 else 4,
            **OVERLAP,
        )
    return ids, weights


def unit_stride(x: Tensor) -> Tensor:
    """x, or a copy of it when its rows are not in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()
