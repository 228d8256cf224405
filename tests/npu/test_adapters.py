"""Adapters on the emulated device against the reference backend: same inputs, same pools, same results."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.ops.table import Activation, CacheSpec, Ops, StepMeta
from tests.npu.bench import EXTENDS, PAGE, RELAXED, emulated, fill, random_gate, reference, small_spec, steps

TIGHT: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}


def both() -> list[Ops]:
    """The backend under test and the oracle."""
    return [emulated(), reference()]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Pair:
    """The backend under test and the oracle, with pools of equal content."""

    def __init__(self, kda_extend: str = "fused", spec: CacheSpec | None = None, seed: int = 0) -> None:
        self.spec = spec or small_spec()
        self.backends: list[Ops] = [emulated(kda_extend), reference()]
        self.caches = [ops.new_cache(self.spec) for ops in self.backends]
        self.random = generator(seed)
        for layer in (*self.spec.kda_layers, *self.spec.mla_layers):
            oracle = self.caches[1].layer(layer)
            fill(oracle, self.random)
            own = self.caches[0].layer(layer)
            if layer in self.spec.kda_layers:
                own.state.copy_(oracle.state)
                own.conv.copy_(oracle.conv)
            else:
                own.latent.copy_(oracle.rows[..., : self.spec.kv_lora_rank])
                own.rope.copy_(oracle.rows[..., self.spec.kv_lora_rank :])

    def run(self, name: str, meta: StepMeta, mode: Any, *args: Any, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Both backends' result of an operation whose last arguments are cache and step."""
        results = []
        for ops, cache in zip(self.backends, self.caches, strict=True):
            step = ops.prepare(meta, mode, self.spec)
            before, after = args if name.startswith("mla") and name != "mla_write" else (args, ())
            results.append(getattr(ops, name)(*before, cache.layer(layer), step, *after))
        return results[0], results[1]

    def assert_equal_pools(self, **tolerance: Any) -> None:
        for layer in self.spec.kda_layers:
            own, oracle = (cache.layer(layer) for cache in self.caches)
            # Slot 0 is the dummy: the device's padding goes there.
            torch.testing.assert_close(own.state[1:], oracle.state[1:], **tolerance)
            torch.testing.assert_close(own.conv[1:], oracle.conv[1:], **tolerance)
        for layer in self.spec.mla_layers:
            own, oracle = (cache.layer(layer) for cache in self.caches)
            torch.testing.assert_close(torch.cat([own.latent, own.rope], dim=-1)[1:], oracle.rows[1:], **tolerance)


def live_rows(meta: StepMeta) -> Tensor:
    rows: list[int] = []
    for b, slot in enumerate(meta.host_slots):
        if slot >= 0:
            rows += range(meta.host_cu_seqlens[b], meta.host_cu_seqlens[b + 1])
    return torch.tensor(rows, dtype=torch.int64)


def kda_inputs(pair: Pair, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    spec = pair.spec
    return (
        torch.randn(num_rows, spec.conv_channels, generator=pair.random),
        torch.randn(num_rows, spec.kda_heads * spec.kda_key_dim, generator=pair.random) * 2,
        torch.randn(num_rows, spec.kda_heads, generator=pair.random),
    )


def ragged_batch(seed: int, longest: int) -> list[tuple[int, int, int]]:
    """(slot, start, rows) of 1 to 4 sequences, some of them padding, some empty, some of one row."""
    draw = random.Random(seed)
    count = draw.randint(1, 4)
    slots = draw.sample(range(1, 7), count)
    rows = []
    for slot in slots:
        length = draw.choice([0, 1, draw.randint(2, longest), draw.randint(2, longest), 64])
        rows.append((draw.choice([slot, slot, slot, -1]), draw.choice([0, 64]), length))
    if not any(length for _, _, length in rows):
        rows[0] = (slots[0], 0, 3)
    return rows


@pytest.mark.parametrize("part", range(4))
def test_extends_agree_on_ragged_batches(part: int):
    """200 random batches: fused, decomposed and the reference, outputs and all pools."""
    for seed in range(part * 50, part * 50 + 50):
        rows = ragged_batch(seed, longest=100 if seed % 10 == 0 else 40)
        meta = steps(rows, num_rows=-(-sum(length for _, _, length in rows) // 16) * 16)
        bound = None if seed % 3 == 0 else -5.0
        results = []
        for kda_extend in EXTENDS:
            pair = Pair(kda_extend, seed=seed)
            gate = random_gate(pair.spec, pair.random, lower_bound=bound)
            own, oracle = pair.run("kda_extend", meta, "extend", *kda_inputs(pair, meta.slot_mapping.shape[0]), gate)
            live = live_rows(meta)
            torch.testing.assert_close(own[live], oracle[live], **TIGHT)
            assert own.isfinite().all()
            pair.assert_equal_pools(**TIGHT)
            results.append(own)
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kda_extend", EXTENDS)
def test_extend_in_two_chunks_equals_one(kda_extend: str):
    whole, halves = Pair(kda_extend), Pair(kda_extend)
    gate = random_gate(whole.spec, generator(1))
    inputs = kda_inputs(whole, 100)
    both = whole.run("kda_extend", steps([(3, 0, 100)]), "extend", *inputs, gate)[0]
    parts = []
    for start, end in ((0, 64), (64, 100)):
        own = [x[start:end] for x in inputs]
        parts.append(halves.run("kda_extend", steps([(3, start, end - start)]), "extend", *own, gate)[0])
    torch.testing.assert_close(torch.cat(parts), both, **TIGHT)
    torch.testing.assert_close(halves.caches[0].layer(0).state[3], whole.caches[0].layer(0).state[3], **TIGHT)


def test_conv_extend():
    for seed in range(20):
        pair = Pair(seed=seed)
        meta = steps(ragged_batch(seed, longest=20), num_rows=272)
        u = kda_inputs(pair, 272)[0]
        weight = torch.randn(pair.spec.conv_channels, 4, generator=pair.random)
        own, oracle = pair.run("kda_conv_extend", meta, "extend", u, weight)
        live = live_rows(meta)
        torch.testing.assert_close(own[live], oracle[live], **TIGHT)
        assert own.isfinite().all()
        pair.assert_equal_pools(**TIGHT)


DECODE_ROWS = [[(1, 5, 1), (6, 0, 1), (-1, 0, 1)], [(-1, 0, 1), (6, 70, 1)], [(2, 3, 1)], [(-1, 0, 1), (-1, 0, 1)]]


@pytest.mark.parametrize("rows", DECODE_ROWS)
@pytest.mark.parametrize("bound", [-5.0, None])
def test_kda_decode(rows: list[tuple[int, int, int]], bound: float | None):
    pair = Pair()
    meta = steps(rows)
    weight = torch.randn(pair.spec.conv_channels, 4, generator=pair.random)
    u, f, b = kda_inputs(pair, len(rows))
    # As a model gives it: b is some columns of a wider product.
    b = torch.cat([b, b], dim=1)[:, : b.shape[1]]
    qkv, expected = pair.run("kda_conv_decode", meta, "decode", u, weight)
    live = live_rows(meta)
    torch.testing.assert_close(qkv[live], expected[live], **TIGHT)
    own, oracle = pair.run(
        "kda_decode", meta, "decode", qkv, f, b, random_gate(pair.spec, pair.random, lower_bound=bound)
    )
    torch.testing.assert_close(own[live], oracle[live], **TIGHT)
    assert own.isfinite().all()
    pair.assert_equal_pools(**TIGHT)


def mla_weights(pair: Pair, heads: int = 3, nope: int = 32, value: int = 16) -> tuple[Tensor, Tensor]:
    shape = (heads, nope, pair.spec.kv_lora_rank), (heads, value, pair.spec.kv_lora_rank)
    w_kc, w_vc = (torch.randn(size, generator=pair.random) * 0.2 for size in shape)
    return w_kc, w_vc


@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_mla_write(mode: str):
    rows = [(2, 20, 1), (-1, 0, 1), (5, 0, 1)] if mode == "decode" else [(2, 64, 5), (-1, 0, 3), (5, 0, 20)]
    pair = Pair()
    meta = steps(rows, num_rows=None if mode == "decode" else 32)
    x = torch.randn(meta.slot_mapping.shape[0], 48, generator=pair.random)
    pair.run("mla_write", meta, mode, x, layer=1)
    pair.assert_equal_pools(rtol=0, atol=0)


@pytest.mark.parametrize(
    "rows", [[(1, 0, 33)], [(1, 64, 7), (2, 0, 1), (3, 0, 0), (-1, 0, 4), (4, 128, 40)], [(-1, 0, 5)]]
)
def test_mla_extend(rows: list[tuple[int, int, int]]):
    pair = Pair()
    meta = steps(rows, num_rows=64)
    q = torch.randn(64, 3, 48, generator=pair.random)
    own, oracle = pair.run("mla_extend", meta, "extend", (q, *mla_weights(pair)), (0.3,), layer=1)
    live = live_rows(meta)
    torch.testing.assert_close(own[live], oracle[live], **TIGHT)
    assert own.isfinite().all()


@pytest.mark.parametrize("heads", [3, 4])
def test_mla_decode(heads: int):
    pair = Pair()
    meta = steps([(1, 70, 1), (-1, 0, 1), (2, 0, 1), (6, PAGE - 1, 1)])
    q = torch.randn(4, heads, 48, generator=pair.random)
    own, oracle = pair.run("mla_decode", meta, "decode", (q, *mla_weights(pair, heads)), (0.3,), layer=1)
    live = live_rows(meta)
    torch.testing.assert_close(own[live], oracle[live], **TIGHT)
    assert own.isfinite().all()


@pytest.mark.parametrize(("activation", "linear_beta"), [("situ", 25.0), ("situ", None), ("silu", None)])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_experts_and_glu(activation: Activation, linear_beta: float | None, rows: int):
    random_ = generator(3)
    width, inner, count = 24, 16, 5
    experts = [
        tuple(torch.randn(size, generator=random_) for size in ((inner, width), (inner, width), (width, inner)))
        for _ in range(count)
    ]
    x = torch.randn(rows, width, generator=random_)
    ids = (
        torch.stack([torch.randperm(count, generator=random_)[:3] for _ in range(rows)])
        if rows
        else torch.empty(0, 3, dtype=torch.int64)
    )
    weights = torch.rand(rows, 3, generator=random_)
    results = []
    for ops in both():
        packed = ops.pack_experts((e[0], e[1], e[2]) for e in experts)
        results.append(ops.experts(x, ids, weights, packed, activation, 4.0, linear_beta))
        results.append(ops.glu(x, activation, 4.0, linear_beta))
    torch.testing.assert_close(results[0], results[2], **TIGHT)
    torch.testing.assert_close(results[1], results[3], **TIGHT)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
def test_route(renormalize: bool, groups: int, top_groups: int):
    random_ = generator(4)
    x, weight, bias = (torch.randn(size, generator=random_) for size in ((7, 32), (16, 32), (16,)))
    results = [
        ops.route(
            x,
            ops.pack_linear(weight),
            bias,
            top_k=4,
            renormalize=renormalize,
            scale=2.5,
            num_groups=groups,
            top_groups=top_groups,
        )
        for ops in both()
    ]
    assert results[0][0].tolist() == results[1][0].tolist()
    torch.testing.assert_close(results[0][1], results[1][1], **TIGHT)


def test_row_wise_operations():
    random_ = generator(5)
    x, gate, weight = (torch.randn(size, generator=random_) for size in ((6, 32), (6, 32), (32,)))
    bank = [torch.randn(6, 32, generator=random_) for _ in range(3)]
    o = torch.randn(6, 4, 8, generator=random_)
    for rows in (6, 0):
        npu, oracle = (
            [
                ops.linear(x[:rows], ops.pack_linear(torch.stack([weight, -weight]))),
                ops.rms_norm(x[:rows], weight, 0.1),
                ops.mix_residual(x[:rows], [b[:rows] for b in bank], weight, 1e-5),
                ops.sigmoid_gate(x[:rows], gate[:rows]),
                ops.gated_norm(o[:rows], gate[:rows], weight[:8], 0.1),
                ops.embed(x, torch.tensor([5, 0, 5])),
                ops.log_softmax(x[:rows]),
            ]
            for ops in both()
        )
        for own, expected in zip(npu, oracle, strict=True):
            torch.testing.assert_close(own, expected, **TIGHT)


def test_rules_are_those_of_the_device_name():
    assert emulated().session.rules == RELAXED
