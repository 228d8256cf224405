"""What this machine and this installation can run.

Loads torch: imported by the one command that needs it.
"""

import os
import platform
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import google.protobuf
import grpc
import torch

import k3svc
from k3svc import ops
from k3svc.errors import BackendError

LABEL = 10
"""Columns of what a line is about."""
WIDTH = 100
"""Columns of the report."""


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
    """The report for people, in WIDTH columns where no word is longer."""
    cpu = values["cpu"]
    shown = [f"{name:{LABEL}}{values[name]}" for name in ("k3svc", "python", "torch", "grpc", "protobuf", "system")]
    shown.append(f"{'cpu':{LABEL}}{cpu['model']}, {cpu['cores']} cores, {cpu['vector']}")
    shown += _served(values["operators"], is_available=values["backends"][0]["available"])
    for backend in values["backends"]:
        if backend["available"]:
            invariant = "batch-invariant" if backend["batch_invariant"] else "not batch-invariant"
            shown.append(f"{'backend':{LABEL}}{backend['name']}: {backend['variant']}, {invariant} in float32")
        else:
            shown.append(f"{'backend':{LABEL}}{backend['name']}: missing. {backend['problem']}")
    return [part for entry in shown for line in entry.splitlines() for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    """The line in WIDTH columns; what does not fit stands below its text, further in."""
    indent = len(line) - len(line.lstrip())
    below = " " * (indent + 2 if indent else LABEL)
    return textwrap.wrap(line, WIDTH, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)


def _served(operators: list[dict[str, Any]], *, is_available: bool) -> list[str]:
    """What serves which operator. What nothing serves is told by the backend; where it lacks none of them, and does not
    run for another reason, they do not matter.
    """
    served = [need for need in operators if need["problem"] is None]
    if len(served) == len(operators) and not is_available:
        return []
    return [
        f"{'operator':{LABEL}}{need['name']}: {need['package']} {need['version'] or 'of unknown version'}"
        for need in served
    ]


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
