"""The command `k3svc`. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration. Errors are one line."""

import sys

import grpc
import typer

from k3svc import __version__
from k3svc.cli.chat import chat
from k3svc.cli.demo import demo
from k3svc.cli.generate import generate
from k3svc.cli.health import health
from k3svc.cli.up import up
from k3svc.errors import ConfigError, InvalidRequest, K3svcError

app = typer.Typer(
    name="k3svc",
    help="Prefill, decode and draft services over gRPC for models of the Kimi-K3 family.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(up)
app.command()(generate)
app.command()(chat)
app.command()(health)
app.command()(demo)


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
