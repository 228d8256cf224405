"""What a decode step of k3-nano waits for the host: the time from step to step through ModelRunner, with greedy tokens,
beside the time in which kernels run, and where the host's time goes."""

import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.accelerator_overlap import kernels_of
from benchmarks.accelerator_services import NANO
from benchmarks.decode_steps import greedy_batch
from k3svc import ops
from k3svc.core.batch import DecodeBatch, SampleSpec
from k3svc.engine.inputs import decode_inputs
from k3svc.engine.runner import ModelRunner
from k3svc.engine.sampler import AskedTokens
from k3svc.model.kimi import Model, cache_spec

PAGE = 64
CONTEXT = 200
BATCHES = (1, 16, 64)
STEPS = 40

Rows = list[dict[str, Any]]


def measure(device: str = "cuda", dtype: str = "float32") -> Rows:
    """Microseconds of a step, medians."""
    backend = ops.load(device, dtype=dtype, threads=1)
    model = Model.load(NANO, backend, lambda _done, _total: None)
    spec = cache_spec(
        model.config,
        num_slots=BATCHES[-1],
        num_pages=BATCHES[-1] * (CONTEXT // PAGE + 1),
        page_size=PAGE,
        kv_dtype=backend.activation_dtype,
    )
    cache = backend.new_cache(spec)
    runner = ModelRunner(model, cache, backend)
    rows = []
    try:
        for count in BATCHES:
            batch = greedy_batch(count, context_tokens=CONTEXT, page_size=PAGE)
            from_step_to_step_us, busy_us = asyncio.run(_steps(runner, batch))
            rows.append(
                {
                    "batch": count,
                    "step_us": from_step_to_step_us,
                    "kernels_us": busy_us,
                    "gap_us": from_step_to_step_us - busy_us,
                    **_parts(model, cache, backend, batch),
                }
            )
    finally:
        runner.close()
    return rows


async def _steps(runner: ModelRunner, batch: DecodeBatch) -> tuple[float, float]:
    """From the end of a step to the end of the next, and of it with a kernel at work."""
    for _ in range(5):
        await runner.decode(batch)
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        await runner.decode(batch)
        times.append(time.perf_counter() - started)
    profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with profiler:
        for _ in range(STEPS):
            await runner.decode(batch)
        torch.cuda.synchronize()
    return statistics.median(times) * 1e6, sum(end - start for start, end in kernels_of(profiler)) / STEPS


def _parts(model: Model, cache: Any, backend: Any, batch: DecodeBatch) -> dict[str, float]:
    """Of the host: inputs made and sent, the step asked for, its logits and tokens asked for, the wait for them."""
    specs = [row.sample for row in batch.rows if row.sample is not None]
    parts: dict[str, list[float]] = {"inputs_us": [], "asking_us": [], "wait_us": [], "tokens_us": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        parts[name].append((time.perf_counter() - started) * 1e6)
        return result

    def ask(ids: Any, meta: Any, rows: Any) -> Any:
        return model.logits(model.forward(ids, meta, cache, "decode")[rows])

    with torch.inference_mode():
        for _ in range(STEPS):
            inputs = timed("inputs_us", partial(decode_inputs, batch, PAGE, backend.device, backend.row_tile))
            logits = timed("asking_us", partial(ask, *inputs))
            timed("wait_us", torch.cuda.synchronize)
            timed("tokens_us", partial(_choose, backend, logits, specs))
    return {name: statistics.median(values) for name, values in parts.items()}


def _choose(backend: Any, logits: torch.Tensor, specs: list[SampleSpec]) -> None:
    AskedTokens(backend, logits, specs).read()
