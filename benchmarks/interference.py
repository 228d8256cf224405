"""Decode steps while a hand-off arrives: how much slower they are than undisturbed ones.

    python -m benchmarks.interference [--json] [--reps N] [--rate GB/s] [--rows N] [--set section.key=value]

One process runs decode steps of k3-nano on the engine thread, as a decode service does, and receives state from another
one through the product's own path, over gRPC and through shared memory, at a steady rate. Both run on the cores that
`k3svc up` gives them, or on those of `model.cpus` and `server.cpus`. A round measures steps without and with each, one
after the other; the last line is one JSON object with the medians over the rounds of each ratio.
"""

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.decode_steps import greedy_batch
from benchmarks.stack import cpu_name
from benchmarks.transfer import (
    MAX_MESSAGE_BYTES,
    PoolEngine,
    PoolHandoff,
    filled_cache,
    new_cache,
    pull_ours,
    register_prefill,
)
from k3svc.cli.cores import Cores, cores_of
from k3svc.config import Config, ServerSection, load_config
from k3svc.core.batch import DecodeBatch
from k3svc.engine.build import LoadedModel, load_model
from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.process import SWITCH_INTERVAL_S, set_cores, set_malloc, start_grpc, take_short_turns
from k3svc.rpc.server import server_options

WAYS = ("grpc", "shm")
STATE_MIB = 16
CONTEXT_TOKENS = 128
WINDOW_S = 1.5


class PacedEngine(PoolEngine):
    """Gives frames out no faster than `gb_per_s`."""

    def __init__(self, mib: int, gb_per_s: float) -> None:
        super().__init__(filled_cache(mib))
        self._s_per_byte = 1e-9 / gb_per_s
        self._due = 0.0

    def open(self, call: PrefillCall) -> PoolHandoff:
        return PacedHandoff(self, call)

    async def pace(self, num_bytes: int) -> None:
        """Waits until as many bytes may have gone; what was late is caught up with, over one hand-off at most."""
        now = time.monotonic()
        self._due = max(self._due, now - (STATE_MIB << 20) * self._s_per_byte) + num_bytes * self._s_per_byte
        await asyncio.sleep(max(0.0, self._due - now))


class PacedHandoff(PoolHandoff):
    def __init__(self, engine: PacedEngine, call: PrefillCall) -> None:
        super().__init__(engine.cache, call)
        self._engine = engine

    async def __aiter__(self) -> AsyncIterator[HandoffEvent]:
        async for event in super().__aiter__():
            yield event
            if isinstance(event, list):
                await self._engine.pace(sum(frame.nbytes for frame in event))


def send(pipe: Connection, gb_per_s: float, cores: Cores) -> None:
    """Child process: a prefill service whose state is computed."""
    set_malloc()
    set_cores(cores.process, key="model.cpus")

    async def main() -> None:
        server = grpc.aio.server(options=server_options(ServerSection()))
        register_prefill(server, PacedEngine(STATE_MIB, gb_per_s))
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await asyncio.to_thread(pipe.recv)
        await server.stop(None)

    uvloop.run(main())


async def steps_for(loaded: LoadedModel, batch: DecodeBatch, seconds: float) -> float:
    """Median seconds of a step, with the way to the engine thread and back."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while (started := time.perf_counter()) < until:
        await loaded.runner.decode(batch)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


async def receive(peer: GrpcPrefillPeer, received: list[int]) -> None:
    cache = new_cache(STATE_MIB)
    while True:
        received[0] += await pull_ours(peer, cache)


async def measure(config: Config, port: int, reps: int, rows: int) -> dict[str, Any]:
    """`port`: that of the sender."""
    loaded = load_model(config, lambda *_: None)
    peers = {
        way: GrpcPrefillPeer(f"127.0.0.1:{port}", timeout_s=60.0, max_message_bytes=MAX_MESSAGE_BYTES, transport=way)
        for way in WAYS
    }
    figures: dict[str, list[float]] = {"undisturbed_ms": []}
    try:
        await loaded.runner.warm_up()
        batch = greedy_batch(rows, context_tokens=CONTEXT_TOKENS, page_size=loaded.cache.spec.page_size)
        for rep in range(reps + 1):
            alone = await steps_for(loaded, batch, WINDOW_S)
            for way, peer in peers.items():
                received = [0]
                task = asyncio.create_task(receive(peer, received))
                started = time.perf_counter()
                step = await steps_for(loaded, batch, WINDOW_S)
                rate = received[0] / 1e9 / (time.perf_counter() - started)
                task.cancel()
                await asyncio.wait({task})
                again = await steps_for(loaded, batch, WINDOW_S / 2)
                print(f"{way} {rep}: {step * 1e3:.2f} ms, undisturbed {alone * 1e3:.2f} and {again * 1e3:.2f}, "
                      f"{rate:.2f} GB/s", file=sys.stderr)  # fmt: skip
                if rep:  # the first round warms up
                    figures["undisturbed_ms"].append(alone * 1e3)
                    figures.setdefault(f"{way}_over_undisturbed", []).append(2 * step / (alone + again))
                    figures.setdefault(f"{way}_gb_per_s", []).append(rate)
                alone = again
    finally:
        loaded.runner.close()
        await asyncio.gather(*(peer.close() for peer in peers.values()))
    medians = {name: round(statistics.median(values), 3) for name, values in figures.items()}
    spread = {name: [round(min(values), 3), round(max(values), 3)] for name, values in figures.items()}
    return {**medians, "spread": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on stdout")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--rate", type=float, default=0.2, help="GB/s that arrive; default 0.2")
    parser.add_argument("--rows", type=int, default=4, help="samples of a step; default 4")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    nano = Path(__file__).parents[1] / "models" / "k3-nano"
    config = load_config(None, [f"model.path={nano}", *options.set])
    cores = cores_of("decode", config)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    sender = context.Process(target=send, args=(other, options.rate, cores_of("prefill", config)), daemon=True)
    sender.start()
    other.close()
    port = pipe.recv()
    set_malloc()
    threads = start_grpc(cores.grpc)
    set_cores(cores.process, key="model.cpus", beside=cores.grpc)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, cpus=cores.process))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    take_short_turns()
    figures = uvloop.run(measure(config, port, options.reps, options.rows))
    sender.kill()
    if threads is not None:
        threads.close()
    figures = {
        "benchmark": "interference",
        "cpu": cpu_name(),
        "device": config.model.device,
        "reps": options.reps,
        "rows": options.rows,
        "rate_gb_per_s": options.rate,
        "cores": dataclasses.asdict(cores),
        **figures,
    }
    if not options.json:
        for name, value in figures.items():
            print(f"{name:24} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
