"""TokenStream.gather: tokens come together for a bounded time, and nobody waits for the end."""

import asyncio

import pytest

from k3svc.core.events import Delta, Finished, SpeculationStats, Timings, Usage
from k3svc.engine.stream import TokenStream
from k3svc.errors import Unavailable
from k3svc.testing.virtual import run_virtual

FINISHED = Finished(
    usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
    timings=Timings(
        queue_ms=0.0,
        prefill_ms=0.0,
        handoff_tail_ms=0.0,
        ttft_ms=0.0,
        tpot_ms=0.0,
        handoff_bytes=0,
        preemptions=0,
        prefill_attempts=1,
    ),
    speculation=SpeculationStats(),
)


def new_stream() -> TokenStream:
    return TokenStream("r", on_cancel=lambda _: None, on_read=lambda _: None)


def token(number: int) -> Delta:
    return Delta(index=0, token_ids=(number,))


def test_tokens_within_the_time_travel_together() -> None:
    async def scenario() -> None:
        stream, loop = new_stream(), asyncio.get_running_loop()
        for number, delay in enumerate((0.5, 0.515, 0.531)):
            loop.call_later(delay, stream.put, token(number))
        await stream.gather(0.02)
        assert loop.time() == pytest.approx(0.52)
        taken = await stream.__anext__()
        assert isinstance(taken, Delta)
        assert taken.token_ids == (0, 1)
        await stream.gather(0.02)
        assert loop.time() == pytest.approx(0.551)
        taken = await stream.__anext__()
        assert isinstance(taken, Delta)
        assert taken.token_ids == (2,)

    run_virtual(scenario())


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_end_does_not_wait(fails: bool, before: bool) -> None:
    async def scenario() -> None:
        stream, loop = new_stream(), asyncio.get_running_loop()

        def end() -> None:
            stream.put(token(1))
            if fails:
                stream.fail(Unavailable("gone"))
            else:
                stream.finish(FINISHED)

        if before:
            end()
        else:
            loop.call_later(0.1, stream.put, token(0))
            loop.call_later(0.105, end)
        started = loop.time()
        await stream.gather(0.02)
        assert loop.time() - started == pytest.approx(0.0 if before else 0.105)

    run_virtual(scenario())


def test_a_reader_that_goes_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        stream = new_stream()
        stream.put(token(0))
        reading = asyncio.ensure_future(stream.gather(0.02))
        await asyncio.sleep(0.001)
        reading.cancel()
        await asyncio.wait({reading})
        stream.finish(FINISHED)
        assert [type(event).__name__ async for event in stream] == ["Delta", "Finished"]

    run_virtual(scenario())
