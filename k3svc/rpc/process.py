"""A role's process from the command line to its exit code, and the settings that only a process as a whole can have."""

import argparse
import ctypes
import logging
import mmap
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop

from k3svc.config import Config, load_config, to_toml
from k3svc.errors import BackendError, CheckpointError, ConfigError
from k3svc.obs.log import configure_logging

EXIT_START_UP = 2
"""Exit code when the role cannot start: configuration, checkpoint or backend."""

# mallopt(3): hand-off messages stay in the heap instead of being mapped, unmapped and faulted in anew each time, and
# the heap is not given back between them. Measured: 1.7 times the bytes per second of a gRPC stream. The threshold is
# the largest that every glibc accepts; larger blocks (weights, pools) are mapped.
_MALLOC_SETTINGS = {
    "M_MMAP_THRESHOLD": (-3, 32 << 20),
    "M_TRIM_THRESHOLD": (-1, (1 << 31) - 1),
    "M_TOP_PAD": (-2, 64 << 20),
}

log = logging.getLogger(__name__)


def run_role(
    role: str, serve: Callable[[Config, float], Coroutine[Any, Any, int]], arguments: Sequence[str] | None = None
) -> int:
    """Parses `--config FILE --set KEY=VALUE --check-config` and runs `serve(config, start)` to its exit code.

    `start` is the time.monotonic() of the start. An error of start-up is one line on stderr and exit code 2.
    """
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", description=f"Runs one {role} service.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; default: $K3SVC_CONFIG, else defaults")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as server.port=50051")
    parser.add_argument("--check-config", action="store_true", help="print the resolved configuration and exit")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.set)
        if options.check_config:
            sys.stdout.write(to_toml(config))
            return 0
        configure_logging(level=config.log.level, as_json=config.log.json)
        set_malloc()
        torch.set_num_threads(config.model.threads)
        return uvloop.run(serve(config, start))
    except (ConfigError, CheckpointError, BackendError) as error:
        sys.stderr.write(f"{role}: {error}\n")
        return EXIT_START_UP


def log_progress(stage: str, fraction: float) -> None:
    """Progress of loading as a log line; `fraction` of `stage` in [0, 1]."""
    log.info("%s", stage, extra={"percent": round(100 * fraction)})


def set_malloc() -> None:
    """Keeps the memory of messages in the heap; does nothing where libc has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        log.debug("libc has no mallopt; allocation settings stay as they are")
        return
    for name, (parameter, value) in _MALLOC_SETTINGS.items():
        log.debug("mallopt", extra={"parameter": name, "value": value, "accepted": bool(mallopt(parameter, value))})


def resident_bytes() -> int:
    """Resident memory of this process; 0 where there is no /proc."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE
