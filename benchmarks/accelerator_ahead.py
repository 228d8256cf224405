"""Decode steps from end to end: scheduler, pipeline and runner, with greedy tokens, one step at a time and with the
next one asked for while one runs. What is left out of a service is its event loop's other work: texts, streams, calls.
"""

import asyncio
import json
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from benchmarks import accelerator_model
from benchmarks.accelerator_overlap import kernels_of
from benchmarks.accelerator_services import GREEDY, NANO
from benchmarks.accelerator_timing import Ceilings
from k3svc import ops
from k3svc.cli.session import build_config
from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient, Completion, Options
from k3svc.core.batch import DecodeBatch, StepOutput
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.pages import PagePool
from k3svc.core.request import GenerateRequest, SamplingParams, StopParams
from k3svc.core.slots import SlotPool
from k3svc.engine.pipeline import StepPipeline
from k3svc.engine.runner import ModelRunner
from k3svc.model.kimi import Model, cache_spec
from k3svc.rpc.process import SWITCH_INTERVAL_S

PAGE = 64
STEPS = 60
ROUNDS = 5

Rows = list[dict[str, Any]]


def nano(device: str = "cuda", dtype: str = "float32") -> Rows:
    """k3-nano behind 200 tokens, and whether its tokens are the same either way."""
    backend = ops.load(device, dtype=dtype, threads=1)
    model = Model.load(NANO, backend, lambda _done, _total: None)
    batches, context = (1, 16, 64), 200
    pages = batches[-1] * _pages(context)
    spec = cache_spec(
        model.config, num_slots=batches[-1], num_pages=pages, page_size=PAGE, kv_dtype=backend.activation_dtype
    )
    cache = backend.new_cache(spec)
    return [{"model": f"k3-nano {dtype}", **_case(model, cache, backend, count, context)} for count in batches]


def kimi_linear(ceilings: Ceilings) -> Rows:
    """The geometry of Kimi-Linear-48B behind 4,096 tokens, beside the bytes of a step at the rate of copies."""
    backend = ops.load("cuda:fast", dtype="bfloat16", threads=4)
    batches, context = (1, 16), 4096
    pages = batches[-1] * _pages(context)
    model, cache = accelerator_model.build(
        accelerator_model.KIMI_LINEAR_48B, backend, slots=batches[-1] + 1, pages=pages
    )
    rows = []
    for count in batches:
        case = _case(model, cache, backend, count, context)
        bound_us = accelerator_model.step_bytes(model.config, count, context) / ceilings.copy_bytes_per_s * 1e6
        shares = {"share_of_bound": bound_us / case["step_us"], "ahead_share": bound_us / case["ahead_us"]}
        rows.append({"model": "Kimi-Linear-48B", **case, "bound_us": bound_us, **shares})
    return rows


def services(device: str = "cuda") -> Rows:
    """k3-nano through prefill and decode services: milliseconds a token, and golden prompts that came out right, with
    decode.overlap and without.
    """
    return [asyncio.run(_served(device, overlaps=overlaps)) for overlaps in (False, True)]


async def _served(device: str, *, overlaps: bool) -> dict[str, Any]:
    overrides = ["model.dtype=float32", f"decode.overlap={str(overlaps).lower()}", "cache.num_slots=65"]
    config = build_config(model=NANO, device=device, draft="none", overrides=overrides)
    golden = json.loads((NANO / "golden.json").read_text())["prompts"]
    row: dict[str, Any] = {"model": "k3-nano float32, services", "overlaps": overlaps}
    async with Stack(config) as stack, AsyncClient(stack.decode_endpoints) as client:

        async def one(place: int, num_tokens: int) -> Completion:
            ids = golden[place % len(golden)]["ids"]
            options: Options = {"max_tokens": num_tokens, "ignore_eos": True, **GREEDY}
            return await client.generate(tokens=ids, **options).result()

        done = await asyncio.gather(*(one(place, 48) for place in range(len(golden))))
        pairs = zip(done, golden, strict=True)
        row["golden"] = sum(list(own.samples[0].token_ids) == it["continuation_ids"] for own, it in pairs)
        for count in (1, 16, 64):
            rounds = []
            for _ in range(4):
                done = await asyncio.gather(*(one(place, 128) for place in range(count)))
                rounds.append(statistics.median(own.timings.tpot_ms for own in done if own.timings is not None))
            row[f"tpot_ms_{count}"] = statistics.median(rounds[1:])
    return row


def _pages(context: int) -> int:
    """Of a sample, with the one to grow into that admission wants free."""
    return (context + STEPS) // PAGE + 2


def _case(model: Any, cache: Any, backend: Any, count: int, context: int) -> dict[str, Any]:
    """Microseconds from step to step, medians over rounds that alternate; with a kernel at work, and the rest."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    runner = ModelRunner(model, cache, backend)
    tokens: dict[bool, list[list[int]]] = {}
    steps: dict[bool, list[float]] = {False: [], True: []}
    try:
        for _ in range(ROUNDS + 1):
            for is_ahead, medians in steps.items():
                tokens[is_ahead], times = asyncio.run(_run(runner, cache, count, context, is_ahead=is_ahead))
                medians.append(statistics.median(times) * 1e6)
        profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        asyncio.run(_run(runner, cache, count, context, is_ahead=True, around=profiler))
    finally:
        runner.close()
    # Of the first round everything is compiled and captured.
    step_us, ahead_us = (statistics.median(steps[is_ahead][1:]) for is_ahead in (False, True))
    busy_us = sum(end - start for start, end in kernels_of(profiler)) / STEPS
    return {
        "batch": count, "step_us": step_us, "ahead_us": ahead_us, "kernels_us": busy_us,
        "gap_us": step_us - busy_us, "ahead_gap_us": ahead_us - busy_us, "same_tokens": tokens[False] == tokens[True],
        "rounds": {"step": steps[False][1:], "ahead": steps[True][1:]},
    }  # fmt: skip


async def _run(
    runner: ModelRunner,
    cache: Any,
    count: int,
    context: int,
    *,
    is_ahead: bool,
    around: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - does nothing
) -> tuple[list[list[int]], list[float]]:
    """Tokens of each sample, and seconds from the end of a step to the end of the next."""
    scheduler = DecodeScheduler(
        pages=PagePool(cache.spec.num_pages), slots=SlotPool(count), page_size=PAGE, max_batch=count,
        max_waiting=count, max_transfers=count, max_context_tokens=context + STEPS, stop_token_ids=(),
    )  # fmt: skip
    samples = []
    for index in range(count):
        request = GenerateRequest(
            request_id=str(index), prompt=(1,) * context, sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=STEPS),
        )  # fmt: skip
        samples += scheduler.submit(request, retry_after_s=0.0)
    jobs = scheduler.admit(now=0.0)
    assert len(jobs) == count
    for place, job in enumerate(jobs):
        assert job.lead.slot is not None
        cache.clear_slot(job.lead.slot)
        row = torch.zeros(cache.spec.vocab_size)
        row[100 + place] = 1.0
        cache.set_logits(job.lead.slot, row)
        scheduler.landed(job)
    ends: list[float] = []

    def book(batch: DecodeBatch, output: StepOutput) -> None:
        assert not output.failed, output.failed
        scheduler.commit(batch, output)
        ends.append(time.perf_counter())

    pipeline = StepPipeline(
        scheduler=scheduler, runner=runner, ahead=runner if is_ahead else None, clock=time.perf_counter
    )
    with around:
        while (batch := scheduler.schedule()) is not None:
            await pipeline.run(batch, None, book)
    outputs = [sample.output for sample in samples]
    return outputs, [after - before for before, after in pairwise(ends[4:])]
