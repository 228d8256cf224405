"""Both ends of a state port without a network: a transport that tells what it was given, and the other side by hand."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hpack
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
)

from k3svc.config import ServerSection
from k3svc.rpc.access import Access
from k3svc.rpc.http2 import PREFACE, Http2
from k3svc.rpc.state_port import METHOD, StateConnection
from k3svc.rpc.state_reader import StateReader
from k3svc.v1 import prefill_service_pb2 as pb

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", METHOD),
    (":authority", "a"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
OK = [(":status", "200"), ("content-type", "application/grpc")]
TICKET = b"t" * 16
MAX_MESSAGE = 1 << 20


class Wire(asyncio.Transport):
    """What a protocol writes to, with the other side's memory in place of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.is_read = True
        """Whether the other side takes what is sent."""
        self.sent = bytearray()
        self.unsent = bytearray()
        self.is_paused = False
        self.has_ended = False
        self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return "secured" if name == "sslcontext" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert (high, low) == (1, 0)

    def get_write_buffer_size(self) -> int:
        return len(self.unsent)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._is_closing
        if self.is_read:
            self.sent += data
            return
        had = len(self.unsent)
        self.unsent += data
        if had <= 1 < len(self.unsent):
            self.protocol.pause_writing()

    def read_all(self) -> None:
        """The other side reads again."""
        self.is_read = True
        had, self.sent, self.unsent = len(self.unsent), self.sent + self.unsent, bytearray()
        if had > 1:
            self.protocol.resume_writing()
        if self._is_closing:
            self._end()

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        if not self.unsent:
            self._end()

    def abort(self) -> None:
        self._is_closing = True
        self.unsent.clear()
        self._end()

    def end_of_stream(self) -> None:
        """The other side sends nothing more."""
        if not self.protocol.eof_received():
            self.close()

    def lose(self) -> None:
        """The network does."""
        self.abort()

    def _end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class Server:
    """A StateConnection, and its other side."""

    def __init__(self) -> None:
        self.connections: set[StateConnection] = set()
        self.waiting: dict[bytes, StateConnection] = {}
        self.end = StateConnection(Access(ServerSection(), None), self.connections, self.waiting)
        self.connections.add(self.end)
        self.wire = wire(self.end)
        self.messages: list[bytes] = []

    def begin(self) -> bytes:
        """What a client says first."""
        return PREFACE + SettingsFrame().serialize()

    def call(self, stream: int = 1, ticket: bytes = TICKET, *, is_last: bool = True) -> bytes:
        request = pb.ReadRequest(ticket=ticket).SerializeToString()
        return self.headers(REQUEST, stream) + data(message(request), stream, is_last=is_last)

    def headers(self, values: Sequence[tuple[str, str]], stream: int = 1, *flags: str) -> bytes:
        return headers(hpack.Encoder().encode(values), stream, "END_HEADERS", *flags)


class Client:
    """A StateReader, and its other side."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE) -> None:
        self.changes = 0
        self.end = StateReader(
            authority="a", context=None, metadata=tuple, max_message_bytes=max_message_bytes, on_change=self._changed
        )
        self.wire = wire(self.end)
        self.messages: list[bytes] = []

    def _changed(self, _reader: StateReader) -> None:
        self.changes += 1

    def begin(self) -> bytes:
        """What a server says first, its answer to a call included."""
        return SettingsFrame().serialize() + self.headers(OK)

    def headers(self, values: Sequence[tuple[str, str]], stream: int = 1, *flags: str) -> bytes:
        return headers(hpack.Encoder().encode(values), stream, "END_HEADERS", *flags)

    def finish(self, stream: int = 1, status: str = "0") -> bytes:
        return self.headers([("grpc-status", status)], stream, "END_STREAM")


End = Server | Client
ENDS: tuple[Callable[[], End], ...] = (Server, Client)


def wire(end: Http2) -> Wire:
    made = Wire()
    made.protocol = end
    end.connection_made(made)
    return made


def headers(block: bytes, stream: int = 1, *flags: str) -> bytes:
    return HeadersFrame(stream, block, flags=flags).serialize()


def more(block: bytes, stream: int = 1, *flags: str) -> bytes:
    return ContinuationFrame(stream, block, flags=flags).serialize()


def data(body: bytes, stream: int = 1, *, is_last: bool = False) -> bytes:
    return DataFrame(stream, body, flags=["END_STREAM"] if is_last else []).serialize()


def settings(**values: int) -> bytes:
    return SettingsFrame(settings={getattr(SettingsFrame, name): value for name, value in values.items()}).serialize()


def message(body: bytes, *, flag: int = 0) -> bytes:
    return bytes([flag]) + len(body).to_bytes(4, "big") + body


def raw(kind: int, stream: int, body: bytes, flags: int = 0, *, size: int | None = None) -> bytes:
    """A frame that hyperframe would not make."""
    length = len(body) if size is None else size
    return length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def whole(_left: int) -> int:
    return 1 << 30


def by_byte(_left: int) -> int:
    return 1


def at_random(seed: int) -> Callable[[int], int]:
    source = random.Random(seed)
    return lambda _left: source.choice([1, 2, 3, source.randrange(1, 40), source.randrange(1, 5000)])


async def feed(here: End, sent: bytes, piece: Callable[[int], int] = whole) -> None:
    """Gives an end what the other side sends, as far as it takes it; what a reader gets is read at once."""
    left = memoryview(sent)
    while left and not here.wire.has_ended and not here.wire.is_closing():
        if here.wire.is_paused:
            assert isinstance(here, Client)
            await take(here)
            continue
        room = here.end.get_buffer(-1)
        assert len(room) > 0, "asyncio takes no empty buffer"
        size = min(len(room), len(left), max(1, piece(len(left))))
        room[:size] = left[:size]
        left = left[size:]
        here.end.buffer_updated(size)
    if isinstance(here, Client):
        while here.end._messages:
            await take(here)
    await asyncio.sleep(0)


async def take(here: Client) -> None:
    """Reads the message that is there."""
    assert here.end._messages
    got = await here.end.read()
    assert got is not None
    here.messages.append(bytes(got))
    here.wire.resume_reading()


def frames(sent: bytes | bytearray) -> list[Any]:
    """What an end has said, but its preface; the last frame may be cut."""
    left = memoryview(bytes(sent))
    if left[: len(PREFACE)] == PREFACE:
        left = left[len(PREFACE) :]
    found = []
    while len(left) >= 9:
        frame, size = Frame.parse_frame_header(left[:9])
        if len(left) < 9 + size:
            break
        frame.parse_body(left[9 : 9 + size])
        found.append(frame)
        left = left[9 + size :]
    return found


def of_kind(sent: bytes | bytearray, kind: Any) -> list[Any]:
    return [frame for frame in frames(sent) if isinstance(frame, kind)]


def blame(here: End) -> int | None:
    """Code of the GOAWAY that an end has ended its connection with; None: it goes on."""
    told = of_kind(here.wire.sent, GoAwayFrame)
    assert len(told) <= 1
    return told[0].error_code if told else None


def resets(here: End) -> list[tuple[int, int]]:
    return [(frame.stream_id, frame.error_code) for frame in of_kind(here.wire.sent, RstStreamFrame)]


def answers(here: End) -> list[dict[str, str]]:
    """The blocks of headers of an end, oldest first."""
    decoder = hpack.Decoder()
    return [dict(_texts(decoder.decode(frame.data))) for frame in of_kind(here.wire.sent, HeadersFrame)]


def _texts(values: Iterable[Any]) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in values]
