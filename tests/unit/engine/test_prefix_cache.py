"""A prefill engine with a prefix cache: what it hands over, what it computes, and what it leaves behind.

The fake model's tokens depend on every byte of state and rows, so a wrong hit is a wrong token.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from k3svc import ops
from k3svc.config import CacheSection, load_config
from k3svc.core.prefill_scheduler import PrefillScheduler
from k3svc.core.prefix_cache import PrefixCache
from k3svc.engine.build import build_prefill, num_snapshots
from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.engine.prefill import PrefillEngine
from k3svc.errors import EngineFault, InvalidRequest, K3svcError, ResourceExhausted
from k3svc.testing.fakes import VOCAB, FakeRunner, features
from k3svc.testing.virtual import run_virtual
from k3svc.text.tokenizer import Tokenizer
from k3svc.transfer.manifest import Frame, PrefillDone, StateManifest
from tests.unit.engine.engines import FINGERPRINT, collect, make_prefill, read, request, run_prefill, want, world
from tests.unit.engine.test_prompt_features import WINDOW, Sink

NANO = Path(__file__).parents[3] / "models" / "k3-nano"
PROMPT = tuple((3 * i * i) % VOCAB for i in range(150))


def call(name: str, prompt: tuple[int, ...] = PROMPT, **options: object) -> PrefillCall:
    return PrefillCall(request_id=name, attempt=1, prompt=prompt, fingerprint=FINGERPRINT, **options)  # type: ignore[arg-type]


def landed(events: list[HandoffEvent]) -> tuple[dict[str, bytes], PrefillDone]:
    """Tensors as decode puts them together, and the end."""
    manifest, done = events[0], events[-1]
    assert isinstance(manifest, StateManifest)
    assert isinstance(done, PrefillDone)
    data = [bytearray(spec.nbytes) for spec in manifest.tensors]
    for event in events[1:-1]:
        assert not isinstance(event, StateManifest | PrefillDone)
        for frame in event:
            data[frame.tensor][frame.offset : frame.offset + frame.nbytes] = frame.data
    return {spec.name: bytes(value) for spec, value in zip(manifest.tensors, data, strict=True)}, done


async def take(engine: PrefillEngine, wanted: PrefillCall) -> tuple[dict[str, bytes], PrefillDone]:
    events: list[HandoffEvent] = []
    async for event in engine.open(wanted):
        # Frames view pool memory, which another prompt may write to later.
        if isinstance(event, StateManifest | PrefillDone):
            events.append(event)
        else:
            events.append([copied(frame) for frame in event])
    engine.release(wanted.request_id, wanted.attempt)
    return landed(events)


def copied(frame: Frame) -> Frame:
    return replace(frame, data=memoryview(bytes(frame.data)))


def cache_of(engine: PrefillEngine) -> PrefixCache:
    cache = engine.scheduler.cache
    assert cache is not None
    return cache


def test_a_hit_hands_over_the_same_bytes_and_computes_the_rest_alone() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        cold, done = await take(engine, call("a"))
        assert (done.cached_tokens, runner.num_extend_tokens) == (0, 150)
        warm, done = await take(engine, call("b"))
        assert (done.cached_tokens, done.chunks, runner.num_extend_tokens) == (144, 1, 156)
        assert warm == cold
        load = engine.load()
        assert (load.prefix_queried_tokens, load.prefix_hit_tokens, load.num_tokens) == (300, 144, 156)
        assert (load.prefix_pages, load.free_pages) == (9, load.total_pages)

    run_prefill(scenario, snapshots=8)


def test_shared_rows_leave_before_the_rest_is_computed() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        await take(engine, call("a"))
        runner.step_s = lambda: 1.0
        handoff = engine.open(call("b"))
        begun = asyncio.get_running_loop().time()
        got = 0
        manifest = await anext(handoff)
        assert isinstance(manifest, StateManifest)
        rows = sum(spec.nbytes // spec.shape[0] * 144 for spec in manifest.tensors if spec.name.startswith("mla"))
        while got < rows:
            event = await anext(handoff)
            assert not isinstance(event, StateManifest | PrefillDone)
            got += sum(frame.nbytes for frame in event)
        assert asyncio.get_running_loop().time() - begun < 0.25, "before the first layer of the step has ended"
        await read(handoff)
        engine.release("b", 1)

    run_prefill(scenario, snapshots=8)


def test_prompts_that_wait_go_on_from_those_before_them() -> None:
    """They came at the same time; the first of them made what the others need."""

    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        results = await asyncio.gather(*(take(engine, call(f"r{i}")) for i in range(4)))
        # The second one filled up a step of the first.
        assert [done.cached_tokens for _, done in results] == [0, 64, 144, 144]
        assert all(tensors == results[0][0] for tensors, _ in results)
        assert runner.num_extend_tokens == 150 + 86 + 6 + 6

    run_prefill(scenario, snapshots=8)


def test_tokens_are_those_without_a_cache(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with world(tokenizer, snapshots=4, chunk_tokens=32, num_pages=64) as here:
            base = request("base", 130)
            for index in range(8):
                size = 40 + 11 * index
                prompt = (*base.prompt[: 16 * index], *request(f"t{index}", size).prompt)[:140]
                req = request(f"q{index}", size, prompt=prompt)
                assert (await collect(here.decode, req))[0] == want(req)
                assert (await collect(here.decode, request(f"again{index}", 1, prompt=prompt)))[0] == want(
                    request(f"again{index}", 1, prompt=prompt)
                )
                here.check()
            assert here.prefill[0].load().prefix_hit_tokens > 500

    run_virtual(scenario())


def test_hits_shorten_the_wait_that_is_expected() -> None:
    """Steps of a second: 48 tokens a second computed; with the hit that follows it is 73, and six prompts wait."""

    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        runner.step_s = lambda: 1.0
        await take(engine, call("a"))
        await take(engine, call("b"))
        tasks = [asyncio.create_task(take(engine, call(f"r{i}"))) for i in range(10)]
        await asyncio.sleep(0.5)
        assert engine.scheduler.waiting_tokens == 6 * len(PROMPT)
        with pytest.raises(ResourceExhausted, match="deadline"):
            engine.open(call("soon", remaining_s=900 / 74))
        engine.open(call("later", remaining_s=900 / 73))
        engine.release("later", 1)
        await asyncio.gather(*tasks)

    run_prefill(scenario, snapshots=16)


@pytest.mark.parametrize("is_isolated", [True, False])
def test_tenants_find_their_own_prompts_only_unless_told_to_share(is_isolated: bool) -> None:
    async def scenario(engine: PrefillEngine, _runner: FakeRunner) -> None:
        await take(engine, call("a", tenant="alice"))
        _, bob = await take(engine, call("b", tenant="bob"))
        _, alice = await take(engine, call("c", tenant="alice"))
        assert bob.cached_tokens == (0 if is_isolated else 144)
        assert alice.cached_tokens == 144
        with pytest.raises(InvalidRequest, match="tenant"):
            engine.open(call("d", tenant="x" * 2000))

    run_prefill(scenario, snapshots=8, is_isolated=is_isolated)


def test_a_failed_step_leaves_nothing_to_go_on_from() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        cold, _ = await take(engine, call("a"))
        assert cache_of(engine).num_pages
        runner.fail_next = True
        with pytest.raises(EngineFault):
            await take(engine, call("b"))
        assert cache_of(engine).num_pages == 0
        again, done = await take(engine, call("c"))
        assert done.cached_tokens == 0
        assert again == cold

    run_prefill(scenario, snapshots=8)


@pytest.mark.parametrize(("after_s", "left"), [(0.5, 0), (1.5, 64), (2.2, 112)])
def test_a_prompt_cancelled_in_the_middle_leaves_what_it_had_computed(after_s: float, left: int) -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        runner.step_s = lambda: 1.0
        task = asyncio.create_task(take(engine, call("a")))
        await asyncio.sleep(after_s)
        engine.release("a", 1)
        with suppress(K3svcError):
            await task
        engine.scheduler.check()
        cold, done = await take(engine, call("b"))
        assert done.cached_tokens == left
        engine.flush_cache()
        assert (await take(engine, call("c")))[0] == cold

    run_prefill(scenario, snapshots=8)


def test_prompts_have_their_memory_whatever_is_cached() -> None:
    """Ten pages each, of twelve."""

    async def scenario(engine: PrefillEngine, _runner: FakeRunner) -> None:
        for index in range(6):
            prompt = tuple((index + i) % VOCAB for i in range(160))
            _, done = await take(engine, call(f"r{index}", prompt))
            assert done.cached_tokens == 0
            engine.scheduler.check()
        assert engine.load().prefix_evicted_pages >= 5 * 7

    run_prefill(scenario, snapshots=8, num_pages=12)


@pytest.mark.parametrize("length", [65, 149, 150])
def test_the_features_of_a_hit_are_complete(length: int) -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        sink = Sink()
        engine.features = sink
        prompt = PROMPT[:length]
        await take(engine, call("a", draft_ticket="a"))
        computed = runner.num_extend_tokens
        await take(engine, call("b", prompt, draft_ticket="b"))
        assert runner.num_extend_tokens - computed <= 16, "it went on from the cache"
        oldest = max(0, length - WINDOW)
        stream = sink.streams[1]
        assert stream.start == ("b", 1, length)
        assert stream.rows[0][0] == oldest
        assert b"".join(data for _, data in stream.rows) == features(prompt[oldest:], oldest)
        assert [start for start, _ in stream.rows[1:]] == [
            start + len(data) // 8 for start, data in stream.rows[:-1]
        ], "each where the one before ended"
        assert stream.closes >= 1

    run_prefill(scenario, snapshots=16)


def test_a_prompt_whose_features_nobody_made_is_computed_as_far_as_they_are_wanted() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        sink = Sink()
        engine.features = sink
        await take(engine, call("a"))
        assert not sink.streams
        _, done = await take(engine, call("b", draft_ticket="b"))
        assert done.cached_tokens <= len(PROMPT) - WINDOW
        assert b"".join(data for _, data in sink.streams[0].rows) == features(PROMPT[50:], 50)
        # Its own are kept.
        _, done = await take(engine, call("c", draft_ticket="c"))
        assert done.cached_tokens == 144
        assert b"".join(data for _, data in sink.streams[1].rows) == features(PROMPT[50:], 50)

    run_prefill(scenario, snapshots=16)


@pytest.mark.parametrize(
    ("prefix", "dtype", "count"),
    [("auto", "float32", 7), ("auto", "bfloat16", 0), ("on", "bfloat16", 7), ("off", "float32", 0)],
)
def test_by_default_the_cache_is_on_where_it_changes_no_bit(prefix: str, dtype: str, count: int) -> None:
    backend = ops.load("reference", dtype=dtype, threads=1)
    assert backend.batch_invariant == (dtype == "float32")
    assert num_snapshots(CacheSection(prefix=prefix, prefix_snapshots=7), backend) == count


def test_states_lie_where_pages_and_chunks_end() -> None:
    """Pages of 48 tokens and a grid of 64: at multiples of 192."""
    settings = ["model.device=reference", "cache.page_size=48", "cache.num_pages=32", "cache.num_slots=2"]
    settings += ["cache.prefix_interval=65", "cache.prefix_snapshots=3"]
    role = build_prefill(load_config(None, [f"model.path={NANO}", *settings]), lambda *_: None)
    role.loaded.runner.close()
    cache = cache_of(role.engine)
    assert (cache.interval, cache.slots.num_slots, role.loaded.cache.spec.num_slots) == (192, 3, 5)


def test_a_cache_with_another_grid_is_refused() -> None:
    engine, _ = run_virtual(_made())
    scheduler = engine.scheduler
    assert isinstance(scheduler, PrefillScheduler)
    with pytest.raises(AssertionError, match="snapshots every 16 tokens"):
        PrefillScheduler(
            pages=scheduler.pages,
            slots=scheduler.slots,
            page_size=16,
            chunk_tokens=64,
            grid=32,
            max_waiting=1,
            max_waiting_tokens=1,
            max_prompt_tokens=1,
            cache=scheduler.cache,
        )


async def _made() -> tuple[PrefillEngine, FakeRunner]:
    return make_prefill(snapshots=1)
