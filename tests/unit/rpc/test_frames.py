"""The hand-written wire format against protobuf, in both directions, and against hostile bytes."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from k3svc.errors import TransferError
from k3svc.rpc.frames import MAX_CONTROL_BYTES, MAX_FIELDS, decode_event, encode_event
from k3svc.transfer.manifest import Frame, PrefillDone, StateManifest, TensorKind, TensorSpec
from k3svc.v1 import prefill_service_pb2 as pb

MANIFEST = StateManifest(
    request_id="r-1",
    attempt=3,
    num_tokens=65,
    tensors=(
        TensorSpec(kind=TensorKind.KDA_STATE, layer=0, dtype="float32", shape=(2, 3, 5)),
        TensorSpec(kind=TensorKind.MLA_ROWS, layer=7, dtype="bfloat16", shape=(65, 40)),
        TensorSpec(kind=TensorKind.LOGITS, layer=0, dtype="float32", shape=(100,)),
    ),
)
DONE = PrefillDone(num_frames=4, queue_ms=1.5, compute_ms=20.25, send_tail_ms=0.5, chunks=2, cached_tokens=0)

FRAMES = st.lists(
    st.builds(
        lambda sequence, tensor, offset, crc32c, data: Frame(
            sequence=sequence, tensor=tensor, offset=offset, crc32c=crc32c, data=memoryview(data)
        ),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=300),
    ),
    max_size=5,
)


def to_pb(frames: Sequence[Frame]) -> pb.PrefillResponse:
    return pb.PrefillResponse(
        frames=pb.StateFrames(
            frames=[
                pb.StateFrame(
                    sequence=f.sequence, tensor=f.tensor, offset=f.offset, crc32c=f.crc32c, data=bytes(f.data)
                )
                for f in frames
            ]
        )
    )


def decode_frames(message: bytes) -> Sequence[Frame]:
    frames = decode_event(message)
    assert isinstance(frames, list)
    return frames


def one_frame(**changes: Any) -> bytes:
    values = {"sequence": 300, "tensor": 2, "offset": 70000, "crc32c": 0xDEADBEEF, "data": b"abcdef" * 40}
    return pb.PrefillResponse(
        frames=pb.StateFrames(frames=[pb.StateFrame(**{**values, **changes})])
    ).SerializeToString()


@given(FRAMES)
def test_frames_encode_to_the_bytes_of_protobuf(frames: list[Frame]):
    assert encode_event(frames) == to_pb(frames).SerializeToString()


@given(FRAMES)
def test_frames_of_protobuf_decode(frames: list[Frame]):
    assert decode_event(to_pb(frames).SerializeToString()) == frames


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 2**21 - 1, 2**21])
def test_every_length_of_a_length(size: int):
    frame = Frame(sequence=0, tensor=0, offset=0, crc32c=0, data=memoryview(bytes(size)))
    message = encode_event([frame])
    assert message == to_pb([frame]).SerializeToString()
    assert decode_event(message) == [frame]


def test_manifest_and_done_go_both_ways():
    manifest = pb.PrefillResponse.FromString(encode_event(MANIFEST)).manifest
    assert [(t.kind, t.layer, t.dtype, list(t.shape)) for t in manifest.tensors] == [
        (1, 0, "float32", [2, 3, 5]),
        (3, 7, "bfloat16", [65, 40]),
        (4, 0, "float32", [100]),
    ]
    assert manifest.total_bytes == 2 * 3 * 5 * 4 + 65 * 40 * 2 + 400
    assert decode_event(encode_event(MANIFEST)) == MANIFEST
    assert pb.PrefillResponse.FromString(encode_event(DONE)).done.compute_ms == 20.25
    assert decode_event(encode_event(DONE)) == DONE


def test_data_of_any_element_type_is_its_bytes():
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    message = encode_event([Frame(sequence=1, tensor=0, offset=0, crc32c=9, data=rows[1:].data)])
    assert pb.PrefillResponse.FromString(message).frames.frames[0].data == rows[1:].tobytes()


def test_encoding_copies_the_payload_once():
    size = 8 << 20
    pool = bytearray(size)
    frames = [
        Frame(sequence=i, tensor=0, offset=i * size // 4, crc32c=1, data=memoryview(pool)[i * size // 4 :][: size // 4])
        for i in range(4)
    ]
    tracemalloc.start()
    message = encode_event(frames)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size <= len(message) <= size + 200
    assert peak < size + 10_000
    pool[:] = b"\xff" * size
    assert message.count(b"\xff" * 8) == 0


def test_decoding_copies_nothing():
    message = one_frame(data=bytes(8 << 20))
    tracemalloc.start()
    (frame,) = decode_frames(message)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert frame.data.obj is message
    assert frame.data.readonly
    assert peak < 10_000


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        (b"\x98\x06\x05", "an unknown varint"),
        (b"\x9a\x06\x02ab", "unknown bytes"),
        (b"\x9d\x06abcd", "an unknown fixed32"),
        (b"\x99\x06abcdefgh", "an unknown fixed64"),
        (b"\x9b\x06\x08\x01\x0b\x10\x02\x0c\x9c\x06", "unknown groups within each other"),
        (b"\x10\x05", "the event's number with another wire type"),
    ],
)
def test_unknown_fields_are_skipped(extra: bytes, what: str):
    expected = decode_event(one_frame())
    assert decode_event(extra + one_frame()) == expected, what
    assert decode_event(one_frame() + extra) == expected, what
    frame = pb.StateFrame(sequence=300, data=b"x").SerializeToString()
    inside = bytes([0x0A, len(frame) + len(extra)]) + frame + extra
    (decoded,) = decode_frames(bytes([0x12, len(inside)]) + inside)
    assert (decoded.sequence, bytes(decoded.data)) == (300, b"x")


@pytest.mark.parametrize(
    ("rest", "match"),
    [
        (b"\x98", "does not end"),
        (b"\x98\x06", "does not end"),
        (b"\x98\x06" + b"\xff" * 10 + b"\x01", "does not end"),
        (b"\xff" * 5 + b"\x01", "does not end"),
        (b"\x9a\x06", "does not end"),
        (b"\x9a\x06\xff\xff\xff\xff\x07", "a field of 2147483647 bytes where 0 are left"),
        (b"\x9a\x06\xff\xff\xff\xff\xff\xff\x01", "does not end"),
        (b"\x9a\x06\x03ab", "a field of 3 bytes where 2 are left"),
        (b"\x9d\x06abc", "a field of 4 bytes where 3 are left"),
        (b"\x99\x06abcdefg", "a field of 8 bytes where 7 are left"),
        (b"\x02\x00", "field number 0"),
        (b"\x9e\x06\x00", "wire type 6"),
        (b"\x9f\x06\x00", "wire type 7"),
        (b"\x9b\x06", "a group without an end"),
        (b"\x9c\x06", "the end of a group 99 that is not open"),
        (b"\x9b\x06\xa4\x06", "the end of a group 100 that is not open"),
        (b"\x9b\x06" * 101 + b"\x9c\x06" * 101, "nested deeper"),
    ],
)
def test_malformed_bytes_after_an_event(rest: bytes, match: str):
    message = one_frame() + rest
    with pytest.raises(DecodeError):
        pb.PrefillResponse.FromString(message)
    with pytest.raises(TransferError, match=match) as caught:
        decode_event(message)
    assert caught.value.reason == "HANDOFF_MALFORMED"


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (b"", "no event"),
        (b"\x98\x06\x05", "no event"),
        (b"\x12\x05\x0a", "a field of 5 bytes where 1 are left"),
        (b"\x12\x02\x0a\x7f", "a field of 127 bytes where 0 are left"),
        (b"\x12\x02\x0a\x06\x98\x06\x05\x98\x06\x05", "a field of 6 bytes where 0 are left"),
        (b"\x12\x03\x0a\x01\x08", "does not end"),
        (b"\x12\x0d\x0a\x0b\x08" + b"\xff" * 10, "does not end"),
        (b"\x12\x04\x0a\x02\x25\x00", "a field of 4 bytes where 1 are left"),
        (b"\x0a\x02\x0a\xff", "PrefillResponse"),
        (b"\x0a\x03\x0a\x01\xff", "PrefillResponse"),
        (b"\x1a\x02\x11\x00", "PrefillResponse"),
    ],
)
def test_malformed_events(message: bytes, match: str):
    with pytest.raises(TransferError, match=match) as caught:
        decode_event(message)
    assert caught.value.reason == "HANDOFF_MALFORMED"


def test_numbers_beyond_their_type_lose_their_high_bits():
    for field in (b"\x08", b"\x10", b"\x18"):
        for number in (b"\xff" * 9 + b"\x7f", b"\x80" * 9 + b"\x02", b"\xff\xff\xff\xff\x7f"):
            frame = field + number
            message = bytes([0x12, len(frame) + 2, 0x0A, len(frame)]) + frame
            (ours,), (expected,) = decode_frames(message), pb.PrefillResponse.FromString(message).frames.frames
            assert (ours.sequence, ours.tensor, ours.offset) == (expected.sequence, expected.tensor, expected.offset)


def test_several_events_in_a_message_are_refused():
    with pytest.raises(TransferError, match="more than one event"):
        decode_event(encode_event(DONE) + encode_event(MANIFEST))


def test_a_message_cannot_multiply_its_size_in_memory():
    frames = b"\x0a\x00" * (1 << 20)
    message = b"\x12" + bytes([0x80, 0x80, 0x80, 0x01]) + frames
    assert len(pb.PrefillResponse.FromString(message).frames.frames) == 1 << 20
    tracemalloc.start()
    with pytest.raises(TransferError, match=f"more than {MAX_FIELDS} fields"):
        decode_event(message)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400 * MAX_FIELDS
    with pytest.raises(TransferError, match="control message"):
        decode_event(
            pb.PrefillResponse(manifest=pb.StateManifest(request_id="x" * MAX_CONTROL_BYTES)).SerializeToString()
        )


@pytest.mark.parametrize(
    ("spec", "total_bytes", "match"),
    [
        (pb.TensorSpec(kind=9, dtype="float32", shape=[1]), 4, "kind 9"),  # type: ignore[arg-type]
        (pb.TensorSpec(kind=0, dtype="float32", shape=[1]), 4, "kind 0"),  # type: ignore[arg-type]
        (pb.TensorSpec(kind=1, dtype="int8", shape=[1]), 1, "int8"),  # type: ignore[arg-type]
        (pb.TensorSpec(kind=1, dtype="float32", shape=[2**63] * 9), 4, "9 dimensions"),  # type: ignore[arg-type]
        (pb.TensorSpec(kind=1, dtype="float32", shape=[3]), 13, "total_bytes says 13"),  # type: ignore[arg-type]
    ],
)
def test_manifests_that_make_no_sense_are_transfer_errors(spec: pb.TensorSpec, total_bytes: int, match: str):
    message = pb.PrefillResponse(manifest=pb.StateManifest(tensors=[spec], total_bytes=total_bytes))
    with pytest.raises(TransferError, match=match):
        decode_event(message.SerializeToString())


def agree_with_protobuf(message: bytes) -> None:
    """What protobuf refuses is refused; what is accepted is what protobuf reads."""
    try:
        event = decode_event(message)
    except TransferError:
        return
    expected = pb.PrefillResponse.FromString(message)
    if isinstance(event, StateManifest | PrefillDone):
        field = "manifest" if isinstance(event, StateManifest) else "done"
        known = getattr(expected, field)
        known.DiscardUnknownFields()
        assert encode_event(event) == pb.PrefillResponse(**{field: known}).SerializeToString()
    else:
        assert encode_event(event) == to_pb(event).SerializeToString()
        assert [(f.sequence, f.tensor, f.offset, f.crc32c, bytes(f.data)) for f in event] == [
            (f.sequence, f.tensor, f.offset, f.crc32c, f.data) for f in expected.frames.frames
        ]


BASES = st.sampled_from([one_frame(), encode_event(MANIFEST), encode_event(DONE), one_frame(data=b"", sequence=0)])


@settings(max_examples=400)
@given(BASES, st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=4), st.integers(0, 6)), max_size=4))
def test_mutated_messages_agree_with_protobuf(message: bytes, edits: list[tuple[int, bytes, int]]):
    for place, inserted, removed in edits:
        position = place % (len(message) + 1)
        message = message[:position] + inserted + message[position + removed :]
    agree_with_protobuf(message)


@settings(max_examples=400)
@given(
    st.lists(
        st.sampled_from([*b"\x08\x0a\x0b\x0c\x10\x12\x18\x1a\x25\x2a\x00\x01\x02\x03\x04\x7f\x80\xff"]), max_size=40
    )
)
def test_random_messages_agree_with_protobuf(message: list[int]):
    agree_with_protobuf(bytes(message))


def test_a_frame_in_shared_memory_is_what_protobuf_would_write():
    data = bytes(range(200))
    frame = Frame(sequence=3, tensor=1, offset=128, crc32c=7, data=memoryview(data), position=1 << 33)
    expected = pb.StateFrame(sequence=3, tensor=1, offset=128, crc32c=7, shm_bytes=200, shm_position=1 << 33)
    message = pb.PrefillResponse.FromString(encode_event([frame], uses_shm=True))
    assert list(message.frames.frames) == [expected]


@pytest.mark.parametrize("data", [b"", b"x"])
def test_a_frame_in_shared_memory_that_nobody_offered_is_malformed(data: bytes):
    frame = pb.StateFrame(data=data, shm_bytes=8, shm_position=0)
    message = pb.PrefillResponse(frames=pb.StateFrames(frames=[frame]))
    with pytest.raises(TransferError, match="not offered") as caught:
        decode_event(message.SerializeToString())
    assert caught.value.reason == "HANDOFF_MALFORMED"
