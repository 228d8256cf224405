"""Norm, residual mixture, activations and the sampling filter."""

from typing import Any

import torch
from torch import Tensor

from k3svc.ops.npu_emulated.contract import poisoned, require, require_contiguous, require_dtype
from k3svc.ops.npu_emulated.device import kernel
from k3svc.ops.npu_emulated.registry import operator

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@operator("npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:  # noqa: A002 - the schema's name
    """(y, rstd float32 [..., 1]); one rounding, at the end."""
    name = "npu_rms_norm"
    require_dtype(name, "input", input, *_FLOATS)
    require(gamma.dtype in (input.dtype, torch.float32), name, f"gamma is {gamma.dtype}, input {input.dtype}")
    require(gamma.shape == input.shape[-1:], name, f"gamma {tuple(gamma.shape)} for rows of {input.shape[-1]}")
    require(input.numel() > 0, name, "empty input")
    wide = input.double()
    rstd = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.double()).to(input.dtype), rstd.float()


@operator("npu_swiglu")
def npu_swiglu(input: Tensor, dim: int) -> Tensor:  # noqa: A002 - the schema's name
    """silu(left) · right along the last axis."""
    require(dim == -1, "npu_swiglu", "another axis than the last is not emulated")
    gate, up = input.double().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(input.dtype)


@kernel
def situ(
    hidden_states: Tensor,
    group_list: Tensor,
    group_list_type: int,
    *,
    need_quant: bool,
    beta: float = 4.0,
    linear_beta: float = 25.0,
) -> tuple[Tensor, Tensor | None]:
    """(out [tokens, d], None) or (int8, scale float32 [tokens]). Rows past the sum of group_list are left unwritten."""
    name = "situ"
    require(group_list.dtype in (torch.int32, torch.int64), name, f"group_list is {group_list.dtype}")
    require(group_list_type == 1, name, "type 0 (cumulative) reads past the list; pass counts")
    require_contiguous(name, hidden_states=hidden_states)
    count = int(group_list.sum())
    require(count <= hidden_states.shape[0], name, f"{count} rows in group_list, {hidden_states.shape[0]} given")
    gate, up = hidden_states[:count].double().chunk(2, dim=-1)
    y = beta * (gate / beta).tanh() * gate.sigmoid() * linear_beta * (up / linear_beta).tanh()
    shape = (hidden_states.shape[0], hidden_states.shape[1] // 2)
    if not need_quant:
        out = poisoned(shape, hidden_states.dtype)
        out[:count] = y.to(out.dtype)
        return out, None
    scale = (y.abs().amax(-1) / 127).clamp_min(1e-30)
    quantised, scales = poisoned(shape, torch.int8), poisoned(shape[:1], torch.float32)
    quantised[:count] = (y / scale[:, None] + 0.5).floor().clamp(-128, 127).to(torch.int8)
    scales[:count] = scale.float()
    return quantised, scales


@kernel
def mix_fused(
    prefix_sum: Tensor, bank: Tensor, num_valid_blocks: int, combined_weight: Tensor, variance_epsilon: float
) -> Tensor:
    """Softmax over normalised scores of the first blocks of bank [N, B, H] and prefix_sum [N, H] → [N, H]."""
    name = "mix_fused"
    require(bank.dim() == 3 and bank.shape[1] >= num_valid_blocks > 0, name, f"bank {tuple(bank.shape)}")
    require_contiguous(name, prefix_sum=prefix_sum, bank=bank, combined_weight=combined_weight)
    rows = torch.cat([bank[:, :num_valid_blocks], prefix_sum[:, None]], dim=1).double()
    rstd = (rows.square().mean(-1) + variance_epsilon).rsqrt()
    weights = ((rows * combined_weight.double()).sum(-1) * rstd).softmax(-1)
    return (rows * weights[..., None]).sum(1).to(prefix_sum.dtype)


@kernel
def split_qkv_rmsnorm_rope(
    input: Tensor,  # noqa: A002 - the kernel's name
    sin: Tensor,
    cos: Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """input [B, q + 2·kv] → q [B, q], k and v [B, kv]: heads of q and k normed and turned by sin and cos [B, D]."""
    name = "split_qkv_rmsnorm_rope"
    require_dtype(name, "input", input, torch.bfloat16, torch.float16)
    require_contiguous(name, input=input, sin=sin, cos=cos)
    require(head_dim & (head_dim - 1) == 0, name, f"head_dim {head_dim}, must be a power of two")
    require(q_hidden_size % kv_hidden_size == 0, name, f"{q_hidden_size} channels of q on {kv_hidden_size}")
    require(input.shape[1] == q_hidden_size + 2 * kv_hidden_size, name, f"input {tuple(input.shape)}")
    require(sin.shape == cos.shape == (input.shape[0], head_dim), name, f"sin {tuple(sin.shape)}: the whole head")
    require(sin.dtype == cos.dtype == input.dtype, name, f"sin {sin.dtype}, input {input.dtype}")
    require(eps is not None and q_weight is not None and k_weight is not None, name, "eps and weights come together")
    require(q_bias is None and k_bias is None and is_neox_style, name, "biases and interleaved heads are not emulated")
    assert eps is not None and q_weight is not None and k_weight is not None
    q, k, v = torch.split(input, [q_hidden_size, kv_hidden_size, kv_hidden_size], dim=1)
    turned = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        rows = x.double().view(x.shape[0], -1, head_dim)
        rows = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        first, second = rows.chunk(2, dim=-1)
        rows = rows * cos.double()[:, None] + torch.cat([-second, first], dim=-1) * sin.double()[:, None]
        turned.append(rows.flatten(1).to(input.dtype))
    return turned[0], turned[1], v.clone()


@kernel
def fused_split_qk_norm(
    fused: Tensor,
    q_a_layernorm: Any,
    kv_a_layernorm: Any,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_rope_dim: int,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """fused [B, q + kv + rope] → q [B, q] and kv [B, 1, kv], normed by one eps and the weights of two modules, and rope
    [B, 1, rope] as it was.

    It is known not to be numerically equivalent to split and norm, but not how. Here a normed row is rounded before it
    is multiplied with the weight, and again after it.
    """
    name = "fused_split_qk_norm"
    require_dtype(name, "fused", fused, torch.bfloat16, torch.float16)
    require_contiguous(name, fused=fused, q_weight=q_a_layernorm.weight, kv_weight=kv_a_layernorm.weight)
    widths = [q_lora_rank, kv_lora_rank, qk_rope_dim]
    require(fused.dim() == 2 and fused.shape[1] == sum(widths), name, f"rows {tuple(fused.shape)}, widths {widths}")
    require(0 < fused.shape[0] < 65535, name, f"{fused.shape[0]} rows, fewer than 65535 and at least one")
    q, kv, rope = torch.split(fused, widths, dim=1)
    normed = []
    for x, norm in ((q, q_a_layernorm), (kv, kv_a_layernorm)):
        require(norm.weight.shape == x.shape[1:], name, f"weight {tuple(norm.weight.shape)} for rows of {x.shape[1]}")
        require(norm.weight.dtype == fused.dtype, name, f"weight {norm.weight.dtype}, rows {fused.dtype}")
        wide = x.double()
        wide = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(fused.dtype)
        normed.append((wide.double() * norm.weight.double()).to(fused.dtype))
    return normed[0], normed[1][:, None], rope.clone()[:, None]


@operator("npu_top_k_top_p")
def npu_top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None) -> Tensor:
    """Logits with what the filters drop at -inf. A row without a finite logit gives NaN."""
    name = "npu_top_k_top_p"
    require_dtype(name, "logits", logits, *_FLOATS)
    require(logits.dim() == 2 and logits.shape[0] > 0, name, f"logits {tuple(logits.shape)}")
    rows, vocabulary = logits.shape
    values = logits.double()
    if k is not None:
        require(k.dtype == torch.int32 and k.shape == (rows,), name, f"k {k.dtype} {tuple(k.shape)}, int32 [{rows}]")
        allowed = (k >= 1) & (k <= min(1024, vocabulary))
        require(bool(allowed.all()), name, f"k {k[~allowed].tolist()} outside of [1, {min(1024, vocabulary)}]")
        border = values.sort(dim=-1, descending=True).values.gather(1, k.long()[:, None] - 1)
        values = values.masked_fill(values < border, -torch.inf)
    if p is not None:
        require(p.dtype == logits.dtype and p.shape == (rows,), name, f"p {p.dtype} {tuple(p.shape)}")
        ordered = values.sort(dim=-1, stable=True)
        is_dropped = ordered.values.softmax(-1).cumsum(-1) <= 1 - p.double()[:, None]
        is_dropped[:, -1] = False
        values = values.masked_fill(torch.zeros_like(is_dropped).scatter(1, ordered.indices, is_dropped), -torch.inf)
    is_lost = logits.double().amax(-1, keepdim=True) == -torch.inf
    return (
        torch.where(values == -torch.inf, -torch.inf, logits.double()).masked_fill(is_lost, torch.nan).to(logits.dtype)
    )
