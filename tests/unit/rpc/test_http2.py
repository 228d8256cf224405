"""RFC 9113 from the receiving side of both ends of a state port: what is refused, what is bounded, what goes on."""

import asyncio
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import hpack
import pytest
from hpack.hpack import encode_integer
from hyperframe.frame import (
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from k3svc.errors import Unavailable
from k3svc.rpc import http2
from k3svc.rpc.http2 import DEFAULT_WINDOW, MAX_WINDOW, PREFACE
from tests.unit.rpc.wire import (
    ENDS,
    MAX_MESSAGE,
    OK,
    REQUEST,
    TICKET,
    Client,
    End,
    Server,
    answers,
    at_random,
    blame,
    by_byte,
    data,
    feed,
    frames,
    headers,
    message,
    more,
    of_kind,
    raw,
    resets,
    settings,
    whole,
)

PROTOCOL, FLOW, SIZE, COMPRESSION, CALM = 0x1, 0x3, 0x6, 0x9, 0xB
PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW = 0x2, 0x3, 0x4, 0x5, 0x6, 0x7, 0x8
CHUNKINGS = [whole, by_byte, *map(at_random, range(4))]


def table_update(size: int) -> bytes:
    update = encode_integer(size, 5)
    update[0] |= 0x20
    return bytes(update)


def literal(name: bytes, value: bytes, *, huffman: bool = False) -> bytes:
    bit = 0x80 if huffman else 0
    coded = encode_integer(len(value), 7)
    coded[0] |= bit
    return b"\x00" + bytes(encode_integer(len(name), 7)) + name + bytes(coded) + value


def bomb() -> bytes:
    """A field of 4,000 bytes, and then many times its number in the table."""
    first = encode_integer(4000, 7)
    return b"\x40\x01a" + bytes(first) + b"x" * 4000 + b"\xbe" * 200


ON_BOTH = {
    "a frame of another kind before settings": (PROTOCOL, None),
    "settings of a stream": (PROTOCOL, raw(SETTINGS, 1, b"")),
    "settings that are cut": (SIZE, raw(SETTINGS, 0, b"12345")),
    "settings that were taken, and more": (PROTOCOL, raw(SETTINGS, 0, b"123456", 1)),
    "a window that is too large": (FLOW, settings(INITIAL_WINDOW_SIZE=1 << 31)),
    "a frame size that is too small": (PROTOCOL, settings(MAX_FRAME_SIZE=(1 << 14) - 1)),
    "a frame size that is too large": (PROTOCOL, settings(MAX_FRAME_SIZE=1 << 24)),
    "a push setting that is neither": (PROTOCOL, settings(ENABLE_PUSH=2)),
    "a frame that is too large": (SIZE, raw(PING, 0, b"", size=16_385)),
    "an unknown frame that is too large": (SIZE, raw(0xEE, 0, b"", size=16_385)),
    "a ping of a stream": (PROTOCOL, raw(PING, 1, b"12345678")),
    "a ping that is too short": (SIZE, raw(PING, 0, b"1234567")),
    "a reset of nothing": (PROTOCOL, raw(RST, 0, b"1234")),
    "a reset of what nobody made": (PROTOCOL, raw(RST, 99, b"1234")),
    "a reset that is too long": (SIZE, raw(RST, 1, b"12345")),
    "a leave of a stream": (PROTOCOL, raw(GOAWAY, 1, b"\0" * 8)),
    "a leave that is cut": (SIZE, raw(GOAWAY, 0, b"\0" * 7)),
    "a window of nothing": (PROTOCOL, raw(WINDOW, 0, b"\0" * 4)),
    "a window of what nobody made": (PROTOCOL, raw(WINDOW, 99, b"\0\0\0\1")),
    "a window that is cut": (SIZE, raw(WINDOW, 0, b"\0\0\1")),
    "a connection's window beyond its bound": (FLOW, raw(WINDOW, 0, b"\x7f\xff\xff\xff")),
    "a call's window beyond its bound": (FLOW, raw(WINDOW, 1, b"\x7f\xff\xff\xff")),
    "windows that grow beyond their bound": (
        FLOW,
        raw(WINDOW, 1, (MAX_WINDOW - DEFAULT_WINDOW).to_bytes(4, "big")) + settings(INITIAL_WINDOW_SIZE=1 << 20),
    ),
    "a push": (PROTOCOL, raw(PUSH, 1, b"\0\0\0\2" + b"\x82", 4)),
    "a priority of nothing": (PROTOCOL, raw(PRIORITY, 0, b"12345")),
    "a priority that is cut": (SIZE, raw(PRIORITY, 1, b"1234")),
    "headers of nothing": (PROTOCOL, raw(0x1, 0, b"\x82", 4)),
    "headers that go on from nothing": (PROTOCOL, more(b"\x82")),
    "headers, and a ping among them": (PROTOCOL, headers(b"", 1) + PingFrame(opaque_data=b"12345678").serialize()),
    "headers, and data among them": (PROTOCOL, headers(b"", 1) + data(b"", 1)),
    "headers, and an unknown frame among them": (PROTOCOL, headers(b"", 1) + raw(0xEE, 0, b"")),
    "headers that go on elsewhere": (PROTOCOL, headers(b"", 1) + more(b"", 3)),
    "headers, and others among them": (PROTOCOL, headers(b"", 1) + headers(b"", 1)),
    "headers without an end": (CALM, headers(b"x" * 9000, 1) + more(b"x" * 9000)),
    "headers of many empty pieces": (CALM, headers(b"", 1) + more(b"") * 300),
    "headers whose padding is too long": (PROTOCOL, raw(0x1, 1, b"\xff\x82", 0xC)),
    "data of nothing": (PROTOCOL, raw(0x0, 0, b"1")),
    "data of what nobody made": (PROTOCOL, data(b"1", 99)),
    "data of the other side's own": (PROTOCOL, raw(0x0, 2, b"1")),
}

ON_SERVER = {
    "another preface": (PROTOCOL, None),
    "HTTP/1": (PROTOCOL, None),
    "data that is too large": (SIZE, raw(0x0, 1, b"", size=16_385)),
    "a call of an even number": (PROTOCOL, headers(b"\x82", 2, "END_HEADERS")),
    "a call that was made already": (PROTOCOL, headers(b"\x82", 1, "END_HEADERS")),
    "a call that ends within a message": (PROTOCOL, data(b"\0\0", 1, is_last=True)),
    "a compressed message": (PROTOCOL, data(message(b"a", flag=1))),
    "a message that is too large": (CALM, data(message(b"a" * 65))),
}

ON_CLIENT = {
    "a call of the server": (PROTOCOL, headers(b"\x88", 2, "END_HEADERS")),
    "headers of what nobody made": (PROTOCOL, headers(b"\x88", 3, "END_HEADERS")),
    "a call that ends within a message": (PROTOCOL, data(b"\0\0", 1, is_last=True)),
    "a status within a message": (PROTOCOL, data(b"\0\0", 1) + headers(b"\x88", 1, "END_HEADERS", "END_STREAM")),
    "a compressed message": (PROTOCOL, data(message(b"a", flag=1))),
    "a message of a flag that is none": (PROTOCOL, data(message(b"a", flag=2))),
    "a message that is too large": (CALM, data(b"\0" + (MAX_MESSAGE + 1).to_bytes(4, "big"))),
    "a message of 4 GiB": (CALM, data(b"\0\xff\xff\xff\xff")),
}

BLOCKS = {
    "an index of nothing": b"\x80",
    "an index beyond the tables": b"\xff\x7f",
    "a number without an end": b"\xff" + b"\xff" * 12,
    "a text that is cut": b"\x00\x05ab",
    "a text whose length is cut": b"\x00\xff",
    "text that is no UTF-8": literal(b"a", b"\xff\xfe"),
    "a name that is no UTF-8": literal(b"\xc3", b"a"),
    "a code of Huffman that ends within": literal(b"a", b"\x00\xff\xff\xff", huffman=True),
    "Huffman's end as a letter": literal(b"a", b"\xff\xff\xff\xff", huffman=True),
    "a larger table than there is": table_update(4097),
    "a table that changes within": literal(b"a", b"b") + table_update(0),
    "a bomb": bomb(),
    "a list that is too long": literal(b"a", b"") * 600,
}


def broken(make: Callable[[], End], name: str, bad: bytes | None) -> tuple[End, bytes]:
    """An end, and what breaks it."""
    here = make()
    if name == "another preface":
        return here, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r" + settings()
    if name == "HTTP/1":
        return here, b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"
    if bad is None:
        begin = PREFACE if isinstance(here, Server) else b""
        return here, begin + PingFrame(opaque_data=b"12345678").serialize()
    if isinstance(here, Client):
        return here, here.begin() + bad
    # Its request has not come in whole.
    return here, here.begin() + here.headers(REQUEST) + bad


CASES = [
    *((make, name, *case) for make in ENDS for name, case in ON_BOTH.items()),
    *((Server, name, *case) for name, case in ON_SERVER.items()),
    *((Client, name, *case) for name, case in ON_CLIENT.items()),
    *((Server, name, COMPRESSION, headers(block, 3, "END_HEADERS")) for name, block in BLOCKS.items()),
    *((Client, name, COMPRESSION, headers(block, 1, "END_HEADERS")) for name, block in BLOCKS.items()),
]


@pytest.mark.parametrize(
    ("make", "name", "code", "bad"), CASES, ids=[f"{make.__name__}: {name}" for make, name, _, _ in CASES]
)
async def test_who_breaks_the_protocol_is_told_how_and_left(
    make: Callable[[], End], name: str, code: int, bad: bytes | None
):
    said = set()
    for piece in CHUNKINGS:
        here, sent = broken(make, name, bad)
        await feed(here, sent + raw(PING, 0, b"12345678", 1), piece)
        assert blame(here) == code
        assert here.wire.has_ended
        assert here.end._ended is not None
        assert here.end.stream == 0
        left = of_kind(here.wire.sent, GoAwayFrame)[0]
        assert len(left.additional_data) < 1000
        with pytest.raises(Unavailable):
            await here.end.send([b"a"])
        if isinstance(here, Server):
            assert not here.connections
            assert not here.waiting
        else:
            assert await here.end.read() is None
            assert here.end.error is not None
            said.add(str(here.end.error))
            continue
        said.add(str(here.end._ended))
    assert len(said) == 1


def long_goodbye() -> bytes:
    return GoAwayFrame(last_stream_id=MAX_WINDOW, additional_data=b"why" * 100).serialize()


HARMLESS = {
    "an unknown frame": raw(0xEE, 1, b"x" * 100, 0xFF),
    "an unknown frame of a stream that nobody made": raw(0xEE, 77, b"", 0xFF),
    "a frame of alternative services": raw(0xA, 0, b"\xff"),
    "priority": raw(PRIORITY, 1, b"12345") + raw(PRIORITY, 77, b"12345"),
    "an unknown setting": raw(SETTINGS, 0, b"\xff\xff\0\0\0\1"),
    "an empty frame of settings": settings(),
    "settings that were taken": raw(SETTINGS, 0, b"", 1),
    "a ping's answer": raw(PING, 0, b"12345678", 1),
    "an empty frame of data": data(b""),
    "a window": raw(WINDOW, 0, b"\0\0\0\1") + raw(WINDOW, 1, b"\0\0\0\1"),
    "the reserved bit": raw(PRIORITY, 1 | 1 << 31, b"12345"),
    "leaving later": long_goodbye(),
}


@pytest.mark.parametrize("piece", CHUNKINGS)
@pytest.mark.parametrize("name", HARMLESS)
async def test_what_may_be_said_at_any_time_changes_nothing(name: str, piece: Callable[[int], int]):
    client = Client()
    await feed(client, client.begin() + HARMLESS[name] + data(message(b"a")) + HARMLESS[name], piece)
    assert client.messages == [b"a"]
    await feed(client, client.finish(), piece)
    assert await client.end.read() is None
    assert client.end.error is None
    assert not client.wire.has_ended
    server = Server()
    request = server.headers(REQUEST) + HARMLESS[name] + data(message(b"\x0a\x10" + TICKET)) + HARMLESS[name]
    await feed(server, server.begin() + request, piece)
    assert server.waiting == {TICKET: server.end}
    assert not server.wire.has_ended


async def test_pings_and_settings_are_answered():
    for make in ENDS:
        here = make()
        await feed(here, here.begin() + PingFrame(opaque_data=b"abcdefgh").serialize() + settings())
        assert [(f.opaque_data, set(f.flags)) for f in of_kind(here.wire.sent, PingFrame)] == [(b"abcdefgh", {"ACK"})]
        assert sum("ACK" in frame.flags for frame in of_kind(here.wire.sent, SettingsFrame)) == 2


@pytest.mark.parametrize("kind", ["padding", "priority", "both"])
async def test_headers_may_have_padding_and_priority(kind: str):
    flags = {"padding": 0x8, "priority": 0x20, "both": 0x28}[kind] | 0x4
    for make in ENDS:
        here = make()
        block = hpack.Encoder().encode(REQUEST if isinstance(here, Server) else OK)
        body = (b"\x07" if flags & 8 else b"") + (b"\0\0\0\0\x10" if flags & 0x20 else b"") + block
        body += b"\0" * 7 if flags & 8 else b""
        begin = here.begin() if isinstance(here, Server) else settings()
        await feed(here, begin + raw(0x1, 1, body, flags))
        assert not here.wire.has_ended
        if isinstance(here, Client):
            assert here.end.is_waiting


async def test_headers_in_many_pieces():
    for size in (1, 7):
        server = Server()
        block = hpack.Encoder().encode(REQUEST)
        pieces = [block[n : n + size] for n in range(0, len(block), size)]
        sent = headers(pieces[0]) + b"".join(map(more, pieces[1:-1])) + more(pieces[-1], 1, "END_HEADERS")
        await feed(server, server.begin() + sent + data(message(b"\x0a\x10" + TICKET), 1, is_last=True), by_byte)
        assert TICKET in server.waiting


BODIES = [[b""], [b"", b"", b""], [b"a"], [b"abc", b"", b"d" * 70_000, b"e"], [bytes([n]) * n for n in range(200)]]


@pytest.mark.parametrize("piece", CHUNKINGS)
@pytest.mark.parametrize("cut", [1, 5, 6, 1000, 16_384, 1 << 20])
async def test_messages_come_as_they_were_sent_however_they_are_cut(cut: int, piece: Callable[[int], int]):
    for bodies in [[body[:300] for body in bodies] for bodies in BODIES[:4]] if cut == 1 else BODIES:
        stream = b"".join(map(message, bodies))
        client = Client()
        sent = b"".join(data(stream[n : n + cut]) for n in range(0, len(stream), cut))
        await feed(client, client.begin() + sent + client.finish(), piece)
        assert client.messages == bodies
        assert await client.end.read() is None
        assert client.end.error is None
        client.end.go_on()
        assert client.end.stream == 3


async def test_what_comes_by_chance_is_read_the_same_by_every_chunking():
    source = random.Random(7)
    for _ in range(60):
        here: Any = Client() if source.random() < 0.7 else Server()
        sent = bytearray(here.begin() if isinstance(here, Client) else here.begin() + here.call())
        for _ in range(source.randrange(12)):
            sent += source.choice(
                [
                    data(message(source.randbytes(source.randrange(60)))),
                    data(message(b"abc")[: source.randrange(8)]),
                    settings(INITIAL_WINDOW_SIZE=source.randrange(1 << 20)),
                    PingFrame(opaque_data=source.randbytes(8)).serialize(),
                    raw(source.randrange(256), source.randrange(6), source.randbytes(source.randrange(20))),
                    raw(PRIORITY, 1, b"12345"),
                    data(b"", is_last=True),
                ]
            )
        seen = []
        for piece in CHUNKINGS:
            again: Any = type(here)()
            if isinstance(again, Server):
                again.call()
            await feed(again, bytes(sent), piece)
            error = again.end.error if isinstance(again, Client) else again.end._ended
            # A reader's call has a random ticket.
            said = [f for f in frames(again.wire.sent) if not isinstance(f, DataFrame)]
            seen.append((again.messages, [f.serialize() for f in said], again.wire.has_ended, str(error)))
        assert all(one == seen[0] for one in seen)


async def waits(task: "asyncio.Task[None]") -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return not task.done()


async def carried(server: Server, **values: int) -> None:
    """A call that waits, taken for a hand-off."""
    await feed(server, server.begin() + (settings(**values) if values else b"") + server.call())
    assert server.waiting.pop(TICKET) is server.end
    server.end.taken()


def received(server: Server) -> bytes:
    return b"".join(frame.data for frame in of_kind(server.wire.sent, DataFrame))


async def test_no_more_is_sent_than_the_windows_allow():
    server, body = Server(), random.Random(1).randbytes(200_000)
    await carried(server, INITIAL_WINDOW_SIZE=0)
    sending = asyncio.ensure_future(server.end.send([body[:100], memoryview(body)[100:]]))
    assert await waits(sending)
    assert received(server) == b""
    for size in (1, 2, 3, 1000):
        had = len(received(server))
        await feed(server, WindowUpdateFrame(1, window_increment=size).serialize())
        assert await waits(sending)
        assert len(received(server)) == had + size
    # Both windows count.
    await feed(server, WindowUpdateFrame(1, window_increment=1 << 20).serialize())
    assert await waits(sending)
    assert len(received(server)) == DEFAULT_WINDOW
    await feed(server, WindowUpdateFrame(0, window_increment=1 << 20).serialize())
    await sending
    assert received(server) == message(body)
    assert all(len(frame.data) <= 16_384 for frame in of_kind(server.wire.sent, DataFrame))


async def test_a_window_may_shrink_below_nothing():
    server, body = Server(), bytes(50_000)
    await carried(server)
    await server.end.send([body])
    # 15,530 bytes are left to the call; now it has 34,470 too few, and the next has 15,535.
    await feed(server, settings(INITIAL_WINDOW_SIZE=15_535))
    sending = asyncio.ensure_future(server.end.send([b"a"]))
    assert await waits(sending)
    await feed(server, WindowUpdateFrame(1, window_increment=34_475).serialize())
    assert await waits(sending), "the frame would fit, but for its prefix: 5 of 6 bytes"
    await feed(server, WindowUpdateFrame(1, window_increment=1).serialize())
    await sending
    assert received(server) == message(body) + message(b"a")


async def test_a_frame_is_as_large_as_the_other_side_takes():
    server = Server()
    await carried(server, INITIAL_WINDOW_SIZE=1 << 20, MAX_FRAME_SIZE=20_000)
    await feed(server, WindowUpdateFrame(0, window_increment=1 << 20).serialize())
    await server.end.send([bytes(19_995)])
    await server.end.send([bytes(19_996)])
    await feed(server, settings(MAX_FRAME_SIZE=16_384))
    await server.end.send([bytes(16_380)])
    assert [len(frame.data) for frame in of_kind(server.wire.sent, DataFrame)] == [20_000, 20_000, 1, 16_384, 1]


async def test_others_have_a_turn_after_each_message():
    """A whole hand-off fits into the buffers of a side that reads fast, and takes a tenth of a second."""
    server, turns = Server(), 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    await carried(server)
    counting = asyncio.ensure_future(count())
    for _ in range(20):
        await server.end.send([b"abc"])
    counting.cancel()
    assert turns >= 19


async def test_what_is_left_of_a_call_does_not_count_for_the_next():
    server = Server()
    await carried(server)
    await feed(server, WindowUpdateFrame(1, window_increment=MAX_WINDOW - DEFAULT_WINDOW).serialize())
    server.end.end()
    # The first call's window would be beyond its bound by now.
    await feed(server, settings(INITIAL_WINDOW_SIZE=1 << 20) + WindowUpdateFrame(0, window_increment=9).serialize())
    assert not server.wire.has_ended


@pytest.mark.parametrize("how", ["reset", "broken", "lost", "aborted", "closed", "end of the stream"])
@pytest.mark.parametrize("waits_for", ["window", "room"])
async def test_a_send_that_waits_ends_with_its_call(waits_for: str, how: str):
    server = Server()
    if waits_for == "window":
        await carried(server, INITIAL_WINDOW_SIZE=3)
    else:
        await carried(server)
        server.wire.is_read = False
    sending = asyncio.ensure_future(server.end.send([b"abc"]))
    assert await waits(sending)
    match how:
        case "reset":
            await feed(server, RstStreamFrame(1, error_code=8).serialize())
        case "broken":
            await feed(server, raw(PING, 1, b"12345678"))
        case "lost":
            server.wire.lose()
        case "aborted":
            server.end.abort()
        case "closed":
            server.end.close()
        case _:
            server.wire.end_of_stream()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(sending, 1.0)
    await asyncio.sleep(0)
    assert server.end.stream == 0
    assert server.wire.has_ended == (how != "reset" or server.wire.is_closing())


@pytest.mark.parametrize("what", ["pings", "settings", "refused calls", "resets of calls"])
@pytest.mark.parametrize("make", ENDS)
async def test_a_side_that_does_not_read_makes_nothing_grow(make: Callable[[], End], what: str):
    here = make()
    call = here.call() if isinstance(here, Server) else b""
    await feed(here, here.begin() + call)
    here.wire.is_read = False
    # Each answer is at most 17 bytes.
    bound = 17 * (http2.MOST_ANSWERS + 1)
    for n in range(3000):
        if what == "pings":
            sent = PingFrame(opaque_data=b"12345678").serialize()
        elif what == "settings":
            sent = settings(INITIAL_WINDOW_SIZE=n, HEADER_TABLE_SIZE=n)
        elif isinstance(here, Client):
            break
        elif what == "refused calls":
            sent = here.headers(REQUEST, 3 + 2 * n)
        else:
            sent = RstStreamFrame(1 if n == 0 else 2 * n + 1).serialize() + here.call(3 + 2 * n, bytes(16))
        await feed(here, sent)
        assert len(here.wire.unsent) < 100 * 1024
        if here.wire.has_ended:
            break
    if what in ("pings", "settings"):
        assert here.wire.has_ended
        assert len(here.wire.unsent) < bound
    else:
        here.wire.abort()
    await asyncio.sleep(0)
    assert here.end.stream == 0


async def test_who_breaks_the_protocol_without_reading_is_left_at_once():
    """A socket that is closed waits for what is to be sent, which may be for ever."""
    for how in ("broken", "closed", "end of the stream"):
        server = Server()
        await feed(server, server.begin())
        server.wire.is_read = False
        await feed(server, PingFrame(opaque_data=b"12345678").serialize())
        if how == "broken":
            await feed(server, raw(PING, 1, b"12345678"))
        elif how == "closed":
            server.end.close()
        else:
            server.wire.end_of_stream()
        await asyncio.sleep(0)
        assert server.wire.has_ended, how
        assert not server.connections


@pytest.mark.parametrize("sizes", [[0, 4096] * 20_000, [0, 0], [0, 1 << 31, 0], [100, 50, 4096], [1 << 31]])
async def test_the_other_sides_table_of_headers_is_what_it_says(sizes: list[int]):
    server = Server()
    await feed(server, server.begin() + server.call())
    await feed(server, b"".join(settings(HEADER_TABLE_SIZE=size) for size in sizes))
    server.waiting.pop(TICKET).taken()
    server.end.end()
    assert not server.wire.has_ended
    sent = of_kind(server.wire.sent, HeadersFrame)
    decoder: Any = hpack.Decoder()
    assert dict(decoder.decode(sent[0].data))[":status"] == "200"
    decoder.max_allowed_table_size = min(*sizes, 4096)
    decoder.header_table_size = min(*sizes, decoder.header_table_size)
    assert dict(decoder.decode(sent[1].data)) == {"grpc-status": "0"}
    assert len(sent[1].data) < 100


async def test_a_reader_makes_no_call_that_has_no_window():
    for changes in (settings(INITIAL_WINDOW_SIZE=0), settings(INITIAL_WINDOW_SIZE=22)):
        client = Client()
        await feed(client, client.begin() + changes + client.finish())
        assert client.end.error is None
        client.end.go_on()
        await asyncio.sleep(0)
        assert client.end.is_over
        assert client.wire.has_ended
        assert not client.end.is_waiting


async def test_a_reader_whose_connections_window_is_used_up_ends():
    client = Client()
    await feed(client, client.begin() + client.finish())
    for n in range(1, 4000):
        client.end.go_on()
        await asyncio.sleep(0)
        if client.end.is_over:
            break
        await feed(client, client.headers(OK, 2 * n + 1) + client.finish(2 * n + 1))
    assert client.wire.has_ended
    assert n == DEFAULT_WINDOW // (5 + 18)


async def test_what_comes_beyond_the_window_ends_the_connection():
    client = Client(max_message_bytes=1 << 30)
    client.end._window = 1000
    await feed(client, client.begin() + raw(0x0, 1, b"", size=1001))
    assert blame(client) == FLOW


@pytest.mark.parametrize("size", [10, 1000, 16_384])
async def test_windows_are_made_larger_by_what_was_read(size: int):
    client = Client()
    client.end._window = 1 << 16
    had = len(client.wire.sent)
    body = bytes(size)
    total = 0
    await feed(client, client.begin())
    for _ in range(200):
        sent = data(message(body))
        total += len(sent) - 9
        await feed(client, sent)
        grown = of_kind(client.wire.sent[had:], WindowUpdateFrame)
        for stream in (0, 1):
            by = sum(frame.window_increment for frame in grown if frame.stream_id == stream)
            assert total - (1 << 15) <= by <= total


async def test_data_of_calls_that_were_left_is_read_past():
    server = Server()
    await feed(server, server.begin() + server.headers([*REQUEST[:2], (":path", "/x"), *REQUEST[3:]]))
    assert answers(server)[0]["grpc-status"] == "3"
    for _ in range(20):
        await feed(server, data(b"x" * 16_384))
    assert not server.wire.has_ended
    await feed(server, server.call(3))
    assert TICKET in server.waiting
    client = Client()
    await feed(client, client.begin() + client.finish() + data(message(b"late")))
    client.end.go_on()
    await feed(client, data(message(b"late"), 1) + client.headers(OK, 3) + data(message(b"new"), 3) + data(b"late", 1))
    assert client.messages == [b"new"]


@pytest.mark.parametrize("state", ["before settings", "waiting", "within a message", "after a message", "over", "next"])
@pytest.mark.parametrize("how", ["reset", "leave", "leave at once", "lost"])
async def test_a_reader_in_every_state(state: str, how: str):
    client = Client()
    states = {
        "before settings": b"",
        "waiting": client.begin(),
        "within a message": client.begin() + data(message(b"ab")[:6]),
        "after a message": client.begin() + data(message(b"ab")),
        "over": client.begin() + data(message(b"ab")) + client.finish(),
        "next": client.begin() + client.finish(),
    }
    await feed(client, states[state])
    if state == "next":
        client.end.go_on()
    had_call = client.end.stream
    reading = asyncio.ensure_future(client.end.read())
    await asyncio.sleep(0)
    if how == "reset":
        await feed(client, (b"" if states[state] else settings()) + RstStreamFrame(had_call or 1).serialize())
    elif how == "lost":
        client.wire.lose()
    else:
        last = MAX_WINDOW if how == "leave" else 0
        await feed(client, (b"" if states[state] else settings()) + GoAwayFrame(last_stream_id=last).serialize())
    await asyncio.sleep(0)
    if how == "leave":
        assert client.end.is_over
        assert reading.done() == (state == "over")
        if state != "over":
            stream = client.end.stream
            await feed(client, (client.headers(OK, stream)) + client.finish(stream))
            if state == "within a message":
                assert blame(client) == PROTOCOL
        await asyncio.sleep(0)
    assert await asyncio.wait_for(reading, 1.0) is None
    assert client.end.stream == 0
    if how != "leave" and state != "over":
        assert client.end.error is not None
        assert client.end.is_over
    client.end.go_on()
    if client.end.is_over:
        assert client.end.stream == 0
    client.wire.lose()
    await asyncio.sleep(0)
    assert client.changes >= 1


@pytest.mark.parametrize("state", ["nothing", "headers", "part of a request", "waiting", "taken", "over"])
@pytest.mark.parametrize("how", ["reset", "leave", "lost", "second request", "second headers", "more data"])
async def test_a_service_in_every_state(state: str, how: str):
    server = Server()
    opening = server.headers(REQUEST) if state != "nothing" else b""
    request = message(b"\x0a\x10" + TICKET)
    states = {"nothing": b"", "headers": b"", "part of a request": data(request[:9])}
    await feed(server, server.begin() + opening + states.get(state, data(request)))
    if state in ("taken", "over"):
        server.waiting.pop(TICKET).taken()
        await server.end.send([b"abc"])
        if state == "over":
            server.end.end()
    sent = {
        "reset": RstStreamFrame(1).serialize(),
        "leave": GoAwayFrame().serialize(),
        "second request": data(message(b"\x0a\x10" + b"u" * 16)),
        "second headers": headers(hpack.Encoder().encode(REQUEST), 1, "END_HEADERS"),
        "more data": data(b"abc"),
    }
    if how == "lost":
        server.wire.lose()
    else:
        await feed(server, sent[how])
    await asyncio.sleep(0)
    if server.end.stream:
        assert how in ("leave", "more data", "second request", "second headers")
    if state == "taken" and how in ("second request", "second headers"):
        # Another hand-off must not be given to the reader of this one.
        assert not server.waiting
        with pytest.raises(Unavailable):
            await server.end.send([b"def"])
    assert all(connection.stream for connection in server.waiting.values())
    server.wire.lose()
    await asyncio.sleep(0)
    assert not server.connections
    assert not server.waiting
    assert server.end._patience is None


@pytest.mark.parametrize("ends_by", ["reset", "second request"])
async def test_a_hand_off_never_goes_on_in_the_next_call_of_its_connection(ends_by: str):
    """As where a proxy gives the connection of a reader that went to another one."""
    server = Server()
    await feed(server, server.begin() + server.call(is_last=False))
    server.waiting.pop(TICKET).taken()
    with server.end.carrying():
        await server.end.send([b"first"])
        ended = RstStreamFrame(1).serialize() if ends_by == "reset" else data(message(b"\x0a\x10" + b"v" * 16))
        await feed(server, ended + server.call(3, b"u" * 16))
        had = received(server)
        with pytest.raises(Unavailable):
            await server.end.send([b"second"])
        server.end.end()
    assert received(server) == had == message(b"first")
    assert not [frame for frame in of_kind(server.wire.sent, HeadersFrame) if frame.stream_id == 3]


async def test_a_second_call_is_refused_while_there_is_one():
    server = Server()
    await feed(server, server.begin() + server.call() + server.call(3, b"u" * 16) + server.call(5, b"v" * 16))
    assert resets(server) == [(3, 7), (5, 7)]
    assert server.waiting == {TICKET: server.end}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({":path": "/" + "x" * 12_000}, "3"),
        ({":path": "/" + "é%\n" * 900}, "3"),
        ({":path": "/k3svc.v1.StateService/Write"}, "3"),
        ({":method": "GET"}, "3"),
    ],
)
async def test_what_is_no_call_of_this_port_is_refused_in_few_words(changes: dict[str, str], code: str):
    server = Server()
    asked = [(name, changes.get(name, value)) for name, value in REQUEST]
    await feed(server, server.begin() + server.headers(asked))
    assert answers(server)[0]["grpc-status"] == code
    assert len(of_kind(server.wire.sent, HeadersFrame)[0].data) < 8192
    assert not server.wire.has_ended
    await feed(server, server.call(3))
    assert TICKET in server.waiting


@pytest.mark.parametrize(
    "trailers",
    [
        [("grpc-status", "14"), ("x-bin", "é")],
        [("grpc-status", "14"), ("x-bin", "a")],
        [("grpc-status", "14"), ("grpc-status-details-bin", "AAAA"), ("grpc-message", "%ff%zz%")],
        [("grpc-status", "99")],
        [("grpc-status", "-1")],
        [("grpc-status", "é")],
        [("grpc-status", "")],
        [(":status", "503")],
        [],
    ],
)
async def test_any_status_is_an_error_of_ours(trailers: list[tuple[str, str]]):
    for opening in (True, False):
        client = Client()
        block = client.headers(trailers, 1, "END_STREAM")
        await feed(client, (client.begin() if opening else settings()) + block)
        assert client.end.error is not None
        assert client.wire.has_ended
        assert await client.end.read() is None


async def test_a_message_after_the_last_is_not_one_of_the_next_hand_off():
    client = Client()
    await feed(client, client.begin())
    left = data(message(b"left"))
    client.end.get_buffer(-1)[:9] = left[:9]
    client.end.buffer_updated(9)
    client.end.get_buffer(-1)[:5] = left[9:14]
    client.end.buffer_updated(5)
    client.end.get_buffer(-1)[:4] = left[14:]
    client.end.buffer_updated(4)
    assert client.wire.is_paused
    client.end.go_on()
    await feed(client, client.finish() if not client.wire.is_closing() else b"")
    await asyncio.sleep(0)
    assert client.end.is_over
    assert client.end.stream == 0


async def test_a_large_message_costs_its_size_once():
    client = Client(max_message_bytes=1 << 24)
    await feed(client, client.begin())
    tracemalloc.start()
    try:
        for _ in range(3):
            await feed(client, data(message(bytes(MAX_MESSAGE)))[:100])
            left = client.end.get_buffer(-1)
            assert len(left) == MAX_MESSAGE - 86
            client.end.buffer_updated(len(left))
            assert len(await client.end.read() or b"") == MAX_MESSAGE
            client.wire.resume_reading()
        assert tracemalloc.get_traced_memory()[0] < 3.5 * MAX_MESSAGE
    finally:
        tracemalloc.stop()


async def test_the_first_of_a_flood_of_calls_is_not_kept():
    server = Server()
    sent = server.begin()
    for n in range(500):
        sent += server.call(1 + 2 * n, n.to_bytes(16, "big")) + RstStreamFrame(1 + 2 * n).serialize()
    await feed(server, sent, at_random(3))
    assert not server.waiting
    assert not server.wire.has_ended
    assert server.end.stream == 0
