"""SglangScheduler over the engines. Methods that are not here are UNIMPLEMENTED, at once.

A gateway does not cancel the stream of a client that has gone; it calls Abort. So either ends a request, and Abort ends
its stream as well. Abort of a request that has ended, or that nobody has heard of, is fine.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import grpc

from k3svc.core.events import Delta, Finished
from k3svc.core.request import GenerateRequest
from k3svc.engine.decode import TextOptions
from k3svc.engine.peers import PrefillPeers
from k3svc.errors import AlreadyExists, Cancelled, InvalidRequest, K3svcError
from k3svc.gateway.about import About
from k3svc.gateway.answers import Answer, ended_early, sign_of_life
from k3svc.gateway.kv_events import KvEvents
from k3svc.gateway.protos import SERVICE, common_pb2
from k3svc.gateway.protos import sglang_scheduler_pb2 as pb2
from k3svc.gateway.requests import constraint_from_pb, field_names, generate_request_from_pb
from k3svc.gateway.rooms import Room, Rooms
from k3svc.obs.log import bind_request_id
from k3svc.rpc.access import caller_name, tenant_of, tokens_in_flight
from k3svc.text.grammar import Constraint, GrammarCompiler, LlgGrammar
from k3svc.text.tokenizer import Tokenizer

_Context = grpc.aio.ServicerContext[Any, Any]

_ABORTED = "ABORTED_BY_GATEWAY"


class TokenStream(AsyncIterable[Delta | Finished], Protocol):
    """k3svc.engine.stream.TokenStream."""

    def cancel(self) -> None: ...


class DecodeEngine(Protocol):
    """What is needed of k3svc.engine.decode.DecodeEngine."""

    peers: PrefillPeers

    def submit(self, request: GenerateRequest, text: TextOptions, *, deadline: float | None) -> TokenStream: ...
    def abort(self, request_id: str) -> bool: ...


class GatewayServicer:
    """What prefill and decode have in common."""

    def __init__(self, about: About, is_serving: Callable[[], bool], *, seed: int, max_context_tokens: int) -> None:
        self.about = about
        self._is_serving = is_serving
        self._seed = seed
        self._max_context_tokens = max_context_tokens

    def generate(self, request: pb2.GenerateRequest, context: _Context) -> AsyncGenerator[pb2.GenerateResponse, None]:
        raise NotImplementedError

    def abort_request(self, request_id: str) -> bool:
        """Ends a request of this caller; False when there is none."""
        raise NotImplementedError

    async def abort(self, request: pb2.AbortRequest, _context: _Context) -> pb2.AbortResponse:
        was_live = self.abort_request(request.request_id)
        return pb2.AbortResponse(success=True, message="aborted" if was_live else "no request of this id is live")

    async def health_check(self, _request: pb2.HealthCheckRequest, _context: _Context) -> pb2.HealthCheckResponse:
        healthy = self._is_serving()
        return pb2.HealthCheckResponse(healthy=healthy, message="" if healthy else "the step loop is stuck or drains")

    async def get_model_info(self, _request: pb2.GetModelInfoRequest, _context: _Context) -> pb2.GetModelInfoResponse:
        return self.about.model()

    async def get_server_info(
        self, _request: pb2.GetServerInfoRequest, _context: _Context
    ) -> pb2.GetServerInfoResponse:
        return self.about.server()

    async def get_loads(self, request: pb2.GetLoadsRequest, _context: _Context) -> pb2.GetLoadsResponse:
        if request.dp_rank:
            raise InvalidRequest("dp_rank", request.dp_rank, "0")
        return self.about.loads()

    async def get_tokenizer(
        self, _request: common_pb2.GetTokenizerRequest, _context: _Context
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        for chunk in self.about.tokenizer():
            yield chunk

    async def flush_cache(
        self, _request: common_pb2.FlushCacheRequest, _context: _Context
    ) -> common_pb2.FlushCacheResponse:
        return common_pb2.FlushCacheResponse(success=True, message=self.flush())

    def flush(self) -> str:
        """Forgets cached prompts; says what was done."""
        return "this role caches no prompts: there is nothing to flush"

    def more_methods(self) -> "Sequence[tuple[str, Callable[..., Any], Callable[..., Any], Any]]":
        """Name, kind, handler and request of methods that not every role has."""
        return ()

    def register(self, server: grpc.aio.Server) -> None:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: kind(
                call,
                request_deserializer=request.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, kind, call, request in (
                *self.more_methods(),
                ("Generate", stream, self.generate, pb2.GenerateRequest),
                ("Abort", unary, self.abort, pb2.AbortRequest),
                ("HealthCheck", unary, self.health_check, pb2.HealthCheckRequest),
                ("GetModelInfo", unary, self.get_model_info, pb2.GetModelInfoRequest),
                ("GetServerInfo", unary, self.get_server_info, pb2.GetServerInfoRequest),
                ("GetLoads", unary, self.get_loads, pb2.GetLoadsRequest),
                ("GetTokenizer", stream, self.get_tokenizer, common_pb2.GetTokenizerRequest),
                ("FlushCache", unary, self.flush_cache, common_pb2.FlushCacheRequest),
            )
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class DecodeGateway(GatewayServicer):
    """Generate on a decode service: alone, or as the second half of a pair, which fetches the prompt by its room."""

    def __init__(
        self,
        engine: DecodeEngine,
        observe: Callable[[Finished, float], None],
        tokenizer: Tokenizer,
        **common: Any,
    ) -> None:
        """`observe` takes the end of a request and its seconds."""
        super().__init__(**common)
        self._engine = engine
        self._observe = observe
        self._grammars = GrammarCompiler(tokenizer)
        self._eos_token_ids = tokenizer.stop_token_ids
        self._owners: dict[str, tuple[str, TokenStream]] = {}
        self._compiling: dict[str, str] = {}
        """Requests whose grammar is being compiled, and their callers."""

    async def generate(
        self, request: pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[pb2.GenerateResponse, None]:
        arrived = time.monotonic()
        remaining_s: Any = context.time_remaining()  # None without a deadline, whatever the stubs say
        with field_names():
            call = generate_request_from_pb(
                request,
                seed=self._seed,
                max_context_tokens=self._max_context_tokens,
                prefill=self._engine.peers.names,
            )
            constraint = constraint_from_pb(request)
        call = replace(call, tenant=tenant_of(context))
        bind_request_id(call.request_id)
        if constraint is not None:
            grammar = await self._compile(call, constraint)
            if grammar is None:
                for index in range(call.n):
                    yield ended_early(call, "abort", index)
                return
            call = replace(call, grammar=grammar)
        answer = Answer(call, stream=request.stream, eos_token_ids=self._eos_token_ids)
        with field_names(), tokens_in_flight(call.max_tokens_in_all(self._max_context_tokens)):
            deadline = None if remaining_s is None else arrived + remaining_s
            # Text is made for stop strings alone; the gateway makes its own.
            text = TextOptions(enabled=bool(call.stop.stop))
            stream = self._engine.submit(call, text, deadline=deadline)
            self._owners[call.request_id] = owner = (caller_name(), stream)
            try:
                async for event in stream:
                    if isinstance(event, Finished):
                        self._observe(event, time.monotonic() - arrived)
                    for message in answer.messages(event):
                        yield message
            finally:
                stream.cancel()
                if self._owners.get(call.request_id) is owner:
                    del self._owners[call.request_id]

    def abort_request(self, request_id: str) -> bool:
        # A request of another key is as good as none.
        if self._compiling.get(request_id) == caller_name():
            del self._compiling[request_id]
            return True
        name, _ = self._owners.get(request_id, (None, None))
        return name == caller_name() and self._engine.abort(request_id)

    async def _compile(self, call: GenerateRequest, constraint: Constraint) -> LlgGrammar | None:
        """None: the request was aborted meanwhile. A large schema takes a while, during which other streams go on."""
        if call.request_id in self._compiling:
            raise AlreadyExists(f"request {call.request_id!r} is live", request_id=call.request_id)
        self._compiling[call.request_id] = caller_name()
        try:
            grammar = await asyncio.to_thread(self._grammars.compile, constraint, call.prompt)
            return grammar if call.request_id in self._compiling else None
        finally:
            self._compiling.pop(call.request_id, None)


class PrefillGateway(GatewayServicer):
    """Generate on a prefill service: the first half of a pair. It ends when the state of the prompt is on its way."""

    def __init__(
        self,
        rooms: Rooms,
        vocab_size: int,
        kv_events: KvEvents | None = None,
        flush: Callable[[], int] = lambda: 0,
        **common: Any,
    ) -> None:
        """`kv_events`: None without a prefix cache, and SubscribeKvEvents is UNIMPLEMENTED then. `flush` empties the
        cache and returns the number of its pages.
        """
        super().__init__(**common)
        self._rooms = rooms
        self._kv_events = kv_events
        self._flush = flush
        self._vocab_size = vocab_size
        self._legs: dict[str, tuple[str, Room]] = {}

    async def generate(
        self, request: pb2.GenerateRequest, _context: _Context
    ) -> AsyncGenerator[pb2.GenerateResponse, None]:
        with self._refusing(request):
            call = self._check(request)
        assert call.room is not None, "required of a prefill service"
        bind_request_id(call.request_id)
        with self._rooms.leg(call.room.number, call.prompt) as room:
            self._legs[call.request_id] = (caller_name(), room)
            try:
                yield sign_of_life(call)
                await room.wait()
            except Cancelled as error:
                if error.reason != _ABORTED:
                    raise
                yield ended_early(call, "abort")
            else:
                yield ended_early(call, "stop", cached_tokens=room.cached_tokens)
            finally:
                del self._legs[call.request_id]

    def abort_request(self, request_id: str) -> bool:
        name, room = self._legs.get(request_id, (None, None))
        if room is None or name != caller_name():
            return False
        room.end(Cancelled("the gateway aborted the request", reason=_ABORTED))
        return True

    def flush(self) -> str:
        return f"{self._flush()} cached pages forgotten"

    async def subscribe_kv_events(
        self, request: common_pb2.SubscribeKvEventsRequest, _context: _Context
    ) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
        assert self._kv_events is not None, "registered without a cache"
        async with aclosing(self._kv_events.subscribe(request.start_sequence_number)) as batches:
            async for batch in batches:
                yield batch

    def more_methods(self) -> "Sequence[tuple[str, Callable[..., Any], Callable[..., Any], Any]]":
        if self._kv_events is None:
            return ()
        kind, request = grpc.unary_stream_rpc_method_handler, common_pb2.SubscribeKvEventsRequest
        return (("SubscribeKvEvents", kind, self.subscribe_kv_events, request),)

    def _check(self, request: pb2.GenerateRequest) -> GenerateRequest:
        with field_names():
            call = generate_request_from_pb(request, seed=self._seed, max_context_tokens=self._max_context_tokens)
            call.validate(
                vocab_size=self._vocab_size,
                max_context_tokens=self._max_context_tokens,
                max_samples=call.n,
            )
        if call.request_id in self._legs:
            raise AlreadyExists(f"request {call.request_id!r} is live", request_id=call.request_id)
        return call

    @contextmanager
    def _refusing(self, request: pb2.GenerateRequest) -> Iterator[None]:
        """Decode has been sent the same request, and is told when it is refused here."""
        try:
            yield
        except K3svcError as error:
            if request.HasField("disaggregated_params"):
                self._rooms.refuse(request.disaggregated_params.bootstrap_room, error)
            raise
