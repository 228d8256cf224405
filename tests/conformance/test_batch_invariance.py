"""The bits of a row or a sequence do not depend on its company, its place, padding, or how its prompt was cut."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3svc.model.kimi import Model
from k3svc.ops import load
from k3svc.ops.table import Cache, CacheSpec, KdaGate, Ops
from tests.oracles.loop import Loop, Tracked, poison_cache, step_meta

NANO = Path("models/k3-nano")
MOST = 64
HEADS, KEY, VALUE, WIDTH = 3, 20, 36, 4
ROWS_WIDTH = 37
"""Odd, so that flat sizes end in vector tails."""
NOPE, ROPE, RANK = 12, 8, 20


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    yield load("reference", dtype="float32", threads=request.param)
    torch.set_num_threads(1)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def row_operations(ops: Ops) -> dict[str, Callable[[Tensor], Tensor]]:
    """Operations on rows [n, 2 · ROWS_WIDTH]."""
    half = ROWS_WIDTH
    weight, norm = ops.pack_linear(normal(1, 53, 2 * half)), normal(2, 2 * half)
    # Long sums, where several threads would share one product
    wide = ops.pack_linear(normal(12, 64, 100 * 2 * half))
    gate, bias = ops.pack_linear(normal(3, 12, 2 * half)), normal(4, 12)
    experts = ops.pack_experts(
        [(normal(20 + e, 16, 2 * half), normal(40 + e, 16, 2 * half), normal(60 + e, 2 * half, 16)) for e in range(12)]
    )

    def routed(x: Tensor) -> Tensor:
        ids, weights = ops.route(x, gate, bias, top_k=5, renormalize=True, scale=2.4, num_groups=3, top_groups=2)
        return torch.cat([ids.float(), weights, ops.experts(x, ids, weights, experts, "situ", 4.0, 25.0)], 1)

    return {
        "embed": lambda x: ops.embed(norm[:, None] * normal(5, 3), (x[:, 0] * 10).long().clamp(0, 2 * half - 1)),
        "linear": lambda x: ops.linear(x, weight),
        "linear, wide": lambda x: ops.linear(x.repeat(1, 100), wide),
        "rms_norm": lambda x: ops.rms_norm(x, norm, 1e-5),
        "mix_residual": lambda x: ops.mix_residual(x, [x * 2 - 1, x.flip(1)], norm, 1e-5),
        "situ": lambda x: ops.glu(x, "situ", 4.0, 25.0),
        "silu": lambda x: ops.glu(x, "silu", 4.0, None),
        "sigmoid_gate": lambda x: ops.sigmoid_gate(x[:, :half], x[:, half:]),
        "gated_norm": lambda x: ops.gated_norm(x.view(len(x), 2, half), x * 3, norm[:half], 1e-5),
        "experts": routed,
    }


def test_rows_of_every_batch_size(ops: Ops) -> None:
    x = 3 * normal(6, MOST, 2 * ROWS_WIDTH)
    for name, operation in row_operations(ops).items():
        full = operation(x)
        for count in range(1, MOST + 1):
            first = 7 * count % (MOST - count + 1)
            assert same_bits(operation(x[first : first + count]), full[first : first + count]), (name, count)


def spec(num_slots: int, num_pages: int) -> CacheSpec:
    return CacheSpec(
        kda_layers=(0,),
        mla_layers=(1,),
        kda_heads=HEADS,
        kda_key_dim=KEY,
        kda_value_dim=VALUE,
        conv_width=WIDTH,
        kv_lora_rank=RANK,
        rope_dim=ROPE,
        vocab_size=1,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=32,
        state_dtype=torch.float32,
        kv_dtype=torch.float32,
    )


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decode_rows_of_every_batch_size(ops: Ops, lower_bound: float | None) -> None:
    """64 sequences of all lengths up to beyond two key blocks; any run of them alone, padding at the end."""
    geometry = spec(MOST, 6 * MOST)
    start = ops.new_cache(geometry)
    start.layer(0).state.normal_(generator=torch.Generator().manual_seed(1))
    start.layer(0).conv.normal_(generator=torch.Generator().manual_seed(2))
    start.layer(1).rows.normal_(generator=torch.Generator().manual_seed(3))
    sequences = [
        Tracked(slot=1 + i, pages=list(range(1 + 6 * i, 7 + 6 * i)), length=(37 * i) % 170) for i in range(MOST)
    ]
    channels = HEADS * (2 * KEY + VALUE)
    u, f, b = normal(10, MOST, channels), normal(11, MOST, HEADS * KEY), normal(12, MOST, HEADS)
    taps, gate = (
        normal(13, channels, WIDTH),
        KdaGate(a=torch.ones(HEADS), dt_bias=normal(14, HEADS, KEY), lower_bound=lower_bound),
    )
    q, w_kc, w_vc = normal(15, MOST, 3, NOPE + ROPE), normal(16, 3, NOPE, RANK), normal(17, 3, VALUE, RANK)
    cached = normal(18, MOST, RANK + ROPE)

    def run(first: int, count: int) -> list[Tensor]:
        cache = ops.new_cache(geometry)
        for pool, source in ((cache.layer(0).state, start.layer(0).state), (cache.layer(0).conv, start.layer(0).conv)):
            pool.copy_(source)
        cache.layer(1).rows.copy_(start.layer(1).rows)
        own = slice(first, first + count)
        padding = -count % 16

        def padded(x: Tensor) -> Tensor:
            return torch.cat([x[own], x.new_ones(padding, *x.shape[1:])])

        rows = [(sequence, 1) for sequence in sequences[own]] + [(Tracked(slot=-1, pages=[]), 1)] * padding
        step = ops.prepare(step_meta(rows, 32), "decode", geometry)
        qkv = ops.kda_conv_decode(padded(u), taps, cache.layer(0), step)
        o = ops.kda_decode(qkv, padded(f), padded(b), gate, cache.layer(0), step)
        ops.mla_write(padded(cached), cache.layer(1), step)
        attended = ops.mla_decode(padded(q), w_kc, w_vc, cache.layer(1), step, 0.2)
        slots = slice(1 + first, 1 + first + count)
        return [qkv[:count], o[:count], attended[:count], cache.layer(0).state[slots], cache.layer(0).conv[slots]]

    full = run(0, MOST)
    for count in [*range(1, 34), 47, 63]:
        first = 7 * count % (MOST - count + 1)
        for part, whole in zip(run(first, count), full, strict=True):
            assert same_bits(part, whole[first : first + count]), count


@pytest.fixture(scope="module")
def nano() -> Model:
    return Model.load(NANO, load("reference", dtype="float32", threads=1))


LENGTHS = [1, 64, 65, 300, 129, 17, 200, 63]
PROMPTS = [
    torch.randint(3840, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS
]


def dump(cache: Cache, sequence: Tracked) -> list[bytes]:
    """Every byte that the sequence has in the caches, but for the logits row."""
    geometry = cache.spec
    parts = [
        bytes(view(layer, sequence.slot)[:])
        for layer in geometry.kda_layers
        for view in (cache.state_bytes, cache.conv_bytes)
    ]
    for layer in geometry.mla_layers:
        rows = b"".join(bytes(cache.rows_bytes(layer, page)[:]) for page in sequence.pages)
        parts.append(rows[: sequence.length * len(rows) // (len(sequence.pages) * geometry.page_size)])
    return parts


def new_loop(nano: Model) -> Loop:
    return Loop(nano, load("reference", dtype="float32", threads=1), num_slots=len(PROMPTS), num_pages=100, poison=True)


@pytest.fixture(scope="module")
def alone(nano: Model) -> list[tuple[list[bytes], Tensor]]:
    """Cache bytes and logits of each prompt by itself, whole."""
    results = []
    for prompt in PROMPTS:
        loop = new_loop(nano)
        sequence = loop.new(len(prompt) + 8)
        logits = loop.prefill(sequence, prompt, 4096)
        results.append((dump(loop.cache, sequence), logits))
    return results


def test_packed_prompts_equal_lone_ones(nano: Model, alone: list[tuple[list[bytes], Tensor]]) -> None:
    loop = new_loop(nano)
    sequences = [loop.new(len(prompt) + 8) for prompt in PROMPTS]
    order = [3, 0, 6, 1, 7, 2, 5, 4]
    parts = loop.step("extend", [(sequences[i], PROMPTS[i]) for i in order], sum(LENGTHS) + 9)
    for part, i in zip(parts, order, strict=True):
        assert dump(loop.cache, sequences[i]) == alone[i][0], LENGTHS[i]
        assert same_bits(nano.logits(part), alone[i][1]), LENGTHS[i]


@pytest.mark.parametrize("cuts", [[64] * 5, [192, 64, 44], [128, 172]])
def test_cuts_of_a_prompt_leave_no_trace(nano: Model, alone: list[tuple[list[bytes], Tensor]], cuts: list[int]) -> None:
    """The prompt of 300 in pieces, each step shared with another prompt."""
    loop = new_loop(nano)
    sequence = loop.new(308)
    others = [loop.new(70) for _ in cuts]
    for cut, other in zip(cuts, others, strict=True):
        ids = PROMPTS[3][sequence.length : sequence.length + cut]
        loop.step("extend", [(other, PROMPTS[2]), (sequence, ids)])
    assert dump(loop.cache, sequence) == alone[3][0]
    assert same_bits(nano.logits(torch.cat(sequence.hidden)), alone[3][1])


def test_decode_rows_do_not_see_each_other(nano: Model) -> None:
    """Eight steps of eight sequences: in one batch with padding, and each alone without."""
    ids = torch.randint(3840, (len(PROMPTS), 8), generator=torch.Generator().manual_seed(1)).tolist()

    def run(chosen: list[int], num_rows: int | None) -> dict[int, tuple[Tensor, list[bytes]]]:
        loop = new_loop(nano)
        sequences = {i: loop.new(len(PROMPTS[i]) + 8) for i in chosen}
        for i in chosen:
            loop.prefill(sequences[i], PROMPTS[i], 4096)
        padding = [(Tracked(slot=-1, pages=[]), [0])] * ((num_rows or len(chosen)) - len(chosen))
        for t in range(8):
            loop.step("decode", [*((sequences[i], [ids[i][t]]) for i in chosen), *padding])
        return {i: (nano.logits(torch.cat(sequences[i].hidden[-8:])), dump(loop.cache, sequences[i])) for i in chosen}

    together = run([5, 2, 7, 0, 3, 1, 6, 4], 16)
    for i in range(len(PROMPTS)):
        logits, memory = run([i], None)[i]
        assert same_bits(together[i][0], logits), LENGTHS[i]
        assert together[i][1] == memory, LENGTHS[i]


def test_poisoned_memory_does_not_leak(ops: Ops) -> None:
    """Extend and decode over pools of NaN are finite, and write nothing but their own slots and rows."""
    geometry = spec(4, 12)
    cache = ops.new_cache(geometry)
    poison_cache(cache)
    rows = [
        (Tracked(slot=4, pages=[5, 2, 9]), 70),
        (Tracked(slot=-1, pages=[]), 3),
        (Tracked(slot=2, pages=[12]), 1),
    ]
    channels = HEADS * (2 * KEY + VALUE)
    gate = KdaGate(a=torch.ones(HEADS), dt_bias=normal(14, HEADS, KEY), lower_bound=-5.0)
    for mode in ("extend", "decode"):
        if mode == "decode":
            for sequence, count in rows:
                sequence.length += count
            rows = [(sequence, 1) for sequence, _ in rows]
        n = sum(count for _, count in rows) + 6
        step = ops.prepare(step_meta(rows, 32, n if mode == "extend" else None), mode, geometry)
        n = n if mode == "extend" else len(rows)
        conv, kda, mla = (
            (ops.kda_conv_extend, ops.kda_extend, ops.mla_extend)
            if mode == "extend"
            else (ops.kda_conv_decode, ops.kda_decode, ops.mla_decode)
        )
        qkv = conv(normal(1, n, channels), normal(2, channels, WIDTH), cache.layer(0), step)
        o = kda(qkv, normal(3, n, HEADS * KEY), normal(4, n, HEADS), gate, cache.layer(0), step)
        ops.mla_write(normal(5, n, RANK + ROPE), cache.layer(1), step)
        q, w_kc, w_vc = normal(6, n, 3, NOPE + ROPE), normal(7, 3, NOPE, RANK), normal(8, 3, VALUE, RANK)
        attended = mla(q, w_kc, w_vc, cache.layer(1), step, 0.2)
        for name, out in (("conv", qkv), ("kda", o), ("mla", attended)):
            assert bool(out.isfinite().all()), (mode, name)
    for slot in (0, 1, 3):
        assert bool(cache.layer(0).state[slot].isnan().all())
        assert bool(cache.layer(0).conv[slot].isnan().all())
    for slot in (2, 4):
        assert bool(cache.layer(0).state[slot].isfinite().all())
    finite = cache.layer(1).rows.isfinite().all(-1)
    assert int(finite.sum()) == 71 + 2
    assert bool((finite == ~cache.layer(1).rows.isnan().any(-1)).all())
