"""Decode engines over a device that computes by itself: the next step is asked for while one runs."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from k3svc.core.events import Delta, Finished
from k3svc.core.governor import Governor
from k3svc.core.request import FinishReason, GenerateRequest, SamplingParams, StopParams
from k3svc.engine.decode import DecodeEngine
from k3svc.engine.pipeline import STALL_S
from k3svc.engine.ports import DraftOpen
from k3svc.errors import EngineFault
from k3svc.testing.drafters import OracleDrafter
from k3svc.testing.fakes import FEATURE_BYTES, VOCAB
from k3svc.testing.virtual import VirtualLoop
from k3svc.text.tokenizer import Tokenizer
from tests.unit.engine.engines import NO_TEXT, World, collect, request, want, world

HELD_UP = SamplingParams(presence_penalty=0.5, seed=5)
"""The fake model heeds no penalty, but the scheduler does not know that."""


def run(main: Coroutine[Any, Any, None]) -> None:
    VirtualLoop(random.Random(1)).run(main)


def watch(here: World) -> None:
    """Looks at the pools after every turn of the loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.after_turn = here.check


def test_all_steps_but_the_first_are_asked_for_while_one_runs(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, overlap=True) as here:
            watch(here)
            req = request("a", 30, max_tokens=20)
            assert (await collect(here.decode, req))[0] == want(req, 20)
            assert (here.runner.num_steps, here.runner.num_ahead) == (20, 19), "none is in vain: the end was known"

    run(main())


def test_requests_of_every_kind_give_the_tokens_of_one_step_at_a_time(tokenizer: Tokenizer) -> None:
    """They come, end by length or stop token, are aborted and cancelled, hold steps up, and take each other's pages."""

    async def main() -> None:
        rng = random.Random(3)
        async with world(tokenizer, overlap=True, num_pages=20, num_slots=6, stop_token_ids=[7]) as here:
            watch(here)

            async def one(index: int) -> None:
                await asyncio.sleep(rng.uniform(0.0, 0.15))
                req = request(f"r{index}", rng.randint(1, 40), max_tokens=rng.randint(1, 50), n=rng.choice((1, 1, 2)))
                changes: dict[str, object] = {}
                if index % 13 == 0:
                    changes["sampling"] = replace(HELD_UP, seed=req.sampling.seed)
                elif index % 13 == 1:
                    changes["logprobs"] = 0
                req = replace(req, **changes)  # type: ignore[arg-type]
                expected = [until(7, want(req, req.stop.max_tokens or 0, index)) for index in range(req.n)]
                given_up = rng.randint(1, 20) if index % 4 == 0 else None
                tokens, reasons = await read(here.decode, req, given_up, by_abort=index % 8 == 0)
                for sample in range(req.n):
                    if given_up is None or reasons[sample] in (FinishReason.STOP, FinishReason.LENGTH):
                        assert tokens[sample] == expected[sample]
                    else:
                        assert tokens[sample] == expected[sample][: len(tokens[sample])]

            await asyncio.gather(*(one(index) for index in range(40)))
            load = here.decode.load()
            assert load.preemptions > 0 and load.outcomes["aborted"] > 0 and load.outcomes["cancelled"] > 0
            assert 100 < here.runner.num_ahead < here.runner.num_steps

    run(main())


def until(stop: int, tokens: Sequence[int]) -> list[int]:
    return list(tokens[: tokens.index(stop) + 1] if stop in tokens else tokens)


async def read(
    decode: DecodeEngine, req: GenerateRequest, given_up: int | None, *, by_abort: bool
) -> tuple[list[list[int]], list[FinishReason | None]]:
    """Tokens and finish reasons by sample; given up after so many tokens."""
    stream = decode.submit(req, NO_TEXT)
    tokens: list[list[int]] = [[] for _ in range(req.n)]
    reasons: list[FinishReason | None] = [None] * req.n
    async for event in stream:
        if isinstance(event, Finished):
            break
        tokens[event.index] += event.token_ids
        reasons[event.index] = event.finish_reason
        if given_up is not None and sum(map(len, tokens)) >= given_up:
            given_up = 10**9
            if not by_abort:
                stream.cancel()
                break
            decode.abort(req.request_id)
    return tokens, reasons


def test_a_step_for_a_sample_that_has_ended_is_void(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        stops, goes_on = request("s", 30, max_tokens=30), request("g", 20, max_tokens=30)
        stop = want(stops, 6)[-1]
        stops = replace(stops, stop=StopParams(max_tokens=30, stop_token_ids=frozenset({stop})))
        async with world(tokenizer, overlap=True) as here:
            watch(here)
            ended, other = await asyncio.gather(collect(here.decode, stops), collect(here.decode, goes_on))
            assert ended[0] == until(stop, want(stops, 30)) and other[0] == want(goes_on, 30)
            assert here.decode.load().num_tokens == len(ended[0]) + 30

    run(main())


def test_one_sample_that_needs_its_tokens_holds_steps_up_while_it_lives(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, overlap=True) as here:
            long, short = request("l", 30, max_tokens=40), request("p", 20, max_tokens=10, sampling=HELD_UP)
            reading = asyncio.create_task(collect(here.decode, long))
            await asyncio.sleep(0.02)
            assert here.runner.num_ahead > 5
            assert (await collect(here.decode, short))[0] == want(short, 10)
            steps, ahead = here.runner.num_steps, here.runner.num_ahead
            assert (await reading)[0] == want(long, 40)
            assert here.runner.num_ahead - ahead >= here.runner.num_steps - steps - 2 > 5, "it is gone"
            assert here.runner.num_ahead < 35

    run(main())


def test_a_step_that_fails_ends_its_requests_and_no_later_ones(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, overlap=True) as here:
            watch(here)
            first = [asyncio.create_task(collect(here.decode, request(name, 30, max_tokens=40))) for name in "ab"]
            await asyncio.sleep(0.02)
            assert here.runner.num_ahead > 5
            here.runner.fail_next = True
            results = await asyncio.gather(*first, return_exceptions=True)
            assert all(isinstance(result, EngineFault) for result in results)
            await asyncio.sleep(0.01)
            here.assert_idle()
            last = request("c", 30, max_tokens=10)
            assert (await collect(here.decode, last))[0] == want(last, 10)

    run(main())


def test_hand_offs_begin_while_steps_follow_each_other(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, overlap=True) as here:
            watch(here)
            long, late = request("l", 30, max_tokens=200), request("n", 200, max_tokens=5)
            reading = asyncio.create_task(collect(here.decode, long))
            await asyncio.sleep(0.02)
            assert (await collect(here.decode, late))[0] == want(late, 5)
            assert not reading.done()
            assert (await reading)[0] == want(long, 200)
            assert here.runner.num_ahead >= here.runner.num_steps - 4

    run(main())


def test_a_paused_request_goes_on_where_it_was(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, overlap=True, max_unread_tokens=10) as here:
            watch(here)
            req = request("slow", 20, max_tokens=60)
            stream = here.decode.submit(req, NO_TEXT)
            tokens: list[int] = []
            async for event in stream:
                if isinstance(event, Delta):
                    tokens += event.token_ids
                    await asyncio.sleep(0.05)
                    assert stream.num_unread <= 11, "one token is on its way when the bound is reached"
            assert tokens == want(req, 60)

    run(main())


def test_a_service_that_drains_finishes_the_steps_in_flight(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, overlap=True) as here:
            req = request("a", 30, max_tokens=20)
            reading = asyncio.create_task(collect(here.decode, req))
            await asyncio.sleep(0.02)
            here.decode.drain()
            await here.tasks[0]
            here.check()
            assert (await reading)[0] == want(req, 20)

    run(main())


def test_a_step_that_hangs_is_no_progress(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, overlap=True) as here:
            here.runner.step_s = lambda: 2.0 * STALL_S
            reading = asyncio.create_task(collect(here.decode, request("a", 30, max_tokens=2)))
            await asyncio.sleep(0.9 * STALL_S)
            assert here.decode.is_progressing()
            await asyncio.sleep(0.5 * STALL_S)
            assert not here.decode.is_progressing()
            await reading
            assert here.decode.is_progressing()

    run(main())


def oracle(req: GenerateRequest) -> OracleDrafter:
    return OracleDrafter(
        lambda _opened: [*req.prompt, *want(req, 80)],
        epsilon=0.0,
        vocab_size=VOCAB,
        num_proposals=4,
        feature_width=FEATURE_BYTES,
    )


class Deaf(Governor):
    """Listens to no text."""

    def would_try(self, num_samples: int) -> bool:
        return not self.is_resting(num_samples)


def test_drafters_hear_of_a_sample_when_a_rest_has_ended_and_no_step_is_in_flight(tokenizer: Tokenizer) -> None:
    """They would lack the features of a step that runs already."""

    class ShortRest(Deaf):
        MOST_CREDIT = 1.5

    governor = ShortRest()
    governor.rest(1)

    async def main() -> None:
        req = request("a", 30, max_tokens=80)
        drafter, opened = oracle(req), list[bool]()
        async with world(tokenizer, overlap=True, drafter=drafter, governor=governor) as here:
            tell = drafter.open

            def listen(opens: Sequence[DraftOpen]) -> None:
                opened.append(here.decode.scheduler.is_in_step)
                tell(opens)

            drafter.open = listen  # type: ignore[method-assign]
            assert (await collect(here.decode, req))[0] == want(req, 80)
            assert opened and not any(opened) and here.runner.num_ahead > 20
            assert here.speculator is not None and here.speculator.total.accepted > 0

    run(main())


@pytest.mark.parametrize("rests", [False, True])
def test_steps_run_ahead_while_speculation_rests(tokenizer: Tokenizer, *, rests: bool) -> None:
    governor = Deaf()
    if rests:
        governor.rest(1)

    async def main() -> None:
        req = request("a", 30, max_tokens=60)
        async with world(tokenizer, overlap=True, drafter=oracle(req), governor=governor) as here:
            assert (await collect(here.decode, req))[0] == want(req, 60)
            assert (here.runner.num_ahead > 40) == rests
            assert here.speculator is not None and (here.speculator.total.accepted > 20) == (not rests)

    run(main())
