"""Hostile bytes to both ends of a state port, cut anywhere, while they send, read and lose their connection.

Nothing but an error of ours comes out, what is kept is bounded, and nobody waits for what cannot come.
"""

import asyncio
from collections.abc import Iterator
from functools import cache
from typing import Any

import hpack
import pytest
from hyperframe.frame import GoAwayFrame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3svc.errors import K3svcError
from k3svc.rpc.http2 import HEADER_BYTES
from tests.unit.rpc.wire import OK, REQUEST, Client, End, Server, data, headers, message, more, raw, take

SHORT = settings(max_examples=150, suppress_health_check=list(HealthCheck))
MOST_KEPT = 1 << 20
"""Bytes that an end may keep that nobody reads; a good deal more than MOST_ANSWERS of them and a message are."""

STREAM = st.sampled_from([0, 1, 1, 1, 2, 3, 5, 7, 2**31 - 1])
BODY = st.one_of(st.binary(max_size=40), st.integers(0, 20_000).map(bytes))
UINT32 = st.one_of(
    st.sampled_from([0, 1, 5, 22, 16_384, 65_535, 2**31 - 1, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1)
)
TICKETS = st.sampled_from([b"t" * 16, b"u" * 16, b"short", b""]).map(
    lambda ticket: b"\x0a" + bytes([len(ticket)]) + ticket
)
FIELDS = st.one_of(
    st.sampled_from([REQUEST, OK, [("grpc-status", "0")], [("grpc-status", "14"), ("grpc-message", "%ff")]]),
    st.lists(
        st.tuples(st.sampled_from([":path", ":status", "grpc-status", "a-bin", "a"]), st.text(max_size=9)), max_size=4
    ),
)
BLOCK = st.one_of(FIELDS.map(lambda fields: hpack.Encoder().encode(fields)), st.binary(max_size=40))
SETTINGS = st.dictionaries(st.sampled_from([1, 2, 3, 4, 5, 6, 99]), UINT32, max_size=3)
END = st.sampled_from([(), ("END_HEADERS",), ("END_HEADERS",), ("END_HEADERS", "END_STREAM")])

FRAMES = st.one_of(
    st.builds(lambda stream, body, last: data(body, max(1, stream), is_last=last), STREAM, BODY, st.booleans()),
    st.builds(lambda stream, body: data(message(body), max(1, stream)), STREAM, st.one_of(BODY, TICKETS)),
    st.builds(lambda stream, block, flags: headers(block, max(1, stream), *flags), STREAM, BLOCK, END),
    st.builds(lambda stream, block, flags: more(block, max(1, stream), *flags[:1]), STREAM, BLOCK, END),
    SETTINGS.map(lambda values: SettingsFrame(settings=values).serialize()),
    st.builds(lambda stream, size: WindowUpdateFrame(stream, window_increment=size).serialize(), STREAM, UINT32),
    st.integers(1, 300).map(lambda count: PingFrame(opaque_data=b"12345678").serialize() * count),
    STREAM.map(lambda stream: RstStreamFrame(max(1, stream)).serialize()),
    STREAM.map(lambda stream: GoAwayFrame(last_stream_id=stream).serialize()),
    st.builds(raw, st.integers(0, 255), STREAM, st.binary(max_size=20), st.integers(0, 255)),
    st.binary(max_size=60),
)
CUTS = st.lists(st.one_of(st.just(1 << 20), st.integers(1, 30)), min_size=1, max_size=8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("frames"), FRAMES, CUTS),
        st.tuples(st.just("frames"), FRAMES, CUTS),
        st.tuples(st.just("mutated"), st.tuples(FRAMES, st.integers(0, 1 << 16), st.integers(0, 255)), CUTS),
        st.tuples(st.sampled_from(["take", "send", "end", "carried", "read", "go on"]), st.none(), st.none()),
        st.tuples(st.sampled_from(["reads", "reads not", "end of stream", "lose", "close"]), st.none(), st.none()),
    ),
    max_size=25,
)


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    yield
    loop().close()
    loop.cache_clear()


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def deliver(here: End, sent: bytes, cuts: list[int]) -> None:
    left, turn = memoryview(sent), 0
    while left and not here.wire.is_closing() and not here.wire.is_paused:
        room = here.end.get_buffer(-1)
        size = min(len(room), len(left), cuts[turn % len(cuts)])
        assert size > 0
        room[:size] = left[:size]
        left, turn = left[size:], turn + 1
        here.end.buffer_updated(size)
        kept = len(here.wire.unsent) + len(here.end._spare) + sum(map(len, here.end._block))
        assert kept + (len(here.end._message) if here.end._message is not None else 0) < MOST_KEPT + HEADER_BYTES


async def act(here: End, kind: str, waiting: set["asyncio.Task[Any]"]) -> None:
    if isinstance(here, Server):
        if kind == "take" and here.waiting:
            here.waiting.popitem()[1].taken()
        elif kind == "send" and here.end._is_carrying:
            waiting.add(asyncio.ensure_future(here.end.send([b"head", memoryview(bytes(70_000))])))
        elif kind == "end" and here.end._is_carrying and not waiting:
            here.end.end()
        elif kind == "carried" and here.end._is_carrying:
            with here.end.carrying():
                pass
    elif kind == "read" and here.end._messages:
        await take(here)
    elif kind == "read" and not any(not task.done() for task in waiting):
        waiting.add(asyncio.ensure_future(here.end.read()))
    elif kind == "go on":
        here.end.go_on()
    if kind == "close":
        here.end.close()
    elif kind == "reads":
        here.wire.read_all()
    elif kind == "reads not":
        here.wire.is_read = False
    elif kind == "end of stream" and not here.wire.is_closing():
        here.wire.end_of_stream()
    elif kind == "lose":
        here.wire.lose()
    await asyncio.sleep(0)


async def attack(here: End, steps: list[tuple[str, Any, Any]], *, begins_well: bool) -> None:
    waiting: set[asyncio.Task[Any]] = set()
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    if begins_well:
        deliver(here, here.begin() + (here.call() if isinstance(here, Server) else b""), [1 << 20])
    for kind, value, cuts in steps:
        if kind == "frames":
            deliver(here, value, cuts)
        elif kind == "mutated":
            frame, at, byte = value
            deliver(here, frame[: at % (len(frame) + 1)] + bytes([byte]) + frame[at % (len(frame) + 1) + 1 :], cuts)
        else:
            await act(here, kind, waiting)
    here.wire.lose()
    for _ in range(5):
        await asyncio.sleep(0)
    for task in waiting:
        assert task.done(), "it waits for what cannot come"
        assert isinstance(task.exception(), K3svcError | None)
    assert here.end.stream == 0
    assert not failures
    if isinstance(here, Server):
        assert not here.waiting
        assert not here.connections
        assert here.end._patience is None
    else:
        while here.end._messages:
            await here.end.read()
        assert await here.end.read() is None
        assert here.end.is_over


@SHORT
@given(STEPS, st.booleans())
def test_no_bytes_break_a_state_port(steps: list[tuple[str, Any, Any]], begins_well: bool):
    async def work() -> None:
        await attack(Server(), steps, begins_well=begins_well)

    loop().run_until_complete(work())


@SHORT
@given(STEPS, st.booleans())
def test_no_bytes_break_a_reader(steps: list[tuple[str, Any, Any]], begins_well: bool):
    async def work() -> None:
        await attack(Client(), steps, begins_well=begins_well)

    loop().run_until_complete(work())


TARGETS = {"state_port": test_no_bytes_break_a_state_port, "state_reader": test_no_bytes_break_a_reader}
