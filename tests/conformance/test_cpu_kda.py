"""KDA of the cpu backend: against the reference, prompts against repeated decode, and what a step must leave alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.table import Cache, CacheSpec, KdaGate, Mode, Ops, StepMeta
from tests.conformance.cpu_cases import (
    cache_spec,
    meta_of,
    needs_compiler,
    poisoned_memory,
    pool_of,
    rand,
    reference,
    sequences,
)
from tests.oracles.loop import poison_cache

pytestmark = needs_compiler

SHAPES = settings(max_examples=25)


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(scope="module")
def cpu() -> Cpu:
    return Cpu()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Parameters and inputs of rows of one layer."""

    spec: CacheSpec
    gate: KdaGate
    conv: Tensor
    u: Tensor
    f: Tensor
    b: Tensor

    def run(self, ops: Ops, cache: Cache, mode: Mode, meta: StepMeta, rows: slice) -> Tensor:
        """Convolution and recurrence of these rows; [n, HV, V]."""
        step = ops.prepare(meta, mode, self.spec)
        pool = pool_of(cache, 0)
        conv, kda = (ops.kda_conv_extend, ops.kda_extend) if mode == "extend" else (ops.kda_conv_decode, ops.kda_decode)
        # Inputs as the model hands them over: columns of one wide projection.
        wide = torch.cat([self.u[rows], self.b[rows]], dim=1)
        channels = self.u.shape[1]
        qkv = conv(wide[:, :channels], self.conv, pool, step)
        return kda(qkv, self.f[rows], wide[:, channels:], self.gate, pool, step)


def layer(rows: int, *, heads: int, key: int, value: int, width: int, bound: float | None, pace: float = 1.0) -> Layer:
    source = torch.Generator().manual_seed(rows * 31 + key)
    spec = cache_spec(kda_heads=heads, kda_key_dim=key, kda_value_dim=value, conv_width=width)
    gate = KdaGate(a=rand(source, heads).exp() * pace, dt_bias=rand(source, heads, key), lower_bound=bound)
    return Layer(
        spec=spec,
        gate=gate,
        conv=rand(source, spec.conv_channels, width),
        u=rand(source, rows, spec.conv_channels),
        f=rand(source, rows, heads * key),
        b=rand(source, rows, heads),
    )


def states(cache: Cache, slots: list[int]) -> list[Tensor]:
    pool = pool_of(cache, 0)
    return [pool.state[slots], pool.conv[slots]]


def random_states(cache: Cache, slots: list[int]) -> None:
    source = torch.Generator().manual_seed(7)
    for pool in states(cache, list(range(cache.spec.num_slots + 1))):
        assert pool.isnan().all()
    layer_pool = pool_of(cache, 0)
    for tensor in (layer_pool.state, layer_pool.conv):
        tensor[slots] = rand(source, len(slots), *tensor.shape[1:])


GEOMETRY = {
    "heads": st.integers(1, 3),
    "key": st.integers(1, 70),
    "value": st.integers(1, 70),
    "width": st.integers(2, 5),
    "bound": st.sampled_from([None, -5.0]),
}


@SHAPES
@given(**GEOMETRY, batch=st.integers(1, 5), padding=st.integers(0, 3))
def test_decode(cpu: Cpu, batch: int, padding: int, **geometry: object):
    given_layer = layer(batch + padding, **geometry)  # type: ignore[arg-type]
    rows = sequences([1] * batch, [3] * batch)
    slots = [row.slot for row in rows]
    outputs = []
    for ops in (cpu, reference()):
        cache = ops.new_cache(given_layer.spec)
        poison_cache(cache)
        random_states(cache, slots)
        out = given_layer.run(ops, cache, "decode", meta_of(rows, [1] * batch, padding), slice(None))
        assert out.isfinite().all()
        outputs.append([out[:batch], *states(cache, slots)])
        assert pool_of(cache, 0).state[[0, batch + 1]].isnan().all()
    for actual, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@SHAPES
@given(**GEOMETRY, lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3), data=st.data())
def test_extend(cpu: Cpu, lengths: list[int], data: st.DataObject, **geometry: object):
    cached = [data.draw(st.sampled_from([0, 64])) for _ in lengths]
    given_layer = layer(sum(lengths) + 2, **geometry)  # type: ignore[arg-type]
    rows = sequences(lengths, cached)
    slots = [row.slot for row in rows]
    outputs = []
    for ops in (cpu, reference()):
        cache = ops.new_cache(given_layer.spec)
        poison_cache(cache)
        random_states(cache, [row.slot for row in rows if row.length])
        out = given_layer.run(ops, cache, "extend", meta_of(rows, lengths, 2), slice(None))
        assert out.isfinite().all()
        outputs.append([out[:-2], *states(cache, slots)])
    for actual, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize(("key", "value"), [(64, 64), (24, 40), (17, 70), (128, 16)])
def test_prompt_leaves_the_bits_of_repeated_decode(cpu: Cpu, key: int, value: int, bound: float | None):
    given_layer = layer(150, heads=2, key=key, value=value, width=4, bound=bound)
    results = []
    for pieces in ([150], [64, 86], [64, 64, 22], [1] * 150):
        (row,) = sequences([150], [0])
        cache = cpu.new_cache(given_layer.spec)
        poison_cache(cache)
        if pieces[0] == 1:
            cache.clear_slot(row.slot)
        parts = []
        for piece in pieces:
            mode: Mode = "decode" if piece == 1 else "extend"
            rows = slice(row.length, row.length + piece)
            parts.append(given_layer.run(cpu, cache, mode, meta_of([row], [piece]), rows))
            row.length += piece
        results.append([torch.cat(parts), *states(cache, [row.slot])])
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert torch.equal(actual, expected)


def test_decode_row_has_the_same_bits_in_any_batch(cpu: Cpu):
    given_layer = layer(64, heads=2, key=24, value=40, width=4, bound=-5.0)
    alone: list[Tensor] = []
    for count in (0, *range(1, 65)):
        rows = sequences([1] * 64, [5] * 64)
        cache = cpu.new_cache(given_layer.spec)
        poison_cache(cache)
        random_states(cache, [row.slot for row in rows])
        if count == 0:
            alone = [
                given_layer.run(cpu, cache, "decode", meta_of([row], [1]), slice(index, index + 1))
                for index, row in enumerate(rows)
            ]
            continue
        together = given_layer.run(cpu, cache, "decode", meta_of(rows[:count], [1] * count), slice(count))
        assert torch.equal(together, torch.cat(alone[:count])), count


@pytest.mark.parametrize("pace", [1e-4, 200.0])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_slow_and_fast_decay_with_keys_alike(cpu: Cpu, bound: float | None, pace: float):
    given_layer = layer(256, heads=2, key=32, value=48, width=2, bound=bound, pace=pace)
    channels = 2 * 32
    source = torch.Generator().manual_seed(3)
    given_layer.u[:, channels : 2 * channels] = rand(source, 1, channels) + rand(source, 256, channels, scale=0.1)
    (row,) = sequences([256], [0])
    cache = cpu.new_cache(given_layer.spec)
    out = given_layer.run(cpu, cache, "extend", meta_of([row], [256]), slice(None))
    exact = exact_recurrence(given_layer)
    scale = float(exact.abs().max())
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5 * scale)


def exact_recurrence(given_layer: Layer) -> Tensor:
    """model.md 2.3 in float64, one token after the other; [N, HV, V]."""
    spec, gate = given_layer.spec, given_layer.gate
    heads, key, value, width = spec.kda_heads, spec.kda_key_dim, spec.kda_value_dim, spec.conv_width
    u = torch.cat([torch.zeros(width - 1, given_layer.u.shape[1]), given_layer.u]).double()
    y = sum(u[j : j + len(given_layer.u)] * given_layer.conv[:, j].double() for j in range(width))
    assert isinstance(y, Tensor)
    q, k, v = torch.split(y * torch.sigmoid(y), [heads * key, heads * key, heads * value], dim=1)
    q, k, v = q.view(-1, heads, key), k.view(-1, heads, key), v.view(-1, heads, value)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * key**-0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    x = given_layer.f.double().view(-1, heads, key) + gate.dt_bias.double()
    a = gate.a.double()[:, None]
    if gate.lower_bound is None:
        g = -a * torch.nn.functional.softplus(x)
    else:
        g = gate.lower_bound * torch.sigmoid(a * x)
    beta = torch.sigmoid(given_layer.b.double())
    state = torch.zeros(heads, value, key, dtype=torch.float64)
    out = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None]
        r = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + r[:, :, None] * k[t][:, None]
        out.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(out)
