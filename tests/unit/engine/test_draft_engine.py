"""DraftEngine on virtual time: what is proposed is made from the committed tokens and from nothing else."""

import asyncio
import dataclasses
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from k3svc.core.request import SamplingParams
from k3svc.engine.draft import DraftEngine
from k3svc.engine.draft_peers import DraftSession
from k3svc.engine.draft_protocol import SampleProposal, SessionStep
from k3svc.errors import Incompatible, InvalidRequest, ResourceExhausted, Superseded, Unavailable
from k3svc.testing.virtual import VirtualLoop
from tests.unit.engine.draft_fakes import (
    GAMMA,
    PROFILE,
    VOCAB,
    WINDOW,
    FakeDraftRunner,
    commit,
    context_start,
    drafts,
    features,
    new_engine,
    opening,
    rows,
)

if TYPE_CHECKING:
    from typing_extensions import Self

PROMPT = [11 * i % 900 for i in range(40)]
OUTPUT = [13 * i % 900 for i in range(1, 200)]
TRUTH = [*PROMPT, *OUTPUT]


def on_virtual_time(scenario: Coroutine[Any, Any, None]) -> None:
    VirtualLoop().run(scenario)


class Served:
    """An engine that runs, with one session."""

    def __init__(self, engine: DraftEngine) -> None:
        self.engine = engine
        self.session = engine.connect(PROFILE)
        self.known = PROMPT + OUTPUT[:1]
        self.steps = 0
        self._task = asyncio.create_task(engine.run())

    async def __aenter__(self) -> "Self":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.session.close()
        self.engine.check()
        self.engine.drain()
        await self._task

    async def tell(self, session: DraftSession | None = None, **parts: Any) -> dict[int, SampleProposal]:
        """A message that wishes, and the proposals of its answer."""
        session = session or self.session
        self.steps += 1
        session.apply(SessionStep(step=self.steps, **parts))
        made: dict[int, SampleProposal] = {}
        async for answer in session:
            made |= {proposal.handle: proposal for proposal in answer.proposals}
            self.gaps, self.refused, self.credits = answer.gaps, answer.refused, answer.credits
            if answer.step == self.steps:
                return made
        raise AssertionError("the session ended")

    async def step(self, accepted: int, *, lose: str = "", want: int = GAMMA, **options: Any) -> SampleProposal | None:
        """Verify a block whose first `accepted` drafts are right; `lose` names messages that do not arrive."""
        base = len(self.known) - 1
        wrong = [(token + 1) % 900 for token in TRUTH[base + 1 : base + 1 + GAMMA]]
        block = [self.known[-1], *TRUTH[base + 1 : base + 1 + accepted], *wrong[accepted:]]
        if "features" not in lose:
            self.session.apply(SessionStep(features=[features(block, base, **options)]))
        self.known = TRUTH[: base + 2 + accepted]
        if "commit" in lose:
            return None
        return (await self.tell(commits=[commit(self.known, accepted + 1, want=want, **options)])).get(1)


def expected(known: list[int], start: int = 0) -> tuple[int, ...]:
    return drafts(known[max(start, len(known) - 1 - WINDOW) : -1], known[-1])


def test_a_sample_is_followed_through_blocks_that_are_accepted_in_part():
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            assert await served.tell(opens=[opening(served.known)]) == {}
            for number in range(40):
                made = await served.step(number % (GAMMA + 1))
                assert made is not None
                assert made.base_len == len(served.known) - 1
                assert made.tokens == expected(served.known, len(PROMPT))
                assert made.truncated == (made.base_len - len(PROMPT) < WINDOW)
            assert served.engine.context_steps == {6: 1}

    on_virtual_time(scenario())


@pytest.mark.parametrize("lose", ["features", "features, commit"])
def test_a_gap_is_told_and_mended_from_history(lose: str):
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            await served.tell(opens=[opening(served.known)])
            for _ in range(8):
                await served.step(2)
            assert await served.step(3, lose=lose) is None
            if "commit" in lose:
                # The rows of the next step do not touch those before; they are all there is.
                made = await served.step(1)
                assert made is not None
                assert made.tokens == expected(served.known, len(served.known) - 3)
            oldest = len(served.known) - 1 - WINDOW
            # Rows that do not touch those before show the gap before the commit of their step does.
            told = oldest - 2 if "commit" in lose else oldest
            assert [(gap.handle, gap.start) for gap in served.gaps] == [(1, told)]
            history = [features(served.known[oldest:-1], oldest)]
            made = (await served.tell(features=history, commits=[commit(served.known, 1)])).get(1)
            assert made is not None
            assert (made.tokens, made.truncated) == (expected(served.known), False)

    on_virtual_time(scenario())


@pytest.mark.parametrize("chunks", [(40,), (16, 40), (8, 16, 24, 32, 40), (30, 40)])
def test_prompt_features_under_a_ticket_give_the_proposals_of_an_undivided_run(chunks: tuple[int, ...]):
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            push = served.engine.push_context(context_start(len(PROMPT)))
            begin, last = 0, chunks[-1]
            for end in chunks[:-1]:
                await push.add(begin, memoryview(rows(PROMPT[begin:end], begin)))
                begin = end
            opens = [opening(served.known, ticket="t"), opening(served.known, handle=2, ticket="t")]
            assert await served.tell(opens=opens) == {}
            assert await served.step(1) is None
            await push.add(begin, memoryview(rows(PROMPT[begin:last], begin)))
            push.finish()
            for number in range(12):
                made = await served.step(number % 3)
                assert made is not None
                assert (made.tokens, made.truncated) == (expected(served.known), False)
            # The other sample stands where it was, and a third one comes to the same prompt later.
            made = (await served.tell(commits=[commit(TRUTH[:41], 1, handle=2)]))[2]
            assert (made.tokens, made.truncated) == (expected(TRUTH[:41]), False)
            third = opening(PROMPT + OUTPUT[:1], handle=3, ticket="t")
            made = (await served.tell(opens=[third]))[3]
            assert (made.tokens, made.truncated) == (expected(PROMPT + OUTPUT[:1]), False)
            assert served.engine.context_steps[0] == 2

    on_virtual_time(scenario())


def test_a_wish_that_waits_for_the_prompt_is_answered_for_the_newest_base():
    """Decode takes it to be worked on, and goes on without another one."""

    async def scenario() -> None:
        async with Served(new_engine()) as served:
            push = served.engine.push_context(context_start(len(PROMPT)))
            await push.add(0, memoryview(rows(PROMPT[:30], 0)))
            await served.tell(opens=[opening(served.known, ticket="t")])
            assert await served.step(0, want=0) is None
            await push.add(30, memoryview(rows(PROMPT[30:], 30)))
            made = (await anext(served.session)).proposals[0]
            assert (made.base_len, made.tokens) == (len(served.known) - 1, expected(served.known))
            assert await served.step(0, want=0) is None, "it was answered once"

    on_virtual_time(scenario())


def test_a_ticket_that_ends_too_early_leaves_what_it_had():
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            push = served.engine.push_context(context_start(len(PROMPT)))
            await push.add(36, memoryview(rows(PROMPT[36:], 36)))
            await served.tell(opens=[opening(served.known, ticket="t")])
            assert await served.step(2) is None
            push.finish()
            made = await served.step(2)
            assert made is not None
            assert (made.tokens, made.truncated) == (expected(served.known, 36), True)

    on_virtual_time(scenario())


def test_a_ticket_that_nobody_pushes_is_waited_for_in_vain_but_not_long():
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            await served.tell(opens=[opening(served.known, ticket="never")])
            assert await served.step(2) is None
            await asyncio.sleep(1.0)
            made = await served.step(2)
            assert made is not None
            assert made.truncated

    on_virtual_time(scenario())


def test_a_higher_attempt_replaces_a_ticket_and_a_lower_one_is_refused():
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            first = served.engine.push_context(context_start(len(PROMPT)))
            second = served.engine.push_context(context_start(len(PROMPT), attempt=2))
            with pytest.raises(Superseded):
                served.engine.push_context(context_start(len(PROMPT)))
            with pytest.raises(Superseded):
                await first.add(0, memoryview(rows(PROMPT, 0)))
            await second.add(0, memoryview(rows(PROMPT, 0)))
            made = await served.tell(opens=[opening(served.known, ticket="t")])
            assert made[1].tokens == expected(served.known)

    on_virtual_time(scenario())


def test_tickets_and_samples_end_with_their_leases():
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            push = served.engine.push_context(context_start(len(PROMPT)))
            await push.add(0, memoryview(rows(PROMPT, 0)))
            await served.tell(opens=[opening(served.known)])
            assert (served.engine.load().running, served.engine.load().in_transfer) == (1, 1)
            await asyncio.sleep(45)
            assert (served.engine.load().running, served.engine.load().in_transfer) == (1, 0)
            await asyncio.sleep(45)
            load = served.engine.load()
            assert (load.running, load.free_slots) == (0, load.total_slots)
            assert (load.outcomes["expired"], load.outcomes["tickets_expired"]) == (1, 1)
            # Decode goes on about it and hears that it is not followed.
            assert await served.step(1) is None
            assert served.refused == (1,)

    on_virtual_time(scenario())


def test_samples_beyond_the_bound_are_refused_until_others_end():
    async def scenario() -> None:
        async with Served(new_engine(max_requests=2)) as served:
            await served.tell(opens=[opening(served.known, handle=handle) for handle in (1, 2, 3)])
            assert (served.refused, served.credits) == ((3,), 0)
            await served.tell(closes=[1, 77], opens=[opening(served.known, handle=3)])
            assert (served.refused, served.credits) == ((), 0)
            assert served.engine.counts["refused"] == 1

    on_virtual_time(scenario())


def test_tickets_beyond_the_bound_take_the_place_of_those_that_have_served():
    async def scenario() -> None:
        async with Served(new_engine(max_tickets=2)) as served:
            engine = served.engine
            pushes = [engine.push_context(context_start(8, ticket=name)) for name in ("a", "b")]
            with pytest.raises(ResourceExhausted):
                engine.push_context(context_start(8, ticket="c"))
            for push in pushes:
                await push.add(0, memoryview(rows(PROMPT[:8], 0)))
            await served.tell(opens=[opening(PROMPT[:9], ticket="b")])
            engine.push_context(context_start(8, ticket="c"))
            assert engine.load().outcomes["tickets_evicted"] == 1
            assert (await served.tell(opens=[opening(PROMPT[:9], handle=2, ticket="a")]))[2].tokens

    on_virtual_time(scenario())


def test_opening_again_voids_what_belongs_to_a_lower_attempt():
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            await served.tell(opens=[opening(served.known)])
            await served.step(2)
            await served.tell(opens=[opening(served.known, attempt=2)])
            begun = len(served.known) - 1
            assert await served.step(2) is None
            assert served.engine.counts["stale"] == 2
            served.session.apply(SessionStep(opens=[opening(served.known, attempt=1)]))
            # The context begins where the second attempt did: the step between was told of under the first.
            history = [features(served.known[begun:-1], begun, attempt=2)]
            served.session.apply(SessionStep(features=history, commits=[commit(served.known, 3, attempt=2)]))
            made = await served.step(2, attempt=2)
            assert made is not None
            assert made.tokens == expected(served.known, begun)

    on_virtual_time(scenario())


def test_the_end_of_a_session_frees_its_samples_and_no_others():
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            other = served.engine.connect(PROFILE)
            await served.tell(opens=[opening(served.known)])
            await served.tell(other, opens=[opening(served.known, handle=handle) for handle in (1, 2)])
            other.close()
            assert served.engine.load().running == 1
            with pytest.raises(StopAsyncIteration):
                await anext(other)
            assert (await served.step(3)) is not None

    on_virtual_time(scenario())


def test_a_failed_step_costs_contexts_and_nothing_else():
    async def scenario() -> None:
        runner = FakeDraftRunner()
        async with Served(new_engine(runner)) as served:
            await served.tell(opens=[opening(served.known)])
            await served.step(2)
            runner.fail_next = True
            assert await served.step(2) is None
            assert served.gaps
            made = await served.step(2)
            assert made is not None
            assert made.tokens == expected(served.known, len(served.known) - 4)

    on_virtual_time(scenario())


def test_a_slow_runner_answers_late_for_the_base_that_was_asked():
    async def scenario() -> None:
        runner = FakeDraftRunner()
        async with Served(new_engine(runner)) as served:
            await served.tell(opens=[opening(served.known)])
            await served.step(2)
            runner.work_s = 1.0
            asked = TRUTH[: len(served.known) + 1]
            served.session.apply(SessionStep(features=[features(asked[-2:-1], len(asked) - 2)]))
            served.session.apply(SessionStep(step=100, commits=[commit(asked, 1)]))
            await asyncio.sleep(0.5)
            later = TRUTH[: len(asked) + 2]
            served.session.apply(SessionStep(features=[features(later[-3:-1], len(later) - 3)]))
            served.session.apply(SessionStep(step=101, commits=[commit(later, 2)]))
            made: list[SampleProposal] = []
            async for answer in served.session:
                made += answer.proposals
                if answer.step == 101:
                    break
            assert [proposal.base_len for proposal in made] == [len(asked) - 1, len(later) - 1]
            assert served.engine.counts["late"] == 1

    on_virtual_time(scenario())


def test_proposals_end_before_the_mask_and_at_the_wish():
    class Masking(FakeDraftRunner):
        def _answer(self, ask: Any) -> Any:
            return dataclasses.replace(super()._answer(ask), tokens=(5, 6, PROFILE.mask_token_id, 7))

    async def scenario() -> None:
        async with Served(new_engine(Masking())) as served:
            await served.tell(opens=[opening(served.known)])
            made = await served.step(1)
            assert made is not None
            assert (made.tokens, made.confidences) == ((5, 6), (0.5, 0.5))
            served.session.apply(SessionStep(features=[features(served.known[-1:], len(served.known) - 1)]))
            served.known = TRUTH[: len(served.known) + 1]
            made = (await served.tell(commits=[commit(served.known, 1, want=1)]))[1]
            assert made.tokens == (5,)

    on_virtual_time(scenario())


@pytest.mark.parametrize("params", [SamplingParams(temperature=float("nan")), SamplingParams(top_p=0.0)])
def test_parameters_that_cannot_be_cost_their_sample_alone(params: SamplingParams):
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            odd = dataclasses.replace(opening(served.known, handle=2), params=params)
            await served.tell(opens=[opening(served.known), odd])
            assert served.refused == (2,)
            assert await served.step(1) is not None

    on_virtual_time(scenario())


@pytest.mark.parametrize(
    ("field", "step"),
    [
        ("anchors", {"opens": [dataclasses.replace(opening(PROMPT), anchor=VOCAB)]}),
        ("wants", {"opens": [dataclasses.replace(opening(PROMPT), want=GAMMA + 1)]}),
        ("opens.base_lens", {"opens": [dataclasses.replace(opening(PROMPT), base_len=0)]}),
        ("opens.base_lens", {"opens": [dataclasses.replace(opening(PROMPT), base_len=1 << 40)]}),
        ("opens.tickets", {"opens": [opening(PROMPT, ticket="x" * 129)]}),
        ("features.counts", {"features": [dataclasses.replace(features([1], 0), num_rows=0)]}),
        ("features.counts", {"features": [dataclasses.replace(features([1], 0), num_rows=2)]}),
        ("features.starts", {"features": [dataclasses.replace(features([1], 0), start=1 << 40)]}),
        ("commits.base_lens", {"commits": [dataclasses.replace(commit(PROMPT, 1), base_len=0)]}),
        ("commits.counts", {"commits": [dataclasses.replace(commit(PROMPT, 1), count=0)]}),
        ("commits.counts", {"commits": [dataclasses.replace(commit(PROMPT, 1), count=len(PROMPT) + 1)]}),
        ("anchors", {"commits": [dataclasses.replace(commit(PROMPT, 1), anchor=VOCAB)]}),
    ],
)
def test_what_cannot_be_is_refused_and_named(field: str, step: dict[str, Any]):
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            with pytest.raises(InvalidRequest) as caught:
                served.session.apply(SessionStep(**step))
            assert caught.value.field == field

    on_virtual_time(scenario())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "x"),
        ("tokenizer", "x"),
        ("draft", "x" * 500),
        ("target_layers", (1, 2)),
        ("feature_width", 8),
        ("feature_dtype", "float64"),
        ("num_proposals", 3),
        ("anchor_predicts", False),
        ("mask_token_id", 0),
        ("vocab_size", 5),
        ("window", 0),
        ("protocol", 2),
    ],
)
def test_each_difference_of_the_profiles_is_refused_and_named(name: str, value: object):
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            other = dataclasses.replace(PROFILE, **{name: value})  # type: ignore[arg-type]
            with pytest.raises(Incompatible, match=f"^{name}: got ") as caught:
                served.engine.connect(other)
            assert caught.value.metadata["field"] == name
            with pytest.raises(Incompatible, match=f"^{name}: got "):
                served.engine.push_context(dataclasses.replace(context_start(5), profile=other))

    on_virtual_time(scenario())


def test_rows_of_a_prompt_are_checked():
    async def scenario() -> None:
        async with Served(new_engine()) as served:
            push = served.engine.push_context(context_start(10))
            for position, data in ((0, bytes(15)), (9, bytes(32)), (11, bytes(16)), (1 << 60, bytes(16))):
                with pytest.raises(InvalidRequest):
                    await push.add(position, memoryview(data))
            for name in ("", "x" * 129, "é", "a\n"):
                with pytest.raises(InvalidRequest):
                    served.engine.push_context(context_start(10, ticket=name))

    on_virtual_time(scenario())


def test_a_peer_that_sends_more_than_is_worked_off_waits():
    async def scenario() -> None:
        runner = FakeDraftRunner(work_s=1.0)
        async with Served(new_engine(runner)) as served:
            served.session.apply(SessionStep(opens=[opening(served.known)]))
            await asyncio.sleep(0.1)
            served.session.pending_bytes = 1 << 30
            loop = asyncio.get_running_loop()
            before = loop.time()
            served.session.apply(SessionStep(features=[features([1], len(served.known) - 1)]))
            await served.session.room()
            assert loop.time() - before < 1.5
            assert served.session.pending_bytes == 0

    on_virtual_time(scenario())


def test_the_end_of_the_engine_is_told_to_sessions_and_pushes():
    async def scenario() -> None:
        served = Served(new_engine())
        push = served.engine.push_context(context_start(10))
        served.engine.drain()
        with suppress(asyncio.CancelledError):
            await served._task
        with pytest.raises(Unavailable):
            await anext(served.session)
        with pytest.raises(Superseded):
            await push.add(0, memoryview(bytes(16)))
        with pytest.raises(Unavailable):
            served.engine.connect(PROFILE)
        served.engine.check()
        load = served.engine.load()
        assert load.free_slots == load.total_slots

    on_virtual_time(scenario())


def test_a_mismatch_names_the_folders_beside_the_hashes() -> None:
    ours = dataclasses.replace(PROFILE, model_name="k3", draft_name="k3-dspark")
    with pytest.raises(Incompatible, match=r"^draft: got 'k3-dflash' with hash 'e'; .* has 'k3-dspark' with hash 'd'$"):
        ours.check(dataclasses.replace(ours, draft="e", draft_name="k3-dflash"))
    with pytest.raises(Incompatible, match=r"^model: got 'n'; this draft service has 'k3' with hash 'm'$"):
        ours.check(dataclasses.replace(PROFILE, model="n"))
    ours.check(dataclasses.replace(PROFILE, model_name="a copy elsewhere"))
