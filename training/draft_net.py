"""The drafts as modules that learn: many blocks of one sequence at once, tensors under their published names.

Letters: S sequences, T context positions, A anchors a sequence, G rows a block, H hidden size, X vocabulary. A block
query of anchor a sees context keys j < a of its sequence and the rows of its own block, nothing else. The library's
draft (`k3svc.model.draft`) serves the same weights.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3svc.model.draft_config import DraftConfig


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product in bfloat16 on a GPU, in float32 on a CPU."""
    dtype = torch.bfloat16 if x.is_cuda else torch.float32
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class Linear(nn.Module):
    def __init__(self, outputs: int, inputs: int, *, bias: bool = False, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        heads, groups, width = config.num_heads, config.num_kv_heads, config.head_dim
        self.heads, self.groups, self.width = heads, groups, width
        self.q_proj = Linear(heads * width, config.hidden_size)
        self.k_proj = Linear(groups * width, config.hidden_size)
        self.v_proj = Linear(groups * width, config.hidden_size)
        out_std = 0.02 / math.sqrt(2 * config.num_layers)
        self.o_proj = Linear(config.hidden_size, heads * width, std=out_std)
        self.q_norm, self.k_norm = Norm(width, config.rms_norm_eps), Norm(width, config.rms_norm_eps)

    def keys(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [S, n, H] → rotated keys and values [S, KVH, n, D]."""
        key = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (self.groups, self.width))), rotation)
        value = self.v_proj(x).unflatten(-1, (self.groups, self.width))
        return key.transpose(1, 2).to(value.dtype), value.transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, rotations: "Rotations", visible: Tensor) -> Tensor:
        context_key, context_value = self.keys(context, rotations[0])
        block_key, block_value = self.keys(x, rotations[1])
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.width))), rotations[1])
        key = torch.cat([context_key, block_key], dim=2).repeat_interleave(self.heads // self.groups, dim=1)
        value = torch.cat([context_value, block_value], dim=2).repeat_interleave(self.heads // self.groups, dim=1)
        out = F.scaled_dot_product_attention(query.transpose(1, 2).to(value.dtype), key, value, attn_mask=visible)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


Rotations = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def rotation(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [S, n, 1, D] of positions [S, n]."""
    inverse = theta ** (-torch.arange(0, width, 2, device=positions.device).float() / width)
    angles = (positions[..., None].float() * inverse).repeat(1, 1, 2)[:, :, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of x [S, n, heads, D], halves layout."""
    first, second = x.float().chunk(2, dim=-1)
    return x.float() * by[0] + torch.cat([-second, first], dim=-1) * by[1]


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.intermediate_size, config.hidden_size)
        self.up_proj = Linear(config.intermediate_size, config.hidden_size)
        out_std = 0.02 / math.sqrt(2 * config.num_layers)
        self.down_proj = Linear(config.hidden_size, config.intermediate_size, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, rotations: Rotations, visible: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotations, visible).float()
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x)).float()
        return out


class Table(nn.Module):
    """A weight without a product of its own."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width) * std)


class MarkovHead(nn.Module):
    """Bias on the logits of a row by the token chosen before it; markov_w2 starts at zero."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        rank, self.kind = config.markov_rank, config.markov_head
        self.markov_w1 = Table(config.vocab_size, rank, 0.5)
        self.markov_w2 = Table(config.vocab_size, rank, 0.0)
        if self.kind == "gated":
            self.gate_proj = Linear(rank, config.hidden_size + rank, bias=True)
        if self.kind == "rnn":
            self.joint_proj = Linear(3 * rank, 2 * rank + config.hidden_size, bias=True)

    def begin(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(*hidden.shape[:-1], self.markov_w1.weight.shape[1])

    def forward(self, hidden: Tensor, previous: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [..., H], previous ids [...], memory [..., r] → bias [..., X], embedding [..., r], memory."""
        embedded = F.embedding(previous, self.markov_w1.weight)
        mixed = embedded
        if self.kind == "gated":
            mixed = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)).float()) * embedded
        if self.kind == "rnn":
            joint = self.joint_proj(torch.cat([memory, embedded, hidden], dim=-1)).float()
            gate, change, out = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            memory = gate * memory + (1 - gate) * torch.tanh(change)
            mixed = torch.tanh(out)
        return linear(mixed, self.markov_w2.weight).float(), embedded, memory


class ConfidenceHead(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        extra = config.markov_rank if config.confidence_with_markov else 0
        self.proj = Linear(1, config.hidden_size + extra, bias=True, std=0.0)


class DraftNet(nn.Module):
    """A DFlash or DSpark draft with GQA attention; embedding and lm_head are the target's, frozen."""

    def __init__(self, config: DraftConfig, embedding: Tensor, head: Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(config.hidden_size, config.hidden_size * len(config.target_layers))
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        if config.markov_head is not None:
            self.markov_head = MarkovHead(config)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(config)
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("head", head.float(), persistent=False)
        self.embedding: Tensor
        self.head: Tensor

    def rows(self, taps: Tensor, block: Tensor, anchors: Tensor, first: Tensor) -> Tensor:
        """Final states of the predicting rows, [S, A, γ, H].

        taps [S, T, taps·H]; block int64 [S, A, G] ids of the rows (anchor, then mask ids or revealed tokens); anchors
        int64 [S, A] positions; first int64 [S, A] first visible context position.
        """
        sequences, count, width = block.shape
        context = self.hidden_norm(self.fc(taps))
        places = torch.arange(taps.shape[1], device=taps.device)
        positions = (anchors[..., None] + torch.arange(width, device=taps.device)).flatten(1)
        theta, dim = self.config.rope_theta, self.config.head_dim
        rotations = (rotation(places.expand(sequences, -1), dim, theta), rotation(positions, dim, theta))
        seen = (places < anchors[..., None]) & (places >= first[..., None])
        owner = torch.arange(count, device=taps.device).repeat_interleave(width)
        same = (owner[:, None] == owner).expand(sequences, -1, -1)
        visible = torch.cat([seen.repeat_interleave(width, dim=1), same], dim=-1)[:, None]
        x = F.embedding(block.flatten(1), self.embedding)
        for layer in self.layers:
            x = layer(x, context, rotations, visible)
        out: Tensor = self.norm(x).unflatten(1, (count, width))[:, :, self.config.first_predicting_row :]
        return out

    def base_logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head).float()

    def confidence(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Logit of the chance that a row is accepted, [...]."""
        joined = torch.cat([hidden, embedded], dim=-1) if self.config.confidence_with_markov else hidden
        proj = self.confidence_head.proj
        return F.linear(joined.float(), proj.weight, proj.bias)[..., 0]

    def pick(
        self, hidden: Tensor, anchor_ids: Tensor, temperature: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Proposals int64 [..., γ] and confidence logits of final states [..., γ, H].

        temperature [..., 1], 0 is greedy; noise [..., γ, X] (or 0) is what the target's sampler adds, so
        that draft and target fall on the same token wherever their laws allow it.
        """
        logits = self.base_logits(hidden)
        logits[..., self.config.mask_token_id] = -torch.inf
        scale = temperature.clamp(min=1e-3)
        tokens, confidences = [], []
        previous, memory = anchor_ids, torch.zeros_like(hidden[..., 0, :1])
        if self.config.markov_head is not None:
            memory = self.markov_head.begin(hidden[..., 0, :])
        for row in range(hidden.shape[-2]):
            scores = logits[..., row, :]
            if self.config.markov_head is not None:
                bias, embedded, memory = self.markov_head(hidden[..., row, :], previous, memory)
                scores = scores + bias
                if self.config.confidence_head:
                    confidences.append(self.confidence(hidden[..., row, :], embedded))
            added = noise[..., row, :] if noise.dim() else noise
            previous = torch.where(temperature > 0, scores / scale + added, scores).argmax(-1)
            tokens.append(previous)
        return torch.stack(tokens, dim=-1), torch.stack(confidences, dim=-1) if confidences else None


def published(net: DraftNet) -> dict[str, Tensor]:
    """The weights under their published names, bfloat16 on the CPU."""
    return {name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in net.state_dict().items()}


def taps_of(stored: Sequence[int], wanted: Sequence[int], features: Tensor) -> Tensor:
    """Columns of the wanted taps out of features [..., stored · H]."""
    if tuple(stored) == tuple(wanted):
        return features
    parts = features.view(*features.shape[:-1], len(stored), -1)
    return torch.cat([parts[..., list(stored).index(layer), :] for layer in wanted], dim=-1)
