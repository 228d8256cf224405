"""Asking a service how it is: its health and its load, for those who choose among several."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3svc.core.targets import Report
from k3svc.v1 import admin_service_pb2, admin_service_pb2_grpc

# Who cannot be asked may serve all the same: an old version, or a key that allows less.
_NO_ANSWER = frozenset(
    {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
)


async def probe(
    channel: grpc.aio.Channel, service: str, *, metadata: tuple[tuple[str, str], ...], timeout_s: float
) -> Report | None:
    """The report of a service; None: it does not answer. `service`: full name, of which the health is asked."""
    health, admin = health_pb2_grpc.HealthStub(channel), admin_service_pb2_grpc.AdminServiceStub(channel)
    answers: Sequence[Any] = await asyncio.gather(
        health.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s),
        admin.GetLoad(admin_service_pb2.GetLoadRequest(), timeout=timeout_s, metadata=metadata),
        return_exceptions=True,
    )
    for answer in answers:
        if isinstance(answer, grpc.aio.AioRpcError):
            if answer.code() not in _NO_ANSWER:
                return None
        elif isinstance(answer, BaseException):
            raise answer
    checked, load = answers
    serving = not isinstance(checked, health_pb2.HealthCheckResponse) or (
        checked.status == health_pb2.HealthCheckResponse.SERVING
    )
    if not isinstance(load, admin_service_pb2.GetLoadResponse):
        return Report(serving=serving)
    return report_of(load, serving=serving)


def report_of(load: Any, *, serving: bool) -> Report:
    """Of an AdminService.GetLoadResponse."""
    pools = ((load.free_pages, load.total_pages), (load.free_slots, load.total_slots))
    return Report(
        serving=serving and not load.draining,
        free_share=min((free / total for free, total in pools if total), default=1.0),
        total_slots=load.total_slots,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
    )
