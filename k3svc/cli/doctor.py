"""What this machine and this installation can run.

Loads torch: imported by the one command that needs it.
"""

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import google.protobuf
import grpc
import torch

import k3svc
from k3svc import ops
from k3svc.errors import BackendError


def report(device: str | None) -> dict[str, Any]:
    """Versions, processor and backends; with `device`, that backend alone, and what serves each operator that it wants
    of a vendor.
    """
    return {
        "k3svc": k3svc.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpc": grpc.__version__,
        "protobuf": google.protobuf.__version__,
        "system": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "vector": torch.backends.cpu.get_cpu_capability(),
        },
        "operators": [asdict(need) for need in ops.needs(device or "")],
        "backends": [_backend(name) for name in ([device] if device is not None else ops.BACKENDS)],
    }


def lines(values: dict[str, Any]) -> list[str]:
    """The report for people."""
    cpu = values["cpu"]
    shown = [f"{name:10}{values[name]}" for name in ("k3svc", "python", "torch", "grpc", "protobuf", "system")]
    shown.append(f"{'cpu':10}{cpu['model']}, {cpu['cores']} cores, {cpu['vector']}")
    for need in values["operators"]:
        served = "nothing" if need["problem"] else f"{need['package']} {need['version'] or 'of unknown version'}"
        shown.append(f"{'operator':10}{need['name']}: {served}")
    for backend in values["backends"]:
        if backend["available"]:
            invariant = "batch-invariant" if backend["batch_invariant"] else "not batch-invariant"
            shown.append(f"{'backend':10}{backend['name']}: {backend['variant']}, {invariant} in float32")
        else:
            shown.append(f"{'backend':10}{backend['name']}: missing. {backend['problem']}")
    return shown


def _backend(name: str) -> dict[str, Any]:
    try:
        backend = ops.load(name, dtype="float32", threads=1)
    except BackendError as error:
        return {"name": name, "available": False, "problem": error.message}
    return {
        "name": name,
        "available": True,
        "variant": backend.variant,
        "batch_invariant": backend.batch_invariant,
        "chunk": backend.chunk,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
