"""The hand-off path alone: bytes from one process's pools into another's, beside what the machine could do.

    python -m benchmarks.transfer [--json] [--reps N] [--mib 1,16,256]

Two processes on one host, interleaved rounds: raw TCP (send, recv_into), the copy through shared memory (into a ring
and out of it), Mooncake's TCP engine where it installs, protobuf messages over a gRPC stream with default settings (the
naive way), and the product's own path over gRPC and through shared memory: Outbox, frames, Landing, CRC32C on both
sides. Figures are GB/s from the request to the last landed byte, and CPU seconds per GB of sender and receiver. The
last line is one JSON object; its ratios are medians of those of each round.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch
import uvloop

from benchmarks.clock import cpu_s, timed
from benchmarks.stack import cpu_name
from benchmarks.transfer_peers import (
    install_mooncake,
    mooncake_environment,
    receive_memcpy,
    receive_mooncake,
    receive_raw,
    send_memcpy,
    send_mooncake,
    send_raw,
)
from k3svc import ops
from k3svc.config import PrefillSection, ServerSection
from k3svc.engine.ports import Fingerprint, HandoffEvent, PrefillCall
from k3svc.ops.table import Cache, CacheSpec
from k3svc.rpc.access import Access
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.process import set_malloc
from k3svc.rpc.server import server_options
from k3svc.rpc.state_port import StatePort
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import PrefillDone, StateManifest, build_manifest
from k3svc.transfer.outbox import FrameSink, Outbox
from k3svc.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from services.prefill.service import Engine, PrefillServicer

MIB = 1 << 20
FRAME_BYTES = PrefillSection.frame_bytes
NAIVE_BYTES = MIB
MAX_MESSAGE_BYTES = 64 * MIB
RAW_WAYS: dict[str, tuple[Callable[[Connection, int], None], Callable[[int, int], Callable[[], None]]]] = {
    "raw_tcp": (send_raw, receive_raw),
    "memcpy": (send_memcpy, receive_memcpy),
    "mooncake": (send_mooncake, receive_mooncake),
}
ANYONE = Fingerprint(protocol=1, model="", tokenizer="", wire_layout="", variant="")


def geometry(mib: int) -> CacheSpec:
    """KDA states that sum to `mib` MiB in pieces of at most 4 MiB, as those of a large model are."""
    layer_mib = min(mib, 4)
    return CacheSpec(
        kda_layers=tuple(range(mib // layer_mib)),
        mla_layers=(),
        kda_heads=16 * layer_mib,
        kda_key_dim=128,
        kda_value_dim=128,
        conv_width=1,
        kv_lora_rank=1,
        rope_dim=0,
        vocab_size=1,
        num_slots=1,
        num_pages=1,
        page_size=16,
        state_dtype=torch.float32,
        kv_dtype=torch.float32,
    )


class PoolEngine:
    """Stands in for a PrefillEngine whose prompt is already computed."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def open(self, call: PrefillCall) -> "PoolHandoff":
        return PoolHandoff(self.cache, call)

    def release(self, _request_id: str, _attempt: int) -> bool:
        return True


class PoolHandoff:
    sink: FrameSink | None = None

    def __init__(self, cache: Cache, call: PrefillCall) -> None:
        self._manifest = build_manifest(
            cache.spec, request_id=call.request_id, attempt=call.attempt, num_tokens=len(call.prompt)
        )
        self._outbox = Outbox(self._manifest, cache, slot=1, block_table=[1], frame_bytes=FRAME_BYTES)
        for layer in cache.spec.kda_layers:
            self._outbox.add_layer(layer, 0, len(call.prompt))
        self._outbox.add_logits()

    async def __aiter__(self) -> AsyncIterator[HandoffEvent]:
        yield self._manifest
        sequence = 0
        while frames := self._outbox.frames(sequence, self.sink):
            sequence = frames[-1].sequence + 1
            yield frames
        yield PrefillDone(
            num_frames=sequence, queue_ms=0.0, compute_ms=0.0, send_tail_ms=0.0, chunks=1, cached_tokens=0
        )

    def detach(self) -> None:
        """Nothing is held."""


class NaiveServicer(prefill_service_pb2_grpc.PrefillServiceServicer):
    """One protobuf message per MiB, made from bytes."""

    def __init__(self, source: memoryview) -> None:
        self._source = source

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        for offset in range(0, self._source.nbytes, NAIVE_BYTES):
            frame = prefill_service_pb2.StateFrame(
                offset=offset, data=bytes(self._source[offset : offset + NAIVE_BYTES])
            )
            yield prefill_service_pb2.PrefillResponse(frames=prefill_service_pb2.StateFrames(frames=[frame]))


def new_cache(mib: int) -> Cache:
    """Pools whose memory was touched before, as that of a service is."""
    cache = ops.load("reference", dtype="float32", threads=1).new_cache(geometry(mib))
    for layer in cache.spec.kda_layers:
        cache.state_bytes(layer, 1)[:] = bytes(cache.state_bytes(layer, 1).nbytes)
    return cache


def filled_cache(mib: int) -> Cache:
    cache = new_cache(mib)
    for layer in cache.spec.kda_layers:
        view = cache.state_bytes(layer, 1)
        view[:] = (bytes(range(256)) * (view.nbytes // 256 + 1))[: view.nbytes]
    return cache


def register_prefill(server: grpc.aio.Server, engine: Engine) -> None:
    """Prefill's services over `engine`, as a role has them."""
    state_port = StatePort(access=Access(ServerSection(), None), max_connections=64)
    state_port.open("127.0.0.1", 0)
    PrefillServicer(engine, max_context_tokens=1024, state_port=state_port).register(server)


def send_grpc(pipe: Connection, mib: int, way: str) -> None:
    naive = way == "naive"
    if not naive:
        set_malloc()

    async def main() -> None:
        options = None if naive else server_options(ServerSection())
        server = grpc.aio.server(options=options)
        if naive:
            source = memoryview(bytearray(bytes(range(256)) * (mib * MIB // 256)))
            prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(NaiveServicer(source), server)
        else:
            register_prefill(server, PoolEngine(filled_cache(mib)))
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        while await asyncio.to_thread(pipe.recv):
            pipe.send(cpu_s())
        await server.stop(None)

    asyncio.run(main()) if way == "naive" else uvloop.run(main())


async def pull_naive(channel: grpc.aio.Channel, target: memoryview) -> None:
    stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
    async for message in stub.Prefill(prefill_service_pb2.PrefillRequest()):
        for frame in message.frames.frames:
            target[frame.offset : frame.offset + len(frame.data)] = frame.data


async def pull_ours(peer: GrpcPrefillPeer, cache: Cache) -> int:
    """One hand-off; its bytes."""
    manifest = build_manifest(cache.spec, request_id="b", attempt=1, num_tokens=1)
    landing = Landing(manifest, cache, slot=1, block_table=[1])
    call = PrefillCall(request_id="b", attempt=1, prompt=(0,), fingerprint=ANYONE, state_bytes=manifest.total_bytes)
    async for event in peer.prefill(call):
        if isinstance(event, StateManifest):
            landing.accept_manifest(event)
        elif isinstance(event, PrefillDone):
            landing.finish(event.num_frames)
        else:
            for frame in event:
                landing.accept(frame)
    return landing.landed_bytes


def receiver(pipe: Connection, way: str, port: int, mib: int) -> None:
    """Child process: pulls once for each message on the pipe; answers (seconds, CPU seconds)."""
    if way in RAW_WAYS:
        pull = RAW_WAYS[way][1](port, mib)
        while pipe.recv():
            pipe.send(timed(pull))
        return
    if way != "naive":
        set_malloc()

    async def main() -> None:
        if way == "naive":
            target = memoryview(bytearray(mib * MIB))
            options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                while await asyncio.to_thread(pipe.recv):
                    started, cpu = time.perf_counter(), cpu_s()
                    await pull_naive(channel, target)
                    pipe.send((time.perf_counter() - started, cpu_s() - cpu))
            return
        cache = new_cache(mib)
        peer = GrpcPrefillPeer(f"127.0.0.1:{port}", timeout_s=60.0, max_message_bytes=MAX_MESSAGE_BYTES, transport=way)
        while await asyncio.to_thread(pipe.recv):
            started, cpu = time.perf_counter(), cpu_s()
            await pull_ours(peer, cache)
            pipe.send((time.perf_counter() - started, cpu_s() - cpu))
        await peer.close()

    asyncio.run(main()) if way == "naive" else uvloop.run(main())


class Pair:
    """A sender and a receiver process of one way."""

    def __init__(self, way: str, mib: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._way = way
        self._to_sender, sender_end = context.Pipe()
        self._to_receiver, receiver_end = context.Pipe()
        if way in RAW_WAYS:
            sender = context.Process(target=RAW_WAYS[way][0], args=(sender_end, mib), daemon=True)
        else:
            sender = context.Process(target=send_grpc, args=(sender_end, mib, way), daemon=True)
        self._processes = [sender]
        self._processes[0].start()
        port = self._to_sender.recv()
        self._processes.append(context.Process(target=receiver, args=(receiver_end, way, port, mib), daemon=True))
        self._processes[1].start()
        self._sender_cpu = 0.0

    def round(self) -> tuple[float, float, float]:
        """(seconds, CPU seconds of the sender, of the receiver) of one transfer."""
        self._to_receiver.send(True)
        seconds, receiver_cpu = self._to_receiver.recv()
        if self._way not in RAW_WAYS:
            self._to_sender.send(True)
        total = self._to_sender.recv()
        sender_cpu, self._sender_cpu = total - self._sender_cpu, total
        return seconds, sender_cpu, receiver_cpu

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def measure(mib: int, reps: int, ways: Sequence[str]) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The table of one size, and the seconds of each way round by round."""
    pairs = {way: Pair(way, mib) for way in ways}
    rounds: dict[str, list[tuple[float, float, float]]] = {way: [] for way in pairs}
    try:
        for rep in range(reps + 1):
            for way, pair in pairs.items():
                figures = pair.round()
                if rep:  # the first round opens connections and touches memory
                    rounds[way].append(figures)
            print(f"{mib} MiB: round {rep} of {reps}", file=sys.stderr)
    finally:
        for pair in pairs.values():
            pair.close()
    gigabytes = mib * MIB / 1e9
    table: dict[str, Any] = {}
    for way, values in rounds.items():
        table[way] = {
            "gb_per_s": round(gigabytes / statistics.median(v[0] for v in values), 3),
            "sender_cpu_s_per_gb": round(statistics.median(v[1] for v in values) / gigabytes, 3),
            "receiver_cpu_s_per_gb": round(statistics.median(v[2] for v in values) / gigabytes, 3),
        }
    return table, {way: [v[0] for v in values] for way, values in rounds.items()}


def ratio(seconds: dict[str, list[float]], ours: str, other: str) -> float | None:
    """How many times the bytes per second of `other`; None where it was not measured."""
    if other not in seconds:
        return None
    return round(statistics.median(b / a for a, b in zip(seconds[ours], seconds[other], strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on stdout")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--mib", default="1,16,256")
    options = parser.parse_args()
    sizes = [int(size) for size in options.mib.split(",")]
    ways = ["raw_tcp", "memcpy", "naive", "mooncake", "grpc", "shm"]
    if missing := install_mooncake():
        print(missing, file=sys.stderr)
        ways.remove("mooncake")
    os.environ.update(mooncake_environment())
    tables: dict[int, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {}
    for size in sizes:
        tables[size], seconds = measure(size, options.reps, ways)
    if not options.json:
        print(f"{'MiB':>5} {'way':8} {'GB/s':>7} {'sender CPU s/GB':>16} {'receiver CPU s/GB':>18}")
        for size, table in tables.items():
            for way, row in table.items():
                print(
                    f"{size:5} {way:8} {row['gb_per_s']:7.2f} {row['sender_cpu_s_per_gb']:16.2f} "
                    f"{row['receiver_cpu_s_per_gb']:18.2f}"
                )
    print(
        json.dumps(
            {
                "benchmark": "transfer",
                "cpu": cpu_name(),
                "reps": options.reps,
                "mib": sizes[-1],
                "grpc_over_raw_tcp": ratio(seconds, "grpc", "raw_tcp"),
                "grpc_over_naive": ratio(seconds, "grpc", "naive"),
                "grpc_over_mooncake_tcp": ratio(seconds, "grpc", "mooncake"),
                "shm_over_memcpy": ratio(seconds, "shm", "memcpy"),
                "sizes": tables,
            }
        )
    )


if __name__ == "__main__":
    main()
