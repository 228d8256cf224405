"""The target token by token over the exported files, for many sequences at once: rollouts and their features.

Letters: B sequences, T positions, H hidden size, N heads, X vocabulary. All sequences of a state stand at the same
position, so a step is one fixed set of products and a GPU can replay it as a graph. Experts run densely, weighted by
the router. Everything is float32 unless a cache dtype is given.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

LORA_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class State:
    """Caches of B sequences, updated in place."""

    kda: dict[int, Tensor]
    """float32 [B, N, d, d] by layer, key axis first."""
    conv: dict[int, Tensor]
    """float32 [B, 3, 3·N·d] by layer, oldest row first."""
    rows: dict[int, Tensor]
    """[B, T, R + E] by layer."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one token gives."""

    logits: Tensor
    """float32 [B, X], of the token after it."""
    hidden: Tensor
    """float32 [B, H]: what lm_head reads."""
    taps: Tensor
    """float32 [B, taps · H]: the residual mixture that follows each tapped layer."""


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class RecurrentTarget:
    """A K3 checkpoint with the shapes of k3-nano's config."""

    def __init__(self, path: Path, device: str, taps: tuple[int, ...]) -> None:
        self.config = config = json.loads((path / "config.json").read_text())["text_config"]
        self.device, self.taps = device, taps
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        weights: dict[str, Tensor] = {}
        for name in sorted(set(index.values())):
            weights.update(load_file(path / name))
        self.weights = {
            name.removeprefix("language_model."): tensor.float().to(device) for name, tensor in weights.items()
        }
        linear = config["linear_attn_config"]
        self.heads, self.width = linear["num_heads"], linear["head_dim"]
        self.kda = tuple(layer - 1 for layer in linear["kda_layers"])
        self.layers, self.eps = config["num_hidden_layers"], config["rms_norm_eps"]
        self.stacked = {layer: self._stack_experts(layer) for layer in range(1, self.layers)}

    def _stack_experts(self, layer: int) -> tuple[Tensor, Tensor]:
        """[2·E·I, Z] of all w1, then all w3; [Z, E·I] of all w2."""
        base = f"model.layers.{layer}.block_sparse_moe.experts."
        parts = {
            name: [self.weights[f"{base}{expert}.{name}.weight"] for expert in range(self.config["num_experts"])]
            for name in ("w1", "w2", "w3")
        }
        return torch.cat(parts["w1"] + parts["w3"]), torch.cat(parts["w2"], dim=1)

    def new_state(self, batch: int, length: int, cache_dtype: torch.dtype = torch.float32) -> State:
        """Zeroed caches for `batch` sequences of up to `length` tokens."""
        channels = 3 * self.heads * self.width
        width = self.config["kv_lora_rank"] + self.config["qk_rope_head_dim"]
        new = torch.zeros
        return State(
            kda={i: new(batch, self.heads, self.width, self.width, device=self.device) for i in self.kda},
            conv={i: new(batch, 3, channels, device=self.device) for i in self.kda},
            rows={
                i: new(batch, length, width, dtype=cache_dtype, device=self.device)
                for i in range(self.layers)
                if i not in self.kda
            },
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _mix(self, prefix: Tensor, bank: list[Tensor], name: str) -> Tensor:
        if not bank:
            return prefix
        rows = torch.stack([*bank, prefix], dim=1)
        score = self.weights[f"{name}_norm.weight"] * self.weights[f"{name}_proj.weight"][0]
        weights = (rms(rows, score, self.eps).sum(-1)).softmax(-1)
        return (weights[..., None] * rows).sum(1)

    def _kda(self, base: str, x: Tensor, layer: int, state: State) -> Tensor:
        weights, heads, width = self.weights, self.heads, self.width
        raw = torch.cat([self._linear(x, f"{base}{part}_proj") for part in "qkv"], dim=-1)
        filters = torch.cat([weights[f"{base}{part}_conv1d.weight"][:, 0] for part in "qkv"])
        window = torch.cat([state.conv[layer], raw[:, None]], dim=1)
        state.conv[layer].copy_(window[:, 1:])
        mixed = F.silu((window * filters.t()).sum(1)).view(-1, 3, heads, width)
        query, key, value = mixed.unbind(1)
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6) * width**-0.5
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
        logits = F.linear(self._linear(x, f"{base}f_a_proj"), weights[f"{base}f_b_proj.weight"])
        logits = (logits + weights[f"{base}dt_bias"]).view(-1, heads, width)
        bound = self.config["linear_attn_config"]["gate_lower_bound"]
        decay = torch.exp(bound * torch.sigmoid(weights[f"{base}A_log"][:heads].exp()[:, None] * logits))
        beta = torch.sigmoid(self._linear(x, f"{base}b_proj"))[..., None]
        memory = state.kda[layer]
        memory.mul_(decay[..., None])
        change = beta * (value - torch.matmul(key[..., None, :], memory)[..., 0, :])
        memory.addcmul_(key[..., None], change[..., None, :])
        out = torch.matmul(query[..., None, :], memory)[..., 0, :]
        gate = torch.sigmoid(self._linear(x, f"{base}g_proj").view(-1, heads, width))
        return self._linear((rms(out, weights[f"{base}o_norm.weight"], self.eps) * gate).flatten(1), f"{base}o_proj")

    def _mla(self, base: str, x: Tensor, layer: int, position: Tensor, state: State) -> Tensor:
        config, weights = self.config, self.weights
        heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        rank, value_dim = config["kv_lora_rank"], config["v_head_dim"]
        low = rms(self._linear(x, f"{base}q_a_proj"), weights[f"{base}q_a_layernorm.weight"], LORA_EPS)
        query = self._linear(low, f"{base}q_b_proj").view(-1, heads, nope + rope)
        packed = self._linear(x, f"{base}kv_a_proj_with_mqa")
        latent = rms(packed[:, :rank], weights[f"{base}kv_a_layernorm.weight"], LORA_EPS)
        cache = state.rows[layer]
        cache.index_copy_(1, position, torch.cat([latent, packed[:, rank:]], dim=-1)[:, None].to(cache.dtype))
        expand = weights[f"{base}kv_b_proj.weight"].view(heads, nope + value_dim, rank)
        absorbed = torch.einsum("bnd,ndr->bnr", query[..., :nope], expand[:, :nope])
        scores = torch.cat([absorbed, query[..., nope:]], dim=-1).to(cache.dtype) @ cache.mT
        scores = scores.float() * (nope + rope) ** -0.5
        future = torch.arange(cache.shape[1], device=x.device) > position
        mass = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = (mass.to(cache.dtype) @ cache[..., :rank]).float()
        out = torch.einsum("bnr,nvr->bnv", mixed, expand[:, nope:]).flatten(1)
        return self._linear(out * torch.sigmoid(self._linear(x, f"{base}g_proj")), f"{base}o_proj")

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta: float = self.config["activation_situ_beta"]
        linear_beta: float = self.config["activation_situ_linear_beta"]
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)

    def _mlp(self, base: str, x: Tensor) -> Tensor:
        hidden = self._situ(self._linear(x, f"{base}gate_proj"), self._linear(x, f"{base}up_proj"))
        return self._linear(hidden, f"{base}down_proj")

    def _moe(self, base: str, x: Tensor, layer: int) -> Tensor:
        config, weights = self.config, self.weights
        scores = torch.sigmoid(self._linear(x, f"{base}gate"))
        chosen = (scores + weights[f"{base}gate.e_score_correction_bias"]).topk(config["num_experts_per_token"]).indices
        kept = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        kept = kept / (kept.sum(-1, keepdim=True) + 1e-20) * config["routed_scaling_factor"]
        gate_up, down = self.stacked[layer]
        hidden = F.linear(self._linear(x, f"{base}routed_expert_down_proj"), gate_up)
        hidden = self._situ(*hidden.chunk(2, dim=-1)).view(len(x), config["num_experts"], -1)
        routed = F.linear((hidden * kept[..., None]).flatten(1), down)
        routed = rms(routed, weights[f"{base}routed_expert_norm.weight"], self.eps)
        return self._linear(routed, f"{base}routed_expert_up_proj") + self._mlp(f"{base}shared_experts.", x)

    @torch.no_grad()
    def step(self, ids: Tensor, position: Tensor, state: State) -> Step:
        """One token of each sequence: ids int64 [B], position int64 [1] (the same for all)."""
        weights = self.weights
        prefix = weights["model.embed_tokens.weight"][ids]
        bank: list[Tensor] = []
        taps: list[Tensor] = []
        for layer in range(self.layers):
            base = f"model.layers.{layer}."
            mixture = self._mix(prefix, bank, f"{base}self_attention_res")
            if layer - 1 in self.taps:
                taps.append(mixture)
            opened = layer % self.config["attn_res_block_size"] == 0
            if opened:
                bank = [*bank, prefix]
            x = rms(mixture, weights[f"{base}input_layernorm.weight"], self.eps)
            if layer in self.kda:
                change = self._kda(f"{base}self_attn.", x, layer, state)
            else:
                change = self._mla(f"{base}self_attn.", x, layer, position, state)
            prefix = change if opened else prefix + change
            x = self._mix(prefix, bank, f"{base}mlp_res")
            x = rms(x, weights[f"{base}post_attention_layernorm.weight"], self.eps)
            if layer == 0:
                prefix = prefix + self._mlp(f"{base}mlp.", x)
            else:
                prefix = prefix + self._moe(f"{base}block_sparse_moe.", x, layer)
        mixture = self._mix(prefix, bank, "model.output_attn_res")
        hidden = rms(mixture, weights["model.norm.weight"], self.eps)
        return Step(logits=self._linear(hidden, "lm_head"), hidden=hidden, taps=torch.cat(taps, dim=-1))
