"""MLA of the cpu backend: against the reference, any cut of a prompt, any batch, and unwritten memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.table import Cache, CacheSpec, Mode, Ops, StepMeta
from tests.conformance.cpu_cases import (
    cache_spec,
    fill_rows,
    meta_of,
    needs_compiler,
    paths,
    poisoned_memory,
    pool_of,
    rand,
    reference,
    sequences,
)
from tests.oracles.loop import Tracked, poison_cache, step_meta

pytestmark = needs_compiler

SHAPES = settings(max_examples=20)
GEOMETRY = {
    "heads": st.integers(1, 14),
    "nope": st.integers(1, 40),
    "rope": st.integers(1, 20),
    "rank": st.integers(1, 70),
    "value": st.integers(1, 40),
}


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(scope="module")
def cpu() -> Cpu:
    return Cpu()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights and inputs of rows of one layer."""

    spec: CacheSpec
    w_kc: Tensor
    w_vc: Tensor
    q: Tensor
    rows: Tensor

    def run(self, ops: Ops, cache: Cache, mode: Mode, meta: StepMeta, own: slice) -> Tensor:
        """Writes the rows of the step and attends; [n, NH·V]."""
        step = ops.prepare(meta, mode, self.spec)
        pool = pool_of(cache, 1)
        ops.mla_write(self.rows[own], pool, step)
        attend = ops.mla_extend if mode == "extend" else ops.mla_decode
        return attend(self.q[own], self.w_kc, self.w_vc, pool, step, 0.3)


def layer(count: int, *, heads: int, nope: int, rope: int, rank: int, value: int) -> Layer:
    source = torch.Generator().manual_seed(count * 31 + rank)
    return Layer(
        spec=cache_spec(kv_lora_rank=rank, rope_dim=rope),
        w_kc=rand(source, heads, nope, rank, scale=rank**-0.5),
        w_vc=rand(source, heads, value, rank, scale=rank**-0.5),
        q=rand(source, count, heads, nope + rope),
        rows=rand(source, count, rank + rope),
    )


def against_reference(cpu: Cpu, given_layer: Layer, mode: Mode, rows: list[Tracked], lengths: list[int], padding: int):
    outputs = []
    for ops in (cpu, reference()):
        cache = ops.new_cache(given_layer.spec)
        poison_cache(cache)
        fill_rows(cache, 1, rows, torch.Generator().manual_seed(1))
        outputs.append(given_layer.run(ops, cache, mode, meta_of(rows, lengths, padding), slice(None)))
    actual, expected = outputs
    assert actual.isfinite().all()
    live = sum(lengths)
    torch.testing.assert_close(actual[:live], expected[:live], rtol=2e-5, atol=2e-5)


@SHAPES
@given(**GEOMETRY, cached=st.lists(st.integers(0, 200), min_size=1, max_size=4), padding=st.integers(0, 2))
def test_decode(cpu: Cpu, cached: list[int], padding: int, **geometry: int):
    lengths = [1] * len(cached)
    against_reference(
        cpu, layer(len(cached) + padding, **geometry), "decode", sequences(lengths, cached), lengths, padding
    )


@SHAPES
@given(**GEOMETRY, lengths=st.lists(st.integers(1, 100), min_size=1, max_size=3), data=st.data())
def test_extend(cpu: Cpu, lengths: list[int], data: st.DataObject, **geometry: int):
    cached = [data.draw(st.sampled_from([0, 64, 128])) for _ in lengths]
    against_reference(cpu, layer(sum(lengths) + 2, **geometry), "extend", sequences(lengths, cached), lengths, 2)


def attended(
    ops: Ops, given_layer: Layer, page_size: int, cached: Sequence[int], lengths: Sequence[int] | None = None
) -> Tensor:
    """Rows of sequences with `cached` rows behind them, all other memory NaN: a decode step, or verify of `lengths`.

    Values depend on the place of a sequence alone, pages on it and the page size, with one that is not written between
    any two.
    """
    counts = lengths or [1] * len(cached)
    sizes = [-(-(start + count) // page_size) for start, count in zip(cached, counts, strict=True)]
    spec = replace(given_layer.spec, page_size=page_size, num_pages=2 * sum(sizes))
    cache = ops.new_cache(spec)
    poison_cache(cache)
    pool = pool_of(cache, 1)
    pages = iter(range(2 * sum(sizes), 0, -2))
    rows = []
    for index, (start, size) in enumerate(zip(cached, sizes, strict=True)):
        row = Tracked(slot=index + 1, pages=[next(pages) for _ in range(size)], length=start)
        behind = rand(torch.Generator().manual_seed(index), start, spec.kv_lora_rank + spec.rope_dim)
        for position in range(start):
            pool.rows[row.pages[position // page_size], position % page_size] = behind[position]
        rows.append(row)
    step = ops.prepare(
        step_meta(list(zip(rows, counts, strict=True)), page_size), "verify" if lengths else "decode", spec
    )
    ops.mla_write(given_layer.rows, pool, step)
    attend = ops.mla_verify if lengths else ops.mla_decode
    return attend(given_layer.q, given_layer.w_kc, given_layer.w_vc, pool, step, 0.3)


NANO = {"heads": 4, "nope": 32, "rope": 16, "rank": 64, "value": 32}
ODD = {"heads": 5, "nope": 19, "rope": 7, "rank": 37, "value": 21}
FEW = {"heads": 8, "nope": 24, "rope": 8, "rank": 96, "value": 16}
MANY = {"heads": 13, "nope": 16, "rope": 8, "rank": 64, "value": 40}


@pytest.mark.parametrize("geometry", [NANO, ODD])
def test_a_prompt_has_the_same_bits_however_it_is_cut(cpu: Cpu, geometry: dict[str, int]):
    given_layer = layer(300, **geometry)
    results = []
    for pieces in ([300], [64, 236], [64, 64, 64, 64, 44], [256, 44], [192, 108]):
        (row,) = sequences([300], [0])
        cache = cpu.new_cache(given_layer.spec)
        poison_cache(cache)
        parts = []
        for piece in pieces:
            own = slice(row.length, row.length + piece)
            parts.append(given_layer.run(cpu, cache, "extend", meta_of([row], [piece]), own))
            row.length += piece
        results.append(torch.cat(parts))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("geometry", [NANO, ODD])
def test_a_decode_row_has_the_same_bits_in_any_batch(cpu: Cpu, geometry: dict[str, int]):
    given_layer = layer(64, **geometry)
    cached = [(index * 7) % 23 for index in range(64)]
    rows = sequences([1] * 64, cached)
    spec = cache_spec(kv_lora_rank=geometry["rank"], rope_dim=geometry["rope"], num_pages=200)
    cache = cpu.new_cache(spec)
    poison_cache(cache)
    fill_rows(cache, 1, rows, torch.Generator().manual_seed(1))
    alone = torch.cat(
        [
            given_layer.run(cpu, cache, "decode", meta_of([row], [1]), slice(index, index + 1))
            for index, row in enumerate(rows)
        ]
    )
    for count in range(1, 65):
        together = given_layer.run(cpu, cache, "decode", meta_of(rows[:count], [1] * count), slice(count))
        assert torch.equal(together, alone[:count]), count


@pytest.mark.parametrize("geometry", [NANO, ODD, FEW, MANY])
def test_pages_and_threads_and_instructions_change_no_bit(geometry: dict[str, int]):
    cached = [0, 14, 15, 23, 62, 63, 64, 100, 127, 128, 190, 250]
    given_layer = layer(len(cached), **geometry)
    expected = attended(reference(), given_layer, 16, cached)
    first = attended(Cpu(), given_layer, 64, cached)
    torch.testing.assert_close(first, expected, rtol=2e-5, atol=2e-5)
    for isa in paths():
        for threads in (1, 2, 16):
            cpu = Cpu(threads=threads, isa=isa)
            for page_size in (16, 24, 64, 128):
                actual = attended(cpu, given_layer, page_size, cached)
                assert torch.equal(actual, first), (isa, threads, page_size)


@pytest.mark.parametrize("geometry", [NANO, ODD, FEW, MANY])
@pytest.mark.parametrize("page_size", [16, 24, 64, 128])
def test_rows_of_a_verify_step_have_the_bits_of_decode_rows(cpu: Cpu, geometry: dict[str, int], page_size: int):
    cached, lengths = [0, 60, 63, 90, 120], [9, 1, 7, 40, 16]
    given_layer = layer(sum(lengths), **geometry)
    together = attended(cpu, given_layer, page_size, cached, lengths)
    row = 0
    for index, (start, length) in enumerate(zip(cached, lengths, strict=True)):
        cache = cpu.new_cache(replace(given_layer.spec, num_pages=12))
        poison_cache(cache)
        alone = Tracked(slot=1, pages=list(range(12, 0, -1)))
        pool = pool_of(cache, 1).rows
        behind = rand(torch.Generator().manual_seed(index), start, pool.shape[-1])
        for position in range(start):
            pool[alone.pages[position // 16], position % 16] = behind[position]
        for position in range(start, start + length):
            alone.length = position
            own = slice(row, row + 1)
            assert torch.equal(given_layer.run(cpu, cache, "decode", meta_of([alone], [1]), own), together[own]), row
            row += 1


@pytest.mark.parametrize("geometry", [NANO, MANY])
def test_padding_between_sequences_is_zero_and_changes_no_bit(cpu: Cpu, geometry: dict[str, int]):
    given_layer = layer(12, **geometry)
    live = sequences([1] * 7, [0, 70, 64, 3, 15, 90, 1])
    places = [0, 2, 3, 6, 7, 9, 11]
    rows = [Tracked(slot=-1, pages=[], length=0) for _ in range(12)]
    for place, row in zip(places, live, strict=True):
        rows[place] = row
    padding = [place for place in range(12) if place not in places]
    given_layer.q[padding] = torch.nan
    cache = cpu.new_cache(given_layer.spec)
    poison_cache(cache)
    fill_rows(cache, 1, live, torch.Generator().manual_seed(1))
    together = given_layer.run(cpu, cache, "decode", meta_of(rows, [1] * 12), slice(None))
    assert (together[padding] == 0).all()
    for place in places:
        own = slice(place, place + 1)
        assert torch.equal(given_layer.run(cpu, cache, "decode", meta_of([rows[place]], [1]), own), together[own])


def test_write_touches_its_rows_alone(cpu: Cpu):
    given_layer = layer(5, **NANO)
    rows = sequences([1, 1, 1], [3, 20, 40])
    cache = cpu.new_cache(given_layer.spec)
    poison_cache(cache)
    cpu.mla_write(
        given_layer.rows, pool_of(cache, 1), cpu.prepare(meta_of(rows, [1, 1, 1], 2), "decode", given_layer.spec)
    )
    pool = pool_of(cache, 1).rows
    for row, expected in zip(rows, given_layer.rows, strict=False):
        assert torch.equal(pool[row.pages[row.length // 16], row.length % 16], expected)
    assert int(pool.isnan().all(-1).sum()) == pool.shape[0] * pool.shape[1] - 3
