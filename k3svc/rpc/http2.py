"""One end of an HTTP/2 connection that carries one gRPC call at a time (RFC 9113, gRPC over HTTP/2).

grpcio copies a received message twice under the interpreter lock and a sent one once, which is most of what a hand-off
costs it. Here a message is received into the memory in which it is read, and sent from where it lies, without the lock.
What travels is what any gRPC implementation sends and takes; DATA frames apart, frames are those of hyperframe and
headers those of hpack. The other side is not trusted: what it does wrong ends its connection, and what it can make this
side keep is bounded.
"""

import asyncio
import os
import struct
from collections.abc import Callable, Sequence
from typing import cast

import hpack
from hyperframe.exceptions import HyperframeError, InvalidFrameError
from hyperframe.frame import (
    ContinuationFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from k3svc.errors import K3svcError, Unavailable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client says first (RFC 9113, 3.4)."""
MAX_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = (1 << 16) - 1
LARGEST_FRAME = (1 << 24) - 1
CONTROL_BYTES = 1 << 14
"""Largest frame that is no DATA: the least that both sides must take."""
HEADER_BYTES = 1 << 14
"""Largest block of headers, over all its frames."""
MOST_ANSWERS = 1000
"""Answers to pings and settings that the other side has not read."""
PREFIX_BYTES = 5
"""Before each message of gRPC: whether it is compressed, and its length."""
MOST_PIECES = 512
"""Pieces that are written at once as they are; the kernel takes 1,024."""

_HEAD_BYTES = 9
_DATA, _SETTINGS, _LAST_KIND = 0x0, 0x4, 0x9
"""Frames of kinds after the last are left out."""
_END_STREAM, _PADDED = 0x1, 0x8
_NO_ERROR, _PROTOCOL_ERROR, _FLOW_CONTROL_ERROR = 0x0, 0x1, 0x3
_FRAME_SIZE_ERROR, _REFUSED_STREAM, _CANCEL, _COMPRESSION_ERROR, _ENHANCE_YOUR_CALM = 0x6, 0x7, 0x8, 0x9, 0xB

Headers = Sequence[tuple[str, str]]
Pieces = Sequence[bytes | memoryview]


class _Broken(Exception):
    """The other side breaks the protocol."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Http2(asyncio.BufferedProtocol):
    """What both ends have in common. A subclass is told of headers, messages and ends, and never of half of them."""

    def __init__(self, *, is_client: bool, max_message_bytes: int, window: int, largest_frame: int) -> None:
        """`window`: bytes that the other side may send ahead of what was received, at least 64 KiB - 1."""
        self.stream = 0
        """The call under way; 0: none."""
        self.is_leaving = False
        """No further call is made on this connection."""
        self._is_client = is_client
        self._max_message_bytes = max_message_bytes
        self._window = window
        self._largest_frame = largest_frame
        self._transport: asyncio.Transport | None = None
        self._file: int | None = None
        """Of the socket, where what is sent needs no encryption."""
        self._ended: K3svcError | None = None
        self._changed = asyncio.Event()
        """A window, the room of the socket, or the call has changed."""
        self._can_write = True
        self._answers = 0
        self._last_stream = 0

        self._control = memoryview(bytearray(_HEAD_BYTES + CONTROL_BYTES))
        self._filled, self._wanted = 0, _HEAD_BYTES if is_client else len(PREFACE)
        self._has_preface = is_client
        self._has_settings = False
        self._data_left = 0
        """Bytes of a DATA frame that have not come."""
        self._data_of = 0
        """The call of that frame; what comes of one that has ended is left out."""
        self._data_ends_call = False
        self._prefix = memoryview(bytearray(PREFIX_BYTES))
        self._prefix_filled = 0
        self._message: memoryview | None = None
        self._message_filled = 0
        self._spare = bytearray()
        self._unread = 0
        """Bytes that came since the windows were last made larger."""
        self._block: list[bytes] = []
        self._block_of: HeadersFrame | None = None
        self._decoder = hpack.Decoder(max_header_list_size=HEADER_BYTES)

        self._encoder = hpack.Encoder()
        # Blocks are so few that a table of the other side, whose size it may change at any time, is not worth using.
        self._encoder.header_table_size = 0
        self._their_frame = CONTROL_BYTES
        self._their_window = DEFAULT_WINDOW
        """What a new call begins with."""
        self._connection_window = DEFAULT_WINDOW
        self._stream_window = DEFAULT_WINDOW

    def opened(self) -> None:
        """The connection is there; settings have been sent."""

    def headers_came(self, headers: Headers, *, is_last: bool) -> None:
        """Of the call under way. `is_last`: nothing more of it comes."""
        raise NotImplementedError

    def message_came(self, message: memoryview) -> None:
        """Of the call under way; the memory is the subclass's until it calls `message_read`."""
        raise NotImplementedError

    def call_ended(self, error: K3svcError | None) -> None:
        """The other side has broken the call off, or the connection has ended with it. None: its side is complete."""
        raise NotImplementedError

    def closed(self) -> None:
        """The connection has ended, after the call."""

    def message_read(self, message: memoryview) -> None:
        """Gives the memory of a message back for the next one."""
        kept = cast("bytearray", message.obj)
        message.release()
        if len(kept) > len(self._spare):
            self._spare = kept

    def begin_call(self) -> None:
        """A call of this side, whose headers come next."""
        assert self._is_client
        self._enter(self._last_stream + 2 if self._last_stream else 1)

    def end_call(self) -> None:
        """Nothing more of the call is sent or received."""
        self.stream, self._stream_window = 0, 0
        self._changed.set()

    def reset_call(self) -> None:
        """Breaks the call off, and the connection with it where part of a message was sent or received."""
        stream, is_whole = self.stream, self._can_write and not self._data_left and not self._prefix_filled
        self.end_call()
        if not is_whole:
            self.abort()
        elif stream:
            self._send_control(RstStreamFrame(stream, error_code=_CANCEL))

    def send_headers(self, headers: Headers, *, is_last: bool = False) -> None:
        frame = HeadersFrame(self.stream, self._encoder.encode(headers, huffman=False), flags=["END_HEADERS"])
        if is_last:
            frame.flags.add("END_STREAM")
        assert len(frame.data) <= CONTROL_BYTES
        self._write([frame.serialize()])

    def send_last(self, message: bytes) -> None:
        """The only message of a request; it is small. The connection ends where there is no window for it."""
        data = _prefixed(len(message)) + message
        if len(data) > self._allowance():
            self._ended = Unavailable("the other side leaves no window for a request", reason="STATE_CONNECTION_LOST")
            self.abort()
            return
        self._take_window(len(data))
        self._write([_data_head(len(data), self.stream, _END_STREAM), data])

    async def send(self, pieces: Pieces) -> None:
        """Sends one message; returns when the kernel has it. All of the pieces has been sent or copied before anything
        else runs. Raises what ended the call.
        """
        stream = self.stream
        self._check(stream)
        size = PREFIX_BYTES + sum(len(piece) for piece in pieces)
        whole = [_prefixed(size - PREFIX_BYTES), *pieces]
        if size <= self._allowance():
            self._take_window(size)
            self._write([_data_head(size, stream), *whole])
        else:
            rest = memoryview(b"".join(whole))
            while rest:
                await self._until(stream, lambda: self._can_write and self._allowance() > 0)
                part, rest = rest[: self._allowance()], rest[self._allowance() :]
                self._take_window(len(part))
                self._write([_data_head(len(part), stream), part])
        # Others have their turn, however fast the other side reads.
        await asyncio.sleep(0)
        await self._until(stream, lambda: self._can_write)

    def pause(self) -> None:
        """Nothing is read until `resume`."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection, so that the other side knows. Safe to repeat."""
        self.is_leaving = True
        if self._transport is not None and not self._transport.is_closing():
            self._send_control(GoAwayFrame(last_stream_id=self._last_stream, error_code=_NO_ERROR))
            self._close()

    def abort(self) -> None:
        """Ends the connection at once. Safe to repeat."""
        self.is_leaving = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """`asyncio.BaseProtocol`."""
        # That of uvloop is one in all but its type.
        self._transport = cast("asyncio.Transport", transport)
        # What cannot be written at once is told of by pause_writing; at 0, TLS would pause with nothing to write.
        self._transport.set_write_buffer_limits(high=1, low=0)
        if self._transport.get_extra_info("sslcontext") is None:
            self._file = self._transport.get_extra_info("socket").fileno()
        bound = {SettingsFrame.ENABLE_PUSH: 0} if self._is_client else {SettingsFrame.MAX_CONCURRENT_STREAMS: 1}
        settings = {
            **bound,
            SettingsFrame.INITIAL_WINDOW_SIZE: self._window,
            SettingsFrame.MAX_FRAME_SIZE: self._largest_frame,
            SettingsFrame.MAX_HEADER_LIST_SIZE: HEADER_BYTES,
        }
        opening = [PREFACE if self._is_client else b"", SettingsFrame(settings=settings).serialize()]
        if self._window > DEFAULT_WINDOW:
            opening.append(WindowUpdateFrame(0, window_increment=self._window - DEFAULT_WINDOW).serialize())
        self._write([b"".join(opening)])
        self.opened()

    def connection_lost(self, exc: Exception | None) -> None:
        """`asyncio.BaseProtocol`."""
        error = self._ended or Unavailable(
            f"the connection ended{f': {exc}' if exc is not None else ''}", reason="STATE_CONNECTION_LOST"
        )
        self._transport, self._ended = None, error
        if self.stream:
            self.end_call()
            self.call_ended(error)
        self._changed.set()
        self.closed()

    def pause_writing(self) -> None:
        """`asyncio.BaseProtocol`."""
        self._can_write = False

    def resume_writing(self) -> None:
        """`asyncio.BaseProtocol`."""
        self._can_write = True
        self._answers = 0
        self._changed.set()

    def eof_received(self) -> None:
        """`asyncio.BaseProtocol`: nobody who still reads ends only what it sends."""
        self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  what comes next is known
        """`asyncio.BufferedProtocol`."""
        if not self._data_left:
            return self._control[self._filled : self._wanted]
        if self._data_of != self.stream:
            return self._control[: self._data_left]
        if self._prefix_filled < PREFIX_BYTES:
            return self._prefix[self._prefix_filled :][: self._data_left]
        assert self._message is not None
        return self._message[self._message_filled :][: self._data_left]

    def buffer_updated(self, nbytes: int) -> None:
        """`asyncio.BufferedProtocol`."""
        try:
            if self._data_left:
                self._data_came(nbytes)
            else:
                self._filled += nbytes
                if self._filled == self._wanted:
                    self._control_came()
        except _Broken as broken:
            self._break(broken.code, str(broken))

    def _data_came(self, nbytes: int) -> None:
        self._data_left -= nbytes
        if self._data_of != self.stream:
            return
        if self._prefix_filled < PREFIX_BYTES:
            self._prefix_filled += nbytes
            if self._prefix_filled == PREFIX_BYTES:
                self._begin_message()
        else:
            self._message_filled += nbytes
        message = self._message
        if message is not None and self._message_filled == len(message):
            self._message, self._prefix_filled = None, 0
            self.message_came(message)
        if not self._data_left:
            self._data_ended()

    def _begin_message(self) -> None:
        size = int.from_bytes(self._prefix[1:], "big")
        if self._prefix[0] != 0:
            raise _Broken(_PROTOCOL_ERROR, "a compressed message")
        if size > self._max_message_bytes:
            raise _Broken(_ENHANCE_YOUR_CALM, f"a message of {size} bytes; allowed: {self._max_message_bytes}")
        memory, self._spare = self._spare, bytearray()
        if len(memory) < size:
            memory = bytearray(size)
        self._message, self._message_filled = memoryview(memory)[:size], 0

    def _data_ended(self) -> None:
        if self._data_ends_call and self._data_of == self.stream:
            if self._prefix_filled:
                raise _Broken(_PROTOCOL_ERROR, "a call that ends within a message")
            self.call_ended(None)

    def _control_came(self) -> None:
        if not self._has_preface:
            if self._control[: self._wanted] != PREFACE:
                raise _Broken(_PROTOCOL_ERROR, "a connection that does not begin as those of HTTP/2")
            self._has_preface = True
            self._filled, self._wanted = 0, _HEAD_BYTES
            return
        if self._wanted == _HEAD_BYTES:
            size, kind = int.from_bytes(self._control[:3], "big"), self._control[3]
            if not self._has_settings and kind != _SETTINGS:
                raise _Broken(_PROTOCOL_ERROR, "a connection that does not begin with settings")
            self._has_settings = True
            if kind == _DATA:
                self._begin_data(size)
                return
            if size > CONTROL_BYTES:
                raise _Broken(_FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            self._wanted += size
            if size:
                return
        try:
            frame, _ = Frame.parse_frame_header(self._control[:_HEAD_BYTES])
            if self._control[3] <= _LAST_KIND:
                frame.parse_body(self._control[_HEAD_BYTES : self._wanted])
        except InvalidFrameError as error:
            raise _Broken(_FRAME_SIZE_ERROR, str(error)) from error
        except HyperframeError as error:
            raise _Broken(_PROTOCOL_ERROR, str(error)) from error
        self._filled, self._wanted = 0, _HEAD_BYTES
        self._take(frame)

    def _begin_data(self, size: int) -> None:
        flags, stream = self._control[4], int.from_bytes(self._control[5:_HEAD_BYTES], "big") & MAX_WINDOW
        is_known = 0 < stream <= self._last_stream and stream % 2 == 1
        if self._block_of is not None or not is_known or flags & _PADDED:
            raise _Broken(_PROTOCOL_ERROR, "data within headers, of a call that was not made, or with padding")
        if size > self._largest_frame:
            raise _Broken(_FRAME_SIZE_ERROR, f"a frame of {size} bytes")
        self._unread += size
        if self._unread > self._window:
            raise _Broken(_FLOW_CONTROL_ERROR, "more bytes than the window has")
        if 2 * self._unread > self._window:
            for of in (0, stream):
                self._send_control(WindowUpdateFrame(of, window_increment=self._unread))
            self._unread = 0
        self._filled = 0
        self._data_left, self._data_of, self._data_ends_call = size, stream, bool(flags & _END_STREAM)
        if not size:
            self._data_ended()

    def _take(self, frame: Frame) -> None:
        if self._block_of is not None and not (
            isinstance(frame, ContinuationFrame) and frame.stream_id == self._block_of.stream_id
        ):
            raise _Broken(_PROTOCOL_ERROR, "headers that do not go on")
        if isinstance(frame, RstStreamFrame | WindowUpdateFrame) and frame.stream_id > self._last_stream:
            raise _Broken(_PROTOCOL_ERROR, f"call {frame.stream_id}, which nobody made")
        match frame:
            case HeadersFrame() | ContinuationFrame():
                self._take_headers(frame)
            case SettingsFrame():
                self._take_settings(frame)
            case WindowUpdateFrame():
                self._take_window_update(frame)
            case PingFrame() if "ACK" not in frame.flags:
                self._send_control(PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]))
            case RstStreamFrame() if frame.stream_id == self.stream:
                self.end_call()
                self.call_ended(Unavailable(f"the call was reset ({frame.error_code})", reason="STATE_CONNECTION_LOST"))
            case GoAwayFrame():
                self._take_go_away(frame)
            case PushPromiseFrame():
                raise _Broken(_PROTOCOL_ERROR, "a push, which is switched off")

    def _take_headers(self, frame: HeadersFrame | ContinuationFrame) -> None:
        if isinstance(frame, HeadersFrame):
            self._block_of, self._block = frame, []
        elif self._block_of is None:
            raise _Broken(_PROTOCOL_ERROR, "headers that go on without a beginning")
        self._block.append(frame.data)
        if sum(map(len, self._block)) > HEADER_BYTES or len(self._block) > HEADER_BYTES // 64:
            raise _Broken(_ENHANCE_YOUR_CALM, f"more than {HEADER_BYTES} bytes of headers")
        if "END_HEADERS" not in frame.flags:
            return
        first, block = self._block_of, b"".join(self._block)
        self._block_of, self._block = None, []
        assert first is not None
        try:
            headers = [(str(name), str(value)) for name, value in self._decoder.decode(block)]
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            # What it says may show memory of this side.
            raise _Broken(_COMPRESSION_ERROR, f"headers that cannot be read: {type(error).__name__}") from error
        is_last = "END_STREAM" in first.flags
        if self._is_client:
            if first.stream_id > self._last_stream:
                raise _Broken(_PROTOCOL_ERROR, "headers of a call that nobody made")
            # Others are of calls that were broken off here.
            if first.stream_id == self.stream:
                if self._prefix_filled:
                    raise _Broken(_PROTOCOL_ERROR, "headers within a message")
                self.headers_came(headers, is_last=is_last)
        elif first.stream_id <= self._last_stream or first.stream_id % 2 == 0:
            raise _Broken(_PROTOCOL_ERROR, f"a call with the number {first.stream_id}")
        elif self.stream:
            self._last_stream = first.stream_id
            self._send_control(RstStreamFrame(first.stream_id, error_code=_REFUSED_STREAM))
        else:
            self._enter(first.stream_id)
            self.headers_came(headers, is_last=is_last)

    def _take_settings(self, frame: SettingsFrame) -> None:
        if "ACK" in frame.flags:
            return
        window = frame.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, self._their_window)
        if window > MAX_WINDOW:
            raise _Broken(_FLOW_CONTROL_ERROR, f"a window of {window} bytes")
        if self.stream:
            self._stream_window += window - self._their_window
            self._check_windows()
        self._their_window = window
        largest = frame.settings.get(SettingsFrame.MAX_FRAME_SIZE, self._their_frame)
        if not CONTROL_BYTES <= largest <= LARGEST_FRAME:
            raise _Broken(_PROTOCOL_ERROR, f"a largest frame of {largest} bytes")
        self._their_frame = largest
        if frame.settings.get(SettingsFrame.ENABLE_PUSH, 0) > (0 if self._is_client else 1):
            raise _Broken(_PROTOCOL_ERROR, "a push setting that cannot be")
        self._send_control(SettingsFrame(flags=["ACK"]))
        self._changed.set()

    def _take_window_update(self, frame: WindowUpdateFrame) -> None:
        if frame.stream_id == 0:
            self._connection_window += frame.window_increment
        elif frame.stream_id == self.stream:
            self._stream_window += frame.window_increment
        self._check_windows()
        self._changed.set()

    def _check_windows(self) -> None:
        if max(self._connection_window, self._stream_window) > MAX_WINDOW:
            raise _Broken(_FLOW_CONTROL_ERROR, "a window beyond its bound")

    def _take_go_away(self, frame: GoAwayFrame) -> None:
        self.is_leaving = True
        if self.stream > frame.last_stream_id and self._is_client:
            self.end_call()
            self.call_ended(Unavailable("the call was not taken", reason="STATE_CONNECTION_LOST"))

    def _enter(self, stream: int) -> None:
        self.stream = self._last_stream = stream
        self._stream_window = self._their_window
        self._prefix_filled, self._message = 0, None

    def _allowance(self) -> int:
        return min(self._connection_window, self._stream_window, self._their_frame)

    def _take_window(self, nbytes: int) -> None:
        self._connection_window -= nbytes
        self._stream_window -= nbytes

    async def _until(self, stream: int, is_ready: Callable[[], bool]) -> None:
        while True:
            self._check(stream)
            if is_ready():
                return
            self._changed.clear()
            await self._changed.wait()

    def _check(self, stream: int) -> None:
        if self._ended is not None:
            raise self._ended
        if not stream or stream != self.stream:
            raise Unavailable("the call has ended", reason="STATE_CONNECTION_LOST")

    def _send_control(self, frame: Frame) -> None:
        """What the other side makes this one say, while it may not read."""
        if not self._can_write:
            self._answers += 1
            if self._answers > MOST_ANSWERS:
                self.abort()
                return
        self._write([frame.serialize()])

    def _write(self, pieces: Pieces) -> None:
        """What the kernel does not take now is copied."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._file is None or transport.get_write_buffer_size() or len(pieces) > MOST_PIECES:
            transport.write(b"".join(pieces))
            return
        try:
            sent = os.writev(self._file, pieces)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._ended = Unavailable(f"the connection ended: {error.strerror}", reason="STATE_CONNECTION_LOST")
            transport.abort()
            return
        rest: list[bytes | memoryview] = []
        for piece in pieces:
            if sent < len(piece):
                rest.append(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))
        if rest:
            transport.write(b"".join(rest))

    def _break(self, code: int, message: str) -> None:
        self._ended = Unavailable(f"the connection breaks HTTP/2: {message}", reason="STATE_CONNECTION_LOST")
        self._changed.set()
        self._send_control(
            GoAwayFrame(last_stream_id=self._last_stream, error_code=code, additional_data=message.encode())
        )
        self._data_left, self._filled, self._wanted = 0, 0, _HEAD_BYTES
        if self._transport is not None:
            self._transport.pause_reading()
            self._close()

    def _close(self) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size():
            # It would wait until the other side has read this, if it ever does.
            self._transport.abort()
        else:
            self._transport.close()


def _prefixed(size: int) -> bytes:
    return b"\0" + size.to_bytes(4, "big")


def _data_head(size: int, stream: int, flags: int = 0) -> bytes:
    return struct.pack("!HBBBL", size >> 8, size & 0xFF, _DATA, flags, stream)
