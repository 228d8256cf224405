"""The trainable form of k3-nano: one parallel pass over whole windows.

KDA runs in chunks of 16 tokens (the split form is finite because the gate is bounded by -5), attention through SDPA,
all experts as one dense product with the router's weights. `training.recurrent` computes the same token by token from
the exported files.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, HIDDEN, VOCAB, DENSE = 8, 256, 4096, 1024
KDA_HEADS, KDA_WIDTH, CONV, GATE_BOUND, CHUNK = 4, 64, 4, -5.0, 16
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 4, 96, 64, 32, 16, 32
FULL_ATTENTION = (3, 6, 7)
EXPERTS, CHOSEN, LATENT, EXPERT_WIDTH, SHARED = 16, 4, 128, 128, 2
RESIDUAL_BLOCK = 4
BETA, LINEAR_BETA = 4.0, 25.0
EPS, LORA_EPS = 1e-5, 1e-6
OUT_STD = 0.02 / math.sqrt(2 * LAYERS)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Product in bfloat16 on a GPU, in float32 on a CPU."""
    dtype = torch.bfloat16 if x.is_cuda else torch.float32
    return F.linear(x.to(dtype), weight.to(dtype))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def situ(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.float(), up.float()
    return BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate) * (LINEAR_BETA * torch.tanh(up / LINEAR_BETA))


def matrix(outputs: int, inputs: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(outputs, inputs), std=std, a=-3 * std, b=3 * std))


def ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


class Scan(torch.autograd.Function):
    """S[n+1] = A[n] S[n] + b[n] over the chunks from S[0] = 0; every entering state. A, b, S: [chunks, M, d, d]."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, b: Tensor) -> Tensor:
        S = torch.empty_like(b)
        S[0].zero_()
        for n in range(A.shape[0] - 1):
            torch.baddbmm(b[n], A[n], S[n], out=S[n + 1])
        ctx.save_for_backward(A, S)
        return S

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        A, S = ctx.saved_tensors
        D = torch.empty_like(grad)  # D[n] is the gradient of S[n + 1]
        D[-1].zero_()
        grad = grad.contiguous()
        for n in range(A.shape[0] - 1, 0, -1):
            torch.baddbmm(grad[n], A[n].mT, D[n], out=D[n - 1])
        return D @ S.mT, D


def unit_lower_inverse(X: Tensor) -> Tensor:
    """(I + X)^-1 of strictly lower triangular blocks [..., 16, 16], by block recursion in four levels."""
    n, size = X.shape[-1], 1
    inverse = X.new_ones(*X.shape[:-2], n, 1, 1)
    while size < n:
        k = n // (2 * size)
        blocks = X.reshape(*X.shape[:-2], k, 2, size, k, 2, size)
        low = torch.stack([blocks[..., i, 1, :, i, 0, :] for i in range(k)], -3)
        a, d = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        c = -(d @ low @ a)
        inverse = torch.cat([torch.cat([a, torch.zeros_like(a)], -1), torch.cat([c, d], -1)], -2)
        size *= 2
    return inverse[..., 0, :, :]


class KDA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = KDA_HEADS * KDA_WIDTH
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (matrix(width, HIDDEN) for _ in range(4))
        self.f_a_proj, self.f_b_proj = matrix(KDA_WIDTH, HIDDEN), matrix(width, KDA_WIDTH)
        self.b_proj, self.o_proj = matrix(KDA_HEADS, HIDDEN), matrix(HIDDEN, width, OUT_STD)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.Parameter(torch.empty(width, CONV).uniform_(-0.5, 0.5)) for _ in range(3)
        )
        self.A_log = nn.Parameter(torch.empty(KDA_HEADS).uniform_(1, 16).log())
        # Spread the initial decays: g from about -1 to -0.005
        gate = torch.exp(torch.empty(KDA_HEADS, KDA_WIDTH).uniform_(math.log(5e-3), 0.0))
        start = torch.logit(gate / -GATE_BOUND) / self.A_log.detach().exp()[:, None]
        self.dt_bias = nn.Parameter(start.flatten())
        self.o_norm = ones(KDA_WIDTH)

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, heads, d] → [chunks, B·heads, 16, d]."""
        batch, length = x.shape[:2]
        return x.view(batch, length // CHUNK, CHUNK, KDA_HEADS, -1).permute(1, 0, 3, 2, 4).flatten(1, 2)

    def _heads(self, x: Tensor, weight: Tensor, taps: Tensor) -> Tensor:
        length = x.shape[1]
        padded = F.pad(linear(x, weight).float(), (0, 0, CONV - 1, 0))
        mixed = torch.stack([padded[:, at : at + length] * taps[:, at] for at in range(CONV)]).sum(0)
        return self._split(F.silu(mixed).view(*x.shape[:2], KDA_HEADS, KDA_WIDTH))

    def before_scan(self, x: Tensor) -> tuple[Tensor, ...]:
        """A and b of the scan, and what `after_scan` needs."""
        query = self._heads(x, self.q_proj, self.q_conv1d)
        key = self._heads(x, self.k_proj, self.k_conv1d)
        value = self._heads(x, self.v_proj, self.v_conv1d)
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6) * KDA_WIDTH**-0.5
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
        decay = linear(linear(x, self.f_a_proj), self.f_b_proj).float() + self.dt_bias
        decay = decay.view(*x.shape[:2], KDA_HEADS, KDA_WIDTH)
        gate = self._split(GATE_BOUND * torch.sigmoid(self.A_log.exp()[:, None] * decay))
        beta = self._split(torch.sigmoid(linear(x, self.b_proj).float())[..., None])
        total = gate.cumsum(2)
        up, down = total.exp(), (-total).exp()
        key_up, query_up, key_down = key * up, query * up, (key * down).mT
        scores = (query_up @ key_down).tril()
        inverse = unit_lower_inverse((key_up @ key_down).tril(-1) * beta)
        w, u = inverse @ (beta * key_up), inverse @ (beta * value)
        last = total[:, :, -1:]
        key_last = (key * (last - total).exp()).mT
        return torch.diag_embed(last.exp().squeeze(2)) - key_last @ w, key_last @ u, query_up, scores, u, w

    def after_scan(self, x: Tensor, S: Tensor, query_up: Tensor, scores: Tensor, u: Tensor, w: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        out = query_up @ S + scores @ (u - w @ S)
        out = out.view(length // CHUNK, batch, KDA_HEADS, CHUNK, KDA_WIDTH).permute(1, 0, 3, 2, 4)
        out = out.reshape(batch, length, KDA_HEADS, KDA_WIDTH)
        out = rms(out, self.o_norm, EPS) * torch.sigmoid(linear(x, self.g_proj).float().view_as(out))
        return linear(out.flatten(2), self.o_proj)

    def forward(self, x: Tensor) -> Tensor:
        A, b, *rest = self.before_scan(x)
        return self.after_scan(x, Scan.apply(A, b), *rest)  # type: ignore[no-untyped-call]


class MLA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.q_b_proj = matrix(Q_RANK, HIDDEN), matrix(HEADS * (NOPE + ROPE), Q_RANK)
        self.kv_a_proj_with_mqa = matrix(KV_RANK + ROPE, HIDDEN)
        self.kv_b_proj = matrix(HEADS * (NOPE + VALUE), KV_RANK)
        self.q_a_layernorm, self.kv_a_layernorm = ones(Q_RANK), ones(KV_RANK)
        self.g_proj, self.o_proj = matrix(HEADS * VALUE, HIDDEN), matrix(HIDDEN, HEADS * VALUE, OUT_STD)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        query = linear(rms(linear(x, self.q_a_proj), self.q_a_layernorm, LORA_EPS), self.q_b_proj)
        query = query.view(batch, length, HEADS, NOPE + ROPE)
        packed = linear(x, self.kv_a_proj_with_mqa)
        expanded = linear(rms(packed[..., :KV_RANK], self.kv_a_layernorm, LORA_EPS), self.kv_b_proj)
        expanded = expanded.view(batch, length, HEADS, NOPE + VALUE)
        shared = packed[..., None, KV_RANK:].expand(batch, length, HEADS, ROPE)
        key = torch.cat([expanded[..., :NOPE], shared], -1)
        value = F.pad(expanded[..., NOPE:], (0, NOPE + ROPE - VALUE))
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=(NOPE + ROPE) ** -0.5,
        )
        out = out[..., :VALUE].transpose(1, 2).flatten(2).float()
        return linear(out * torch.sigmoid(linear(x, self.g_proj).float()), self.o_proj)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = matrix(width, HIDDEN), matrix(width, HIDDEN)
        self.down_proj = matrix(HIDDEN, width, OUT_STD)

    def forward(self, x: Tensor) -> Tensor:
        return linear(situ(linear(x, self.gate_proj), linear(x, self.up_proj)), self.down_proj)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = matrix(EXPERTS, HIDDEN)
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.down, self.norm, self.up = matrix(LATENT, HIDDEN), ones(LATENT), matrix(HIDDEN, LATENT, OUT_STD)
        self.w1, self.w3 = matrix(EXPERTS * EXPERT_WIDTH, LATENT, 0.04), matrix(EXPERTS * EXPERT_WIDTH, LATENT, 0.04)
        self.w2 = matrix(EXPERTS * LATENT, EXPERT_WIDTH, 0.04)
        self.shared_experts = MLP(EXPERT_WIDTH * SHARED)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output, and the share of tokens that chose each expert."""
        scores = torch.sigmoid(F.linear(x.float(), self.gate.float()))
        ranked = (scores + self.bias).detach()
        order = torch.arange(EXPERTS, device=x.device)
        ahead = ranked[..., None, :] > ranked[..., None]
        ahead = ahead | ((ranked[..., None, :] == ranked[..., None]) & (order < order[:, None]))
        chosen = (ahead.sum(-1) < CHOSEN).float()
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        latent = linear(x, self.down)
        inner = situ(linear(latent, self.w1), linear(latent, self.w3)).view(*x.shape[:-1], EXPERTS, EXPERT_WIDTH)
        w2 = self.w2.view(EXPERTS, LATENT, EXPERT_WIDTH).transpose(0, 1).reshape(LATENT, -1)
        routed = rms(linear((inner * weights[..., None]).flatten(-2), w2), self.norm, EPS)
        return linear(routed, self.up) + self.shared_experts(x), chosen.flatten(0, -2).mean(0)


class Mix(nn.Module):
    """Attention residual over the block sums, then the sub-layer's RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj, self.out = ones(HIDDEN), nn.Parameter(torch.zeros(HIDDEN)), ones(HIDDEN)

    def forward(self, rows: list[Tensor]) -> Tensor:
        if len(rows) == 1:
            return rms(rows[0], self.out, EPS)
        stacked = torch.stack([row.float() for row in rows], -2)
        weights = rms(stacked, self.norm * self.proj, EPS).sum(-1).softmax(-1)
        return rms((weights[..., None] * stacked).sum(-2), self.out, EPS)


class TargetNet(nn.Module):
    """k3-nano, from random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.08)
        self.attn = nn.ModuleList(MLA() if layer in FULL_ATTENTION else KDA() for layer in range(LAYERS))
        self.ffn = nn.ModuleList(MLP(DENSE) if layer == 0 else MoE() for layer in range(LAYERS))
        self.mix_attn = nn.ModuleList(Mix() for _ in range(LAYERS))
        self.mix_ffn = nn.ModuleList(Mix() for _ in range(LAYERS))
        self.mix_out, self.head = Mix(), matrix(VOCAB, HIDDEN)

    def hidden(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """ids [B, T], T a multiple of 16 → [B, T, H] before lm_head, and the load of each routed layer."""
        prefix = F.embedding(ids, self.embed)
        bank: list[Tensor] = []
        loads: list[Tensor] = []
        for layer in range(LAYERS):
            x = self.mix_attn[layer]([*bank, prefix])
            opened = layer % RESIDUAL_BLOCK == 0
            if opened:
                bank = [*bank, prefix]
            change = self.attn[layer](x)
            prefix = change if opened else prefix + change
            out = self.ffn[layer](self.mix_ffn[layer]([*bank, prefix]))
            if layer:
                out, load = out
                loads.append(load)
            prefix = prefix + out
        return self.mix_out([*bank, prefix]), loads

    def losses(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Nats of each label [B, T], and the loads."""
        x, loads = self.hidden(ids)
        logits = linear(x, self.head).float().flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels), loads

    @torch.no_grad()
    def balance(self, loads: list[Tensor], rate: Tensor) -> None:
        """Move each router's bias towards equal load."""
        for layer, load in enumerate(loads, 1):
            bias = self.ffn[layer].get_buffer("bias")
            bias += rate * torch.sign(load.mean() - load)
            bias -= bias.mean()

    def compile_parts(self) -> None:
        """Fuse the element-wise work; the scan between the parts of KDA stays as it is."""
        for module in self.modules():
            if isinstance(module, KDA):
                module.before_scan = torch.compile(module.before_scan)  # type: ignore[method-assign]
                module.after_scan = torch.compile(module.after_scan)  # type: ignore[method-assign]
            elif isinstance(module, MLA | MoE | Mix):
                module.compile()
