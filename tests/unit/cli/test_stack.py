import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from k3svc.cli import folders
from k3svc.cli import stack as stack_module
from k3svc.cli.paths import CHECKPOINT_FILES
from k3svc.cli.stack import RoleEnded, Stack
from k3svc.config import Config, ModelSection, ServerSection, load_config
from k3svc.errors import ConfigError, NotFound
from k3svc.gateway.launch import GatewayOptions, is_ready

HERE = Path(__file__).parent


def fake_checkpoint(folder: Path) -> Path:
    for name in (*CHECKPOINT_FILES, "model.safetensors"):
        (folder / name).touch()
    return folder


def fake_stack(tmp_path: Path, *, prefill: str = "good", decode: str = "good", counts: tuple[int, int] = (1, 1),
               server: ServerSection | None = None, ready_timeout_s: float = 100.0) -> Stack:  # fmt: skip
    behaviours = {"prefill": prefill, "decode": decode}

    def command(role: str, config_path: Path) -> Sequence[str]:
        return (str(HERE / "fake_role.py"), role, str(config_path), behaviours[role])

    return Stack(
        Config(model=ModelSection(path=str(fake_checkpoint(tmp_path))), server=server or ServerSection()),
        prefill=counts[0],
        decode=counts[1],
        log_dir=tmp_path / "logs",
        command=command,
        ready_timeout_s=ready_timeout_s,
    )


def read_text(path: Path) -> str:
    return path.read_text()


def connect(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    socket.create_connection((host, int(port)), timeout=60).close()


def first_of_two_free_ports() -> int:
    while True:
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            second.bind(("127.0.0.1", port + 1))
            return port


def has_ended(pid: int, timeout_s: float) -> bool:
    """Whether the process ends in time; true for a zombie that nobody has waited for."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


async def test_roles_are_wired_ready_and_drained(tmp_path: Path):
    async with fake_stack(tmp_path, counts=(2, 2)) as stack:
        assert list(stack.processes) == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        endpoints = stack.prefill_endpoints + stack.decode_endpoints
        assert len(set(endpoints)) == 4
        for endpoint in endpoints:
            connect(endpoint)
        for process in stack.processes.values():
            config = load_config(process.config_path)
            assert f"{config.server.host}:{config.server.port}" == process.address
            assert config.model.path == str(tmp_path)
            assert list(config.decode.prefill) == (stack.prefill_endpoints if process.role == "decode" else [])
            assert process.start_s > 0.01
            assert process.is_running
    assert [process.status for process in stack.processes.values()] == [0, 0, 0, 0]
    ends = {name: float(process.log_tail().split()[-1]) for name, process in stack.processes.items()}
    assert max(ends["decode-0"], ends["decode-1"]) < min(ends["prefill-0"], ends["prefill-1"])


async def test_roles_keep_out_of_the_terminals_process_group(tmp_path: Path):
    async with fake_stack(tmp_path) as stack:
        assert all(os.getpgid(p.pid or 0) != os.getpgrp() for p in stack.processes.values())


async def test_what_lies_in_no_given_folder_goes_with_the_stack(tmp_path: Path):
    stack = fake_stack(tmp_path)
    stack._log_dir = None
    async with stack:
        folder = stack.processes["decode-0"].log_path.parent
        assert folder.is_dir()
    assert not folder.exists()


async def test_the_first_decode_role_has_the_port_and_the_others_follow(tmp_path: Path):
    port = first_of_two_free_ports()
    async with fake_stack(tmp_path, counts=(1, 2), server=ServerSection(port=port)) as stack:
        assert stack.decode_endpoints == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        assert port not in {int(endpoint.rpartition(":")[2]) for endpoint in stack.prefill_endpoints}


async def test_a_gateway_starts_last_ends_first_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, Any]] = []

    def command(_options: GatewayOptions, **about: Any) -> list[str]:
        asked.append(about)
        return [str(HERE / "fake_gateway.py"), str(about["port"])]

    monkeypatch.setattr(stack_module, "smg_command", command)
    stack = fake_stack(tmp_path, counts=(2, 2))
    stack._gateway = GatewayOptions()
    async with stack:
        assert stack.gateway_endpoint == f"127.0.0.1:{asked[0]['port']}"
        assert (asked[0]["decode"], asked[0]["prefill"]) == (stack.decode_endpoints, stack.prefill_endpoints)
        assert await is_ready("127.0.0.1", asked[0]["port"])
        await stack.restart("gateway")
        assert asked[1] == asked[0]
    ends = {name: float(process.log_tail().split()[-1]) for name, process in stack.processes.items()}
    assert ends["gateway"] < min(at for name, at in ends.items() if name != "gateway")


async def test_a_gateway_makes_the_roles_serve_it(tmp_path: Path):
    checkpoint = fake_checkpoint(tmp_path)
    stack = Stack(Config(model=ModelSection(path=str(checkpoint))), gateway=GatewayOptions(), log_dir=tmp_path / "logs")
    try:
        stack._prepare()
        for name in ("prefill-0", "decode-0"):
            assert load_config(stack.processes[name].config_path).gateway.enabled
    finally:
        await stack.kill_all()


async def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stack = fake_stack(tmp_path, server=ServerSection(port=port))
        with pytest.raises(ConfigError, match=f"cannot bind 127.0.0.1:{port}: Address already in use"):
            await stack.start()
    assert all(process.pid is None for process in stack.processes.values())


async def test_a_missing_checkpoint_is_told_before_anything_starts(tmp_path: Path):
    config = Config(model=ModelSection(path=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match=r"model\.path: no folder .*/nothing; name a checkpoint with --model DIR"):
        Stack(config)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "config.json").touch()
    with pytest.raises(ConfigError, match=r"no checkpoint in .*/nothing: no tiktoken\.model, .*, \*\.safetensors$"):
        Stack(config)


async def test_a_role_that_ends_while_it_starts_takes_the_others_with_it(tmp_path: Path):
    stack = fake_stack(tmp_path, decode="crash", prefill="mute")
    with pytest.raises(RoleEnded, match=r"^decode-0 ended while it started with status 3; its output: ") as caught:
        await stack.start()
    assert caught.value.log_tail == "decode starts as crash\nerror: no such checkpoint"
    assert stack.processes["prefill-0"].status == -signal.SIGKILL


async def test_a_role_that_is_not_ready_in_time_is_killed(tmp_path: Path):
    stack = fake_stack(tmp_path, prefill="mute", decode="mute", ready_timeout_s=0.5)
    with pytest.raises(RoleEnded, match=r"^(prefill|decode)-0 was not ready within 0\.5 s; "):
        await stack.start()
    assert [process.status for process in stack.processes.values()] == [-signal.SIGKILL] * 2


async def test_a_role_that_ends_later_is_reported(tmp_path: Path):
    async with fake_stack(tmp_path, decode="die") as stack:
        watching = asyncio.create_task(stack.watch())
        connect(stack.decode_endpoints[0])
        with pytest.raises(RoleEnded, match=r"^decode-0 ended with status 4; its output: .*decode-0\.log$") as caught:
            await watching
        assert caught.value.log_tail.endswith("error: out of memory")
    assert stack.processes["prefill-0"].status == 0


async def test_killed_and_restarted_under_the_same_address(tmp_path: Path):
    async with fake_stack(tmp_path) as stack:
        watching = asyncio.create_task(stack.watch())
        decode = stack.processes["decode-0"]
        address, pid = decode.address, decode.pid
        await stack.kill("decode-0")
        assert decode.status == -signal.SIGKILL
        with pytest.raises(ConnectionRefusedError):
            connect(address)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        await stack.restart("decode-0")
        assert decode.address == address
        assert decode.pid != pid
        connect(address)
        await stack.kill("prefill-0", signal.SIGTERM)
        assert stack.processes["prefill-0"].status == 0
        with pytest.raises(NotFound, match="decode-7"):
            await stack.kill("decode-7")
        assert not watching.done()
        watching.cancel()


async def test_a_role_that_ends_is_started_again_at_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_module, "RESTART_DELAY_S", 0.01)
    lines: list[str] = []
    async with fake_stack(tmp_path, counts=(1, 2)) as stack:
        stack._on_progress = lines.append
        supervising = asyncio.create_task(stack.supervise())
        roles = [stack.processes["decode-0"], stack.processes["prefill-0"]]
        before = [(role.address, role.pid) for role in roles]
        other = stack.processes["decode-1"].pid
        for role in roles:
            os.kill(role.pid or 0, signal.SIGKILL)
        while sum("ready at" in line for line in lines) < 2:
            await asyncio.sleep(0.01)
        for role, (address, pid) in zip(roles, before, strict=True):
            assert role.address == address
            assert role.pid != pid
            connect(address)
        assert stack.processes["decode-1"].pid == other
        assert any(line.startswith(f"decode-0 ready at {before[0][0]} on fake after ") for line in lines)
        assert any(
            line.startswith("decode-0 ended by signal SIGKILL; its output: ")
            and line.endswith("; it is started again in 0.01 s")
            for line in lines
        )
        supervising.cancel()
        with pytest.raises(asyncio.CancelledError):
            await supervising
    assert all(not process.is_running for process in stack.processes.values())


async def test_a_role_that_keeps_ending_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_module, "RESTART_DELAY_S", 0.001)
    monkeypatch.setattr(stack_module, "DEATH_WINDOW_S", 1000.0)
    lines: list[str] = []
    async with fake_stack(tmp_path) as stack:
        stack._on_progress = lines.append
        stack._command = lambda role, path: (str(HERE / "fake_role.py"), role, str(path), "crash")
        supervising = asyncio.create_task(stack.supervise())
        os.kill(stack.processes["decode-0"].pid or 0, signal.SIGKILL)
        with pytest.raises(RoleEnded, match=r"^decode-0 ended with status 3; "):
            await supervising
    delays = [line.partition("again in ")[2] for line in lines if "again in" in line]
    assert delays == ["0.001 s", "0.002 s", "0.004 s", "0.008 s"]


async def test_the_output_that_an_error_names_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stack = fake_stack(tmp_path, decode="crash")
    stack._log_dir = None
    with pytest.raises(RoleEnded) as caught:
        await stack.start()
    log = Path(caught.value.message.rpartition("its output: ")[2])
    assert log.is_relative_to(tmp_path)
    assert "no such checkpoint" in read_text(log)


def test_folders_of_stacks_that_have_ended_go_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("k3svc-old", "k3svc-running", "k3svc-new", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "decode-0.log").touch()
        age_s = 0.0 if name == "k3svc-new" else folders.KEEP_S + 60
        os.utime(tmp_path / name, (0, time.time() - age_s))
    (tmp_path / "k3svc-link").symlink_to(tmp_path / "other")
    with folders.locked(tmp_path / "k3svc-running"), contextlib.ExitStack() as held:
        made = folders.new_folder(held)
        with pytest.raises(BlockingIOError), folders.locked(made):
            pass
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"k3svc-running", "k3svc-new", "k3svc-link", "other", made.name}
    assert (tmp_path / "other" / "decode-0.log").exists()


async def test_a_role_that_does_not_drain_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_module, "DRAIN_MARGIN_S", 0.1)
    lines: list[str] = []
    # Both of them, since the time is too short for any.
    stack = fake_stack(tmp_path, prefill="stubborn", decode="stubborn", server=ServerSection(drain_s=0.1))
    stack._on_progress = lines.append
    async with stack:
        pass
    assert [process.status for process in stack.processes.values()] == [-signal.SIGKILL] * 2
    assert lines[-2:] == [f"{name}-0 did not end within 0.2 s: killed" for name in ("decode", "prefill")]


async def test_prefill_does_not_wait_for_decode_roles_that_are_gone(tmp_path: Path):
    async with fake_stack(tmp_path, prefill="holding") as stack:
        await stack.kill("decode-0")
    assert stack.processes["prefill-0"].status == 0


async def test_an_interrupted_drain_kills(tmp_path: Path):
    stack = fake_stack(tmp_path, decode="stubborn")
    await stack.start()
    stopping = asyncio.create_task(stack.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert [process.status for process in stack.processes.values()] == [-signal.SIGKILL] * 2


class Up:
    """fake_up.py, and the roles that it started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ready(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode()

    async def end(self, number: signal.Signals | None = None) -> tuple[int, str, str]:
        if number is not None:
            self.process.send_signal(number)
        out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


async def start_up(tmp_path: Path, prefill: str = "good", decode: str = "good", *, restart: str = "restart") -> Up:
    program = (str(HERE / "fake_up.py"), str(fake_checkpoint(tmp_path)), str(tmp_path / "logs"), restart)
    return Up(
        await asyncio.create_subprocess_exec(
            *(sys.executable, *program, prefill, decode),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    )


def roles_of(up: Up) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{up.process.pid}/task/{up.process.pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_up_prints_ready_and_drains_on_a_signal(tmp_path: Path, number: signal.Signals):
    up = await start_up(tmp_path)
    line = await up.ready()
    words = dict(word.split("=") for word in line.split()[1:])
    assert line.startswith("ready decode=127.0.0.1:")
    assert words.keys() == {"decode", "prefill"}
    connect(words["decode"])
    roles = roles_of(up)
    assert len(roles) == 2
    status, out, err = await up.end(number)
    assert (status, out) == (0, "")
    assert f"k3svc generate --endpoint {words['decode']}" in err
    assert err.splitlines()[-2:] == ["draining", "stopped"]
    assert all(has_ended(pid, 0) for pid in roles)
    assert "drained at" in (tmp_path / "logs" / "decode-0.log").read_text()


async def test_up_that_is_stopped_while_it_starts_leaves_nothing(tmp_path: Path):
    up = await start_up(tmp_path, prefill="mute")
    log = tmp_path / "logs" / "prefill-0.log"
    while not (log.exists() and "starts" in log.read_text()):
        await asyncio.sleep(0.01)
    roles = roles_of(up)
    status, out, _ = await up.end(signal.SIGTERM)
    assert (status, out) == (143, "")
    assert roles
    assert all(has_ended(pid, 60) for pid in roles)


async def test_up_without_restart_ends_with_an_error_and_the_output_when_a_role_dies(tmp_path: Path):
    up = await start_up(tmp_path, decode="die", restart="no")
    connect((await up.ready()).split()[1].removeprefix("decode="))
    status, _, err = await up.end()
    assert status == 1
    lines = err.splitlines()
    assert "error: out of memory" in lines[:-1]
    assert lines[-1].startswith("error: decode-0 ended with status 4; its output: ")
    assert "Traceback" not in err


async def test_roles_end_with_a_parent_that_is_killed(tmp_path: Path):
    up = await start_up(tmp_path)
    await up.ready()
    roles = roles_of(up)
    assert len(roles) == 2
    up.process.kill()
    await up.process.wait()
    assert all(has_ended(pid, 60) for pid in roles)
    await up.end()
