"""What the public gateway adds: time to the first token and time per token through it and without it.

    python -m benchmarks.gateway [--pairs 60] [--concurrency 1 8] [--set section.key=value]

For each mode of the gateway a stack of one prefill and one decode service. Every prompt goes two ways, one after the
other: to decode over the gateway's own protocol, and over HTTP through the gateway; both are read as bytes, without a
client library. The last line is one JSON object; the difference is taken for each prompt, then its median.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.stack import cpu_name
from k3svc.cli.stack import Stack
from k3svc.config import load_config
from k3svc.gateway.launch import GatewayOptions, Mode
from k3svc.gateway.protos import SERVICE, sglang_scheduler_pb2
from k3svc.text.tokenizer import Tokenizer

NANO = Path(__file__).parents[1] / "models" / "k3-nano"
TEXT = (Path(__file__).parent / "transfer.py").read_text()
PROMPT_CHARS = 200
MAX_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one request, in milliseconds."""

    ttft: float
    tpot: float


def prompt(serial: int) -> str:
    return f"# {serial}\n{TEXT[serial % 512 : serial % 512 + PROMPT_CHARS]}"


async def direct(channel: grpc.aio.Channel, token_ids: list[int]) -> Times:
    """The call that the gateway makes, from here."""
    request = sglang_scheduler_pb2.GenerateRequest(
        request_id=uuid.uuid4().hex,
        tokenized=sglang_scheduler_pb2.TokenizedInput(input_ids=token_ids),
        sampling_params=sglang_scheduler_pb2.SamplingParams(max_new_tokens=MAX_TOKENS, ignore_eos=True),
        stream=True,
    )
    started = time.perf_counter()
    stream: Any = channel.unary_stream(f"/{SERVICE}/Generate")(request.SerializeToString())
    return times(started, [time.perf_counter() async for _ in stream])


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


async def load(
    ways: Sequence[Callable[[str], Awaitable[Times]]], serials: range, concurrency: int
) -> list[list[Times]]:
    """A closed loop: by request, its times on each way."""
    waiting = iter(serials)

    async def worker() -> list[list[Times]]:
        return [[await way(prompt(serial)) for way in ways] for serial in waiting]

    return [pair for part in await asyncio.gather(*(worker() for _ in range(concurrency))) for pair in part]


async def measure(mode: Mode, options: argparse.Namespace) -> dict[str, Any]:
    # The second way would find what the first one left.
    settings = [f"model.path={NANO}", "log.level=warning", "server.drain_s=2", "cache.prefix=off", *options.set]
    stack = Stack(
        load_config(None, settings),
        gateway=GatewayOptions(mode=mode),
        on_progress=lambda text: print(text, file=sys.stderr),
    )
    tokenizer = Tokenizer.load(NANO)
    results: dict[str, Any] = {}
    async with stack, grpc.aio.insecure_channel(stack.decode_endpoints[0]) as channel:
        address = stack.gateway_endpoint
        assert address is not None, "made with a gateway"
        ways = (lambda text: direct(channel, tokenizer.encode(text)), lambda text: over_http(address, text))
        for concurrency in options.concurrency:
            await load(ways, range(-concurrency, 0), concurrency)
            results[str(concurrency)] = summary(await load(ways, range(options.pairs), concurrency))
    return results


def summary(pairs: list[list[Times]]) -> dict[str, float]:
    """Medians, milliseconds."""

    def median(value: Callable[[Times, Times], float]) -> float:
        return round(statistics.median(value(*pair) for pair in pairs), 2)

    return {
        "direct_ttft_ms": median(lambda without, _: without.ttft),
        "gateway_ttft_ms": median(lambda _, through: through.ttft),
        "added_ttft_ms": median(lambda without, through: through.ttft - without.ttft),
        "direct_tpot_ms": median(lambda without, _: without.tpot),
        "gateway_tpot_ms": median(lambda _, through: through.tpot),
        "added_tpot_ms": median(lambda without, through: through.tpot - without.tpot),
    }


async def main(options: argparse.Namespace) -> dict[str, Any]:
    modes: tuple[Mode, ...] = ("plain", "pd")
    return {
        "benchmark": "gateway",
        "cpu": cpu_name(),
        "pairs": options.pairs,
        "prompt_chars": PROMPT_CHARS,
        "max_tokens": MAX_TOKENS,
        **{mode: await measure(mode, options) for mode in modes},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="prompts of a measurement")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    print(json.dumps(asyncio.run(main(parser.parse_args()))))
