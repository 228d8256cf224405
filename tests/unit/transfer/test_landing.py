"""Landing: what it takes and what it refuses, frame by frame."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from k3svc.errors import Incompatible, TransferError
from k3svc.ops.table import Cache
from k3svc.testing.fakes import FakeCache, fake_spec
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import Frame, StateManifest, build_manifest
from k3svc.transfer.outbox import Outbox, page_spans

SPEC = fake_spec()
NUM_TOKENS = 40
SOURCE_PAGES, TARGET_PAGES = (4, 5, 9), (7, 1, 2)


def manifest(request_id: str = "q", attempt: int = 1, num_tokens: int = NUM_TOKENS) -> StateManifest:
    return build_manifest(SPEC, request_id=request_id, attempt=attempt, num_tokens=num_tokens)


def filled_cache() -> FakeCache:
    cache = FakeCache(SPEC)
    for layer in SPEC.kda_layers:
        cache.state_bytes(layer, 2)[:] = bytes((layer + i) % 251 for i in range(cache.state_size))
        cache.conv_bytes(layer, 2)[:] = bytes((layer + 3 * i) % 251 for i in range(cache.conv_size))
    for layer in SPEC.mla_layers:
        for page in SOURCE_PAGES:
            view = cache.rows_bytes(layer, page)
            view[:] = bytes((layer + page + 5 * i) % 251 for i in range(view.nbytes))
    view = cache.logits_bytes(2)
    view[:] = bytes(7 * i % 251 for i in range(view.nbytes))
    return cache


def frames_of(cache: Cache, sent: StateManifest) -> list[Frame]:
    outbox = Outbox(sent, cache, slot=2, block_table=SOURCE_PAGES, frame_bytes=100)
    for layer in range(4):
        outbox.add_layer(layer, 0, 32)
        outbox.add_layer(layer, 32, NUM_TOKENS)
    outbox.add_logits()
    frames: list[Frame] = []
    while batch := outbox.frames(len(frames)):
        frames += batch
    return frames


@pytest.fixture
def target() -> FakeCache:
    return FakeCache(SPEC)


@pytest.fixture
def landing(target: FakeCache) -> Landing:
    made = Landing(manifest(), target, slot=3, block_table=TARGET_PAGES)
    made.accept_manifest(manifest())
    return made


def pool_bytes(cache: FakeCache) -> bytes:
    def views() -> Iterator[bytes]:
        for slot in range(SPEC.num_slots + 1):
            for layer in SPEC.kda_layers:
                yield bytes(cache.state_bytes(layer, slot)) + bytes(cache.conv_bytes(layer, slot))
            yield bytes(cache.logits_bytes(slot))
        for layer in SPEC.mla_layers:
            yield bytes(cache.rows_bytes(layer, 0, SPEC.num_pages + 1))

    return b"".join(views())


def test_state_arrives_in_other_pages_and_nothing_else_is_touched(landing: Landing, target: FakeCache) -> None:
    source = filled_cache()
    for frame in frames_of(source, manifest()):
        landing.accept(frame)
    landing.finish(landing.next_sequence)
    assert landing.landed_bytes == manifest().total_bytes
    for layer in SPEC.kda_layers:
        assert bytes(target.state_bytes(layer, 3)) == bytes(source.state_bytes(layer, 2))
        assert bytes(target.conv_bytes(layer, 3)) == bytes(source.conv_bytes(layer, 2))
    for layer in SPEC.mla_layers:
        for position in range(NUM_TOKENS):
            assert bytes(target.row_bytes(layer, TARGET_PAGES, position)) == bytes(
                source.row_bytes(layer, SOURCE_PAGES, position)
            )
    assert bytes(target.logits_bytes(3)) == bytes(source.logits_bytes(2))
    assert pool_bytes(target).count(b"\xff") >= target.nbytes - manifest().total_bytes


def test_nothing_is_written_after_close(landing: Landing, target: FakeCache) -> None:
    frames = frames_of(filled_cache(), manifest())
    landing.accept(frames[0])
    landing.close()
    before = pool_bytes(target)
    with pytest.raises(TransferError) as refused:
        landing.accept(frames[1])
    assert refused.value.reason == "HANDOFF_CLOSED"
    assert pool_bytes(target) == before


@pytest.mark.parametrize("other", [manifest("other"), manifest(attempt=2)], ids=["request", "attempt"])
def test_a_foreign_manifest_is_refused(target: FakeCache, other: StateManifest) -> None:
    landing = Landing(manifest(), target, slot=3, block_table=TARGET_PAGES)
    with pytest.raises(TransferError) as refused:
        landing.accept_manifest(other)
    assert refused.value.reason == "HANDOFF_FOREIGN"
    with pytest.raises(TransferError, match="before the manifest"):
        landing.accept(frames_of(filled_cache(), other)[0])


def test_a_manifest_of_another_length_is_refused(target: FakeCache) -> None:
    landing = Landing(manifest(), target, slot=3, block_table=TARGET_PAGES)
    with pytest.raises(Incompatible, match="covers 41 tokens"):
        landing.accept_manifest(manifest(num_tokens=NUM_TOKENS + 1))


def test_a_refused_frame_changes_nothing_and_the_right_one_still_fits(landing: Landing, target: FakeCache) -> None:
    frames = frames_of(filled_cache(), manifest())
    landing.accept(frames[0])
    before = pool_bytes(target)
    right = frames[1]
    wrong = [
        frames[0],
        frames[2],
        replace(right, data=right.data[:0]),
        replace(right, offset=right.offset + 1),
        replace(right, offset=1 << 63),
        replace(right, tensor=len(manifest().tensors)),
        replace(right, sequence=1 << 63),
    ]
    for frame in wrong:
        with pytest.raises(TransferError):
            landing.accept(frame)
        assert pool_bytes(target) == before
    landing.accept(right)
    with pytest.raises(TransferError, match="without"):
        landing.finish(2)


def test_any_flipped_bit_is_noticed_and_harms_nothing_but_its_place(landing: Landing, target: FakeCache) -> None:
    frames = frames_of(filled_cache(), manifest())
    for right in frames:
        landed, before = landing.landed_bytes, pool_bytes(target)
        for bit in (0, 3, 8 * right.nbytes // 2, 8 * right.nbytes - 1):
            data = bytearray(right.data)
            data[bit // 8] ^= 1 << bit % 8
            for wrong in (replace(right, data=memoryview(data)), replace(right, crc32c=right.crc32c ^ 1 << bit % 32)):
                with pytest.raises(TransferError) as refused:
                    landing.accept(wrong)
                assert refused.value.reason == "HANDOFF_CRC"
        with pytest.raises(TransferError):
            landing.accept(replace(right, data=right.data[:-1]))
        after = pool_bytes(target)
        assert sum(a != b for a, b in zip(before, after, strict=True)) <= right.nbytes
        assert (landing.next_sequence, landing.landed_bytes) == (right.sequence, landed)
        landing.accept(right)
    landing.finish(len(frames))


def test_rows_are_cut_only_where_pages_do_not_follow() -> None:
    table = (4, 5, 9, 8, 9, 10)
    assert list(page_spans(table, 10, 3, 52)) == [(4, 2, 3, 0, 17), (9, 1, 0, 17, 10), (8, 3, 0, 27, 25)]
    assert list(page_spans(table, 10, 12, 8)) == [(5, 1, 2, 0, 8)]
    assert list(page_spans(table, 10, 20, 1)) == [(9, 1, 0, 0, 1)]
    for offset in range(60):
        for size in range(1, 61 - offset):
            spans = list(page_spans(table, 10, offset, size))
            found = [10 * page + begin + i for page, _, begin, _, count in spans for i in range(count)]
            assert found == [10 * table[byte // 10] + byte % 10 for byte in range(offset, offset + size)]
            assert all(begin + count <= 10 * pages for _, pages, begin, _, count in spans)
