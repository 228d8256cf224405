"""What the public gateway adds: time to the first token and time per token through it and without it.

    python -m benchmarks.gateway [--rounds 5] [--requests 16] [--concurrency 1 8] [--set section.key=value]

For each mode of the gateway a stack of one prefill and one decode service, and rounds in which the same prompts go the
native way and through the gateway in turn. The HTTP side is read as bytes, without a client library. The last line is
one JSON object; differences are taken within a round, then their median.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stack import cpu_name
from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient, Delta
from k3svc.config import load_config
from k3svc.gateway.launch import GatewayOptions, Mode

NANO = Path(__file__).parents[1] / "models" / "k3-nano"
TEXT = (Path(__file__).parent / "transfer.py").read_text()
PROMPT_CHARS = 900
MAX_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one request, in milliseconds."""

    ttft: float
    tpot: float


def prompt(serial: int) -> str:
    return f"# {serial}\n{TEXT[serial % 512 : serial % 512 + PROMPT_CHARS]}"


async def native(client: AsyncClient, text: str) -> Times:
    started = time.perf_counter()
    events = client.generate(text, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    return times(started, [time.perf_counter() async for e in events if isinstance(e, Delta) and e.token_ids])


async def over_http(address: str, text: str) -> Times:
    """A streamed completion over a connection of its own, which is open when the clock starts."""
    host, _, port = address.rpartition(":")
    body = json.dumps(
        {
            "model": NANO.name,
            "prompt": text,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        started = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        return times(started, [time.perf_counter() async for line in reader if line.startswith(b"data: {")])
    finally:
        writer.close()


def times(started: float, marks: list[float]) -> Times:
    assert len(marks) > 2, "an answer of several messages"
    return Times(ttft=1e3 * (marks[0] - started), tpot=1e3 * (marks[-1] - marks[0]) / (MAX_TOKENS - 1))


async def load(call: Callable[[str], Awaitable[Times]], serials: range, concurrency: int) -> Times:
    """Medians over the requests of a closed loop."""
    waiting = iter(serials)

    async def worker() -> list[Times]:
        return [await call(prompt(serial)) for serial in waiting]

    done = [one for part in await asyncio.gather(*(worker() for _ in range(concurrency))) for one in part]
    return Times(ttft=statistics.median(t.ttft for t in done), tpot=statistics.median(t.tpot for t in done))


async def measure(mode: Mode, options: argparse.Namespace) -> dict[str, Any]:
    stack = Stack(
        load_config(None, [f"model.path={NANO}", "log.level=warning", "server.drain_s=2", *options.set]),
        gateway=GatewayOptions(mode=mode),
        on_progress=lambda text: print(text, file=sys.stderr),
    )
    results: dict[str, Any] = {}
    async with stack, AsyncClient(stack.decode_endpoints) as client:
        address = stack.gateway_endpoint
        assert address is not None, "made with a gateway"
        for concurrency in options.concurrency:
            rounds = []
            for number in range(-1, options.rounds):
                serials = range(1000 * number, 1000 * number + options.requests)
                without = await load(lambda text: native(client, text), serials, concurrency)
                through = await load(lambda text: over_http(address, text), serials, concurrency)
                if number >= 0:
                    rounds.append((without, through))
                print(f"{mode} x{concurrency}: {without} {through}", file=sys.stderr)
            results[str(concurrency)] = summary(rounds)
    return results


def summary(rounds: list[tuple[Times, Times]]) -> dict[str, float]:
    """Medians over the rounds, milliseconds."""

    def median(value: Callable[[Times, Times], float]) -> float:
        return round(statistics.median(value(*pair) for pair in rounds), 2)

    return {
        "native_ttft_ms": median(lambda without, _: without.ttft),
        "gateway_ttft_ms": median(lambda _, through: through.ttft),
        "added_ttft_ms": median(lambda without, through: through.ttft - without.ttft),
        "native_tpot_ms": median(lambda without, _: without.tpot),
        "gateway_tpot_ms": median(lambda _, through: through.tpot),
        "added_tpot_ms": median(lambda without, through: through.tpot - without.tpot),
    }


async def main(options: argparse.Namespace) -> dict[str, Any]:
    modes: tuple[Mode, ...] = ("plain", "pd")
    return {
        "benchmark": "gateway",
        "cpu": cpu_name(),
        "rounds": options.rounds,
        "requests": options.requests,
        "prompt_chars": PROMPT_CHARS,
        "max_tokens": MAX_TOKENS,
        **{mode: await measure(mode, options) for mode in modes},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16, help="requests of each side of a round")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    print(json.dumps(asyncio.run(main(parser.parse_args()))))
