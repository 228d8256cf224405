"""Hand-offs between pools on the card and the host, beside plain copies of pinned memory, and what each part takes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from k3svc.ops.cuda.cache import CudaCache
from k3svc.ops.table import CacheSpec
from k3svc.rpc.shm_ring import BATCH_BYTES
from k3svc.transfer.checked_copy import copy_in, copy_out
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import Frame, Placed, StateManifest, build_manifest
from k3svc.transfer.outbox import Outbox

LARGE_BYTES = 256 << 20
FRAME_BYTES = 2 << 20
"""Default of prefill.frame_bytes."""
ROUNDS = 9
STATE_LAYERS = 40
"""States of 6.3 MB, 252 MB in all."""

Rows = list[dict[str, Any]]


class Taken:
    """Takes frames as a ring in shared memory does, without touching their bytes."""

    batch_bytes = BATCH_BYTES

    def put(self, data: memoryview) -> Placed:
        return Placed(position=0, nbytes=data.nbytes, crc32c=0)


class Copied(Taken):
    """Copies them to host memory with their checksum, as the ring does."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(32 << 20))
        self._next = 0

    def put(self, data: memoryview) -> Placed:
        begin = self._next if self._next + data.nbytes <= self._memory.nbytes else 0
        self._next = begin + data.nbytes
        checksum = copy_out(data, self._memory[begin : begin + data.nbytes])
        return Placed(position=0, nbytes=data.nbytes, crc32c=checksum)


def measure() -> Rows:
    """Rates of both directions in GB/s, with what the parts of a hand-off take alone."""
    device = torch.device("cuda")
    to_host, to_device = pinned_rates()
    rows: Rows = [{"what": "pinned copy of 256 MiB", "to_host_gb_per_s": to_host, "to_device_gb_per_s": to_device}]
    rows += _parts()
    cache = CudaCache(_states_spec(), device)
    for layer in cache.spec.kda_layers:
        cache.layer(layer).state.normal_()  # type: ignore[union-attr]
    torch.cuda.synchronize()
    size = STATE_LAYERS * cache.layer(0).state[0].nbytes  # type: ignore[union-attr]
    for frame_bytes in (FRAME_BYTES, 1 << 20):
        for what, sink in (("staged", Taken()), ("staged, copied with checksum", Copied())):
            rate = _rate(lambda sink=sink, own=frame_bytes: _send(cache, own, sink), size)  # type: ignore[misc]
            rows.append({"what": what, "frame_bytes": frame_bytes, "to_host_gb_per_s": rate, "share": rate / to_host})
        frames = _frames(cache, frame_bytes)
        rate = _rate(lambda own=frame_bytes: _place(cache, own), size)  # type: ignore[misc]
        rows.append(
            {"what": "staged", "frame_bytes": frame_bytes, "to_device_gb_per_s": rate, "share": rate / to_device}
        )
        rate = _rate(lambda frames=frames: _land(cache, frames), size)  # type: ignore[misc]
        rows.append(
            {"what": "landed with checksum", "frame_bytes": frame_bytes, "to_device_gb_per_s": rate}
            | {"share": rate / to_device, "is_equal": _is_equal(cache)}
        )
    return rows


def pinned_rates() -> tuple[float, float]:
    """GB/s of plain copies to the host and to the device."""
    plain = torch.randint(256, (LARGE_BYTES,), dtype=torch.uint8, device="cuda")
    pinned = torch.empty(LARGE_BYTES, dtype=torch.uint8, pin_memory=True)
    return _rate(lambda: pinned.copy_(plain), LARGE_BYTES), _rate(lambda: plain.copy_(pinned), LARGE_BYTES)


def _parts() -> Rows:
    """One pass each over bytes of the host, on one core."""
    size = 64 << 20
    host: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    source, target = memoryview(host), memoryview(bytearray(size))
    frames = range(0, size, FRAME_BYTES)

    def out() -> None:
        for begin in frames:
            copy_out(source[begin : begin + FRAME_BYTES], target[begin : begin + FRAME_BYTES])

    def back() -> None:
        for begin in frames:
            copy_in(target[begin : begin + FRAME_BYTES], source[begin : begin + FRAME_BYTES])

    def plain() -> None:
        source[:] = target

    return [
        {"what": "copied with checksum out of pinned memory", "gb_per_s": _rate(out, size)},
        {"what": "copied with checksum into pinned memory", "gb_per_s": _rate(back, size)},
        {"what": "memcpy into pinned memory", "gb_per_s": _rate(plain, size)},
    ]


def _states_spec() -> CacheSpec:
    return CacheSpec(
        kda_layers=tuple(range(STATE_LAYERS)), mla_layers=(), kda_heads=96, kda_key_dim=128, kda_value_dim=128,
        conv_width=4, kv_lora_rank=1, rope_dim=0, vocab_size=1, num_slots=2, num_pages=1, page_size=64,
        state_dtype=torch.float32, kv_dtype=torch.bfloat16,
    )  # fmt: skip


def _manifest(cache: CudaCache) -> StateManifest:
    return build_manifest(cache.spec, request_id="q", attempt=1, num_tokens=1)


def _full_outbox(cache: CudaCache, frame_bytes: int) -> Outbox:
    outbox = Outbox(_manifest(cache), cache, slot=1, block_table=[1], frame_bytes=frame_bytes)
    for layer in cache.spec.kda_layers:
        outbox.add_layer(layer, 0, 1)
    outbox.add_logits()
    return outbox


def _send(cache: CudaCache, frame_bytes: int, sink: Taken) -> None:
    outbox, sequence = _full_outbox(cache, frame_bytes), 0
    while frames := outbox.frames(sequence, sink):
        sequence = frames[-1].sequence + 1


def _frames(cache: CudaCache, frame_bytes: int) -> list[Frame]:
    outbox, frames = _full_outbox(cache, frame_bytes), list[Frame]()
    while new := outbox.frames(len(frames)):
        frames += [replace(frame, data=memoryview(bytes(frame.data))) for frame in new]
    return frames


def _place(cache: CudaCache, frame_bytes: int) -> None:
    assert cache.staging is not None
    writer = cache.staging.writer()
    for layer in cache.spec.kda_layers:
        view = cache.state_bytes(layer, 2)
        for begin in range(0, view.nbytes, frame_bytes):
            with writer.place(view, begin, min(frame_bytes, view.nbytes - begin)):
                pass
    writer.settle()


def _land(cache: CudaCache, frames: list[Frame]) -> None:
    landing = Landing(_manifest(cache), cache, slot=2, block_table=[1])
    landing.accept_manifest(landing.expected)
    for frame in frames:
        landing.accept(frame)
    landing.finish(len(frames))


def _is_equal(cache: CudaCache) -> bool:
    pools: list[Any] = [cache.layer(layer) for layer in cache.spec.kda_layers]
    return all(torch.equal(pool.state[1], pool.state[2]) for pool in pools)


def _rate(call: Callable[[], object], size: int) -> float:
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return size / statistics.median(times[2:]) / 1e9
