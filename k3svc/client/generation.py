"""One request, from its first call to its last event, over as many calls as it takes.

Before the first token a call that fails with UNAVAILABLE or RESOURCE_EXHAUSTED is made again, on the next endpoint or
after the delay that the service asks for. Once there are tokens, a broken stream is resumed with the same seed: the
prompt and the tokens given so far go to the next endpoint, which absorbs them without sending them again, and goes on
with the text from the first character that was still held back. Requests of several samples cannot be absorbed; they
are repeated from the start, and what was given before is compared and left out.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING

import grpc

from k3svc.client.endpoints import Route
from k3svc.client.events import Completion, Event, Finished, Started, finished_from_pb, started_from_pb
from k3svc.client.output import SampleOutput
from k3svc.client.retry import RetryPolicy
from k3svc.core.events import SpeculationStats, Usage
from k3svc.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    Incompatible,
    K3svcError,
    ResourceExhausted,
    Unavailable,
)
from k3svc.rpc.waiting import within
from k3svc.text.parse import ChatOutputParser
from k3svc.v1 import decode_service_pb2

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""Longest wait for an endpoint before the choice is made again."""

GenerateCall = grpc.aio.UnaryStreamCall[decode_service_pb2.GenerateRequest, decode_service_pb2.GenerateResponse]
MakeCall = Callable[[str, decode_service_pb2.GenerateRequest, float | None], GenerateCall]
"""(endpoint, request, timeout in seconds) → the call."""
ErrorOf = Callable[[str, grpc.aio.AioRpcError], Awaitable[K3svcError]]
"""(endpoint, what gRPC raised) → what to tell the caller."""


class Generation:
    """Async iterator over the events of one request: Started, Deltas, Finished. One reader.

    The request is sent when the first event is asked for. Leaving the `async with` block, `aclose` or `cancel` end the
    request on the service. Raises the K3svcError that ended the request; Cancelled after `cancel`.
    """

    def __init__(
        self,
        request: decode_service_pb2.GenerateRequest,
        make_call: MakeCall,
        error_of: ErrorOf,
        route: Route,
        policy: RetryPolicy,
        *,
        parses_answer: bool,
        timeout_s: float | None,
    ) -> None:
        """`parses_answer`: the text is that of a conversation in K3's format, to be taken apart."""
        self._request = request
        self._make_call = make_call
        self._error_of = error_of
        self._route = route
        self._policy = policy
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._outputs = [
            SampleOutput(index, _parser(request) if parses_answer else None) for index in range(_num_samples(request))
        ]
        self._started: Started | None = None
        self._variants: list[str] = []
        self._finished: Finished | None = None
        self._attempts = 0
        self._call: GenerateCall | None = None
        self._closed = asyncio.Event()
        self._events = self._run()
        self._is_read = False

    @property
    def request_id(self) -> str:
        return self._request.request_id

    def __aiter__(self) -> "Self":
        return self

    async def __anext__(self) -> Event:
        self._is_read = True
        try:
            return await anext(self._events)
        finally:
            self._is_read = False

    async def __aenter__(self) -> "Self":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def cancel(self) -> None:
        """Ends the request. Safe to repeat; from the loop's thread."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    async def aclose(self) -> None:
        """Ends the request and frees what it holds here."""
        self.cancel()
        if not self._is_read:
            await self._events.aclose()

    async def result(self) -> Completion:
        """Runs the request to its end; the whole output, with what was iterated over before."""
        async for _ in self:
            pass
        if self._started is None or self._finished is None:
            raise Cancelled(f"request {self.request_id} was closed by the caller")
        return Completion(
            request_id=self._started.request_id,
            seed=self._started.seed,
            prompt_token_ids=self._started.prompt_token_ids,
            samples=tuple(output.sample() for output in self._outputs),
            usage=self._finished.usage,
            timings=self._finished.timings,
            speculation=self._finished.speculation,
            attempts=self._attempts,
            variants=tuple(self._variants),
        )

    async def _run(self) -> AsyncGenerator[Event, None]:
        failures = 0
        last_error: K3svcError | None = None
        while True:
            try:
                endpoint, not_before = await self._route.next()
            except Unavailable as error:
                failures, last_error = failures + 1, error
                await self._wait_until(self._next_time(error, failures), error)
                continue
            if await self._wait_until(not_before, last_error):
                # Another one may have come by now.
                continue
            num_tokens = self._num_tokens()
            self._call = self._make_call(endpoint, self._next_request(), self._remaining_s())
            self._attempts += 1
            self._route.began(endpoint)
            failure: K3svcError | None = None
            try:
                async for response in self._call:
                    if (event := self._take(response)) is not None:
                        yield event
                if self._finished is not None:
                    return
                failure = Unavailable(f"{endpoint} ended the stream of {self.request_id} too early")
            except grpc.aio.AioRpcError as error:
                failure = await self._error_of(endpoint, error)
            except asyncio.CancelledError:
                if self._closed.is_set():
                    raise Cancelled(f"request {self.request_id} was closed by the caller") from None
                raise
            finally:
                self._call.cancel()
                self._route.ended(endpoint, failure)
            if all(output.finish_reason for output in self._outputs):
                self._finished = self._unmeasured_end()
                yield self._finished
                return
            failures = 1 if self._num_tokens() > num_tokens else failures + 1
            is_told = failures > 2 and last_error is not None and failure.message == last_error.message
            last_error = failure
            next_time = self._next_time(failure, failures)
            if failures > 1 and not is_told:
                log.warning("request %s is tried again: %s", self.request_id, failure.message)
            self._route.put_off(endpoint, next_time)

    def _take(self, response: decode_service_pb2.GenerateResponse) -> Event | None:
        kind = response.WhichOneof("event")
        if kind == "started":
            return self._begin(started_from_pb(response.started))
        if kind == "delta":
            index = response.delta.index
            if self._started is None or index >= len(self._outputs):
                raise EngineFault(f"delta of sample {index} out of place in the stream of {self.request_id}")
            return self._outputs[index].take(response.delta)
        if kind == "finished":
            self._finished = finished_from_pb(response.finished)
            return self._finished
        return None

    def _begin(self, started: Started) -> Started | None:
        """Notes who makes the tokens; the event to give, None when a stream is resumed. Raises Incompatible when the
        request went on to a service of another model.
        """
        first, self._started = self._started, self._started or started
        if started.variant not in self._variants:
            self._variants.append(started.variant)
        if first is None:
            return started
        if started.fingerprint != first.fingerprint:
            raise Incompatible(
                f"request {self.request_id} began on model {first.fingerprint[:12]} and cannot go on with "
                f"{started.fingerprint[:12]}",
                reason="RESUME_DIFFERS",
            )
        if started.variant != first.variant:
            log.warning(
                "request %s began on %s and goes on with %s: its bits may differ from those of one service",
                self.request_id,
                first.variant,
                started.variant,
            )
        return None

    def _next_request(self) -> decode_service_pb2.GenerateRequest:
        """The request; after a break, with the seed in use and, where it can be absorbed, the output so far."""
        request = decode_service_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        if self._started is None:
            return request
        request.sampling.seed = self._started.seed
        num_absorbed = len(request.generated_token_ids.ids) + self._num_tokens()
        # A service refuses to absorb max_tokens tokens, since there is nothing left to generate.
        fits = not request.stop.HasField("max_tokens") or num_absorbed < request.stop.max_tokens
        absorbs = len(self._outputs) == 1 and fits
        if absorbs:
            request.generated_token_ids.ids.extend(self._outputs[0].token_ids)
        for output in self._outputs:
            output.begin_attempt(repeats=not absorbs)
        return request

    def _next_time(self, error: K3svcError, failures: int) -> float:
        """When the endpoint may be tried again. Raises the error when it is final."""
        is_our_own = isinstance(error, AlreadyExists) and self._attempts > 1
        if not (isinstance(error, Unavailable | ResourceExhausted) or is_our_own):
            raise error
        retry_after_s = error.retry_after_s if isinstance(error, Unavailable | ResourceExhausted) else None
        delay_s = self._policy.delay_s(failures, retry_after_s, random.random())
        if delay_s is None:
            raise error
        return time.monotonic() + delay_s

    async def _wait_until(self, not_before: float, last_error: K3svcError | None) -> bool:
        """Waits for that time, but LOOK_AGAIN_S at most; whether it did."""
        if self._deadline is not None and max(not_before, time.monotonic()) >= self._deadline:
            because = f"; last error: {last_error.message}" if last_error is not None else ""
            raise DeadlineExceeded(f"deadline of {self.request_id} passed before it could be tried{because}")
        delay_s = not_before - time.monotonic()
        if delay_s > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(min(delay_s, LOOK_AGAIN_S), self._closed.wait())
        if self._closed.is_set():
            raise Cancelled(f"request {self.request_id} was closed by the caller")
        return delay_s > 0

    def _remaining_s(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def _num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self._outputs)

    def _unmeasured_end(self) -> Finished:
        """The end of a request whose samples are complete although the stream broke before its last message."""
        assert self._started is not None, "samples end after the start"
        absorbed = len(self._request.generated_token_ids.ids)
        usage = Usage(
            prompt_tokens=len(self._started.prompt_token_ids),
            completion_tokens=absorbed + self._num_tokens(),
            cached_tokens=0,
        )
        return Finished(usage=usage, timings=None, speculation=SpeculationStats())


def _num_samples(request: decode_service_pb2.GenerateRequest) -> int:
    return max(1, request.sampling.n)


def _parser(request: decode_service_pb2.GenerateRequest) -> ChatOutputParser:
    num_calls = sum(len(message.tool_calls) for message in request.chat.messages)
    return ChatOutputParser(thinking=request.chat.thinking, num_previous_calls=num_calls)
