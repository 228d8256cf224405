from typing import Any

import grpc
import pytest

from k3svc.core.targets import Report
from k3svc.rpc.probe import probe, report_of
from k3svc.v1 import admin_service_pb2
from tests.unit.client.fake_decode import FakeDecode, running

SERVICE = "k3svc.v1.DecodeService"


async def ask(endpoint: str) -> Report | None:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        return await probe(channel, SERVICE, metadata=(), timeout_s=60.0)


async def test_a_report_is_that_of_health_and_load():
    async with running() as fake:
        report = await ask(fake.endpoint)
        assert report == Report(serving=True, free_share=7 / 9)
        await fake.set_serving(False)
        report = await ask(fake.endpoint)
        assert report is not None
        assert not report.serving


async def test_nobody_answers():
    assert await ask("127.0.0.1:1") is None


@pytest.mark.parametrize(
    ("code", "is_known"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, True),
        (grpc.StatusCode.PERMISSION_DENIED, True),
        (grpc.StatusCode.INTERNAL, False),
    ],
)
async def test_who_may_not_be_asked_serves_all_the_same(
    code: grpc.StatusCode, is_known: bool, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(self: FakeDecode, request: Any, context: Any) -> None:
        await context.abort(code, "no")

    monkeypatch.setattr(FakeDecode, "GetLoad", refuse)
    async with running() as fake:
        assert await ask(fake.endpoint) == (Report(serving=True) if is_known else None)


def test_the_scarcer_of_pages_and_slots_counts():
    load = admin_service_pb2.GetLoadResponse(
        free_pages=6, total_pages=8, free_slots=1, total_slots=4, waiting=2, queued_tokens=700
    )
    assert report_of(load, serving=True) == Report(
        serving=True, free_share=0.25, total_slots=4, waiting=2, queued_tokens=700
    )
    load.draining = True
    assert not report_of(load, serving=True).serving
