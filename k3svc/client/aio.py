"""AsyncClient: generation and admin calls over one or several decode services."""

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3svc.client.endpoints import Balance, Endpoints, EndpointState, Route
from k3svc.client.events import ModelInfo, ServiceLoad, load_from_pb, model_info_from_pb
from k3svc.client.generation import GenerateCall, Generation
from k3svc.client.request import Message, Options, build_request
from k3svc.client.retry import RetryPolicy
from k3svc.core.targets import Report
from k3svc.errors import Cancelled, Incompatible, InvalidRequest, K3svcError, NotFound, Unavailable
from k3svc.rpc.credentials import CallerCredentials
from k3svc.rpc.discovery import Address
from k3svc.rpc.probe import probe
from k3svc.rpc.status import error_from_rpc, unreachable
from k3svc.rpc.waiting import within
from k3svc.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    decode_service_pb2,
    decode_service_pb2_grpc,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

ADMIN_TIMEOUT_S = 10.0
ROLE_TIMEOUT_S = 2.0
RECONNECT_S = 0.7
"""More than a channel waits before it looks again for a service that was not there."""
PROBE_TIMEOUT_S = 2.0
DECODE_SERVICE = "k3svc.v1.DecodeService"
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    # Without these a restarted service is not seen for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # One connection a client: two clients of a process shall not share the fate of one socket.
    ("grpc.use_local_subchannel_pool", 1),
)


class AsyncClient:
    """Client of decode services that serve the same model. All methods run on one event loop.

    Requests go to the endpoints in proportion to their free room (k3svc.client.endpoints); a request moves on to
    another one when its own is full or gone, with the same tokens (k3svc.client.generation). Admin calls work on
    services of every role.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        retry: RetryPolicy | None = None,
        balance: Balance | None = None,
        credentials: CallerCredentials | None = None,
    ) -> None:
        """`endpoints`: one or several of host:port, dns:///HOST:PORT for all addresses of a name, file:PATH with a
        host:port a line; names and files are followed. `credentials` None: no TLS, no token. Raises InvalidRequest.
        """
        names = (endpoints,) if isinstance(endpoints, str) else tuple(endpoints)
        if not names:
            raise InvalidRequest("endpoints", "none", "at least one host:port")
        self._retry = retry or RetryPolicy()
        self._credentials = credentials or CallerCredentials()
        self._targets = Endpoints(names, balance or Balance(), self._report, self._forget)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._generations: WeakSet[Generation] = WeakSet()
        self._closed = False

    @property
    def endpoints(self) -> tuple[str, ...]:
        """host:port of all services as they were found last; a name of dns:/// is first looked up by `find`, or by a
        request.
        """
        return self._targets.names

    def endpoint_states(self) -> list[EndpointState]:
        """What is known of each endpoint, and how many calls went there."""
        return self._targets.states()

    def calls_by_endpoint(self) -> dict[str, int]:
        """How many calls went to each endpoint, those that have left lately among them."""
        return self._targets.calls()

    async def find(self) -> tuple[str, ...]:
        """Looks up which endpoints there are now. Raises Unavailable when there is none."""
        return await self._targets.find()

    async def __aenter__(self) -> "Self":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all requests of this client and its connections. Safe to repeat."""
        self._closed = True
        for generation in list(self._generations):
            generation.cancel()
        await self._targets.close()
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = None,
        **options: "Unpack[Options]",
    ) -> Generation:
        """A request for the continuation of a text, of token ids, or of a conversation (exactly one of them).

        `timeout_s` bounds the request with all its attempts. The answer to messages is parsed: Delta.text is the
        answer, Delta.reasoning the think channel. Raises InvalidRequest, also later from the service, which checks
        the ranges.
        """
        request = build_request(prompt=prompt, tokens=tokens, messages=messages, options=options)
        parses_answer = messages is not None and not (request.include_control_text or request.skip_text)
        if parses_answer:
            request.include_control_text = True
        generation = Generation(
            request,
            self._call_generate,
            self._generate_error,
            Route(self._targets),
            self._retry,
            parses_answer=parses_answer,
            timeout_s=timeout_s,
        )
        self._generations.add(generation)
        return generation

    async def abort(self, request_id: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> bool:
        """Ends a request wherever it runs, with finish reason ABORT; whether one of the services had it. Raises the
        error of a service that could not be asked, unless another one had it.
        """
        request, metadata = decode_service_pb2.AbortRequest(request_id=request_id), self._credentials.metadata()
        await self.find()
        stubs = [decode_service_pb2_grpc.DecodeServiceStub(self._channel(name)) for name in self._targets.in_use]
        answers: Sequence[Any] = await asyncio.gather(
            *(stub.Abort(request, timeout=timeout_s, metadata=metadata) for stub in stubs), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if any(answer.was_live for answer in answers if answer not in errors):
            return True
        for error in errors:
            raise error_from_rpc(error) if isinstance(error, grpc.aio.AioRpcError) else error
        return False

    async def model_info(self, endpoint: str | None = None, *, timeout_s: float = ADMIN_TIMEOUT_S) -> ModelInfo:
        """The model and the limits of an endpoint, of the first one by default."""
        endpoint = endpoint or (await self.find())[0]
        stub = admin_service_pb2_grpc.AdminServiceStub(await self._settled_channel(endpoint))
        try:
            answer = await stub.GetModelInfo(
                admin_service_pb2.GetModelInfoRequest(), timeout=timeout_s, metadata=self._credentials.metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise error_at(endpoint, error) from error
        return model_info_from_pb(answer)

    async def load(self, endpoint: str | None = None, *, timeout_s: float = ADMIN_TIMEOUT_S) -> ServiceLoad:
        """Current use of pools and queues of an endpoint, of the first one by default."""
        endpoint = endpoint or (await self.find())[0]
        stub = admin_service_pb2_grpc.AdminServiceStub(await self._settled_channel(endpoint))
        try:
            answer = await stub.GetLoad(
                admin_service_pb2.GetLoadRequest(), timeout=timeout_s, metadata=self._credentials.metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise error_at(endpoint, error) from error
        return load_from_pb(answer)

    async def health(
        self, endpoint: str | None = None, *, service: str = "", timeout_s: float = ADMIN_TIMEOUT_S
    ) -> str:
        """What grpc.health.v1 says of a service: SERVING, NOT_SERVING or UNKNOWN. NotFound for an unknown service."""
        endpoint = endpoint or (await self.find())[0]
        stub = health_pb2_grpc.HealthStub(await self._settled_channel(endpoint))
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFound(f"{endpoint} has no service {service!r}", reason="UNKNOWN_SERVICE") from error
            raise error_at(endpoint, error) from error
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def wait_ready(self, timeout_s: float, *, service: str = "") -> None:
        """Returns when every endpoint is SERVING. Raises Unavailable naming those that are not in time."""
        endpoints = await self.find()
        tasks = {endpoint: asyncio.ensure_future(self._until_serving(endpoint, service)) for endpoint in endpoints}
        try:
            done, pending = await asyncio.wait(tasks.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if pending:
                late = [endpoint for endpoint, task in tasks.items() if task in pending]
                raise Unavailable(f"not serving within {timeout_s:g} s: {', '.join(late)}")
        finally:
            for task in tasks.values():
                task.cancel()

    async def _until_serving(self, endpoint: str, service: str) -> None:
        stub = health_pb2_grpc.HealthStub(self._channel(endpoint))
        while True:
            call = stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)
            try:
                async for response in call:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise error_from_rpc(error) from error
            finally:
                call.cancel()
            await asyncio.sleep(self._retry.backoff_s)

    def _call_generate(
        self, endpoint: str, request: decode_service_pb2.GenerateRequest, timeout_s: float | None
    ) -> GenerateCall:
        stub = decode_service_pb2_grpc.DecodeServiceStub(self._channel(endpoint))
        call: GenerateCall = stub.Generate(request, timeout=timeout_s, metadata=self._credentials.metadata())
        return call

    async def _generate_error(self, endpoint: str, rpc: grpc.aio.AioRpcError) -> K3svcError:
        """The error of a Generate call; of a service that has no such method, what it is instead."""
        error = error_at(endpoint, rpc)
        if rpc.code() is not grpc.StatusCode.UNIMPLEMENTED:
            return error
        try:
            role = (await self.model_info(endpoint, timeout_s=ROLE_TIMEOUT_S)).role
        except K3svcError:
            return Incompatible(f"{endpoint} is no decode service: {error.message}", reason="WRONG_ROLE")
        return Incompatible(f"{endpoint} is a {role} service; requests go to a decode service", reason="WRONG_ROLE")

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if self._closed:
            raise Cancelled("the client is closed")
        if endpoint not in self._channels:
            options = (*CHANNEL_OPTIONS, *self._targets.address(endpoint).channel_options())
            self._channels[endpoint] = self._credentials.open_channel(endpoint, options)
        return self._channels[endpoint]

    async def _settled_channel(self, endpoint: str) -> grpc.aio.Channel:
        """The channel of a call that is made once: a service that listens by now is found, although it did not when
        the channel looked last.
        """
        channel = self._channel(endpoint)
        if channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(RECONNECT_S, channel.channel_ready())
        return channel

    async def _report(self, address: Address) -> Report | None:
        channel, metadata = self._channel(address.target), self._credentials.metadata()
        return await probe(channel, DECODE_SERVICE, metadata=metadata, timeout_s=PROBE_TIMEOUT_S)

    async def _forget(self, endpoint: str) -> None:
        if (channel := self._channels.pop(endpoint, None)) is not None:
            await channel.close()


def error_at(endpoint: str, rpc: grpc.aio.AioRpcError) -> K3svcError:
    """The error of a call to an endpoint. What the transport says of one that cannot be reached is put in our words,
    with reason UNREACHABLE.
    """
    message = unreachable(rpc, endpoint)
    return error_from_rpc(rpc) if message is None else Unavailable(message, reason="UNREACHABLE")
