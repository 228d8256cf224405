"""What every call goes through: who calls and how much, request id for the log, errors to statuses, one count."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc

from k3svc.errors import EngineFault, K3svcError
from k3svc.obs.log import bind_request_id, current_request_id
from k3svc.obs.metrics import Metrics
from k3svc.rpc.access import Access, Caller
from k3svc.rpc.status import code_of, status_of

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


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
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.request_streaming:
            assert handler.response_streaming, method
            return grpc.stream_stream_rpc_method_handler(self._stream(method, caller, handler.stream_stream), *codecs)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream(method, caller, handler.unary_stream), *codecs)
        return grpc.unary_unary_rpc_method_handler(self._unary(method, caller, handler.unary_unary), *codecs)

    def _refusal(self, method: str, error: K3svcError) -> "grpc.RpcMethodHandler[Any, Any]":
        async def handle(_requests: Any, context: _Context) -> None:
            await self._abort(method, context, error)

        # Of a call of any kind; a handler of streams is the one that starts before a request has come.
        return grpc.stream_stream_rpc_method_handler(cast("Any", handle))

    def _unary(self, method: str, caller: Caller, call: Callable[[Any, _Context], Awaitable[Any]]) -> Any:
        async def work(request: Any, context: _Context) -> Any:
            with self._access.call(caller, method, is_stream=False):
                return await call(request, context)

        async def handle(request: Any, context: _Context) -> Any:
            return await self._run(method, request, context, work(request, context))

        return handle

    def _stream(self, method: str, caller: Caller, call: Callable[[Any, _Context], Any]) -> Any:
        async def write_all(request: Any, context: _Context) -> None:
            with self._access.call(caller, method, is_stream=True):
                responses = call(request, context)
                if inspect.isawaitable(responses):
                    await responses
                    return
                async with aclosing(responses):
                    async for response in responses:
                        await context.write(response)

        async def handle(request: Any, context: _Context) -> None:
            await self._run(method, request, context, write_all(request, context))

        return handle

    async def _run(self, method: str, request: Any, context: _Context, work: Awaitable[Any]) -> Any:
        bind_request_id(getattr(request, "request_id", ""))
        failure: K3svcError
        try:
            result = await work
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
