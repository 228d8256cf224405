"""Stack: prefill, decode and draft roles as child processes on one machine, wired to each other.

Every role is a `python -m services.ROLE` of its own session. Its port is chosen and held before it starts, so that all
start at once and a restarted role comes back under its address; its configuration and its output lie in one folder.
A role never outlives the process that made the stack, however that one ends.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import k3svc
from k3svc.cli.cores import cores_of
from k3svc.cli.folders import new_folder
from k3svc.cli.paths import with_absolute_files, with_absolute_model
from k3svc.config import Config, to_toml
from k3svc.errors import ConfigError, NotFound, Unavailable
from k3svc.gateway.launch import GatewayOptions, is_ready, require_smg, smg_command
from k3svc.rpc.process import hold_port
from k3svc.rpc.waiting import within

if TYPE_CHECKING:
    from typing_extensions import Self

READY_TIMEOUT_S = 120.0
DRAIN_MARGIN_S = 5.0
TAIL_LINES = 20
MAX_DEATHS = 5
"""Ends of one role within DEATH_WINDOW_S after which `supervise` gives up."""
DEATH_WINDOW_S = 60.0
RESTART_DELAY_S = 0.5
"""Wait before the first restart of a role, doubled by each further end within the window."""
PROBE_PERIOD_S = 0.1
# Where the package `services` lies beside k3svc, in a checkout as in site-packages: what roles import is what we do.
IMPORT_ROOT = Path(k3svc.__file__).resolve().parent.parent

# Asks the kernel to kill this process when its parent ends, then becomes the role. Not done between fork and exec,
# since the parent has threads of gRPC. 1 is PR_SET_PDEATHSIG.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this role has ended")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""

RoleCommand = Callable[[str, Path], Sequence[str]]
"""(role, configuration file) → arguments of the Python interpreter."""


def role_command(role: str, config_path: Path) -> Sequence[str]:
    return ("-m", f"services.{role}", "--config", str(config_path))


class RoleEnded(Unavailable):
    """A role ended that should run, or did not start. `log_tail`: the last lines of its output."""

    reason = "ROLE_ENDED"

    def __init__(self, message: str, *, log_tail: str) -> None:
        super().__init__(message)
        self.log_tail = log_tail


class RoleProcess:
    """One role of a stack."""

    def __init__(
        self, name: str, role: str, address: str, *, metrics_port: int, config_path: Path, log_path: Path
    ) -> None:
        self.name = name
        self.role = role
        self.address = address
        """host:port that clients and peers use."""
        self.metrics_port = metrics_port
        """Port of its Prometheus endpoint; 0: none."""
        self.config_path = config_path
        self.log_path = log_path
        self.start_s = 0.0
        """From the start of the process to its ready line."""
        self.device = ""
        """Backend that the ready line names; empty for what has none."""
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return None if self._process is None else self._process.returncode

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, command: Sequence[str], timeout_s: float) -> None:
        """Returns when the role is ready. Raises RoleEnded; the process may run on after a timeout."""
        self._is_ready.clear()
        started = time.monotonic()
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=IMPORT_ROOT,
                start_new_session=True,
            )
        self._reader = asyncio.create_task(self._read_output(self._process))
        ready = asyncio.create_task(self._is_ready.wait())
        await asyncio.wait({self._reader, ready}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._is_ready.is_set():
            what = f"was not ready within {timeout_s:g} s" if self.is_running else "ended while it started"
            raise self.ended(what)
        self.start_s = time.monotonic() - started

    async def wait(self) -> None:
        """Returns when the process has ended and its output is in the log."""
        if self._reader is not None:
            await asyncio.shield(self._reader)

    def send(self, number: signal.Signals) -> None:
        """A signal, unless the process has ended."""
        if self.is_running and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def ended(self, what: str) -> RoleEnded:
        status = "" if self.status is None else f" with status {self.status}"
        if self.status is not None and self.status < 0:
            status = f" by signal {signal.Signals(-self.status).name}"
        return RoleEnded(f"{self.name} {what}{status}; its output: {self.log_path}", log_tail=self.log_tail())

    def log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def _tell_ready(self) -> None:
        self._is_ready.set()

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "made with a pipe"
        with self.log_path.open("ab", buffering=0) as log:
            while line := await process.stdout.readline():
                log.write(line)
                self._look_for_ready(line)
        await process.wait()

    def _look_for_ready(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return
        if isinstance(event, dict) and event.get("event") == "ready":
            self.device = event.get("device", "")
            self._tell_ready()


class GatewayProcess(RoleProcess):
    """The gateway of a stack. It says over HTTP that it is ready."""

    async def start(self, command: Sequence[str], timeout_s: float) -> None:
        probing = asyncio.create_task(self._probe())
        try:
            await super().start(command, timeout_s)
        finally:
            probing.cancel()

    async def _probe(self) -> None:
        host, _, port = self.address.rpartition(":")
        while not await is_ready(host, int(port)):  # noqa: ASYNC110  it is asked, it does not tell
            await asyncio.sleep(PROBE_PERIOD_S)
        self._tell_ready()


class Stack:
    """Prefill and decode roles, and a draft role where the configuration has a draft checkpoint and names no service of
    its own for it. An async context manager: ready inside the block, drained after it.

    Start it from a thread that lives as long as the stack does: the kernel ends the roles with that thread.
    """

    def __init__(
        self,
        config: Config,
        *,
        prefill: int = 1,
        decode: int = 1,
        gateway: GatewayOptions | None = None,
        log_dir: Path | None = None,
        on_progress: Callable[[str], None] | None = None,
        command: RoleCommand = role_command,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        """`config` serves all roles; server.port is the port of the first decode role, 0 for any.

        `log_dir`: where configuration and output of the roles lie; None: a temporary folder that goes when the stack
        does. It stays when a role ended that should run, or when this process is killed, until a stack starts
        more than a day later.
        """
        if gateway is not None:
            require_smg(config)
            config = dataclasses.replace(config, gateway=dataclasses.replace(config.gateway, enabled=True))
        if prefill < 1 or decode < 1:
            raise ConfigError(f"a stack needs at least one role of each kind, got {prefill} prefill, {decode} decode")
        self._config = with_absolute_files(with_absolute_model(config))
        draft = self._config.draft
        has_draft = bool(draft.path) and not draft.endpoint and self._config.speculation.drafter == "service"
        self._counts = {"prefill": prefill, "decode": decode, "draft": int(has_draft)}
        self._gateway = gateway
        self._log_dir = log_dir
        self._on_progress = on_progress or (lambda _: None)
        self._command = command
        self._ready_timeout_s = ready_timeout_s
        self._resources = contextlib.ExitStack()
        self._temporary: Path | None = None
        self._keeps_output = False
        self._unexpected: asyncio.Queue[RoleProcess] = asyncio.Queue()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.processes: dict[str, RoleProcess] = {}
        """By name: prefill-0, decode-0, ..."""

    @property
    def prefill_endpoints(self) -> list[str]:
        return [process.address for process in self.processes.values() if process.role == "prefill"]

    @property
    def decode_endpoints(self) -> list[str]:
        return [process.address for process in self.processes.values() if process.role == "decode"]

    @property
    def draft_endpoint(self) -> str | None:
        """host:port, None: there is no draft role."""
        return next((process.address for process in self.processes.values() if process.role == "draft"), None)

    @property
    def drafts(self) -> str:
        """Who proposes tokens: the folder name of the draft checkpoint, ngram; empty: nobody."""
        drafter = self._config.speculation.drafter
        return Path(self._config.draft.path).name if drafter == "service" else drafter.replace("none", "")

    @property
    def gateway_endpoint(self) -> str | None:
        """host:port of HTTP, None: there is no gateway."""
        return None if self._gateway is None else self.processes["gateway"].address

    @property
    def metrics_endpoints(self) -> dict[str, str]:
        """host:port of the Prometheus endpoints by name of the role; empty without metrics.port."""
        host = _reachable(self._config.metrics.host)
        return {
            name: f"{host}:{process.metrics_port}"
            for name, process in self.processes.items()
            if self._config.metrics.port
        }

    async def __aenter__(self) -> "Self":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts all roles at once; returns when all are ready. Raises RoleEnded or ConfigError, and leaves nothing."""
        try:
            self._prepare()
            self._on_progress(f"starting {', '.join(self.processes)}")
            roles = [process for process in self.processes.values() if process.role != "gateway"]
            starts = [asyncio.ensure_future(self._start(process)) for process in roles]
            try:
                await asyncio.gather(*starts)
            finally:
                for start in starts:
                    start.cancel()
                await asyncio.gather(*starts, return_exceptions=True)
            if self._gateway is not None:
                await self._start(self.processes["gateway"])
        except BaseException:
            await self.kill_all()
            raise

    async def stop(self) -> None:
        """Drains the gateway, then decode, which needs prefill to finish, then ends prefill; kills what has not ended
        in time.
        """
        try:
            # What prefill holds when decode has ended was meant for a decode role that died. Nobody will fetch it, so
            # a second signal tells prefill not to wait for it.
            signals_of = {
                "gateway": [signal.SIGTERM],
                "decode": [signal.SIGTERM],
                "prefill": [signal.SIGTERM, signal.SIGINT],
                "draft": [signal.SIGTERM],
            }
            for role, signals in signals_of.items():
                await asyncio.gather(*(self._end(p, signals) for p in self.processes.values() if p.role == role))
        finally:
            await self.kill_all()

    async def kill_all(self) -> None:
        """Kills what runs and gives ports and folder back. Safe to repeat."""
        for process in self.processes.values():
            self._unwatch(process.name)
            process.send(signal.SIGKILL)
        for process in self.processes.values():
            await process.wait()
        self._resources.close()
        if self._temporary is not None:
            if self._keeps_output:
                self._on_progress(f"output of the services is kept for a day: {self._temporary}")
            else:
                shutil.rmtree(self._temporary)
        self._temporary = None

    async def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a role and waits for its end, which `watch` then does not report."""
        self._unwatch(name)
        self._process(name).send(number)
        await self._process(name).wait()

    async def restart(self, name: str) -> None:
        """Kills a role if it runs, and starts it again at the same address. Raises RoleEnded."""
        await self.kill(name)
        await self._start(self._process(name))

    async def watch(self) -> None:
        """Raises RoleEnded when a role ends that nobody here has ended; never returns."""
        process = await self._unexpected.get()
        self._keeps_output = True
        raise process.ended("ended")

    async def supervise(self) -> None:
        """Starts each role that ends again, at its address. Raises RoleEnded when one has ended MAX_DEATHS times within
        DEATH_WINDOW_S, other than a draft role, without which the others go on; never returns.
        """
        deaths: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_DEATHS))
        restarts: set[asyncio.Task[None]] = set()
        try:
            while True:
                process = await self._unexpected.get()
                self._keeps_output = True
                ended = process.ended("ended")
                times, now = deaths[process.name], time.monotonic()
                times.append(now)
                recent = sum(now - at < DEATH_WINDOW_S for at in times)
                if recent == MAX_DEATHS and process.role != "draft":
                    raise ended
                delay_s = RESTART_DELAY_S * 2 ** (recent - 1)
                self._on_progress(f"{ended.message}; it is started again in {delay_s:g} s")
                restart = asyncio.create_task(self._start_again(process, delay_s))
                restarts.add(restart)
                restart.add_done_callback(restarts.discard)
        finally:
            for restart in list(restarts):
                restart.cancel()
            await asyncio.gather(*restarts, return_exceptions=True)

    def _process(self, name: str) -> RoleProcess:
        if name not in self.processes:
            raise NotFound(f"no role {name}; there are {', '.join(self.processes)}")
        return self.processes[name]

    def _prepare(self) -> None:
        """Picks the ports and writes one configuration a role."""
        directory = self._log_dir
        if directory is None:
            directory = self._temporary = new_folder(self._resources)
        directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        host, first_port = self._config.server.host, self._config.server.port
        for role, count in self._counts.items():
            for index in range(count):
                wanted = first_port + index if role == "decode" and first_port else 0
                port = self._resources.enter_context(hold_port(host, wanted)).getsockname()[1]
                name = f"{role}-{index}"
                metrics = self._config.metrics
                metrics_port = metrics.port + len(self.processes) if metrics.port else 0
                if metrics_port:
                    self._resources.enter_context(hold_port(metrics.host, metrics_port, key="metrics.port"))
                self.processes[name] = RoleProcess(
                    name,
                    role,
                    f"{_reachable(host)}:{port}",
                    metrics_port=metrics_port,
                    config_path=directory / f"{name}.toml",
                    log_path=directory / f"{name}.log",
                )
        for process in self.processes.values():
            process.log_path.write_bytes(b"")
            process.config_path.write_text(to_toml(self._role_config(process)))
        if self._gateway is not None:
            self.processes["gateway"] = self._gateway_process(self._gateway, directory)

    def _gateway_process(self, gateway: GatewayOptions, directory: Path) -> GatewayProcess:
        port = self._resources.enter_context(hold_port(gateway.host, gateway.port, key="--gateway-port"))
        metrics = self._config.metrics
        wanted = metrics.port + len(self.processes) if metrics.port else 0
        metrics_port = self._resources.enter_context(hold_port(gateway.host, wanted, key="metrics.port"))
        log_path = directory / "gateway.log"
        log_path.write_bytes(b"")
        return GatewayProcess(
            "gateway",
            "gateway",
            f"{_reachable(gateway.host)}:{port.getsockname()[1]}",
            metrics_port=metrics_port.getsockname()[1],
            config_path=self.processes["decode-0"].config_path,
            log_path=log_path,
        )

    def _command_of(self, process: RoleProcess) -> Sequence[str]:
        if self._gateway is None or process.role != "gateway":
            return self._command(process.role, process.config_path)
        return smg_command(
            self._gateway,
            port=int(process.address.rpartition(":")[2]),
            metrics_port=process.metrics_port,
            decode=self.decode_endpoints,
            prefill=self.prefill_endpoints,
            model=Path(self._config.model.path),
            drain_s=self._config.server.drain_s,
        )

    def _role_config(self, process: RoleProcess) -> Config:
        port = int(process.address.rpartition(":")[2])
        cores = cores_of(process.role, self._config, num_decode=self._counts["decode"])
        config = dataclasses.replace(
            self._config,
            server=dataclasses.replace(self._config.server, port=port, cpus=cores.grpc),
            metrics=dataclasses.replace(self._config.metrics, port=process.metrics_port),
            model=dataclasses.replace(self._config.model, cpus=cores.process),
        )
        if process.role == "prefill" and config.transfer.state_port > 0:
            state_port = config.transfer.state_port + int(process.name.rpartition("-")[2])
            config = dataclasses.replace(config, transfer=dataclasses.replace(config.transfer, state_port=state_port))
        if self.draft_endpoint is not None and process.role != "draft":
            draft = dataclasses.replace(config.draft, endpoint=self.draft_endpoint)
            config = dataclasses.replace(config, draft=draft)
        if process.role != "decode":
            return config
        decode = dataclasses.replace(config.decode, prefill=tuple(self.prefill_endpoints))
        return dataclasses.replace(config, decode=decode)

    async def _start(self, process: RoleProcess) -> None:
        try:
            await process.start(self._command_of(process), self._ready_timeout_s)
        except RoleEnded:
            self._keeps_output = True
            raise
        self._watchers[process.name] = asyncio.create_task(self._watch_one(process))
        device = f" on {process.device}" if process.device else ""
        self._on_progress(f"{process.name} ready at {process.address}{device} after {process.start_s:.1f} s")

    async def _start_again(self, process: RoleProcess, delay_s: float) -> None:
        """A start that fails is another end of the role."""
        await asyncio.sleep(delay_s)
        try:
            await self._start(process)
        except RoleEnded:
            await self.kill(process.name)
            self._unexpected.put_nowait(process)

    async def _watch_one(self, process: RoleProcess) -> None:
        await process.wait()
        self._unexpected.put_nowait(process)

    def _unwatch(self, name: str) -> None:
        if (watcher := self._watchers.pop(name, None)) is not None:
            watcher.cancel()

    async def _end(self, process: RoleProcess, signals: Sequence[signal.Signals]) -> None:
        self._unwatch(process.name)
        for number in signals:
            process.send(number)
        limit_s = self._config.server.drain_s + DRAIN_MARGIN_S
        try:
            await within(limit_s, process.wait())
        except asyncio.TimeoutError:
            self._on_progress(f"{process.name} did not end within {limit_s:g} s: killed")


def _reachable(host: str) -> str:
    """An address of this machine that reaches a server bound to `host`."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared with, not bound
    host = loopback.get(host, host)
    return f"[{host}]" if ":" in host else host
