"""Router and experts on Ascend.

Experts of whole numbers get rows of int8 with a scale each: quantised while they are sorted by expert, and again after
the activation. One function, `_activated`, picks the kernel by activation and by whether rows are quantised.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3svc.ops.npu.vendor import Vendor
from k3svc.ops.table import Activation, QuantizedExpert, QuantizedMatrix

SIGMOID = 1
BEST_TWO = 1
"""A group's value is the sum of its two best."""
COUNTS = 1
NO_QUANTISATION, DYNAMIC = -1, 1
BY_ROWS, OUT_OF_ONE = 0, 2
"""npu_grouped_matmul: groups split the rows; one tensor comes out."""
ROW_MAJOR = 2
RENORMALISE_EPS = 1e-20
NZ = 29
"""Fractal storage format of weights."""


@dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """Weights of all experts of a layer."""

    gate_up: Tensor
    """[experts, D, 2·inner]."""
    down: Tensor
    """[experts, inner, D]."""


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """One weight of all experts of a layer, for npu_grouped_matmul."""

    values: Tensor
    """int8 [experts, in, out], or int4 eight to an int32 [experts, in, out / 8]; format NZ."""
    scale: Tensor
    """In the rows' dtype [experts, out]; of int4 the bits of float32 in int64 [experts, groups of inputs, out]."""
    bias: Tensor | None
    """Of int4 float32 [experts, out]: the kernel splits a row into nibbles and shifts the lower one by 8."""


@dataclass(frozen=True, kw_only=True)
class QuantizedExperts:
    """Weights of whole numbers of all experts of a layer."""

    gate_up: QuantizedWeight
    down: QuantizedWeight


def pack_quantized(experts: Iterable[QuantizedExpert], dtype: torch.dtype, device: torch.device) -> QuantizedExperts:
    """`Ops.pack_quantized_experts`."""
    gate_up, down = [], []
    for w1, w3, w2 in experts:
        values, scale = torch.cat([w1.values, w3.values]), torch.cat([w1.scale, w3.scale])
        gate_up.append(QuantizedMatrix(values=values.to(device), scale=scale.to(device), bits=w1.bits))
        down.append(QuantizedMatrix(values=w2.values.to(device), scale=w2.scale.to(device), bits=w2.bits))
    return QuantizedExperts(gate_up=_packed(gate_up, dtype), down=_packed(down, dtype))


def _packed(weights: Sequence[QuantizedMatrix], dtype: torch.dtype) -> QuantizedWeight:
    values = torch.stack([weight.values.t() for weight in weights]).contiguous()
    scale = torch.stack([weight.scale.view(weight.scale.shape[0], -1).t() for weight in weights])
    if weights[0].bits == 8:
        return QuantizedWeight(
            values=torch.ops.npu.npu_format_cast(values, NZ), scale=scale[:, 0].to(dtype).contiguous(), bias=None
        )
    if scale.shape[1] > 1:
        # Model converters round the product of both scales so.
        scale = scale.half().float()
    # The low nibble is the even output; a view as int32 of a tensor in NZ is what the kernel reads.
    nibbles = (values[..., 0::2] & 15) | (values[..., 1::2] << 4)
    return QuantizedWeight(
        values=torch.ops.npu.npu_format_cast(nibbles.contiguous(), NZ).view(torch.int32),
        scale=scale.contiguous().view(torch.int32).long().bitwise_and_(0xFFFFFFFF),
        bias=(8.0 * values.float().reshape(*scale.shape[:2], -1, values.shape[-1]).sum(2) * scale).sum(1),
    )


def choose(
    logits: Tensor, bias: Tensor, *, top_k: int, renormalize: bool, scale: float, num_groups: int, top_groups: int
) -> tuple[Tensor, Tensor]:
    """`Ops.route` from logits float32 [N, experts]. The operator always renormalises, so else the scores are taken."""
    if logits.shape[0] == 0:
        return logits.new_empty(0, top_k, dtype=torch.int64), logits.new_empty(0, top_k)
    weights, ids, scores = torch.ops.npu.npu_moe_gating_top_k(
        logits,
        top_k,
        bias=bias,
        k_group=top_groups,
        group_count=num_groups,
        group_select_mode=BEST_TWO,
        norm_type=SIGMOID,
        out_flag=not renormalize,
        routed_scaling_factor=scale,
        eps=RENORMALISE_EPS,
    )
    ids = ids.long()
    return ids, weights if renormalize else scores.gather(1, ids) * scale


def run(
    vendor: Vendor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: PackedExperts | QuantizedExperts,
    activation: Activation,
    beta: float,
    linear_beta: float | None,
) -> Tensor:
    """`Ops.experts`: rows sorted by expert, one product an expert, back to their tokens. Weights in the rows' dtype."""
    if x.shape[0] == 0:
        return x.clone()
    is_quantized = isinstance(packed, QuantizedExperts)
    first = packed.gate_up.values if isinstance(packed, QuantizedExperts) else packed.gate_up
    experts = first.shape[0]
    rows, places, counts, scale = torch.ops.npu.npu_moe_init_routing_v2(
        x.contiguous(),
        ids.int(),
        active_num=ids.numel(),
        expert_num=experts,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
        quant_mode=DYNAMIC if is_quantized else NO_QUANTISATION,
        row_idx_type=0,
    )
    hidden = _grouped(rows, scale, packed.gate_up, counts, x.dtype)
    hidden, scale = _activated(vendor, hidden, activation, beta, linear_beta, counts, is_quantized=is_quantized)
    out: Tensor = torch.ops.npu.npu_moe_finalize_routing(
        _grouped(hidden, scale, packed.down, counts, x.dtype),
        None,
        None,
        None,
        weights.to(x.dtype),
        places,
        None,
        drop_pad_mode=ROW_MAJOR,
    )
    return out


def _grouped(
    x: Tensor, scale: Tensor | None, weight: Tensor | QuantizedWeight, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """Rows by expert times its weight; of quantised ones with a scale for each row. The output's dtype is said: left
    out, it follows from the dtype of the weight's scale."""
    common = {"group_list": counts, "split_item": OUT_OF_ONE, "group_type": BY_ROWS, "group_list_type": COUNTS}
    if isinstance(weight, QuantizedWeight):
        (out,) = torch.ops.npu.npu_grouped_matmul(
            [x],
            [weight.values],
            scale=[weight.scale],
            per_token_scale=[scale],
            bias=None if weight.bias is None else [weight.bias],
            output_dtype=dtype,
            **common,
        )
    else:
        (out,) = torch.ops.npu.npu_grouped_matmul([x], [weight], **common)
    result: Tensor = out
    return result


def _activated(
    vendor: Vendor,
    gate_up: Tensor,
    activation: Activation,
    beta: float,
    linear_beta: float | None,
    counts: Tensor,
    *,
    is_quantized: bool,
) -> tuple[Tensor, Tensor | None]:
    """The activation, and with quantised rows int8 and their scales float32 [rows]."""
    if is_quantized and activation == "situ" and linear_beta is not None:
        out, scale = vendor.situ(gate_up, counts, COUNTS, need_quant=True, beta=beta, linear_beta=linear_beta)
        return out, scale
    out = glu(vendor, gate_up, activation, beta, linear_beta, counts)
    if not is_quantized:
        return out, None
    out, scale = torch.ops.npu.npu_dynamic_quant(out)
    return out, scale


def glu(
    vendor: Vendor, gate_up: Tensor, activation: Activation, beta: float, linear_beta: float | None, counts: Tensor
) -> Tensor:
    """`Ops.glu`. SiTU or SwiGLU is chosen by the activation alone, whatever the experts' dtype."""
    out: Tensor
    if activation == "silu":
        out = torch.ops.npu.npu_swiglu(gate_up)
        return out
    if linear_beta is None:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (beta * (gate / beta).tanh() * gate.sigmoid() * up).to(gate_up.dtype)
    out, _ = vendor.situ(gate_up, counts, COUNTS, need_quant=False, beta=beta, linear_beta=linear_beta)
    return out
