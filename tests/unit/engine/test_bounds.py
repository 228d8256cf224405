"""Bounds of the engines: slow readers, deadlines, leases, estimates, and how a service stops."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest

from k3svc.core.events import Delta, Finished
from k3svc.engine.decode import DecodeEngine
from k3svc.engine.peers import BACKOFF_MIN_S, PrefillPeers
from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.engine.prefill import PrefillEngine
from k3svc.errors import (
    DeadlineExceeded,
    EngineFault,
    Incompatible,
    ResourceExhausted,
    Superseded,
    Unavailable,
)
from k3svc.testing.fakes import FakeRunner
from k3svc.testing.virtual import run_virtual
from k3svc.text.tokenizer import Tokenizer
from k3svc.transfer.manifest import PrefillDone, StateManifest
from tests.unit.engine.engines import (
    FINGERPRINT,
    NO_TEXT,
    call,
    collect,
    make_prefill,
    read,
    request,
    run_prefill,
    want,
    world,
)


async def until_paused(decode: DecodeEngine) -> int:
    """Waits until no more tokens come; how many came."""
    tokens = -1
    while tokens != decode.load().num_tokens:
        tokens = decode.load().num_tokens
        await asyncio.sleep(0.1)
    return tokens


def test_a_slow_reader_pauses_its_request_and_no_other(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, max_unread_tokens=10) as here:
            slow, quick = request("slow", 20, max_tokens=60), request("quick", 20, max_tokens=60)
            stream = here.decode.submit(slow, NO_TEXT)
            assert await until_paused(here.decode) == 10
            assert stream.num_unread == 10
            assert (await collect(here.decode, quick))[0] == want(quick, 60)
            assert stream.num_unread == 10
            tokens: list[int] = []
            async for event in stream:
                if isinstance(event, Delta):
                    tokens += event.token_ids
                    await asyncio.sleep(0.05)
                    assert stream.num_unread <= 10
            assert tokens == want(slow, 60)

    run_virtual(main())


def test_a_reader_that_stays_away_ends_its_request(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, max_unread_tokens=10, reader_timeout_s=3.0) as here:
            stream = here.decode.submit(request("gone", 20, max_tokens=60), NO_TEXT)
            await asyncio.sleep(2.9)
            assert not stream.is_ended
            await asyncio.sleep(0.3)
            here.assert_idle()
            events = aiter(stream)
            delta = await anext(events)
            assert isinstance(delta, Delta) and len(delta.token_ids) == 10, "what was there is still given"
            with pytest.raises(ResourceExhausted) as ended:
                await anext(events)
            assert ended.value.reason == "SLOW_READER"

    run_virtual(main())


def test_a_paused_request_gives_its_memory_to_others(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, num_slots=1, max_batch=1, max_unread_tokens=5) as here:
            slow, quick = request("slow", 30, max_tokens=20), request("quick", 30)
            stream = here.decode.submit(slow, NO_TEXT)
            await until_paused(here.decode)
            assert (await collect(here.decode, quick))[0] == want(quick)
            tokens: list[int] = []
            async for event in stream:
                if isinstance(event, Delta):
                    tokens += event.token_ids
                else:
                    assert event.timings.preemptions == 1
            assert tokens == want(slow, 20)

    run_virtual(main())


def test_priority_and_deadline_reach_prefill(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            stream = here.decode.submit(request("p", 20, priority=-7), NO_TEXT, deadline=2.0)
            assert isinstance([event async for event in stream][-1], Finished)
            (seen,) = here.peers[0].calls
            assert seen.priority == -7
            assert seen.remaining_s is not None
            assert 1.9 < seen.remaining_s <= 2.0

    run_virtual(main())


def test_a_prompt_is_dropped_at_its_deadline() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        with pytest.raises(DeadlineExceeded):
            engine.open(call(remaining_s=0.0))
        holder = engine.open(call(request_id="holder", size=100))
        await read(aiter(holder))
        waiting = engine.open(call(remaining_s=0.5))
        with pytest.raises(DeadlineExceeded):
            await read(aiter(waiting))
        assert asyncio.get_running_loop().time() < 0.6
        assert engine.load().waiting == 0
        assert runner.num_extend_tokens == 100, "a prompt that was late already was computed"
        waiting.detach()
        holder.detach()
        engine.release("holder", 1)

    run_prefill(scenario, num_slots=1)


def test_a_prompt_that_the_backlog_makes_late_is_refused() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        # Steps of 64 tokens take 1 ms each, so 960 tokens that wait are about 15 ms of work.
        first = engine.open(call(request_id="first", size=960))
        await read(aiter(first))
        second = engine.open(call(request_id="second", size=960))
        with pytest.raises(ResourceExhausted) as refused:
            engine.open(call(remaining_s=0.01))
        assert refused.value.reason == "DEADLINE_TOO_NEAR"
        with pytest.raises(ResourceExhausted) as full:
            engine.open(call())
        assert full.value.retry_after_s == pytest.approx(0.05), "15 ms, within what a caller may be told"
        for name, handoff in (("first", first), ("second", second)):
            handoff.detach()
            engine.release(name, 1)

    run_prefill(scenario, num_slots=1, max_waiting=1)


def test_a_lease_is_renewed_by_reading_and_ends_when_the_reader_stalls() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        handoff = engine.open(call(size=200))
        events = aiter(handoff)
        count = 0
        async for event in events:
            count += 1
            await asyncio.sleep(2.0)
            if isinstance(event, PrefillDone):
                break
        assert count * 2.0 > 5.0, "the lease would have ended"
        assert engine.load().outcomes["expired"] == 0
        handoff.detach()
        engine.release("q", 1)

        stalled = engine.open(call(2, size=200))
        await read(aiter(stalled), 3)
        await asyncio.sleep(5.5)
        assert engine.load().free_slots == engine.load().total_slots
        with pytest.raises(Superseded, match="lease"):
            await read(aiter(stalled))

    run_prefill(scenario, lease_s=5.0)


def test_a_reader_in_the_queue_gets_signs_of_life_and_keeps_its_lease() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        runner.step_s = lambda: 10.0
        holder = engine.open(call(request_id="holder"))

        async def hold() -> None:
            await read(aiter(holder))
            holder.detach()
            engine.release("holder", 1)

        holding = asyncio.create_task(hold())
        waiting = engine.open(call())
        events = await read(aiter(waiting))
        assert events[:3] == [[], [], []], "20 s in the queue"
        assert isinstance(next(event for event in events if event != []), StateManifest)
        assert isinstance(events[-1], PrefillDone)
        assert engine.load().outcomes["expired"] == 0
        waiting.detach()
        engine.release("q", 1)
        await holding

    run_prefill(scenario, num_slots=1, lease_s=3.0)


def test_a_stream_that_is_never_read_loses_its_lease() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        engine.open(call())
        await asyncio.sleep(5.5)
        assert engine.load().outcomes["expired"] == 1
        assert engine.load().free_slots == engine.load().total_slots

    run_prefill(scenario, lease_s=5.0)


def test_a_peer_of_another_model_is_left_out(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, prefills=2, prefill_attempts=1) as here:
            here.prefill[0].fingerprint = replace(FINGERPRINT, model="other")
            for index in range(4):
                req = request(f"m{index}", 40)
                assert (await collect(here.decode, req))[0] == want(req)
            assert len(here.peers[0].calls) == 1, "it is asked once, not for every prompt"
            here.prefill[1].fingerprint = replace(FINGERPRINT, tokenizer="other")
            with pytest.raises(Incompatible, match=r"tokenizer|model"):
                await collect(here.decode, request("none", 40))

    run_virtual(main())


def test_a_hand_off_that_stays_broken_may_be_tried_again_by_the_caller(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, prefill_attempts=2) as here:

            def fault(event: HandoffEvent) -> Sequence[HandoffEvent] | None:
                return [] if isinstance(event, list) else [event]

            here.peers[0].fault = fault
            with pytest.raises(Unavailable, match="without") as failed:
                await collect(here.decode, request("b", 40))
            assert failed.value.reason == "HANDOFF_INCOMPLETE"
            assert {seen.attempt for seen in here.peers[0].calls} == {1, 2}

    run_virtual(main())


def test_a_bug_in_a_hand_off_fails_its_request_only(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:

            async def broken(_call: PrefillCall) -> AsyncGenerator[HandoffEvent, None]:
                raise ZeroDivisionError("a bug")
                yield

            working = here.peers[0].prefill
            here.peers[0].prefill = broken  # type: ignore[method-assign, assignment]
            with pytest.raises(EngineFault, match="a bug"):
                await collect(here.decode, request("b", 40))
            here.peers[0].prefill = working  # type: ignore[method-assign]
            req = request("c", 40)
            assert (await collect(here.decode, req))[0] == want(req)

    run_virtual(main())


def test_requests_are_told_when_the_step_loop_stops(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            stream = here.decode.submit(request("s", 40, max_tokens=300), NO_TEXT)
            while here.decode.load().num_tokens < 3:
                await asyncio.sleep(0.001)
            here.tasks[0].cancel()
            await asyncio.wait({here.tasks[0]})
            with pytest.raises(Unavailable, match="stops"):
                async for _ in stream:
                    pass
            with pytest.raises(Unavailable):
                here.decode.submit(request("t", 40), NO_TEXT)
            await asyncio.sleep(0.1)

    with pytest.raises(asyncio.CancelledError):
        run_virtual(main())


def test_readers_are_told_when_prefill_stops() -> None:
    async def main() -> None:
        engine, _ = make_prefill()
        task = asyncio.create_task(engine.run())
        handoff = engine.open(call(size=900))
        events = aiter(handoff)
        await anext(events)
        task.cancel()
        await asyncio.wait({task})
        with pytest.raises(Unavailable, match="stops"):
            await read(events)
        with pytest.raises(Unavailable):
            engine.open(call(request_id="late"))

    run_virtual(main())


def wait_s(peers: PrefillPeers) -> float:
    picked = peers.pick()
    assert picked is not None
    return picked[1]


def test_failures_of_one_moment_back_a_peer_off_once(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            now = [0.0]
            peers = PrefillPeers(here.peers, lambda: now[0])
            for _ in range(8):
                peers.failed(here.peers[0])
            assert wait_s(peers) == BACKOFF_MIN_S
            now[0] = BACKOFF_MIN_S
            peers.failed(here.peers[0])
            assert wait_s(peers) == pytest.approx(2 * BACKOFF_MIN_S)
            peers.failed(here.peers[0], 9.0)
            assert wait_s(peers) == pytest.approx(9.0)
            assert peers.pick({here.peers[0]}) is None

    run_virtual(main())


def test_the_retry_delay_of_decode_is_measured(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, num_slots=1, max_batch=1, max_waiting=4) as here:
            reqs = [request(f"d{index}", 5, max_tokens=100) for index in range(4)]
            tasks = [asyncio.create_task(collect(here.decode, req)) for req in reqs]
            while here.decode.load().outcomes["finished"] < 2:
                await asyncio.sleep(0.01)
            streams = [here.decode.submit(request(f"e{index}", 5), NO_TEXT) for index in range(3)]
            with pytest.raises(ResourceExhausted) as full:
                here.decode.submit(request("x", 5), NO_TEXT)
            assert 0.08 < full.value.retry_after_s < 0.2, "requests take about 0.1 s each"
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*tasks)

    run_virtual(main())


@pytest.mark.parametrize(("step_s", "is_stuck"), [(200.0, False), (400.0, True)])
def test_a_long_step_makes_progress_layer_by_layer(step_s: float, is_stuck: bool) -> None:
    """A step of four layers; a layer may take up to a minute."""

    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        runner.step_s = lambda: step_s
        handoffs = [engine.open(call(request_id=f"b{index}")) for index in range(40)]
        seen = set()
        for _ in range(16):
            await asyncio.sleep(step_s / 16)
            seen.add(engine.is_progressing())
        assert seen == ({True, False} if is_stuck else {True})
        runner.step_s = lambda: 0.001
        for index, handoff in enumerate(handoffs):
            handoff.detach()
            engine.release(f"b{index}", 1)

    run_prefill(scenario, lease_s=1000.0)
