"""A role's command line, exit codes and process settings."""

import asyncio
import ctypes
import logging
import mmap
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

from k3svc import config as config_module
from k3svc.config import Config, load_config
from k3svc.errors import BackendError, CheckpointError, ConfigError, EngineFault
from k3svc.rpc import process
from k3svc.rpc.process import TURN_S, hold_port, progress_log, resident_bytes, run_role, set_malloc, take_short_turns


@pytest.fixture(autouse=True)
def process_as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging, allocation and turns are settings of the whole test process."""
    monkeypatch.setattr(process, "configure_logging", lambda **_: None)
    monkeypatch.setattr(process, "set_malloc", lambda: None)
    monkeypatch.setattr(process, "take_short_turns", lambda: None)


def test_a_role_runs_with_its_configuration(tmp_path: Path):
    path = tmp_path / "role.toml"
    path.write_text("[server]\ndrain_s = 7\n[model]\nthreads = 2\n")
    seen: list[tuple[Config, float]] = []

    async def serve(config: Config, start: float) -> int:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        seen.append((config, start))
        return 5

    assert run_role("decode", serve, ["--config", str(path), "--set", "decode.max_batch=3"]) == 5
    ((config, start),) = seen
    assert (config.server.drain_s, config.model.threads, config.decode.max_batch) == (7, 2, 3)
    assert start > 0


def test_a_warm_up_that_fails_is_a_line_and_not_a_trace(capsys: pytest.CaptureFixture[str]):
    async def serve(config: Config, start: float) -> int:
        raise EngineFault("the step found no memory on the device: 2 MiB")

    assert run_role("prefill", serve, []) == 2
    assert capsys.readouterr().err == "prefill: the step found no memory on the device: 2 MiB\n"


@pytest.mark.parametrize(
    ("kernels", "chosen", "device", "reason"),
    [
        ("built", [], "cpu", "the default: its kernels are built"),
        ("missing", [], "reference", "the kernels of cpu are missing"),
        ("built", ["--set", "model.device=reference"], "reference", "model.device says so"),
    ],
)
def test_the_backend_and_why_it_is_that_one_are_logged(
    kernels: str,
    chosen: list[str],
    device: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Also after a start at which the library was there."""
    path = tmp_path / "lib.so"
    path.touch()
    monkeypatch.setattr(config_module, "CPU_KERNELS", path)
    assert load_config(None).model.device == "cpu"
    if kernels == "missing":
        path.unlink()

    async def serve(config: Config, start: float) -> int:
        assert config.model.device == device and start > 0
        return 0

    with caplog.at_level(logging.INFO, logger="k3svc.rpc.process"):
        assert run_role("decode", serve, chosen) == 0
    record = next(record for record in caplog.records if record.message == f"computes on {device}")
    assert vars(record)["device"] == device
    assert reason in vars(record)["reason"]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not tell cores")
def test_a_role_keeps_to_the_cores_that_it_is_given():
    """In a process of its own, which they are a setting of; threads that start later inherit them."""
    core = max(os.sched_getaffinity(0))
    code = (
        "import os, sys, threading\n"
        "from k3svc.rpc.process import run_role\n"
        "async def serve(config, start):\n"
        "    seen = []\n"
        "    thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\n"
        "    thread.start(); thread.join()\n"
        f"    return 7 if seen == [{{{core}}}] == [os.sched_getaffinity(0)] else 1\n"
        f"sys.exit(run_role('decode', serve, ['--set', 'model.cpus={core}']))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False)
    assert result.returncode == 7


@pytest.mark.skipif(len(process.usable_cores()) < 2, reason="there are not two cores")
def test_threads_of_grpc_keep_to_the_cores_that_they_are_given():
    """The loop and what it starts later may also run on those of the process."""
    own, other = process.usable_cores()[:2]
    code = (
        "import asyncio, os, sys, grpc\n"
        "from k3svc.rpc.process import run_role\n"
        "async def serve(config, start):\n"
        "    server = grpc.aio.server()\n"
        "    port = server.add_insecure_port('127.0.0.1:0')\n"
        "    await server.start()\n"
        "    async with grpc.aio.insecure_channel(f'127.0.0.1:{port}') as channel:\n"
        "        await asyncio.wait({asyncio.ensure_future(channel.unary_unary('/no/method')(bytes(1 << 20)))})\n"
        "    await asyncio.to_thread(str)\n"
        "    seen = {}\n"
        "    for task in map(int, os.listdir('/proc/self/task')):\n"
        "        name = open(f'/proc/self/task/{task}/comm').read().strip()\n"
        "        seen.setdefault(name, []).append(os.sched_getaffinity(task))\n"
        "    await server.stop(None)\n"
        "    print(sorted(name for name, cores in seen.items() if name.startswith('event_engine')))\n"
        "    python = seen.pop(open('/proc/self/comm').read().strip())\n"
        f"    assert python.count({{{own}, {other}}}) == 2 and python.count({{{other}}}) == 1, python\n"
        f"    assert seen and all(cores == {{{other}}} for found in seen.values() for cores in found), seen\n"
        "    return 7\n"
        f"sys.exit(run_role('decode', serve, ['--set', 'model.cpus={own}', '--set', 'server.cpus={other}']))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, text=True)
    assert result.returncode == 7
    assert "event_engine" in result.stdout


def turn_ns() -> int:
    """Time on a core that the kernel gives this thread at once: sched_getattr(2) of x86-64."""
    attr = (ctypes.c_uint64 * 7)()
    assert ctypes.CDLL(None, use_errno=True).syscall(315, 0, attr, ctypes.sizeof(attr), 0) == 0
    return int(attr[3])


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="the call has another number")
def test_short_turns_are_those_of_the_thread_that_takes_them():
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 12):
        pytest.skip("the kernel lets nobody ask for turns")

    def on_a_thread(call: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    def turns() -> tuple[int, int, int, int]:
        os.setpriority(os.PRIO_PROCESS, 0, 7)
        before = turn_ns()
        take_short_turns()
        return before, turn_ns(), on_a_thread(turn_ns), os.getpriority(os.PRIO_PROCESS, 0)

    before, own, child, nice = on_a_thread(turns)
    assert own == TURN_S * 1e9 < before == child
    assert nice == 7


@pytest.mark.parametrize(("role", "takes"), [("decode", True), ("prefill", False)])
def test_the_loop_of_decode_takes_short_turns(role: str, takes: bool, monkeypatch: pytest.MonkeyPatch):
    taken: list[bool] = []
    monkeypatch.setattr(process, "take_short_turns", lambda: taken.append(True))

    async def serve(_config: Config, _start: float) -> int:
        return 0

    assert run_role(role, serve, []) == 0
    assert bool(taken) is takes


@pytest.mark.parametrize("key", ["model.cpus", "server.cpus"])
def test_cores_that_there_are_not_are_told(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(process, "usable_cores", lambda: [0, 1])
    assert run_role("decode", never, ["--set", f"{key}=[1,2]"]) == 2
    assert capsys.readouterr().err == f"decode: {key}: got [1, 2]; allowed: some of [0, 1]\n"


async def never(config: Config, start: float) -> int:
    raise AssertionError(f"served {config} at {start}")


def test_check_config_prints_what_would_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_role("decode", never, ["--check-config", "--set", "server.port=99"]) == 0
    path = tmp_path / "printed.toml"
    path.write_text(capsys.readouterr().out)
    assert load_config(path) == load_config(None, ["server.port=99"])


def test_a_bad_configuration_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]):
    assert run_role("decode", never, ["--set", "server.prt=99"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "decode: unknown configuration key server.prt; did you mean server.port?\n"


def test_a_port_in_use_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]):
    def load(config: Config, start: float) -> Any:
        raise AssertionError("loaded")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_role("decode", load, ["--set", f"server.port={port}"]) == 2
    expected = f"decode: server.port: cannot bind 127.0.0.1:{port}: Address already in use\n"
    assert capsys.readouterr().err == expected


def test_a_host_without_an_address_is_told(capsys: pytest.CaptureFixture[str]):
    assert (
        run_role("decode", never, ["--set", "server.host=no.such.host.invalid", "--set", "server.insecure=true"]) == 2
    )
    assert capsys.readouterr().err.startswith("decode: server.port: cannot bind no.such.host.invalid:0: ")


def test_a_held_port_may_be_bound_by_the_role_and_by_nobody_else():
    with hold_port("127.0.0.1", 0) as held, hold_port("127.0.0.1", held.getsockname()[1]) as role:
        assert role.getsockname() == held.getsockname()


def test_ctrl_c_while_a_role_loads_is_quiet(capsys: pytest.CaptureFixture[str]):
    def load(config: Config, start: float) -> Any:
        raise KeyboardInterrupt

    assert run_role("decode", load, []) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("role", ["prefill", "decode", "draft"])
def test_roles_read_their_command_line_before_they_load_torch(role: str):
    code = f"import sys, services.{role}.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    given = (sys.executable, "-m", f"services.{role}", "--set", "a.b=1")
    result = subprocess.run(given, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{role}: unknown configuration key a")


@pytest.mark.parametrize("cls", [ConfigError, CheckpointError, BackendError])
def test_errors_of_start_up_are_exit_code_2(cls: type[Exception], capsys: pytest.CaptureFixture[str]):
    async def serve(config: Config, start: float) -> int:
        raise cls("model.safetensors: no tensor lm_head.weight")

    assert run_role("prefill", serve, []) == 2
    assert capsys.readouterr().err == "prefill: model.safetensors: no tensor lm_head.weight\n"


def test_a_bug_is_not_taken_for_an_error_of_start_up():
    async def serve(config: Config, start: float) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_role("prefill", serve, [])


class Libc:
    """A libc with or without mallopt."""

    def __init__(self, *, has_mallopt: bool) -> None:
        self.calls: list[tuple[int, int]] = []
        if has_mallopt:
            self.mallopt = self._mallopt

    def _mallopt(self, parameter: int, value: int) -> int:
        self.calls.append((parameter, value))
        return 1


def test_malloc_keeps_messages_in_the_heap(monkeypatch: pytest.MonkeyPatch):
    libc = Libc(has_mallopt=True)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    set_malloc()
    assert dict(libc.calls) == {-3: 32 << 20, -1: (1 << 31) - 1, -2: 64 << 20}


def test_a_libc_without_mallopt_is_noted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc(has_mallopt=False))
    with caplog.at_level(logging.DEBUG, logger="k3svc.rpc.process"):
        set_malloc()
    assert "libc has no mallopt" in caplog.text


def test_resident_memory_grows_with_what_is_touched():
    before = resident_bytes()
    # Fresh pages: a bytearray may take what the heap has kept.
    with mmap.mmap(-1, 64 << 20) as block:
        for offset in range(0, 64 << 20, mmap.PAGESIZE):
            block[offset] = 1
        assert resident_bytes() - before > 48 << 20


def test_progress_is_logged_by_quarters(caplog: pytest.LogCaptureFixture):
    progress = progress_log()
    with caplog.at_level(logging.INFO, logger="k3svc.rpc.process"):
        for step in range(1001):
            progress("weights", step / 1000)
        progress("pools", 0.0)
    assert [(record.message, vars(record)["percent"]) for record in caplog.records] == [
        *(("loading weights", percent) for percent in (0, 25, 50, 75, 100)),
        ("loading pools", 0),
    ]


def test_the_start_of_a_process_lies_before_its_first_line():
    code = (
        "import time\nbegun = time.monotonic()\n"
        "from k3svc.rpc.process import process_start\nprint(process_start(), begun)"
    )
    before = time.monotonic()
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    started, begun = map(float, output.split())
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert before - tick_s <= started <= begun + tick_s
