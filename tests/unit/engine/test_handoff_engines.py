"""Prefill and decode engines together, on virtual time, with a model whose tokens depend on every byte of state."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from k3svc.core.events import Delta, Finished
from k3svc.core.request import FinishReason, GenerateRequest, SamplingParams, StopParams
from k3svc.engine.decode import TextOptions
from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.engine.prefill import PrefillEngine
from k3svc.engine.stream import TokenStream
from k3svc.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Incompatible,
    InvalidRequest,
    K3svcError,
    ResourceExhausted,
    Superseded,
    TransferError,
    Unavailable,
)
from k3svc.testing.fakes import VOCAB, FakeCache, FakeRunner, fake_spec
from k3svc.testing.network import copy_frame
from k3svc.testing.virtual import run_virtual
from k3svc.text.tokenizer import Tokenizer
from k3svc.transfer.manifest import Frame, StateManifest
from tests.unit.engine.engines import (
    FINGERPRINT,
    NO_TEXT,
    World,
    call,
    collect,
    read,
    request,
    run_prefill,
    want,
    world,
)


@pytest.mark.parametrize("chunk_tokens", [16, 48, 256])
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 64, 65, 200])
def test_tokens_do_not_depend_on_chunks(tokenizer: Tokenizer, size: int, chunk_tokens: int) -> None:
    async def main() -> None:
        async with world(tokenizer, chunk_tokens=chunk_tokens) as here:
            req = request("a", size)
            assert (await collect(here.decode, req))[0] == want(req)

    run_virtual(main())


def test_many_requests_share_small_pools(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, num_slots=5, num_pages=20, max_batch=5) as here:
            reqs = [request(f"r{i}", 1 + 37 * i % 120, max_tokens=1 + i % 9) for i in range(40)]
            results = await asyncio.gather(*(collect(here.decode, req) for req in reqs))
            for req, result in zip(reqs, results, strict=True):
                assert result[0] == want(req, req.stop.max_tokens or 0), req.request_id

    run_virtual(main())


def test_preemption_changes_no_token(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, num_slots=4, num_pages=12, max_batch=4) as here:
            reqs = [request(f"p{i}", 30, max_tokens=90) for i in range(4)]
            streams = [here.decode.submit(req, NO_TEXT) for req in reqs]
            preemptions = 0
            for req, stream in zip(reqs, streams, strict=True):
                tokens: list[int] = []
                async for event in stream:
                    if isinstance(event, Delta):
                        tokens += event.token_ids
                    else:
                        preemptions += event.timings.preemptions
                    here.check()
                assert tokens == want(req, 90)
            assert preemptions > 0, "the pools were not small enough to force a preemption"

    run_virtual(main())


def test_samples_of_one_prompt_are_forked(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            for size in (16, 33, 48):
                req = request(f"n{size}", size, n=3)
                result = await collect(here.decode, req)
                assert result == {index: want(req, index=index) for index in range(3)}
            assert len(here.peers[0].calls) == 3, "each prompt is prefilled once"

    run_virtual(main())


def test_generated_tokens_are_absorbed_and_not_sent_again(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            req = request("g", 40, max_tokens=20)
            whole = want(req, 20)
            for cut in (1, 7, 19):
                resumed = replace(req, request_id=f"g{cut}", generated=tuple(whole[:cut]))
                assert (await collect(here.decode, resumed))[0] == whole[cut:]

    run_virtual(main())


def breaks_after(count: int) -> Callable[[HandoffEvent], Sequence[HandoffEvent] | None]:
    """A link that breaks once, after `count` events."""
    left = [count]

    def fault(event: HandoffEvent) -> Sequence[HandoffEvent] | None:
        left[0] -= 1
        return None if left[0] == -1 else [event]

    return fault


async def finished_of(stream: TokenStream) -> Finished:
    """The last event of a stream."""
    *_, last = [event async for event in stream]
    assert isinstance(last, Finished)
    return last


def test_bytes_are_counted_as_they_land(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, chunk_tokens=32) as here:
            seen: list[int] = []

            def look(event: HandoffEvent) -> Sequence[HandoffEvent]:
                seen.append(here.decode.load().handoff_bytes)
                return [event]

            here.peers[0].fault = look
            stream = here.decode.submit(request("h", 150), NO_TEXT)
            total = (await finished_of(stream)).timings.handoff_bytes
            assert here.decode.load().handoff_bytes == total
            assert seen == sorted(seen) and seen[0] == 0
            assert len(set(seen)) > 4, "most of it is known only at the end"
            here.peers[0].fault = breaks_after(5)
            again = here.decode.submit(request("i", 150), NO_TEXT)
            resumed = (await finished_of(again)).timings.handoff_bytes
            assert here.decode.load().handoff_bytes == total + resumed, "frames that landed before a break count once"

    run_virtual(main())


@pytest.mark.parametrize("count", range(12))
def test_a_broken_stream_resumes_with_the_same_attempt(tokenizer: Tokenizer, count: int) -> None:
    async def main() -> None:
        async with world(tokenizer, chunk_tokens=32) as here:
            here.peers[0].fault = breaks_after(count)
            req = request("b", 150)
            assert (await collect(here.decode, req))[0] == want(req)
            calls = here.peers[0].calls
            assert 150 <= here.prefill_runners[0].num_extend_tokens <= 300
            if count >= 2:
                assert [call.attempt for call in calls] == [1, 1]
                assert calls[1].next_sequence > 0
                assert here.prefill_runners[0].num_extend_tokens == 150, "a resumed hand-off computes nothing again"

    run_virtual(main())


def test_a_dead_prefill_service_is_replaced(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, prefills=2) as here:
            here.peers[0].up = False
            reqs = [request(f"x{i}", 70) for i in range(6)]
            results = await asyncio.gather(*(collect(here.decode, req) for req in reqs))
            assert [result[0] for result in results] == [want(req) for req in reqs]
            here.peers[0].up = True

    run_virtual(main())


def test_no_prefill_service_fails_the_request(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            here.peers[0].up = False
            with pytest.raises(Unavailable, match="down"):
                await collect(here.decode, request("u", 5))
            here.assert_idle()

    run_virtual(main())


def spoil(kind: str) -> Callable[[HandoffEvent], Sequence[HandoffEvent] | None]:
    """A link that damages the third batch of frames each time."""
    seen = [0]

    def fault(event: HandoffEvent) -> Sequence[HandoffEvent] | None:
        if not isinstance(event, list):
            return [event]
        seen[0] += 1
        if seen[0] != 3:
            return [event]
        first: Frame = event[0]
        flipped = bytes([first.data[0] ^ 1]) + bytes(first.data[1:])
        return {
            "bit": [[replace(first, data=memoryview(flipped)), *event[1:]]],
            "lost": [],
            "twice": [event, event],
            "swapped": [event[::-1]] if len(event) > 1 else [],
            "late": [[copy_frame(first, sequence=first.sequence + 1)]],
            "overrun": [[copy_frame(first, offset=1 << 40)]],
            "foreign": [[copy_frame(first, tensor=99)]],
        }[kind]

    return fault


@pytest.mark.parametrize("kind", ["bit", "lost", "twice", "swapped", "late", "overrun", "foreign"])
def test_damaged_frames_are_refused_and_sent_again(tokenizer: Tokenizer, kind: str) -> None:
    async def main() -> None:
        async with world(tokenizer, chunk_tokens=32) as here:
            here.peers[0].fault = spoil(kind)
            req = request("c", 150)
            assert (await collect(here.decode, req))[0] == want(req)
            assert len(here.peers[0].calls) > 1, "the damage went unnoticed"

    run_virtual(main())


def test_a_manifest_that_differs_is_refused(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:

            def fault(event: HandoffEvent) -> Sequence[HandoffEvent] | None:
                if isinstance(event, StateManifest):
                    tensors = [replace(event.tensors[0], shape=event.tensors[0].shape[::-1]), *event.tensors[1:]]
                    return [replace(event, tensors=tuple(tensors))]
                return [event]

            here.peers[0].fault = fault
            with pytest.raises(Incompatible, match=r"kda_state\[0\]"):
                await collect(here.decode, request("m", 40))

    run_virtual(main())


OWN_LAYOUT = FINGERPRINT.wire_layout.split("/")


def test_another_fingerprint_is_refused_before_any_byte(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            here.prefill[0].fingerprint = replace(FINGERPRINT, model="other")
            with pytest.raises(Incompatible, match="model"):
                await collect(here.decode, request("f", 40))
            assert here.prefill_runners[0].num_steps == 0
            here.prefill[0].fingerprint = replace(FINGERPRINT, wire_layout=f"bfloat16/{'/'.join(OWN_LAYOUT[1:])}")
            with pytest.raises(Incompatible) as caught:
                await collect(here.decode, request("g", 40))
            assert caught.value.metadata["field"] == "wire_layout"
            assert "model.dtype: prefill has 'bfloat16', decode has 'float32'; start both with" in caught.value.message

    run_virtual(main())


async def cancel_when(here: World, req: GenerateRequest, condition: Callable[[], bool]) -> None:
    stream = here.decode.submit(req, NO_TEXT)
    while not condition():
        await asyncio.sleep(0.0001)
        here.check()
    stream.cancel()
    stream.cancel()
    here.check()
    with pytest.raises(Cancelled):
        async for _ in stream:
            pass


@pytest.mark.parametrize("stage", ["queued", "prefill", "landing", "step"])
def test_cancel_gives_memory_back_at_once(tokenizer: Tokenizer, stage: str) -> None:
    async def main() -> None:
        async with world(tokenizer, chunk_tokens=16) as here:
            decode, prefill = here.decode, here.prefill[0]
            conditions: dict[str, Callable[[], bool]] = {
                "queued": lambda: True,
                "prefill": lambda: prefill.load().num_tokens >= 32,
                "landing": lambda: prefill.load().handoff_bytes > 2000,
                "step": lambda: decode.load().num_tokens >= 2,
            }
            await cancel_when(here, request("k", 150, max_tokens=200), conditions[stage])
            await asyncio.sleep(0.05)
            here.assert_idle()
            req = request("k", 20)
            assert (await collect(decode, req))[0] == want(req), "the id is free again"
            if stage == "prefill":
                assert here.prefill_runners[0].num_extend_tokens <= 32 + 2 * 16 + 32, "prefill went on for nobody"

    run_virtual(main())


def test_abort_ends_the_stream_with_its_reason(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            assert here.decode.abort("nobody") is False
            stream = here.decode.submit(request("a", 40, max_tokens=300), NO_TEXT)
            while here.decode.load().num_tokens < 3:
                await asyncio.sleep(0.001)  # virtual time
            assert here.decode.abort("a") is True
            assert here.decode.abort("a") is False
            events = [event async for event in stream]
            assert isinstance(events[-1], Finished)
            assert isinstance(events[-2], Delta)
            assert events[-2].finish_reason is FinishReason.ABORT

    run_virtual(main())


def test_deadline_ends_the_request(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            now = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded):
                here.decode.submit(request("late", 5), NO_TEXT, deadline=now)
            stream = here.decode.submit(request("slow", 100, max_tokens=200), NO_TEXT, deadline=now + 0.05)
            with pytest.raises(DeadlineExceeded):
                async for _ in stream:
                    pass
            await asyncio.sleep(0.05)
            here.assert_idle()

    run_virtual(main())


def test_bad_requests_leave_nothing_behind(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, max_waiting=2, num_slots=1, max_batch=1) as here:
            bad: list[tuple[GenerateRequest, type[K3svcError], str]] = [
                (request("e", 0), InvalidRequest, "prompt"),
                (request("v", 3, prompt=(1, VOCAB)), InvalidRequest, r"prompt\[1\]"),
                (request("l", 500), InvalidRequest, "prompt"),
                (request("t", 3, max_tokens=398), InvalidRequest, "max_tokens"),
                (request("n", 3, n=2), InvalidRequest, "sampling.n"),
                (request("s", 3, sampling=SamplingParams(temperature=float("nan"))), InvalidRequest, "temperature"),
                (request("\n", 3), InvalidRequest, "request_id"),
            ]
            for req, error, match in bad:
                with pytest.raises(error, match=match):
                    here.decode.submit(req, NO_TEXT)
            streams = [here.decode.submit(request("one", 5, max_tokens=50), NO_TEXT)]
            with pytest.raises(AlreadyExists):
                here.decode.submit(request("one", 5), NO_TEXT)
            await asyncio.sleep(0.02)
            streams += [here.decode.submit(request(name, 5), NO_TEXT) for name in ("two", "three")]
            with pytest.raises(ResourceExhausted) as full:
                here.decode.submit(request("four", 5), NO_TEXT)
            assert full.value.retry_after_s > 0
            for stream in streams:
                stream.cancel()

    run_virtual(main())


def test_stop_tokens_and_min_tokens(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        req = request("s", 33, max_tokens=40)
        tokens = want(req, 40)
        stop = tokens[5]
        first = tokens.index(stop)
        async with world(tokenizer, stop_token_ids=[stop]) as here:
            assert (await collect(here.decode, req))[0] == tokens[: first + 1]
            ignoring = replace(req, request_id="i", stop=StopParams(max_tokens=40, ignore_eos=True))
            assert (await collect(here.decode, ignoring))[0] == tokens
            own = replace(ignoring, request_id="o", stop=replace(ignoring.stop, stop_token_ids=frozenset({tokens[9]})))
            assert (await collect(here.decode, own))[0] == tokens[: tokens.index(tokens[9]) + 1]

    run_virtual(main())


def test_attempts_supersede_and_stay_superseded() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        first = engine.open(call(1))
        events = aiter(first)
        await anext(events)
        second = engine.open(call(3))
        with pytest.raises(Superseded):
            await read(events)
        first.detach()
        with pytest.raises(Superseded):
            engine.open(call(2))
        assert len(await read(aiter(second))) > 3
        second.detach()
        assert engine.release("q", 2) is False
        assert engine.release("q", 3) is True
        assert engine.release("q", 3) is False
        with pytest.raises(Superseded):
            engine.open(call(3))
        fresh = engine.open(call(4))
        await read(aiter(fresh))
        fresh.detach()
        engine.release("q", 4)

    run_prefill(scenario)


def test_same_attempt_resumes_from_any_frame() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        whole = engine.open(call())
        frames = [frame for event in await read(aiter(whole)) if isinstance(event, list) for frame in event]
        wanted = [(frame.sequence, frame.tensor, frame.offset, bytes(frame.data)) for frame in frames]
        whole.detach()
        for start in range(len(wanted) + 1):
            resumed = engine.open(call(next_sequence=start))
            got = [frame for event in await read(aiter(resumed)) if isinstance(event, list) for frame in event]
            assert [(f.sequence, f.tensor, f.offset, bytes(f.data)) for f in got] == wanted[start:]
            resumed.detach()
        beyond = engine.open(call(next_sequence=len(wanted) + 1))
        with pytest.raises(InvalidRequest, match="next_sequence"):
            await read(aiter(beyond))
        beyond.detach()
        with pytest.raises(InvalidRequest, match="prompt"):
            engine.open(call(size=99))
        assert runner.num_extend_tokens == 100
        engine.release("q", 1)
        with pytest.raises(Superseded):
            engine.open(call(next_sequence=1))

    run_prefill(scenario)


def test_silence_ends_the_lease_and_pauses_the_work() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        handoff = engine.open(call(size=900))
        await read(aiter(handoff), 3)
        handoff.detach()
        await asyncio.sleep(2.0)
        assert runner.num_extend_tokens <= 5 * 64, "chunks ran for nobody"
        assert engine.load().free_slots == engine.load().total_slots - 1
        await asyncio.sleep(4.0)
        assert engine.load().free_slots == engine.load().total_slots
        assert engine.load().outcomes["expired"] == 1
        with pytest.raises(Superseded):
            engine.open(call(size=900, next_sequence=2))

    run_prefill(scenario)


def test_prefill_queue_is_bounded_and_refuses_bad_calls() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        handoffs = [engine.open(call(request_id=f"w{i}")) for i in range(2)]
        with pytest.raises(ResourceExhausted):
            engine.open(call(request_id="w2"))
        for bad in (call(prompt=()), call(prompt=(VOCAB,)), call(attempt=0), call(request_id=""), call(size=1025)):
            with pytest.raises(InvalidRequest):
                engine.open(bad)
        for index, handoff in enumerate(handoffs):
            handoff.detach()
            engine.release(f"w{index}", 1)
        engine.drain()
        with pytest.raises(Unavailable):
            engine.open(call(request_id="w3"))

    run_prefill(scenario, max_waiting=2, num_slots=1)


def test_a_hand_off_without_one_tensor_is_incomplete() -> None:
    """Dropping the last frame of each tensor in turn is noticed by name."""
    from k3svc.transfer.landing import Landing
    from k3svc.transfer.manifest import build_manifest
    from k3svc.transfer.outbox import Outbox

    spec = fake_spec()
    source, target = FakeCache(spec), FakeCache(spec)
    manifest = build_manifest(spec, request_id="q", attempt=1, num_tokens=40)
    for dropped in range(len(manifest.tensors)):
        outbox = Outbox(manifest, source, slot=2, block_table=[4, 5, 9], frame_bytes=64)
        for layer in range(4):
            outbox.add_layer(layer, 0, 32)
            outbox.add_layer(layer, 32, 40)
        outbox.add_logits()
        assert outbox.is_complete
        landing = Landing(manifest, target, slot=3, block_table=[7, 1, 2])
        landing.accept_manifest(manifest)
        frames: list[Frame] = []
        while batch := outbox.frames(len(frames)):
            frames += batch
        kept = [frame for frame in frames if frame.tensor != dropped]
        for sequence, frame in enumerate(kept):
            landing.accept(replace(frame, sequence=sequence))
        with pytest.raises(TransferError, match=manifest.tensors[dropped].name.replace("[", r"\[")):
            landing.finish(len(kept))


def test_a_refused_attempt_leaves_the_live_one_alone() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        first = engine.open(call(1))
        with pytest.raises(InvalidRequest):
            engine.open(call(5, prompt=tuple([1] * 1025)))
        events = await read(aiter(first))
        assert isinstance(events[0], StateManifest)
        assert len(events) > 3
        first.detach()
        engine.release("q", 1)
        for bad in ("", "x" * 200, "\n"):
            with pytest.raises(InvalidRequest, match="request_id"):
                engine.release(bad, 1)

    run_prefill(scenario)


def test_a_prompt_that_nobody_waits_for_leaves_the_queue() -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        running = engine.open(call(request_id="r"))
        await read(aiter(running), 1)
        for index in range(20):
            gone = engine.open(call(request_id=f"w{index}"))
            gone.detach()
        assert engine.load().waiting == 0
        again = engine.open(call(request_id="w3"))
        running.detach()
        engine.release("r", 1)
        assert len(await read(aiter(again))) > 3
        again.detach()
        engine.release("w3", 1)

    run_prefill(scenario, max_waiting=2, num_slots=1)


def test_a_full_prefill_queue_only_costs_time(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, prefill_attempts=1, max_waiting=64) as here:
            here.prefill[0].scheduler._max_waiting = 1
            reqs = [request(f"f{i}", 150) for i in range(12)]
            results = await asyncio.gather(*(collect(here.decode, req) for req in reqs))
            assert [result[0] for result in results] == [want(req) for req in reqs]
            assert here.prefill[0].load().outcomes["rejected"] > 0, "the queue was never full"

    run_virtual(main())


def test_absorbed_text_with_a_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer) as here:
            stop = StopParams(max_tokens=9, stop=(tokenizer.decode([40]),))
            bad = request("s", 3, generated=(39, 40, 41), stop=stop)
            with pytest.raises(InvalidRequest, match="generated_token_ids"):
                here.decode.submit(bad, TextOptions())

    run_virtual(main())


def test_a_peer_with_other_kernels_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(engine: PrefillEngine, runner: FakeRunner) -> None:
        for index in range(3):
            other = replace(FINGERPRINT, variant="another")
            handoff = engine.open(call(request_id=f"v{index}", fingerprint=other))
            assert len(await read(aiter(handoff))) > 3
            handoff.detach()
            engine.release(f"v{index}", 1)

    run_prefill(scenario)
    assert caplog.text.count("a decode service runs another") == 1


def test_a_refusal_that_waiting_cannot_mend_is_passed_on_early(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with world(tokenizer, prefill_attempts=2) as here:

            def refuse(call: PrefillCall) -> None:
                raise ResourceExhausted("too late", retry_after_s=0.1, reason="DEADLINE_TOO_NEAR")

            here.prefill[0].open = refuse  # type: ignore[method-assign, assignment]
            with pytest.raises(ResourceExhausted, match="too late"):
                await collect(here.decode, request("t", 20))
            assert len(here.peers[0].calls) == 2

    run_virtual(main())
