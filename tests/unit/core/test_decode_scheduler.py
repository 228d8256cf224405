"""DecodeScheduler under random commands: pools stay whole, and each sample is in one place."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from k3svc.core.batch import DecodeBatch, FirstRow, Guide, Sampled, StepOutput
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.pages import PagePool
from k3svc.core.request import FinishReason, GenerateRequest, SamplingParams, StopParams
from k3svc.core.sample import DraftBlock, Emission, Job, Phase
from k3svc.core.slots import SlotPool


def make(num_pages: int = 10, num_slots: int = 4, **changes: int) -> DecodeScheduler:
    options = {"page_size": 4, "max_batch": 4, "max_waiting": 6, "max_transfers": 2, "max_context_tokens": 40} | changes
    return DecodeScheduler(
        pages=PagePool(num_pages),
        slots=SlotPool(num_slots),
        stop_token_ids=[9],
        **options,
    )


def request(name: str, size: int, max_tokens: int | None = None, n: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt=(1,) * size, sampling=SamplingParams(), stop=StopParams(max_tokens=max_tokens), n=n
    )


@pytest.mark.parametrize("seed", range(25))
def test_random_commands_keep_the_pools_whole(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make()
    serial = 0
    transfers: list[Job] = []
    names: list[str] = []
    uncopied: dict[str, tuple[int | None, int | None]] = {}
    for _ in range(400):
        action = rng.randrange(5)
        if action == 0 and len(scheduler.waiting) < 6:
            serial += 1
            name = f"r{serial}"
            scheduler.submit(
                request(name, rng.randint(1, 17), rng.choice([1, 5, 20]), rng.choice([1, 1, 2, 3])),
                retry_after_s=1.0,
            )
            names.append(name)
        elif action == 1:
            transfers += scheduler.admit(now=0.0)
        elif action == 2:
            transfers = [job for job in transfers if job.samples]
            if transfers:
                job = transfers.pop(rng.randrange(len(transfers)))
                scheduler.landed(job)
                uncopied |= {sample.key: (job.lead.slot, sample.slot) for sample in job.samples[1:]}
        elif action == 3:
            blocks = {
                sample.key: DraftBlock(tokens=[rng.randrange(10) for _ in range(rng.randint(1, 9))])
                for sample in scheduler.running
                if rng.random() < 0.5
            }
            batch = scheduler.schedule(blocks)
            if batch is not None:
                slots = {row.slot for row in batch.all_rows}
                begun = [uncopied.pop(row.key) for row in batch.all_rows if row.key in uncopied]
                assert {(fork.source_slot, fork.target_slot) for fork in batch.forks} == set(begun)
                for fork in batch.forks:
                    assert fork.source_slot in slots, "the source has moved on"
                    assert fork.source_page is None or fork.source_page != fork.target_page
                for row in batch.rows:
                    assert len(row.block_table) * 4 > row.position + len(row.drafts)
                if rng.random() < 0.2 and names:
                    for sample in scheduler.live_samples(rng.choice(names)):
                        scheduler.end(sample)
                    scheduler.check()
                sampled = {}
                for asked in batch.all_rows:
                    if isinstance(asked, FirstRow) or asked.sample is not None:
                        made = () if isinstance(asked, FirstRow) else asked.drafts
                        tokens = (*made[: rng.randint(0, len(made))], rng.randrange(10))
                        sampled[asked.key] = [Sampled(token_id=one) for one in tokens]
                scheduler.commit(batch, StepOutput(sampled=sampled))
        elif names and rng.random() < 0.2:
            for sample in scheduler.live_samples(rng.choice(names)):
                scheduler.end(sample)
                scheduler.end(sample)
        scheduler.check()
        held = {sample.key: sample.slot for sample in scheduler.running}
        assert len(set(held.values())) == len(held)
        uncopied = {key: pair for key, pair in uncopied.items() if key in held}
    for name in names:
        for sample in scheduler.live_samples(name):
            scheduler.end(sample)
    scheduler.check()
    assert (scheduler.pages.num_free, scheduler.slots.num_free) == (10, 4)


@pytest.mark.parametrize(("size", "pages"), [(5, (1, 3)), (8, (None, None))])
def test_samples_of_one_prompt_begin_their_first_step_with_a_copy(size: int, pages: tuple[int | None, ...]) -> None:
    scheduler = make()
    lead, other = scheduler.submit(request("a", size, n=2), retry_after_s=1.0)
    (job,) = scheduler.admit(now=0.0)
    scheduler.landed(job)
    own = None if pages[0] is None else lead.pages[-1], None if pages[1] is None else other.pages[-1]
    batch = scheduler.schedule()
    assert batch is not None
    (fork,) = batch.forks
    assert (fork.source_slot, fork.target_slot) == (lead.slot, other.slot)
    assert (fork.source_page, fork.target_page) == own
    scheduler.commit(batch, StepOutput(sampled={key: [Sampled(token_id=1)] for key in ("a#0", "a#1")}))
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.forks == []


def test_memory_of_a_step_is_kept_until_it_is_booked() -> None:
    scheduler = make()
    (sample,) = scheduler.submit(request("a", 5), retry_after_s=1.0)
    (job,) = scheduler.admit(now=0.0)
    scheduler.landed(job)
    batch = scheduler.schedule()
    assert batch is not None
    assert [row.slot for row in batch.first] == [sample.slot]
    scheduler.end(sample)
    assert sample.phase is Phase.ENDED
    assert scheduler.slots.num_free == 3, "the running step still writes there"
    assert scheduler.commit(batch, StepOutput(sampled={"a#0": [Sampled(token_id=1)]})) == []
    assert scheduler.slots.num_free == 4
    scheduler.check()


def test_a_step_copies_block_tables_as_memory() -> None:
    """Number by number, 64 tables of 131,072 tokens would take 12 ms a step."""
    scheduler = make(num_pages=20)
    scheduler.submit(request("a", 30, n=2), retry_after_s=1.0)
    for job in scheduler.admit(now=0.0):
        scheduler.landed(job)
    first = scheduler.schedule()
    assert first is not None
    scheduler.commit(first, StepOutput(sampled={row.key: [Sampled(token_id=5)] for row in first.all_rows}))
    batch = scheduler.schedule()
    assert batch is not None
    for row in batch.rows:
        table = memoryview(row.block_table)  # type: ignore[arg-type]
        assert (table.itemsize, len(table)) == (8, 8)


def test_replay_asks_for_no_token_until_it_caught_up() -> None:
    scheduler = make()
    resumed = replace(request("a", 5, 9), generated=(3, 4, 5))
    scheduler.submit(resumed, retry_after_s=1.0)
    (job,) = scheduler.admit(now=0.0)
    scheduler.landed(job)
    fed = []
    for _ in range(3):
        batch = scheduler.schedule()
        assert batch is not None
        (row,) = batch.rows
        fed.append((row.token_id, row.position, row.sample.position if row.sample else None))
        sampled = {"a#0": [Sampled(token_id=7)]} if row.sample else {}
        emissions = scheduler.commit(batch, StepOutput(sampled=sampled))
        assert len(emissions) == len(sampled)
    assert fed == [(3, 5, None), (4, 6, None), (5, 7, 8)]


def step(scheduler: DecodeScheduler) -> list[str]:
    """Runs a step that gives everybody token 1; the requests in it."""
    batch = scheduler.schedule()
    assert batch is not None
    wanted = [row.key for row in batch.all_rows if row.sample is not None]
    scheduler.commit(batch, StepOutput(sampled={key: [Sampled(token_id=1)] for key in wanted}))
    scheduler.check()
    return [row.key.split("#")[0] for row in batch.all_rows]


def admit_and_land(scheduler: DecodeScheduler) -> list[str]:
    jobs = scheduler.admit(now=0.0)
    for job in jobs:
        scheduler.landed(job)
    scheduler.check()
    return [job.lead.request.request_id for job in jobs]


def test_smaller_priority_is_served_first_and_preempted_last() -> None:
    scheduler = make(num_pages=11, num_slots=3, max_transfers=3)
    for name, priority in (("a", 5), ("b", 0), ("c", -3), ("d", 0)):
        scheduler.submit(replace(request(name, 7, 20), priority=priority), retry_after_s=1.0)
    assert [job.lead.request.request_id for job in scheduler.waiting] == ["c", "b", "d", "a"]
    scheduler.end(scheduler.live_samples("d")[0])
    assert admit_and_land(scheduler) == ["c", "b", "a"]
    assert step(scheduler) == ["c", "b", "a"], "packed in order of priority"
    while len(scheduler.running) == 3:
        step(scheduler)
    assert [sample.request.request_id for sample in scheduler.running] == ["c", "b"]


def test_a_paused_sample_sits_out_and_gives_way() -> None:
    scheduler = make(num_pages=12, num_slots=2)
    for name in ("a", "b", "c"):
        scheduler.submit(request(name, 7, 20), retry_after_s=1.0)
    assert admit_and_land(scheduler) == ["a", "b"]
    scheduler.pause("a", paused=True)
    assert admit_and_land(scheduler) == ["c"], "the oldest gives its slot to one that is read"
    assert step(scheduler) == ["b", "c"]
    scheduler.end(scheduler.live_samples("b")[0])
    assert admit_and_land(scheduler) == [], "a paused sample is not brought back"
    scheduler.pause("a", paused=False)
    assert admit_and_land(scheduler) == ["a"]
    assert step(scheduler) == ["c", "a"]


def test_growing_samples_keep_a_page_each() -> None:
    scheduler = make(num_pages=6, num_slots=4)
    for name in ("a", "b"):
        scheduler.submit(request(name, 11, 9), retry_after_s=1.0)
    assert admit_and_land(scheduler) == ["a"], "3 pages of 6 are free, and a may need one of them"


def test_the_latest_sample_is_preempted_and_served_first_again() -> None:
    scheduler = make(num_pages=5, num_slots=2)
    for name in ("a", "b"):
        scheduler.submit(request(name, 7, 9), retry_after_s=1.0)
    jobs = scheduler.admit(now=0.0)
    assert len(jobs) == 2
    for job in jobs:
        scheduler.landed(job)
    scheduler.submit(request("c", 1, 1), retry_after_s=1.0)
    while len(scheduler.running) == 2:
        step(scheduler)
    assert [sample.key for sample in scheduler.running] == ["a#0"]
    assert [job.lead.key for job in scheduler.waiting] == ["b#0", "c#0"]
    assert scheduler.waiting[0].lead.output == [1, 1]
    assert scheduler.waiting[0].lead.num_cached == 0


def start(scheduler: DecodeScheduler, *requests: GenerateRequest) -> None:
    """Admits requests and gives each its first token, 1."""
    for one in requests:
        scheduler.submit(one, retry_after_s=1.0)
    admit_and_land(scheduler)
    step(scheduler)


def drafted(scheduler: DecodeScheduler, **blocks: list[int]) -> DecodeBatch:
    batch = scheduler.schedule({f"{name}#0": DraftBlock(tokens=tokens) for name, tokens in blocks.items()})
    assert batch is not None
    return batch


def answer(scheduler: DecodeScheduler, batch: DecodeBatch, **tokens: list[int]) -> dict[str, Emission]:
    sampled = {f"{name}#0": [Sampled(token_id=one) for one in given] for name, given in tokens.items()}
    emissions = scheduler.commit(batch, StepOutput(sampled=sampled))
    scheduler.check()
    return {emission.sample.request.request_id: emission for emission in emissions}


def test_accepted_drafts_and_one_token_more_are_booked_at_once() -> None:
    scheduler = make()
    start(scheduler, request("a", 5, 20), request("b", 5, 20))
    batch = drafted(scheduler, a=[2, 3, 4])
    assert [row.drafts for row in batch.rows] == [(2, 3, 4), ()]
    emissions = answer(scheduler, batch, a=[2, 3, 7], b=[8])
    assert [[one.token_id for one in emission.tokens] for emission in emissions.values()] == [[2, 3, 7], [8]]
    assert (emissions["a"].num_drafts, emissions["a"].num_accepted) == (3, 2)
    assert (emissions["b"].num_drafts, emissions["b"].num_accepted) == (0, 0)
    a, b = scheduler.running
    assert (a.output, a.num_cached, b.output, b.num_cached) == ([1, 2, 3, 7], 8, [1, 8], 6)
    assert a.counts == {1: 1, 2: 1, 3: 1, 7: 1}
    row = drafted(scheduler).rows[0]
    assert (row.token_id, row.position) == (7, 8)


def test_drafts_are_cut_to_what_may_still_come_out() -> None:
    scheduler = make(num_pages=20)
    start(scheduler, request("a", 5, 4), request("b", 30, 40))
    batch = drafted(scheduler, a=[2, 3, 4, 5, 6], b=[2] * 20)
    # a may put out 3 tokens more, the last of which needs no draft; b stands at 31 of 40 tokens.
    assert [row.drafts for row in batch.rows] == [(2, 3), (2,) * 8]
    emissions = answer(scheduler, batch, a=[2, 3, 4], b=[3])
    assert emissions["a"].finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_a_block() -> None:
    scheduler = make()
    start(scheduler, request("a", 5, 20))
    (sample,) = scheduler.running
    emission = answer(scheduler, drafted(scheduler, a=[2, 9, 3]), a=[2, 9, 3, 4])["a"]
    assert [one.token_id for one in emission.tokens] == [2, 9] and emission.stop_token
    assert emission.finish_reason is FinishReason.STOP and sample.output == [1, 2, 9]
    assert scheduler.pages.num_free == 10


def test_drafts_take_free_pages_alone_and_give_them_back() -> None:
    scheduler = make(num_pages=6, num_slots=2)
    start(scheduler, request("a", 7, 20), request("b", 3, 20))
    assert scheduler.pages.num_free == 3
    # a holds 2 pages of 4 tokens and stands at 7, b one and stands at 3: a takes two more, what is left is b's.
    batch = drafted(scheduler, a=[2] * 6, b=[2] * 6)
    assert [len(row.drafts) for row in batch.rows] == [6, 4]
    assert scheduler.pages.num_free == 0 and scheduler.num_preemptions == 0
    answer(scheduler, batch, a=[3], b=[3])
    assert [len(sample.pages) for sample in scheduler.running] == [3, 2], "what the next token needs"
    assert scheduler.pages.num_free == 1


def test_a_row_that_fails_keeps_the_tokens_before() -> None:
    scheduler = make()
    start(scheduler, request("a", 5, 20))
    batch = drafted(scheduler, a=[2, 3])
    output = StepOutput(sampled={"a#0": [Sampled(token_id=2)]}, failed={"a#0": "no number"})
    (emission,) = scheduler.commit(batch, output)
    assert [one.token_id for one in emission.tokens] == [2] and emission.failure == "no number"
    assert emission.num_accepted == 1 and not scheduler.running
    scheduler.check()


def test_replayed_tokens_have_no_drafts() -> None:
    scheduler = make()
    scheduler.submit(replace(request("a", 5, 9), generated=(3, 4)), retry_after_s=1.0)
    admit_and_land(scheduler)
    assert drafted(scheduler, a=[4, 5]).rows[0].drafts == ()


class Grammar:
    """Makes matchers that can be told apart."""

    def __init__(self) -> None:
        self.matchers: list[Matcher] = []

    def matcher(self) -> "Matcher":
        self.matchers.append(Matcher())
        return self.matchers[-1]


class Matcher:
    def allowed(self, output: Sequence[int], drafts: Sequence[int] = ()) -> bytes:
        return bytes([*output, *drafts])


def test_each_sample_has_a_matcher_that_sees_its_output_grow_and_noise_of_its_own_number() -> None:
    grammar = Grammar()
    scheduler = make()
    scheduler.submit(replace(request("r", 3, n=2), grammar=grammar, first_sample=5), retry_after_s=1.0)
    (job,) = scheduler.admit(now=0.0)
    scheduler.landed(job)
    for length in range(3):
        batch = scheduler.schedule()
        assert batch is not None
        specs = [row.sample for row in batch.all_rows if row.sample is not None]
        assert [spec.sample_index for spec in specs] == [5, 6]
        guides = [spec.guide for spec in specs if spec.guide is not None]
        assert [guide.matcher for guide in guides] == grammar.matchers
        assert [guide.allowed() for guide in guides] == [bytes([2] * length), bytes([3] * length)]
        assert specs[0].after([7, 8]).guide == Guide(matcher=grammar.matchers[0], output=[2] * length, drafts=(7, 8))
        chosen = {row.key: [Sampled(token_id=2 + i)] for i, row in enumerate(batch.all_rows)}
        scheduler.commit(batch, StepOutput(sampled=chosen))
