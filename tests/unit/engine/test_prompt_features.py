"""What a prefill engine pushes of its prompts: the newest rows, under the ticket, while it computes."""

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from k3svc.engine.ports import PrefillCall
from k3svc.engine.prefill import PrefillEngine
from k3svc.errors import K3svcError
from k3svc.testing.fakes import FakeRunner, features
from k3svc.testing.virtual import VirtualLoop
from k3svc.transfer.manifest import PrefillDone
from tests.unit.engine.engines import FINGERPRINT, make_prefill

WINDOW = 100


@dataclass
class Stream:
    start: tuple[str, int, int]
    rows: list[tuple[int, bytes]] = field(default_factory=list)
    closes: int = 0

    def push(self, position: int, data: memoryview) -> None:
        assert self.closes == 0, "rows after the last ones"
        self.rows.append((position, bytes(data)))

    def close(self) -> None:
        self.closes += 1


class Sink:
    window = WINDOW

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def open(self, *, ticket: str, attempt: int, num_tokens: int) -> Stream:
        self.streams.append(Stream((ticket, attempt, num_tokens)))
        return self.streams[-1]


def call(name: str, prompt: tuple[int, ...], *, ticket: str, attempt: int = 1) -> PrefillCall:
    return PrefillCall(request_id=name, attempt=attempt, prompt=prompt, fingerprint=FINGERPRINT, draft_ticket=ticket)


async def take(engine: PrefillEngine, wanted: PrefillCall) -> None:
    handoff = engine.open(wanted)
    async for event in handoff:
        if isinstance(event, PrefillDone):
            break
    engine.release(wanted.request_id, wanted.attempt)


def on_virtual_time(scenario: Any) -> None:
    async def run() -> None:
        engine, runner = make_prefill()
        task = asyncio.create_task(engine.run())
        await scenario(engine, runner)
        engine.drain()
        await task

    work: Coroutine[Any, Any, None] = run()
    VirtualLoop().run(work)


@pytest.mark.parametrize("length", [1, 63, 64, 65, WINDOW, WINDOW + 1, 300])
def test_the_newest_rows_arrive_once_and_in_order(length: int):
    prompt = tuple(random.Random(length).randrange(64) for _ in range(length))

    async def scenario(engine: PrefillEngine, _runner: FakeRunner) -> None:
        sink = Sink()
        engine.features = sink
        await take(engine, call("a", prompt, ticket="ticket"))
        (stream,) = sink.streams
        assert stream.start == ("ticket", 1, length)
        assert stream.closes >= 1
        oldest = max(0, length - WINDOW)
        assert stream.rows[0][0] == oldest
        assert b"".join(data for _, data in stream.rows) == features(prompt[oldest:], oldest)
        position = oldest
        for start, data in stream.rows:
            assert start == position
            position += len(data) // 8
        assert len(stream.rows) == -(-length // 64) - oldest // 64

    on_virtual_time(scenario)


def test_rows_leave_before_the_prompt_is_computed():
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        sink = Sink()
        engine.features = sink
        runner.step_s = lambda: 1.0
        task = asyncio.create_task(take(engine, call("a", tuple(range(40)) * 3, ticket="t")))
        await asyncio.sleep(1.5)
        assert [start for start, _ in sink.streams[0].rows] == [20]
        await task

    on_virtual_time(scenario)


def test_prompts_of_one_step_are_told_apart_and_those_without_a_ticket_left_out():
    async def scenario(engine: PrefillEngine, _runner: FakeRunner) -> None:
        sink = Sink()
        engine.features = sink
        prompts = {name: tuple((index + ord(name)) % 64 for index in range(20)) for name in "abc"}
        await asyncio.gather(
            *(take(engine, call(name, prompt, ticket="" if name == "b" else name)) for name, prompt in prompts.items())
        )
        got = {stream.start[0]: b"".join(data for _, data in stream.rows) for stream in sink.streams}
        assert got == {name: features(prompts[name], 0) for name in "ac"}

    on_virtual_time(scenario)


def test_a_prompt_that_ends_early_closes_its_stream_and_a_new_attempt_opens_another():
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        sink = Sink()
        engine.features = sink
        runner.step_s = lambda: 1.0
        prompt = tuple(range(50)) * 3
        first = asyncio.create_task(take(engine, call("a", prompt, ticket="t")))
        await asyncio.sleep(2.2)
        await take(engine, call("a", prompt, ticket="t", attempt=2))
        with suppress(K3svcError):
            await first
        assert [stream.start for stream in sink.streams] == [("t", 1, 150), ("t", 2, 150)]
        assert all(stream.closes for stream in sink.streams)
        assert sink.streams[1].rows[0][0] == 50

    on_virtual_time(scenario)
