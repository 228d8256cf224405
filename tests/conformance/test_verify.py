"""Verify steps against plain decode, one layer of each kind: the same bits, and no trace of rejected drafts."""

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3svc.ops.table import Cache, Ops
from tests.conformance.cpu_cases import poisoned_memory, pool_of
from tests.conformance.verify_cases import BACKENDS, Geometry, Layers, Token, backend, same_bits, tracked
from tests.oracles.loop import Tracked

PADDING = Tracked(slot=-1, pages=[])


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(scope="module", params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


def clones(sequences: Sequence[Tracked]) -> list[Tracked]:
    return [Tracked(slot=one.slot, pages=one.pages, length=one.length) for one in sequences]


def assert_equal_caches(actual: Cache, expected: Cache, sequences: Sequence[Tracked], page_size: int) -> None:
    """Bits of all slots, and of the MLA rows that the sequences have behind them."""
    assert same_bits(pool_of(actual, 0).state, pool_of(expected, 0).state)
    assert same_bits(pool_of(actual, 0).conv, pool_of(expected, 0).conv)
    for sequence in sequences:
        for position in range(sequence.length):
            page, offset = sequence.pages[position // page_size], position % page_size
            rows = [pool_of(cache, 1).rows[page, offset] for cache in (actual, expected)]
            assert same_bits(*rows), position


def check_step(
    layers: Layers,
    cached: Sequence[int],
    drafts: Sequence[int],
    accepted: Sequence[int],
    gaps: Sequence[int],
    tail: int,
) -> None:
    """One verify step of sequences with these drafts against decode; gaps: rows of padding sequences before each."""
    page_size = layers.geometry.page_size
    sequences = tracked(cached, max(drafts) + 1, page_size)
    plain = clones(sequences)
    tokens = [layers.tokens(count + 1) for count in drafts]
    cache, expected_cache, scratch = (layers.new_cache(sequences) for _ in range(3))
    rows: list[tuple[Tracked, Sequence[Token]]] = []
    numbers: list[int] = []
    for sequence, own, number, gap in zip(sequences, tokens, accepted, gaps, strict=True):
        if gap:
            rows.append((PADDING, layers.tokens(gap)))
            numbers.append(0)
        rows.append((sequence, own))
        numbers.append(number)
    live = sum(len(own) for _, own in rows)
    outputs, step = layers.run(cache, "verify", rows, live + tail)
    assert all(out.isfinite().all() for out in outputs)
    layers.ops.commit(cache, step, numbers)
    live_outputs = [out for out, (sequence, _) in zip(outputs, rows, strict=True) if sequence.slot >= 0]
    for sequence, own, number, out in zip(plain, tokens, accepted, live_outputs, strict=True):
        (whole,) = clones([sequence])
        assert same_bits(out, layers.decode(scratch, whole, own))
        layers.decode(expected_cache, sequence, own[: number + 1])
    assert_equal_caches(cache, expected_cache, plain, page_size)


@pytest.mark.parametrize("accepted", range(8))
def test_every_number_of_accepted_drafts(ops: Ops, accepted: int) -> None:
    """Beside a plain row and a sequence that accepts the other numbers; a padding row lies before the last one."""
    check_step(Layers(ops, Geometry(), seed=1), [5, 33, 70], [7, 0, 7], [accepted, 0, 7 - accepted], [0, 0, 1], 2)


@pytest.mark.parametrize("length", [0, 1, 3, 14, 15, 16, 57, 62, 63, 64, 65, 127])
def test_drafts_across_pages_and_key_blocks(ops: Ops, length: int) -> None:
    check_step(Layers(ops, Geometry(), seed=2), [length, length + 1], [7, 3], [4, 3], [0, 0], 0)


def test_segments_of_key_blocks(ops: Ops) -> None:
    """Drafts on both sides of position 4096, where the reference starts a second segment."""
    layers = Layers(ops, Geometry(key=8, value=8, rank=8, rope=4, page_size=64), seed=3)
    check_step(layers, [4093], [5], [3], [0], 1)


def test_many_steps_in_a_row(ops: Ops) -> None:
    """Ragged steps over changing drafts, each on the state that the one before left; decode steps in between."""
    layers = Layers(ops, Geometry(), seed=4)
    source = random.Random(4)
    sequences = tracked([0, 3, 61], 160, layers.geometry.page_size)
    plain = clones(sequences)
    cache, expected_cache = layers.new_cache(sequences), layers.new_cache(sequences)
    for round_ in range(32):
        order = source.sample(range(3), source.randint(1, 3))
        drafts = [source.choice([0, 0, 1, 3, 7]) for _ in order]
        accepted = [source.randint(0, count) for count in drafts]
        tokens = [layers.tokens(count + 1) for count in drafts]
        rows = [(sequences[index], own) for index, own in zip(order, tokens, strict=True)]
        if round_ % 5 == 4:
            tokens, accepted = [own[:1] for own in tokens], [0] * len(order)
            rows = [(sequence, own[:1]) for sequence, own in rows]
            outputs, _ = layers.run(cache, "decode", rows)
        else:
            outputs, step = layers.run(cache, "verify", rows)
            layers.ops.commit(cache, step, accepted)
        for index, own, number, out in zip(order, tokens, accepted, outputs, strict=True):
            sequences[index].length += number + 1
            assert same_bits(out[: number + 1], layers.decode(expected_cache, plain[index], own[: number + 1]))
        assert_equal_caches(cache, expected_cache, plain, layers.geometry.page_size)
    assert min(sequence.length for sequence in sequences) > 40


def test_nothing_but_the_anchor_is_written_before_commit(ops: Ops) -> None:
    layers = Layers(ops, Geometry(), seed=5)
    sequences = tracked([20, 40], 8, layers.geometry.page_size)
    plain = clones(sequences)
    tokens = [layers.tokens(8), layers.tokens(3)]
    cache, expected_cache = layers.new_cache(sequences), layers.new_cache(sequences)
    layers.run(cache, "verify", list(zip(sequences, tokens, strict=True)))
    for sequence, own in zip(plain, tokens, strict=True):
        layers.decode(expected_cache, sequence, own[:1])
    assert_equal_caches(cache, expected_cache, plain, layers.geometry.page_size)


def test_stray_numbers_of_accepted_drafts_are_refused(ops: Ops) -> None:
    layers = Layers(ops, Geometry(), seed=6)
    sequences = tracked([4], 8, layers.geometry.page_size)
    for numbers in ([3], [-1], [], [1, 0]):
        cache = layers.new_cache(sequences)
        _, step = layers.run(cache, "verify", [(sequences[0], layers.tokens(3))])
        with pytest.raises(AssertionError):
            layers.ops.commit(cache, step, numbers)


def geometries(unit: int) -> st.SearchStrategy[Geometry]:
    """All sizes multiples of `unit`."""

    def sizes(most: int) -> st.SearchStrategy[int]:
        return st.integers(1, most // unit).map(lambda size: size * unit)

    return st.builds(
        Geometry,
        heads=st.integers(1, 4),
        key=sizes(70),
        value=sizes(70),
        width=st.integers(2, 5),
        bound=st.sampled_from([None, -5.0]),
        nope=sizes(20),
        rank=sizes(40),
        rope=sizes(12),
        page_size=st.sampled_from([16, 64]),
    )


@settings(max_examples=25)
@given(data=st.data())
def test_a_step_of_any_shape(ops: Ops, data: st.DataObject) -> None:
    # The products behind the reference look at the alignment of rows, see its docstring.
    geometry = data.draw(geometries(4 if ops.name == "reference" else 1), label="geometry")
    count = data.draw(st.integers(1, 4), label="sequences")
    cached = data.draw(st.lists(st.integers(0, 140), min_size=count, max_size=count), label="cached")
    drafts = data.draw(st.lists(st.integers(0, 8), min_size=count, max_size=count), label="drafts")
    accepted = [data.draw(st.integers(0, own), label="accepted") for own in drafts]
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count), label="gaps")
    tail = data.draw(st.integers(0, 3), label="tail")
    check_step(Layers(ops, geometry, seed=count), cached, drafts, accepted, gaps, tail)
