"""An independent draft by the formulas of speculation.md 1.1 and 2.1: no cache, no fusion, doubles.

RoPE and its scalings are written after their papers: position interpolation, Llama 3's bands, YaRN (2309.00071) with
the temperature of the scores as DeepSeek's MLA applies it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from k3svc.model.draft_config import DraftConfig, RopeScaling


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """What a draft gives by the formulas."""

    tokens: list[int]
    """γ greedy ones, or those that it was given."""
    logits: Tensor
    """[γ, X], each row after the tokens before it."""
    confidences: Tensor | None
    """Logits [γ]."""


def split(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return x.reshape(*x.shape[:-1], *sizes)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def temperature(factor: float, weight: float) -> float:
    """How much longer contexts sharpen scores, YaRN's 0.1 ln s + 1, weighed."""
    return 1.0 + 0.1 * weight * math.log(max(factor, 1.0))


def channel_frequency(channel: int, dim: int, theta: float, scaling: RopeScaling) -> float:
    """Radians a position of one pair of channels."""
    plain: float = theta ** (-2 * channel / dim)
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    stretched = plain / scaling.factor
    if scaling.kind == "default":
        return plain
    if scaling.kind == "linear":
        return stretched
    if scaling.kind == "llama3":
        if turns > scaling.high_freq_factor:
            return plain
        if turns < scaling.low_freq_factor:
            return stretched
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return kept * plain + (1 - kept) * stretched

    def channel_that_turns(times: float) -> float:
        return dim / 2 * math.log(scaling.original_max_positions / (2 * math.pi * times), theta)

    first, last = channel_that_turns(scaling.beta_fast), channel_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    share = min(max((channel - first) / (last - first), 0.0), 1.0)
    return share * stretched + (1 - share) * plain


def amplitude(scaling: RopeScaling) -> float:
    """Factor of what was turned."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.factor, scaling.mscale) / temperature(scaling.factor, scaling.mscale_all_dim)
    return temperature(scaling.factor, 1.0)


def turn(config: DraftConfig, x: Tensor, positions: Sequence[int], *, interleaved: bool) -> Tensor:
    """RoPE by complex multiplication, x [n, heads, D]."""
    dim = x.shape[-1]
    half = dim // 2
    frequencies = [channel_frequency(at, dim, config.rope_theta, config.rope_scaling) for at in range(half)]
    angle = torch.outer(torch.tensor(positions).double(), torch.tensor(frequencies).double())
    spin = torch.polar(torch.full_like(angle, amplitude(config.rope_scaling)), angle)[:, None]
    pairs = split(x, half, 2) if interleaved else split(x, 2, half).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * spin)
    return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)


def evaluate(
    config: DraftConfig,
    weights: dict[str, Tensor],
    tables: tuple[Tensor, Tensor],
    anchor: int,
    taps: Tensor,
    *,
    chosen: Sequence[int] | None = None,
) -> Formulas:
    """tables: embedding and lm_head [X, H]; taps [n, taps · H] of the tokens before the anchor; chosen: γ drafts that
    rows are to follow instead of greedy ones.
    """
    w = {name: tensor.double() for name, tensor in weights.items()}
    embedding, lm_head = (table.double() for table in tables)
    context = norm(taps.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    base = len(taps)
    places = list(range(base)) + list(range(base, base + config.num_rows))
    x = embedding[[anchor] + [config.mask_token_id] * (config.num_rows - 1)]
    for layer in range(config.num_layers):
        own = {k.removeprefix(f"layers.{layer}."): v for k, v in w.items() if k.startswith(f"layers.{layer}.")}
        normed = norm(x, own["input_layernorm.weight"])
        query, key, value, scale = heads(config, own, torch.cat([context, normed]), places)
        query = query[base:]
        scores = torch.einsum("gnd,snd->ngs", query, key) * scale
        if config.window is not None:
            scores[..., : max(base - config.window, 0)] = -math.inf
        if config.is_causal:
            late = torch.tensor([[place > places[base + row] for place in places] for row in range(config.num_rows)])
            scores = scores.masked_fill(late, -math.inf)
        mixed = torch.einsum("ngs,snv->gnv", scores.softmax(-1), value).flatten(1)
        x = x + mixed @ own["self_attn.o_proj.weight"].T
        normed = norm(x, own["post_attention_layernorm.weight"])
        gate = F.silu(normed @ own["mlp.gate_proj.weight"].T) * (normed @ own["mlp.up_proj.weight"].T)
        x = x + gate @ own["mlp.down_proj.weight"].T
    states = norm(x, w["norm.weight"])[config.first_predicting_row :]
    return read_out(config, w, states, states @ lm_head.T, anchor, chosen)


def heads(
    config: DraftConfig, w: dict[str, Tensor], x: Tensor, places: list[int]
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value [n, NH, ·] of all rows, expanded form, and the scale of scores."""

    def project(name: str, rows: Tensor) -> Tensor:
        return rows @ w[f"self_attn.{name}.weight"].T

    count, mla = config.num_heads, config.mla
    if mla is None:
        query = norm(split(project("q_proj", x), count, -1), w["self_attn.q_norm.weight"])
        key = norm(split(project("k_proj", x), config.num_kv_heads, -1), w["self_attn.k_norm.weight"])
        value = split(project("v_proj", x), config.num_kv_heads, -1)
        times = count // config.num_kv_heads
        query, key = (turn(config, rows, places, interleaved=False) for rows in (query, key))
        return query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), config.head_dim**-0.5
    if mla.q_lora_rank is None:
        query = project("q_proj", x)
    else:
        query = project("q_b_proj", norm(project("q_a_proj", x), w["self_attn.q_a_layernorm.weight"]))
    query = split(query, count, -1)
    packed = project("kv_a_proj_with_mqa", x)
    latent = norm(packed[:, : mla.kv_lora_rank], w["self_attn.kv_a_layernorm.weight"])
    expanded = split(project("kv_b_proj", latent), count, -1)
    shared = turn(config, packed[:, None, mla.kv_lora_rank :], places, interleaved=mla.interleaved_rope).expand(
        -1, count, -1
    )
    turned = turn(config, query[..., mla.nope_dim :], places, interleaved=mla.interleaved_rope)
    query = torch.cat([query[..., : mla.nope_dim], turned], -1)
    key = torch.cat([expanded[..., : mla.nope_dim], shared], -1)
    scale = (mla.nope_dim + mla.rope_dim) ** -0.5
    if config.rope_scaling.kind == "yarn" and config.rope_scaling.mscale_all_dim:
        scale *= temperature(config.rope_scaling.factor, config.rope_scaling.mscale_all_dim) ** 2
    return query, key, expanded[..., mla.nope_dim :], scale


def read_out(
    config: DraftConfig,
    w: dict[str, Tensor],
    states: Tensor,
    logits: Tensor,
    anchor: int,
    chosen: Sequence[int] | None,
) -> Formulas:
    tokens, rows, confidences = [], [], []
    previous, memory = anchor, torch.zeros(config.markov_rank, dtype=torch.float64)
    for place, (state, base) in enumerate(zip(states, logits, strict=True)):
        row = base.clone()
        row[config.mask_token_id] = -math.inf
        embedded = state[:0]
        if config.markov_head is not None:
            embedded = mixed = w["markov_head.markov_w1.weight"][previous]
            if config.markov_head == "gated":
                joined = torch.cat([state, embedded])
                gate = w["markov_head.gate_proj.weight"] @ joined + w["markov_head.gate_proj.bias"]
                mixed = torch.sigmoid(gate) * embedded
            if config.markov_head == "rnn":
                joined = torch.cat([memory, embedded, state])
                joint = w["markov_head.joint_proj.weight"] @ joined + w["markov_head.joint_proj.bias"]
                gate, change, out = joint.chunk(3)
                memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(change)
                mixed = torch.tanh(out)
            row += w["markov_head.markov_w2.weight"] @ mixed
        if config.confidence_head:
            joined = torch.cat([state, embedded]) if config.confidence_with_markov else state
            confidences.append(w["confidence_head.proj.weight"][0] @ joined + w["confidence_head.proj.bias"][0])
        previous = int(row.argmax()) if chosen is None else chosen[place]
        tokens.append(previous)
        rows.append(row)
    return Formulas(
        tokens=tokens,
        logits=torch.stack(rows),
        confidences=torch.stack(confidences) if confidences else None,
    )
