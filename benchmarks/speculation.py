"""Speculation through the real services: acceptance by class, tokens/s against plain decode, and where the time goes.

    python -m benchmarks.speculation [--json] [--draft NAME ...] [--prompts N] [--classes CLASS ...] [--reps N]
                                    [--set section.key=value]

Starts three stacks on loopback: plain decode, a draft service of which every draft is waited for and verified, and one
that is used as configured by default. They continue the held-out prompts of k3-nano by up to 128 tokens, greedily and
at temperature 1. Plain decode says where a continuation begins to loop; what follows is cut off, and counted apart.
Then the stacks make the same tokens in turn, which are compared.

- acceptance: of all drafts, by class; acceptance length is 1 + accepted / steps with drafts
- served: tokens/s of one stream between its first and last token as served by default, and as plain decode
- the split of a step with drafts, and what it predicts: AL · T1 / (verify + draft + round trip) times plain, steps
  without drafts counted as plain ones
- concurrent: tokens/s of 16 streams at once, as served by default and as plain decode, in rounds of both in the order
  plain, served, served, plain, so that a machine that becomes slower or faster does so for both

Plain decode runs before and after each text of the other stacks for the same reason.

The last line is one JSON object.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from benchmarks.stack import cpu_name
from k3svc.cli.session import run_command
from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient, Completion
from k3svc.config import Config, load_config
from k3svc.core.speculation import Tally
from training.acceptance_walk import usable_length

MODELS = Path(__file__).parents[1] / "models"
NUM_TOKENS = 128
CLASSES = ("files", "recall", "chat")
TEMPERATURES = (0.0, 1.0)
CONCURRENCY = 16


@dataclass(kw_only=True)
class Side:
    """Times of one stack over some prompts."""

    tokens: int = 0
    seconds: float = 0.0
    """Between the first and the last token of each."""

    def add(self, completion: Completion) -> None:
        count = len(completion.token_ids) - 1
        assert completion.timings is not None
        self.tokens += count
        self.seconds += count * completion.timings.tpot_ms * 1e-3

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(kw_only=True)
class Figures:
    """Of one class at one temperature."""

    plain: Side = field(default_factory=Side)
    drafted: Side = field(default_factory=Side)
    tally: Tally = field(default_factory=Tally)
    num_prompts: int = 0
    looping_tokens: int = 0
    differing: int = 0

    def add(self, plain: Sequence[Completion], drafted: Completion) -> None:
        """One text, and its runs without drafts."""
        self.num_prompts += 1
        for completion in plain:
            self.plain.add(completion)
        self.drafted.add(drafted)
        self.differing += any(completion.token_ids != drafted.token_ids for completion in plain)
        stats, tally = drafted.speculation, self.tally
        for name in ("steps", "steps_with_drafts", "proposed", "accepted", "late", "salvaged", "gaps"):
            setattr(tally, name, getattr(tally, name) + getattr(stats, name))
        for name in ("wait", "draft", "verify", "commit"):
            setattr(tally, f"{name}_s", getattr(tally, f"{name}_s") + getattr(stats, f"{name}_ms") * 1e-3)
        for name, values in (("by_length", stats.steps_by_length), ("by_position", stats.accepted_by_position)):
            old = getattr(tally, name)
            longest = max(len(old), len(values))
            padded = [[*given, *[0] * (longest - len(given))] for given in (old, values)]
            setattr(tally, name, [a + b for a, b in zip(*padded, strict=True)])

    def report(self) -> dict[str, Any]:
        stats, steps = self.tally.stats(), max(1, self.tally.steps_with_drafts)
        t1_ms = 1e3 / self.plain.rate if self.plain.rate else 0.0
        verify_ms, wait_ms, draft_ms = stats.verify_ms / steps, stats.wait_ms / steps, stats.draft_ms / steps
        # With drafts in every step this is AL · T1 / (verify + draft + round trip).
        plain_steps = stats.steps - self.num_prompts - stats.steps_with_drafts
        drafted_ms = stats.verify_ms + stats.wait_ms + plain_steps * t1_ms
        predicted = self.drafted.tokens * t1_ms / drafted_ms if drafted_ms else 0.0
        return {
            "acceptance_length": None if stats.acceptance_length is None else round(stats.acceptance_length, 3),
            "tokens_per_step": round(self.drafted.tokens / max(1, stats.steps - self.num_prompts), 3),
            "steps": stats.steps,
            "steps_with_drafts": stats.steps_with_drafts,
            "late": stats.late,
            "salvaged": stats.salvaged,
            "gaps": stats.gaps,
            "by_position": [round(hits / steps, 3) for hits in stats.accepted_by_position],
            "steps_by_length": list(stats.steps_by_length),
            "looping_tokens": self.looping_tokens,
            "differing": self.differing,
            "plain_tokens_per_s": round(self.plain.rate, 1),
            "drafted_tokens_per_s": round(self.drafted.rate, 1),
            "speedup": round(self.drafted.rate / self.plain.rate, 3) if self.plain.rate else 0.0,
            "predicted_speedup": round(predicted, 3),
            "plain_step_ms": round(t1_ms, 3),
            "verify_ms": round(verify_ms, 3),
            "commit_ms": round(stats.commit_ms / steps, 3),
            "draft_ms": round(draft_ms, 3),
            "round_trip_ms": round(wait_ms - draft_ms, 3),
            "wait_ms": round(wait_ms, 3),
        }


async def continue_prompt(
    client: AsyncClient, prompt: Sequence[int], temperature: float, seed: int, count: int
) -> Completion:
    return await client.generate(
        tokens=prompt, max_tokens=count, temperature=temperature, seed=seed, ignore_eos=True
    ).result()


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Of the three stacks."""

    plain: AsyncClient
    every: AsyncClient
    """All drafts are waited for and verified."""
    served: AsyncClient


async def measure_class(
    clients: Clients, prompts: Sequence[Sequence[int]], temperature: float
) -> tuple[Figures, Figures]:
    """One stream at a time, the stacks in turn: of all drafts, and as served."""
    every, served = Figures(), Figures()
    for seed, prompt in enumerate(prompts):
        whole = await continue_prompt(clients.plain, prompt, temperature, seed, NUM_TOKENS)
        count, looping = usable_length(list(whole.token_ids), stop_at_message_end=False)
        for figures in (every, served):
            figures.looping_tokens += looping
        if count < 2:
            continue
        plain = await continue_prompt(clients.plain, prompt, temperature, seed, count)
        drafted = await continue_prompt(clients.every, prompt, temperature, seed, count)
        governed = await continue_prompt(clients.served, prompt, temperature, seed, count)
        again = await continue_prompt(clients.plain, prompt, temperature, seed, count)
        every.add((plain, again), drafted)
        served.add((plain, again), governed)
    return every, served


async def concurrent_rate(client: AsyncClient, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens/s of CONCURRENCY streams that start together."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    completions = await asyncio.gather(
        *(
            continue_prompt(client, prompts[index % len(prompts)], 1.0, index, NUM_TOKENS)
            for index in range(CONCURRENCY)
        )
    )
    return sum(len(completion.token_ids) for completion in completions) / (loop.time() - started)


async def measure(
    config: Config, draft: str, prompts: dict[str, list[list[int]]], classes: Sequence[str], reps: int
) -> dict[str, Any]:
    def say(text: str) -> None:
        print(text, file=sys.stderr)

    served_config = replace(config, draft=replace(config.draft, path=str(MODELS / draft)))
    speculation = replace(config.speculation, govern=False, max_wait_s=1.0)
    report: dict[str, Any] = {"acceptance": {}, "served": {}}
    async with (
        Stack(config, on_progress=say) as plain_stack,
        Stack(replace(served_config, speculation=speculation), on_progress=say) as every_stack,
        Stack(served_config, on_progress=say) as served_stack,
        AsyncClient(plain_stack.decode_endpoints) as plain,
        AsyncClient(every_stack.decode_endpoints) as every,
        AsyncClient(served_stack.decode_endpoints) as served,
    ):
        clients = Clients(plain=plain, every=every, served=served)
        for client in (plain, every, served):
            await continue_prompt(client, prompts["chat"][0], 0.0, 0, NUM_TOKENS)
        for temperature in TEMPERATURES:
            for kind in classes:
                measured = await measure_class(clients, prompts[kind], temperature)
                for name, figures in zip(("acceptance", "served"), measured, strict=True):
                    found = report[name][f"{kind} T={temperature:g}"] = figures.report()
                    say(f"{draft} {name} {kind} T={temperature:g}: {json.dumps(found)}")
        pairs = []
        for rep in range(reps + 1 if reps else 0):
            rates = [await concurrent_rate(client, prompts["files"]) for client in (plain, served, served, plain)]
            pair = (statistics.harmonic_mean(rates[::3]), statistics.harmonic_mean(rates[1:3]))
            say(f"{draft} {CONCURRENCY} streams: plain {pair[0]:.0f}, with drafts {pair[1]:.0f} tokens/s")
            pairs += [pair] if rep else []
        if not pairs:
            return report
        ratios = [with_drafts / without for without, with_drafts in pairs]
        report["concurrent"] = {
            "streams": CONCURRENCY,
            "plain_tokens_per_s": round(statistics.median(pair[0] for pair in pairs), 1),
            "drafted_tokens_per_s": round(statistics.median(pair[1] for pair in pairs), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on stdout")
    parser.add_argument("--draft", nargs="+", default=["k3-nano-dspark", "k3-nano-dflash"], metavar="NAME")
    parser.add_argument("--prompts", type=int, default=1000, help="at most so many prompts of each class")
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES), metavar="CLASS",
                        help=f"of {', '.join(CLASSES)}, in this order")  # fmt: skip
    parser.add_argument("--reps", type=int, default=3, help="rounds of concurrent streams; default 3, 0: none")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    nano = MODELS / "k3-nano"
    # Prompts are asked more than once.
    config = load_config(None, [f"model.path={nano}", "model.device=cpu", "cache.prefix=off", *options.set])
    prompts = {
        kind: given[: options.prompts]
        for kind, given in json.loads((nano / "prompts.json").read_text())["prompts"].items()
    }
    figures: dict[str, Any] = {}

    async def run() -> None:
        for draft in options.draft:
            figures[draft] = await measure(config, draft, prompts, options.classes, options.reps)

    try:
        run_command(run())
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    report = {"benchmark": "speculation", "device": config.model.device, "cpu": cpu_name(), **figures}
    if not options.json:
        print(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
