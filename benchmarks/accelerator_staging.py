"""Bytes of a state from the pool to the host and back, beside plain copies of pinned memory."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from k3svc.ops.cuda.cache import PoolBytes

STATE_BYTES = 96 * 128 * 128 * 4
LARGE_BYTES = 256 << 20
FRAME_BYTES = 1 << 20


def measure() -> list[dict[str, Any]]:
    """GB/s of pinned copies and of `PoolBytes`, whole states and frames of 1 MiB."""
    device = torch.randint(256, (LARGE_BYTES,), dtype=torch.uint8, device="cuda")
    pinned = torch.empty(LARGE_BYTES, dtype=torch.uint8, pin_memory=True)
    state = device[:STATE_BYTES]
    view = PoolBytes(state)
    data = bytes(view)
    assert data == state.cpu().numpy().tobytes()

    def frames() -> None:
        for begin in range(0, STATE_BYTES, FRAME_BYTES):
            view[begin : begin + FRAME_BYTES]

    def land() -> None:
        view[:STATE_BYTES] = data

    rates = {
        "pinned_to_host": _rate(lambda: pinned.copy_(device), LARGE_BYTES),
        "pinned_to_device": _rate(lambda: device.copy_(pinned), LARGE_BYTES),
        "state_to_host": _rate(lambda: view[:STATE_BYTES], STATE_BYTES),
        "frames_to_host": _rate(frames, STATE_BYTES),
        "state_to_device": _rate(land, STATE_BYTES),
    }
    return [{f"{name}_gb_per_s": rate for name, rate in rates.items()}]


def _rate(call: Callable[[], object], size: int) -> float:
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return size / statistics.median(times[2:]) / 1e9
