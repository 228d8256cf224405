"""What the commands share: configuration from their options, a client to talk to, progress on standard error."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from k3svc.cli.stack import RoleEnded, Stack
from k3svc.client import AsyncClient, CallerCredentials, RetryPolicy
from k3svc.config import Config, load_config

PROGRESS = Console(stderr=True, highlight=False, soft_wrap=True)
# Somebody waits at the terminal: a service that is not there shall be told within seconds.
RETRY = RetryPolicy(attempts=4)

ModelOption = Annotated[Path | None, typer.Option("--model", help="Folder of the checkpoint.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Backend; `k3svc doctor` lists them.")]
DraftOption = Annotated[str, typer.Option("--draft", help="Drafter; this version has none.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Configuration value; may be repeated."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Configuration file (TOML).")]
EndpointOption = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint", metavar="HOST:PORT", help="A decode service; may be repeated. Without: services for this call."
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
    draft: str = "none",
    overrides: Sequence[str] | None = None,
    port: int | None = None,
) -> Config:
    """File, then --set, then the options of their own name. Raises ConfigError."""
    if draft != "none":
        raise typer.BadParameter(f"{draft!r}; allowed: none", param_hint="--draft")
    built = load_config(config, overrides or ())
    section = dataclasses.replace(
        built.model,
        path=built.model.path if model is None else str(model),
        device=built.model.device if device is None else device,
    )
    built = dataclasses.replace(built, model=section)
    if port is not None:
        built = dataclasses.replace(built, server=dataclasses.replace(built.server, port=port))
    return built


def show(message: str) -> None:
    """A line of progress."""
    PROGRESS.print(message, style="dim", markup=False)


def remember_credentials(
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Callback of the options before the command: how its calls show who they are. Raises ConfigError."""
    _CREDENTIALS.set(CallerCredentials(ca=tls_ca, certificate=tls_cert, key=tls_key, token_file=token_file))


def new_client(endpoints: str | Sequence[str], *, retry: RetryPolicy | None = None) -> AsyncClient:
    """A client with the credentials of the command line."""
    return AsyncClient(endpoints, retry=retry, credentials=_CREDENTIALS.get())


@contextlib.asynccontextmanager
async def connect(endpoints: Sequence[str] | None, config: Config) -> AsyncIterator[AsyncClient]:
    """A client of the endpoints, or of a stack that lives as long as the block."""
    async with contextlib.AsyncExitStack() as resources:
        if not endpoints:
            stack = await resources.enter_async_context(embedded_stack(config))
            endpoints = stack.decode_endpoints
        yield await resources.enter_async_context(new_client(endpoints, retry=RETRY))


@contextlib.asynccontextmanager
async def embedded_stack(config: Config) -> AsyncIterator[Stack]:
    """One prefill and one decode role on free ports, started under a spinner and drained at the end."""
    config = dataclasses.replace(config, server=dataclasses.replace(config.server, port=0))
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
