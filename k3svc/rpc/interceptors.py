"""What every call of a k3svc service goes through: request id for the log, errors to statuses, one count."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc

from k3svc.errors import EngineFault, K3svcError
from k3svc.obs.log import bind_request_id, current_request_id
from k3svc.obs.metrics import Metrics
from k3svc.rpc.status import code_of, status_of

PACKAGE = "/k3svc.v1."

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of k3svc.v1, unary and server-streaming; other services pass through untouched.

    A streaming handler is an async generator. It is driven from a coroutine that writes, so that a cancelled call
    raises CancelledError here and closes the generator before the call's task ends; a generator that gRPC itself
    iterates would be closed by the garbage collector, some time later and in another task.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        # The stubs know no handler of grpc.aio, whose behaviours are coroutines and async generators.
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(PACKAGE):
            return cast("grpc.RpcMethodHandler[Any, Any] | None", handler)
        assert not handler.request_streaming, method
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )

    def _unary(self, method: str, call: Callable[[Any, _Context], Awaitable[Any]]) -> Any:
        async def handle(request: Any, context: _Context) -> Any:
            return await self._run(method, request, context, call(request, context))

        return handle

    def _stream(self, method: str, call: Callable[[Any, _Context], AsyncIterator[Any]]) -> Any:
        async def write_all(request: Any, context: _Context) -> None:
            async with aclosing(call(request, context)) as responses:  # type: ignore[type-var]
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
        except Exception:
            # The boundary: a bug becomes INTERNAL for the caller and a traceback in the log.
            log.exception("%s raised", method)
            failure = EngineFault("internal error; the log of the service has the details", reason="UNEXPECTED")
        else:
            self._count(method, grpc.StatusCode.OK)
            return result
        status = status_of(failure, request_id=current_request_id())
        self._count(method, status.code)
        await context.abort(status.code, status.details, status.trailing_metadata)
        raise AssertionError("abort returned")

    def _count(self, method: str, code: grpc.StatusCode) -> None:
        service, _, name = method.removeprefix("/").partition("/")
        self._metrics.count_rpc(service, name, code.name)
