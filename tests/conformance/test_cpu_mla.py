"""MLA of the cpu backend: against the reference, any cut of a prompt, any batch, and unwritten memory."""

from collections.abc import Iterator
from dataclasses import dataclass

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
    poisoned_memory,
    pool_of,
    rand,
    reference,
    sequences,
)
from tests.oracles.loop import Tracked, poison_cache

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


NANO = {"heads": 4, "nope": 32, "rope": 16, "rank": 64, "value": 32}
ODD = {"heads": 5, "nope": 19, "rope": 7, "rank": 37, "value": 21}


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
