"""Router and experts on Ascend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from k3svc.ops.npu.vendor import Vendor
from k3svc.ops.table import Activation

SIGMOID = 1
BEST_TWO = 1
"""A group's value is the sum of its two best."""
COUNTS = 1
NO_QUANTISATION = -1
BY_ROWS, OUT_OF_ONE = 0, 2
"""npu_grouped_matmul: groups split the rows; one tensor comes out."""
ROW_MAJOR = 2
RENORMALISE_EPS = 1e-20


@dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """Weights of all experts of a layer."""

    gate_up: Tensor
    """[experts, D, 2·inner]."""
    down: Tensor
    """[experts, inner, D]."""


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
    packed: PackedExperts,
    activation: Activation,
    beta: float,
    linear_beta: float | None,
) -> Tensor:
    """`Ops.experts`: rows sorted by expert, one product an expert, back to their tokens. Weights in the rows' dtype."""
    if x.shape[0] == 0:
        return x.clone()
    experts = packed.gate_up.shape[0]
    rows, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x.contiguous(),
        ids.int(),
        active_num=ids.numel(),
        expert_num=experts,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
        quant_mode=NO_QUANTISATION,
        row_idx_type=0,
    )
    hidden = _grouped(rows, packed.gate_up, counts)
    hidden = glu(vendor, hidden, activation, beta, linear_beta, counts)
    out: Tensor = torch.ops.npu.npu_moe_finalize_routing(
        _grouped(hidden, packed.down, counts),
        None,
        None,
        None,
        weights.to(x.dtype),
        places,
        None,
        drop_pad_mode=ROW_MAJOR,
    )
    return out


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], group_list=counts, split_item=OUT_OF_ONE, group_type=BY_ROWS, group_list_type=COUNTS
    )
    result: Tensor = out
    return result


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
