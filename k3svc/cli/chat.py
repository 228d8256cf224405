"""`k3svc chat`: a conversation at the terminal."""

import asyncio
import contextlib
import readline  # noqa: F401  its import gives input() editing and history
import signal
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from k3svc.cli.generate import decoded, echo_stream
from k3svc.cli.session import (
    DeviceOption,
    DraftOption,
    EndpointOption,
    ModelOption,
    SetOption,
    build_config,
    connect,
    names_own_stack,
    run_command,
    show,
)
from k3svc.client import AsyncClient, Generation, Options
from k3svc.errors import Cancelled, K3svcError
from k3svc.text.chat import ChatMessage

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def chat(
    endpoint: EndpointOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    draft: DraftOption = "none",
    set_: SetOption = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Think before each answer.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens of an answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; drawn when absent.")] = None,
) -> None:
    """Talk with the model over several turns. With piped input each line is a question, and exit code 1 tells that one
    was not answered.

    Example: k3svc chat --endpoint 127.0.0.1:50051
    """
    options: Options = {"max_tokens": max_tokens, "thinking": thinking}
    if temperature is not None:
        options["temperature"] = temperature
    if seed is not None:
        options["seed"] = seed
    own_stack = names_own_stack(endpoint, model, device, set_)
    config = build_config(model=model, device=device, draft=draft, overrides=set_)
    conversation = Conversation(system, options)

    async def run() -> None:
        async with connect(endpoint, config, own_stack=own_stack) as client:
            if sys.stdin.isatty():
                show(HELP)
            await conversation.run(client)
        if conversation.has_failed and not sys.stdin.isatty():
            raise typer.Exit(1)

    run_command(run())


class Conversation:
    """Turns of one user. Only turns that got an answer stay in the history."""

    def __init__(self, system: str | None, options: Options) -> None:
        self._first = [] if system is None else [ChatMessage(role="system", content=system)]
        self._options = options
        self.messages = list(self._first)
        self.has_failed = False
        """Whether an answer ended with an error."""

    async def run(self, client: AsyncClient) -> None:
        """Reads lines until the end of the input or /exit."""
        # asyncio's own handler would wait for the next await, which comes after the line has been read.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        while True:
            line = _read_line()
            if line is None or line == "/exit":
                return
            if line == "/reset":
                self.messages = list(self._first)
                show("forgotten")
            elif line.startswith("/"):
                show(HELP)
            elif line:
                await self._answer(client, ChatMessage(role="user", content=line))

    async def _answer(self, client: AsyncClient, question: ChatMessage) -> None:
        """An answer that is stopped or fails leaves the conversation as it was."""
        messages = [*self.messages, question]
        generation = client.generate(messages=messages, **self._options)
        try:
            with _interrupted_by_ctrl_c(generation):
                completion = await echo_stream(generation)
        except Cancelled:
            show("\nstopped")
            return
        except K3svcError as error:
            self.has_failed = True
            show(f"\nerror: {error.message}")
            return
        answer = ChatMessage(role="assistant", content=completion.text, reasoning=completion.reasoning)
        self.messages = [*messages, answer]


def _read_line() -> str | None:
    """A line without its blanks; None at the end of the input. Blocks: nothing else happens between turns."""
    try:
        if not sys.stdin.isatty():
            data = sys.stdin.buffer.readline()
            return decoded(data).strip() if data else None
        return input("> ").strip()
    except KeyboardInterrupt:
        typer.echo()
        return ""
    except UnicodeDecodeError:
        show("that was no UTF-8")
        return ""
    except EOFError:
        typer.echo()
        return None


@contextlib.contextmanager
def _interrupted_by_ctrl_c(generation: Generation) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, generation.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
