"""What a decode step takes outside of the model, from step to step, and what the interpreter lock costs it.

    python -m benchmarks.step_overhead [--json] [--reps N] [--batches N ...] [--set section.key=value]

Runs the scheduler and the runner of a decode service in this process, without services, on k3-nano: samples with other
noise each, whose prompts are computed first. Of each step: building it (schedule), the way to the engine thread and
back (hop), the tensors of the batch (inputs), the model with its logits (model), the choice of tokens and all else on
that thread (choice), booking (commit). A round runs steps alone, then steps while the event loop makes messages of the
tokens for one reader each, as a service does, and alone again: the ratio of the time on the engine thread is what the
two take from each other. The last line is one JSON object with medians over the rounds, microseconds.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.stack import cpu_name, prompt
from k3svc.config import Config, load_config
from k3svc.core.batch import ExtendBatch, ExtendRow
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.events import Delta
from k3svc.core.pages import PagePool
from k3svc.core.request import GenerateRequest, SamplingParams, StopParams
from k3svc.core.sample import Sample
from k3svc.core.slots import SlotPool
from k3svc.engine import runner as runner_module
from k3svc.engine.build import LoadedModel, load_model
from k3svc.engine.stream import TokenStream
from k3svc.rpc import codec
from k3svc.rpc.process import SWITCH_INTERVAL_S, set_malloc

BATCHES = (1, 16, 64)
PROMPT_TOKENS = 64
STEPS = 40
PARTS = ("schedule", "hop", "inputs", "model", "choice", "commit")


@dataclass
class Clock:
    """Seconds that the parts of steps on the engine thread took."""

    seconds: dict[str, float] = field(default_factory=lambda: {"inputs": 0.0, "model": 0.0})

    def timed(self, name: str, call: Any) -> Any:
        """`call`, whose time counts as that of a part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - started
            return result

        return run

    def watch(self, loaded: LoadedModel) -> None:
        """Takes the time of a runner's batches and of its model."""
        runner: Any = loaded.runner
        module: Any = runner_module
        model = runner._model  # noqa: SLF001  measured from inside
        model.forward, model.logits = self.timed("model", model.forward), self.timed("model", model.logits)
        module.decode_inputs = self.timed("inputs", module.decode_inputs)

    def taken(self) -> dict[str, float]:
        """What has come together since the last call."""
        own, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return own


class Steps:
    """Samples in the middle of their output, which take steps together."""

    def __init__(self, loaded: LoadedModel, clock: Clock, count: int, num_tokens: int) -> None:
        self._loaded = loaded
        self._clock = clock
        spec = loaded.cache.spec
        self._scheduler = DecodeScheduler(
            pages=PagePool(spec.num_pages),
            slots=SlotPool(spec.num_slots),
            page_size=spec.page_size,
            max_batch=count,
            max_waiting=count,
            max_transfers=count,
            max_context_tokens=PROMPT_TOKENS + num_tokens,
            stop_token_ids=(),
        )
        self._requests = [
            GenerateRequest(
                request_id=str(index),
                prompt=tuple(prompt(PROMPT_TOKENS, index)),
                sampling=SamplingParams(temperature=1.0, seed=index),
                stop=StopParams(ignore_eos=True),
            )
            for index in range(count)
        ]

    async def begin(self) -> None:
        """Computes the prompts and the first tokens."""
        for request in self._requests:
            self._scheduler.submit(request, retry_after_s=0.0)
        jobs = self._scheduler.admit(now=0.0)
        assert len(jobs) == len(self._requests), "the pools are too small"
        for job in jobs:
            lead = job.lead
            assert lead.slot is not None
            row = ExtendRow(
                key=lead.key,
                slot=lead.slot,
                block_table=lead.pages,
                token_ids=lead.request.prompt,
                start=0,
                is_last=True,
            )
            await self._loaded.runner.extend(ExtendBatch(rows=[row]), lambda _layer: None)
            self._scheduler.landed(job)
        await self.run(3, {})

    async def run(self, num_steps: int, streams: dict[str, TokenStream]) -> dict[str, float]:
        """Median microseconds of each part and of a whole step; tokens go into `streams`, by request."""
        times: dict[str, list[float]] = {name: [] for name in (*PARTS, "step", "thread")}
        for _ in range(num_steps):
            started = time.perf_counter()
            batch = self._scheduler.schedule()
            assert batch is not None
            scheduled = time.perf_counter()
            output = await self._loaded.runner.decode(batch)
            computed = time.perf_counter()
            emissions = self._scheduler.commit(batch, output)
            committed = time.perf_counter()
            for emission in emissions:
                if streams:
                    _tell(streams[emission.sample.request.request_id], emission.sample, emission.tokens)
            parts = self._clock.taken()
            parts |= {
                "schedule": scheduled - started,
                "hop": computed - scheduled - output.compute_s,
                "choice": output.compute_s - parts["inputs"] - parts["model"],
                "commit": committed - computed,
                "step": committed - started,
                "thread": output.compute_s,
            }
            for name, seconds in parts.items():
                times[name].append(seconds * 1e6)
        return {name: statistics.median(values) for name, values in times.items()}

    async def run_with_readers(self, num_steps: int) -> dict[str, float]:
        """The same while the event loop makes a message of every token."""
        streams = {
            request.request_id: TokenStream(request.request_id, on_cancel=_ignore, on_read=_ignore)
            for request in self._requests
        }
        readers = [asyncio.create_task(_read(stream)) for stream in streams.values()]
        try:
            return await self.run(num_steps, streams)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)


def _ignore(_stream: TokenStream) -> None:
    pass


def _tell(stream: TokenStream, sample: Sample, tokens: Sequence[Any]) -> None:
    stream.put(Delta(index=sample.index, token_ids=tuple(one.token_id for one in tokens)))


async def _read(stream: TokenStream) -> None:
    async for event in stream:
        codec.event_to_pb(event).SerializeToString()


async def measure(config: Config, batches: Sequence[int], reps: int) -> list[dict[str, Any]]:
    """One row for each size of a batch."""
    num_tokens = 4 * STEPS * (reps + 1)
    pages = max(batches) * ((PROMPT_TOKENS + num_tokens) // config.cache.page_size + 2)
    cache = replace(config.cache, num_slots=max(batches), num_pages=pages)
    loaded = load_model(replace(config, cache=cache), lambda *_: None)
    clock = Clock()
    rows = []
    try:
        await loaded.runner.warm_up()
        clock.watch(loaded)
        for count in batches:
            steps = Steps(loaded, clock, count, num_tokens)
            await steps.begin()
            figures: dict[str, list[float]] = {}
            for rep in range(reps + 1):
                before = await steps.run(STEPS, {})
                disturbed = await steps.run_with_readers(STEPS)
                after = await steps.run(STEPS, {})
                if rep:  # the first round warms up
                    for name in before:
                        figures.setdefault(f"{name}_us", []).append((before[name] + after[name]) / 2)
                    alone = (before["step"] + after["step"]) / 2
                    inside = (before["model"] + after["model"]) / 2
                    figures.setdefault("share_outside", []).append(1 - inside / alone)
                    thread = (before["thread"] + after["thread"]) / 2
                    figures.setdefault("readers_over_alone", []).append(disturbed["thread"] / thread)
            medians = {name: round(statistics.median(values), 3) for name, values in figures.items()}
            rows.append({"batch": count, **medians})
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), file=sys.stderr)
    finally:
        loaded.runner.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on stdout")
    parser.add_argument("--reps", type=int, default=5, help="rounds of each batch; default 5")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="samples of a step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    nano = Path(__file__).parents[1] / "models" / "k3-nano"
    config = load_config(None, [f"model.path={nano}", *options.set])
    set_malloc()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    rows = uvloop.run(measure(config, options.batches, options.reps))
    figures = {
        "benchmark": "step_overhead",
        "cpu": cpu_name(),
        "device": config.model.device,
        "reps": options.reps,
        "steps": STEPS,
        "rows": rows,
    }
    if not options.json:
        for row in rows:
            print("  ".join(f"{name} {value:g}" for name, value in row.items()))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
