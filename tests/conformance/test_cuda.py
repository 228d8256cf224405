"""The kernels of the cuda backend against the reference backend: on a GPU where there is one, else interpreted."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from k3svc.ops.reference import Reference
from k3svc.ops.table import Mode, Ops, SampleRows
from k3svc.ops.upload import to_device
from tests.conformance.cpu_cases import expert, fill_rows, meta_of, poisoned_memory, rand, sequences
from tests.conformance.cuda_cases import DEVICE, KdaLayer, close, cuda_ops, on_device
from tests.conformance.sampling_cases import rows_at, sample_rows
from tests.oracles.loop import Tracked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Infinities, and what is masked after them, are meant; numpy, which interprets, warns of them.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]

DTYPES = [torch.float32, torch.bfloat16]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def reference(dtype: torch.dtype = torch.float32) -> Ops:
    return Reference(dtype, threads=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(dtype: torch.dtype):
    source = torch.Generator().manual_seed(1)
    x = rand(source, 5, 80).to(dtype)
    gate = rand(source, 5, 90).to(dtype)[:, :80]
    weight, score = rand(source, 80).to(dtype), rand(source, 80)
    o = rand(source, 5, 2, 40)
    matrix = rand(source, 72, 80).to(dtype)
    results = []
    for ops in (cuda_ops(dtype), reference(dtype)):
        to = ops.device
        results.append(
            [
                ops.linear(x.to(to), ops.pack_linear(matrix)),
                ops.linear(x.to(to)[:, :40], ops.pack_linear(matrix[:, :40])),
                ops.rms_norm(gate.to(to), weight.to(to), 1e-5),
                ops.mix_residual(x.to(to), [2 * x.to(to) - 1, gate.to(to)], score.to(to), 1e-5),
                ops.glu(x.to(to), "situ", 4.0, 25.0),
                ops.glu(x.to(to), "situ", 4.0, None),
                ops.glu(3 * x.to(to), "silu", 4.0, None),
                ops.sigmoid_gate(x.to(to), gate.to(to)),
                ops.gated_norm(o.to(to), gate.to(to), score[:40].to(to), 1e-5),
            ]
        )
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, BOUND[dtype])


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (3, 2)])
def test_router(groups: int, top_groups: int):
    source = torch.Generator().manual_seed(2)
    x, weight, bias = rand(source, 7, 40), rand(source, 12, 40), rand(source, 12)
    results = []
    for ops in (cuda_ops(), reference()):
        ids, weights = ops.route(
            x.to(ops.device),
            ops.pack_linear(weight),
            bias.to(ops.device),
            top_k=4,
            renormalize=True,
            scale=2.5,
            num_groups=groups,
            top_groups=top_groups,
        )
        results.append((ids.cpu(), weights))
    assert torch.equal(results[0][0], results[1][0])
    close(results[0][1], results[1][1], 1e-5)


@pytest.mark.parametrize("num_rows", [3, 150])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_alone_and_sorted(dtype: torch.dtype, num_rows: int):
    """150 rows of 4 experts are more pairs than are tiles by themselves."""
    source = torch.Generator().manual_seed(3)
    weights = [tuple(part.to(dtype) for part in expert(source, 24, 40)) for _ in range(6)]
    x = rand(source, num_rows, 40).to(dtype)
    ids = torch.stack([torch.randperm(6, generator=source)[:4] for _ in range(num_rows)])
    shares = rand(source, num_rows, 4).abs()
    results = []
    for ops in (cuda_ops(dtype), reference(dtype)):
        to = ops.device
        packed = ops.pack_experts(iter(weights))  # type: ignore[arg-type]
        results.append(ops.experts(x.to(to), ids.to(to), shares.to(to), packed, "situ", 4.0, 25.0))
    close(results[0], results[1], BOUND[dtype])
    if num_rows > 3:
        ops = cuda_ops(dtype)
        packed = ops.pack_experts(iter(weights))  # type: ignore[arg-type]
        few = ops.experts(x[:3].to(DEVICE), ids[:3].to(DEVICE), shares[:3].to(DEVICE), packed, "situ", 4.0, 25.0)
        assert torch.equal(few, results[0][:3])


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kda_decode(dtype: torch.dtype, bound: float | None):
    layer = KdaLayer(5, heads=2, key=24, value=40, bound=bound, dtype=dtype)
    rows = sequences([1] * 3, [7] * 3)
    results = []
    for ops in (cuda_ops(dtype), reference(dtype)):
        cache = layer.new_cache(ops)
        out, _ = layer.run(ops, cache, "decode", meta_of(rows, [1] * 3, 2) if ops.name != "cuda" else padded(rows, 2))
        assert out.isfinite().all()
        results.append((out[:3], cache.layer(0).state, cache.layer(0).conv))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, BOUND[dtype])


def padded(rows: list[Tracked], count: int):
    """A decode step with `count` sequences of padding, as the runner makes them."""
    return meta_of([*rows, *[Tracked(slot=-1, pages=[])] * count], [1] * (len(rows) + count))


@pytest.mark.parametrize("is_fast", [False, True], ids=["invariant", "fast"])
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize(("dtype", "key", "value"), [(torch.float32, 24, 40), (torch.bfloat16, 32, 64)], ids=str)
def test_kda_extend(dtype: torch.dtype, key: int, value: int, bound: float | None, is_fast: bool):
    if is_fast and dtype == torch.float32:
        pytest.skip("one path for both")
    lengths, cached = [37, 1, 64, 50], [0, 64, 128, 0]
    layer = KdaLayer(sum(lengths) + 2, heads=2, key=key, value=value, bound=bound, dtype=dtype)
    rows = sequences(lengths, cached)
    results = []
    ops = cuda_ops(dtype, is_fast=is_fast)
    if is_fast:
        ops._tuning = shorter(ops._tuning)  # type: ignore[attr-defined]
    for own in (ops, reference(torch.float32)):
        if own.name == "reference":
            layer.u, layer.f, layer.b = layer.u.float(), layer.f.float(), layer.b.float()
        cache = layer.new_cache(own)
        out, _ = layer.run(own, cache, "extend", meta_of(rows, lengths, 2))
        assert out.isfinite().all()
        results.append((out[:-2], cache.layer(0).state, cache.layer(0).conv))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, BOUND[dtype])


def shorter(tuning: Any) -> Any:
    """Every prompt in segments of two chunks."""
    return replace(tuning, segment_chunks=2, few_programs=10**6)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("pace", [1e-4, 200.0])
def test_extend_of_slow_and_fast_decay_with_keys_alike(bound: float | None, pace: float):
    layer = KdaLayer(96, heads=2, key=32, value=32, bound=bound, dtype=torch.bfloat16)
    source = torch.Generator().manual_seed(3)
    layer.u[:, 64:128] = (rand(source, 1, 64) + rand(source, 96, 64, scale=0.1)).bfloat16()
    layer.gate.a.fill_(pace)
    rows = sequences([96], [0])
    results = []
    for own in (cuda_ops(torch.bfloat16), reference(torch.float32)):
        if own.name == "reference":
            layer.u, layer.f, layer.b = layer.u.float(), layer.f.float(), layer.b.float()
        cache = layer.new_cache(own)
        out, _ = layer.run(own, cache, "extend", meta_of(rows, [96]))
        results.append((out, cache.layer(0).state[1]))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, 3e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_and_commit_leave_the_bits_of_decode(dtype: torch.dtype):
    lengths, accepted = [4, 1, 3], [2, 0, 2]
    layer = KdaLayer(sum(lengths) + 1, heads=2, key=24, value=40, bound=-5.0, dtype=dtype)
    ops = cuda_ops(dtype)
    rows = sequences(lengths, [5, 6, 7])
    cache = layer.new_cache(ops)
    out, step = layer.run(ops, cache, "verify", meta_of(rows, lengths, 1))
    assert out.isfinite().all()
    ops.commit(cache, step, accepted)
    expected = layer.new_cache(ops)
    first = 0
    for sequence, length, count in zip(rows, lengths, accepted, strict=True):
        for index in range(count + 1):
            meta = meta_of([sequence], [1])
            row, _ = layer.run(ops, expected, "decode", meta, slice(first + index, first + index + 1))
            sequence.length += 1
            assert torch.equal(row[0], out[first + index])
        first += length
    assert torch.equal(cache.layer(0).state, expected.layer(0).state)
    assert torch.equal(cache.layer(0).conv, expected.layer(0).conv)


@pytest.mark.parametrize("mode", ["extend", "decode", "verify"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mla(dtype: torch.dtype, mode: Mode):
    """Over pages of NaN but for the rows of the sequences."""
    lengths = [1, 1, 1] if mode == "decode" else [70, 1, 33] if mode == "extend" else [3, 1, 2]
    cached = [64, 0, 192] if mode == "extend" else [150, 3, 63]
    layer = KdaLayer(1, heads=2, key=16, value=16, bound=None, dtype=dtype)
    rows = sequences(lengths, cached)
    source = torch.Generator().manual_seed(4)
    count = sum(lengths)
    heads, nope, value, rank, rope = 3, 12, 20, 24, 8
    q = rand(source, count, heads, nope + rope).to(dtype)
    w_kc, w_vc = rand(source, heads, nope, rank).to(dtype), rand(source, heads, value, rank).to(dtype)
    own_rows = rand(source, count, rank + rope).to(dtype)
    results = []
    for ops in (cuda_ops(dtype), reference(torch.float32)):
        to, kind = ops.device, ops.activation_dtype
        cache = ops.new_cache(layer.spec)
        cache.layer(1).rows.fill_(torch.nan)
        fill_rows(cache, 1, rows, torch.Generator().manual_seed(5))
        meta = meta_of(rows, lengths)
        step = ops.prepare(on_device(meta) if ops.name == "cuda" else meta, mode, layer.spec)
        ops.mla_write(own_rows.to(to, kind), cache.layer(1), step)
        arguments = [part.to(to, kind) for part in (q, w_kc, w_vc)]
        attend = getattr(ops, f"mla_{mode}")
        results.append(attend(*arguments, cache.layer(1), step, 0.2))
    close(results[0], results[1], BOUND[dtype])


def test_prompt_rows_have_the_bits_of_decode_in_float32():
    layer = KdaLayer(40, heads=2, key=24, value=40, bound=-5.0, dtype=torch.float32)
    ops = cuda_ops()
    (row,) = sequences([40], [0])
    whole = layer.new_cache(ops)
    out, _ = layer.run(ops, whole, "extend", meta_of([row], [40]))
    single = layer.new_cache(ops)
    single.clear_slot(row.slot)
    for index in range(40):
        part, _ = layer.run(ops, single, "decode", meta_of([row], [1]), slice(index, index + 1))
        assert torch.equal(part[0], out[index]), index
        row.length += 1
    assert torch.equal(whole.layer(0).state[row.slot], single.layer(0).state[row.slot])


@pytest.mark.parametrize("width", [3000, 13000], ids=["one part", "parts"])
@pytest.mark.parametrize("has_filters", [False, True])
def test_sampling(width: int, *, has_filters: bool):
    generator = random.Random(5)
    source = torch.Generator().manual_seed(6)
    count = 24
    logits = 2 * rand(source, count, width)
    logits[3, 7] = logits[3, 9] = logits[3, -5] = logits[3].max() + 1
    logits[7] = -torch.inf
    logits[7, width - 1] = 0.0
    temperature = [0.0 if index < 6 else 0.7 for index in range(count)]
    is_filtered = tuple(has_filters and index % 5 == 4 for index in range(count))

    def rows(device: torch.device) -> SampleRows:
        return SampleRows(
            temperature=torch.tensor(temperature, device=device),
            top_k=torch.tensor([40 if cut else 0 for cut in is_filtered], device=device),
            top_p=torch.tensor([0.9 if cut else 1.0 for cut in is_filtered], device=device),
            min_p=torch.zeros(count, device=device),
            seed=torch.tensor(seeds, device=device),
            sample_index=torch.arange(count, device=device) % 3,
            position=torch.arange(count, device=device) * 7,
            host_greedy=tuple(heat == 0.0 for heat in temperature),
            host_filters=tuple((40, torch.tensor(0.9).item(), 0.0) if cut else (0, 1.0, 0.0) for cut in is_filtered),
        )

    seeds = [generator.randrange(-(2**63), 2**63) for _ in range(count)]
    chosen = cuda_ops().sample(logits.to(DEVICE), rows(DEVICE)).cpu()
    assert torch.equal(chosen, reference().sample(logits, rows(torch.device("cpu"))))
    assert chosen[3] == 7 and chosen[7] == width - 1
    broken = cuda_ops().sample(torch.full_like(logits, torch.nan).to(DEVICE), rows(DEVICE))
    assert ((broken >= 0) & (broken < width)).all()


def sent(rows: SampleRows) -> SampleRows:
    """The same on the device."""
    columns: dict[str, Any] = {name: value for name, value in vars(rows).items() if isinstance(value, Tensor)}
    return replace(rows, **{name: column.to(DEVICE) for name, column in columns.items()})


@pytest.mark.parametrize("width", [300, 2500])
def test_filters(width: int):
    """Every second row has many equal logits, every third bans a quarter of the ids."""
    count = 18
    logits = 2 * rand(torch.Generator().manual_seed(width), count, width)
    logits[::2] = logits[::2].round()
    logits[::3, ::4] = -torch.inf
    rows = sample_rows(count, width)
    chosen = cuda_ops().sample(logits.to(DEVICE), sent(rows)).cpu()
    assert chosen.tolist() == reference().sample(logits, rows).tolist()


def test_a_row_is_sampled_alike_beside_others():
    logits, rows = rand(torch.Generator().manual_seed(1), 6, 2500).to(DEVICE), sent(sample_rows(6, 3))
    together = cuda_ops().sample(logits, rows).tolist()
    alone = [cuda_ops().sample(logits[[i]], rows_at(rows, [i])).tolist() for i in range(6)]
    assert [[token] for token in together] == alone


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_sampled_inside_the_vocabulary_and_alone(value: float):
    logits, rows = rand(torch.Generator().manual_seed(1), 6, 300).to(DEVICE), sent(sample_rows(6, 3))
    expected = cuda_ops().sample(logits, rows).tolist()
    for row in range(6):
        broken = logits.clone()
        broken[row] = value
        own = cuda_ops().sample(broken, rows).tolist()
        assert 0 <= own[row] < 300
        assert own[:row] + own[row + 1 :] == expected[:row] + expected[row + 1 :]


def test_arrays_go_to_the_device_in_one_piece():
    parts = [np.arange(3), np.arange(6).reshape(2, 3), np.zeros(0, dtype=np.int64), np.array([-(2**62)]), np.arange(4)]
    for own, part in zip(to_device(parts, DEVICE), parts, strict=True):
        assert own.dtype == torch.int64
        assert own.device.type == DEVICE.type
        assert own.data_ptr() % 16 == 0 or not own.numel() or DEVICE.type == "cpu"
        assert own.is_contiguous()
        assert own.tolist() == part.tolist()


def test_pool_bytes_read_and_write_the_pools():
    layer = KdaLayer(1, heads=2, key=16, value=16, bound=None, dtype=torch.bfloat16)
    cache = layer.new_cache(cuda_ops(torch.bfloat16))
    view = cache.state_bytes(0, 3)
    data = bytes(view)
    expected: Tensor = layer.states[3].contiguous().view(-1).view(torch.uint8)
    assert data == expected.numpy().tobytes()
    target = cache.state_bytes(0, 5)
    target[: len(data) // 2] = data[: len(data) // 2]
    target[len(data) // 2 :] = memoryview(data)[len(data) // 2 :]
    assert bytes(cache.state_bytes(0, 5)) == data
    with pytest.raises(ValueError, match="bytes for"):
        target[:4] = b"12345"
