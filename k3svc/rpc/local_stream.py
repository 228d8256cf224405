"""Messages between two processes of one host over a Unix socket, each behind its length (4 bytes, little-endian): a
tenth of what a message costs in a gRPC stream, beside which it runs and by whose end it ends.

Who calls listens under a name in the abstract namespace, which leaves no file behind however it ends, and tells name
and token in the first message of the call; who serves connects and shows the token before it answers that message. So
the caller, who has that answer, need not wait for anybody: who has not shown the token by then is a stranger.
"""

import asyncio
import re
import secrets
import socket
from collections import deque
from contextlib import suppress
from typing import cast

from k3svc.errors import InvalidRequest, Unavailable

TOKEN_BYTES = 16
LENGTH_BYTES = 4
MOST_WAITING_BYTES = 1 << 20
"""Of received messages that nobody has taken; while there are more, nothing is read."""
_NAME = re.compile(r"k3svc-[0-9a-f]{32}")


class LocalStream(asyncio.Protocol):
    """One end of a connection; iterates over the messages that come until the other end closes. Raises InvalidRequest
    for one longer than `max_message_bytes`.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._messages: deque[bytes] = deque()
        self._num_waiting = 0
        """Bytes of them, with their lengths."""
        self._is_held = False
        self._is_ended = False
        self._has_news = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()

    @property
    def num_unsent(self) -> int:
        """Bytes that the other end has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: bytes) -> None:
        """Does nothing once either end has closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_framed(message))

    async def drain(self) -> None:
        """Returns when little of what was sent waits for the other end, or when it has closed."""
        await self._may_write.wait()

    def close(self) -> None:
        """Safe to repeat."""
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def __aiter__(self) -> "LocalStream":
        return self

    async def __anext__(self) -> bytes:
        while not self._messages:
            if len(self._received) >= LENGTH_BYTES and self._size > self._max_message_bytes:
                raise InvalidRequest("message", f"{self._size} bytes", f"at most {self._max_message_bytes} bytes")
            if self._is_ended:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        message = self._messages.popleft()
        self._num_waiting -= LENGTH_BYTES + len(message)
        if self._is_held and not self._messages and self._transport is not None:
            self._is_held = False
            self._transport.resume_reading()
        return message

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """`asyncio.Protocol`."""
        # That of uvloop is one in all but its type.
        self._transport = cast("asyncio.Transport", transport)
        # uvloop then writes at once, and not when all that is ready on the loop has run.
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        """`asyncio.Protocol`."""
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + self._size
            if self._size > self._max_message_bytes or len(self._received) < end:
                break
            self._messages.append(bytes(self._received[LENGTH_BYTES:end]))
            del self._received[:end]
            self._num_waiting += end
        if self._num_waiting > MOST_WAITING_BYTES and not self._is_held and self._transport is not None:
            self._is_held = True
            self._transport.pause_reading()
        self._has_news.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the other end is gone either way
        """`asyncio.Protocol`."""
        self._end()

    def pause_writing(self) -> None:
        """`asyncio.Protocol`."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """`asyncio.Protocol`."""
        self._may_write.set()

    @property
    def _size(self) -> int:
        return int.from_bytes(self._received[:LENGTH_BYTES], "little")

    def _end(self) -> None:
        self._is_ended = True
        self._has_news.set()
        self._may_write.set()


class LocalListener:
    """Holds a name for one connection that shows the token. Raises OSError where there are no such sockets."""

    def __init__(self, max_message_bytes: int) -> None:
        self.name = f"k3svc-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._max_message_bytes = max_message_bytes
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(f"\0{self.name}".encode())
            self._socket.listen(1)
        except OSError:
            self._socket.close()
            raise

    async def accept(self) -> LocalStream:
        """The connection, which has shown the token before; others are closed. Raises Unavailable if there is none."""
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError as error:
                raise Unavailable(f"nobody has connected to {self.name}: {error}", reason="DRAFT_ENDED") from error
            connected.setblocking(False)
            with suppress(OSError):
                if connected.recv(LENGTH_BYTES + TOKEN_BYTES) == _framed(self.token):
                    return await _stream_over(connected, self._max_message_bytes)
            connected.close()

    def close(self) -> None:
        """Safe to repeat."""
        self._socket.close()


async def connect(name: str, token: bytes, max_message_bytes: int) -> LocalStream | None:
    """The other end of a listener, None when there is none here. Raises InvalidRequest for what cannot be a name."""
    if not _NAME.fullmatch(name) or len(token) != TOKEN_BYTES:
        raise InvalidRequest("hello.socket_name", name, "the name and token of a socket of k3svc")
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    own.setblocking(False)
    with suppress(OSError):
        own.connect(f"\0{name}".encode())
        own.send(_framed(token))
        return await _stream_over(own, max_message_bytes)
    own.close()
    return None


async def _stream_over(connected: socket.socket, max_message_bytes: int) -> LocalStream:
    stream = LocalStream(max_message_bytes)
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=connected)
    except BaseException:
        connected.close()
        raise
    return stream


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "little") + message
