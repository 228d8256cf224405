"""The trained model with every stub drafter: tokens, texts and bits of log-probabilities are those of plain decode."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.events import Delta, SpeculationStats
from k3svc.core.pages import PagePool
from k3svc.core.prefill_scheduler import PrefillScheduler
from k3svc.core.request import FinishReason, GenerateRequest, SamplingParams, StopParams
from k3svc.core.slots import SlotPool
from k3svc.core.speculation import StepTimes, VerifyTimes
from k3svc.engine.decode import DecodeEngine, TextOptions
from k3svc.engine.features import FeatureTap
from k3svc.engine.ngram import NgramDrafter
from k3svc.engine.ports import Drafter, DraftOpen, Fingerprint
from k3svc.engine.prefill import PrefillEngine
from k3svc.engine.runner import ModelRunner
from k3svc.engine.settle import VerifyRule
from k3svc.engine.speculator import Speculator
from k3svc.model.kimi import Model, cache_spec
from k3svc.ops import load
from k3svc.ops.table import Ops
from k3svc.testing.drafters import (
    DeadDrafter,
    FlakyDrafter,
    LiarDrafter,
    OracleDrafter,
    RandomDrafter,
    RepeatLastDrafter,
    SlowDrafter,
    StaleDrafter,
)
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
class Loaded:
    model: Model
    ops: Ops
    tokenizer: Tokenizer
    features: FeatureTap


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


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    ops = load(device="reference", dtype="float32", threads=1)
    return Loaded(
        model=Model.load(NANO, ops),
        ops=ops,
        tokenizer=Tokenizer.load(NANO),
        features=FeatureTap.load(MODELS / "k3-nano-dspark", ops),
    )


@asynccontextmanager
async def engine(
    loaded: Loaded, drafter: Drafter | None, *, num_pages: int = 160, rule: VerifyRule = "exact"
) -> AsyncIterator[DecodeEngine]:
    """Decode and prefill engines of the model in this process, each with its pools."""
    page_size = 16
    specs = [cache_spec(loaded.model.config, num_slots=16, num_pages=p, page_size=page_size) for p in (64, num_pages)]
    caches = [loaded.ops.new_cache(spec) for spec in specs]
    runners = [ModelRunner(loaded.model, cache, loaded.ops, features=loaded.features, rule=rule) for cache in caches]
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
            times=STEP_TIMES,
            vocab_size=VOCAB,
            mask_token_id=MASK,
            rule=rule,
            clock=time.monotonic,
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


def drafters(plain: Outputs) -> dict[str, Callable[[], Drafter]]:
    def truth(opened: DraftOpen) -> Sequence[int]:
        return [*opened.known[:-1], *plain[opened.key].token_ids]

    def oracle(epsilon: float = 0.0) -> OracleDrafter:
        return OracleDrafter(truth, epsilon=epsilon, vocab_size=VOCAB, num_proposals=GAMMA, feature_width=FEATURE_WIDTH)

    return {
        "oracle": oracle,
        "often wrong": lambda: oracle(0.3),
        "random": lambda: RandomDrafter(vocab_size=VOCAB, num_proposals=GAMMA),
        "repeat-last": lambda: RepeatLastDrafter(num_proposals=GAMMA),
        "ngram": lambda: NgramDrafter(num_proposals=GAMMA),
        "slow": lambda: SlowDrafter(oracle(0.1), delay_s=0.01),
        "flaky": lambda: FlakyDrafter(oracle(0.1), seed=5),
        "liar": lambda: LiarDrafter(oracle(0.1), vocab_size=VOCAB, mask_token_id=MASK),
        "stale": lambda: StaleDrafter(oracle()),
        "dead": lambda: DeadDrafter(oracle(), commits=9),
        "dead and nobody knows": lambda: DeadDrafter(oracle(), commits=9, is_known=False),
    }


NAMES = tuple(drafters({}))


class Plain:
    """Plain decode of the first requests, computed once."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._outputs: dict[tuple[int, int], Outputs] = {}

    async def of(self, count: int, num_tokens: int) -> tuple[list[GenerateRequest], Outputs]:
        """num_tokens: of each output; 0: as drawn."""
        requests = [draw_request(index, self.loaded.tokenizer) for index in range(count)]
        if num_tokens:
            stop = StopParams(max_tokens=num_tokens, ignore_eos=True)
            requests = [replace(request, stop=stop) for request in requests]
        if (count, num_tokens) not in self._outputs:
            async with engine(self.loaded, None) as decode:
                self._outputs[count, num_tokens] = await run_all(decode, requests)
        return requests, self._outputs[count, num_tokens]


@pytest.fixture(scope="module")
def plain(loaded: Loaded) -> Plain:
    return Plain(loaded)


async def compare(
    plain: Plain, name: str, count: int, *, num_tokens: int = 0, num_pages: int = 160
) -> tuple[SpeculationStats, int]:
    """What speculation did, and how often somebody was preempted."""
    requests, expected = await plain.of(count, num_tokens)
    async with engine(plain.loaded, drafters(expected)[name](), num_pages=num_pages) as decode:
        assert await run_all(decode, requests) == expected
        assert decode.speculator is not None
        stats = decode.speculator.total.stats()
        assert stats.steps_with_drafts > 0, "nothing was verified"
        return stats, decode.load().preemptions


@pytest.mark.parametrize("name", NAMES)
async def test_outputs_are_those_of_plain_decode(plain: Plain, name: str) -> None:
    await compare(plain, name, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
async def test_two_hundred_outputs_are_those_of_plain_decode(plain: Plain, name: str) -> None:
    stats, _ = await compare(plain, name, 200)
    assert stats.steps_with_drafts > 100 or name.startswith(("dead", "slow"))
    if name == "oracle":
        assert stats.accepted == stats.proposed and (stats.acceptance_length or 0.0) > 3.0
    if name == "random":
        assert stats.accepted < 0.05 * stats.proposed


async def test_preemption_and_drafts_together_change_nothing(plain: Plain) -> None:
    stats, preemptions = await compare(plain, "often wrong", 5, num_tokens=60, num_pages=16)
    assert preemptions > 0 and stats.accepted > 0
