"""The port at which prefill gives hand-offs to those who read them by k3svc.v1.StateService.

A reader makes its call before it needs it and names a ticket that it drew; the call waits until one of
PrefillService.Prefill names the ticket too, and then carries what follows the manifest of that one. So no hand-off
waits for a connection: where no call with its ticket waits here, it goes in the stream of its own call.
"""

import asyncio
import base64
import logging
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from google.protobuf.message import DecodeError

from k3svc.errors import AlreadyExists, ConfigError, InvalidRequest, K3svcError
from k3svc.rpc.access import Access
from k3svc.rpc.http2 import CONTROL_BYTES, DEFAULT_WINDOW, Headers, Http2
from k3svc.rpc.status import status_of
from k3svc.v1 import prefill_service_pb2

METHOD = "/k3svc.v1.StateService/Read"
CONTENT_TYPE = ("content-type", "application/grpc")
TICKET_BYTES = 16
UNUSED_S = 20.0
"""How long a connection may be without a call."""
WAITING_S = 600.0
"""How long a call may wait for its hand-off."""
MAX_REQUEST_BYTES = 64
PAUSE_S = 1.0
"""After a connection that could not be accepted."""

log = logging.getLogger(__name__)


class StatePort:
    """Listens for readers. Belongs to an event loop."""

    def __init__(
        self, *, access: Access, max_connections: int, tls: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        """`max_connections` at once; more are closed. `tls`: what secures the next connection; None: nothing does."""
        self.number = 0
        """Of the port; 0: not open."""
        self._access = access
        self._max_connections = max_connections
        self._tls = tls
        self._connections: set[StateConnection] = set()
        self._waiting: dict[bytes, StateConnection] = {}
        self._listening: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, host: str, port: int) -> None:
        """Raises ConfigError for an address that cannot be bound. Port 0 picks a free one."""
        try:
            is_ipv6 = ":" in host
            listening = socket.create_server(
                (host, port),
                family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
                dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
                backlog=128,
            )
        except OSError as error:
            raise ConfigError(
                f"transfer.state_port: cannot bind {host}:{port}: {os.strerror(error.errno or 0)}",
                key="transfer.state_port",
            ) from error
        self.number = listening.getsockname()[1]
        listening.setblocking(False)
        self._listening = listening
        self._spawn(self._accept(listening))

    async def close(self) -> None:
        """Breaks off what is open. Safe to repeat."""
        self.number = 0
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        for connection in [*self._connections]:
            connection.abort()

    def take(self, ticket: bytes) -> "StateConnection | None":
        """The reader that waits with this ticket; it waits no longer."""
        connection = self._waiting.get(ticket)
        if connection is None or connection.is_leaving:
            return None
        del self._waiting[ticket]
        connection.taken()
        return connection

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, _ = await loop.sock_accept(listening)
            except OSError as error:
                # Such as when the process has all the files that it may have.
                log.warning("no reader can connect: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            self._spawn(self._take_in(connected))

    async def _take_in(self, connected: socket.socket) -> None:
        connection = StateConnection(self._access, self._connections, self._waiting)
        if len(self._connections) >= self._max_connections:
            connected.close()
            return
        self._connections.add(connection)
        context = None if self._tls is None else self._tls()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                connected,
                ssl=context,
                ssl_handshake_timeout=None if context is None else UNUSED_S,
            )
        except OSError as error:
            log.info("a reader's handshake failed: %s", error)
            connection.closed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class StateConnection(Http2):
    """The connection of one reader, and the hand-off that it reads."""

    def __init__(
        self,
        access: Access,
        connections: "set[StateConnection]",
        waiting: "dict[bytes, StateConnection]",
    ) -> None:
        super().__init__(
            is_client=False, max_message_bytes=MAX_REQUEST_BYTES, window=DEFAULT_WINDOW, largest_frame=CONTROL_BYTES
        )
        self._access = access
        self._connections = connections
        self._waiting = waiting
        self._ticket = b""
        """Of the call under way, once its message is here."""
        self._is_carrying = False
        self._patience: asyncio.TimerHandle | None = None

    @contextmanager
    def carrying(self) -> Iterator[None]:
        """Surrounds a hand-off; breaks off what is not complete after it."""
        try:
            yield
        finally:
            self._is_carrying = False
            if self.stream:
                self.reset_call()
                self._forget()

    def end(self) -> None:
        """The hand-off is complete."""
        self._is_carrying = False
        if self.stream:
            self._answer([("grpc-status", "0")])

    def taken(self) -> None:
        """A hand-off comes now."""
        self._is_carrying = True
        self._be_patient(None)

    def opened(self) -> None:
        """`Http2`."""
        self._be_patient(UNUSED_S)

    def headers_came(self, headers: Headers, *, is_last: bool) -> None:
        """`Http2`."""
        given = dict(headers)
        try:
            if given.get(":path") != METHOD or given.get(":method") != "POST":
                raise InvalidRequest(":path", given.get(":path", ""), f"POST {METHOD}")
            self._access.caller_of(METHOD, headers)
            if is_last:
                raise InvalidRequest("request", "no message", "a ReadRequest")
        except K3svcError as error:
            self._refuse(error)

    def message_came(self, message: memoryview) -> None:
        """`Http2`."""
        try:
            ticket = _ticket_of(bytes(message))
            if self._ticket:
                raise InvalidRequest("request", "a second message", "one")
            if ticket in self._waiting:
                raise AlreadyExists("a call with this ticket waits already")
        except K3svcError as error:
            self._refuse(error)
            return
        finally:
            self.message_read(message)
        self._ticket = ticket
        self._waiting[ticket] = self
        self._be_patient(WAITING_S)
        self.send_headers([(":status", "200"), CONTENT_TYPE])

    def call_ended(self, error: K3svcError | None) -> None:
        """`Http2`."""
        if error is not None:
            self._forget()

    def closed(self) -> None:
        """`Http2`."""
        self._connections.discard(self)
        self._be_patient(None)

    def _refuse(self, error: K3svcError) -> None:
        log.info("a reader is refused: %s", error, extra={"reason": error.reason})
        status = status_of(error)
        details = [(key, _text(value)) for key, value in status.trailing_metadata or ()]
        self._answer(
            [
                (":status", "200"),
                CONTENT_TYPE,
                ("grpc-status", str(status.code.value[0])),
                ("grpc-message", quote(status.details, safe=" !#$&'()*+,/:;=?@[]")),
                *details,
            ]
        )

    def _answer(self, trailers: Headers) -> None:
        self.send_headers(trailers, is_last=True)
        self.end_call()
        self._forget()

    def _forget(self) -> None:
        """The call is over."""
        if self._waiting.get(self._ticket) is self:
            del self._waiting[self._ticket]
        self._ticket = b""
        self._be_patient(UNUSED_S)
        if self._is_carrying:
            # What is still to come of the hand-off must not go to the next call.
            self.close()

    def _be_patient(self, time_s: float | None) -> None:
        """Closes the connection when nothing has happened for so long; None: it stays."""
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None
        if time_s is not None:
            self._patience = asyncio.get_running_loop().call_later(time_s, self.close)


def _ticket_of(message: bytes) -> bytes:
    try:
        ticket = prefill_service_pb2.ReadRequest.FromString(message).ticket
    except DecodeError as error:
        raise InvalidRequest("request", f"{len(message)} bytes", "a ReadRequest") from error
    if len(ticket) != TICKET_BYTES:
        raise InvalidRequest("ticket", f"{len(ticket)} bytes", f"{TICKET_BYTES} random bytes")
    return ticket


def _text(value: str | bytes) -> str:
    """A value of metadata as it travels."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
