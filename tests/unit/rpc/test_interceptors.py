"""How a handler's generator ends with its call."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc
import pytest

from k3svc.config import ServerSection
from k3svc.obs.metrics import Metrics
from k3svc.rpc.access import Access
from k3svc.rpc.interceptors import CallInterceptor

LOAD = {
    **dict.fromkeys(("running", "waiting", "in_transfer", "free_pages", "total_pages"), 0),
    **dict.fromkeys(("free_slots", "total_slots", "handoff_bytes"), 0),
    "outcomes": {},
}


class Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class StuckContext:
    """A call whose client does not read."""

    def __init__(self) -> None:
        self.written: list[object] = []
        self.stuck = asyncio.Event()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def write(self, message: object) -> None:
        self.written.append(message)
        self.stuck.set()
        await asyncio.Event().wait()


async def wrapped(metrics: Metrics, handler: Any, method: str = "/k3svc.v1.DecodeService/Generate") -> Any:
    async def continuation(_: grpc.HandlerCallDetails) -> Any:
        return handler

    return await CallInterceptor(metrics, Access(ServerSection(), None)).intercept_service(
        continuation, Details(method)
    )


async def test_a_cancelled_call_closes_its_generator_before_its_task_ends():
    closed_in: list[object] = []

    async def generate(request: object, context: object) -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            closed_in.append(asyncio.current_task())

    metrics = Metrics("decode")
    handler: Any = await wrapped(
        metrics, grpc.unary_stream_rpc_method_handler(cast(Any, generate), request_deserializer=bytes)
    )
    context = StuckContext()
    call = asyncio.create_task(handler.unary_stream(b"", context))
    await context.stuck.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert closed_in == [call]
    assert context.written == [1]
    labels = {"grpc_service": "k3svc.v1.DecodeService", "grpc_method": "Generate", "grpc_code": "CANCELLED"}
    assert metrics.registry.get_sample_value("grpc_server_handled_total", labels) == 1


async def test_unknown_methods_stay_unknown():
    assert await wrapped(Metrics("decode"), None) is None
