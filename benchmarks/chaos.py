"""Real processes under SIGKILL: no request may be lost, no token may differ, nothing may be left over.

    python -m benchmarks.chaos [--requests 500] [--kills 15] [--seed 1] [--set section.key=value]

Two prefill and two decode services. First every request runs undisturbed; then all run again while a random service is
killed in a random phase of some request's life and restarted at its address, the next kill once all are ready again,
until every phase has seen `--kills` kills. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.stack import cpu_name
from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient, RetryPolicy, ServiceLoad
from k3svc.config import load_config
from k3svc.errors import K3svcError

PHASES = ("before", "during", "after", "streaming")
"""Of a hand-off: asked for and not begun; prompt being computed and sent; computed and held; tokens flowing."""
IN_FLIGHT = 12
POLL_S = 0.004


def make_requests(count: int, seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        size = rng.choice([1, 2, 16, 63, 64, 65, rng.randint(1, 300), rng.randint(300, 1500)])
        options: dict[str, Any] = {"max_tokens": rng.randint(1, 48), "ignore_eos": True, "seed": index}
        options |= rng.choice(
            [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 40, "top_p": 0.9}]
        )
        requests.append(([rng.randrange(3800) for _ in range(size)], options))
    return requests


async def run_all(client: AsyncClient, requests: list[Any], results: dict[int, tuple[int, ...]]) -> dict[str, int]:
    """Runs all requests, IN_FLIGHT at once; fills results; returns the count of errors by class."""
    gate = asyncio.Semaphore(IN_FLIGHT)
    errors: dict[str, int] = {}

    async def one(index: int) -> None:
        tokens, options = requests[index]
        async with gate:
            try:
                results[index] = (await client.generate(tokens=tokens, **options).result()).token_ids
            except K3svcError as error:
                name = f"{type(error).__name__} {error.reason}"
                errors[name] = errors.get(name, 0) + 1
                print(f"request {index}: {name}: {error}", file=sys.stderr)

    await asyncio.gather(*(one(index) for index in range(len(requests))))
    return errors


async def loads(client: AsyncClient, endpoints: list[str]) -> list[ServiceLoad | None]:
    async def one(endpoint: str) -> ServiceLoad | None:
        try:
            return await client.load(endpoint, timeout_s=1.0)
        except K3svcError:
            return None

    return list(await asyncio.gather(*(one(endpoint) for endpoint in endpoints)))


def phases_of(decode: list[ServiceLoad | None], prefill: list[ServiceLoad | None]) -> set[str]:
    """The phases in which some request is now."""
    found = set()
    asked = sum(load.in_transfer for load in decode if load)
    taken = sum(load.running + load.in_transfer for load in prefill if load)
    if asked > taken:
        found.add("before")
    if any(load.running for load in prefill if load):
        found.add("during")
    if any(load.in_transfer for load in prefill if load):
        found.add("after")
    if any(load.running for load in decode if load):
        found.add("streaming")
    return found


async def kill_and_restart(stack: Stack, client: AsyncClient, rng: random.Random, wanted: int) -> dict[str, int]:
    """Kills until each phase has `wanted` kills; runs until cancelled once they are reached."""
    counts = dict.fromkeys(PHASES, 0)
    while min(counts.values()) < wanted:
        short = [phase for phase in PHASES if counts[phase] < wanted]
        decode, prefill = await asyncio.gather(
            loads(client, stack.decode_endpoints), loads(client, stack.prefill_endpoints)
        )
        now = [phase for phase in short if phase in phases_of(decode, prefill)]
        if not now:
            await asyncio.sleep(POLL_S)
            continue
        # The rarest phase first, so that common ones do not use up the requests.
        phase = min(now, key=lambda name: counts[name])
        victim = rng.choice(list(stack.processes))
        await stack.restart(victim)
        counts[phase] += 1
        print(f"killed {victim} ({phase}); kills so far {counts}", file=sys.stderr)
        await asyncio.sleep(rng.uniform(0.0, 0.3))
    return counts


async def left_over(stack: Stack, client: AsyncClient) -> dict[str, int]:
    """Pages, slots and requests held after everything ended, over all services; given 10 s to come back."""
    deadline = time.monotonic() + 10.0
    while True:
        found = {"pages": 0, "slots": 0, "requests": 0}
        for load in await loads(client, stack.decode_endpoints + stack.prefill_endpoints):
            assert load is not None
            found["pages"] += load.total_pages - load.free_pages
            found["slots"] += load.total_slots - load.free_slots
            found["requests"] += load.running + load.waiting + load.in_transfer
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


def file_descriptors(stack: Stack) -> int:
    return sum(len(list(Path(f"/proc/{process.pid}/fd").iterdir())) for process in stack.processes.values())


async def chaos(options: argparse.Namespace) -> dict[str, Any]:
    nano = Path(__file__).parents[1] / "models" / "k3-nano"
    settings = [f"model.path={nano}", "log.level=error", "prefill.lease_s=3", *options.set]
    stack = Stack(
        load_config(None, settings), prefill=2, decode=2, on_progress=lambda text: print(text, file=sys.stderr)
    )
    requests = make_requests(options.requests, options.seed)
    retry = RetryPolicy(attempts=30)
    async with stack, AsyncClient(stack.decode_endpoints, retry=retry) as client:
        calm: dict[int, tuple[int, ...]] = {}
        started = time.monotonic()
        errors = await run_all(client, requests, calm)
        assert not errors, f"the undisturbed run failed: {errors}"
        calm_s = time.monotonic() - started
        print(f"undisturbed run: {calm_s:.1f} s", file=sys.stderr)
        killer = asyncio.create_task(kill_and_restart(stack, client, random.Random(options.seed), options.kills))
        lost = different = rounds = 0
        started = time.monotonic()
        while not killer.done():
            stormy: dict[int, tuple[int, ...]] = {}
            await run_all(client, requests, stormy)
            rounds += 1
            lost += len(requests) - len(stormy)
            different += sum(1 for index, tokens in stormy.items() if tokens != calm[index])
            print(f"round {rounds}: {lost} lost, {different} different so far", file=sys.stderr)
        held = await left_over(stack, client)
        final = await loads(client, stack.decode_endpoints + stack.prefill_endpoints)
        return {
            "benchmark": "chaos",
            "cpu": cpu_name(),
            "requests": len(requests) * rounds,
            "rounds": rounds,
            "kills": killer.result(),
            "lost": lost,
            "different": different,
            "left_over": held,
            "file_descriptors": file_descriptors(stack),
            "resident_mb": [round(load.resident_bytes / 1e6) for load in final if load],
            "undisturbed_s": round(calm_s, 1),
            "disturbed_s": round(time.monotonic() - started, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--kills", type=int, default=15, help="in each phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    figures = asyncio.run(chaos(parser.parse_args()))
    print(json.dumps(figures))
    if figures["lost"] or figures["different"] or any(figures["left_over"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
