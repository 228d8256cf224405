"""Kernels of the cuda backend with gates, inputs and sizes at the ends of what they may be."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k3svc.ops.reference import Reference
from k3svc.ops.table import Mode, Ops, StepMeta
from tests.conformance.cpu_cases import expert, meta_of, pool_of, rand, sequences
from tests.conformance.cuda_cases import DEVICE, KdaLayer, close, cuda_ops, on_device

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


@pytest.mark.parametrize("is_fast", [False, True], ids=["invariant", "fast"])
@pytest.mark.parametrize("bound", [-5.0, -5.4, -6.0, -20.0, -100.0])
def test_prompts_of_gates_with_any_bound(bound: float, *, is_fast: bool):
    layer = KdaLayer(70, heads=2, key=32, value=32, bound=bound, dtype=torch.bfloat16)
    layer.f *= 5
    check_extend(layer, cuda_ops(torch.bfloat16, is_fast=is_fast))


@pytest.mark.parametrize("far", [100.0, 1e4, 1e6])
def test_prompts_whose_state_is_forgotten_twice(far: float):
    """What comes after is small; where a decay as large as it is were kept, it would have no digits."""
    layer = KdaLayer(64, heads=2, key=32, value=32, bound=None, dtype=torch.bfloat16)
    layer.f -= 3
    layer.f[[5, 40]] = far
    layer.gate.a.fill_(16.0)
    check_extend(layer, cuda_ops(torch.bfloat16))


def check_extend(layer: KdaLayer, ops: Ops) -> None:
    """One prompt of all rows against the reference in float32."""
    count = layer.u.shape[0]
    results = []
    for own in (ops, Reference(torch.float32, threads=1)):
        if own.name == "reference":
            layer.u, layer.f, layer.b = layer.u.float(), layer.f.float(), layer.b.float()
        cache = layer.new_cache(own)
        out, _ = layer.run(own, cache, "extend", meta_of(sequences([count], [0]), [count]))
        results.append((out, pool_of(cache, 0).state[1]))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, 2e-2)


@needs_gpu
@pytest.mark.parametrize(("key", "bound"), [(128, -5.0), (128, None), (96, -5.0), (64, None)])
def test_many_heads_keep_the_bits_of_decode_and_prompts(key: int, bound: float | None):
    """A sum that two compilations round differently shows in a few of a hundred thousand outputs."""
    lengths, accepted = [4, 8, 1, 6], [3, 7, 0, 2]
    layer = KdaLayer(sum(lengths), heads=96, key=key, value=key, bound=bound, dtype=torch.float32)
    ops = cuda_ops()
    rows = sequences(lengths, [64] * 4)
    cache = layer.new_cache(ops)
    out, step = layer.run(ops, cache, "verify", meta_of(rows, lengths))
    ops.commit(cache, step, accepted)
    expected = layer.new_cache(ops)
    first = 0
    for sequence, length, count in zip(rows, lengths, accepted, strict=True):
        prompt = layer.new_cache(ops)
        whole, _ = layer.run(ops, prompt, "extend", meta_of([sequence], [length]), slice(first, first + length))
        for index in range(count + 1):
            own = slice(first + index, first + index + 1)
            row, _ = layer.run(ops, expected, "decode", meta_of([sequence], [1]), own)
            assert torch.equal(row[0], out[first + index])
            assert torch.equal(row[0], whole[index])
        first += length
    assert torch.equal(cache.layer(0).state, expected.layer(0).state)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_drafts_has_the_bits_of_decode(dtype: torch.dtype):
    lengths = [8, 3, 1, 5]
    layer = KdaLayer(1, heads=2, key=16, value=16, bound=None, dtype=dtype)
    source = torch.Generator().manual_seed(1)
    heads, nope, rank, rope = 33, 64, 24, 8
    q = rand(source, sum(lengths), heads, nope + rope).to(DEVICE, dtype)
    w_kc, w_vc = rand(source, heads, nope, rank).to(DEVICE, dtype), rand(source, heads, 64, rank).to(DEVICE, dtype)
    own_rows = rand(source, sum(lengths), rank + rope).to(DEVICE, dtype)
    rows = sequences(lengths, [60, 300, 0, 127])
    ops = cuda_ops(dtype)
    cache = ops.new_cache(layer.spec)
    pool = pool_of(cache, 1).rows
    pool.copy_(rand(source, *pool.shape))

    def attend(mode: Mode, meta: StepMeta, own: slice) -> Tensor:
        step = ops.prepare(on_device(meta), mode, layer.spec)
        ops.mla_write(own_rows[own], cache.layer(1), step)
        result: Tensor = getattr(ops, f"mla_{mode}")(q[own], w_kc, w_vc, cache.layer(1), step, 0.2)
        return result

    out = attend("verify", meta_of(rows, lengths), slice(None))
    first = 0
    for sequence, length in zip(rows, lengths, strict=True):
        for index in range(first, first + length):
            assert torch.equal(attend("decode", meta_of([sequence], [1]), slice(index, index + 1))[0], out[index])
            sequence.length += 1
        first += length


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.2, 0.3, 3.0, 100.0])
def test_gated_units_of_small_numbers_keep_their_digits(size: float):
    source = torch.Generator().manual_seed(1)
    x = size * rand(source, 4, 200)
    gate, up = x.double().chunk(2, dim=1)
    plain = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate)
    ops = cuda_ops()
    close(ops.glu(x.to(DEVICE), "situ", 4.0, 25.0), plain * 25 * torch.tanh(up / 25), 1e-6)
    w1, w3, w2 = (part.to(DEVICE) for part in expert(source, 24, 40))
    rows = (size * rand(source, 3, 40)).to(DEVICE)
    ids, shares = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE), torch.ones(3, 1, device=DEVICE)
    out = ops.experts(rows, ids, shares, ops.pack_experts([(w1, w3, w2)]), "situ", 4.0, 25.0)
    gate, up = rows.double() @ w1.double().T, rows.double() @ w3.double().T
    hidden = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    close(out, hidden @ w2.double().T, 2e-6)


@needs_gpu
@pytest.mark.parametrize("name", ["mix_residual", "experts", "linear", "linear in float32"])
def test_steps_of_very_many_rows(name: str):
    """More than 2^31 numbers, or more than 65535 programs along an axis; the last rows are those of a small step."""
    source = torch.Generator(DEVICE).manual_seed(1)

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=source, device=DEVICE, dtype=dtype)

    exact, ops = cuda_ops(), cuda_ops(torch.bfloat16)
    run: Callable[[slice], Tensor]
    if name == "mix_residual":
        bank, score = [new(48_000, 7168) for _ in range(8)], new(7168, dtype=torch.float32)

        def run(own: slice) -> Tensor:
            return ops.mix_residual(bank[0][own], [part[own] for part in bank], score, 1e-5)

    elif name == "experts":
        packed = ops.pack_experts([(new(32, 64), new(32, 64), new(64, 32)) for _ in range(16)])
        x, shares = new(70_000, 64), new(70_000, 16, dtype=torch.float32)
        ids = torch.rand(70_000, 16, generator=source, device=DEVICE).argsort(1)

        def run(own: slice) -> Tensor:
            return ops.experts(x[own], ids[own], shares[own], packed, "silu", 0.0, None)

    else:
        own_ops, dtype = (ops, torch.bfloat16) if name == "linear" else (exact, torch.float32)
        rows, weight = new(2_200_000, 64, dtype=dtype), new(16, 64, dtype=dtype)

        def run(own: slice) -> Tensor:
            return own_ops.linear(rows[own], weight)

    assert torch.equal(run(slice(None))[-3:], run(slice(-3, None)))
