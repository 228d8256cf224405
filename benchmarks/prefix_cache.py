"""Time to the first token with the prefix cache, against computing the whole prompt, through services.

    python -m benchmarks.prefix_cache [--json] [--reps N] [--tokens N] [--set section.key=value]

Two stacks of k3-nano, one without a cache and one with it. A round asks one after the other, nothing else running: a
fresh prompt of the one without; the same of the one with, which finds nothing and takes snapshots; a prompt of the one
with that shares all but its last 128 tokens; and fresh prompts of a tenth as many tokens of both. The last line is one
JSON object with the medians over the rounds of times and of ratios taken within a round.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.stack import cpu_name
from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient
from k3svc.config import load_config
from k3svc.engine.build import load_model

NANO = Path(__file__).parents[1] / "models" / "k3-nano"
VOCAB = 3800
REST = 128
"""Tokens of a prompt that nobody has asked before."""


async def first_token(client: AsyncClient, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds until the caller has the first token, and how many of the prompt's came from the cache."""
    started = time.perf_counter()
    generation = client.generate(tokens=prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
    result = await generation.result()
    return (time.perf_counter() - started) * 1e3, result.usage.cached_tokens


async def measure(settings: list[str], reps: int, tokens: int) -> dict[str, Any]:
    rng = random.Random(7)
    configs = {name: load_config(None, [*settings, f"cache.prefix={name}"]) for name in ("off", "on")}
    times: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    async with (
        Stack(configs["off"]) as off_stack,
        Stack(configs["on"]) as on_stack,
        AsyncClient(off_stack.decode_endpoints) as off,
        AsyncClient(on_stack.decode_endpoints) as on,
    ):
        for rep in range(reps + 1):
            prompt, short = ([rng.randrange(VOCAB) for _ in range(count)] for count in (tokens, tokens // 10))
            row: dict[str, float] = {}
            for name, client, asked in (
                ("cold_without_cache", off, prompt),
                ("cold_with_cache", on, prompt),
                ("hit", on, prompt[:-REST] + [rng.randrange(VOCAB) for _ in range(REST)]),
                ("short_without_cache", off, short),
                ("short_with_cache", on, short),
            ):
                row[name], cached = await first_token(client, asked)
                assert cached == ((tokens - REST) if name == "hit" else 0), f"{name}: {cached} tokens from the cache"
            sys.stderr.write(f"{rep}: {', '.join(f'{name} {value:.1f} ms' for name, value in row.items())}\n")
            if rep:  # the first round warms up
                row_ratios = {
                    "hit_over_cold": row["hit"] / row["cold_without_cache"],
                    "cold_with_over_without": row["cold_with_cache"] / row["cold_without_cache"],
                    "short_with_over_without": row["short_with_cache"] / row["short_without_cache"],
                }
                for name, value in row.items():
                    times.setdefault(f"{name}_ms", []).append(value)
                for name, value in row_ratios.items():
                    ratios.setdefault(name, []).append(value)
    spec = load_model(configs["off"], lambda *_: None).cache.spec
    return {
        **{name: round(statistics.median(values), 1) for name, values in times.items()},
        **{name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "spread": {name: [round(min(values), 3), round(max(values), 3)] for name, values in ratios.items()},
        "snapshot_bytes": spec.slot_bytes,
        "page_bytes": spec.page_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on stdout")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt; a multiple of 128")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    settings = [f"model.path={NANO}", "log.level=warning", *options.set]
    figures = uvloop.run(measure(settings, options.reps, options.tokens))
    figures = {
        "benchmark": "prefix_cache",
        "cpu": cpu_name(),
        "device": load_config(None, settings).model.device,
        "reps": options.reps,
        "tokens": options.tokens,
        **figures,
    }
    if not options.json:
        for name, value in figures.items():
            print(f"{name:26} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
