"""Real role processes over loopback: golden tokens for several chunk sizes, many requests at once, and bad input."""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient, Completion
from k3svc.config import load_config
from k3svc.core.request import FinishReason
from k3svc.errors import AlreadyExists, DeadlineExceeded, InvalidRequest
from k3svc.v1 import decode_service_pb2
from tests.e2e.test_metrics import get
from tests.e2e.test_monitoring import free_ports

ROOT = Path(__file__).parents[2]
NANO = ROOT / "models" / "k3-nano"
GOLDEN = json.loads((NANO / "golden.json").read_text())["prompts"]
CHUNKS = (64, 192, 4096)
PATIENCE_S = 60.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CHUNKS)
async def chunked(request: pytest.FixtureRequest) -> AsyncIterator[tuple[int, AsyncClient]]:
    """A client of a fresh stack with this chunk size."""
    async with (
        make_stack(f"prefill.chunk_tokens={request.param}") as stack,
        AsyncClient(stack.decode_endpoints) as client,
    ):
        yield request.param, client
        await assert_idle(stack, client)


def make_stack(*settings: str) -> Stack:
    base = [f"model.path={NANO}", "cache.num_pages=640", "cache.num_slots=64", "log.level=warning"]
    return Stack(load_config(None, [*base, *settings]))


async def assert_idle(stack: Stack, client: AsyncClient) -> None:
    """Soon nothing is held on any role: releases are on their way when a stream has ended."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    for endpoint in (*stack.decode_endpoints, *stack.prefill_endpoints):
        while True:
            load = await client.load(endpoint)
            held = (load.running, load.waiting, load.in_transfer)
            if held == (0, 0, 0) and (load.free_pages, load.free_slots) == (load.total_pages, load.total_slots):
                break
            assert asyncio.get_running_loop().time() < deadline, f"{endpoint} still holds {load}"
            await asyncio.sleep(0.02)


async def complete(client: AsyncClient, tokens: list[int], **options: Any) -> Completion:
    return await client.generate(tokens=tokens, **options).result()


@pytest.mark.parametrize("index", range(len(GOLDEN)))
async def test_golden_tokens_and_logits(chunked: tuple[int, AsyncClient], index: int) -> None:
    _, client = chunked
    golden = GOLDEN[index]
    result = await complete(client, golden["ids"], max_tokens=48, temperature=0.0, ignore_eos=True, logprobs=5)
    assert list(result.token_ids) == golden["continuation_ids"]
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage.prompt_tokens == len(golden["ids"])
    assert result.usage.completion_tokens == 48
    assert result.timings is not None
    assert result.timings.handoff_bytes > 5 * (65536 + 9216), "the prompt was prefilled remotely"
    # The service reports log-probabilities; between two ids their difference is that of the logits.
    top, want = result.logprobs[0].top, golden["top5"][-1]
    assert [token_id for token_id, _ in top] == want["ids"]
    for (_, logprob), logit in zip(top, want["logits"], strict=True):
        assert logprob - top[0][1] == pytest.approx(logit - want["logits"][0], abs=1e-3)


def mixed_requests(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    rng = random.Random(5)
    made = []
    for index in range(count):
        tokens = [rng.randrange(3800) for _ in range(rng.choice([1, 2, 17, 63, 64, 65, 130, 300]))]
        options: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "seed": index, "ignore_eos": True}
        options |= rng.choice(
            [
                {"temperature": 0.0},
                {"temperature": 1.0},
                {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
                {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.5},
            ]
        )
        made.append((tokens, options))
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[tuple[Stack, AsyncClient]]:
    """One stack with small pools for everything that does not need its own."""
    async with (
        make_stack("cache.max_context_tokens=2048", "decode.max_waiting=64") as stack,
        AsyncClient(stack.decode_endpoints) as client,
    ):
        yield stack, client


async def test_64_at_once_give_what_each_gives_alone(shared: tuple[Stack, AsyncClient]) -> None:
    stack, client = shared
    requests = mixed_requests(64)
    together = await asyncio.gather(*(complete(client, tokens, **options) for tokens, options in requests))
    for (tokens, options), result in zip(requests, together, strict=True):
        alone = await complete(client, tokens, **options)
        assert result.token_ids == alone.token_ids
        assert len(result.token_ids) == options["max_tokens"]
    await assert_idle(stack, client)


async def test_preemption_changes_no_token(shared: tuple[Stack, AsyncClient]) -> None:
    _, client = shared
    requests = [(tokens, options | {"max_tokens": 70}) for tokens, options in mixed_requests(12)]
    alone = [await complete(client, tokens, **options) for tokens, options in requests]
    async with (
        make_stack("cache.num_pages=10", "cache.page_size=32") as tight,
        AsyncClient(tight.decode_endpoints) as other,
    ):
        fits = [(request, want) for request, want in zip(requests, alone, strict=True) if len(request[0]) < 200]
        results = await asyncio.gather(*(complete(other, tokens, **options) for (tokens, options), _ in fits))
        assert [r.token_ids for r in results] == [want.token_ids for _, want in fits]
        assert sum(r.timings.preemptions for r in results if r.timings) > 0, "the pool was not tight enough"
        await assert_idle(tight, other)


async def test_samples_and_absorbed_tokens(shared: tuple[Stack, AsyncClient]) -> None:
    stack, client = shared
    tokens = GOLDEN[0]["ids"]
    result = await complete(client, tokens, max_tokens=20, temperature=1.0, seed=7, n=3, ignore_eos=True)
    assert len({sample.token_ids for sample in result.samples}) == 3
    first = result.samples[0].token_ids
    for cut in (1, 10, 19):
        rest = await complete(
            client, tokens, max_tokens=20, temperature=1.0, seed=7, ignore_eos=True, generated_token_ids=first[:cut]
        )
        assert rest.token_ids[-(20 - cut) :] == first[cut:]
    await assert_idle(stack, client)


async def test_text_stops_and_chat(shared: tuple[Stack, AsyncClient]) -> None:
    _, client = shared
    golden = GOLDEN[1]
    whole = await client.generate(golden["text"], max_tokens=48, temperature=0.0, ignore_eos=True).result()
    assert whole.text == golden["continuation_text"]
    stop = golden["continuation_text"][20:24]
    cut = await client.generate(golden["text"], max_tokens=48, temperature=0.0, stop=[stop]).result()
    assert cut.text == golden["continuation_text"].partition(stop)[0]
    assert cut.finish_reason is FinishReason.STOP
    answer = await client.generate(
        messages=[{"role": "user", "content": "What is the signature of shutil.copyfile?"}],
        max_tokens=64,
        temperature=0.0,
    ).result()
    assert list(answer.prompt_token_ids) == GOLDEN[3]["ids"]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text
    assert "<|" not in answer.text


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tokens": []}, "prompt"),
        ({"tokens": [4096]}, r"prompt.*\[0\]|prompt"),
        ({"tokens": [1] * 2048}, "prompt|tokens"),
        ({"tokens": [1], "temperature": float("nan")}, "temperature"),
        ({"tokens": [1], "temperature": -1.0}, "temperature"),
        ({"tokens": [1], "top_p": 1.5}, "top_p"),
        ({"tokens": [1], "max_tokens": 5000}, "max_tokens"),
        ({"tokens": [1], "logprobs": 21}, "logprobs"),
        ({"tokens": [1], "n": 1000}, "n"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
    ],
)
async def test_bad_input_names_the_field(
    shared: tuple[Stack, AsyncClient], options: dict[str, Any], field: str
) -> None:
    stack, client = shared
    with pytest.raises(InvalidRequest, match=field):
        await client.generate(**options).result()
    await assert_idle(stack, client)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (b"\xff\xff\xff", "request"),
        (decode_service_pb2.GenerateRequest(text="x").SerializeToString().replace(b"x", b"\xff"), "request"),
        (decode_service_pb2.GenerateRequest(text="x", request_id="y" * 100_000).SerializeToString(), "request_id"),
    ],
)
async def test_bytes_that_are_no_request(shared: tuple[Stack, AsyncClient], message: bytes, field: str) -> None:
    stack, client = shared
    async with grpc.aio.insecure_channel(stack.decode_endpoints[0]) as channel:
        method: Any = channel.unary_stream("/k3svc.v1.DecodeService/Generate")
        call = method(message)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.value.details() or "").startswith(field)
    await assert_idle(stack, client)


async def test_live_duplicates_cancel_and_deadline(shared: tuple[Stack, AsyncClient]) -> None:
    stack, client = shared
    running = client.generate(tokens=[1, 2, 3], max_tokens=2000, n=4, ignore_eos=True, request_id="same")
    events = aiter(running)
    await anext(events)
    await anext(events)
    async with AsyncClient(stack.decode_endpoints) as other:
        with pytest.raises(AlreadyExists):
            await other.generate(tokens=[1], max_tokens=1, request_id="same").result()
    running.cancel()
    await assert_idle(stack, client)
    again = await complete(client, [1, 2, 3], max_tokens=2, request_id="same", ignore_eos=True)
    assert len(again.token_ids) == 2
    with pytest.raises(DeadlineExceeded):
        await client.generate(tokens=[5] * 50, max_tokens=1900, ignore_eos=True, timeout_s=0.5).result()
    await assert_idle(stack, client)


def cpu_s(pid: int | None) -> float:
    """CPU seconds of a process so far."""
    # The fields follow the command in parentheses; the twelfth and the thirteenth of them count clock ticks.
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


async def test_a_fresh_stack_is_quick_small_and_does_not_grow() -> None:
    """Ready after 12 s of CPU time; an idle role under 450 MB beyond its pools; pools keep their size under load."""
    async with make_stack() as stack, AsyncClient(stack.decode_endpoints) as client:
        for process in stack.processes.values():
            assert cpu_s(process.pid) < 12.0
        endpoints = (*stack.decode_endpoints, *stack.prefill_endpoints)
        before = [await client.load(endpoint) for endpoint in endpoints]
        for load in before:
            assert load.resident_bytes - load.pool_bytes < 450e6
        await asyncio.gather(*(complete(client, [index + 1] * 200, max_tokens=4) for index in range(16)))
        await assert_idle(stack, client)
        for endpoint, load in zip(endpoints, before, strict=True):
            after = await client.load(endpoint)
            assert (after.pool_bytes, after.total_pages, after.total_slots) == (
                load.pool_bytes,
                load.total_pages,
                load.total_slots,
            )


async def test_hand_offs_between_hosts_go_by_the_state_port() -> None:
    """What the services of two hosts do, which share no memory: golden tokens, and the way in the metrics."""
    settings = ["transfer.transport=grpc", f"metrics.port={free_ports(2)}"]
    async with make_stack(*settings) as stack, AsyncClient(stack.decode_endpoints) as client:
        for golden in (*GOLDEN[:3], *GOLDEN[:3]):
            result = await complete(client, golden["ids"], max_tokens=48, temperature=0.0, ignore_eos=True)
            assert list(result.token_ids) == golden["continuation_ids"]
        _, page = await asyncio.to_thread(get, f"http://{stack.metrics_endpoints['prefill-0']}/metrics")
        ways = {
            sample.labels["way"]: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "k3svc_handoffs_total"
        }
        assert ways["state_port"] + ways["stream"] == 6
        assert ways["state_port"] >= 3
        assert ways["shm"] == 0
        await assert_idle(stack, client)
