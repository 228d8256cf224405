"""The whole stack against the bare model: what concurrency gains and what disaggregation costs.

    python -m benchmarks.stack [--json] [--reps N] [--set section.key=value]

Starts prefill and decode as processes on loopback and measures, in one run and interleaved: time to the first token of
a 2,048-token prompt through the two services beside the same prefill inside this process, tokens/s at 1, 8, 16 and 32
concurrent requests and the time per output token (median over the requests), at 16 beside the same work in bare steps
of the model, the wait between prompt and first token, start-up time, resident memory beyond the pools. The last line is
one JSON object; a figure of several rounds is their median, and `spread` has the least and the largest of each.
"""

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from k3svc.cli.session import run_command
from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient
from k3svc.config import Config, load_config
from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow, FirstRow, SampleSpec
from k3svc.core.chunks import next_chunk
from k3svc.core.request import SamplingParams
from k3svc.engine.build import LoadedModel, load_model

PROMPT_TOKENS = 2048
CONCURRENCY = (1, 8, 16, 32)
BARE_CONCURRENCY = 16
WAIT_PROMPTS = (4096, 1025, 2049, 3073)
"""Prompts after which the wait for the first token is measured: a long one, and those one token longer than chunks."""
SHORT_PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64


def prompt(size: int, salt: int) -> list[int]:
    """Token ids that look like nothing in particular."""
    return [(salt * 7919 + index * index * 31 + 17 * index) % 3800 for index in range(size)]


async def prefill_in_process(loaded: LoadedModel, tokens: list[int], chunk_tokens: int) -> float:
    """Seconds from the prompt to its first token with nothing but the model in the way."""
    page_size = loaded.cache.spec.page_size
    table = list(range(1, len(tokens) // page_size + 2))
    started = time.perf_counter()
    done = 0
    while done < len(tokens):
        count = next_chunk(len(tokens) - done, chunk_tokens, loaded.grid)
        row = ExtendRow(
            key="a",
            slot=1,
            block_table=table,
            token_ids=tokens[done : done + count],
            start=done,
            is_last=done + count == len(tokens),
        )
        await loaded.runner.extend(ExtendBatch(rows=[row]), lambda _: None)
        done += count
    spec = SampleSpec(params=SamplingParams(temperature=0.0), sample_index=0, position=len(tokens), counts=None)
    await loaded.runner.decode(DecodeBatch(rows=[], first=[FirstRow(key="a", slot=1, sample=spec)]))
    return time.perf_counter() - started


async def first_token_through_services(client: AsyncClient, tokens: list[int]) -> tuple[float, Any]:
    """Seconds from the call to its only token, and the Finished event."""
    started = time.perf_counter()
    completion = await client.generate(tokens=tokens, max_tokens=1, temperature=0.0).result()
    return time.perf_counter() - started, completion


async def wait_after_prefill(client: AsyncClient, tokens: list[int]) -> float:
    """Time from the end of a prompt's computation to the end of its first decode step, as a share of that computation.
    The way of the call to prefill counts too.
    """
    _, completion = await first_token_through_services(client, tokens)
    timings = completion.timings
    return float((timings.ttft_ms - timings.queue_ms - timings.prefill_ms) / timings.prefill_ms)


async def tokens_per_s(client: AsyncClient, concurrency: int, salt: int) -> tuple[float, float]:
    """Output tokens per second of `concurrency` requests that start together, and the milliseconds of a token after the
    first, the median over the requests.
    """
    started = time.perf_counter()
    completions = await asyncio.gather(
        *(
            client.generate(
                tokens=prompt(SHORT_PROMPT_TOKENS, salt + index),
                max_tokens=OUTPUT_TOKENS,
                ignore_eos=True,
                temperature=1.0,
                seed=index,
            ).result()
            for index in range(concurrency)
        )
    )
    count = sum(len(completion.token_ids) for completion in completions)
    rate = count / (time.perf_counter() - started)
    return rate, statistics.median(completion.timings.tpot_ms for completion in completions if completion.timings)


async def bare_tokens_per_s(loaded: LoadedModel, concurrency: int, salt: int) -> float:
    """The same work in steps of the model alone: prompts in one extend step, then decode steps of all samples."""
    page_size = loaded.cache.spec.page_size
    num_pages = (SHORT_PROMPT_TOKENS + OUTPUT_TOKENS) // page_size + 1
    tables = [list(range(1 + row * num_pages, 1 + (row + 1) * num_pages)) for row in range(concurrency)]
    started = time.perf_counter()
    rows = [
        ExtendRow(
            key=str(row),
            slot=row + 1,
            block_table=table,
            token_ids=prompt(SHORT_PROMPT_TOKENS, salt + row),
            start=0,
            is_last=True,
        )
        for row, table in enumerate(tables)
    ]
    await loaded.runner.extend(ExtendBatch(rows=rows), lambda _: None)
    samples = [
        SampleSpec(
            params=SamplingParams(temperature=1.0, seed=row),
            sample_index=0,
            position=SHORT_PROMPT_TOKENS,
            counts=None,
        )
        for row in range(concurrency)
    ]
    first = [FirstRow(key=str(row), slot=row + 1, sample=sample) for row, sample in enumerate(samples)]
    output = await loaded.runner.decode(DecodeBatch(rows=[], first=first))
    for position in range(SHORT_PROMPT_TOKENS, SHORT_PROMPT_TOKENS + OUTPUT_TOKENS - 1):
        batch = [
            DecodeRow(
                key=str(row),
                slot=row + 1,
                block_table=table,
                token_id=output.sampled[str(row)][-1].token_id,
                position=position,
                sample=replace(samples[row], position=position + 1),
            )
            for row, table in enumerate(tables)
        ]
        output = await loaded.runner.decode(DecodeBatch(rows=batch))
    return concurrency * OUTPUT_TOKENS / (time.perf_counter() - started)


async def measure(config: Config, reps: int) -> dict[str, Any]:
    started = time.perf_counter()
    figures: dict[str, Any] = {}
    samples: dict[str, list[float]] = {}
    print(
        f"{reps} rounds: first token of {PROMPT_TOKENS} tokens; {OUTPUT_TOKENS} tokens each after prompts of "
        f"{SHORT_PROMPT_TOKENS} tokens, {', '.join(map(str, CONCURRENCY))} at a time",
        file=sys.stderr,
    )
    async with Stack(config, on_progress=lambda text: print(text, file=sys.stderr)) as stack:
        figures["ready_s"] = round(time.perf_counter() - started, 2)
        async with AsyncClient(stack.decode_endpoints) as client:
            for role, endpoint in (("decode", stack.decode_endpoints[0]), ("prefill", stack.prefill_endpoints[0])):
                load = await client.load(endpoint)
                figures[f"{role}_idle_rss_beyond_pools_mb"] = round((load.resident_bytes - load.pool_bytes) / 1e6, 1)
            loaded = load_model(
                replace(config, cache=replace(config.cache, num_slots=BARE_CONCURRENCY)), lambda *_: None
            )
            inside: list[float] = []
            outside: list[float] = []
            tails: list[float] = []
            for rep in range(reps + 1):
                tokens = prompt(PROMPT_TOKENS, rep)
                a = await prefill_in_process(loaded, tokens, config.prefill.chunk_tokens)
                b, completion = await first_token_through_services(client, tokens)
                if rep:  # the first round warms up
                    inside.append(a)
                    outside.append(b)
                    tails.append(completion.timings.handoff_tail_ms)
                    figures["handoff_bytes"] = completion.timings.handoff_bytes
                warm_up = "" if rep else " (warms up, not counted)"
                print(f"first token {rep}{warm_up}: in process {a:.3f} s, through services {b:.3f} s", file=sys.stderr)
            samples |= {
                "ttft_in_process_ms": [value * 1e3 for value in inside],
                "ttft_stack_ms": [value * 1e3 for value in outside],
                "ttft_ratio": [b / a for a, b in zip(inside, outside, strict=True)],
                "handoff_tail_ms": tails,
            }
            rates: dict[int, list[float]] = {concurrency: [] for concurrency in CONCURRENCY}
            for rep in range(reps):
                for size in WAIT_PROMPTS:
                    share = await wait_after_prefill(client, prompt(size, 1000 + rep))
                    samples.setdefault(f"wait_over_prefill_{size}", []).append(share)
                    print(f"{size} tokens: wait after prefill {share:.3f} of it", file=sys.stderr)
            bare: list[float] = []
            tpot: dict[int, list[float]] = {concurrency: [] for concurrency in CONCURRENCY}
            for rep in range(reps):
                for concurrency in CONCURRENCY:
                    rate, tpot_ms = await tokens_per_s(client, concurrency, 100 * rep)
                    rates[concurrency].append(rate)
                    tpot[concurrency].append(tpot_ms)
                    print(f"{concurrency} concurrent: {rate:.1f} tokens/s, {tpot_ms:.2f} ms a token", file=sys.stderr)
                bare.append(await bare_tokens_per_s(loaded, BARE_CONCURRENCY, 100 * rep))
                print(f"{BARE_CONCURRENCY} in bare steps: {bare[-1]:.1f} tokens/s", file=sys.stderr)
            loaded.runner.close()
            samples |= {f"tokens_per_s_{concurrency}": values for concurrency, values in rates.items()}
            samples |= {f"tpot_ms_{concurrency}": values for concurrency, values in tpot.items()}
            samples[f"bare_tokens_per_s_{BARE_CONCURRENCY}"] = bare
            samples["stack_over_bare"] = [a / b for a, b in zip(rates[BARE_CONCURRENCY], bare, strict=True)]
            samples["throughput_ratio_32"] = [b / a for a, b in zip(rates[1], rates[32], strict=True)]
    return {**figures, **summary(samples)}


def summary(samples: dict[str, list[float]]) -> dict[str, Any]:
    """The median of each figure, and under `spread` its least and largest value."""
    medians = {name: round(statistics.median(values), 3) for name, values in samples.items()}
    spread = {name: [round(min(values), 3), round(max(values), 3)] for name, values in samples.items()}
    return {**medians, "spread": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on stdout")
    parser.add_argument("--reps", type=int, default=5, help="rounds of each figure; default 5")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    nano = Path(__file__).parents[1] / "models" / "k3-nano"
    # Longer prompts begin as shorter ones do.
    config = load_config(None, [f"model.path={nano}", "cache.prefix=off", *options.set])
    figures: dict[str, Any] = {}

    async def run() -> None:
        figures.update(await measure(config, options.reps))

    try:
        run_command(run())
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    figures = {
        "benchmark": "stack",
        "reps": options.reps,
        "prompt_tokens": PROMPT_TOKENS,
        "short_prompt_tokens": SHORT_PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "device": config.model.device,
        "chunk_tokens": config.prefill.chunk_tokens,
        "cpu": cpu_name(),
        **figures,
    }
    if not options.json:
        for name, value in figures.items():
            print(f"{name:34} {value}")
    print(json.dumps(figures))


def cpu_name() -> str:
    """Model of the processor and number of cores that this machine shows."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


if __name__ == "__main__":
    main()
