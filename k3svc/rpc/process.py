"""A role's process from the command line to its exit code, and the settings that only a process as a whole can have.

Imports neither torch nor the engines: what is wrong with the command line is told before they are loaded.
"""

import argparse
import ctypes
import logging
import mmap
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvloop

from k3svc.config import Config, device_reason, load_config, to_toml
from k3svc.errors import BackendError, CheckpointError, ConfigError, EngineFault
from k3svc.obs.log import configure_logging
from k3svc.obs.trace import configure_tracing
from k3svc.rpc.access import check_files

EXIT_START_UP = 2
"""Exit code when the role cannot start: configuration, checkpoint, backend, or a step of the warm-up."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
SWITCH_INTERVAL_S = 0.0002
"""Longest time that Python on the event loop keeps the engine thread from going on, and the other way round. Python's
own 5 ms are as long as a decode step."""
TURN_S = 0.0001
"""Time on a core for which the event loop of decode asks: who asks for less goes first when it wakes. The kernel gives
others turns of about 3 ms, most of a decode step."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_FLAG_RESET_ON_FORK = 1

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

    `start` is the time.monotonic() when the process started. `serve` is called, and may then load what it needs, once
    configuration, files and port have been found usable. An error of start-up (ConfigError, CheckpointError,
    BackendError, EngineFault) is a line on stderr and exit code 2.
    """
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
        check_files(config)
        configure_logging(level=config.log.level, as_json=config.log.json)
        configure_tracing(role, config.tracing)
        device = config.model.device
        log.info("computes on %s", device, extra={"device": device, "reason": device_reason(device)})
        hold_port(config.server.host, config.server.port).close()
        if config.metrics.port:
            hold_port(config.metrics.host, config.metrics.port, key="metrics.port").close()
        set_malloc()
        threads = start_grpc(config.server.cpus)
        set_cores(config.model.cpus, key="model.cpus", beside=config.server.cpus)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if role == "decode":
            take_short_turns()
        try:
            return uvloop.run(serve(config, process_start()))
        finally:
            if threads is not None:
                threads.close()
    except (ConfigError, CheckpointError, BackendError, EngineFault) as error:
        sys.stderr.write(f"{role}: {error}\n")
        return EXIT_START_UP
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def hold_port(host: str, port: int, *, key: str = "server.port") -> socket.socket:
    """A socket that is bound and never listens. The kernel gives its port to nobody who asks for any port, while a role
    may bind it by name, since both allow the address to be reused. Raises ConfigError when the port cannot be bound.
    """
    held = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        held = socket.socket(family, kind, protocol)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError as error:
        if held is not None:
            held.close()
        raise ConfigError(f"{key}: cannot bind {host}:{port}: {error.strerror}", key=key) from error
    return held


def progress_log() -> Callable[[str, float], None]:
    """Takes (stage, share of it that is done) as often as there is news; logs each quarter of a stage once."""
    last = ("", -1)

    def progress(stage: str, share: float) -> None:
        nonlocal last
        if (stage, int(4 * share)) != last:
            last = (stage, int(4 * share))
            log.info("loading %s", stage, extra={"percent": round(100 * share)})

    return progress


def usable_cores() -> list[int]:
    """Those that this process may run on, in ascending order; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def set_cores(cores: Sequence[int], *, key: str, beside: Sequence[int] = ()) -> None:
    """Keeps this thread, with the threads that it starts from now on, on `cores` and those `beside` them; without
    `cores` on those that it has. Raises ConfigError, which names `key`, for cores that there are not.
    """
    if not cores:
        return
    usable = usable_cores()
    if not set(cores) <= set(usable):
        allowed = f"some of {usable}" if usable else "none on this system"
        raise ConfigError(f"{key}: got {list(cores)}; allowed: {allowed}", key=key)
    os.sched_setaffinity(0, {*cores, *beside})


def start_grpc(cores: Sequence[int]) -> grpc.Channel | None:
    """Starts gRPC's own threads on these cores; none: they start when they are needed. They end with the last channel
    and server, so the channel that is returned, which connects to nothing, must stay open as long as the process
    serves. Raises ConfigError.
    """
    if not cores:
        return None
    before = usable_cores()
    set_cores(cores, key="server.cpus")
    grpc.aio.init_grpc_aio()
    channel = grpc.insecure_channel("localhost:1")
    os.sched_setaffinity(0, before)
    return channel


class _SchedAttr(ctypes.Structure):
    """struct sched_attr of sched_setattr(2), as far as every kernel with that call has it."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def take_short_turns() -> None:
    """Lets this thread, but none that it starts, go on as soon as it wakes while others use its core: its share stays
    what it is, but comes in turns of TURN_S. Linux from 6.12 on; has no effect elsewhere.
    """
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return
    attr = _SchedAttr(
        size=ctypes.sizeof(_SchedAttr),
        policy=os.SCHED_OTHER,
        flags=_SCHED_FLAG_RESET_ON_FORK,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        runtime_ns=round(TURN_S * 1e9),
    )
    if ctypes.CDLL(None, use_errno=True).syscall(number, 0, ctypes.byref(attr), 0) != 0:
        log.debug("sched_setattr: %s; the event loop takes turns as others do", os.strerror(ctypes.get_errno()))


def process_start() -> float:
    """time.monotonic() when this process started; where there is no /proc, now."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.monotonic()
    # The fields follow the command in parentheses; the twentieth of them is the start in clock ticks since boot.
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


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
