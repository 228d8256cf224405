"""k3svc.v1.DecodeService over a DecodeEngine."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import replace
from typing import Any, Protocol

import grpc

from k3svc.core.events import Delta, Finished
from k3svc.core.request import GenerateRequest
from k3svc.engine.decode import TextOptions
from k3svc.engine.ports import Fingerprint
from k3svc.obs import trace
from k3svc.obs.log import bind_request_id
from k3svc.obs.metrics import Metrics
from k3svc.rpc import codec
from k3svc.rpc.access import caller_name, tenant_of, tokens_in_flight
from k3svc.text.tokenizer import Tokenizer
from k3svc.v1 import decode_service_pb2, decode_service_pb2_grpc

SERVICE = "k3svc.v1.DecodeService"

MANY_STREAMS = 8
"""With fewer streams their messages take no time that steps could use."""

_Context = grpc.aio.ServicerContext[Any, Any]


class TokenStream(AsyncIterable[Delta | Finished], Protocol):
    """k3svc.engine.stream.TokenStream."""

    def cancel(self) -> None: ...
    async def gather(self, seconds: float) -> None: ...


class Engine(Protocol):
    """What the service needs of k3svc.engine.decode.DecodeEngine."""

    def submit(self, request: GenerateRequest, text: TextOptions, *, deadline: float | None) -> TokenStream: ...
    def abort(self, request_id: str) -> bool: ...


class DecodeServicer(decode_service_pb2_grpc.DecodeServiceServicer):
    """Generate and Abort."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        fingerprint: Fingerprint,
        metrics: Metrics,
        *,
        max_context_tokens: int,
        gather_s: float = 0.0,
    ) -> None:
        """`gather_s`: longest time that tokens after the first wait for others of their stream while many are read."""
        self._gather_s = gather_s
        self._engine = engine
        self._max_context_tokens = max_context_tokens
        self._owners: dict[str, tuple[str, TokenStream]] = {}
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._metrics = metrics

    async def Generate(  # noqa: N802  names of RPCs
        self, request: decode_service_pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[decode_service_pb2.GenerateResponse, None]:
        arrived = time.monotonic()
        remaining_s: Any = context.time_remaining()  # None without a deadline, whatever the stubs say
        codec.check_size(request, self._max_context_tokens)
        # A long text takes seconds to encode, during which other streams go on.
        call = await asyncio.to_thread(codec.generate_request_from_pb, request, self._tokenizer)
        call = replace(call, tenant=tenant_of(context))
        bind_request_id(call.request_id)
        trace.follow(call.request_id)
        deadline = None if remaining_s is None else arrived + remaining_s
        with tokens_in_flight(call.max_tokens_in_all(self._max_context_tokens)):
            stream = self._engine.submit(call, codec.text_options_from_pb(request), deadline=deadline)
            self._owners[call.request_id] = owner = (caller_name(), stream)
            try:
                yield codec.started_to_pb(call, self._fingerprint)
                given: dict[int, float] = {}
                async for event in stream:
                    now = time.monotonic()
                    if isinstance(event, Finished):
                        self.observe(event, now - arrived)
                        _trace(event, arrived, now)
                    else:
                        self._observe_delta(event, given, now)
                    yield codec.event_to_pb(event)
                    if self._gather_s and len(self._owners) >= MANY_STREAMS:
                        await stream.gather(self._gather_s)
            finally:
                stream.cancel()
                if self._owners.get(call.request_id) is owner:
                    del self._owners[call.request_id]

    async def Abort(  # noqa: N802
        self, request: decode_service_pb2.AbortRequest, _context: _Context
    ) -> decode_service_pb2.AbortResponse:
        # A request of another key is as good as none.
        name, _ = self._owners.get(request.request_id, (None, None))
        was_live = name == caller_name() and self._engine.abort(request.request_id)
        return decode_service_pb2.AbortResponse(was_live=was_live)

    def register(self, server: grpc.aio.Server) -> None:
        decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    def _observe_delta(self, delta: Delta, given: dict[int, float], now: float) -> None:
        """`given`: when each sample was last given tokens."""
        if not delta.token_ids:
            return
        if delta.index in given:
            for _ in delta.token_ids:
                self._metrics.itl_s.observe((now - given[delta.index]) / len(delta.token_ids))
        given[delta.index] = now

    def observe(self, finished: Finished, e2e_s: float) -> None:
        """Counts a request that has ended, `e2e_s` seconds after it came."""
        usage, timings = finished.usage, finished.timings
        self._metrics.observe_request(
            e2e_s=e2e_s,
            ttft_s=timings.ttft_ms / 1e3,
            tpot_s=timings.tpot_ms / 1e3,
            queue_s=timings.queue_ms / 1e3,
            prefill_s=timings.prefill_ms / 1e3,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
        )
        speculation = finished.speculation
        self._metrics.observe_speculation(
            steps=speculation.steps_with_drafts,
            proposed=speculation.proposed,
            accepted=speculation.accepted,
            late=speculation.late,
            salvaged=speculation.salvaged,
            gaps=speculation.gaps,
            accepted_by_position=speculation.accepted_by_position,
        )


def _trace(finished: Finished, arrived: float, now: float) -> None:
    """The phases of a request that has ended; times of time.monotonic()."""
    timings = finished.timings
    admitted, first = arrived + timings.queue_ms / 1e3, arrived + timings.ttft_ms / 1e3
    tail = {"handoff_bytes": timings.handoff_bytes, "tail_ms": timings.handoff_tail_ms}
    trace.record("queue", arrived, admitted)
    trace.record("hand-off", admitted, first, {**tail, "attempts": timings.prefill_attempts})
    trace.record("decode", first, now, {"tokens": finished.usage.completion_tokens, "preemptions": timings.preemptions})
