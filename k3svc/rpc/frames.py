"""k3svc.v1.PrefillResponse on the wire, written and read by hand so that a payload is copied once, not three times.

`encode_event` gives the bytes that protobuf would give; `decode_event` reads what protobuf would read, frame data as
views into the message. Both sides of the stream use identity serialisers. Manifest and done are small and go through
protobuf. A received message is untrusted: every error is a TransferError, and what it costs is bounded by its length.
Checksums are those of the frames; they are computed and compared where the bytes lie, in k3svc.transfer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from k3svc.engine.ports import HandoffEvent
from k3svc.errors import TransferError
from k3svc.rpc import codec
from k3svc.rpc.shm_ring import RingReader
from k3svc.transfer.manifest import Frame, PrefillDone, StateManifest
from k3svc.v1 import prefill_service_pb2

MAX_FIELDS = 1 << 16
"""Most fields of one message, so most frames too: a frame costs a few hundred bytes beside its data, and a peer must
not be able to multiply them."""
MAX_CONTROL_BYTES = 1 << 20
"""Largest manifest; that of a model with 1000 layers takes 60 KB."""

_VARINT, _FIXED64, _LENGTH, _GROUP, _GROUP_END, _FIXED32 = range(6)
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_DEPTH = 100

# A tag is field number << 3 | wire type.
_MANIFEST, _FRAMES, _DONE = 0x0A, 0x12, 0x1A
_FRAME = 0x0A
_SEQUENCE, _TENSOR, _OFFSET, _CRC32C, _DATA, _SHM_BYTES, _SHM_POSITION = 0x08, 0x10, 0x18, 0x25, 0x2A, 0x30, 0x38


@dataclass(kw_only=True)
class StateRoute:
    """What a manifest says of the state port."""

    port: int = 0
    """Of the service; 0: it has none."""
    is_taken: bool = False
    """What follows comes that way."""


def encode_event(event: HandoffEvent, *, uses_shm: bool = False, route: StateRoute | None = None) -> bytes:
    """One message of the stream. Frame data must be contiguous; it is copied before the call returns. `uses_shm`: the
    other side has offered a ring, which frames with a position lie in. `route`: what the manifest says of it.
    """
    if isinstance(event, StateManifest):
        told = route or StateRoute()
        manifest = codec.manifest_to_pb(event, uses_shm=uses_shm, state_port=told.port, uses_read=told.is_taken)
        return _control(manifest=manifest)
    return b"".join(event_pieces(event))


def event_pieces(event: Sequence[Frame] | PrefillDone) -> list[bytes | memoryview]:
    """A message of the stream in pieces, of which those with frame data are the frames' own memory."""
    if isinstance(event, PrefillDone):
        return [_control(done=codec.done_to_pb(event))]
    return _frames_pieces(event)


def decode_event(
    message: bytes | memoryview, ring: RingReader | None = None, route: StateRoute | None = None
) -> HandoffEvent:
    """Raises TransferError for anything but one well-formed event. `ring`: the one that was made for the call. `route`
    is told what a manifest says of it.
    """
    try:
        tag, start, end = _only_event(message)
        if tag == _FRAMES:
            return _decode_frames(message, start, end, ring)
        if end - start > MAX_CONTROL_BYTES:
            raise _malformed(f"a control message of {end - start} bytes")
        body = bytes(message[start:end])
        if tag == _MANIFEST:
            manifest = prefill_service_pb2.StateManifest.FromString(body)
            if ring is not None:
                ring.is_shared = manifest.uses_shm
            if route is not None:
                route.port, route.is_taken = manifest.state_port, manifest.uses_read
            return codec.manifest_from_pb(manifest)
        return codec.done_from_pb(prefill_service_pb2.PrefillDone.FromString(body))
    except DecodeError as error:
        raise _malformed(str(error)) from error


def _only_event(message: bytes | memoryview) -> tuple[int, int, int]:
    event: tuple[int, int, int] | None = None
    for field in _fields(message, 0, len(message)):
        if field[0] in (_MANIFEST, _FRAMES, _DONE):
            if event is not None:
                raise _malformed("more than one event")
            event = field
    if event is None:
        raise _malformed("no event")
    return event


def _control(**event: Message) -> bytes:
    return prefill_service_pb2.PrefillResponse(**event).SerializeToString()  # type: ignore[arg-type]


def _frames_pieces(frames: Sequence[Frame]) -> list[bytes | memoryview]:
    assert len(frames) <= MAX_FIELDS
    pieces: list[bytes | memoryview] = [b""]
    total = 0
    for frame in frames:
        header = _frame_header(frame)
        size = frame.data.nbytes if frame.position is None else 0
        prefix = bytes([_FRAME]) + _varint(len(header) + size) + header
        pieces += (prefix, frame.data) if size else (prefix,)
        total += len(prefix) + size
    pieces[0] = bytes([_FRAMES]) + _varint(total)
    return pieces


def _frame_header(frame: Frame) -> bytes:
    """All of a StateFrame but the bytes of `data`. Zero fields are left out, as proto3 does."""
    header = bytearray()
    for tag, value in ((_SEQUENCE, frame.sequence), (_TENSOR, frame.tensor), (_OFFSET, frame.offset)):
        if value:
            header.append(tag)
            header += _varint(value)
    if frame.crc32c:
        header.append(_CRC32C)
        header += frame.crc32c.to_bytes(4, "little")
    if frame.position is not None:
        header.append(_SHM_BYTES)
        header += _varint(frame.data.nbytes)
        header.append(_SHM_POSITION)
        header += _varint(frame.position)
    elif frame.data.nbytes:
        header.append(_DATA)
        header += _varint(frame.data.nbytes)
    return bytes(header)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _decode_frames(message: bytes | memoryview, start: int, end: int, ring: RingReader | None) -> list[Frame]:
    view = memoryview(message)
    frames: list[Frame] = []
    for tag, frame_start, frame_end in _fields(message, start, end):
        if tag == _FRAME:
            frames.append(_decode_frame(view, message, frame_start, frame_end, ring))
    return frames


def _decode_frame(
    view: memoryview, message: bytes | memoryview, start: int, end: int, ring: RingReader | None
) -> Frame:
    sequence = tensor = offset = crc32c = shm_bytes = shm_position = 0
    data = view[:0]
    for tag, first, last in _fields(message, start, end):
        if tag == _DATA:
            data = view[first:last]
        elif tag == _SEQUENCE:
            sequence = first
        elif tag == _TENSOR:
            tensor = first & 0xFFFFFFFF
        elif tag == _OFFSET:
            offset = first
        elif tag == _CRC32C:
            crc32c = int.from_bytes(view[first:last], "little")
        elif tag == _SHM_BYTES:
            shm_bytes = first
        elif tag == _SHM_POSITION:
            shm_position = first
    position = None
    if shm_bytes:
        if ring is None or data.nbytes:
            raise _malformed("a frame in shared memory that was not offered, or with data beside it")
        data, position = ring.span(shm_position, shm_bytes), shm_position
    return Frame(sequence=sequence, tensor=tensor, offset=offset, crc32c=crc32c, data=data, position=position)


def _fields(message: bytes | memoryview, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of the message in [position, end): (tag, first byte or the value of a varint, end of the field).

    Groups, which no message of ours has, are checked and left out. A field of an unexpected wire type has another tag
    and so counts as unknown, as it does for protobuf.
    """
    groups: list[int] = []
    count = 0
    while position < end:
        count += 1
        if count > MAX_FIELDS:
            raise _malformed(f"more than {MAX_FIELDS} fields in one message")
        tag, position = _read_varint(message, position, end, limit=5)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise _malformed(f"field number {number}")
        if kind == _GROUP:
            groups.append(number)
            if len(groups) > _MAX_DEPTH:
                raise _malformed(f"groups nested deeper than {_MAX_DEPTH}")
        elif kind == _GROUP_END:
            if not groups or groups.pop() != number:
                raise _malformed(f"the end of a group {number} that is not open")
        else:
            first, position = _read_value(message, kind, position, end)
            if not groups:
                yield tag, first, position
    if groups:
        raise _malformed("a group without an end")


def _read_value(message: bytes | memoryview, kind: int, position: int, end: int) -> tuple[int, int]:
    """First byte of the value, or the value of a varint, and the position after it."""
    if kind == _VARINT:
        return _read_varint(message, position, end, limit=10)
    if kind == _LENGTH:
        size, position = _read_varint(message, position, end, limit=5)
    elif kind in _FIXED_BYTES:
        size = _FIXED_BYTES[kind]
    else:
        raise _malformed(f"wire type {kind}")
    if size > end - position:
        raise _malformed(f"a field of {size} bytes where {end - position} are left")
    return position, position + size


def _read_varint(message: bytes | memoryview, position: int, end: int, *, limit: int) -> tuple[int, int]:
    """Value, modulo 2^64, and the position after it. At most `limit` bytes."""
    value = shift = 0
    for index in range(position, min(position + limit, end)):
        byte = message[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, index + 1
        shift += 7
    raise _malformed(f"a number that does not end at byte {position}")


def _malformed(what: str) -> TransferError:
    return TransferError(f"malformed PrefillResponse: {what}", reason="HANDOFF_MALFORMED")
