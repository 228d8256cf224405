"""SglangScheduler on real sockets, called as a gateway calls it: decode alone, and prefill and decode at once.

Both engines run a model whose tokens depend on every byte of state.
"""

import asyncio
import hashlib
import io
import threading
import zipfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2_grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb2

from k3svc.config import AuthSection, CacheSection, Config, DecodeSection, GatewaySection, ModelSection
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.engine.prefill import PrefillEngine
from k3svc.gateway.build import decode_services, prefill_services
from k3svc.gateway.rooms import Rooms
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.testing.fakes import VOCAB, expected_tokens
from k3svc.text.grammar import GrammarCompiler
from k3svc.text.tokenizer import Tokenizer
from services.prefill.service import SERVICE as PREFILL_SERVICE
from services.prefill.service import PrefillServicer
from tests.e2e.rpc_stack import (
    MIB,
    NANO,
    PROMPT,
    GatedRunner,
    Served,
    decode_role,
    info,
    load_of,
    prefill_role,
    served,
    until_idle,
)

SEED = 11
ROOM = -77
"""Gateways draw any int32."""


@cache
def nano_tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


@dataclass(kw_only=True)
class Pair:
    prefill: Served
    prefill_engine: PrefillEngine
    prefill_runner: GatedRunner
    rooms: Rooms
    decode: Served
    decode_scheduler: DecodeScheduler
    decode_runner: GatedRunner

    async def until_idle(self) -> None:
        await until_idle(self.prefill.channel, self.decode.channel)
        assert self.rooms.num_open == 0


@asynccontextmanager
async def pair(
    *, room_timeout_s: float = 60.0, auth: AuthSection | None = None, snapshots: int = 0
) -> AsyncIterator[Pair]:
    config = Config(
        model=ModelSection(path=str(NANO)),
        cache=CacheSection(page_size=16, num_pages=32, num_slots=8, max_context_tokens=400),
        gateway=GatewaySection(enabled=True, seed=SEED, room_timeout_s=room_timeout_s),
    )
    async with AsyncExitStack() as cleanup:
        rooms = Rooms(timeout_s=room_timeout_s)
        role, prefill_engine, prefill_runner, _ = prefill_role(snapshots=snapshots)
        servicer = PrefillServicer(prefill_engine, max_context_tokens=1025, rooms=rooms)
        ours = prefill_services(rooms, info("prefill"), config, prefill_engine)
        role = replace(role, services={PREFILL_SERVICE: servicer.register, **ours})
        prefill = await cleanup.enter_async_context(served(role, auth=auth))
        peer = GrpcPrefillPeer(prefill.address, timeout_s=20.0, max_message_bytes=MIB)
        cleanup.push_async_callback(peer.close)
        role, decode_engine, decode_runner = decode_role([peer], nano_tokenizer())
        config = replace(config, decode=DecodeSection(prefill=(prefill.address,)))
        ours = decode_services(
            info("decode"), config, decode_engine, nano_tokenizer(), lambda _finished, _seconds: None
        )
        role = replace(role, services={**role.services, **ours})
        decode = await cleanup.enter_async_context(served(role))
        yield Pair(
            prefill=prefill,
            prefill_engine=prefill_engine,
            prefill_runner=prefill_runner,
            rooms=rooms,
            decode=decode,
            decode_scheduler=decode_engine.scheduler,
            decode_runner=decode_runner,
        )


@pytest.fixture
async def running() -> AsyncIterator[Pair]:
    async with pair() as started:
        yield started


def stub_of(served_role: Served) -> Any:
    return sglang_scheduler_pb2_grpc.SglangSchedulerStub(served_role.channel)


def request_of(pair_: Pair | None = None, *, room: int = ROOM, sampling: dict[str, Any] | None = None, **fields: Any):
    """What smg sends; with a pair, what it sends to both of it."""
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "max_new_tokens": 12, "n": 1}
    request = pb2.GenerateRequest(
        request_id=fields.pop("request_id", "r1"),
        tokenized=pb2.TokenizedInput(input_ids=fields.pop("ids", PROMPT)),
        sampling_params=pb2.SamplingParams(**{**values, **(sampling or {})}),
        logprob_start_len=-1,
        **{"stream": True, **fields},
    )
    if pair_ is not None:
        host, _, port = pair_.prefill.address.rpartition(":")
        request.disaggregated_params.bootstrap_host = host
        request.disaggregated_params.bootstrap_port = int(port)
        request.disaggregated_params.bootstrap_room = room
    return request


async def messages(call: Any) -> list[pb2.GenerateResponse]:
    return [message async for message in call]


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await messages(call)
    return caught.value.code(), caught.value.details() or ""


def chunk_tokens(received: list[pb2.GenerateResponse], index: int = 0) -> list[int]:
    return [t for m in received if m.HasField("chunk") and m.chunk.index == index for t in m.chunk.token_ids]


def completes(received: list[pb2.GenerateResponse]) -> dict[int, pb2.GenerateComplete]:
    return {m.complete.index: m.complete for m in received if m.HasField("complete")}


async def both(pair_: Pair, request: Any) -> tuple[list[pb2.GenerateResponse], list[pb2.GenerateResponse]]:
    """The legs of one request, sent at once."""
    return await asyncio.gather(
        messages(stub_of(pair_.prefill).Generate(request)), messages(stub_of(pair_.decode).Generate(request))
    )


async def test_decode_alone_streams_the_tokens_of_the_configured_seed(running: Pair) -> None:
    received = await messages(stub_of(running.decode).Generate(request_of()))
    want = expected_tokens(PROMPT, 12, seed=SEED)
    assert chunk_tokens(received) == want
    assert [m.HasField("complete") for m in received] == [False] * (len(received) - 1) + [True]
    counted = [m.chunk.completion_tokens for m in received[:-1]]
    assert counted == sorted(counted) and counted[-1] == 12
    complete = received[-1].complete
    assert (list(complete.output_ids), complete.finish_reason) == (want, "length")
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (len(PROMPT), 12, 0)
    assert {m.request_id for m in received} == {"r1"}
    await running.until_idle()


async def test_without_stream_there_are_completes_alone_one_a_sample(running: Pair) -> None:
    received = await messages(stub_of(running.decode).Generate(request_of(stream=False, sampling={"n": 3})))
    assert len(received) == 3
    for index, complete in completes(received).items():
        assert list(complete.output_ids) == expected_tokens(PROMPT, 12, seed=SEED, index=index)


async def test_a_pair_meets_in_its_room(running: Pair) -> None:
    leg, received = await both(running, request_of(running))
    assert chunk_tokens(received) == expected_tokens(PROMPT, 12, seed=SEED)
    sign, end = leg
    assert list(sign.chunk.token_ids) == [] and sign.chunk.prompt_tokens == len(PROMPT)
    assert list(end.complete.output_ids) == [] and end.complete.prompt_tokens == len(PROMPT)
    await running.until_idle()


async def test_the_prompt_is_computed_when_decode_asks_and_the_leg_ends_before_decode_does(running: Pair) -> None:
    request = request_of(running)
    leg = asyncio.ensure_future(messages(stub_of(running.prefill).Generate(request)))
    while running.rooms.num_open == 0:
        await asyncio.sleep(0)
    assert running.prefill_engine.load().num_tokens == 0
    running.decode_runner.gate.clear()
    tokens = asyncio.ensure_future(messages(stub_of(running.decode).Generate(request)))
    await leg
    assert not tokens.done()
    assert running.prefill_engine.load().num_tokens == len(PROMPT)
    running.decode_runner.gate.set()
    assert chunk_tokens(await tokens) == expected_tokens(PROMPT, 12, seed=SEED)
    await running.until_idle()


async def test_samples_that_a_gateway_asks_for_one_by_one_differ_as_those_of_one_request(running: Pair) -> None:
    base = "chatcmpl-X-01a228e8-7b8f-77fd-82a2-ffb149ef3b83"
    for index in range(2):
        request = request_of(running, room=100 + index, request_id=f"{base}-{index}")
        _, received = await both(running, request)
        assert chunk_tokens(received) == expected_tokens(PROMPT, 12, seed=SEED, index=index)


async def test_abort_ends_both_halves_wherever_they_are(running: Pair) -> None:
    prefill, decode = stub_of(running.prefill), stub_of(running.decode)
    for room, gate in enumerate((running.prefill_runner, running.decode_runner)):
        request = request_of(running, room=room, sampling={"max_new_tokens": 300})
        gate.waiting.clear()
        gate.gate.clear()
        legs = asyncio.ensure_future(both(running, request))
        await gate.waiting.wait()
        for stub in (decode, prefill):
            assert (await stub.Abort(pb2.AbortRequest(request_id="r1", reason="Stream dropped"))).success
        gate.gate.set()
        leg, received = await legs
        assert completes(received)[0].finish_reason == "abort"
        assert completes(leg)[0].finish_reason == ("abort" if gate is running.prefill_runner else "stop")
        await running.until_idle()


async def test_abort_of_the_leg_alone_ends_the_pull(running: Pair) -> None:
    running.prefill_runner.gate.clear()
    request = request_of(running)
    leg = asyncio.ensure_future(messages(stub_of(running.prefill).Generate(request)))
    tokens = asyncio.ensure_future(code_of(stub_of(running.decode).Generate(request)))
    await running.prefill_runner.waiting.wait()
    await stub_of(running.prefill).Abort(pb2.AbortRequest(request_id="r1"))
    running.prefill_runner.gate.set()
    assert completes(await leg)[0].finish_reason == "abort"
    assert (await tokens)[0] is grpc.StatusCode.CANCELLED
    await running.until_idle()


async def test_abort_finds_a_request_whose_grammar_is_being_compiled(
    running: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go_on = threading.Event(), threading.Event()

    def compile_slowly(_self: GrammarCompiler, _constraint: Any, _prompt: Any) -> None:
        compiling.set()
        go_on.wait()

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    request = request_of(sampling={"regex": "a+", "n": 2})
    call = asyncio.ensure_future(messages(stub_of(running.decode).Generate(request)))
    await asyncio.to_thread(compiling.wait)
    code, _ = await code_of(stub_of(running.decode).Generate(request))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert (await stub_of(running.decode).Abort(pb2.AbortRequest(request_id="r1"))).message == "aborted"
    go_on.set()
    assert [m.complete.finish_reason for m in await call] == ["abort", "abort"]
    assert [m.complete.index for m in await call] == [0, 1]
    await running.until_idle()


async def test_abort_is_idempotent_and_knows_no_unknown_id(running: Pair) -> None:
    for stub in (stub_of(running.prefill), stub_of(running.decode)):
        for _ in range(2):
            answer = await stub.Abort(pb2.AbortRequest(request_id="nobody"))
            assert answer.success and "no request" in answer.message
    await messages(stub_of(running.decode).Generate(request_of()))
    assert (await stub_of(running.decode).Abort(pb2.AbortRequest(request_id="r1"))).success
    assert chunk_tokens(await messages(stub_of(running.decode).Generate(request_of()))) == expected_tokens(
        PROMPT, 12, seed=SEED
    ), "an abort does not outlive its request"


async def test_a_leg_without_a_pull_times_out() -> None:
    async with pair(room_timeout_s=0.05) as running:
        code, details = await code_of(stub_of(running.prefill).Generate(request_of(running)))
        assert (code, "room -77" in details) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
        await running.until_idle()


async def test_a_pull_without_a_leg_times_out() -> None:
    async with pair(room_timeout_s=0.05) as running:
        code, details = await code_of(stub_of(running.decode).Generate(request_of(running)))
        assert (code, "room -77" in details) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
        await running.until_idle()
        assert running.prefill_engine.load().num_tokens == 0


async def test_decode_is_told_at_once_why_the_leg_was_refused(running: Pair) -> None:
    request = request_of(running, ids=(*PROMPT, VOCAB))
    code, _ = await code_of(stub_of(running.prefill).Generate(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    request.tokenized.input_ids.pop()
    code, details = await code_of(stub_of(running.decode).Generate(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"input_ids[{len(PROMPT)}]" in details
    await running.until_idle()


async def test_a_leg_that_is_cancelled_ends_the_pull(running: Pair) -> None:
    running.prefill_runner.gate.clear()
    request = request_of(running)
    leg = stub_of(running.prefill).Generate(request)
    tokens = asyncio.ensure_future(code_of(stub_of(running.decode).Generate(request)))
    assert (await leg.read()).HasField("chunk")
    reading = asyncio.ensure_future(leg.read())
    await running.prefill_runner.waiting.wait()
    leg.cancel()
    while running.rooms.num_open:
        await asyncio.sleep(0.002)
    running.prefill_runner.gate.set()
    assert (await tokens)[0] is grpc.StatusCode.CANCELLED
    with pytest.raises(asyncio.CancelledError):
        await reading
    await running.until_idle()


async def test_a_room_belongs_to_one_prompt_and_one_leg(running: Pair) -> None:
    leg = asyncio.ensure_future(messages(stub_of(running.prefill).Generate(request_of(running))))
    while running.rooms.num_open == 0:
        await asyncio.sleep(0)
    code, _ = await code_of(stub_of(running.prefill).Generate(request_of(running, request_id="r2")))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    code, details = await code_of(stub_of(running.decode).Generate(request_of(running, ids=PROMPT[:-1])))
    assert (code, "room" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert chunk_tokens(await messages(stub_of(running.decode).Generate(request_of(running)))) == expected_tokens(
        PROMPT, 12, seed=SEED
    )
    await leg
    await running.until_idle()


async def test_a_preempted_sample_fetches_its_prompt_without_the_room(running: Pair) -> None:
    """Two requests fill the pool of 32 pages; the younger one gives way, and comes back when its leg is long over."""
    sampling = {"max_new_tokens": 250}
    _, first = await both(running, request_of(running, sampling=sampling, room=1, request_id="alone"))
    legs = [request_of(running, sampling=sampling, room=2 + i, request_id=f"r{i}") for i in range(2)]
    running.decode_runner.gate.clear()
    pairs = [asyncio.ensure_future(both(running, request)) for request in legs]
    while len(running.decode_scheduler.running) < 2:
        await asyncio.sleep(0.002)
    running.decode_runner.gate.set()
    results = await asyncio.gather(*pairs)
    assert running.decode_scheduler.num_preemptions > 0
    for _, received in results:
        assert chunk_tokens(received) == chunk_tokens(first)
    await running.until_idle()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ids": ()}, "tokenized.input_ids"),
        ({"ids": (1, VOCAB)}, "tokenized.input_ids[1]"),
        ({"sampling": {"n": 99}}, "sampling_params.n"),
        ({"sampling": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"sampling": {"max_new_tokens": 10_000}}, "sampling_params.max_new_tokens"),
        ({"sampling": {"min_new_tokens": 20}}, "sampling_params.min_new_tokens"),
        ({"sampling": {"stop_token_ids": [VOCAB]}}, "sampling_params.stop_token_ids"),
        ({"sampling": {"temperature": float("nan")}}, "sampling_params.temperature"),
        ({"sampling": {"top_k": -2}}, "sampling_params.top_k"),
        ({"sampling": {"logit_bias": {"x": 1.0}}}, "sampling_params.logit_bias"),
        ({"sampling": {"logit_bias": {str(VOCAB): 1.0}}}, "sampling_params.logit_bias"),
        ({"return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ({"return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
        ({"lora_id": "x"}, "lora_id"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"request_id": ""}, "request_id"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_its_name(running: Pair, changes: dict[str, Any], field: str) -> None:
    values = dict(changes)
    if "logprob_start_len" in values:
        request = request_of(return_logprob=True)
        request.logprob_start_len = 3
    else:
        request = request_of(**values)
    code, details = await code_of(stub_of(running.decode).Generate(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(f"{field}: ")
    assert (await load_of(running.decode.channel)).outcomes.get("finished", 0) == 0


async def test_roles_refuse_what_belongs_to_the_other(running: Pair) -> None:
    code, details = await code_of(stub_of(running.prefill).Generate(request_of()))
    assert (code, "disaggregated_params" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    elsewhere = request_of(running)
    elsewhere.disaggregated_params.bootstrap_host = "10.0.0.1"
    code, details = await code_of(stub_of(running.decode).Generate(elsewhere))
    assert (code, running.prefill.address in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_live_id_is_refused_and_a_finished_one_is_not(running: Pair) -> None:
    running.decode_runner.gate.clear()
    first = stub_of(running.decode).Generate(request_of(stream=False))
    reading = asyncio.ensure_future(messages(first))
    await running.decode_runner.waiting.wait()
    code, _ = await code_of(stub_of(running.decode).Generate(request_of()))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    running.decode_runner.gate.set()
    await reading
    await messages(stub_of(running.decode).Generate(request_of()))


async def test_a_cancelled_stream_frees_everything(running: Pair) -> None:
    call = stub_of(running.decode).Generate(request_of(sampling={"max_new_tokens": 300}))
    await call.read()
    call.cancel()
    await running.until_idle()


async def test_what_a_service_tells_of_itself(running: Pair) -> None:
    prefill, decode = stub_of(running.prefill), stub_of(running.decode)
    for stub, role in ((prefill, "prefill"), (decode, "decode")):
        assert (await stub.HealthCheck(pb2.HealthCheckRequest())).healthy
        model = await stub.GetModelInfo(pb2.GetModelInfoRequest())
        assert (model.served_model_name, model.model_type, model.vocab_size) == ("fake", "kimi_k3", VOCAB)
        assert (model.max_context_length, model.max_req_input_len) == (400, 399)
        assert list(model.eos_token_ids) == [7, 9] and model.is_generation
        args = (await stub.GetServerInfo(pb2.GetServerInfoRequest())).server_args
        assert args["disaggregation_mode"] == role
        assert (await stub.FlushCache(common_pb2.FlushCacheRequest())).success
    pairing = [
        (await s.GetServerInfo(pb2.GetServerInfoRequest())).server_args["pairing_protocol"] for s in (prefill, decode)
    ]
    assert pairing[0] == pairing[1]


async def test_load_tells_of_waiting_and_running_requests(running: Pair) -> None:
    running.decode_runner.gate.clear()
    call = asyncio.ensure_future(messages(stub_of(running.decode).Generate(request_of())))
    await running.decode_runner.waiting.wait()
    answer = await stub_of(running.decode).GetLoads(pb2.GetLoadsRequest(include=["core", "disagg", "queues", "memory"]))
    (load,) = answer.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens) == (1, 0, 64)
    assert load.token_usage == pytest.approx(4 / 32)
    assert load.disaggregation.mode == "decode"
    assert answer.aggregate.total_running_reqs == 1
    running.decode_runner.gate.set()
    await call


async def test_the_tokenizer_comes_as_an_archive_with_its_digest(running: Pair) -> None:
    chunks = [chunk async for chunk in stub_of(running.decode).GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in ("tiktoken.model", "tokenizer_config.json", "config.json"):
            assert archive.read(name) == (NANO / name).read_bytes()


async def test_other_methods_and_other_dialects_are_unimplemented(running: Pair) -> None:
    for stub in (stub_of(running.prefill), stub_of(running.decode)):
        for call in (
            stub.StartProfile(common_pb2.StartProfileRequest()),
            stub.Embed(pb2.EmbedRequest()),
            stub.ListLoadedLoRAAdapters(pb2.ListLoadedLoRAAdaptersRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    other: Any = running.decode.channel.unary_unary("/vllm.grpc.engine.VllmEngine/HealthCheck")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await other(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_service_that_drains_is_not_healthy(running: Pair) -> None:
    running.decode_runner.gate.clear()
    call = asyncio.ensure_future(messages(stub_of(running.decode).Generate(request_of())))
    await running.decode_runner.waiting.wait()
    running.decode.server.request_drain()
    while (await stub_of(running.decode).HealthCheck(pb2.HealthCheckRequest())).healthy:
        pass
    code, _ = await code_of(stub_of(running.decode).Generate(request_of(request_id="r2")))
    assert code is grpc.StatusCode.UNAVAILABLE
    running.decode_runner.gate.set()
    assert chunk_tokens(await call) == expected_tokens(PROMPT, 12, seed=SEED)
