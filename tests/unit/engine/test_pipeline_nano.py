"""The trained model with steps that are asked for while others run: what comes out is that of one step at a time."""

import asyncio
import random
from dataclasses import replace

import pytest

from k3svc.core.events import Delta
from k3svc.core.request import FinishReason, GenerateRequest, StopParams
from k3svc.engine.decode import DecodeEngine, TextOptions
from tests.unit.engine.nano_engines import (
    Asked,
    Loaded,
    draw_request,
    engine,
    golden,
    lasting,
    load_nano,
    most_begun,
    plainly,
    run_all,
)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_nano()


async def test_golden_tokens(loaded: Loaded) -> None:
    requests, expected = golden(24)
    asked = Asked()
    async with engine(loaded, None, wrap=asked.over) as decode:
        outputs = await run_all(decode, requests)
    assert {key: list(output.token_ids) for key, output in outputs.items()} == expected
    assert asked.num_ahead >= 20


async def test_outputs_are_those_of_one_step_at_a_time(loaded: Loaded) -> None:
    """Stop tokens, stop strings, lengths, bans, biases, filters and several samples; some requests hold steps up."""
    drawn = [draw_request(index, loaded.tokenizer) for index in range(24)]
    requests = [request if place % 6 == 5 else plainly(request) for place, request in enumerate(drawn)]
    requests[0] = lasting(requests[0], 120)
    async with engine(loaded, None) as decode:
        expected = await run_all(decode, requests)
    reasons = {(one.finish_reason, bool(one.stopped_by)) for one in expected.values()}
    assert {(FinishReason.STOP, True), (FinishReason.LENGTH, False)} <= reasons
    asked = Asked()
    async with engine(loaded, None, wrap=asked.over) as decode:
        assert await run_all(decode, requests) == expected
    assert asked.num_begun <= most_begun(requests)
    assert 30 < asked.num_ahead < asked.num_steps


async def test_preemption_changes_nothing(loaded: Loaded) -> None:
    stop = StopParams(max_tokens=60, ignore_eos=True)
    requests = [replace(plainly(draw_request(index, loaded.tokenizer)), stop=stop) for index in range(5)]
    async with engine(loaded, None) as decode:
        expected = await run_all(decode, requests)
    asked = Asked()
    async with engine(loaded, None, num_pages=16, wrap=asked.over) as decode:
        assert await run_all(decode, requests) == expected
        num_preemptions = decode.load().preemptions
    assert num_preemptions > 0
    assert asked.num_begun <= most_begun(requests, num_preemptions=num_preemptions)
    assert asked.num_ahead > 0


async def test_requests_that_are_given_up_change_nothing_for_others(loaded: Loaded) -> None:
    stop = StopParams(max_tokens=32, ignore_eos=True)
    requests = [replace(plainly(draw_request(index, loaded.tokenizer)), stop=stop, n=1) for index in range(8)]
    async with engine(loaded, None) as decode:
        expected = await run_all(decode, requests[:4])

    async def give_up(decode: DecodeEngine, request: GenerateRequest, count: int) -> None:
        stream = decode.submit(request, TextOptions())
        async for event in stream:
            count -= len(event.token_ids) if isinstance(event, Delta) else 0
            if count <= 0:
                stream.cancel()
                return

    asked, rng = Asked(), random.Random(1)
    async with engine(loaded, None, wrap=asked.over) as decode:
        outputs, *_ = await asyncio.gather(
            run_all(decode, requests[:4]), *(give_up(decode, one, rng.randint(1, 20)) for one in requests[4:])
        )
        assert outputs == expected
        assert decode.load().outcomes["cancelled"] == 4
    assert asked.num_ahead > 0
