"""`k3svc up`: the stack in the foreground."""

import asyncio
import dataclasses
import enum
import signal
from pathlib import Path
from typing import Annotated

import typer

from k3svc.cli.session import (
    DEFAULT_PORT,
    PROGRESS,
    ConfigOption,
    DeviceOption,
    DraftOption,
    ModelOption,
    SetOption,
    build_config,
    check_device,
    show,
    telling_ends,
)
from k3svc.cli.stack import Stack
from k3svc.errors import ConfigError
from k3svc.gateway.launch import GatewayOptions

DEFAULT_GATEWAY_PORT = 30000


class GatewayMode(enum.Enum):
    """Which services the gateway calls."""

    PLAIN = "plain"
    PD = "pd"


def up(
    model: ModelOption = None,
    device: DeviceOption = None,
    prefill: Annotated[int, typer.Option(min=1, help="Number of prefill services.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Number of decode services.")] = 1,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"Port of the first decode service, the others follow; 0: any. Without, and without server.port: "
            f"{DEFAULT_PORT}.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the first service's Prometheus endpoint, the others follow."),
    ] = None,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Start the gateway smg too: an OpenAI API over HTTP (docs/gateway.md).")
    ] = False,
    gateway_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the gateway; 0: any.")
    ] = DEFAULT_GATEWAY_PORT,
    gateway_mode: Annotated[
        GatewayMode, typer.Option(help="plain: it calls decode alone; pd: prefill and decode at once.")
    ] = GatewayMode.PLAIN,
    draft: DraftOption = None,
    set_: SetOption = None,
    config: ConfigOption = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for configuration and output of the services.")] = None,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Start a service that ends again, or end with it.")
    ] = True,
) -> None:
    """Start the services on this machine; Ctrl-C drains them.

    Example: k3svc up --model models/k3-nano --port 50051
    """
    built = build_config(config=config, model=model, device=device, draft=draft, overrides=set_, port=port)
    if port is None and built.server.port == 0:
        built = dataclasses.replace(built, server=dataclasses.replace(built.server, port=DEFAULT_PORT))
    if metrics_port is not None:
        built = dataclasses.replace(built, metrics=dataclasses.replace(built.metrics, port=metrics_port))
    check_device(built.model.device)
    options = GatewayOptions(mode=gateway_mode.value, port=gateway_port) if gateway else None
    stack = Stack(built, prefill=prefill, decode=decode, gateway=options, log_dir=log_dir, on_progress=show)
    asyncio.run(_serve(stack, restart=restart))


async def _serve(stack: Stack, *, restart: bool) -> None:
    """Until SIGINT or SIGTERM, or until a role ends for good. A signal is the usual end of a stack that is ready; one
    before that makes the exit code 130 or 143.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None, "runs as a task"
    signals: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        signals.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    is_ready = False
    try:
        with telling_ends():
            with PROGRESS.status("starting the services"):
                await _start(stack)
            is_ready = True
            await _run_until_cancelled(stack, restart=restart)
    except asyncio.CancelledError:
        show("stopped")
        if signals and not is_ready:
            raise typer.Exit(128 + signals[0]) from None


async def _start(stack: Stack) -> None:
    try:
        await stack.start()
    except ConfigError as error:
        if error.metadata.get("key") == "server.port":
            raise ConfigError(f"{error.message}; --port 0 takes a free one", key="server.port") from error
        raise


async def _run_until_cancelled(stack: Stack, *, restart: bool) -> None:
    try:
        decode, prefill = ",".join(stack.decode_endpoints), ",".join(stack.prefill_endpoints)
        show(f'try: k3svc generate --endpoint {stack.decode_endpoints[0]} "import os"   (Ctrl-C here drains)')
        if stack.gateway_endpoint is not None:
            show(f"OpenAI API: http://{stack.gateway_endpoint}/v1")
        metrics = ",".join(stack.metrics_endpoints.values())
        named = {
            "decode": decode,
            "prefill": prefill,
            "draft": stack.draft_endpoint,
            "drafts": stack.drafts,
            "gateway": stack.gateway_endpoint,
            "metrics": metrics,
        }
        typer.echo(" ".join(["ready", *(f"{name}={value}" for name, value in named.items() if value)]))
        await (stack.supervise() if restart else stack.watch())
    except asyncio.CancelledError:
        show("draining")
        raise
    finally:
        await stack.stop()
