"""The trained model behind engines in this process, and requests that use every feature of sampling."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from k3svc.core.batch import DecodeBatch, StepOutput
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.events import Delta
from k3svc.core.governor import Governor
from k3svc.core.pages import PagePool
from k3svc.core.prefill_scheduler import PrefillScheduler
from k3svc.core.request import FinishReason, GenerateRequest, SamplingParams, StopParams
from k3svc.core.slots import SlotPool
from k3svc.core.speculation import ReplyTimes, StepTimes, VerifyTimes
from k3svc.engine.decode import DecodeEngine, TextOptions
from k3svc.engine.features import FeatureTap
from k3svc.engine.ports import AheadRunner, Drafter, Fingerprint, StepReader
from k3svc.engine.prefill import PrefillEngine
from k3svc.engine.runner import ModelRunner
from k3svc.engine.settle import VerifyRule
from k3svc.engine.speculator import Speculator
from k3svc.model.kimi import Model, cache_spec
from k3svc.ops import load
from k3svc.ops.table import Ops
from k3svc.testing.network import DirectPeer
from k3svc.text.tokenizer import Tokenizer
from k3svc.transfer.manifest import wire_layout

MODELS = Path(__file__).parents[3] / "models"
NANO = MODELS / "k3-nano"
VOCAB = 4096
MASK = 4080
GAMMA = 5
FEATURE_WIDTH = 256 * 4


STEP_TIMES = VerifyTimes(plain=StepTimes({1: 0.02}), verify=StepTimes({1: 0.02}))


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one engine computes with. A backend serves one engine thread."""

    model: Model
    ops: Ops
    features: FeatureTap


@dataclass(frozen=True, kw_only=True)
class Loaded:
    prefill: Side
    decode: Side
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one sample gave."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[object, ...]
    finish_reason: FinishReason | None
    stopped_by: str


Outputs = Mapping[str, Output]
"""By key of the sample."""


def load_nano(device: str = "reference", dtype: str = "float32") -> Loaded:
    def side() -> Side:
        ops = load(device, dtype=dtype, threads=1)
        tap = FeatureTap.load(MODELS / "k3-nano-dspark", ops)
        return Side(model=Model.load(NANO, ops), ops=ops, features=tap)

    return Loaded(prefill=side(), decode=side(), tokenizer=Tokenizer.load(NANO))


@asynccontextmanager
async def engine(
    loaded: Loaded,
    drafter: Drafter | None,
    *,
    num_pages: int = 160,
    rule: VerifyRule = "exact",
    wrap: Callable[[ModelRunner], AheadRunner] | None = None,
    patience_s: float | None = None,
    governor: Governor | None = None,
    times: VerifyTimes = STEP_TIMES,
) -> AsyncIterator[DecodeEngine]:
    """Decode and prefill engines of the model in this process, each with its pools. `wrap` makes what is asked for
    steps while others run of decode's runner; None: nobody is. patience_s: the longest wait for proposals.
    """
    page_size = 16
    sides = (loaded.prefill, loaded.decode)
    dtype = loaded.decode.ops.activation_dtype
    specs = [
        cache_spec(loaded.decode.model.config, num_slots=16, num_pages=count, page_size=page_size, kv_dtype=dtype)
        for count in (64, num_pages)
    ]
    caches = [side.ops.new_cache(spec) for side, spec in zip(sides, specs, strict=True)]
    runners = [
        ModelRunner(side.model, cache, side.ops, features=side.features, rule=rule)
        for side, cache in zip(sides, caches, strict=True)
    ]
    fingerprint = Fingerprint(protocol=1, model="nano", tokenizer="", wire_layout=wire_layout(specs[0]), variant="")
    prefill = PrefillEngine(
        scheduler=PrefillScheduler(
            pages=PagePool(64),
            slots=SlotPool(16),
            page_size=page_size,
            chunk_tokens=256,
            grid=64,
            max_waiting=512,
            max_waiting_tokens=1 << 20,
            max_prompt_tokens=512,
        ),
        runner=runners[0],
        cache=caches[0],
        fingerprint=fingerprint,
        clock=time.monotonic,
        lease_s=30.0,
        frame_bytes=1 << 20,
    )
    scheduler = DecodeScheduler(
        pages=PagePool(num_pages),
        slots=SlotPool(16),
        page_size=page_size,
        max_batch=16,
        max_waiting=512,
        max_transfers=8,
        max_context_tokens=512,
        stop_token_ids=loaded.tokenizer.stop_token_ids,
    )
    decode = DecodeEngine(
        scheduler=scheduler,
        runner=runners[1],
        ahead=None if wrap is None else wrap(runners[1]),
        cache=caches[1],
        peers=[DirectPeer("prefill", prefill)],
        tokenizer=loaded.tokenizer,
        fingerprint=fingerprint,
        clock=time.monotonic,
        instance="d",
        prefill_attempts=2,
        max_samples=4,
    )
    if drafter is not None:
        decode.speculator = Speculator(
            drafter=drafter,
            fallback=None,
            scheduler=scheduler,
            times=times,
            vocab_size=VOCAB,
            mask_token_id=MASK,
            rule=rule,
            clock=time.monotonic,
            governor=governor,
            replies=None if patience_s is None else ReplyTimes(longest_s=patience_s),
        )
    tasks = [asyncio.create_task(run()) for run in (decode.run, prefill.run)]
    try:
        yield decode
        decode.drain()
        await tasks[0]
        prefill.drain()
        await tasks[1]
        scheduler.check()
        assert (scheduler.pages.num_free, scheduler.slots.num_free) == (num_pages, 16)
        assert decode.speculator is None or decode.speculator.num_followed == 0
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for runner in runners:
            runner.close()


def draw_request(index: int, tokenizer: Tokenizer) -> GenerateRequest:
    """Every feature that could see a block: each on in a part of the requests."""
    rng = random.Random(index)
    text = rng.choice(["import os\n", "def read(path):\n    ", "class A:\n", "for i in range(", "x = [1, 2, 3]\n"])
    prompt = tuple(tokenizer.encode(text * rng.randint(1, 6)))
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        logit_bias=rng.choice([{}, {}, {10: 3.0, 267: -2.0}]),
        seed=rng.getrandbits(64),
    )
    max_tokens = rng.randint(1, 24)
    stop = StopParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, min(9, max_tokens)]),
        stop=rng.choice([(), (), ("\n    ", "self"), (")",)]),
        stop_token_ids=rng.choice([frozenset(), frozenset(), frozenset({10, 44, 267})]),
        ignore_eos=rng.random() < 0.2,
    )
    return GenerateRequest(
        request_id=f"r{index}",
        prompt=prompt,
        sampling=params,
        stop=stop,
        n=rng.choice([1, 1, 1, 1, 2]),
        logprobs=rng.choice([None, None, 0, 3]),
    )


async def run_all(decode: DecodeEngine, requests: Sequence[GenerateRequest]) -> Outputs:
    outputs: dict[str, Output] = {}

    async def one(request: GenerateRequest) -> None:
        deltas: dict[int, list[Delta]] = {index: [] for index in range(request.n)}
        async for event in decode.submit(request, TextOptions()):
            if isinstance(event, Delta):
                deltas[event.index].append(event)
            else:
                num_tokens = sum(len(part.token_ids) for parts in deltas.values() for part in parts)
                assert event.usage.completion_tokens == num_tokens
        for index, parts in deltas.items():
            outputs[f"{request.request_id}#{index}"] = Output(
                token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
                text="".join(part.text for part in parts),
                logprobs=tuple(sampled for part in parts for sampled in part.logprobs),
                finish_reason=parts[-1].finish_reason,
                stopped_by=parts[-1].stopped_by,
            )

    await asyncio.gather(*(one(request) for request in requests))
    return outputs


def plainly(request: GenerateRequest) -> GenerateRequest:
    """The request without what holds steps up."""
    free = replace(request.sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    return replace(request, sampling=free, logprobs=None)


def golden(num_tokens: int) -> tuple[list[GenerateRequest], dict[str, list[int]]]:
    """The golden prompts, greedily, and their tokens by key of the sample."""
    prompts = json.loads((NANO / "golden.json").read_text())["prompts"]
    requests = [
        GenerateRequest(
            request_id=f"g{place}",
            prompt=tuple(one["ids"]),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=num_tokens, ignore_eos=True),
        )
        for place, one in enumerate(prompts)
    ]
    return requests, {f"g{place}#0": one["continuation_ids"][:num_tokens] for place, one in enumerate(prompts)}


def lasting(request: GenerateRequest, num_tokens: int, num_samples: int = 1) -> GenerateRequest:
    """The request with samples that go on for so many tokens, whatever they are, and hold no step up."""
    return replace(plainly(request), stop=StopParams(max_tokens=num_tokens, ignore_eos=True), n=num_samples)


def most_begun(requests: Sequence[GenerateRequest], *, num_preemptions: int | None = None) -> int:
    """How many steps can be asked for with none in flight, however slow device, host and hand-offs are: one for each
    hand-off that landed, one after each step of a request that holds steps up, and, where pages are short, one for
    each sample that gives them up or ends. None: there are pages for all.
    """
    held_up = sum(request.stop.max_tokens or 0 for request in requests if request != plainly(request))
    if num_preemptions is None:
        return len(requests) + held_up
    return len(requests) + held_up + sum(request.n for request in requests) + 2 * num_preemptions


class Asked:
    """Counts what a runner is asked for."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_ahead = 0
        """Of them, those with rows whose token was not known."""
        self.num_begun = 0
        """Of them, those that were asked for with none in flight."""
        self._num_in_flight = 0

    def over(self, runner: ModelRunner) -> "Asked":
        self._runner = runner
        return self

    def ask(self, batch: DecodeBatch) -> StepReader:
        self.num_steps += 1
        self.num_ahead += any(row.token_id is None for row in batch.rows)
        self.num_begun += self._num_in_flight == 0
        self._num_in_flight += 1
        reader = self._runner.ask(batch)

        async def read() -> StepOutput:
            try:
                return await reader()
            finally:
                self._num_in_flight -= 1

        return read
