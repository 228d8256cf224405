"""`k3svc top`: rates of two looks, and the command against a service that runs in the test's loop."""

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from k3svc.cli.top import COLUMNS, View, pairs, table, targets_table, view_json
from k3svc.client import ServiceLoad
from k3svc.core.events import PrefillTarget
from tests.unit.cli.test_commands import k3svc_run, start
from tests.unit.client.fake_decode import running

LOAD = ServiceLoad(
    running=3,
    waiting=1,
    in_transfer=2,
    free_pages=6,
    total_pages=8,
    free_slots=1,
    total_slots=4,
    draining=False,
    num_tokens=1000,
    handoff_bytes=5_000_000,
    resident_bytes=7_000_000,
    pool_bytes=0,
    preemptions=4,
    draft_steps=10,
    accepted_drafts=25,
    drafter="127.0.0.1:9",
    speculation_rests=False,
    outcomes={"failed": 9},
)


def look(at: float, **changes: Any) -> View:
    load = dataclasses.replace(LOAD, **changes)
    return View(endpoint="127.0.0.1:1", at=at, role="decode", state="serving", load=load)


def test_rates_are_those_between_two_looks():
    values = view_json(look(10.0), look(12.0, num_tokens=1300, handoff_bytes=9_000_000))
    assert values["tokens_per_s"] == 150.0
    assert values["handoff_bytes_per_s"] == 2_000_000.0
    assert values["acceptance_length"] == 3.5
    assert values["outcomes"] == {"failed": 9}


def test_a_service_that_was_started_again_has_no_rate_yet():
    assert view_json(look(10.0), look(12.0, num_tokens=5))["tokens_per_s"] is None
    gone = View(endpoint="127.0.0.1:1", at=10.0, state="unreachable")
    assert view_json(gone, look(12.0))["tokens_per_s"] is None
    assert view_json(look(10.0), gone) == {"endpoint": "127.0.0.1:1", "role": "?", "state": "unreachable"}
    assert view_json(look(1.0), look(2.0, draft_steps=0))["acceptance_length"] is None


def test_a_row_has_a_cell_for_every_column():
    made = table([look(10.0)], [look(12.0, num_tokens=1300, handoff_bytes=9_000_000)])
    cells = [next(iter(column.cells)) for column in made.columns]
    assert len(cells) == len(COLUMNS)
    assert cells == [
        *("127.0.0.1:1", "decode", "serving", "3", "1", "2", "2/8", "3/4", "150.0", "-", "2.0"),
        *("127.0.0.1:9", "3.5", "4", "9", "7"),
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_narrow_terminal_has_fewer_columns_and_whole_cells(width: int):
    views = [dataclasses.replace(look(1.0), endpoint="127.0.0.1:50051"), View(endpoint="host:1", at=1.0, state="gone")]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table(views, views, width))
    head, *rows = (line.split() for line in console.export_text().splitlines())
    assert rows[0][:4] == ["127.0.0.1:50051", "decode", "serving", "3"]
    assert rows[1] == ["host:1", "?", "gone"]
    assert len(rows[0]) == len(" ".join(head).replace("xfer MB/s", "MB/s").replace("RSS MB", "MB").split())
    assert ("tok/s" in head, "cached" in head) == (True, width == 160)


def test_the_table_says_who_proposes_or_that_speculation_rests():
    views = [look(1.0), look(1.0, speculation_rests=True), look(1.0, drafter="")]
    column = next(column for column in table(views, views).columns if column.header == "drafts")
    assert list(column.cells) == ["127.0.0.1:9", "rests", "-"]


def test_the_table_says_when_the_drafter_is_slow_or_down():
    views = [
        look(1.0, drafter_health="healthy"),
        look(1.0, drafter_health="slow"),
        look(1.0, drafter_health="down", drafter="ngram"),
        look(1.0, drafter_health="down", drafter=""),
        look(1.0, drafter_health="slow", speculation_rests=True),
    ]
    column = next(column for column in table(views, views).columns if column.header == "drafts")
    assert list(column.cells) == ["127.0.0.1:9", "127.0.0.1:9 slow", "ngram down", "down", "rests slow"]


def test_the_share_of_prompt_tokens_that_came_from_the_prefix_cache():
    view = look(1.0, prefix_queried_tokens=400, prefix_hit_tokens=300)
    assert view_json(view, view)["cached_share"] == 0.75
    column = next(column for column in table([view], [view]).columns if column.header == "cached")
    assert list(column.cells) == ["75%"]


def test_the_services_of_a_live_list_come_and_go_between_two_looks():
    one, other = look(10.0), View(endpoint="127.0.0.1:2", at=12.0, role="decode", state="serving", load=LOAD)
    assert pairs([one], [other]) == [(other, other)]
    assert view_json(*pairs([one], [other])[0])["tokens_per_s"] is None


def test_the_prefill_services_that_decode_chooses_among_have_a_row_each():
    targets = (
        PrefillTarget(address="10.0.0.1:50061", state="serving", chosen=12, queued_tokens=3000),
        PrefillTarget(address="10.0.0.2:50061", state="down", chosen=4, queued_tokens=0),
    )
    made = targets_table([look(12.0, prefill_targets=targets), look(12.0)])
    rows = list(zip(*(column.cells for column in made.columns), strict=True))
    assert rows == [
        ("127.0.0.1:1", "10.0.0.1:50061", "serving", "3000", "12"),
        ("127.0.0.1:1", "10.0.0.2:50061", "down", "0", "4"),
    ]


async def test_once_prints_what_services_say_and_that_others_do_not_answer():
    async with running() as fake, running(role="prefill") as other:
        endpoints = ("--endpoint", fake.endpoint, "--endpoint", other.endpoint, "--endpoint", "127.0.0.1:1")
        done = await k3svc_run("top", *endpoints, "--once", "--json", "--interval", "0.1")
    values = json.loads(done.out)
    assert done.status == 0, done.err
    assert [(value["role"], value["state"]) for value in values] == [
        ("decode", "serving"), ("prefill", "serving"), ("?", "unreachable")
    ]  # fmt: skip
    assert values[0]["free_pages"] == 7


async def test_it_watches_until_it_is_ended():
    async with running() as fake:
        process = await start("top", "--endpoint", fake.endpoint, "--interval", "0.1")
        assert process.stdout is not None
        seen = b""
        while b"serving" not in seen:
            seen += await process.stdout.read(4096)
        process.terminate()
        assert await process.wait() == 143


async def test_when_nothing_answers_the_exit_code_says_so():
    done = await k3svc_run("top", "--endpoint", "127.0.0.1:1", "--once", "--interval", "0.1")
    assert done.status == 1
    assert "unreachable" in done.out


@pytest.mark.parametrize("arguments", [("--json",), ("--endpoint", "nowhere")])
async def test_wrong_options_are_told(arguments: tuple[str, ...]):
    assert (await k3svc_run("top", *arguments)).status == 2
