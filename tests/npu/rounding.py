"""The operation table in float64 with bfloat16 where Ascend has it: the oracle of contract mode.

Written from the formulas, a sequence and a head at a time, without the adapters, the emulator or the operations of the
reference backend. What is float32 between operators on the device is float32 here.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.reference_cache import KdaPool, MlaPool, ReferenceCache
from k3svc.ops.table import CacheSpec, KdaGate, Mode, StepMeta

BF16 = torch.bfloat16


def bf16(x: Tensor) -> Tensor:
    """Rounded, still float64."""
    return x.to(BF16).double()


class RoundingOps:
    """As much of `Ops` as a model calls. fused_norm: the latents of MLA rounded where the fused kernel rounds them."""

    name = "rounding"
    few = None
    chunk = 64
    device = torch.device("cpu")
    activation_dtype = BF16

    def __init__(self, *, fused_norm: bool = False) -> None:
        self.split_norm = self._split_norm if fused_norm else None
        # Of the last verify step, by the pool of a layer and slot: states of each head, and windows, after each row.
        self._snapshots: dict[tuple[int, int], list[list[Tensor]]] = {}
        self._windows: dict[tuple[int, int], list[Tensor]] = {}

    def pack_linear(self, weight: Tensor) -> Tensor:
        return weight.t().contiguous()

    def pack_experts(self, experts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, ...]]:
        return [tuple(w.double() for w in expert) for expert in experts]

    def prepare(self, meta: StepMeta, mode: Mode, spec: CacheSpec) -> StepMeta:
        return meta

    def run(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def when_done(self, call: Callable[[], None]) -> None:
        call()

    def expert_rows(self, meta: StepMeta, mode: Mode) -> int:
        return meta.num_live_rows

    def new_cache(self, spec: CacheSpec) -> ReferenceCache:
        return ReferenceCache(spec)

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return table[ids]

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return (x.double() @ weight.double()).to(BF16)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _norm(x, weight, eps).to(BF16)

    def mix_residual(self, prefix: Tensor, bank: Sequence[Tensor], score: Tensor, eps: float) -> Tensor:
        rows = [row.double() for row in (*bank, prefix)]
        scores = [(_norm(row, score, eps)).sum(-1, keepdim=True) for row in rows]
        weights = torch.cat(scores, dim=-1).softmax(-1)
        return sum(weights[:, n : n + 1] * row for n, row in enumerate(rows)).to(BF16)  # type: ignore[union-attr]

    def glu(self, gate_up: Tensor, activation: str, beta: float, linear_beta: float) -> Tensor:
        return _situ(gate_up.double(), beta, linear_beta).to(BF16)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * gate.float().sigmoid()).to(BF16)

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scale: float, **_: Any
    ) -> tuple[Tensor, Tensor]:
        scores = torch.mm(x.float(), weight).double().sigmoid()
        ids = (scores + bias.double()).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        chosen = scores.gather(1, ids)
        return ids, (chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale).float()

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, packed: list[tuple[Tensor, ...]], activation: str, beta: float,
        linear_beta: float,
    ) -> Tensor:  # fmt: skip
        out = torch.zeros(x.shape, dtype=torch.float64)
        for n, row in enumerate(x.double()):
            for expert, weight in zip(ids[n].tolist(), bf16(weights[n]).tolist(), strict=True):
                w1, w3, w2 = packed[expert]
                hidden = bf16(_situ(torch.cat([bf16(w1 @ row), bf16(w3 @ row)]), beta, linear_beta))
                out[n] += weight * bf16(w2 @ hidden)
        return out.to(BF16)

    def kda_conv_extend(self, u: Tensor, weight: Tensor, cache: KdaPool, step: StepMeta) -> Tensor:
        taps, out = bf16(weight).t(), torch.zeros(u.shape, dtype=torch.float64)
        for slot, start, rows in _sequences(step):
            window = cache.conv[slot].double() if start else torch.zeros(cache.conv[slot].shape, dtype=torch.float64)
            stream = torch.cat([window, u[rows].double()])
            for n, row in enumerate(rows):
                y = (stream[n : n + 4] * taps).sum(0)
                out[row] = y * y.sigmoid()
            cache.conv[slot] = stream[-3:].to(BF16)
        return out.to(BF16)

    kda_conv_decode = kda_conv_extend

    def kda_conv_verify(self, u: Tensor, weight: Tensor, cache: KdaPool, step: StepMeta) -> Tensor:
        before = cache.conv.clone()
        out = self.kda_conv_extend(u, weight, cache, step)
        for slot, _, rows in _sequences(step):
            stream = torch.cat([before[slot], u[rows]])
            self._windows[id(cache), slot] = [stream[n + 1 : n + 4] for n in range(len(rows))]
            cache.conv[slot] = self._windows[id(cache), slot][0]
        return out

    def kda_extend(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: StepMeta) -> Tensor:
        return self._kda(qkv, f, b, gate, cache, step, _extend_norm, is_activated=True)

    def kda_decode(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: StepMeta) -> Tensor:
        return self._kda(qkv, f, b, gate, cache, step, _decode_norm, is_activated=False)

    def kda_verify(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: StepMeta) -> Tensor:
        out = self._kda(qkv, f, b, gate, cache, step, _decode_norm, is_activated=True)
        for slot, _, _ in _sequences(step):
            cache.state[slot] = torch.stack([states[0] for states in self._snapshots[id(cache), slot]])
        return out

    def commit(self, cache: ReferenceCache, step: StepMeta, accepted: Sequence[int]) -> None:
        numbers = dict(zip(step.host_slots, accepted, strict=True))
        for layer in cache.spec.kda_layers:
            pool = cache.layer(layer)
            assert isinstance(pool, KdaPool)
            for slot in (slot for slot in numbers if slot >= 0):
                heads = [states[numbers[slot]] for states in self._snapshots[id(pool), slot]]
                pool.state[slot] = torch.stack(heads)
                pool.conv[slot] = self._windows[id(pool), slot][numbers[slot]]

    def _kda(
        self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: StepMeta, norm: Any, *,
        is_activated: bool,
    ) -> Tensor:  # fmt: skip
        _, heads, values, width = cache.state.shape
        bound = gate.lower_bound
        assert bound is not None
        self._snapshots = {key: rows for key, rows in self._snapshots.items() if key[0] != id(cache)}
        out = torch.zeros(qkv.shape[0], heads, values)
        for slot, start, rows in _sequences(step):
            for head in range(heads):
                state = cache.state[slot, head].double() if start else torch.zeros(values, width, dtype=torch.float64)
                snapshots: list[Tensor] = []
                for row in rows:
                    q, k, v = torch.split(qkv[row].double(), [heads * width, heads * width, heads * values])
                    q, k = (norm(x[head * width : (head + 1) * width]) for x in (q, k))
                    x = f[row, head * width : (head + 1) * width].double() + gate.dt_bias[head].double()
                    decay = bound * torch.sigmoid(gate.a[head].log().double().exp() * x)
                    # The operators of extend and verify read decay and beta in float32.
                    decay = decay.float().double() if is_activated else decay
                    beta = b[row, head].float().sigmoid().double() if is_activated else b[row, head].double().sigmoid()
                    state = state * decay.exp()
                    state = state + torch.outer(beta * (v[head * values : (head + 1) * values] - state @ k), k)
                    out[row, head] = (state @ q * width**-0.5).to(BF16).float()
                    snapshots.append(state.float())
                self._snapshots.setdefault((id(cache), slot), []).append(snapshots)
                cache.state[slot, head] = state.float()
        return out

    def gated_norm(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (_norm(o, weight, eps).float().flatten(1) * z.float().sigmoid()).to(BF16)

    def _split_norm(
        self, kv: Tensor, q: Tensor, kv_weight: Tensor, q_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rank = kv_weight.shape[0]
        one = torch.ones((), dtype=BF16)
        parts = [(kv[:, :rank], kv_weight), (q, q_weight)]
        latent, normed = ((bf16(_norm(x, one, eps)) * weight.double()).to(BF16) for x, weight in parts)
        return torch.cat([latent, kv[:, rank:]], dim=1), normed

    def mla_write(self, rows: Tensor, cache: MlaPool, step: StepMeta) -> None:
        for row, place in enumerate(step.slot_mapping.tolist()):
            if place >= 0:
                cache.rows.view(-1, rows.shape[1])[place] = rows[row]

    def mla_extend(self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: StepMeta, scale: float) -> Tensor:
        heads, _, rank = w_kc.shape
        out = torch.zeros(q.shape[0], heads, w_vc.shape[1], dtype=torch.float64)
        for index, (_, start, rows) in zip(_live(step), _sequences(step), strict=True):
            cached = _cached(cache, step, index, start + len(rows))
            for head in range(heads):
                keys = torch.cat([bf16(cached[:, :rank] @ w_kc[head].double().t()), cached[:, rank:]], dim=1)
                values = bf16(cached[:, :rank] @ w_vc[head].double().t())
                for n, row in enumerate(rows):
                    seen = start + n + 1
                    weights = (scale * keys[:seen] @ q[row, head].double()).softmax(0)
                    out[row, head] = weights @ values[:seen]
        return out.to(BF16).flatten(1)

    def mla_decode(self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: StepMeta, scale: float) -> Tensor:
        heads, nope, rank = w_kc.shape
        out = torch.zeros(q.shape[0], heads, w_vc.shape[1], dtype=torch.float64)
        for index, (_, start, rows) in zip(_live(step), _sequences(step), strict=True):
            for n, row in enumerate(rows):
                cached = _cached(cache, step, index, start + n + 1)
                for head in range(heads):
                    query = torch.cat(
                        [bf16(q[row, head, :nope].double() @ w_kc[head].double()), q[row, head, nope:].double()]
                    )
                    mixed = bf16((scale * cached @ query).softmax(0) @ cached[:, :rank])
                    out[row, head] = w_vc[head].double() @ mixed
        return out.to(BF16).flatten(1)

    mla_verify = mla_decode


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _situ(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return beta * (gate / beta).tanh() / (1 + (-gate).exp()) * linear_beta * (up / linear_beta).tanh()


def _extend_norm(x: Tensor) -> Tensor:
    return bf16(x / (x.square().sum() + 1e-6).sqrt())


def _decode_norm(x: Tensor) -> Tensor:
    return x / (x.square().sum().sqrt() + 1e-6)


def _live(step: StepMeta) -> list[int]:
    return [index for index, slot in enumerate(step.host_slots) if slot >= 0]


def _sequences(step: StepMeta) -> list[tuple[int, int, list[int]]]:
    """(slot, start, packed rows) of the live sequences."""
    spans = [list(range(a, b)) for a, b in pairwise(step.host_cu_seqlens)]
    return [(step.host_slots[index], step.host_starts[index], spans[index]) for index in _live(step)]


def _cached(cache: MlaPool, step: StepMeta, index: int, count: int) -> Tensor:
    """float64 [count, C], rows of a sequence from its first position."""
    pages = step.block_tables[index].tolist()
    places = [pages[n // step.page_size] * step.page_size + n % step.page_size for n in range(count)]
    return cache.rows.view(-1, cache.rows.shape[-1])[places].double()
