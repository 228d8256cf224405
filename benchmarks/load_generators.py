"""The load generator of `k3svc bench serve` against k6 on one stack, and what it costs.

    python -m benchmarks.load_generators [--json] [--reps N] [--set section.key=value]

In a round both keep the same number of requests of the same lengths under way, and count from just before they open the
call. Of ours those are taken that were sent while k6 loaded too, from its first request to its last: before that the
services are faster. `agreement` is ours over k6's of the medians over rounds. At 32 requests at once, in a
process of its own, `overhead` is the time per output token that our client sees over what the service reports, less 1.
The last line is one JSON object.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import uvloop

from benchmarks.stack import cpu_name
from k3svc.bench.figures import latencies_ms
from k3svc.bench.load import Load
from k3svc.bench.workload import Shape, synthetic
from k3svc.cli.session import run_command
from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient, RetryPolicy
from k3svc.config import Config, load_config

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "k6" / "generate.js"
CONCURRENCY, REQUESTS, INPUT_LEN, OUTPUT_LEN = 2, 64, 64, 64
VOCAB_SIZE = 4000
MANY, MANY_REQUESTS = 32, 96


async def run(*command: str) -> str:
    """Standard output. Raises RuntimeError with the error output."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, cwd=ROOT)
    try:
        out, error = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with status {process.returncode}: {error.decode()[-2000:]}")
    return out.decode()


async def bench_serve(endpoint: str, concurrency: int, requests: int) -> dict[str, Any]:
    command = (sys.executable, "-m", "k3svc.cli", "bench", "serve", "--endpoint", endpoint, "--json")
    options = {"--concurrency": concurrency, "--num-prompts": requests}
    options |= {"--input-len": INPUT_LEN, "--output-len": OUTPUT_LEN}
    arguments = [str(part) for pair in options.items() for part in pair]
    values: dict[str, Any] = json.loads(await run(*command, *arguments))
    return values


async def ours_beside_k6(endpoint: str, seed: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The figures of both, over the time that both loaded."""
    items = synthetic(
        100 * REQUESTS, Shape(input_len=INPUT_LEN, output_len=OUTPUT_LEN), vocab_size=VOCAB_SIZE, seed=seed
    )
    async with AsyncClient(endpoint, retry=RetryPolicy(attempts=1)) as client:
        load = Load(client, items, concurrency=CONCURRENCY, options={"ignore_eos": True, "temperature": 1.0})
        loading, began = asyncio.create_task(load.run()), time.time()
        theirs = await k6(endpoint)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    first, last = (theirs["wall_clock_ms"][name] / 1e3 - began for name in ("min", "max"))
    beside = [record for record in load.records if record.ended_s and first <= record.sent_s <= last]
    return latencies_ms(beside), theirs


async def k6(endpoint: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "k6.json"
        settings = {"TARGET": endpoint, "VUS": CONCURRENCY, "REQUESTS": REQUESTS, "SUMMARY": summary}
        settings |= {"INPUT_LEN": INPUT_LEN, "OUTPUT_LEN": OUTPUT_LEN, "VOCAB_SIZE": VOCAB_SIZE}
        environment = [part for name, value in settings.items() for part in ("-e", f"{name}={value}")]
        await run(str(Path(sys.executable).parent / "k6"), "run", "--quiet", *environment, str(SCRIPT))
        values: dict[str, Any] = json.loads(summary.read_text())
        return values


async def measure(config: Config, reps: int) -> dict[str, Any]:
    rounds: dict[str, list[float]] = {name: [] for name in ("ours_ttft", "ours_tpot", "k6_ttft", "k6_tpot")}
    async with Stack(config, on_progress=lambda text: print(text, file=sys.stderr)) as stack:
        endpoint = stack.decode_endpoints[0]
        await bench_serve(endpoint, CONCURRENCY, CONCURRENCY)
        for rep in range(reps):
            ours, theirs = await ours_beside_k6(endpoint, rep)
            for name in ("ttft", "tpot"):
                rounds[f"ours_{name}"].append(statistics.median(ours[name]))
                rounds[f"k6_{name}"].append(theirs[name]["med"])
            shown = ", ".join(f"{name} {values[-1]:.2f} ms" for name, values in rounds.items())
            print(f"round {rep}: {shown}", file=sys.stderr)
        crowded = [await bench_serve(endpoint, MANY, MANY_REQUESTS) for _ in range(max(1, reps // 2))]
    medians = {f"{name}_ms": statistics.median(values) for name, values in rounds.items()}
    return {
        **{name: round(value, 3) for name, value in medians.items()},
        "agreement_ttft": round(medians["ours_ttft_ms"] / medians["k6_ttft_ms"], 3),
        "agreement_tpot": round(medians["ours_tpot_ms"] / medians["k6_tpot_ms"], 3),
        "spread": {name: [round(min(values), 2), round(max(values), 2)] for name, values in rounds.items()},
        **overhead(crowded),
    }


def overhead(many: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of rounds with MANY requests at once."""
    tpot = statistics.median(values["median_tpot_ms"] for values in many)
    excess = statistics.median(values["generator_tpot_excess_ms"] for values in many)
    cpu = statistics.median(values["generator_cpu_ms_per_token"] for values in many)
    return {
        "many_tpot_ms": round(tpot, 3),
        "many_output_throughput": round(statistics.median(values["output_throughput"] for values in many), 1),
        "overhead": round(excess / (tpot - excess), 4),
        "generator_cpu_ms_per_token": round(cpu, 4),
        "generator_cpu_share": round(statistics.median(values["generator_cpu_share"] for values in many), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on stdout")
    parser.add_argument("--reps", type=int, default=5, help="rounds; default 5")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    # The second generator would find what the first one left.
    settings = [f"model.path={ROOT / 'models' / 'k3-nano'}", "model.device=cpu", "cache.prefix=off", *options.set]
    config = load_config(None, settings)
    figures: dict[str, Any] = {}

    async def work() -> None:
        figures.update(await measure(config, options.reps))

    try:
        run_command(work(), runner=uvloop.run)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    figures = {
        "benchmark": "load_generators",
        "reps": options.reps,
        "concurrency_each": CONCURRENCY,
        "input_len": INPUT_LEN,
        "output_len": OUTPUT_LEN,
        "device": config.model.device,
        "cpu": cpu_name(),
        **figures,
    }
    if not options.json:
        for name, value in figures.items():
            print(f"{name:30} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
