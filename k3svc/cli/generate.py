"""`k3svc generate`: the continuation of a text, of token ids, or the answer to a question."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from k3svc.cli.session import (
    PROGRESS,
    DeviceOption,
    DraftOption,
    EndpointOption,
    ModelOption,
    SetOption,
    build_config,
    connect,
    show,
)
from k3svc.client import AsyncClient, Completion, Delta, Options, Sample, TokenLogprobs
from k3svc.errors import ConfigError, K3svcError

DEFAULT_MAX_TOKENS = 256
MAX_CONCURRENT = 256
"""Prompts of a file that are under way at once: what a service with default limits takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One of the three kinds of prompt; the others are None."""

    text: str | None = None
    tokens: Sequence[int] | None = None
    messages: Sequence[dict[str, str]] | None = None


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue, or - for standard input.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="1,2,3", help="Token ids instead of text.")] = None,
    tokens_file: Annotated[
        Path | None,
        typer.Option(help="JSON list of lists of token ids, run concurrently; prints a JSON list in order."),
    ] = None,
    endpoint: EndpointOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    draft: DraftOption = "none",
    set_: SetOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest number of output tokens.")] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep this probability mass.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the best.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; drawn when absent.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a question in the chat format.")] = False,
    thinking: Annotated[bool, typer.Option("--thinking", help="With --chat: think first.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: a system message.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Report so many log-probabilities a token.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Number of samples.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on at the model's stop tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Generate tokens and stream them as text.

    Example: k3svc generate --model models/k3-nano --temperature 0 "import os"
    """
    prompts = _read_prompts(prompt, tokens, tokens_file, chat=chat, system=system)
    if (thinking or system is not None) and not chat:
        raise typer.BadParameter("only with --chat", param_hint="--thinking" if thinking else "--system")
    options: Options = {"max_tokens": max_tokens, "n": n, "ignore_eos": ignore_eos, "stop": stop or []}
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given |= {"seed": seed, "logprobs": logprobs, "thinking": thinking or None}
    options.update({key: value for key, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    config = build_config(model=model, device=device, draft=draft, overrides=set_)

    async def run() -> None:
        async with connect(endpoint, config) as client:
            if tokens_file is not None:
                echo_json([completion_json(c) for c in await _run_all(client, prompts, options)])
            elif as_json or n > 1:
                (completion,) = await _run_all(client, prompts, options)
                _print_whole(completion, as_json=as_json)
            else:
                await _stream(client, prompts[0], options)

    asyncio.run(run())


async def _run_all(client: AsyncClient, prompts: Sequence[Prompt], options: Options) -> list[Completion]:
    """All completions in order; the error of the first prompt that fails ends the others."""
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def run_one(index: int, prompt: Prompt) -> Completion:
        async with slots:
            try:
                return await client.generate(
                    prompt.text, tokens=prompt.tokens, messages=prompt.messages, **options
                ).result()
            except K3svcError:
                if len(prompts) > 1:
                    show(f"prompt {index} failed")
                raise

    tasks = [asyncio.ensure_future(run_one(index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        with PROGRESS.status(f"{len(prompts)} prompts under way" if len(prompts) > 1 else "generating"):
            return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(client: AsyncClient, prompt: Prompt, options: Options) -> None:
    """Text to standard output as it comes, reasoning to standard error."""
    async with client.generate(prompt.text, tokens=prompt.tokens, messages=prompt.messages, **options) as generation:
        async for event in generation:
            if isinstance(event, Delta):
                echo_delta(event)
        completion = await generation.result()
    typer.echo()
    show(summary(completion))


def echo_delta(delta: Delta) -> None:
    """Text of a delta to standard output, reasoning to standard error."""
    if delta.reasoning:
        PROGRESS.print(delta.reasoning, end="", style="dim", markup=False)
    for call in delta.tool_calls:
        show(f"calls {call.name}({call.arguments_json})")
    typer.echo(delta.text, nl=False)
    sys.stdout.flush()


def _print_whole(completion: Completion, *, as_json: bool) -> None:
    if as_json:
        echo_json(completion_json(completion))
        return
    for sample in completion.samples:
        typer.echo(f"--- {sample.index}: {sample.finish_reason.value}")
        typer.echo(sample.text)
    show(summary(completion))


def echo_json(value: object) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))


def completion_json(completion: Completion) -> dict[str, Any]:
    """The object of --json; `samples` only when there are several."""
    first = completion.samples[0]
    timing = {} if completion.timings is None else dataclasses.asdict(completion.timings)
    values = {
        **_sample_json(first),
        "usage": dataclasses.asdict(completion.usage),
        "timing": timing,
        "speculation": dataclasses.asdict(completion.speculation),
        "request_id": completion.request_id,
        "seed": completion.seed,
    }
    if len(completion.samples) > 1:
        values["samples"] = [_sample_json(sample) for sample in completion.samples]
    return values


def _sample_json(sample: Sample) -> dict[str, Any]:
    values: dict[str, Any] = {
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason.value,
        "stopped_by": sample.stopped_by,
    }
    if sample.reasoning:
        values["reasoning"] = sample.reasoning
    if sample.tool_calls:
        values["tool_calls"] = [dataclasses.asdict(call) for call in sample.tool_calls]
    if sample.logprobs:
        values["logprobs"] = [_logprobs_json(entry) for entry in sample.logprobs]
    return values


def _logprobs_json(entry: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in entry.top]
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top": top}


def summary(completion: Completion) -> str:
    """One line for people."""
    usage, timings = completion.usage, completion.timings
    parts = [f"{usage.prompt_tokens} + {usage.completion_tokens} tokens", completion.finish_reason.value]
    if timings is not None:
        parts += [f"first token after {timings.ttft_ms:.0f} ms", f"then {timings.tpot_ms:.1f} ms a token"]
    return ", ".join([*parts, f"seed {completion.seed}"])


def _read_prompts(
    prompt: str | None, tokens: str | None, tokens_file: Path | None, *, chat: bool, system: str | None
) -> list[Prompt]:
    """Exactly one source. Raises BadParameter or ConfigError."""
    if sum(source is not None for source in (prompt, tokens, tokens_file)) != 1:
        raise typer.BadParameter("give exactly one of PROMPT, --tokens and --tokens-file", param_hint="PROMPT")
    if prompt is None and chat:
        raise typer.BadParameter("needs PROMPT", param_hint="--chat")
    if tokens is not None:
        return [Prompt(tokens=_parse_ids(tokens))]
    if tokens_file is not None:
        return [Prompt(tokens=ids) for ids in read_tokens_file(tokens_file)]
    text = sys.stdin.read() if prompt == "-" else prompt
    if not chat:
        return [Prompt(text=text)]
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [Prompt(messages=[*messages, {"role": "user", "content": text or ""}])]


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}; expected token ids such as 1,2,3", param_hint="--tokens") from error


def read_tokens_file(path: Path) -> list[list[int]]:
    """A JSON list of lists of token ids. Raises ConfigError with the place that is wrong."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{path}: expected a JSON list of lists of token ids")
    for index, ids in enumerate(value):
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"{path}: entry {index} is not a list of token ids")
    return value
