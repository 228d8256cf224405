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
    names_own_stack,
    run_command,
    show,
)
from k3svc.client import AsyncClient, Completion, Delta, Generation, Options, Sample, TokenLogprobs
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
        typer.Option(
            help="JSON list of lists of token ids, run concurrently; prints a JSON list in order, with "
            '{"error": ...} for a prompt that failed.'
        ),
    ] = None,
    endpoint: EndpointOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    draft: DraftOption = None,
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
    logprobs: Annotated[int | None, typer.Option(help="With --json: report so many log-probabilities a token.")] = None,
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
    if logprobs is not None and not (as_json or tokens_file is not None):
        raise typer.BadParameter("only with --json", param_hint="--logprobs")
    own_stack = names_own_stack(endpoint, model, device, set_, draft)
    options: Options = {"max_tokens": max_tokens, "n": n, "ignore_eos": ignore_eos, "stop": stop or []}
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given |= {"seed": seed, "logprobs": logprobs, "thinking": thinking or None}
    options.update({key: value for key, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    config = build_config(model=model, device=device, draft=draft or "none", overrides=set_)

    async def run() -> None:
        async with connect(endpoint, config, own_stack=own_stack) as client:
            if tokens_file is not None:
                await _print_all(client, prompts, options)
            elif as_json or n > 1:
                with PROGRESS.status("generating"):
                    completion = await _complete(client, prompts[0], options)
                _print_whole(completion, as_json=as_json)
            else:
                await _stream(client, prompts[0], options)

    run_command(run())


async def _print_all(client: AsyncClient, prompts: Sequence[Prompt], options: Options) -> None:
    """One JSON list in order; a prompt that fails ends none of the others. Exit code 1 if one has failed."""
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def run_one(prompt: Prompt) -> dict[str, Any]:
        async with slots:
            try:
                return completion_json(await _complete(client, prompt, options))
            except K3svcError as error:
                return {"error": error_json(error)}

    tasks = [asyncio.ensure_future(run_one(prompt)) for prompt in prompts]
    try:
        with PROGRESS.status(f"{len(prompts)} prompts under way"):
            values = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    echo_json(values)
    failed = [index for index, value in enumerate(values) if "error" in value]
    if failed:
        first = values[failed[0]]["error"]["message"]
        show(f"error: {len(failed)} of {len(values)} prompts failed; first, prompt {failed[0]}: {first}")
        raise typer.Exit(1)


async def _complete(client: AsyncClient, prompt: Prompt, options: Options) -> Completion:
    return await client.generate(prompt.text, tokens=prompt.tokens, messages=prompt.messages, **options).result()


async def _stream(client: AsyncClient, prompt: Prompt, options: Options) -> None:
    async with client.generate(prompt.text, tokens=prompt.tokens, messages=prompt.messages, **options) as generation:
        completion = await echo_stream(generation)
    show(summary(completion))


async def echo_stream(generation: Generation) -> Completion:
    """Text to standard output as it comes, reasoning and tool calls to standard error. Both end with a line."""
    is_reasoning = False
    try:
        async for event in generation:
            if not isinstance(event, Delta):
                continue
            if event.reasoning:
                PROGRESS.print(event.reasoning, end="", style="dim", markup=False)
                is_reasoning = True
            elif is_reasoning and (event.text or event.tool_calls):
                PROGRESS.print()
                is_reasoning = False
            for call in event.tool_calls:
                show(f"calls {call.name}({call.arguments_json})")
            typer.echo(event.text, nl=False)
            sys.stdout.flush()
    finally:
        if is_reasoning:
            PROGRESS.print()
    typer.echo()
    return await generation.result()


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


def error_json(error: K3svcError) -> dict[str, Any]:
    """Class, reason and message of an error."""
    return {"type": type(error).__name__, "reason": error.reason, "message": error.message}


def completion_json(completion: Completion) -> dict[str, Any]:
    """The object of --json; `samples` only when there are several."""
    first = completion.samples[0]
    timing = {} if completion.timings is None else dataclasses.asdict(completion.timings)
    values = {
        **_sample_json(first),
        "usage": dataclasses.asdict(completion.usage),
        "timing": _rounded(timing),
        "speculation": {
            **_rounded(dataclasses.asdict(completion.speculation)),
            **_rounded({"acceptance_length": completion.speculation.acceptance_length}),
        },
        "request_id": completion.request_id,
        "seed": completion.seed,
    }
    if len(completion.samples) > 1:
        values["samples"] = [_sample_json(sample) for sample in completion.samples]
    return values


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in values.items()}


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
    top = [{"token_id": token_id, "logprob": round(logprob, 6)} for token_id, logprob in entry.top]
    return {"token_id": entry.token_id, "logprob": round(entry.logprob, 6), "top": top}


def summary(completion: Completion) -> str:
    """One line for people."""
    usage, timings = completion.usage, completion.timings
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [f"{usage.prompt_tokens}{cached} + {usage.completion_tokens} tokens", completion.finish_reason.value]
    if timings is not None:
        parts += [f"first token after {timings.ttft_ms:.0f} ms", f"then {timings.tpot_ms:.1f} ms a token"]
    stats = completion.speculation
    if stats.acceptance_length is not None:
        parts.append(f"{stats.acceptance_length:.2f} tokens a step with drafts of {', '.join(stats.drafters)}")
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
    text = decoded(sys.stdin.buffer.read()) if prompt == "-" else prompt
    if not chat:
        return [Prompt(text=text)]
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [Prompt(messages=[*messages, {"role": "user", "content": text or ""}])]


def decoded(data: bytes) -> str:
    """Text of standard input. Raises BadParameter when it is no UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"byte {error.start} is 0x{data[error.start]:02x}; expected UTF-8", param_hint="standard input"
        ) from error


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}; expected token ids such as 1,2,3", param_hint="--tokens") from error


def read_tokens_file(path: Path) -> list[list[int]]:
    """A JSON list of lists of token ids. Raises ConfigError with the place that is wrong."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(value, list):
        raise ConfigError(f"{path}: expected a JSON list of lists of token ids")
    if not value:
        raise ConfigError(f"{path}: the list of prompts is empty")
    for index, ids in enumerate(value):
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ConfigError(f"{path}: entry {index} is not a list of token ids")
    return value
