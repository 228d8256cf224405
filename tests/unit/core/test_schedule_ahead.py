"""DecodeScheduler with two steps in flight: the step after one whose tokens are not known yet."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from k3svc.core.batch import DecodeBatch, Sampled, StepOutput
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.pages import PagePool
from k3svc.core.request import FinishReason, GenerateRequest, SamplingParams, StopParams
from k3svc.core.sample import DraftBlock, Job, Phase
from k3svc.core.slots import SlotPool

STOP = 9


def make(num_pages: int = 20, num_slots: int = 4) -> DecodeScheduler:
    return DecodeScheduler(
        pages=PagePool(num_pages),
        slots=SlotPool(num_slots),
        page_size=4,
        max_batch=4,
        max_waiting=6,
        max_transfers=2,
        max_context_tokens=40,
        stop_token_ids=[STOP],
    )


def request(name: str, size: int = 5, max_tokens: int = 20, **changes: object) -> GenerateRequest:
    made = GenerateRequest(
        request_id=name, prompt=(1,) * size, sampling=SamplingParams(), stop=StopParams(max_tokens=max_tokens)
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def land(scheduler: DecodeScheduler, *requests: GenerateRequest) -> None:
    for one in requests:
        scheduler.submit(one, retry_after_s=1.0)
    for job in scheduler.admit(now=0.0):
        scheduler.landed(job)
    scheduler.check()


def first(scheduler: DecodeScheduler, blocks: dict[str, DraftBlock] | None = None) -> DecodeBatch:
    batch = scheduler.schedule(blocks or {})
    assert batch is not None
    return batch


def ahead(scheduler: DecodeScheduler, batch: DecodeBatch) -> DecodeBatch:
    following = scheduler.schedule_ahead(batch)
    assert following is not None
    scheduler.check()
    return following


def commit(scheduler: DecodeScheduler, batch: DecodeBatch, token_id: int = 2, **tokens: int) -> list[str]:
    """Books a step that gives every row that asks `token_id`, or what `tokens` says; whom it gave something."""
    keys = [row.key for row in batch.all_rows if row.sample is not None]
    sampled = {key: [Sampled(token_id=tokens.get(key.split("#")[0], token_id))] for key in keys}
    emissions = scheduler.commit(batch, StepOutput(sampled=sampled))
    scheduler.check()
    return [emission.sample.key for emission in emissions]


def test_rows_take_their_token_from_the_step_before_one_position_on() -> None:
    scheduler = make()
    land(scheduler, request("a"), request("b", 7, first_sample=3))
    batch = first(scheduler)
    rows = []
    for _ in range(3):
        following = ahead(scheduler, batch)
        rows += [(row.key, row.token_id, row.position) for row in following.rows]
        specs = [row.sample for row in following.rows if row.sample is not None]
        assert [(spec.position, spec.sample_index) for spec in specs] == [
            (row.position + 1, index) for row, index in zip(following.rows, (0, 3), strict=True)
        ]
        assert all(len(row.block_table) * 4 > row.position for row in following.rows)
        assert commit(scheduler, batch) == ["a#0", "b#0"]
        batch = following
    assert rows == [(key, None, start + step) for step in range(3) for key, start in (("a#0", 5), ("b#0", 7))]
    commit(scheduler, batch)
    assert [(sample.output, sample.num_cached) for sample in scheduler.running] == [([2] * 4, 8), ([2] * 4, 10)]
    (a, _) = first(scheduler).rows
    assert (a.token_id, a.position) == (2, 8)


def test_known_tokens_are_replayed_ahead_and_the_last_of_them_chooses() -> None:
    scheduler = make()
    penalised = SamplingParams(presence_penalty=1.0)
    land(scheduler, request("a", generated=(3, 4, 5), sampling=penalised))
    batch = first(scheduler)
    fed = []
    for _ in range(2):
        following = ahead(scheduler, batch)
        fed += [(row.token_id, row.position, row.sample and row.sample.position) for row in following.rows]
        assert commit(scheduler, batch) == []
        batch = following
    assert fed == [(4, 6, None), (5, 7, 8)]
    assert scheduler.schedule_ahead(batch) is None, "what it chooses decides what is penalised next"


def test_a_ban_of_stop_tokens_ends_at_its_token_whether_known_or_not() -> None:
    scheduler = make()
    land(scheduler, request("a", stop=StopParams(max_tokens=20, min_tokens=2)))
    batch = first(scheduler)
    banned = [batch.first[0].sample.banned]
    for _ in range(2):
        following = ahead(scheduler, batch)
        assert following.rows[0].sample is not None
        banned.append(following.rows[0].sample.banned)
        commit(scheduler, batch)
        batch = following
    assert banned == [frozenset({STOP}), frozenset({STOP}), frozenset()]


class Grammar:
    def matcher(self) -> "Grammar":
        return self

    def allowed(self, output: Sequence[int], drafts: Sequence[int] = ()) -> bytes:
        return bytes([*output, *drafts])


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": SamplingParams(presence_penalty=0.5)},
        {"sampling": SamplingParams(frequency_penalty=0.5)},
        {"sampling": SamplingParams(repetition_penalty=1.1)},
        {"grammar": Grammar()},
        {"logprobs": 0},
    ],
    ids=["presence", "frequency", "repetition", "grammar", "logprobs"],
)
def test_a_sample_that_needs_its_token_known_holds_the_step_up(changes: dict[str, object]) -> None:
    scheduler = make()
    land(scheduler, request("a"), replace(request("b", max_tokens=2), **changes))  # type: ignore[arg-type]
    batch = first(scheduler)
    assert scheduler.schedule_ahead(batch) is None
    commit(scheduler, batch)
    batch = first(scheduler)
    assert len(batch.rows) == 2 and scheduler.schedule_ahead(batch) is None
    commit(scheduler, batch)
    assert [row.key for row in ahead(scheduler, first(scheduler)).rows] == ["a#0"], "b has ended"


def test_drafts_hold_the_step_up() -> None:
    scheduler = make()
    land(scheduler, request("a"), request("b"))
    commit(scheduler, first(scheduler))
    batch = first(scheduler, {"b#0": DraftBlock(tokens=[2, 3])})
    assert scheduler.schedule_ahead(batch) is None


def unpause(scheduler: DecodeScheduler) -> None:
    scheduler.pause("b", paused=False)


def land_another(scheduler: DecodeScheduler) -> None:
    land(scheduler, request("c"))


@pytest.mark.parametrize("comes", [unpause, land_another])
def test_a_sample_that_waits_to_go_on_holds_the_step_up(comes: Callable[[DecodeScheduler], None]) -> None:
    scheduler = make()
    land(scheduler, request("a"), request("b"))
    scheduler.pause("b", paused=True)
    batch = first(scheduler)
    following = ahead(scheduler, batch)
    commit(scheduler, batch)
    comes(scheduler)
    assert scheduler.schedule_ahead(following) is None
    commit(scheduler, following)
    assert len(first(scheduler).all_rows) == 2


def test_a_request_of_the_same_name_is_another() -> None:
    scheduler = make()
    land(scheduler, request("a"))
    batch = first(scheduler)
    scheduler.end(scheduler.live_samples("a")[0])
    land(scheduler, request("a", 6))
    assert scheduler.schedule_ahead(batch) is None
    assert commit(scheduler, batch) == []
    assert [row.slot for row in first(scheduler).first] == [scheduler.running[0].slot]


def test_who_has_one_token_left_is_not_in_the_next_step() -> None:
    scheduler = make()
    land(scheduler, request("a", max_tokens=2), request("b"))
    batch = first(scheduler)
    second = ahead(scheduler, batch)
    commit(scheduler, batch)
    third = ahead(scheduler, second)
    assert [row.key for row in third.rows] == ["b#0"]
    commit(scheduler, second)
    assert scheduler.pages.num_free == 20 - len(scheduler.running[0].pages), "a has given its memory back"


def test_a_paused_sample_is_not_in_the_next_step() -> None:
    scheduler = make()
    land(scheduler, request("a"), request("b"))
    batch = first(scheduler)
    scheduler.pause("a", paused=True)
    assert [row.key for row in ahead(scheduler, batch).rows] == ["b#0"]
    commit(scheduler, batch)
    assert [sample.output for sample in scheduler.running] == [[2], [2]]


def test_nothing_follows_when_all_end_or_pause() -> None:
    scheduler = make()
    land(scheduler, request("a", max_tokens=1), request("b"))
    batch = first(scheduler)
    scheduler.pause("b", paused=True)
    assert scheduler.schedule_ahead(batch) is None
    commit(scheduler, batch)
    scheduler.check()


@pytest.mark.parametrize("how", ["stop token", "end", "failure"])
def test_who_ends_in_a_step_leaves_memory_and_row_to_the_one_that_follows(how: str) -> None:
    scheduler = make(num_slots=2)
    land(scheduler, request("a"), request("b"))
    a = scheduler.running[0]
    batch = first(scheduler)
    following = ahead(scheduler, batch)
    if how == "end":
        scheduler.end(a)
        assert commit(scheduler, batch) == ["b#0"]
    elif how == "failure":
        output = StepOutput(sampled={"b#0": [Sampled(token_id=2)]}, failed={"a#0": "no number"})
        assert [one.failure for one in scheduler.commit(batch, output)] == [None, "no number"][::-1]
    else:
        assert commit(scheduler, batch, a=STOP) == ["a#0", "b#0"]
        assert a.output == [STOP]
    scheduler.check()
    assert a.phase is Phase.ENDED and scheduler.slots.num_free == 0, "the step in flight still writes there"
    assert [row.key for row in ahead(scheduler, following).rows] == ["b#0"]
    assert commit(scheduler, following, a=3) == ["b#0"], "what it chose for a is dropped"
    assert (scheduler.slots.num_free, a.output) == (1, [STOP] if how == "stop token" else [])


def test_a_step_that_fails_takes_the_one_that_follows_with_it() -> None:
    scheduler = make()
    land(scheduler, request("a"), request("b"))
    batch = first(scheduler)
    following = ahead(scheduler, batch)
    emissions = scheduler.commit(batch, StepOutput(failed={"a#0": "broken", "b#0": "broken"}))
    assert [emission.failure for emission in emissions] == ["broken"] * 2
    assert scheduler.schedule_ahead(following) is None
    assert scheduler.commit(following, StepOutput(failed={"a#0": "broken", "b#0": "broken"})) == []
    scheduler.check()
    assert (scheduler.slots.num_free, scheduler.pages.num_free) == (4, 20)


def test_nobody_is_preempted_ahead() -> None:
    scheduler = make(num_pages=5)
    land(scheduler, request("a", 7), request("b", 7))
    assert scheduler.pages.num_free == 1
    batch = first(scheduler)
    following = ahead(scheduler, batch)
    commit(scheduler, batch)
    assert scheduler.schedule_ahead(following) is None, "position 8 needs a page each, and one is left"
    assert scheduler.num_preemptions == 0
    commit(scheduler, following)
    assert [row.key for row in first(scheduler).rows] == ["a#0"] and scheduler.num_preemptions == 1


def test_admission_leaves_paused_samples_in_a_step_alone() -> None:
    scheduler = make(num_slots=2)
    land(scheduler, request("a"), request("b"))
    batch = first(scheduler)
    scheduler.pause("a", paused=True)
    scheduler.submit(request("c"), retry_after_s=1.0)
    assert scheduler.admit(now=0.0) == [], "the step writes into the slot of a"
    commit(scheduler, batch)
    assert [job.lead.key for job in scheduler.admit(now=0.0)] == ["c#0"]
    scheduler.check()


def test_schedule_waits_for_the_steps_in_flight() -> None:
    scheduler = make()
    land(scheduler, request("a"))
    first(scheduler)
    with pytest.raises(AssertionError, match="in flight"):
        scheduler.schedule()


@pytest.mark.parametrize("seed", range(40))
def test_random_commands_around_two_steps_in_flight(seed: int) -> None:
    """Pools stay whole, a running step's memory is nobody else's, and no token is lost, doubled or out of place."""
    rng = random.Random(seed)
    scheduler = make(num_pages=rng.choice((8, 12, 20)))
    steps: deque[DecodeBatch] = deque()
    held: deque[dict[str, tuple[int, frozenset[int]]]] = deque()
    transfers: list[Job] = []
    names: list[str] = []
    num_ahead = 0
    for _ in range(600):
        action = rng.randrange(8)
        if action == 0 and len(scheduler.waiting) < 6:
            params = rng.choice([SamplingParams()] * 5 + [SamplingParams(presence_penalty=1.0)])
            name = f"r{len(names)}"
            size = rng.randint(1, 13)
            scheduler.submit(
                request(name, size, rng.choice((1, 5, 20)), sampling=params, n=rng.choice((1, 1, 2))), retry_after_s=1.0
            )
            names.append(name)
        elif action == 1:
            transfers += scheduler.admit(now=0.0)
        elif action == 2:
            transfers = [job for job in transfers if job.samples]
            if transfers:
                scheduler.landed(transfers.pop(rng.randrange(len(transfers))))
        elif action == 3 and names and rng.random() < 0.4:
            scheduler.pause(rng.choice(names), paused=rng.random() < 0.5)
        elif action == 4 and names and rng.random() < 0.2:
            for sample in scheduler.live_samples(rng.choice(names)):
                scheduler.end(sample)
        elif len(steps) == 2 or (steps and rng.random() < 0.4):
            batch = steps.popleft()
            held.popleft()
            before = {sample.key: list(sample.output) for sample in scheduler.running}
            sampled = {
                row.key: [Sampled(token_id=rng.randrange(10))] for row in batch.all_rows if row.sample is not None
            }
            for emission in scheduler.commit(batch, StepOutput(sampled=sampled)):
                key = emission.sample.key
                assert emission.sample.output == before[key] + [sampled[key][0].token_id]
                assert emission.finish_reason is not FinishReason.ABORT
        else:
            made = scheduler.schedule_ahead(steps[0]) if steps else scheduler.schedule()
            num_ahead += bool(steps and made)
            if made is not None:
                steps.append(made)
                held.append({row.key: (row.slot, frozenset(pages_of(scheduler, row.key))) for row in made.all_rows})
        scheduler.check()
        free = set(range(1, scheduler.pages.num_pages + 1)) - scheduler.pages.holders().keys()
        for step in held:
            assert not any(pages & free for _, pages in step.values()), "a page of a running step is free"
    assert num_ahead > 20
    while steps:
        scheduler.commit(steps.popleft(), StepOutput())
    for name in names:
        for sample in scheduler.live_samples(name):
            scheduler.end(sample)
    scheduler.check()
    assert scheduler.pages.num_free == scheduler.pages.num_pages and scheduler.slots.num_free == 4


def pages_of(scheduler: DecodeScheduler, key: str) -> Sequence[int]:
    return next(sample.pages for sample in scheduler.running if sample.key == key)
