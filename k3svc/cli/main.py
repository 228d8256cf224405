"""The command `k3svc`. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration. Errors are one line."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import grpc
import typer

from k3svc import __version__
from k3svc.cli.chat import chat
from k3svc.cli.demo import demo
from k3svc.cli.generate import echo_json, generate, read_tokens_file
from k3svc.cli.health import health
from k3svc.cli.session import PROGRESS, DeviceOption, ModelOption, SetOption, build_config, remember_credentials
from k3svc.cli.stack import with_absolute_model
from k3svc.cli.up import up
from k3svc.errors import ConfigError, InvalidRequest, K3svcError

app = typer.Typer(
    name="k3svc",
    help="Prefill, decode and draft services over gRPC for models of the Kimi-K3 family.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.callback()(remember_credentials)
app.command()(up)
app.command()(generate)
app.command()(chat)
app.command()(health)
app.command()(demo)


@app.command()
def logits(
    tokens_file: Annotated[Path, typer.Option(help="JSON list of lists of token ids.")],
    out: Annotated[Path, typer.Option(help="File to write: NumPy .npz.")],
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    set_: SetOption = None,
) -> None:
    """Write the logits at the end of prompts, logits_0, logits_1, ... float32 [vocab], without any service.

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
    typer.echo(f"k3svc {__version__} (Python {sys.version.split()[0]}, grpc {grpc.__version__})")


def main() -> None:
    """Entry point of the console script."""
    try:
        status = app(standalone_mode=False)
    except typer.TyperException as error:
        status = _fail(error.format_message(), error.exit_code)
    except typer.Abort:
        status = _fail("aborted", 1)
    except K3svcError as error:
        status = _fail(error.message, 2 if isinstance(error, ConfigError | InvalidRequest) else 1)
    sys.exit(status)


def _fail(message: str, status: int) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return status
