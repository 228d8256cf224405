"""`k3svc top`: what the services do now, one row each."""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from k3svc.cli.generate import echo_json
from k3svc.cli.session import LOCAL_ENDPOINT, new_client, run_command
from k3svc.client import AsyncClient, ServiceLoad
from k3svc.errors import K3svcError

TIMEOUT_S = 2.0
WIDTH_OF_FILES = 160
"""Columns where standard output is no terminal."""
COLUMNS = (
    *("service", "role", "state", "run", "wait", "xfer", "pages", "slots", "tok/s", "cached", "xfer MB/s"),
    *("drafts", "accept", "preempt", "failed", "RSS MB"),
)
DISPENSABLE = ("xfer MB/s", "cached", "preempt", "failed", "RSS MB", "accept", "xfer", "drafts", "slots", "wait")
"""Columns that a terminal too narrow for all of them does without, in this order."""
TARGET_COLUMNS = ("chosen by", "prefill", "state", "queued", "prompts")


@dataclass(frozen=True, kw_only=True)
class View:
    """What one look at a service saw."""

    endpoint: str
    at: float
    """time.monotonic()."""
    role: str = "?"
    state: str
    """serving, draining, or why it cannot be seen."""
    load: ServiceLoad | None = None


def top(
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--endpoint",
            metavar="HOST:PORT",
            help="A service of any role, dns:///HOST:PORT or file:PATH; repeated. Those that decode services choose "
            f"among are listed too. Default {LOCAL_ENDPOINT}.",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one table, with rates over one interval, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print one JSON list.")] = False,
) -> None:
    """Watch services: running and waiting requests, pages, slots, tokens per second, acceptance. Ctrl-C ends it.

    Example: k3svc top --endpoint 127.0.0.1:50051 --endpoint 127.0.0.1:50052
    """
    if as_json and not once:
        raise typer.BadParameter("only with --once", param_hint="--json")
    endpoints = endpoint or [LOCAL_ENDPOINT]
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)

    async def run() -> None:
        async with new_client(endpoints) as client:
            before = await _look_at_all(client)
            if once:
                await asyncio.sleep(interval)
                after = await _look_at_all(client)
                if as_json:
                    echo_json([view_json(*pair) for pair in pairs(before, after)])
                else:
                    console.print(tables(before, after, console.width))
                if all(view.load is None for view in after):
                    raise typer.Exit(1)
                return
            with Live(tables(before, before, console.width), auto_refresh=False, console=console) as live:
                while True:
                    await asyncio.sleep(interval)
                    after = await _look_at_all(client)
                    live.update(tables(before, after, console.width), refresh=True)
                    if not console.is_terminal:
                        console.print(tables(before, after, console.width))
                    before = after

    run_command(run())


async def _look_at_all(client: AsyncClient) -> list[View]:
    return list(await asyncio.gather(*(_look(client, endpoint) for endpoint in await client.find())))


async def _look(client: AsyncClient, endpoint: str) -> View:
    try:
        info = await client.model_info(endpoint, timeout_s=TIMEOUT_S)
        load = await client.load(endpoint, timeout_s=TIMEOUT_S)
    except K3svcError as error:
        return View(endpoint=endpoint, at=time.monotonic(), state=error.reason.lower().replace("_", " "))
    state = "draining" if load.draining else "serving"
    return View(endpoint=endpoint, at=time.monotonic(), role=info.role, state=state, load=load)


def view_json(before: View, after: View) -> dict[str, Any]:
    """One service, with rates since the look before; None where they are not known."""
    values: dict[str, Any] = {"endpoint": after.endpoint, "role": after.role, "state": after.state}
    if after.load is None:
        return values
    accepted, steps = after.load.accepted_drafts, after.load.draft_steps
    hits, queries = after.load.prefix_hit_tokens, after.load.prefix_queried_tokens
    return {
        **values,
        **dataclasses.asdict(after.load),
        "outcomes": dict(after.load.outcomes),
        "tokens_per_s": _rate(before, after, "num_tokens"),
        "handoff_bytes_per_s": _rate(before, after, "handoff_bytes"),
        "cached_share": hits / queries if queries else None,
        "acceptance_length": 1 + accepted / steps if steps else None,
    }


def table(before: Sequence[View], after: Sequence[View], width: int = WIDTH_OF_FILES) -> Table:
    """One row a service, of no more than `width` characters where leaving out `DISPENSABLE` can do that."""
    known = [_cells(view_json(*pair)) for pair in pairs(before, after)]
    rows = [cells + [""] * (len(COLUMNS) - len(cells)) for cells in known]
    widths = {name: 2 + max(map(len, column)) for name, *column in zip(COLUMNS, COLUMNS, *rows, strict=True)}
    for name in DISPENSABLE:
        if sum(widths.values()) > width:
            del widths[name]
    made = Table(box=None, header_style="bold", padding=(0, 1))
    for name in widths:
        made.add_column(name, justify="left" if name in COLUMNS[:3] else "right")
    for row in rows:
        made.add_row(*(cell for name, cell in zip(COLUMNS, row, strict=True) if name in widths))
    return made


def pairs(before: Sequence[View], after: Sequence[View]) -> list[tuple[View, View]]:
    """The two looks at each service that is there now; one that has just come was seen once."""
    earlier = {view.endpoint: view for view in before}
    return [(earlier.get(view.endpoint, view), view) for view in after]


def tables(before: Sequence[View], after: Sequence[View], width: int) -> Group:
    """The services, and what decode services say of the prefill services that they choose among."""
    made = [table(before, after, width), targets_table(after)]
    return Group(*(part for part in made if part.row_count))


def targets_table(views: Sequence[View]) -> Table:
    """One row a prefill service of each decode service."""
    made = Table(*TARGET_COLUMNS, box=None, header_style="bold", padding=(0, 1))
    for column in made.columns[3:]:
        column.justify = "right"
    for view in views:
        for target in () if view.load is None else view.load.prefill_targets:
            made.add_row(view.endpoint, target.address, target.state, str(target.queued_tokens), str(target.chosen))
    return made


def _cells(values: dict[str, Any]) -> list[str]:
    head = [values["endpoint"], values["role"], values["state"]]
    if "running" not in values:
        return head

    def used(kind: str) -> str:
        total = values[f"total_{kind}"]
        return f"{total - values[f'free_{kind}']}/{total}"

    return [
        *head,
        str(values["running"]),
        str(values["waiting"]),
        str(values["in_transfer"]),
        used("pages"),
        used("slots"),
        _number(values["tokens_per_s"]),
        "-" if values["cached_share"] is None else f"{values['cached_share']:.0%}",
        _number(values["handoff_bytes_per_s"], 1e-6),
        _drafts(values),
        _number(values["acceptance_length"]),
        str(values["preemptions"]),
        str(values["outcomes"].get("failed", 0)),
        f"{values['resident_bytes'] / 1e6:.0f}",
    ]


def _drafts(values: dict[str, Any]) -> str:
    """Who proposes, or that speculation rests, and what is wrong with the drafter."""
    who = "rests" if values["speculation_rests"] else values["drafter"]
    health = values["drafter_health"].removeprefix("healthy")
    return " ".join(filter(None, (who, health))) or "-"


def _number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.1f}"


def _rate(before: View, after: View, field: str) -> float | None:
    """None without two looks at one process: a service that was started again counts from zero."""
    if before.load is None or after.load is None or after.at <= before.at:
        return None
    difference: int = getattr(after.load, field) - getattr(before.load, field)
    return difference / (after.at - before.at) if difference >= 0 else None
