"""Hostile manifests and frames: nothing but the memory of the hand-off is written, nothing wrong is accepted."""

import dataclasses
from functools import cache
from typing import Any

from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3svc.engine.ports import HandoffEvent
from k3svc.errors import Incompatible, TransferError
from k3svc.rpc.frames import decode_event, encode_event
from k3svc.testing.fakes import FakeCache, fake_spec
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import Frame, PrefillDone, StateManifest, build_manifest
from k3svc.transfer.outbox import Outbox
from k3svc.v1 import prefill_service_pb2 as pb

SHORT = settings(max_examples=60, suppress_health_check=list(HealthCheck))
NUM_TOKENS = 21
SLOT, PAGES = 3, (5, 2)
SPEC = fake_spec(num_slots=4, num_pages=6)
UINT64 = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 8), st.sampled_from([2**31, 2**32 - 1, 2**63, 2**64 - 1]))


def _manifest(attempt: int = 1) -> StateManifest:
    return build_manifest(SPEC, request_id="r", attempt=attempt, num_tokens=NUM_TOKENS)


@cache
def _good_messages() -> tuple[bytes, ...]:
    """A whole hand-off as it goes over the wire."""
    cache = FakeCache(SPEC)
    for number, view in enumerate(_views(cache, SLOT, PAGES)):
        view[:] = bytes((number + i) % 251 for i in range(view.nbytes))
    outbox = Outbox(_manifest(), cache, slot=SLOT, block_table=PAGES, frame_bytes=256)
    for start, end in ((0, 16), (16, NUM_TOKENS)):
        for layer in (0, 1, 2, 3):
            outbox.add_layer(layer, start, end)
    outbox.add_logits()
    frames: list[Frame] = []
    while more := outbox.frames(len(frames)):
        frames += more
    done = PrefillDone(
        num_frames=len(frames), queue_ms=0.0, compute_ms=1.0, send_tail_ms=0.0, chunks=2, cached_tokens=0
    )
    events: list[HandoffEvent] = [_manifest(), *([frame] for frame in frames), done]
    return tuple(encode_event(event) for event in events)


def _views(cache: FakeCache, slot: int, pages: tuple[int, ...]) -> list[memoryview]:
    views = [
        view for layer in SPEC.kda_layers for view in (cache.state_bytes(layer, slot), cache.conv_bytes(layer, slot))
    ]
    views += [cache.rows_bytes(layer, page) for layer in SPEC.mla_layers for page in pages]
    return [*views, cache.logits_bytes(slot)]


def _others(cache: FakeCache) -> list[memoryview]:
    """Memory of everybody else."""
    pages = tuple(page for page in range(SPEC.num_pages + 1) if page not in PAGES)
    views = [cache.rows_bytes(layer, page) for layer in SPEC.mla_layers for page in pages]
    for slot in range(SPEC.num_slots + 1):
        if slot != SLOT:
            views += _views(cache, slot, ())
    return views


def _land(messages: list[bytes]) -> tuple[FakeCache, bool]:
    """What a decode service does with a stream; whether it took the hand-off for complete."""
    cache = FakeCache(SPEC)
    landing = Landing(_manifest(), cache, slot=SLOT, block_table=PAGES)
    try:
        for message in messages:
            event = decode_event(message)
            if isinstance(event, StateManifest):
                landing.accept_manifest(event)
            elif isinstance(event, PrefillDone):
                landing.finish(event.num_frames)
                return cache, True
            else:
                for frame in event:
                    landing.accept(frame)
    except (TransferError, Incompatible):
        pass
    return cache, False


@cache
def _whole() -> tuple[bytes, ...]:
    cache, complete = _land(list(_good_messages()))
    assert complete
    return tuple(bytes(view) for view in _views(cache, SLOT, PAGES))


def _check(messages: list[bytes]) -> None:
    cache, complete = _land(messages)
    assert all(bytes(view) == b"\xff" * view.nbytes for view in _others(cache))
    if complete:
        assert tuple(bytes(view) for view in _views(cache, SLOT, PAGES)) == _whole()


@st.composite
def damaged_streams(draw: st.DrawFn) -> list[bytes]:
    messages = list(_good_messages())
    for _ in range(draw(st.integers(0, 3))):
        if not messages:
            break
        index = draw(st.integers(0, len(messages) - 1))
        kind = draw(st.sampled_from(["drop", "double", "move", "cut", "flip", "join", "field", "noise", "end"]))
        message = messages[index]
        if kind == "drop":
            del messages[index]
        elif kind == "double":
            messages.insert(draw(st.integers(0, len(messages))), message)
        elif kind == "move":
            messages.insert(draw(st.integers(0, len(messages) - 1)), messages.pop(index))
        elif kind == "cut":
            messages[index] = message[: draw(st.integers(0, len(message)))]
        elif kind == "flip":
            position = draw(st.integers(0, max(0, len(message) - 1)))
            changed = bytearray(message or b"\0")
            changed[position] ^= 1 << draw(st.integers(0, 7))
            messages[index] = bytes(changed)
        elif kind == "join":
            messages[index] = message + messages[draw(st.integers(0, len(messages) - 1))]
        elif kind == "field":
            messages[index] = _with_changed_field(draw, message)
        elif kind == "noise":
            messages[index] = draw(st.binary(max_size=60))
        else:
            messages = messages[:index]
    return messages


def _with_changed_field(draw: st.DrawFn, message: bytes) -> bytes:
    """A frame whose checksum is right and whose place is not."""
    try:
        event = decode_event(message)
    except TransferError:
        return message
    if isinstance(event, StateManifest | PrefillDone) or not event:
        return message
    data = bytes(event[0].data)
    kind = draw(st.sampled_from(["sequence", "tensor", "offset", "empty", "longer"]))
    values: dict[str, Any] = {"data": memoryview(data)}
    if kind in {"sequence", "offset"}:
        values[kind] = draw(UINT64)
    elif kind == "tensor":
        values[kind] = draw(st.integers(0, 2**32 - 1))
    else:
        data = b"" if kind == "empty" else data + draw(st.binary(min_size=1, max_size=600))
        values = {"data": memoryview(data), "crc32c": crc32c(data)}
    return encode_event([dataclasses.replace(event[0], **values)])


@SHORT
@given(damaged_streams())
def test_a_damaged_stream_is_refused(messages: list[bytes]):
    _check(messages)


@SHORT
@given(st.lists(st.one_of(st.binary(max_size=200), st.sampled_from(range(12))), max_size=20))
def test_noise_is_refused(pieces: list[bytes | int]):
    good = _good_messages()
    _check([piece if isinstance(piece, bytes) else good[piece % len(good)] for piece in pieces])


@st.composite
def manifests(draw: st.DrawFn) -> pb.StateManifest:
    message = pb.PrefillResponse.FromString(_good_messages()[0]).manifest
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["id", "attempt", "tokens", "total", "drop", "swap", "many", "tensor", "shape"]))
        if kind == "id":
            message.request_id = draw(st.text(max_size=5).map(lambda text: text.encode("utf-8", "replace").decode()))
        elif kind == "attempt":
            message.attempt = draw(st.integers(0, 2**32 - 1))
        elif kind == "tokens":
            message.num_tokens = draw(UINT64)
        elif kind == "total":
            message.total_bytes = draw(UINT64)
        elif kind == "many":
            message.tensors.extend([message.tensors[0]] * draw(st.integers(1, 3000)) if message.tensors else [])
        elif message.tensors:
            index = draw(st.integers(0, len(message.tensors) - 1))
            tensor = message.tensors[index]
            if kind == "drop":
                del message.tensors[index]
            elif kind == "swap":
                tensors = [*message.tensors[index:], *message.tensors[:index]]
                del message.tensors[:]
                message.tensors.extend(tensors)
            elif kind == "tensor":
                tensor.kind = draw(st.integers(-1, 5))  # type: ignore[assignment]
                tensor.layer = draw(st.integers(0, 2**32 - 1))
                tensor.dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", "", "x" * 1000]))
            else:
                del tensor.shape[:]
                tensor.shape.extend(draw(st.lists(UINT64, max_size=10)))
    return message


@SHORT
@given(manifests(), st.booleans())
def test_a_manifest_that_differs_is_refused(message: pb.StateManifest, adds_up: bool):
    if adds_up:
        sizes = {"float32": 4, "bfloat16": 2}
        total = 0
        for tensor in message.tensors:
            product = sizes.get(tensor.dtype, 0)
            for size in tensor.shape:
                product *= size
            total += product
        message.total_bytes = total & (2**64 - 1)
    encoded = pb.PrefillResponse(manifest=message).SerializeToString()
    _check([encoded, *_good_messages()[1:]])


TARGETS = {
    "frames": test_a_damaged_stream_is_refused,
    "wire": test_noise_is_refused,
    "manifest": test_a_manifest_that_differs_is_refused,
}
