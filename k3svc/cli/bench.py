"""`k3svc bench`: load tests of decode services."""

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from k3svc.bench.export import write_chrome_trace, write_requests
from k3svc.bench.figures import PERCENTILES, Objectives, figures, parse_objectives, text_table
from k3svc.bench.load import Load, LoadResult
from k3svc.bench.sweep import Point, best_within_objectives, is_saturated, knee, sweep_table
from k3svc.bench.workload import Item, Shape, from_file, from_trace, synthetic, with_arrivals
from k3svc.cli.generate import echo_json
from k3svc.cli.session import (
    PROGRESS,
    DeviceOption,
    EndpointOption,
    ModelOption,
    SetOption,
    build_config,
    connect,
    names_own_stack,
    run_command,
    show,
)
from k3svc.client import AsyncClient, ModelInfo, Options, RetryPolicy
from k3svc.errors import BackendError, ConfigError

DEFAULT_CONCURRENCY = 8
ONCE = RetryPolicy(attempts=1)
"""A request that fails counts as failed: trying again would hide it."""

bench = typer.Typer(help="Load tests of decode services.", no_args_is_help=True)

InputLen = Annotated[int, typer.Option("--input-len", min=1, help="Prompt tokens of a request that is drawn.")]
OutputLen = Annotated[int, typer.Option("--output-len", min=1, help="Output tokens to ask for.")]
RangeRatio = Annotated[float, typer.Option("--range-ratio", help="Draw lengths from [len (1-r), len (1+r)].")]
PrefixLen = Annotated[int, typer.Option("--prefix-len", min=0, help="Tokens of a prefix that requests share.")]
NumPrefixes = Annotated[int, typer.Option("--num-prefixes", min=1, help="Number of different shared prefixes.")]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts", help="JSON Lines with prompt, tokens or messages, and output_tokens, instead of drawing."
    ),
]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Requests before the clock starts.")]
Seed = Annotated[int, typer.Option("--seed", help="Of lengths, tokens and arrivals.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        "--goodput", metavar="NAME:MS", help="Objective ttft, tpot or e2el, such as ttft:500; may be repeated."
    ),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos", help="Go on at stop tokens; default: unless prompts come from a file."
    ),
]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Deadline of each request in seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Report = Annotated[Path | None, typer.Option("--report", help="Write one HTML page with plots (needs k3svc[report]).")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What the options say about requests and how they are sent."""

    shape: Shape
    prompts: Path | None
    trace: Path | None = None
    trace_speed: float = 1.0
    burstiness: float = 1.0
    seed: int
    warmup: int
    objectives: Objectives
    percentiles: tuple[float, ...] = PERCENTILES
    options: Options
    timeout_s: float | None

    def items(self, count: int | None, info: ModelInfo, *, rate: float | None = None, salt: int = 0) -> list[Item]:
        """`salt` makes other requests of the same kind."""
        vocab_size = info.vocab_size
        seed = self.seed + 1_000_003 * salt
        if self.trace is not None:
            return from_trace(self.trace, count, vocab_size=vocab_size, seed=seed, speed=self.trace_speed)
        assert count is not None, "only a trace has an end of its own"
        if self.prompts is not None:
            items = from_file(self.prompts, count, output_len=self.shape.output_len)
        else:
            items = synthetic(count, self.shape, vocab_size=vocab_size, seed=seed)
        return items if rate is None else with_arrivals(items, rate, burstiness=self.burstiness, seed=seed)


@bench.command()
def serve(
    endpoint: EndpointOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    set_: SetOption = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", min=1, help="Number of requests; default 100, or the whole trace.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            min=1,
            help=f"Requests at once; default {DEFAULT_CONCURRENCY}, with --request-rate or --trace no bound.",
        ),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option("--request-rate", help="Open loop: requests per second, Poisson; inf: all at once.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="With --request-rate: shape of the gaps' gamma distribution; 1 is Poisson.")
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Open loop: JSON Lines with timestamp (ms), input_length, output_length, hash_ids."),
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="2 sends a trace twice as fast.")] = 1.0,
    prompts: PromptsFile = None,
    input_len: InputLen = 256,
    output_len: OutputLen = 64,
    range_ratio: RangeRatio = 0.0,
    prefix_len: PrefixLen = 0,
    num_prefixes: NumPrefixes = 1,
    warmup: Warmup = 4,
    seed: Seed = 0,
    temperature: Temperature = 1.0,
    ignore_eos: IgnoreEos = None,
    goodput: Goodput = None,
    percentiles: Annotated[str, typer.Option(help="Percentiles of each latency.")] = "50,90,95,99",
    timeout: Timeout = None,
    as_json: AsJson = False,
    report: Report = None,
    requests: Annotated[Path | None, typer.Option(help="Write one JSON object a request (JSON Lines).")] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(help="Write the time lines of all requests for chrome://tracing or Perfetto.")
    ] = None,
) -> None:
    """Load a service and tell how long it takes: closed loop, or open loop with --request-rate or --trace.

    Example: k3svc bench serve --endpoint 127.0.0.1:50051 --concurrency 16 --num-prompts 200 --report report.html
    """
    if trace is not None and (request_rate is not None or prompts is not None):
        raise typer.BadParameter("has its own requests and times", param_hint="--trace")
    _check_report(report)
    plan = Plan(
        shape=Shape(
            input_len=input_len,
            output_len=output_len,
            range_ratio=range_ratio,
            prefix_len=prefix_len,
            num_prefixes=num_prefixes,
        ),
        prompts=prompts,
        trace=trace,
        trace_speed=_positive("--trace-speed", trace_speed),
        burstiness=burstiness,
        seed=seed,
        warmup=warmup,
        objectives=parse_objectives(goodput or ()),
        percentiles=_percentiles(percentiles),
        options=_options(temperature, ignore_eos, prompts),
        timeout_s=timeout,
    )
    count = num_prompts or (None if trace is not None else 100)
    if concurrency is None and request_rate is None and trace is None:
        concurrency = DEFAULT_CONCURRENCY

    async def run(client: AsyncClient) -> None:
        info = await client.model_info()
        await _warm_up(client, plan, info)
        items = plan.items(count, info, rate=request_rate)
        before = client.calls_by_endpoint()
        result = await _load(client, plan, items, concurrency, "load")
        values = figures(result, plan.objectives, plan.percentiles)
        values["calls_by_endpoint"] = calls = {
            endpoint: count - before.get(endpoint, 0) for endpoint, count in client.calls_by_endpoint().items()
        }
        settings = _settings(plan, info, len(items)) | {
            "max_concurrency": concurrency,
            "request_rate": None if request_rate is None or math.isinf(request_rate) else request_rate,
        }
        if requests is not None:
            write_requests(requests, result)
        if chrome_trace is not None:
            write_chrome_trace(chrome_trace, result)
        if report is not None:
            from k3svc.bench.report import write_load_report  # noqa: PLC0415  needs plotly

            write_load_report(report, result, settings, values, plan.objectives)
            show(f"report: {report}")
        if as_json:
            echo_json(settings | values)
        else:
            typer.echo(text_table(values, plan.percentiles))
            if len(calls) > 1:
                show("calls: " + ", ".join(f"{endpoint} {count}" for endpoint, count in calls.items()))
        _check_some(result)

    _with_client(run, endpoint, model, device, set_)


@bench.command()
def sweep(
    endpoint: EndpointOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    set_: SetOption = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Levels, such as 1,2,4,8; default: doubled from 1 until nothing is gained.")
    ] = None,
    request_rate: Annotated[
        str | None, typer.Option(help="Open loop instead: requests per second of each level, such as 1,2,4.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests of a level, at least 2 for each at once.")] = 32,
    prompts: PromptsFile = None,
    input_len: InputLen = 256,
    output_len: OutputLen = 64,
    range_ratio: RangeRatio = 0.0,
    prefix_len: PrefixLen = 0,
    num_prefixes: NumPrefixes = 1,
    warmup: Warmup = 4,
    seed: Seed = 0,
    temperature: Temperature = 1.0,
    ignore_eos: IgnoreEos = None,
    goodput: Goodput = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Load a service at one level after the other and find the knee, beyond which only latency grows.

    Example: k3svc bench sweep --endpoint 127.0.0.1:50051 --goodput ttft:500 --goodput tpot:50 --report sweep.html
    """
    if concurrency is not None and request_rate is not None:
        raise typer.BadParameter("give --concurrency or --request-rate", param_hint="--request-rate")
    _check_report(report)
    plan = Plan(
        shape=Shape(
            input_len=input_len,
            output_len=output_len,
            range_ratio=range_ratio,
            prefix_len=prefix_len,
            num_prefixes=num_prefixes,
        ),
        prompts=prompts,
        seed=seed,
        warmup=warmup,
        objectives=parse_objectives(goodput or ()),
        options=_options(temperature, ignore_eos, prompts),
        timeout_s=timeout,
    )
    is_open = request_rate is not None
    levels = _levels("--request-rate" if is_open else "--concurrency", request_rate or concurrency)

    async def run(client: AsyncClient) -> None:
        info = await client.model_info()
        await _warm_up(client, plan, info)
        points: list[Point] = []
        for salt, level in enumerate(levels or [2.0**power for power in range(9)], 1):
            count = num_prompts if is_open else max(num_prompts, 2 * int(level))
            items = plan.items(count, info, rate=level if is_open else None, salt=salt)
            name = f"{level:g} requests/s" if is_open else f"{level:g} at once"
            result = await _load(client, plan, items, None if is_open else int(level), name)
            points.append(Point(level=level, figures=figures(result, plan.objectives)))
            if not levels and is_saturated(points):
                break
        unit = "requests/s" if is_open else "concurrency"
        settings = _settings(plan, info, num_prompts)
        if report is not None:
            from k3svc.bench.report import write_sweep_report  # noqa: PLC0415  needs plotly

            write_sweep_report(report, points, settings, unit)
            show(f"report: {report}")
        if as_json:
            echo_json(settings | _sweep_json(points, unit))
        else:
            typer.echo(sweep_table(points, unit))

    _with_client(run, endpoint, model, device, set_)


def _sweep_json(points: Sequence[Point], unit: str) -> dict[str, Any]:
    chosen, best = knee(points), best_within_objectives(points)
    return {
        "unit": unit,
        "knee": chosen and chosen.level,
        "best_within_objectives": best and best.level,
        "levels": [{"level": point.level, **point.figures} for point in points],
    }


def _with_client(
    work: Callable[[AsyncClient], Coroutine[Any, Any, None]],
    endpoint: list[str] | None,
    model: Path | None,
    device: str | None,
    overrides: list[str] | None,
) -> None:
    own_stack = names_own_stack(endpoint, model, device, overrides)
    config = build_config(model=model, device=device, overrides=overrides)

    async def run() -> None:
        async with connect(endpoint, config, own_stack=own_stack, retry=ONCE) as client:
            await work(client)

    # A faster loop is less in the way of what is measured.
    run_command(run(), runner=uvloop.run)


async def _warm_up(client: AsyncClient, plan: Plan, info: ModelInfo) -> None:
    """Raises the error of a request that cannot succeed, before anything is measured."""
    items = plan.items(plan.warmup, info)[: plan.warmup] if plan.warmup else []
    for item in items:
        options: Options = {**plan.options, "max_tokens": item.output_len}
        await client.generate(item.text, tokens=item.tokens, messages=item.messages, **options).result()


async def _load(
    client: AsyncClient, plan: Plan, items: Sequence[Item], concurrency: int | None, name: str
) -> LoadResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=PROGRESS) as progress:
        task = progress.add_task(name, total=len(items), state="")

        def advance(load: Load) -> None:
            progress.update(
                task, completed=load.num_ended, state=f"{load.num_running} running, {load.num_tokens} tokens"
            )

        load = Load(
            client,
            items,
            concurrency=concurrency,
            options=plan.options,
            timeout_s=plan.timeout_s,
            on_progress=advance,
        )
        return await load.run()


def _options(temperature: float, ignore_eos: bool | None, prompts: Path | None) -> Options:
    return {"temperature": temperature, "ignore_eos": prompts is None if ignore_eos is None else ignore_eos}


def _settings(plan: Plan, info: ModelInfo, num_prompts: int) -> dict[str, Any]:
    """What was measured, beside the figures."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "backend": "k3svc.v1",
        "model_id": info.model_name,
        "device": info.device,
        "variant": info.variant,
        "version": info.version,
        "num_prompts": num_prompts,
        "dataset": str(plan.trace or plan.prompts or "random"),
        **dataclasses.asdict(plan.shape),
        "seed": plan.seed,
        **plan.options,
        "goodput": {name: bound for name, bound in dataclasses.asdict(plan.objectives).items() if bound is not None},
    }


def _check_report(report: Path | None) -> None:
    """Before the load and not after it. Raises BackendError or ConfigError."""
    if report is None:
        return
    if importlib.util.find_spec("plotly") is None:
        raise BackendError("--report needs plotly: pip install 'k3svc[report]'")
    if not report.resolve().parent.is_dir():
        raise ConfigError(f"--report: no folder {report.resolve().parent}")


def _check_some(result: LoadResult) -> None:
    """Exit code 1 when nothing succeeded."""
    if any(record.is_success for record in result.records):
        return
    show(f"error: no request succeeded; the first said {result.records[0].error_code}: {result.records[0].error}")
    raise typer.Exit(1)


def _positive(option: str, value: float) -> float:
    if not value > 0:
        raise typer.BadParameter(f"{value}; allowed: more than 0", param_hint=option)
    return value


def _percentiles(text: str) -> tuple[float, ...]:
    """Of "50,99"; the median and p99, which tables show, are always among them."""
    try:
        values = {float(part) for part in text.split(",")}
    except ValueError:
        values = {-1.0}
    if not all(0 <= value <= 100 for value in values):
        raise typer.BadParameter(f"{text!r}; expected numbers from 0 to 100, such as 50,99", param_hint="--percentiles")
    return tuple(sorted(values | {50.0, 99.0}))


def _levels(option: str, text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    whole = option == "--request-rate" or all(value == int(value) for value in values)
    if not values or not whole or not all(value > 0 for value in values):
        raise typer.BadParameter(f"{text!r}; expected positive numbers such as 1,2,4", param_hint=option)
    return sorted(set(values))
