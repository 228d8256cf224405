"""Steady load for a long time: throughput must not fall, memory must not grow.

    python -m benchmarks.soak [--minutes 15] [--concurrency 16] [--set section.key=value]

A closed loop of mixed requests keeps the machine at its capacity. The last line is one JSON object: tokens/s of each
minute, the ratio of the last to the second, resident memory of each role after the second minute and at the end.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos import left_over
from benchmarks.stack import cpu_name
from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient
from k3svc.config import load_config


async def worker(client: AsyncClient, serial: "itertools.count[int]", counts: list[int], deadline: float) -> None:
    """One request after the other; counts[0] grows with every output token."""
    while time.monotonic() < deadline:
        rng = random.Random(next(serial))
        tokens = [rng.randrange(3800) for _ in range(rng.choice([8, 64, 200, 600]))]
        options: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "temperature": 1.0, "seed": rng.randrange(999)}
        async for event in client.generate(tokens=tokens, **options):
            counts[0] += len(getattr(event, "token_ids", ()))


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    nano = Path(__file__).parents[1] / "models" / "k3-nano"
    stack = Stack(
        load_config(None, [f"model.path={nano}", "log.level=warning", *options.set]),
        on_progress=lambda text: print(text, file=sys.stderr),
    )
    async with stack, AsyncClient(stack.decode_endpoints) as client:
        counts, serial = [0], itertools.count()
        deadline = time.monotonic() + 60.0 * options.minutes
        workers = [asyncio.create_task(worker(client, serial, counts, deadline)) for _ in range(options.concurrency)]
        rates: list[float] = []
        memory: list[dict[str, float]] = []
        for minute in range(options.minutes):
            before, started = counts[0], time.monotonic()
            await asyncio.sleep(max(0.0, deadline - 60.0 * (options.minutes - 1 - minute) - started))
            rates.append(round((counts[0] - before) / (time.monotonic() - started), 1))
            memory.append({name: await resident_mb(client, p.address) for name, p in stack.processes.items()})
            print(f"minute {minute + 1}: {rates[-1]} tokens/s, resident MB {memory[-1]}", file=sys.stderr)
        await asyncio.gather(*workers)
        held = await left_over(stack, client)
    growth = {name: round(memory[-1][name] / memory[1][name] - 1.0, 4) for name in memory[-1]}
    return {
        "benchmark": "soak",
        "cpu": cpu_name(),
        "minutes": options.minutes,
        "concurrency": options.concurrency,
        "requests": next(serial),
        "tokens_per_s": rates,
        "last_over_second_minute": round(rates[-1] / rates[1], 3),
        "resident_mb_second_minute": memory[1],
        "resident_mb_end": memory[-1],
        "memory_growth": growth,
        "left_over": held,
    }


async def resident_mb(client: AsyncClient, endpoint: str) -> float:
    return round((await client.load(endpoint)).resident_bytes / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=int, default=15, help="at least 2")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    print(json.dumps(asyncio.run(soak(parser.parse_args()))))


if __name__ == "__main__":
    main()
