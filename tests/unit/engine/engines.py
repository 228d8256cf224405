"""Engines on virtual time for the tests of this folder: a decode engine, its prefill engines, and requests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.events import Finished
from k3svc.core.governor import Governor
from k3svc.core.pages import PagePool
from k3svc.core.prefill_scheduler import PrefillScheduler
from k3svc.core.prefix_cache import PrefixCache
from k3svc.core.request import GenerateRequest, SamplingParams, StopParams
from k3svc.core.slots import SlotPool
from k3svc.core.speculation import ReplyTimes, StepTimes, VerifyTimes
from k3svc.engine.decode import DecodeEngine, TextOptions
from k3svc.engine.ports import Drafter, Fingerprint, HandoffEvent, PrefillCall
from k3svc.engine.prefill import PrefillEngine
from k3svc.engine.speculator import Speculator
from k3svc.testing.fakes import VOCAB, FakeCache, FakeRunner, expected_tokens, fake_spec
from k3svc.testing.network import DirectPeer
from k3svc.testing.virtual import run_virtual
from k3svc.text.tokenizer import Tokenizer
from k3svc.transfer.manifest import wire_layout

FINGERPRINT = Fingerprint(protocol=1, model="m", tokenizer="t", wire_layout=wire_layout(fake_spec()), variant="f")
FREE_ROWS = VerifyTimes(plain=StepTimes({1: 0.001, 512: 0.001}), verify=StepTimes({1: 0.001, 512: 0.001}))
"""Steps that take as long with drafts as without."""
NO_TEXT = TextOptions(enabled=False)


@dataclass(kw_only=True)
class World:
    decode: DecodeEngine
    prefill: list[PrefillEngine]
    peers: list[DirectPeer]
    runner: FakeRunner
    prefill_runners: list[FakeRunner]
    tasks: "list[asyncio.Task[None]]"
    """The step loops, decode first."""
    speculator: Speculator | None

    def check(self) -> None:
        self.decode.scheduler.check()
        for engine in self.prefill:
            engine.scheduler.check()

    def assert_idle(self) -> None:
        """Nothing is held anywhere."""
        self.check()
        for load in (self.decode.load(), *(engine.load() for engine in self.prefill)):
            assert (load.running, load.waiting, load.in_transfer) == (0, 0, 0)
            assert (load.free_pages, load.free_slots) == (load.total_pages, load.total_slots)


def make_prefill(
    *,
    num_slots: int = 8,
    num_pages: int = 64,
    chunk_tokens: int = 64,
    lease_s: float = 5.0,
    max_waiting: int = 64,
    page_size: int = 16,
    snapshots: int = 0,
    is_isolated: bool = True,
) -> tuple[PrefillEngine, FakeRunner]:
    """`snapshots`: states that its prefix cache keeps; 0: it has none."""
    spec = fake_spec(num_slots=num_slots + snapshots, num_pages=num_pages, page_size=page_size)
    cache = FakeCache(spec)
    runner = FakeRunner(cache)
    pages = PagePool(num_pages)
    slots = SlotPool(snapshots, first=num_slots + 1)
    scheduler = PrefillScheduler(
        pages=pages,
        slots=SlotPool(num_slots),
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        grid=16,
        max_waiting=max_waiting,
        max_waiting_tokens=1 << 20,
        max_prompt_tokens=1024,
        cache=PrefixCache(pages=pages, slots=slots, page_size=page_size, interval=16) if snapshots else None,
    )
    engine = PrefillEngine(
        scheduler=scheduler,
        runner=runner,
        cache=cache,
        fingerprint=FINGERPRINT,
        clock=asyncio.get_running_loop().time,
        lease_s=lease_s,
        frame_bytes=512,
        is_isolated=is_isolated,
    )
    return engine, runner


@asynccontextmanager
async def world(
    tokenizer: Tokenizer,
    *,
    prefills: int = 1,
    num_slots: int = 8,
    num_pages: int = 32,
    max_waiting: int = 64,
    max_batch: int = 8,
    prefill_attempts: int = 3,
    stop_token_ids: Sequence[int] = (),
    max_unread_tokens: int = 1000,
    reader_timeout_s: float = 60.0,
    drafter: Drafter | None = None,
    fallback: Drafter | None = None,
    governor: Governor | None = None,
    times: VerifyTimes | None = None,
    patience_s: float | None = None,
    overlap: bool = False,
    **prefill_options: float,
) -> AsyncIterator[World]:
    """Engines running on the current loop; at the end everything must be whole and stopped."""
    made = [make_prefill(**prefill_options) for _ in range(prefills)]  # type: ignore[arg-type]
    peers = [DirectPeer(f"prefill{i}", engine) for i, (engine, _) in enumerate(made)]
    cache = FakeCache(fake_spec(num_slots=num_slots, num_pages=num_pages))
    runner = FakeRunner(cache)
    clock = asyncio.get_running_loop().time
    scheduler = DecodeScheduler(
        pages=PagePool(num_pages),
        slots=SlotPool(num_slots),
        page_size=16,
        max_batch=max_batch,
        max_waiting=max_waiting,
        max_transfers=4,
        max_context_tokens=400,
        stop_token_ids=stop_token_ids,
    )
    speculator = None
    if drafter is not None:
        speculator = Speculator(
            drafter=drafter,
            fallback=fallback,
            scheduler=scheduler,
            times=times or FREE_ROWS,
            vocab_size=VOCAB,
            mask_token_id=VOCAB - 1,
            rule="exact",
            clock=clock,
            governor=governor,
            replies=None if patience_s is None else ReplyTimes(longest_s=patience_s),
        )
    decode = DecodeEngine(
        scheduler=scheduler,
        runner=runner,
        ahead=runner if overlap else None,
        cache=cache,
        peers=peers,
        tokenizer=tokenizer,
        fingerprint=FINGERPRINT,
        clock=clock,
        instance="d0",
        prefill_attempts=prefill_attempts,
        max_samples=4,
        max_unread_tokens=max_unread_tokens,
        reader_timeout_s=reader_timeout_s,
    )
    decode.speculator = speculator
    here = World(
        decode=decode,
        prefill=[engine for engine, _ in made],
        peers=peers,
        runner=runner,
        prefill_runners=[runner for _, runner in made],
        tasks=[asyncio.create_task(run()) for run in (decode.run, *(engine.run for engine, _ in made))],
        speculator=speculator,
    )
    tasks = here.tasks
    await asyncio.sleep(0)
    try:
        yield here
        decode.drain()
        await tasks[0]
        for engine in here.prefill:
            engine.drain()
        await asyncio.gather(*tasks[1:])
        here.assert_idle()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def request(name: str, size: int, max_tokens: int = 8, **changes: object) -> GenerateRequest:
    seed = sum(name.encode())
    prompt = tuple((seed * 7 + 13 * i * i) % VOCAB for i in range(size))
    made = GenerateRequest(
        request_id=name, prompt=prompt, sampling=SamplingParams(seed=seed), stop=StopParams(max_tokens=max_tokens)
    )
    return replace(made, **changes)  # type: ignore[arg-type]


async def collect(engine: DecodeEngine, req: GenerateRequest) -> dict[int, list[int]]:
    """All tokens by sample, and the invariants of a stream: one finish reason a sample, Finished last."""
    stream = engine.submit(req, NO_TEXT)
    tokens: dict[int, list[int]] = {index: [] for index in range(req.n)}
    reasons: list[int] = []
    finished = 0
    async for event in stream:
        assert not finished, "something came after Finished"
        if isinstance(event, Finished):
            finished += 1
            continue
        assert event.index not in reasons, "tokens after the finish reason"
        tokens[event.index] += event.token_ids
        if event.finish_reason is not None:
            reasons.append(event.index)
    assert finished == 1
    assert sorted(reasons) == list(range(req.n))
    return tokens


def want(req: GenerateRequest, count: int = 8, index: int = 0) -> list[int]:
    return expected_tokens(req.prompt, count, seed=req.sampling.seed, index=index)


async def read(handoff: AsyncIterator[HandoffEvent], count: int = 10**9) -> list[HandoffEvent]:
    events = []
    async for event in handoff:
        events.append(event)
        if len(events) == count:
            break
    return events


def run_prefill(scenario: Callable[[PrefillEngine, FakeRunner], Awaitable[None]], **options: float) -> None:
    async def main() -> None:
        engine, runner = make_prefill(**options)  # type: ignore[arg-type]
        task = asyncio.create_task(engine.run())
        try:
            await scenario(engine, runner)
            engine.drain()
            await asyncio.wait_for(task, 1000)
            load = engine.load()
            assert (load.free_pages, load.free_slots) == (load.total_pages, load.total_slots)
            engine.scheduler.check()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run_virtual(main())


def call(attempt: int = 1, size: int = 100, **changes: object) -> PrefillCall:
    made = PrefillCall(
        request_id="q", attempt=attempt, prompt=tuple(i % VOCAB for i in range(size)), fingerprint=FINGERPRINT
    )
    return replace(made, **changes)  # type: ignore[arg-type]
