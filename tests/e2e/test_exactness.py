"""200 mixed requests: the same tokens alone, in batches, for every chunk size, preempted, in one process or two."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient
from k3svc.config import Config, load_config
from k3svc.core.events import Delta
from k3svc.core.request import GenerateRequest, SamplingParams, StopParams
from k3svc.engine.build import build_decode, build_prefill
from k3svc.engine.decode import DecodeEngine, TextOptions
from k3svc.testing.network import DirectPeer

NANO = Path(__file__).parents[2] / "models" / "k3-nano"
COUNT = 200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def make_requests() -> list[GenerateRequest]:
    rng = random.Random(11)
    sizes = (1, 2, 16, 63, 64, 65, 128, 257, 400)
    samplings: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.3, "logit_bias": {7: 4.0}},
    )
    return [
        GenerateRequest(
            request_id=f"r{index}",
            prompt=tuple(rng.randrange(3800) for _ in range(rng.choice(sizes))),
            sampling=SamplingParams(**rng.choice(samplings), seed=rng.randrange(2**64)),
            stop=StopParams(max_tokens=rng.randint(1, 64), ignore_eos=True),
        )
        for index in range(COUNT)
    ]


REQUESTS = make_requests()


def config(*settings: str) -> Config:
    base = [f"model.path={NANO}", "model.device=cpu", "log.level=warning", "cache.num_pages=1024"]
    base += ["cache.num_slots=64", "decode.max_waiting=256", "decode.prefill=here:1"]
    return load_config(None, [*base, *settings])


@asynccontextmanager
async def one_process() -> AsyncIterator[DecodeEngine]:
    """Both engines in this process, and no socket between them."""
    prefill = build_prefill(config(), lambda *_: None)
    peer = DirectPeer("here", prefill.engine)
    decode = build_decode(config(), [peer], lambda *_: None)
    tasks = [asyncio.create_task(prefill.engine.run()), asyncio.create_task(decode.engine.run())]
    try:
        yield decode.engine
        decode.engine.drain()
        await tasks[1]
        prefill.engine.drain()
        await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        prefill.loaded.runner.close()
        decode.loaded.runner.close()


async def run_here(engine: DecodeEngine, request: GenerateRequest) -> tuple[int, ...]:
    events = [event async for event in engine.submit(request, TextOptions(enabled=False))]
    return tuple(token for event in events if isinstance(event, Delta) for token in event.token_ids)


async def run_there(client: AsyncClient, request: GenerateRequest) -> tuple[tuple[int, ...], int]:
    params = request.sampling
    result = await client.generate(
        tokens=request.prompt,
        max_tokens=request.stop.max_tokens or 0,
        ignore_eos=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
    ).result()
    return result.token_ids, result.timings.preemptions if result.timings else 0


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """The tokens of each request by itself, in one process."""

    async def main() -> list[tuple[int, ...]]:
        async with one_process() as engine:
            return [await run_here(engine, request) for request in REQUESTS]

    return asyncio.run(main())


async def test_in_batches_of_64_in_one_process(alone: list[tuple[int, ...]]) -> None:
    async with one_process() as engine:
        for first in range(0, COUNT, 64):
            batch = REQUESTS[first : first + 64]
            got = await asyncio.gather(*(run_here(engine, request) for request in batch))
            assert list(got) == alone[first : first + 64]


@pytest.mark.parametrize("chunk_tokens", [64, 256, 1024])
async def test_in_two_processes_for_every_chunk_size(alone: list[tuple[int, ...]], chunk_tokens: int) -> None:
    stack = Stack(config(f"prefill.chunk_tokens={chunk_tokens}"))
    async with stack, AsyncClient(stack.decode_endpoints) as client:
        got = await asyncio.gather(*(run_there(client, request) for request in REQUESTS))
    assert [tokens for tokens, _ in got] == alone


async def test_with_preemption_forced(alone: list[tuple[int, ...]]) -> None:
    stack = Stack(config("cache.num_pages=29", "cache.page_size=16", "decode.max_transfers=16"))
    async with stack, AsyncClient(stack.decode_endpoints) as client:
        got = await asyncio.gather(*(run_there(client, request) for request in REQUESTS))
    assert [tokens for tokens, _ in got] == alone
    assert sum(preemptions for _, preemptions in got) >= 10, "the pool was not small enough"
