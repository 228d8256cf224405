"""How much of the copying of hand-offs lies under the kernels of steps, by the trace of torch.profiler: a prompt whose
state leaves while it is computed, and states that land while decode steps run."""

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import accelerator_model
from benchmarks.accelerator_staging import FRAME_BYTES, Taken
from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow, SampleSpec
from k3svc.core.request import SamplingParams
from k3svc.engine.runner import ModelRunner
from k3svc.ops.cuda.cache import CudaCache
from k3svc.ops.table import Ops
from k3svc.rpc.process import SWITCH_INTERVAL_S
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import Frame, StateManifest, build_manifest
from k3svc.transfer.outbox import Outbox

EIGHT_LAYERS = accelerator_model.KIMI_LINEAR_48B | {
    "num_hidden_layers": 8,
    "linear_attn_config": {
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7],
    },
}  # fmt: skip
"""The first eight layers of Kimi-Linear-48B."""
PROMPT_TOKENS = 8192
DECODE_ROWS = 15
DECODE_CONTEXT = 1024
GREEDY = SamplingParams(temperature=0.0)
LANDINGS = 3
GAP_US = 20.0
"""Kernels with less than this between them are of one step; a step that waits for the host has more before it."""
ROUNDS = 5

Rows = list[dict[str, Any]]
Span = tuple[float, float]


def measure(ops: Ops, tree: dict[str, Any] = EIGHT_LAYERS, *, tokens: int = PROMPT_TOKENS) -> Rows:
    """Milliseconds with and without copies beside, and the share of the time of copies in which a kernel ran."""
    prompt_pages = tokens // accelerator_model.PAGE + 1
    row_pages = DECODE_CONTEXT // accelerator_model.PAGE + 1
    slots, pages = DECODE_ROWS + 2, prompt_pages + DECODE_ROWS * row_pages
    model, cache = accelerator_model.build(tree, ops, slots=slots, pages=pages)
    runner = ModelRunner(model, cache, ops)
    # As in the services: who waits for Python waits no longer than that.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        return asyncio.run(Rig(runner, cache, tokens, prompt_pages, row_pages).measure())
    finally:
        runner.close()


class Rig:
    """One prompt in slot 1, whose state lands in slot 2 and the same pages, and decode rows in the slots after."""

    def __init__(self, runner: ModelRunner, cache: CudaCache, tokens: int, prompt_pages: int, row_pages: int) -> None:
        self._runner = runner
        self._cache = cache
        self._tokens = tokens
        self._table = list(range(1, prompt_pages + 1))
        prompt = [7 * i % 3000 for i in range(tokens)]
        self._prompt = ExtendBatch(
            rows=[ExtendRow(key="", slot=1, block_table=self._table, token_ids=prompt, start=0, is_last=True)]
        )
        firsts = range(prompt_pages + 1, prompt_pages + 1 + DECODE_ROWS * row_pages, row_pages)
        self._decode = DecodeBatch(
            rows=[
                DecodeRow(
                    key=str(index),
                    slot=index + 3,
                    block_table=list(range(first, first + row_pages)),
                    token_id=5 + index,
                    position=DECODE_CONTEXT,
                    sample=SampleSpec(params=GREEDY, sample_index=0, position=DECODE_CONTEXT + 1, counts=None),
                )
                for index, first in enumerate(firsts)
            ]
        )
        self._frames: list[Frame] = []

    async def measure(self) -> Rows:
        await self._check()
        rows = []
        for what, alone, together, kind in (
            (f"prompt of {self._tokens} tokens", self._prompt_alone, self._prompt_that_leaves, "DtoH"),
            (f"decode of {DECODE_ROWS}", self._steps_alone, self._steps_beside_landings, "HtoD"),
        ):
            for call in (alone, together):
                await call()
            row = {"what": what, "ms": await _median_ms(alone), "ms_with_copies": await _median_ms(together)}
            profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            with profiler:
                await together()
                torch.cuda.synchronize()
            rows.append(row | _traced(profiler, kind))
        return rows

    async def _check(self) -> None:
        """Frames leave while the prompt is computed; their bytes are those of the pools afterwards."""
        outbox, frames = self._outbox(), self._frames

        def take() -> None:
            while new := outbox.frames(len(frames)):
                frames.extend(replace(frame, data=memoryview(bytes(frame.data))) for frame in new)

        def add(layer: int) -> None:
            outbox.add_layer(layer, 0, self._tokens)
            take()

        await self._runner.extend(self._prompt, add)
        outbox.add_logits()
        take()
        torch.cuda.synchronize()
        staging, self._cache.staging = self._cache.staging, None
        for frame in frames:
            assert outbox.frames(frame.sequence)[0].crc32c == frame.crc32c, f"other bytes left in {frame.sequence}"
        self._cache.staging = staging

    async def _prompt_alone(self) -> float:
        return (await self._runner.extend(self._prompt, lambda _layer: None)).compute_s

    async def _prompt_that_leaves(self) -> float:
        outbox, has_news, sequence = self._outbox(), asyncio.Event(), 0

        def add(layer: int) -> None:
            outbox.add_layer(layer, 0, self._tokens)
            has_news.set()

        step = asyncio.ensure_future(self._runner.extend(self._prompt, add))
        step.add_done_callback(lambda _: has_news.set())
        while not (step.done() and sequence == outbox.num_frames):
            await has_news.wait()
            has_news.clear()
            while frames := outbox.frames(sequence, Taken()):
                sequence = frames[-1].sequence + 1
        return (await step).compute_s

    async def _steps_alone(self) -> float:
        return statistics.median([(await self._runner.decode(self._decode)).compute_s for _ in range(20)])

    async def _steps_beside_landings(self) -> float:
        landing = asyncio.ensure_future(self._land())
        times = []
        while not landing.done():
            times.append((await self._runner.decode(self._decode)).compute_s)
        await landing
        return statistics.median(times)

    async def _land(self) -> None:
        for _ in range(LANDINGS):
            landing = Landing(self._manifest(), self._cache, slot=2, block_table=self._table)
            landing.accept_manifest(landing.expected)
            # A prompt is computed meanwhile.
            await self._runner.decode(self._decode)
            for frame in self._frames:
                landing.accept(frame)
                # Messages come one by one.
                await asyncio.sleep(0)
            landing.finish(len(self._frames))
            landing.close()

    def _manifest(self) -> StateManifest:
        return build_manifest(self._cache.spec, request_id="q", attempt=1, num_tokens=self._tokens)

    def _outbox(self) -> Outbox:
        return Outbox(self._manifest(), self._cache, slot=1, block_table=self._table, frame_bytes=FRAME_BYTES)


def share_under(copies: Sequence[Span], kernels: Sequence[Span]) -> float:
    """Share of the time of copies, (start, end), in which some kernel ran."""
    busy = _joined(kernels)
    under = sum(max(0.0, min(end, last) - max(start, first)) for start, end in copies for first, last in busy)
    return under / sum(end - start for start, end in copies)


def kernels_of(profiler: Any) -> list[Span]:
    """When kernels ran, in microseconds; those that overlap count as one."""
    return _joined([_span(event) for event in _events(profiler) if event.get("cat") == "kernel"])


def _joined(spans: Sequence[Span], gap_us: float = 0.0) -> list[Span]:
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1] + gap_us:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _events(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


async def _median_ms(call: Callable[[], Awaitable[float]]) -> float:
    return 1e3 * statistics.median([await call() for _ in range(ROUNDS)])


def _traced(profiler: Any, kind: str) -> dict[str, Any]:
    events = _events(profiler)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    streams = {event["args"]["stream"] for event in kernels}
    # What a step sends for itself travels on its own stream.
    copies = [
        event
        for event in events
        if event.get("cat") == "gpu_memcpy" and kind in event["name"] and event["args"]["stream"] not in streams
    ]
    seconds = sum(event["dur"] for event in copies) * 1e-6
    num_bytes = sum(event["args"]["bytes"] for event in copies)
    spans, busy = ([_span(event) for event in own] for own in (copies, kernels))
    return {
        "copies": len(copies),
        "mb": num_bytes / 1e6,
        "copy_ms": seconds * 1e3,
        "gb_per_s_of_a_copy": num_bytes / seconds / 1e9,
        "share_under_kernels": share_under(spans, busy),
        "share_under_steps": share_under(spans, _joined(busy, GAP_US)),
        "share_before_the_last_kernel": share_under(spans, [(min(busy)[0], max(end for _, end in busy))]),
        "share_of_time_with_kernels": _share_of_time(_joined(busy)),
        "share_of_time_with_steps": _share_of_time(_joined(busy, GAP_US)),
    }


def _share_of_time(busy: Sequence[Span]) -> float:
    return sum(end - start for start, end in busy) / (busy[-1][1] - busy[0][0])
