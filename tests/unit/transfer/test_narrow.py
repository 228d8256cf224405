"""States that travel as bfloat16: the rounding bit by bit, and hand-offs from pool to pool."""

import dataclasses
import math
import struct

import numpy as np
import pytest
import torch

from k3svc.errors import Incompatible, TransferError
from k3svc.testing.fakes import FakeCache, fake_spec
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import StateManifest, TensorKind, build_manifest, wire_layout
from k3svc.transfer.narrow import NarrowState
from k3svc.transfer.outbox import Outbox

SPEC = fake_spec()
NARROW = dataclasses.replace(SPEC, wire_state_dtype=torch.bfloat16)
NUM_TOKENS, TABLE = 20, (3, 4)

# float32 bits → bfloat16 bits
ROUNDED = {
    0x00000000: 0x0000, 0x80000000: 0x8000,  # zeros keep their sign
    0x3F800000: 0x3F80, 0xBF800000: 0xBF80,  # 1 and -1
    0x3F808000: 0x3F80, 0x3F818000: 0x3F82,  # ties go to the even one
    0x3F808001: 0x3F81, 0x3F807FFF: 0x3F80,
    0x3FFFFFFF: 0x4000,  # a carry into the exponent
    0x7F800000: 0x7F80, 0xFF800000: 0xFF80,  # infinities
    0x7F7FFFFF: 0x7F80, 0x7F7F7FFF: 0x7F7F, 0x7F7F8000: 0x7F80,  # the largest numbers
    0x00000001: 0x0000, 0x00008000: 0x0000, 0x00008001: 0x0001, 0x00018000: 0x0002,  # denormals
    0x007FFFFF: 0x0080, 0x807F0000: 0x807F, 0x00400000: 0x0040,
}  # fmt: skip
NAN_BITS = (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001)


def pool_of(bits: list[int]) -> memoryview:
    return memoryview(bytearray(struct.pack(f"<{len(bits)}I", *bits)))


def test_values_are_rounded_to_the_nearest() -> None:
    state = NarrowState(pool_of(list(ROUNDED)))
    assert state.nbytes == 2 * len(ROUNDED)
    assert list(struct.unpack(f"<{len(ROUNDED)}H", state[0 : state.nbytes])) == list(ROUNDED.values())


def test_nan_stays_nan_on_the_whole_way() -> None:
    state = NarrowState(pool_of(list(NAN_BITS)))
    target = pool_of([0] * len(NAN_BITS))
    NarrowState(target)[0 : state.nbytes] = state[0 : state.nbytes]
    assert all(math.isnan(value) for value in struct.unpack(f"<{len(NAN_BITS)}f", target))


def test_every_bfloat16_comes_back_as_it_is() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    target = memoryview(bytearray(4 << 16))
    state = NarrowState(target)
    state[0 : state.nbytes] = every.tobytes()
    wide = np.frombuffer(target, np.uint32)
    is_nan = (every & 0x7FFF) > 0x7F80
    assert (wide[~is_nan] == every[~is_nan].astype(np.uint32) << 16).all()
    assert np.isnan(wide[is_nan].view(np.float32)).all()
    again = np.frombuffer(state[0 : state.nbytes], np.uint16)
    assert (again[~is_nan] == every[~is_nan]).all()


def test_random_values_are_within_half_a_place() -> None:
    values = np.random.default_rng(7).standard_normal(4096).astype(np.float32)
    target = memoryview(bytearray(values.nbytes))
    NarrowState(target)[0 : values.nbytes // 2] = NarrowState(values.data.cast("B"))[0 : values.nbytes // 2]
    error = np.abs(np.frombuffer(target, np.float32) - values) / np.abs(values)
    assert 2**-10 < error.max() <= 2**-8


def test_an_element_is_never_cut() -> None:
    state = NarrowState(pool_of([0, 0]))
    for span in (slice(1, 4), slice(0, 3)):
        with pytest.raises(TransferError, match="cut an element"):
            _ = state[span]
        with pytest.raises(TransferError, match="cut an element"):
            state[span] = bytes(span.stop - span.start)


def manifest(spec: object = NARROW) -> StateManifest:
    assert isinstance(spec, type(SPEC))
    return build_manifest(spec, request_id="q", attempt=1, num_tokens=NUM_TOKENS)


def hand_off(frame_bytes: int) -> tuple[FakeCache, FakeCache, int]:
    source, target = FakeCache(NARROW), FakeCache(NARROW)
    random = np.random.default_rng(3)
    for layer in SPEC.kda_layers:
        view = source.state_bytes(layer, 2)
        view[:] = random.standard_normal(view.nbytes // 4).astype(np.float32).tobytes()
        view = source.conv_bytes(layer, 2)
        view[:] = random.bytes(view.nbytes)
    outbox = Outbox(manifest(), source, slot=2, block_table=TABLE, frame_bytes=frame_bytes)
    for layer in range(len(SPEC.kda_layers) + len(SPEC.mla_layers)):
        outbox.add_layer(layer, 0, NUM_TOKENS)
    outbox.add_logits()
    assert outbox.is_complete
    landing = Landing(manifest(), target, slot=1, block_table=(6, 2))
    landing.accept_manifest(manifest())
    while frames := outbox.frames(landing.next_sequence):
        for frame in frames:
            landing.accept(frame)
    landing.finish(outbox.num_frames)
    return source, target, landing.landed_bytes


@pytest.mark.parametrize("frame_bytes", [101, 102, 103, 1 << 16])
def test_a_hand_off_rounds_states_and_nothing_else(frame_bytes: int) -> None:
    source, target, num_bytes = hand_off(frame_bytes)
    for layer in SPEC.kda_layers:
        sent = torch.frombuffer(bytearray(source.state_bytes(layer, 2)), dtype=torch.float32)
        landed = torch.frombuffer(bytearray(target.state_bytes(layer, 1)), dtype=torch.float32)
        assert torch.equal(landed, sent.bfloat16().float())
        assert not torch.equal(landed, sent)
        assert bytes(target.conv_bytes(layer, 1)) == bytes(source.conv_bytes(layer, 2))
    states = sum(spec.nbytes for spec in manifest(SPEC).tensors if spec.kind is TensorKind.KDA_STATE)
    assert num_bytes == manifest(SPEC).total_bytes - states // 2


def test_both_ends_must_agree() -> None:
    assert wire_layout(NARROW) != wire_layout(SPEC)
    landing = Landing(manifest(SPEC), FakeCache(SPEC), slot=1, block_table=TABLE)
    with pytest.raises(Incompatible) as refused:
        landing.accept_manifest(manifest())
    assert refused.value.reason == "MANIFEST_MISMATCH"
