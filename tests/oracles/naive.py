"""An independent implementation of the text model: one sequence, one token at a time, straight from the formulas.

Nothing is fused, chunked, absorbed or paged, and nothing is shared with k3svc. float64 unless told otherwise.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """x / sqrt(Σ x² + 1e-6) over the last dimension."""
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def log_decay(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """f and dt_bias [.., HV, K], a_log [HV] → g [.., HV, K], by both gates."""
    x = f + dt_bias
    if lower_bound is None:
        return -a_log.exp()[:, None] * torch.nn.functional.softplus(x)
    return lower_bound * torch.sigmoid(a_log.exp()[:, None] * x)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence: q, k, g [T, HV, K], v [T, HV, V], beta [T, HV], state [HV, K, V] → outputs [T, HV, V], state.

    q and k are normalised here and q is scaled.
    """
    out = []
    for t in range(q.shape[0]):
        key, query = unit(k[t]), unit(q[t]) / math.sqrt(q.shape[-1])
        state = g[t].exp()[..., None] * state
        correction = beta[t][:, None] * (v[t] - (state * key[..., None]).sum(1))
        state = state + key[..., None] * correction[:, None]
        out.append((state * query[..., None]).sum(1))
    return torch.stack(out) if out else v.new_zeros(v.shape), state


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU-GLU."""
    right = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) / (1 + torch.exp(-gate)) * right


def mixture(rows: list[Tensor], norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """Attention of depth over [H] rows: scores of normed rows, values of raw ones."""
    scores = torch.stack([torch.dot(rms(row, norm, eps), proj) for row in rows])
    weights = torch.softmax(scores, 0)
    return sum((weight * row for weight, row in zip(weights, rows, strict=True)), torch.zeros_like(rows[0]))


@dataclass
class State:
    """Everything that a sequence remembers."""

    kda: dict[int, Tensor] = field(default_factory=dict)
    """[HV, K, V] a layer."""
    conv: dict[int, list[Tensor]] = field(default_factory=dict)
    """All raw q|k|v rows so far."""
    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    """Latent | k_rope rows so far."""


class NaiveModel:
    """Reads a checkpoint directory; `token` advances a State by one token and returns its logits [X]."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float64) -> None:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.c = config.get("text_config", config)
        self.linear = self.c["linear_attn_config"]
        self.dtype = dtype
        self.w: dict[str, Tensor] = {}
        for file in directory.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                short = name.removeprefix("language_model.").replace("block_sparse_moe", "mlp")
                self.w[short] = tensor.to(dtype)

    def token(self, token: int, state: State) -> Tensor:
        """Logits after one more token."""
        p = self.w["model.embed_tokens.weight"][token]
        bank: list[Tensor] = []
        block = self.c.get("attn_res_block_size")
        eps = self.c["rms_norm_eps"]
        for layer in range(self.c["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            h = p
            if block and bank:
                h = self.mix([*bank, p], f"{name}self_attention_res")
            opened = bool(block) and layer % block == 0
            if opened:
                bank.append(p)
            x = rms(h, self.w[f"{name}input_layernorm.weight"], eps)
            is_kda = layer + 1 in self.linear["kda_layers"]
            a = (self.kda if is_kda else self.mla)(layer, f"{name}self_attn.", x, state)
            p = a if opened else p + a
            h = self.mix([*bank, p], f"{name}mlp_res") if block else p
            x = rms(h, self.w[f"{name}post_attention_layernorm.weight"], eps)
            is_dense = layer < self.c["first_k_dense_replace"]
            p = p + (self.mlp(f"{name}mlp.", x) if is_dense else self.moe(f"{name}mlp.", x))
        h = self.mix([*bank, p], "model.output_attn_res") if block else p
        return self.w["lm_head.weight"] @ rms(h, self.w["model.norm.weight"], eps)

    def prompt(self, ids: list[int], state: State) -> Tensor:
        """Logits of every token [T, X]."""
        return torch.stack([self.token(token, state) for token in ids])

    def mix(self, rows: list[Tensor], name: str) -> Tensor:
        return mixture(rows, self.w[f"{name}_norm.weight"], self.w[f"{name}_proj.weight"][0], self.c["rms_norm_eps"])

    def kda(self, layer: int, name: str, x: Tensor, state: State) -> Tensor:
        heads, dim, width = (self.linear[key] for key in ("num_heads", "head_dim", "short_conv_kernel_size"))
        w = {key.removeprefix(name): tensor for key, tensor in self.w.items() if key.startswith(name)}
        raw = torch.cat([w[f"{part}_proj.weight"] @ x for part in "qkv"])
        history = state.conv.setdefault(layer, [])
        history.append(raw)
        taps = torch.cat([w[f"{part}_conv1d.weight"].reshape(-1, width) for part in "qkv"])
        y = torch.zeros_like(raw)
        for back in range(min(width, len(history))):
            y = y + taps[:, width - 1 - back] * history[-1 - back]
        y = y / (1 + torch.exp(-y))
        q, k, v = y.view(3, heads, dim)
        f = (w["f_b_proj.weight"] @ (w["f_a_proj.weight"] @ x)).view(heads, dim)
        a_log = w["A_log"].reshape(-1)[:heads]
        g = log_decay(f, a_log, w["dt_bias"].view(heads, dim), self.linear.get("gate_lower_bound"))
        beta = torch.sigmoid(w["b_proj.weight"] @ x)
        before = state.kda.get(layer, torch.zeros(heads, dim, dim, dtype=self.dtype))
        o, state.kda[layer] = delta_rule(q[None], k[None], v[None], g[None], beta[None], before)
        if self.linear.get("use_full_rank_gate"):
            z = w["g_proj.weight"] @ x
        else:
            z = w["g_b_proj.weight"] @ (w["g_a_proj.weight"] @ x)
        o = rms(o[0], w["o_norm.weight"], self.c["rms_norm_eps"]) * torch.sigmoid(z.view(heads, dim))
        return w["o_proj.weight"] @ o.reshape(-1)

    def mla(self, layer: int, name: str, x: Tensor, state: State) -> Tensor:
        c = self.c
        heads, rank, nope = c["num_attention_heads"], c["kv_lora_rank"], c["qk_nope_head_dim"]
        w = {key.removeprefix(name): tensor for key, tensor in self.w.items() if key.startswith(name)}
        if c.get("q_lora_rank"):
            low = rms(w["q_a_proj.weight"] @ x, w["q_a_layernorm.weight"], 1e-6)
            q = (w["q_b_proj.weight"] @ low).view(heads, -1)
        else:
            q = (w["q_proj.weight"] @ x).view(heads, -1)
        kv = w["kv_a_proj_with_mqa.weight"] @ x
        rows = state.rows.setdefault(layer, [])
        rows.append(torch.cat([rms(kv[:rank], w["kv_a_layernorm.weight"], 1e-6), kv[rank:]]))
        cached = torch.stack(rows)
        expanded = (cached[:, :rank] @ w["kv_b_proj.weight"].T).view(len(rows), heads, -1)
        rope = cached[:, None, rank:].expand(-1, heads, -1)
        keys = torch.cat([expanded[..., :nope], rope], -1)
        scores = torch.einsum("hd,shd->hs", q, keys) / math.sqrt(keys.shape[-1])
        o = torch.einsum("hs,shv->hv", torch.softmax(scores, -1), expanded[..., nope:]).reshape(-1)
        if c.get("mla_use_output_gate"):
            o = o * torch.sigmoid(w["g_proj.weight"] @ x)
        return w["o_proj.weight"] @ o

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.c["hidden_act"] == "silu":
            return gate / (1 + torch.exp(-gate)) * up
        return situ(gate, up, self.c["activation_situ_beta"], self.c.get("activation_situ_linear_beta"))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up, down = (self.w[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ self.act(gate @ x, up @ x)

    def moe(self, name: str, x: Tensor) -> Tensor:
        c, w = self.c, self.w
        score = torch.sigmoid(w[f"{name}gate.weight"] @ x)
        ranked = score + w[f"{name}gate.e_score_correction_bias"]
        chosen = sorted(range(len(ranked)), key=lambda e: (-float(ranked[e]), e))[: c["num_experts_per_token"]]
        total = sum(float(score[e]) for e in chosen) + 1e-20 if c["moe_renormalize"] else 1.0
        is_latent = c.get("routed_expert_hidden_size") is not None
        z = w[f"{name}routed_expert_down_proj.weight"] @ x if is_latent else x
        y = torch.zeros_like(z)
        for e in chosen:
            w1, w3, w2 = (w[f"{name}experts.{e}.{part}.weight"] for part in ("w1", "w3", "w2"))
            y = y + score[e] / total * c["routed_scaling_factor"] * (w2 @ self.act(w1 @ z, w3 @ z))
        if is_latent:
            y = w[f"{name}routed_expert_up_proj.weight"] @ rms(
                y, w[f"{name}routed_expert_norm.weight"], c["rms_norm_eps"]
            )
        return y + self.mlp(f"{name}shared_experts.", x) if c["num_shared_experts"] else y
