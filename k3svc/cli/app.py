"""The commands of `k3svc` and the options before them."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import grpc
import typer

from k3svc import __version__
from k3svc.cli.bench import bench
from k3svc.cli.chat import chat
from k3svc.cli.demo import demo
from k3svc.cli.generate import echo_json, generate, read_tokens_file
from k3svc.cli.health import health
from k3svc.cli.paths import with_absolute_model
from k3svc.cli.plan import plan
from k3svc.cli.session import (
    PROGRESS,
    DeviceOption,
    ModelOption,
    SetOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TokenFileOption,
    build_config,
    remember_credentials,
)
from k3svc.cli.top import top
from k3svc.cli.trace import trace
from k3svc.cli.up import up
from k3svc.errors import ConfigError, InvalidRequest, K3svcError

app = typer.Typer(
    name="k3svc",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def before_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Prefill, decode and draft services over gRPC for models of the Kimi-K3 family."""
    if version:
        typer.echo(version_line())
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    remember_credentials(tls_ca, tls_cert, tls_key, token_file)


app.command()(up)
app.command()(generate)
app.command()(chat)
app.command()(health)
app.command()(demo)
app.command()(plan)
app.command()(top)
app.command()(trace)
app.add_typer(bench, name="bench")


@app.command()
def logits(
    tokens_file: Annotated[Path, typer.Option(help="JSON list of lists of token ids.")],
    out: Annotated[Path, typer.Option(help="File to write: NumPy .npz.")],
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    set_: SetOption = None,
) -> None:
    """Write the logits at the end of prompts, logits_0, logits_1, ... (float32, vocabulary size), without a service.

    Example: k3svc logits --model models/k3-nano --tokens-file prompts.json --out logits.npz
    """
    config = build_config(model=model, device=device, overrides=set_)
    config = with_absolute_model(dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype)))
    prompts = read_tokens_file(tokens_file)
    from k3svc.cli.logits import write_logits  # noqa: PLC0415  loads torch, which takes seconds

    with PROGRESS.status("loading") as status:
        write_logits(config, prompts, out, lambda stage, share: status.update(f"{stage} {share:.0%}"))


@app.command()
def doctor(
    device: DeviceOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what is installed and which backends run here; exits 1 if the one asked for does not.

    Example: k3svc doctor --device reference
    """
    from k3svc.cli.doctor import lines, report  # noqa: PLC0415  loads torch, which takes seconds

    values = report(device)
    if as_json:
        echo_json(values)
    else:
        typer.echo("\n".join(lines(values)))
    if not any(backend["available"] for backend in values["backends"]):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version.

    Example: k3svc version
    """
    typer.echo(version_line())


def version_line() -> str:
    return f"k3svc {__version__} (Python {sys.version.split()[0]}, grpc {grpc.__version__})"


def run() -> int:
    """The exit code; an error is one line on standard error."""
    try:
        status: int | None = app(standalone_mode=False)
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except typer.Abort:
        return _fail("aborted", 1)
    except K3svcError as error:
        if isinstance(error, ConfigError | InvalidRequest):
            return _fail(error.message, 2)
        return _fail(f"{error.message} ({error.reason})", 1)
    return status or 0


def _fail(message: str, status: int) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return status
