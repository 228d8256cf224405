"""What every call goes through: who calls and how much, request id for the log, errors to statuses, one count."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from k3svc.errors import EngineFault, InvalidRequest, K3svcError
from k3svc.obs import trace
from k3svc.obs.log import bind_request_id, current_request_id
from k3svc.obs.metrics import Metrics
from k3svc.rpc.access import Access, Caller
from k3svc.rpc.credentials import REQUEST_ID
from k3svc.rpc.status import code_of, status_of

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]

_Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"
Reader: TypeAlias = "Callable[[bytes], Any] | None"
"""Makes a message of bytes; None: the handler reads by itself."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all services.

    A streaming handler is an async generator or a coroutine that writes. A generator is driven from a coroutine here,
    so that a cancelled call raises CancelledError and closes the generator before the call's task ends; a generator
    that gRPC itself iterates would be closed by the garbage collector, some time later and in another task.
    """

    def __init__(self, metrics: Metrics, access: Access) -> None:
        self._metrics = metrics
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        try:
            caller = self._access.caller_of(method, cast("Any", metadata) or ())
        except K3svcError as error:
            return self._refusal(method, error)
        # The stubs know no handler of grpc.aio, whose behaviours are coroutines and async generators.
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        write = handler.response_serializer
        if handler.request_streaming and handler.response_streaming:
            call = self._stream(method, caller, None, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, write)
        if handler.request_streaming:
            call = self._unary(method, caller, None, handler.stream_unary, is_stream=True)
            return grpc.stream_unary_rpc_method_handler(call, handler.request_deserializer, write)
        # A request of one message is read here: gRPC would answer UNKNOWN to bytes that are none.
        read = handler.request_deserializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, caller, read, handler.unary_stream), None, write
            )
        return grpc.unary_unary_rpc_method_handler(self._unary(method, caller, read, handler.unary_unary), None, write)

    def _refusal(self, method: str, error: K3svcError) -> "grpc.RpcMethodHandler[Any, Any]":
        async def handle(_requests: Any, context: _Context) -> None:
            await self._abort(method, context, error)

        # Of a call of any kind; a handler of streams is the one that starts before a request has come.
        return grpc.stream_stream_rpc_method_handler(cast("Any", handle))

    def _unary(
        self,
        method: str,
        caller: Caller,
        read: Reader,
        call: Callable[[Any, _Context], Awaitable[Any]],
        *,
        is_stream: bool = False,
    ) -> Any:
        async def handle(message: Any, context: _Context) -> Any:
            async def work(request: Any) -> Any:
                with self._access.call(caller, method, is_stream=is_stream):
                    return await call(request, context)

            return await self._run(method, read, message, context, work)

        return handle

    def _stream(self, method: str, caller: Caller, read: Reader, call: Callable[[Any, _Context], Any]) -> Any:
        async def handle(message: Any, context: _Context) -> None:
            async def write_all(request: Any) -> None:
                with self._access.call(caller, method, is_stream=True):
                    responses = call(request, context)
                    if inspect.isawaitable(responses):
                        await responses
                        return
                    async with aclosing(responses):
                        async for response in responses:
                            await context.write(response)

            await self._run(method, read, message, context, write_all)

        return handle

    async def _run(
        self, method: str, read: Reader, message: Any, context: _Context, work: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        failure: K3svcError
        try:
            metadata = cast("_Metadata", context.invocation_metadata() or ())
            with trace.server_span(method, metadata):
                request = message if read is None else _read(read, message)
                _name_request(request, metadata)
                result = await work(request)
        except K3svcError as error:
            failure = error
            level = logging.ERROR if code_of(error) is grpc.StatusCode.INTERNAL else logging.INFO
            log.log(level, "%s failed: %s", method, error, extra={"reason": error.reason})
        except asyncio.CancelledError:
            self._count(method, grpc.StatusCode.CANCELLED)
            raise
        except grpc.aio.AbortError:
            # Health says so of a service that it does not know.
            self._count(method, grpc.StatusCode.NOT_FOUND)
            raise
        except grpc.aio.InternalError as error:
            # A write found the connection gone; nobody is left to be told.
            log.info("%s: the caller's connection was lost: %s", method, error)
            self._count(method, grpc.StatusCode.CANCELLED)
            return None
        except Exception:
            # The boundary: a bug becomes INTERNAL for the caller and a traceback in the log.
            log.exception("%s raised", method)
            failure = EngineFault("internal error; the log of the service has the details", reason="UNEXPECTED")
        else:
            self._count(method, grpc.StatusCode.OK)
            return result
        await self._abort(method, context, failure)
        raise AssertionError("abort returned")

    async def _abort(self, method: str, context: _Context, error: K3svcError) -> None:
        status = status_of(error, request_id=current_request_id())
        self._count(method, status.code)
        await context.abort(status.code, status.details, status.trailing_metadata)

    def _count(self, method: str, code: grpc.StatusCode) -> None:
        service, _, name = method.removeprefix("/").partition("/")
        self._metrics.count_rpc(service, name, code.name)


def _name_request(request: Any, metadata: _Metadata) -> None:
    """For log lines and traces: a hand-off belongs to the request that decode makes it for."""
    own = getattr(request, "request_id", "")
    origin = next((value for key, value in metadata if key == REQUEST_ID and isinstance(value, str)), "")
    fields = {"attempt": request.attempt} if hasattr(request, "attempt") else {}
    if origin and fields:
        bind_request_id(origin, handoff=own, **fields)
    else:
        bind_request_id(own, **fields)
    trace.follow(own, **fields)


def _read(read: Callable[[bytes], Any], message: bytes) -> Any:
    try:
        return read(message)
    except DecodeError as error:
        raise InvalidRequest(
            "request", f"{len(message)} bytes", "a message of the method's type, text in UTF-8"
        ) from error
