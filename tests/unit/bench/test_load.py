"""Sending: how many at once, when, and what is written down."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from k3svc.bench.export import phases, write_chrome_trace, write_requests
from k3svc.bench.load import Load
from k3svc.bench.workload import Item
from k3svc.client import AsyncClient, RetryPolicy
from k3svc.errors import Unavailable
from tests.unit.bench.records import failure, record, result
from tests.unit.client.fake_decode import Step, running, tokens

ONCE = RetryPolicy(attempts=1)


def items(count: int, **changes: float) -> list[Item]:
    return [Item(tokens=[1, 2, 3], output_len=4, **changes) for _ in range(count)]  # type: ignore[arg-type]


async def test_a_closed_loop_keeps_its_concurrency():
    async with running() as fake, AsyncClient(fake.endpoint, retry=ONCE) as client:
        seen: list[int] = []
        load = Load(client, items(12), concurrency=3, options={}, on_progress=lambda now: seen.append(now.num_running))
        done = await load.run()
    assert [len(one.stamps) for one in done.records] == [4] * 12
    assert all(one.is_success and one.usage is not None and one.usage.prompt_tokens == 3 for one in done.records)
    assert all(one.timings is not None and one.timings.handoff_bytes == 1000 for one in done.records)
    assert [one.index for one in done.records] == list(range(12))
    assert max(seen) == 2, "when one ends, the two others are under way"
    assert load.num_tokens == 48
    assert done.samples[0].load.total_pages == 9


async def test_failures_are_written_down_and_not_tried_again():
    script = [Step(), Step(error=Unavailable("gone")), Step(break_after=2), Step()]
    async with running(*script) as fake, AsyncClient(fake.endpoint, retry=ONCE) as client:
        done = await Load(client, items(4), concurrency=1, options={}).run()
        assert len(fake.service.requests) == 4
    assert [one.error_code for one in done.records] == ["", "UNAVAILABLE", "UNAVAILABLE", ""]
    assert done.records[1].error == "gone"
    assert done.records[2].num_tokens == 2


async def test_a_deadline_ends_a_request():
    async with running(Step(hang_after=1)) as fake, AsyncClient(fake.endpoint, retry=ONCE) as client:
        done = await Load(client, items(1), concurrency=1, options={}, timeout_s=0.3).run()
    assert done.records[0].error_code == "DEADLINE_EXCEEDED"


async def test_an_open_loop_sends_when_due_however_many_are_under_way():
    waiting = [Item(tokens=[1], output_len=3, due_s=due) for due in (0.0, 0.05, 0.1)]
    async with running(Step(hang_after=1), Step(hang_after=1)) as fake:
        async with AsyncClient(fake.endpoint, retry=ONCE) as client:
            load = Load(client, waiting, concurrency=None, options={})
            task = asyncio.create_task(load.run())
            while load.num_ended < 1:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len(fake.service.requests) == 3
    sent = [one.sent_s for one in load.records]
    assert all(late >= due for late, due in zip(sent, (0.0, 0.05, 0.1), strict=True))
    # Two of them hang, those that the service was asked first.
    assert max(one.num_tokens for one in load.records) == 3


async def test_a_bound_delays_what_is_due_and_the_delay_counts():
    """Connecting takes the first request longer than the millisecond after which the second one is due."""
    waiting = [Item(tokens=[1], output_len=1, due_s=due) for due in (0.0, 0.001)]
    async with running() as fake, AsyncClient(fake.endpoint, retry=ONCE) as client:
        done = await Load(client, waiting, concurrency=1, options={}).run()
    first, second = done.records
    assert second.due_s == 0.001
    assert second.sent_s >= first.ended_s > 0.001
    assert second.ttft_s == second.stamps[0] - 0.001 > second.sent_s - 0.001


async def test_options_and_kinds_of_prompts_reach_the_service():
    kinds = [
        Item(text="import os", output_len=2),
        Item(messages=[{"role": "user", "content": "Hi"}], output_len=2),
        Item(tokens=[4, 5], output_len=2),
    ]
    async with running() as fake, AsyncClient(fake.endpoint, retry=ONCE) as client:
        await Load(client, kinds, concurrency=1, options={"temperature": 0.0, "ignore_eos": True}).run()
        text, chat, ids = fake.service.requests
    assert text.text == "import os"
    assert chat.chat.messages[0].content == "Hi"
    assert list(ids.tokens.ids) == [4, 5]
    assert {(one.sampling.temperature, one.stop.ignore_eos, one.stop.max_tokens) for one in (text, chat, ids)} == {
        (0.0, True, 2)
    }
    assert tokens(2, n=2)


def test_phases_cover_a_request_from_when_it_was_due():
    found = phases(record(due_s=1.0, first_s=0.1, gap_s=0.02, n=6))
    assert [phase.name for phase in found] == ["queue", "prefill", "hand-off tail", "decode"]
    assert found[0].start_s == 1.0
    assert [phase.end_s for phase in found] == pytest.approx([1.012, 1.095, 1.1, 1.2])
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(found))
    assert [phase.name for phase in phases(failure(0, "INTERNAL"))] == ["failed"]


def test_exports_hold_every_request(tmp_path: Path):
    measured = result(record(0), failure(1, "INTERNAL"))
    write_requests(tmp_path / "r.jsonl", measured)
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [(line["index"], line["error_code"]) for line in lines] == [(0, ""), (1, "INTERNAL")]
    assert lines[0]["timings"]["handoff_ms"] == 40.0
    write_chrome_trace(tmp_path / "t.json", measured)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    mine = [event for event in events if event["tid"] == 0]
    whole = next(event for event in mine if event["cat"] == "request")
    assert whole["ts"] == 0.0
    assert whole["dur"] == pytest.approx(180_000)
    assert sum(event["cat"] == "token" for event in mine) == 5
    assert sum(event["dur"] for event in mine if event["cat"] == "phase") == pytest.approx(180_000)
    assert {event["ph"] for event in events} == {"X", "i"}
