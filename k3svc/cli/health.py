"""`k3svc health`: the health check of a container."""

import asyncio
from typing import Annotated

import typer

from k3svc.cli.session import new_client

SERVING = "SERVING"
TIMEOUT_S = 3.0


def health(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="A service of any role.")],
    service: Annotated[str, typer.Option(help="Full name of a gRPC service, or liveness; empty: the process.")] = "",
) -> None:
    """Ask a service whether it serves; exits 0 only if it does.

    Example: k3svc health 127.0.0.1:50051 --service k3svc.v1.DecodeService
    """

    async def ask() -> str:
        async with new_client(address) as client:
            return await client.health(service=service, timeout_s=TIMEOUT_S)

    status = asyncio.run(ask())
    typer.echo(status)
    if status != SERVING:
        raise typer.Exit(1)
