"""Client: AsyncClient for code without an event loop.

gRPC's asyncio layer wants one event loop a process, so all Clients of a process share one, in a background thread that
lives as long as any of them. Do not mix with an AsyncClient on a loop of your own.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from k3svc.client.aio import ADMIN_TIMEOUT_S, AsyncClient
from k3svc.client.endpoints import Balance, EndpointState
from k3svc.client.events import Completion, Event, ModelInfo, ServiceLoad
from k3svc.client.generation import Generation
from k3svc.client.request import Message, Options
from k3svc.client.retry import RetryPolicy
from k3svc.errors import Cancelled
from k3svc.rpc.credentials import CallerCredentials

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Value = TypeVar("Value")


class _LoopThread:
    """An event loop in a thread, started by its first user and stopped by its last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread

    def acquire(self) -> None:
        with self._lock:
            if self._users == 0:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, name="k3svc-client", daemon=True)
                self._thread.start()
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()

    def run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Waits for the result; an interrupt of the waiting thread cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


_LOOP = _LoopThread()


class Client:
    """AsyncClient with blocking methods, for any number of threads. See there."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        retry: RetryPolicy | None = None,
        balance: Balance | None = None,
        credentials: CallerCredentials | None = None,
    ) -> None:
        self._client = AsyncClient(endpoints, retry=retry, balance=balance, credentials=credentials)
        self._closed = False
        _LOOP.acquire()

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all requests of this client and its connections. Safe to repeat."""
        if not self._closed:
            _LOOP.run(self._client.close())
            self._closed = True
            _LOOP.release()

    def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = None,
        **options: "Unpack[Options]",
    ) -> "SyncGeneration":
        """A request, as AsyncClient.generate."""

        async def start() -> Generation:
            return self._client.generate(prompt, tokens=tokens, messages=messages, timeout_s=timeout_s, **options)

        return SyncGeneration(self._run(start()))

    def abort(self, request_id: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> bool:
        return self._run(self._client.abort(request_id, timeout_s=timeout_s))

    def model_info(self, endpoint: str | None = None, *, timeout_s: float = ADMIN_TIMEOUT_S) -> ModelInfo:
        return self._run(self._client.model_info(endpoint, timeout_s=timeout_s))

    def load(self, endpoint: str | None = None, *, timeout_s: float = ADMIN_TIMEOUT_S) -> ServiceLoad:
        return self._run(self._client.load(endpoint, timeout_s=timeout_s))

    def health(self, endpoint: str | None = None, *, service: str = "", timeout_s: float = ADMIN_TIMEOUT_S) -> str:
        return self._run(self._client.health(endpoint, service=service, timeout_s=timeout_s))

    def wait_ready(self, timeout_s: float, *, service: str = "") -> None:
        self._run(self._client.wait_ready(timeout_s, service=service))

    def endpoint_states(self) -> list[EndpointState]:
        return self._client.endpoint_states()

    def _run(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        if self._closed:
            coroutine.close()
            raise Cancelled("the client is closed")
        return _LOOP.run(coroutine)


class SyncGeneration:
    """Iterator over the events of one request; see Generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @property
    def request_id(self) -> str:
        return self._generation.request_id

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = _LOOP.run(self._next())
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the request."""
        _LOOP.run(self._generation.aclose())

    def result(self) -> Completion:
        """Runs the request to its end; the whole output, with what was iterated over before."""
        return _LOOP.run(self._generation.result())

    async def _next(self) -> Event | None:
        # StopAsyncIteration cannot cross the future between the threads as such.
        return await anext(self._generation, None)
