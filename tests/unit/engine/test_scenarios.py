"""Scenarios from reports about systems of this kind, one by one; docs/reliability.md has the list."""

import asyncio
from dataclasses import replace

import pytest

from k3svc.core.events import Delta, Finished
from k3svc.core.request import FinishReason, GenerateRequest, StopParams
from k3svc.engine.decode import DecodeEngine
from k3svc.errors import AlreadyExists, InvalidRequest, ResourceExhausted
from k3svc.testing.virtual import run_virtual
from k3svc.text.tokenizer import Tokenizer
from tests.unit.engine.engines import NO_TEXT, World, collect, make_prefill, request, want, world


async def until_bytes_landed(here: World, nbytes: int) -> None:
    while here.prefill[0].load().handoff_bytes < nbytes:
        await asyncio.sleep(0.0001)


def test_c04_prefill_restarts_at_the_same_address_during_a_hand_off(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, chunk_tokens=16) as here:
            peer, old = here.peers[0], here.prefill[0]
            req = request("a", 150)
            running = asyncio.create_task(collect(here.decode, req))
            await until_bytes_landed(here, 2000)
            peer.up = False
            here.tasks[1].cancel()
            await asyncio.sleep(0.01)
            assert old.load().running == 0
            fresh, runner = make_prefill(chunk_tokens=64)
            here.prefill[0] = peer.engine = fresh
            here.tasks[1] = asyncio.create_task(fresh.run())
            peer.up = True
            assert (await running)[0] == want(req)
            assert runner.num_extend_tokens == 150, "the new service computed the whole prompt"
            assert asyncio.get_running_loop().time() < 1.0, "decode waited for a timeout"
            assert (await collect(here.decode, request("b", 20)))[0] == want(request("b", 20))

    run_virtual(main())


def test_c10_decode_dies_during_a_hand_off(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, chunk_tokens=16, lease_s=5.0) as here:
            here.decode.submit(request("a", 150), NO_TEXT)
            await until_bytes_landed(here, 2000)
            here.peers[0].up = False
            here.tasks[0].cancel()
            await asyncio.wait({here.tasks[0]})
            load = here.prefill[0].load()
            assert load.free_slots == load.total_slots - 1, "the state waits for its owner"
            await asyncio.sleep(5.5)
            load = here.prefill[0].load()
            assert (load.free_slots, load.free_pages) == (load.total_slots, load.total_pages)
            assert load.outcomes["expired"] == 1

    with pytest.raises(asyncio.CancelledError):
        run_virtual(main())


def test_c11_a_prompt_beyond_the_limit_of_prefill_is_not_decoded(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, num_pages=32) as here:
            small, _ = make_prefill(num_pages=4)
            task = asyncio.create_task(small.run())
            here.peers[0].engine = small
            with pytest.raises(InvalidRequest, match="1 to 64 tokens on this service"):
                await collect(here.decode, request("a", 65))
            assert here.decode.load().num_tokens == 0
            assert len(here.peers[0].calls) == 1, "what can never succeed is not tried again"
            assert (await collect(here.decode, request("b", 64)))[0] == want(request("b", 64))
            small.drain()
            await asyncio.wait_for(task, 10)

    run_virtual(main())


async def finish(decode: DecodeEngine, req: GenerateRequest) -> tuple[list[int], list[FinishReason]]:
    tokens: list[int] = []
    reasons: list[FinishReason] = []
    async for event in decode.submit(req, NO_TEXT):
        if isinstance(event, Delta):
            tokens += event.token_ids
            reasons += [event.finish_reason] if event.finish_reason is not None else []
    return tokens, reasons


def test_c14_abort_races(tokenizer: Tokenizer) -> None:
    """Before the request is scheduled; in the same turn as its end; twice; for an id that is used later."""

    async def main() -> None:
        async with world(tokenizer) as here:
            decode = here.decode
            assert decode.abort("later") is False
            stream = decode.submit(request("later", 30), NO_TEXT)
            assert decode.abort("later") is True
            assert decode.abort("later") is False
            events = [event async for event in stream]
            assert [event.finish_reason for event in events if isinstance(event, Delta)] == [FinishReason.ABORT]
            assert isinstance(events[-1], Finished)
            other = asyncio.create_task(collect(decode, request("other", 30)))
            stream = decode.submit(request("later", 30, max_tokens=1), NO_TEXT)
            ended = [False]
            async for event in stream:
                if isinstance(event, Delta) and event.finish_reason is not None:
                    ended[0] = decode.abort("later")
            assert ended == [False], "it had finished already"
            assert (await other)[0] == want(request("other", 30)), "another request felt it"

    run_virtual(main())


def test_c15_token_counts_are_exact(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        req = request("c", 33)
        first = want(req, 1)
        async with world(tokenizer) as here:
            for count in (1, 2):
                one = replace(req, request_id=f"m{count}", stop=StopParams(max_tokens=count))
                assert await finish(here.decode, one) == (want(req, count), [FinishReason.LENGTH])
            with pytest.raises(InvalidRequest, match="max_tokens"):
                here.decode.submit(replace(req, stop=StopParams(max_tokens=0)), NO_TEXT)
            steps = here.runner.num_steps
            stops = replace(req, stop=StopParams(stop_token_ids=frozenset(first)))
            assert await finish(here.decode, stops) == (first, [FinishReason.STOP])
            assert here.runner.num_steps == steps + 1, "a step after the end"
        async with world(tokenizer, stop_token_ids=first) as here:
            assert await finish(here.decode, req) == (first, [FinishReason.STOP])

    run_virtual(main())


def test_c20_ids_are_unique_while_they_live(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            first = asyncio.create_task(collect(here.decode, request("a", 30)))
            await asyncio.sleep(0)
            with pytest.raises(AlreadyExists):
                here.decode.submit(request("a", 5), NO_TEXT)
            assert (await first)[0] == want(request("a", 30))
            again = request("a", 31)
            assert (await collect(here.decode, again))[0] == want(again), "finished ids are free"
            ids = [call.request_id for call in here.peers[0].calls]
            assert len(set(ids)) == 2, "prefill knows them apart, however late a frame is"

    run_virtual(main())


def test_c23_prompts_at_the_limit(tokenizer: Tokenizer) -> None:
    """The context is 400 tokens; the pool of the second world holds 64."""

    async def main() -> None:
        async with world(tokenizer, num_pages=32) as here:
            assert (await finish(here.decode, request("a", 399, max_tokens=1)))[1] == [FinishReason.LENGTH]
            unbounded = replace(request("b", 398), stop=StopParams())
            assert len((await finish(here.decode, unbounded))[0]) == 2, "up to the limit and no further"
            for size, max_tokens in ((400, 1), (399, 2)):
                with pytest.raises(InvalidRequest):
                    here.decode.submit(request("c", size, max_tokens), NO_TEXT)
        async with world(tokenizer, num_pages=4) as here:
            assert len((await finish(here.decode, request("d", 63, max_tokens=1)))[0]) == 1
            with pytest.raises(InvalidRequest, match="1 to 63"):
                here.decode.submit(request("e", 64, max_tokens=1), NO_TEXT)

    run_virtual(main())


def test_c27_growing_requests_neither_lock_up_nor_starve(tokenizer: Tokenizer) -> None:
    """20 requests that each grow to half of the pool: all end, in order of age, with tokens all the time."""

    async def main() -> None:
        async with world(tokenizer, num_pages=16, num_slots=8, max_batch=8, max_waiting=32) as here:
            reqs = [request(f"g{index}", 10, max_tokens=110) for index in range(20)]
            done: list[str] = []

            async def run(req: GenerateRequest) -> None:
                assert (await collect(here.decode, req))[0] == want(req, 110)
                done.append(req.request_id)

            tasks = [asyncio.create_task(run(req)) for req in reqs]
            made = 0
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0.2)
                assert here.decode.load().num_tokens > made or all(task.done() for task in tasks), "it stands still"
                made = here.decode.load().num_tokens
            await asyncio.gather(*tasks)
            assert done == [req.request_id for req in reqs], "the oldest goes first"

    run_virtual(main())


def test_c29_a_preempted_request_that_is_aborted_leaves_nothing(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, num_slots=4, num_pages=12, max_batch=4) as here:
            streams = [here.decode.submit(request(f"p{i}", 30, max_tokens=90), NO_TEXT) for i in range(4)]
            while not (late := here.decode.scheduler.live_samples("p3")) or not late[0].num_preemptions:
                await asyncio.sleep(0.001)
            assert here.decode.abort("p3")
            here.check()
            for stream in streams:
                stream.cancel()
            await asyncio.sleep(0.1)
            here.assert_idle()

    run_virtual(main())


def test_c43_decode_starts_before_prefill(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, prefill_attempts=8) as here:
            here.peers[0].up = False
            early = asyncio.create_task(collect(here.decode, request("early", 30)))
            await asyncio.sleep(3.0)
            here.peers[0].up = True
            assert (await early)[0] == want(request("early", 30))
            assert asyncio.get_running_loop().time() < 9.0, "the back-off is bounded"

    run_virtual(main())


def test_c60_a_refusal_says_when_to_come_back(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, num_slots=1, max_batch=1, max_waiting=1) as here:
            streams = [here.decode.submit(request("a", 5, max_tokens=50), NO_TEXT)]
            await asyncio.sleep(0.01)
            streams.append(here.decode.submit(request("b", 5), NO_TEXT))
            with pytest.raises(ResourceExhausted) as refused:
                here.decode.submit(request("c", 5), NO_TEXT)
            assert refused.value.reason == "QUEUE_FULL"
            assert 0 < refused.value.retry_after_s <= 30
            for stream in streams:
                stream.cancel()

    run_virtual(main())
