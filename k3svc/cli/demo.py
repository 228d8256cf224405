"""`k3svc demo`: the main job, to look at."""

from collections.abc import Sequence

import typer

from k3svc.cli.generate import echo_stream
from k3svc.cli.session import (
    DeviceOption,
    ModelOption,
    SetOption,
    build_config,
    embedded_stack,
    new_client,
    run_command,
    show,
)
from k3svc.client import Completion

PROMPT = "import os\nimport sys\n\ndef main("
QUESTION = "What is the signature of shutil.copyfile?"
MAX_TOKENS = 48


def demo(model: ModelOption = None, device: DeviceOption = None, set_: SetOption = None) -> None:
    """Start the services, continue a text, answer a question, and tell what it took.

    Example: k3svc demo --model models/k3-nano
    """
    config = build_config(model=model, device=device, overrides=set_)

    async def run() -> None:
        async with embedded_stack(config) as stack, new_client(stack.decode_endpoints) as client:
            typer.echo(f"\n--- continues a text\n{PROMPT}", nl=False)
            text = await echo_stream(client.generate(PROMPT, temperature=0.0, max_tokens=MAX_TOKENS))
            typer.echo(f"\n--- answers a question\n> {QUESTION}")
            messages = [{"role": "user", "content": QUESTION}]
            answer = await echo_stream(client.generate(messages=messages, temperature=0.0, max_tokens=MAX_TOKENS))
            typer.echo("\n--- what it took\n" + "\n".join(summary_lines([text, answer])))
            show("draining the services")

    run_command(run())


def summary_lines(completions: Sequence[Completion]) -> list[str]:
    """Bytes shipped, hand-off time and tokens per second of requests that ran one after the other."""
    timings = [completion.timings for completion in completions if completion.timings is not None]
    count = len(timings)
    shipped = sum(timing.handoff_bytes for timing in timings)
    prefill_ms = sum(timing.prefill_ms for timing in timings) / count
    tail_ms = sum(timing.handoff_tail_ms for timing in timings) / count
    # The first token of each request comes from the hand-off, not from a step of decode.
    steps = [len(completion.token_ids) - 1 for completion in completions if completion.timings is not None]
    decode_s = sum(timing.tpot_ms * n for timing, n in zip(timings, steps, strict=True)) / 1000
    return [
        f"shipped   {shipped:,} bytes of state from prefill to decode in {count} hand-offs",
        f"hand-off  {tail_ms:.1f} ms on average after {prefill_ms:.1f} ms of prefill",
        f"decode    {sum(steps) / decode_s:.0f} tokens/s, one request at a time",
    ]
