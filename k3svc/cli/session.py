"""What the commands share: configuration from their options, a client to talk to, progress on standard error."""

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from k3svc.cli.draft import with_draft
from k3svc.cli.stack import IMPORT_ROOT, RoleEnded, Stack
from k3svc.client import AsyncClient, CallerCredentials, RetryPolicy
from k3svc.config import Config, ModelSection, load_config
from k3svc.errors import BackendError, DeadlineExceeded, K3svcError, Unavailable

PROGRESS = Console(stderr=True, highlight=False, soft_wrap=True)
# Long enough for `up` to start a role again, so that a stream goes on after it.
RETRY = RetryPolicy(attempts=12)
DEFAULT_PORT = 50051
LOCAL_ENDPOINT = f"127.0.0.1:{DEFAULT_PORT}"
"""Where `up` serves unless it is told another port, and where the other commands look for it."""
LOCAL_TIMEOUT_S = 0.3
REACH_TIMEOUT_S = 3.0
ALWAYS_THERE = ("reference", "cpu")
"""Backends that need neither a package nor hardware beyond what every installation has."""
DECODE_SERVICE = "k3svc.v1.DecodeService"

ModelOption = Annotated[Path | None, typer.Option("--model", help="Folder of the checkpoint.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Backend; `k3svc doctor` lists them.")]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Who proposes tokens: dspark or dflash, a draft service with the checkpoint MODEL-dspark or MODEL-dflash; "
        "ngram, decode itself; none.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Configuration value; may be repeated."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Configuration file (TOML).")]
EndpointOption = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        metavar="HOST:PORT",
        help="A decode service, dns:///HOST:PORT for all addresses of a name, or file:PATH with one HOST:PORT a line; "
        f"may be repeated. Without: the one at {LOCAL_ENDPOINT}, else services for this call.",
    ),
]

# Options before the command, so that an environment variable serves all of them.
TlsCaOption = Annotated[
    Path | None, typer.Option(envvar="K3SVC_TLS_CA", help="Authorities of the services (PEM); without: no TLS.")
]
TlsCertOption = Annotated[
    Path | None, typer.Option(envvar="K3SVC_TLS_CERT", help="Certificate to show to the services (PEM).")
]
TlsKeyOption = Annotated[Path | None, typer.Option(envvar="K3SVC_TLS_KEY", help="Private key of the certificate.")]
TokenFileOption = Annotated[
    Path | None, typer.Option(envvar="K3SVC_TOKEN_FILE", help="File with the token to show to the services.")
]
_NO_CREDENTIALS = CallerCredentials()
_CREDENTIALS: ContextVar[CallerCredentials] = ContextVar("credentials", default=_NO_CREDENTIALS)


def build_config(
    *,
    config: Path | None = None,
    model: Path | None = None,
    device: str | None = None,
    draft: str | None = "none",
    overrides: Sequence[str] | None = None,
    port: int | None = None,
) -> Config:
    """File, then --set, then the options of their own name. Raises ConfigError. `draft` as `with_draft` takes it.

    A checkpoint that nobody names is the one beside the package, wherever the command is called.
    """
    built = load_config(config, overrides or ())
    section = dataclasses.replace(
        built.model,
        path=_default_model(built.model.path) if model is None else str(model),
        device=built.model.device if device is None else device,
    )
    built = with_draft(dataclasses.replace(built, model=section), draft)
    if port is not None:
        built = dataclasses.replace(built, server=dataclasses.replace(built.server, port=port))
    return built


def _default_model(path: str) -> str:
    beside = IMPORT_ROOT / path
    return str(beside) if path == ModelSection().path and beside.is_dir() else path


def names_own_stack(
    endpoints: Sequence[str] | None,
    model: Path | None,
    device: str | None,
    overrides: Sequence[str] | None,
    draft: str | None = None,
) -> bool:
    """Whether the options describe services to be started. Raises BadParameter when there are endpoints too."""
    given = {"--model": model, "--device": device, "--set": overrides or None, "--draft": draft}
    names = [name for name, value in given.items() if value is not None]
    if names and endpoints:
        raise typer.BadParameter("is for services that are started here, --endpoint for others", param_hint=names[0])
    return bool(names)


def check_device(device: str) -> None:
    """Raises BackendError, after the report of `k3svc doctor`, when what the backend needs is missing here.

    In a process of its own: this one shall neither load torch nor hold a device.
    """
    if device in ALWAYS_THERE:
        return
    doctor = subprocess.run(
        [sys.executable, "-m", "k3svc.cli", "doctor", "--device", device],
        cwd=IMPORT_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if doctor.returncode:
        PROGRESS.print(doctor.stdout + doctor.stderr, end="", markup=False)
        raise BackendError(f"model.device: {device} does not run here")


def run_command(
    work: Coroutine[Any, Any, None], *, runner: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
) -> None:
    """Runs the work. SIGTERM ends it as Ctrl-C does, so that what was started is stopped. Exit code 143 then."""
    is_terminated = False

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "runs as a task"

        def terminate() -> None:
            nonlocal is_terminated
            is_terminated = True
            task.cancel()

        loop.add_signal_handler(signal.SIGTERM, terminate)
        await work

    try:
        runner(main())
    except asyncio.CancelledError:
        if not is_terminated:
            raise
        raise typer.Exit(128 + signal.SIGTERM) from None


def show(message: str) -> None:
    """A line of progress."""
    PROGRESS.print(message, style="dim", markup=False)


def remember_credentials(
    tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, token_file: Path | None
) -> None:
    """How the calls of this command show who they are. Raises ConfigError."""
    _CREDENTIALS.set(CallerCredentials(ca=tls_ca, certificate=tls_cert, key=tls_key, token_file=token_file))


def new_client(endpoints: str | Sequence[str], *, retry: RetryPolicy | None = None) -> AsyncClient:
    """A client with the credentials of the command line."""
    return AsyncClient(endpoints, retry=retry, credentials=_CREDENTIALS.get())


@contextlib.asynccontextmanager
async def connect(
    endpoints: Sequence[str] | None, config: Config, *, own_stack: bool = False, retry: RetryPolicy = RETRY
) -> AsyncIterator[AsyncClient]:
    """A client of the endpoints; without any, of the stack on this machine, or of one that lives as long as the block.

    `own_stack`: start one, whatever serves already. Raises Unavailable when none of the endpoints can be reached.
    """
    async with contextlib.AsyncExitStack() as resources:
        if endpoints:
            client = await resources.enter_async_context(new_client(endpoints, retry=retry))
            await _check_reachable(client)
        elif not own_stack and await _serves(LOCAL_ENDPOINT):
            show(f"using the stack at {LOCAL_ENDPOINT}")
            client = await resources.enter_async_context(new_client(LOCAL_ENDPOINT, retry=retry))
        else:
            stack = await resources.enter_async_context(embedded_stack(config))
            client = await resources.enter_async_context(new_client(stack.decode_endpoints, retry=retry))
        yield client


async def _serves(endpoint: str) -> bool:
    """Whether a decode service answers there and is ready. What else may listen there does not matter."""
    async with new_client(endpoint) as client:
        try:
            return await client.health(service=DECODE_SERVICE, timeout_s=LOCAL_TIMEOUT_S) == "SERVING"
        except K3svcError:
            return False


async def _check_reachable(client: AsyncClient) -> None:
    """Tells what nobody listens at without the patience that retries have."""
    problems = await asyncio.gather(*(_problem(client, endpoint) for endpoint in await client.find()))
    if all(problems):
        raise Unavailable("; ".join(problem for problem in problems if problem), reason="UNREACHABLE")


async def _problem(client: AsyncClient, endpoint: str) -> str | None:
    try:
        await client.health(endpoint, timeout_s=REACH_TIMEOUT_S)
    except DeadlineExceeded:
        return f"{endpoint} does not answer within {REACH_TIMEOUT_S:g} s"
    except K3svcError as error:
        # Whoever answers at all is told apart by the answer to the request itself.
        return error.message if error.reason == "UNREACHABLE" else None
    return None


@contextlib.asynccontextmanager
async def embedded_stack(config: Config) -> AsyncIterator[Stack]:
    """One prefill and one decode role on free ports, started under a spinner and drained at the end."""
    config = dataclasses.replace(config, server=dataclasses.replace(config.server, port=0))
    check_device(config.model.device)
    stack = Stack(config, on_progress=show)
    with PROGRESS.status("starting the services"), telling_ends():
        await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()


@contextlib.contextmanager
def telling_ends() -> Iterator[None]:
    """Shows the last output of a role whose end is the error."""
    try:
        yield
    except RoleEnded as error:
        if error.log_tail:
            PROGRESS.print(error.log_tail, markup=False)
        raise
