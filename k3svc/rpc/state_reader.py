"""Decode's end of a state port: connections whose calls wait at prefill services for the next hand-off."""

import asyncio
import base64
import logging
import secrets
import ssl
from collections import deque
from collections.abc import Callable
from urllib.parse import unquote

import grpc

from k3svc.errors import K3svcError, Unavailable
from k3svc.obs.log import bind_request_id
from k3svc.rpc.credentials import CallerCredentials, Metadata
from k3svc.rpc.http2 import LARGEST_FRAME, Headers, Http2
from k3svc.rpc.state_port import CONTENT_TYPE, METHOD, TICKET_BYTES
from k3svc.rpc.status import error_from_rpc
from k3svc.v1 import prefill_service_pb2

WINDOW_BYTES = 1 << 30
"""The kernel's buffers bound what is under way; this is beyond them."""
KEPT_READERS = 8
"""Calls that wait at one prefill service beyond those that carry hand-offs."""
KEPT_S = 20.0
"""How long a call waits unused."""
RETRY_S = 60.0
"""How long a port is left alone that could not be reached."""
CONNECT_S = 5.0

log = logging.getLogger(__name__)


class StateReader(Http2):
    """One connection. Its call waits until `ticket` is named in a PrefillRequest, then `read` gives what comes."""

    def __init__(
        self,
        *,
        authority: str,
        context: ssl.SSLContext | None,
        metadata: Callable[[], Metadata],
        max_message_bytes: int,
        on_change: "Callable[[StateReader], None]",
    ) -> None:
        """`on_change` is told when the call waits at the other side, and when the connection has ended."""
        super().__init__(
            is_client=True, max_message_bytes=max_message_bytes, window=WINDOW_BYTES, largest_frame=LARGEST_FRAME
        )
        self.ticket = b""
        self.is_waiting = False
        """The other side has the ticket."""
        self.has_waited = False
        """It had one on this connection."""
        self.error: K3svcError | None = None
        """Why the call ended, where it was not complete."""
        self.is_refused = False
        """The other side has answered so."""
        self._authority = authority
        self.context = context
        """What the connection is secured with; None: nothing."""
        self._metadata = metadata
        self._on_change = on_change
        self._messages: deque[memoryview] = deque()
        self._held: memoryview | None = None
        self._goes_on = False
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """The connection has ended, or will take no further call."""
        return self._ended is not None or self.is_leaving

    async def read(self) -> memoryview | None:
        """The next message, good until the next one is asked for; None: there is none, and `error` may say why."""
        if self._held is not None:
            self.message_read(self._held)
            self._held = None
        while not self._messages:
            if not self.stream:
                return None
            self.resume()
            self._news.clear()
            await self._news.wait()
        self._held = self._messages.popleft()
        return self._held

    def go_on(self) -> None:
        """Waits for another hand-off once the one that was read has come to its end."""
        self._goes_on = True
        if self._messages:
            # Of no use, and not to be taken for some of the next.
            self.abort()
            return
        self.resume()
        if not self.stream:
            self._begin()

    def opened(self) -> None:
        """`Http2`."""
        self._begin()

    def headers_came(self, headers: Headers, *, is_last: bool) -> None:
        """`Http2`."""
        given = dict(headers)
        if not is_last and given.get(":status") == "200":
            self.is_waiting = self.has_waited = True
            self._on_change(self)
            return
        self.end_call()
        status = given.get("grpc-status", "")
        if not is_last or status != "0":
            self.error, self.is_refused = _error(headers, given), True
        self._end()

    def message_came(self, message: memoryview) -> None:
        """`Http2`."""
        self._messages.append(message)
        # Until it is read, the other side is held up by the kernel's buffers.
        self.pause()
        self._news.set()

    def call_ended(self, error: K3svcError | None) -> None:
        """`Http2`."""
        self.end_call()
        self.error = error or Unavailable("the call ended without a status", reason="STATE_CONNECTION_LOST")
        self._end()

    def closed(self) -> None:
        """`Http2`."""
        self._on_change(self)

    def _begin(self) -> None:
        if self.is_over:
            return
        self._goes_on, self.is_waiting, self.error = False, False, None
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self.begin_call()
        self.send_headers(
            [
                (":method", "POST"),
                (":scheme", "http" if self.context is None else "https"),
                (":path", METHOD),
                (":authority", self._authority),
                ("te", "trailers"),
                CONTENT_TYPE,
                *self._metadata(),
            ]
        )
        self.send_last(prefill_service_pb2.ReadRequest(ticket=self.ticket).SerializeToString())

    def _end(self) -> None:
        self.is_waiting = False
        self._news.set()
        if self.error is not None:
            self.abort()
        elif self._goes_on:
            self._begin()


class KeptReaders:
    """The readers of one prefill service. Belongs to an event loop."""

    def __init__(
        self, target: str, *, server_name: str, credentials: CallerCredentials, max_message_bytes: int
    ) -> None:
        """`target`: host:port of the service. `server_name`: host that its certificate must have; empty: that one."""
        self._target = target
        self._host = target.rpartition(":")[0].strip("[]")
        self._server_name = server_name or self._host
        self._credentials = credentials
        self._max_message_bytes = max_message_bytes
        self._unused: dict[StateReader, asyncio.TimerHandle] = {}
        """Those that wait, or are about to."""
        self._opening: set[asyncio.Task[None]] = set()
        self._retry_at = 0.0

    def take(self) -> StateReader | None:
        """One that waits at the service now; whoever takes it gives it back or closes it."""
        context = self._credentials.tls_context()
        for reader in [*self._unused]:
            if reader.context is not context:
                # Its certificates have changed since.
                reader.close()
            elif reader.is_waiting and not reader.is_over:
                self._unused.pop(reader).cancel()
                return reader
        return None

    def learn(self, port: int) -> None:
        """The service has a state port, and a hand-off found no reader: makes one for the next."""
        now = asyncio.get_running_loop().time()
        if not port or len(self._unused) + len(self._opening) >= KEPT_READERS or now < self._retry_at:
            return
        task = asyncio.ensure_future(self._open(port))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def give_back(self, reader: StateReader, *, was_used: bool) -> None:
        """Its hand-off is complete. Without `was_used` the service did not know the ticket: the call may never end."""
        if not was_used:
            self._leave_alone("the service does not know who waits there")
        if reader.is_over or not was_used or len(self._unused) >= KEPT_READERS:
            reader.close()
        else:
            self._keep(reader)
            reader.go_on()

    def close(self) -> None:
        """Closes those that are not in use."""
        for task in [*self._opening]:
            task.cancel()
        for reader in [*self._unused]:
            self._unused.pop(reader).cancel()
            reader.abort()

    def distrust(self) -> None:
        """Nothing came by the reader of a hand-off: what is between here and the port may forget connections."""
        self.close()
        self._leave_alone("nothing came by a connection that was there")

    async def _open(self, port: int) -> None:
        # What the log says of it is about no request.
        bind_request_id("")
        context = self._credentials.tls_context()
        reader = StateReader(
            authority=f"{self._target.rpartition(':')[0]}:{port}",
            context=context,
            metadata=self._credentials.metadata,
            max_message_bytes=self._max_message_bytes,
            on_change=self._changed,
        )
        loop = asyncio.get_running_loop()
        name = None if context is None else self._server_name
        opening = asyncio.ensure_future(
            loop.create_connection(lambda: reader, self._host, port, ssl=context, server_hostname=name)
        )
        try:
            await asyncio.wait({opening}, timeout=CONNECT_S)
            if not opening.done():
                raise TimeoutError(f"no connection within {CONNECT_S:g} s")
            opening.result()
            if reader.is_over:
                raise ConnectionError(f"it ended at once: {reader.error}")
        except (OSError, UnicodeError) as error:
            self._leave_alone(error)
        else:
            self._keep(reader)
        finally:
            opening.cancel()
            if reader not in self._unused:
                reader.abort()

    def _leave_alone(self, error: object) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        log.warning(
            "the state port of prefill service %s cannot be used, hand-offs come in the stream of their call: %s",
            self._target,
            error,
            extra={"reason": "STATE_PORT_UNUSABLE"},
        )

    def _keep(self, reader: StateReader) -> None:
        self._unused[reader] = asyncio.get_running_loop().call_later(KEPT_S, reader.close)

    def _changed(self, reader: StateReader) -> None:
        if reader.is_over and reader in self._unused:
            self._unused.pop(reader).cancel()
            if reader.is_refused or not reader.has_waited:
                self._leave_alone(reader.error)


def _error(headers: Headers, given: dict[str, str]) -> K3svcError:
    """What a status that is not OK, or no status at all, says."""
    number = given.get("grpc-status", "")
    codes = {str(code.value[0]): code for code in grpc.StatusCode}
    if number not in codes or number == "0":
        return Unavailable(
            f"an answer without a status of gRPC (:status {given.get(':status')})", reason="STATE_CONNECTION_LOST"
        )
    trailing = []
    for key, value in headers:
        try:
            data = base64.b64decode(value + "=" * (-len(value) % 4)) if key.endswith("-bin") else value
        except ValueError:
            continue
        trailing.append((key, data))
    message = unquote(given.get("grpc-message", ""))
    return error_from_rpc(
        grpc.aio.AioRpcError(codes[number], grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=message)
    )
