"""Calls of a decode service on real sockets. Both engines run a model whose tokens depend on every byte of state."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import k3svc
from k3svc.errors import (
    AlreadyExists,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    K3svcError,
    ResourceExhausted,
    Unavailable,
)
from k3svc.rpc.status import error_from_rpc
from k3svc.testing.fakes import VOCAB, expected_tokens
from k3svc.text.tokenizer import Tokenizer
from k3svc.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    decode_service_pb2,
    decode_service_pb2_grpc,
    types_pb2,
)
from tests.e2e.rpc_stack import (
    FINGERPRINT,
    MIB,
    NANO,
    PROMPT,
    health_watch,
    load_of,
    stack,
    until_idle,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


def generate(channel: grpc.aio.Channel, *, timeout: float | None = None, **fields: Any) -> Any:
    """A call of Generate; by default greedy seeds and ids only."""
    values: dict[str, Any] = {
        "request_id": "r1",
        "tokens": types_pb2.TokenIds(ids=PROMPT),
        "sampling": types_pb2.SamplingParams(seed=5),
        "stop": types_pb2.StopParams(max_tokens=12),
        **fields,
    }
    stub: Any = decode_service_pb2_grpc.DecodeServiceStub(channel)
    return stub.Generate(decode_service_pb2.GenerateRequest(**values), timeout=timeout)


async def failure_of(call: Any) -> K3svcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return error_from_rpc(caught.value)


async def rest_of(call: Any) -> list[Any]:
    """The messages that follow those that were read one by one."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def test_a_request_streams_through_both_services(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        messages = [message async for message in generate(here.decode.channel)]
        started, finished = messages[0].started, messages[-1].finished
        assert (started.request_id, started.seed, tuple(started.prompt.ids)) == ("r1", 5, PROMPT)
        assert started.fingerprint.model == "m"
        deltas = [message.delta for message in messages[1:-1]]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == expected_tokens(PROMPT, 12, seed=5)
        assert "".join(delta.text for delta in deltas) == tokenizer.decode(tokens)
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [types_pb2.FINISH_REASON_LENGTH]
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (len(PROMPT), 12)
        load = await load_of(here.prefill.channel)
        assert finished.timings.handoff_bytes == load.handoff_bytes > 0
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_many_streams_at_once_and_several_samples(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:

        async def tokens_of(index: int) -> dict[int, list[int]]:
            call = generate(
                here.decode.channel,
                request_id=f"r{index}",
                tokens=types_pb2.TokenIds(ids=PROMPT[: 5 + 7 * index]),
                sampling=types_pb2.SamplingParams(seed=index, n=2),
                skip_text=True,
            )
            tokens: dict[int, list[int]] = {0: [], 1: []}
            async for message in call:
                tokens[message.delta.index] += message.delta.token_ids
            return tokens

        for index, tokens in enumerate(await asyncio.gather(*map(tokens_of, range(4)))):
            prompt = PROMPT[: 5 + 7 * index]
            assert tokens == {i: expected_tokens(prompt, 12, seed=index, index=i) for i in (0, 1)}
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_cancelling_a_call_frees_pages_and_slots(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        here.decode_runner.close_after = 3
        call = generate(here.decode.channel, stop=types_pb2.StopParams(max_tokens=300))
        while not (await call.read()).HasField("delta"):
            pass
        await here.decode_runner.waiting.wait()
        call.cancel()
        while dict((await load_of(here.decode.channel)).outcomes)["cancelled"] == 0:
            pass
        here.decode_runner.gate.set()
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_cancelling_during_the_hand_off_frees_both_sides(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        here.prefill_runner.gate.clear()
        call = generate(here.decode.channel)
        assert (await call.read()).HasField("started")
        await here.prefill_runner.waiting.wait()
        call.cancel()
        while dict((await load_of(here.decode.channel)).outcomes)["cancelled"] == 0:
            pass
        here.prefill_runner.gate.set()
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_a_deadline_ends_the_request_everywhere(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        here.decode_runner.gate.clear()
        error = await failure_of(generate(here.decode.channel, timeout=0.3))
        assert isinstance(error, DeadlineExceeded)
        here.decode_runner.gate.set()
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_the_deadline_of_a_call_reaches_the_engine(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        submit, deadlines = here.decode_engine.submit, []

        def recording(*values: Any, deadline: float | None) -> Any:
            deadlines.append(deadline)
            return submit(*values, deadline=deadline)

        here.decode_engine.submit = recording  # type: ignore[assignment, method-assign]
        now = time.monotonic()
        for request_id, timeout in (("a", 1000.0), ("b", None)):
            async for _ in generate(here.decode.channel, request_id=request_id, timeout=timeout):
                pass
        assert deadlines[0] == pytest.approx(now + 1000.0, abs=100.0)
        assert deadlines[1] is None


async def test_abort_closes_the_stream_with_its_reason(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        stub: Any = decode_service_pb2_grpc.DecodeServiceStub(here.decode.channel)
        here.decode_runner.gate.clear()
        call = generate(here.decode.channel)
        assert (await call.read()).HasField("started")
        await here.decode_runner.waiting.wait()
        assert (await stub.Abort(decode_service_pb2.AbortRequest(request_id="r1"))).was_live
        messages = await rest_of(call)
        here.decode_runner.gate.set()
        assert messages[0].delta.finish_reason == types_pb2.FINISH_REASON_ABORT
        assert messages[-1].HasField("finished")
        assert not (await stub.Abort(decode_service_pb2.AbortRequest(request_id="r1"))).was_live


async def test_errors_arrive_with_their_details(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        channel = here.decode.channel
        error = await failure_of(generate(channel, sampling=types_pb2.SamplingParams(top_p=3.5)))
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.metadata["allowed"]) == ("sampling.top_p", "a number in (0, 1]")
        assert error.metadata["request_id"] == "r1"
        error = await failure_of(generate(channel, tokens=types_pb2.TokenIds(ids=[1, VOCAB])))
        assert isinstance(error, InvalidRequest)
        assert error.field == "prompt[1]"
        error = await failure_of(generate(channel, request_id="", tokens=types_pb2.TokenIds()))
        assert isinstance(error, InvalidRequest)
        assert len(error.metadata["request_id"]) == 32

        here.decode_runner.gate.clear()
        live = generate(channel)
        assert (await live.read()).HasField("started")
        assert isinstance(await failure_of(generate(channel)), AlreadyExists)
        here.decode_runner.gate.set()
        assert (await rest_of(live))[-1].HasField("finished")


async def test_a_full_queue_says_when_to_come_back(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        here.prefill_runner.gate.clear()
        calls = [generate(here.decode.channel, request_id=f"r{index}") for index in range(20)]
        first = [asyncio.ensure_future(call.read()) for call in calls]
        done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error_from_rpc(task.exception()) for task in done if task.exception()]
        assert errors
        for error in errors:
            assert isinstance(error, ResourceExhausted)
            assert error.retry_after_s > 0
        here.prefill_runner.gate.set()
        for call in calls:
            call.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_a_bug_is_internal_without_internals(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture):
    async with stack(tokenizer) as here:

        def broken(*_: object, **__: object) -> Any:
            raise ZeroDivisionError("secret")

        here.decode_engine.submit = broken  # type: ignore[method-assign]
        error = await failure_of(generate(here.decode.channel))
    assert isinstance(error, EngineFault)
    assert error.reason == "UNEXPECTED"
    assert "secret" not in str(error)
    (record,) = [record for record in caplog.records if record.name == "k3svc.rpc.interceptors"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_what_is_counted(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        async for _ in generate(here.decode.channel):
            pass
        await failure_of(generate(here.decode.channel, sampling=types_pb2.SamplingParams(top_p=3.5)))
        registry = here.decode_role.metrics.registry

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, labels)

        call = {"grpc_service": "k3svc.v1.DecodeService", "grpc_method": "Generate"}
        assert value("grpc_server_handled_total", **call, grpc_code="OK") == 1
        assert value("grpc_server_handled_total", **call, grpc_code="INVALID_ARGUMENT") == 1
        assert value("k3svc_generation_tokens_total") == 12
        assert value("k3svc_request_prompt_tokens_sum") == len(PROMPT)
        assert value("k3svc_inter_token_latency_seconds_count") == 11
        assert value("k3svc_time_to_first_token_seconds_count") == 1
        assert value("k3svc_e2e_request_latency_seconds_count") == 1
        assert value("k3svc_requests_total", outcome="finished") == 1
        assert value("k3svc_slots_free") == 8


async def test_admin_reflection_and_channelz(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        admin: Any = admin_service_pb2_grpc.AdminServiceStub(here.prefill.channel)
        answer = await admin.GetModelInfo(admin_service_pb2.GetModelInfoRequest())
        assert (answer.role, answer.version, answer.device) == ("prefill", k3svc.__version__, "none")
        assert (answer.vocab_size, answer.max_context_tokens, list(answer.stop_token_ids)) == (VOCAB, 400, [7, 9])
        assert answer.fingerprint.wire_layout == FINGERPRINT.wire_layout
        load = await load_of(here.prefill.channel)
        assert load.resident_bytes > 10 * MIB
        assert load.pool_bytes == 12345

        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(here.decode.channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"k3svc.v1.DecodeService", "k3svc.v1.AdminService", "grpc.health.v1.Health"} <= names
        assert "grpc.channelz.v1.Channelz" in names
        channelz: Any = channelz_pb2_grpc.ChannelzStub(here.decode.channel)
        assert (await channelz.GetServers(channelz_pb2.GetServersRequest())).server


async def test_drain_lets_running_requests_finish(tokenizer: Tokenizer):
    async with stack(tokenizer) as here:
        watch = health_watch(here.decode.channel, "k3svc.v1.DecodeService")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        here.decode_runner.gate.clear()
        call = generate(here.decode.channel)
        assert (await call.read()).HasField("started")
        admin: Any = admin_service_pb2_grpc.AdminServiceStub(here.decode.channel)
        await admin.Drain(admin_service_pb2.DrainRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await load_of(here.decode.channel)).draining
        error = await failure_of(generate(here.decode.channel, request_id="late"))
        assert isinstance(error, Unavailable)
        assert error.reason == "DRAINING"
        here.decode_runner.gate.set()
        tokens = [token for message in await rest_of(call) for token in message.delta.token_ids]
        assert tokens == expected_tokens(PROMPT, 12, seed=5)
        watch.cancel()
