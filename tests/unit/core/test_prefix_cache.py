"""The prefix cache under its scheduler, against a model of what memory holds: a slot the tokens that its states cover,
a page the tokens of its rows.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from k3svc.core.batch import ExtendBatch
from k3svc.core.pages import PagePool
from k3svc.core.prefill_scheduler import PrefillScheduler, Prompt
from k3svc.core.prefix_cache import CacheEvent, Cleared, PrefixCache, Removed, Stored
from k3svc.core.slots import SlotPool

PAGE = 2
GRID = 4
BEGINNINGS = (
    (1,) * 24,
    (1,) * 8 + (2,) * 16,
    (1,) * 12 + (3,) * 12,
    (4,) * 24,
)


@dataclass
class Memory:
    """What a device would hold."""

    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pages: dict[int, dict[int, int]] = field(default_factory=dict)
    """Page → offset → token."""

    def run(self, batch: ExtendBatch) -> None:
        for row in batch.rows:
            if row.restore_from is not None:
                self.slots[row.slot] = self.slots[row.restore_from]
        for row in batch.rows:
            before = self.slots[row.slot] if row.start else ()
            assert len(before) == row.start, "states of another length"
            for position, token in enumerate(row.token_ids, start=row.start):
                page = row.block_table[position // PAGE]
                self.pages.setdefault(page, {})[position % PAGE] = token
            self.slots[row.slot] = (*before, *row.token_ids)
        for row in batch.rows:
            if row.snapshot_to is not None:
                self.slots[row.snapshot_to] = self.slots[row.slot]

    def check(self, prompt: Prompt) -> None:
        """A computed prompt has the state and the rows of its own tokens."""
        assert prompt.slot is not None
        assert self.slots[prompt.slot] == prompt.token_ids
        rows = [self.pages[prompt.pages[i // PAGE]][i % PAGE] for i in range(len(prompt.token_ids))]
        assert tuple(rows) == prompt.token_ids


def make(
    num_pages: int, num_slots: int, num_snapshots: int, *, chunk_tokens: int = 8, min_tokens: int = 0
) -> PrefillScheduler:
    pages = PagePool(num_pages)
    slots = SlotPool(num_snapshots, first=num_slots + 1)
    return PrefillScheduler(
        pages=pages,
        slots=SlotPool(num_slots),
        page_size=PAGE,
        chunk_tokens=chunk_tokens,
        grid=GRID,
        max_waiting=100,
        max_waiting_tokens=10_000,
        max_prompt_tokens=1000,
        cache=PrefixCache(pages=pages, slots=slots, page_size=PAGE, interval=GRID, min_tokens=min_tokens),
    )


class PrefixCacheMachine(RuleBasedStateMachine):
    """After every event the tree is whole, the pools are whole, and each state is that of its prompt."""

    @initialize(
        pages=st.integers(12, 40),
        slots=st.integers(1, 4),
        snapshots=st.integers(1, 5),
        min_tokens=st.sampled_from((0, 10)),
    )
    def start(self, pages: int, slots: int, snapshots: int, min_tokens: int) -> None:
        self.scheduler = make(pages, slots, snapshots, min_tokens=min_tokens)
        assert self.scheduler.cache is not None
        self.cache = self.scheduler.cache
        self.cache.on_event = self.told
        self.memory = Memory()
        self.batch: ExtendBatch | None = None
        self.known: set[int] = set()
        self.live: dict[str, Prompt] = {}
        self.count = 0

    def told(self, event: CacheEvent) -> None:
        if isinstance(event, Stored):
            assert event.parent_hash is None or event.parent_hash in self.known
            assert not self.known & set(event.block_hashes)
            self.known |= set(event.block_hashes)
        elif isinstance(event, Removed):
            self.known.remove(event.block_hash)
        else:
            self.known.clear()

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        shared=st.integers(0, 24),
        rest=st.integers(0, 9),
        namespace=st.sampled_from(("", "", "other")),
    )
    def submit(self, beginning: tuple[int, ...], shared: int, rest: int, namespace: str) -> None:
        self.count += 1
        tokens = (*beginning[:shared], *(100 + (self.count * 7 + i) % 3 for i in range(rest)))
        if not tokens or -(-len(tokens) // PAGE) > self.scheduler.pages.num_pages:
            return
        prompt = Prompt(key=f"p{self.count}", token_ids=tokens, namespace=namespace)
        self.scheduler.submit(prompt, retry_after_s=1.0)
        self.live[prompt.key] = prompt

    @precondition(lambda self: self.batch is None)
    @rule()
    def schedule(self) -> None:
        self.batch, admitted = self.scheduler.schedule()
        for prompt in admitted:
            # What came from the cache lies on pages of the same tokens.
            rows = [self.memory.pages[prompt.pages[i // PAGE]][i % PAGE] for i in range(prompt.num_cached)]
            assert tuple(rows) == prompt.token_ids[: prompt.num_cached]
            assert prompt.num_cached < len(prompt.token_ids)
            assert prompt.num_cached % GRID == 0
        for row in self.batch.rows if self.batch else ():
            written = set(row.block_table[row.start // PAGE : -(-(row.start + len(row.token_ids)) // PAGE)])
            assert not written & set(self.cache.pages()), "a step writes to a cached page"
            others = [p for p in self.live.values() if p.key != row.key]
            assert not any(written & set(p.pages) for p in others), "a step writes to a page of another prompt"

    @precondition(lambda self: self.batch is not None)
    @rule()
    def commit(self) -> None:
        assert self.batch is not None
        self.memory.run(self.batch)
        for prompt in self.scheduler.commit(self.batch):
            self.memory.check(prompt)
        self.batch = None

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_faulty=st.booleans())
    def end(self, data: st.DataObject, is_faulty: bool) -> None:
        prompt = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        if is_faulty:
            self.scheduler.distrust(prompt)
        self.scheduler.end(prompt)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert self.known == {hash_ for event in self.cache.contents() for hash_ in event.block_hashes}
        for prompt in self.scheduler.computed.values():
            self.memory.check(prompt)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for prompt in self.live.values():
            self.scheduler.end(prompt)
        if self.batch is not None:
            self.scheduler.commit(self.batch)
        self.scheduler.check()
        assert self.scheduler.num_free_pages == self.scheduler.pages.num_pages
        self.cache.clear()
        self.scheduler.check()
        assert self.scheduler.pages.num_free == self.scheduler.pages.num_pages
        assert self.cache.slots.num_free == self.cache.slots.num_slots


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=60, stateful_step_count=40)


def run(scheduler: PrefillScheduler, *prompts: Prompt, memory: Memory | None = None) -> None:
    """Computes prompts to their end."""
    for prompt in prompts:
        scheduler.submit(prompt, retry_after_s=1.0)
    while not all(prompt.is_computed for prompt in prompts):
        batch, _ = scheduler.schedule()
        assert batch is not None, "nothing runs"
        if memory is not None:
            memory.run(batch)
        scheduler.commit(batch)


def prompt(key: str, token_ids: tuple[int, ...], **options: object) -> Prompt:
    return Prompt(key=key, token_ids=token_ids, **options)  # type: ignore[arg-type]


def test_a_prompt_goes_on_where_its_beginning_was_cut() -> None:
    scheduler = make(100, 4, 10)
    run(scheduler, first := prompt("a", tuple(range(19))))
    assert (first.num_cached, first.num_chunks) == (0, 3), "cut at 8, at 16 = the last multiple, and at the end"
    run(scheduler, same := prompt("b", tuple(range(19))), longer := prompt("c", (*range(19), 50, 51, 52)))
    assert (same.num_cached, longer.num_cached) == (16, 16)
    run(scheduler, short := prompt("d", tuple(range(16))))
    assert short.num_cached == 8, "its last token is computed, for the logits"


def test_the_third_prompt_goes_on_where_the_second_parted_from_the_first() -> None:
    scheduler = make(100, 8, 10, chunk_tokens=64)
    beginning = tuple(range(14))
    made = [prompt(str(i), (*beginning, *(100 * i + j for j in range(20)))) for i in range(1, 4)]
    for each in made:
        run(scheduler, each)
    assert [each.num_cached for each in made] == [0, 0, 12]


def test_a_short_prompt_is_cut_only_if_another_began_alike() -> None:
    scheduler = make(100, 8, 10, chunk_tokens=64, min_tokens=14)
    tokens = tuple(range(8))
    made = [prompt(key, (*tokens, 50, number)) for number, key in enumerate("abc")]
    for each in made:
        run(scheduler, each)
    assert [(each.num_chunks, each.num_cached) for each in made] == [(1, 0), (2, 0), (1, 8)]
    run(scheduler, other := prompt("d", tuple(range(20, 30))), apart := prompt("e", (*tokens, 50, 3), namespace="x"))
    assert (other.num_chunks, apart.num_chunks, apart.num_cached) == (1, 1, 0)
    run(scheduler, long := prompt("f", tuple(range(30, 44))))
    run(scheduler, again := prompt("g", (*range(30, 44), 1)))
    assert (long.num_cached, again.num_cached) == (0, 12)


def test_prompts_of_other_namespaces_are_never_found() -> None:
    scheduler = make(100, 8, 10)
    tokens = tuple(range(20))
    run(scheduler, prompt("a", tokens, namespace="alice"))
    run(scheduler, bob := prompt("b", tokens, namespace="bob"), alice := prompt("c", tokens, namespace="alice"))
    assert (bob.num_cached, alice.num_cached) == (0, 16)


def test_a_prompt_that_needs_memory_gets_that_of_the_longest_unused() -> None:
    scheduler = make(24, 4, 10)
    assert scheduler.cache is not None
    old, new = tuple(range(16)), tuple(range(100, 116))
    for key, tokens in (("old", old), ("new", new)):
        run(scheduler, done := prompt(key, tokens))
        scheduler.end(done)
    run(scheduler, used := prompt("again", old))
    scheduler.end(used)
    assert (used.num_cached, scheduler.num_free_pages) == (12, 24)
    run(scheduler, big := prompt("big", tuple(range(200, 236))))
    scheduler.end(big)
    assert scheduler.cache.counts.evicted_pages > 0
    run(scheduler, kept := prompt("kept", old), gone := prompt("gone", new))
    assert kept.num_cached > 0
    assert gone.num_cached == 0
    scheduler.check()


def test_the_longest_unused_state_makes_room_for_another() -> None:
    scheduler = make(100, 4, 2)
    prompts = {key: tuple(range(base, base + 6)) for key, base in (("a", 0), ("b", 100), ("c", 200))}
    for key in ("a", "b", "a", "c"):
        run(scheduler, done := prompt(f"{key}{len(scheduler.pages.holders())}", prompts[key]))
        scheduler.end(done)
    assert scheduler.cache is not None
    assert scheduler.cache.counts.evicted_snapshots == 1
    found = {key: scheduler.cache.match("", tokens).num_tokens for key, tokens in prompts.items()}
    assert found == {"a": 4, "b": 0, "c": 4}


def test_a_chunk_that_ends_on_the_interval_by_itself_takes_no_state_from_others() -> None:
    scheduler = make(100, 4, 2)
    run(scheduler, prompt("a", tuple(range(6))))
    run(scheduler, prompt("b", tuple(range(100, 140))))
    assert scheduler.cache is not None
    assert scheduler.cache.counts.evicted_snapshots == 1, "for the last one of b"
    assert scheduler.cache.match("", tuple(range(100, 140))).num_tokens == 36


def test_a_state_that_a_step_reads_is_not_given_away() -> None:
    scheduler = make(100, 4, 1)
    memory = Memory()
    run(scheduler, prompt("a", tuple(range(6))), memory=memory)
    # One step goes on from the only state, and another prompt in it ends on the interval.
    reader, writer = prompt("b", (*range(4), 7, 8)), prompt("c", tuple(range(100, 106)))
    run(scheduler, reader, writer, memory=memory)
    assert (reader.num_cached, writer.num_cached) == (4, 0)
    memory.check(reader)
    memory.check(writer)
    scheduler.check()


def test_flush_in_the_middle_of_a_step_leaves_the_step_its_state() -> None:
    scheduler = make(100, 4, 1)
    assert scheduler.cache is not None
    memory = Memory()
    run(scheduler, prompt("a", tuple(range(6))), memory=memory)
    scheduler.submit(reader := prompt("b", (*range(4), 7, 8)), retry_after_s=1.0)
    batch, _ = scheduler.schedule()
    assert batch is not None
    events: list[CacheEvent] = []
    scheduler.cache.on_event = events.append
    assert scheduler.cache.clear() == 2
    assert events == [Cleared()]
    assert scheduler.cache.take_slot(evict=True) is None, "the step reads it"
    scheduler.check()
    memory.run(batch)
    scheduler.commit(batch)
    memory.check(reader)
    scheduler.check()
    assert scheduler.cache.slots.num_free == 1


def test_what_a_failed_prompt_left_is_forgotten() -> None:
    scheduler = make(100, 4, 4)
    run(scheduler, bad := prompt("a", tuple(range(14))), prompt("b", tuple(range(100, 114))))
    scheduler.distrust(bad)
    scheduler.end(bad)
    scheduler.check()
    run(scheduler, again := prompt("c", tuple(range(14))), other := prompt("d", tuple(range(100, 114))))
    assert (again.num_cached, other.num_cached) == (0, 12)


@pytest.mark.parametrize("features_from", [None, 0, 11, 12, 15])
def test_a_prompt_that_wants_features_goes_on_only_where_they_are_known(features_from: int | None) -> None:
    """The prompt that is cached made those of its tokens from 12 on."""
    scheduler = make(100, 4, 10)
    assert scheduler.cache is not None
    run(scheduler, prompt("a", tuple(range(12))))
    first = prompt("b", tuple(range(18)), features_from=0)
    scheduler.submit(first, retry_after_s=1.0)
    while not first.is_computed:
        batch, _ = scheduler.schedule()
        assert batch is not None
        for row in batch.rows:
            first.features += bytes(token for token in row.token_ids)
        scheduler.commit(batch)
    assert first.num_cached == 0, "those of its first tokens were not known"
    found = scheduler.cache.match("", tuple(range(18)), features_from=features_from)
    assert found.num_tokens == 16
    nodes = scheduler.cache.path(found.node)
    assert [node.features for node in nodes] == [bytes((2 * i, 2 * i + 1)) for i in range(8)]
