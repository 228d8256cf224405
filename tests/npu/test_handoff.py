"""The wire layout: pools of both backends give and take the same bytes, whole or in pieces of any size."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3svc.ops.npu.cache import NpuCache, PoolBytes
from k3svc.ops.reference_cache import ReferenceCache
from k3svc.ops.table import Cache, CacheSpec
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import build_manifest, layout_difference, wire_layout
from k3svc.transfer.outbox import Outbox
from tests.npu.bench import PAGE, emulated, reference, small_spec

SLOT, TOKENS = 3, 77
SOURCE_PAGES, TARGET_PAGES = [9, 10, 11, 4, 2], [1, 7, 3, 20, 21]


def caches(dtype: torch.dtype) -> tuple[CacheSpec, NpuCache, ReferenceCache]:
    spec = small_spec(kv_dtype=dtype)
    own, oracle = emulated(dtype=dtype).new_cache(spec), reference(dtype).new_cache(spec)
    assert isinstance(own, NpuCache)
    assert isinstance(oracle, ReferenceCache)
    return spec, own, oracle


def fill(cache: Cache, seed: int) -> None:
    draw = random.Random(seed)
    spec = cache.spec
    for page in range(spec.num_pages + 1):
        view = cache.rows_bytes(1, page)
        view[:] = draw.randbytes(view.nbytes)
    for slot in range(spec.num_slots + 1):
        for view in (cache.state_bytes(0, slot), cache.conv_bytes(0, slot), cache.logits_bytes(slot)):
            view[:] = draw.randbytes(view.nbytes)


def content(cache: Cache, slot: int, pages: list[int]) -> list[bytes]:
    rows = b"".join(bytes(cache.rows_bytes(1, page)[:]) for page in pages)
    used = TOKENS * len(rows) // (len(pages) * PAGE)
    slots = (cache.state_bytes(0, slot), cache.conv_bytes(0, slot), cache.logits_bytes(slot))
    return [rows[:used], *(bytes(view[:]) for view in slots)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", ["npu to cpu", "cpu to npu", "npu to npu"])
@pytest.mark.parametrize("frame_bytes", [37, 1000, 1 << 20])
def test_hand_off(direction: str, dtype: torch.dtype, frame_bytes: int):
    spec, own, oracle = caches(dtype)
    other = caches(dtype)[1]
    source, target = {
        "npu to cpu": (own, oracle),
        "cpu to npu": (oracle, own),
        "npu to npu": (own, other),
    }[direction]
    fill(source, 1)  # type: ignore[arg-type]
    manifest = build_manifest(spec, request_id="r", attempt=1, num_tokens=TOKENS)
    outbox = Outbox(manifest, source, slot=SLOT, block_table=SOURCE_PAGES, frame_bytes=frame_bytes)  # type: ignore[arg-type]
    landing = Landing(manifest, target, slot=5, block_table=TARGET_PAGES)  # type: ignore[arg-type]
    landing.accept_manifest(manifest)
    for start, end in ((0, 64), (64, TOKENS)):
        for layer in (0, 1):
            outbox.add_layer(layer, start, end)
    outbox.add_logits()
    while landing.next_sequence < outbox.num_frames:
        for frame in outbox.frames(landing.next_sequence):
            landing.accept(frame)
    landing.finish(outbox.num_frames)
    assert content(target, 5, TARGET_PAGES) == content(source, SLOT, SOURCE_PAGES)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_from_npu", [True, False])
@pytest.mark.parametrize("frame_bytes", [38, 1000, 1 << 20])
def test_states_may_travel_as_bfloat16(is_from_npu: bool, frame_bytes: int):
    """Pools keep float32; what lands is the nearest bfloat16 of each value, and everything else is untouched."""
    spec = small_spec(wire_state_dtype=torch.bfloat16)
    own, oracle = emulated().new_cache(spec), reference().new_cache(spec)
    source, target = (own, oracle) if is_from_npu else (oracle, own)
    fill(source, 1)
    state = torch.randn(2 * 8 * 16, generator=torch.Generator().manual_seed(3))
    source.state_bytes(0, SLOT)[:] = state.numpy().tobytes()
    manifest = build_manifest(spec, request_id="r", attempt=1, num_tokens=TOKENS)
    outbox = Outbox(manifest, source, slot=SLOT, block_table=SOURCE_PAGES, frame_bytes=frame_bytes)
    landing = Landing(manifest, target, slot=5, block_table=TARGET_PAGES)
    landing.accept_manifest(manifest)
    for layer in (0, 1):
        outbox.add_layer(layer, 0, TOKENS)
    outbox.add_logits()
    while landing.next_sequence < outbox.num_frames:
        for frame in outbox.frames(landing.next_sequence):
            landing.accept(frame)
    landing.finish(outbox.num_frames)
    rows, landed, *others = content(target, 5, TARGET_PAGES)
    rows_sent, _, *others_sent = content(source, SLOT, SOURCE_PAGES)
    assert (rows, others) == (rows_sent, others_sent)
    assert landed == state.bfloat16().float().numpy().tobytes()


def layout(kv: torch.dtype, wire: torch.dtype | None = None, **changes: Any) -> str:
    return wire_layout(small_spec(kv_dtype=kv, wire_state_dtype=wire, **changes))


def test_pools_of_other_dtypes_never_share_a_wire_layout():
    """Prefill in bfloat16 and decode in float32, or rounded states on one side alone."""
    kinds = [(kv, wire) for kv in (torch.float32, torch.bfloat16) for wire in (None, torch.bfloat16)]
    assert len({layout(*kind) for kind in kinds}) == 4


def test_a_mismatch_names_the_key_both_values_and_what_to_change():
    plain, narrow = layout(torch.float32), layout(torch.float32, torch.bfloat16)
    assert layout_difference(layout(torch.bfloat16), plain) == (
        "model.dtype: prefill has 'bfloat16', decode has 'float32'; start both with the same model.dtype"
    )
    assert layout_difference(plain, narrow) == (
        "transfer.state_dtype: prefill has 'float32', decode has 'bfloat16'; start both with the same "
        "transfer.state_dtype"
    )
    other = layout(torch.float32, kda_heads=3)
    assert layout_difference(plain, other) == (
        f"wire_layout: prefill has {plain!r}, decode has {other!r}; the shapes of states and rows follow from "
        "config.json, so start both with the same checkpoint and release"
    )
    assert "wire_layout: prefill has" in layout_difference(plain, "x" * 1000)


def test_wire_bytes_are_latent_and_rope_side_by_side():
    _, own, oracle = caches(torch.float32)
    rows = torch.arange(2 * PAGE * 48, dtype=torch.float32).view(2 * PAGE, 48)
    pool = own.layer(1)
    pool.latent[4:6] = rows[:, :32].view(2, PAGE, 32)  # type: ignore[union-attr]
    pool.rope[4:6] = rows[:, 32:].view(2, PAGE, 16)  # type: ignore[union-attr]
    assert bytes(own.rows_bytes(1, 4, 2)) == rows.numpy().tobytes()
    oracle.rows_bytes(1, 4, 2)[:] = own.rows_bytes(1, 4, 2)[:]
    assert torch.equal(oracle.layer(1).rows[4:6].flatten(0, 1), rows)  # type: ignore[union-attr]


def test_pool_bytes_slice_like_memory():
    draw = random.Random(3)
    parts = [torch.zeros(6, 3), torch.zeros(6, 2)]
    view, model = PoolBytes(parts), bytearray(120)
    assert view.nbytes == 120
    for _ in range(100):
        begin = draw.randint(0, 120)
        end = draw.randint(begin, 120)
        data = draw.randbytes(end - begin)
        view[begin:end] = data
        model[begin:end] = data
        assert bytes(view) == model
        a, b = sorted((draw.randint(0, 120), draw.randint(0, 120)))
        assert bytes(view[a:b]) == model[a:b]
    with pytest.raises(ValueError, match="3 bytes for 4"):
        view[0:4] = b"abc"
    with pytest.raises(ValueError, match="step 2"):
        view[0:4:2]


def test_slices_are_copies():
    tensor = torch.zeros(2, 4)
    before = PoolBytes([tensor])[0:4]
    tensor.fill_(1.0)
    assert bytes(before) == b"\0\0\0\0"


@pytest.mark.parametrize(
    "call", [lambda c: c.state_bytes(0, 7), lambda c: c.rows_bytes(1, 40, 2), lambda c: c.logits_bytes(-1)]
)
def test_bytes_outside_of_the_pools_are_refused(call: Callable[[NpuCache], Any]):
    with pytest.raises(IndexError):
        call(caches(torch.float32)[1])


def test_slots_and_pages_are_cleared_and_copied():
    _, own, oracle = caches(torch.bfloat16)
    for cache in (own, oracle):
        fill(cache, 9)
        cache.set_logits(2, torch.arange(64.0))
        cache.copy_slot(2, 4)
        cache.copy_page(5, 8)
        cache.clear_slot(1)
    for slot in (1, 2, 4):
        assert content(own, slot, [8, 5, 1, 2, 3]) == content(oracle, slot, [8, 5, 1, 2, 3])
    assert own.is_finite(1)
    assert torch.equal(own.logits([4, 1]), oracle.logits([4, 1]))
    own.layer(0).conv[4, 1, 3] = torch.nan  # type: ignore[union-attr]
    assert not own.is_finite(4)
    assert own.nbytes == oracle.nbytes
