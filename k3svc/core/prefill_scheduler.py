"""Which prompt chunks run next on a prefill service, and which pages and slots they hold.

Plain and synchronous: callers pass the time in. A prompt is waiting (no memory), active (pages and a slot; chunks
remain), or computed (state held until it is given back). It is admitted when a step has room for its first chunk, not
before, so that it begins with what the prompts before it left in the prefix cache. Memory of a prompt that ends while a
step uses it is given back when that step is committed.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from k3svc.core.batch import ExtendBatch, ExtendRow
from k3svc.core.chunks import next_chunk
from k3svc.core.pages import PagePool
from k3svc.core.prefix_cache import Match, Node, PrefixCache
from k3svc.core.slots import SlotPool
from k3svc.errors import InvalidRequest, ResourceExhausted


@dataclass(kw_only=True, eq=False)
class Prompt:
    """One attempt at one prompt; owned by the scheduler."""

    key: str
    token_ids: tuple[int, ...]
    priority: int = 0
    namespace: str = ""
    """Of the prefix cache."""
    features_from: int | None = None
    """The first token whose draft features are wanted; None: none are."""
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    """The first num_cached tokens lie on shared ones."""
    num_computed: int = 0
    """Tokens whose state is there, from the cache or computed."""
    num_cached: int = 0
    num_chunks: int = 0
    node: Node | None = None
    """What it holds of the cache."""
    marks: tuple[int, ...] = ()
    """Where chunks end for the sake of a snapshot."""
    features: bytearray = field(default_factory=bytearray)
    """Those of the tokens that were computed, as far as they are wanted."""
    paused: bool = False
    """Nobody reads the hand-off; no further chunk is scheduled."""
    snapshot_to: int | None = None
    """Slot that the step that runs writes its states to."""
    in_step: bool = False
    ended: bool = False

    @property
    def is_computed(self) -> bool:
        return self.num_computed == len(self.token_ids)

    def features_of(self, first: int, count: int) -> bytes | None:
        """Those of `count` tokens from `first` on; None: they were not made here."""
        made = self.num_computed - self.num_cached
        if not self.features or first < self.num_cached or len(self.features) % made:
            return None
        width = len(self.features) // made
        begin = (first - self.num_cached) * width
        return bytes(self.features[begin : begin + count * width])


class PrefillScheduler:
    """Continuous batching of prompt chunks: lower priority number first, then first come, first served."""

    def __init__(
        self,
        *,
        pages: PagePool,
        slots: SlotPool,
        page_size: int,
        chunk_tokens: int,
        grid: int,
        max_waiting: int,
        max_waiting_tokens: int,
        max_prompt_tokens: int,
        cache: PrefixCache | None = None,
    ) -> None:
        """`cache`: None: every prompt is computed whole. Its interval is a multiple of `grid`."""
        assert cache is None or cache.interval % grid == 0, f"snapshots every {cache.interval} tokens, chunks of {grid}"
        self.pages = pages
        self.cache = cache
        self.slots = slots
        self._page_size = page_size
        self.chunk_tokens = chunk_tokens
        self._grid = grid
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._max_prompt_tokens = min(max_prompt_tokens, pages.num_pages * page_size)
        self.waiting: OrderedDict[str, Prompt] = OrderedDict()
        self.active: OrderedDict[str, Prompt] = OrderedDict()
        self.computed: dict[str, Prompt] = {}
        self.waiting_tokens = 0
        self._in_step: dict[str, Prompt] = {}

    def submit(self, prompt: Prompt, *, retry_after_s: float) -> None:
        """Queues a prompt. Raises InvalidRequest when it can never run, ResourceExhausted when the queue is full."""
        size = len(prompt.token_ids)
        if not 1 <= size <= self._max_prompt_tokens:
            raise InvalidRequest("prompt", f"{size} tokens", f"1 to {self._max_prompt_tokens} tokens on this service")
        if len(self.waiting) >= self._max_waiting or (
            self.waiting and self.waiting_tokens + size > self._max_waiting_tokens
        ):
            raise ResourceExhausted(
                f"prefill queue is full: {len(self.waiting)} prompts, {self.waiting_tokens} tokens wait",
                retry_after_s=retry_after_s,
            )
        self.waiting[prompt.key] = prompt
        self.waiting_tokens += size

    @property
    def num_free_pages(self) -> int:
        """Those that prompts may have; what the cache keeps for nobody in particular is as good as free."""
        return self.pages.num_free + (0 if self.cache is None else self.cache.num_idle)

    def schedule(self) -> tuple[ExtendBatch | None, list[Prompt]]:
        """Admits what fits and packs the next step. Returns the batch (None: nothing to run) and the newly admitted."""
        admitted: list[Prompt] = []
        rows: list[ExtendRow] = []
        budget = self.chunk_tokens
        has_room = True
        for prompt in sorted((*self.active.values(), *self.waiting.values()), key=lambda p: p.priority):
            if budget <= 0:
                break
            if prompt.paused:
                continue
            if prompt.key in self.waiting:
                has_room = has_room and self._admit(prompt)
                if not has_room:
                    continue
                admitted.append(prompt)
            row = self._row(prompt, budget)
            rows.append(row)
            prompt.in_step, prompt.snapshot_to = True, row.snapshot_to
            self._in_step[prompt.key] = prompt
            budget -= -(-len(row.token_ids) // self._grid) * self._grid
        return (ExtendBatch(rows=tuple(rows)) if rows else None), admitted

    def commit(self, batch: ExtendBatch) -> list[Prompt]:
        """Books a step that ran; returns the prompts that it completed."""
        completed = []
        for row in batch.rows:
            prompt = self._in_step.pop(row.key)
            prompt.in_step, prompt.snapshot_to = False, None
            if row.restore_from is not None:
                assert self.cache is not None and prompt.node is not None
                self.cache.end_read(prompt.node)
            if prompt.ended:
                if row.snapshot_to is not None:
                    assert self.cache is not None
                    self.cache.slots.free(row.snapshot_to)
                self._give_back(prompt)
                continue
            prompt.num_computed += len(row.token_ids)
            prompt.num_chunks += 1
            if row.snapshot_to is not None:
                self._keep(prompt, row.snapshot_to)
            if prompt.is_computed:
                del self.active[prompt.key]
                self.computed[prompt.key] = prompt
                completed.append(prompt)
        return completed

    def distrust(self, prompt: Prompt) -> None:
        """Forgets what the cache has of a prompt whose numbers went wrong."""
        if self.cache is not None and prompt.node is not None:
            self.cache.distrust(prompt.node)

    def end(self, prompt: Prompt) -> None:
        """Gives the prompt's memory back: now, or when the running step is committed. Safe to repeat."""
        if prompt.ended:
            return
        prompt.ended = True
        if self.waiting.pop(prompt.key, None) is not None:
            self.waiting_tokens -= len(prompt.token_ids)
        self.active.pop(prompt.key, None)
        self.computed.pop(prompt.key, None)
        if not prompt.in_step:
            self._give_back(prompt)

    def check(self) -> None:
        """Raises AssertionError unless pools are whole and hold exactly what live prompts and the cache hold."""
        self.pages.check()
        self.slots.check()
        assert self.waiting_tokens == sum(len(p.token_ids) for p in self.waiting.values())
        holders = {id(p): p for p in (*self.active.values(), *self.computed.values(), *self._in_step.values())}
        assert self.slots.num_slots - self.slots.num_free == len(holders), "slots without a prompt"
        held = Counter(page for p in holders.values() for page in p.pages)
        if self.cache is not None:
            held.update(self.cache.pages())
            self.cache.check(
                [p.node for p in holders.values() if p.node is not None],
                num_pending=sum(1 for p in holders.values() if p.snapshot_to is not None),
            )
        assert held == self.pages.holders(), "pages without a prompt"

    def _admit(self, prompt: Prompt) -> bool:
        """Gives a prompt its memory; False (and no change) when there is not enough."""
        if self.slots.num_free == 0:
            return False
        needed = -(-len(prompt.token_ids) // self._page_size)
        cache, match = self.cache, None
        shared: list[int] = []
        if cache is not None:
            match = cache.match(prompt.namespace, prompt.token_ids, features_from=prompt.features_from)
            cache.hold(match.node)
            shared = [node.page for node in cache.path(match.node)]
            needed -= len(shared)
            if not cache.make_room(needed):
                cache.release(match.node)
                return False
        elif self.pages.num_free < needed:
            return False
        pages, slots = self.pages.allocate(needed), self.slots.allocate(1)
        assert pages is not None and slots is not None
        self.pages.share(shared)
        prompt.pages, prompt.slot = shared + pages, slots[0]
        if cache is not None and match is not None:
            self._go_on(prompt, cache, match)
        del self.waiting[prompt.key]
        self.waiting_tokens -= len(prompt.token_ids)
        self.active[prompt.key] = prompt
        return True

    def _go_on(self, prompt: Prompt, cache: PrefixCache, match: Match) -> None:
        """Starts a prompt where a match ends. Snapshots are worth a cut where prompts part, so that the next one of
        that beginning goes on from there, and near the end, for a prompt that has this one as its beginning.
        """
        prompt.node = match.node
        prompt.num_cached = prompt.num_computed = match.num_tokens
        ends = {match.num_known}
        if cache.is_worth_a_cut(prompt.namespace, prompt.token_ids):
            ends.add(len(prompt.token_ids) - 1)
        prompt.marks = tuple(sorted({end // cache.interval * cache.interval for end in ends}))
        cache.counts.queried_tokens += len(prompt.token_ids)
        cache.counts.hit_tokens += match.num_tokens

    def _row(self, prompt: Prompt, budget: int) -> ExtendRow:
        """The next chunk; every budget has room for some of it."""
        assert prompt.slot is not None
        start, size, cache = prompt.num_computed, len(prompt.token_ids), self.cache
        grid = self._grid if cache is None or budget < cache.interval else cache.interval
        stop = next((mark for mark in prompt.marks if mark > start), size)
        end = start + next_chunk(stop - start, budget, grid)
        assert end > start, "a chunk without tokens"
        return ExtendRow(
            key=prompt.key,
            slot=prompt.slot,
            block_table=tuple(prompt.pages),
            token_ids=prompt.token_ids[start:end],
            start=start,
            is_last=end == size,
            restore_from=self._restore_from(prompt),
            snapshot_to=self._snapshot_to(prompt, end),
        )

    def _restore_from(self, prompt: Prompt) -> int | None:
        if prompt.num_chunks or not prompt.num_cached:
            return None
        assert self.cache is not None and prompt.node is not None
        self.cache.begin_read(prompt.node)
        return prompt.node.snapshot

    def _snapshot_to(self, prompt: Prompt, end: int) -> int | None:
        """Where a chunk ends on the interval by itself, only a free slot is taken."""
        cache = self.cache
        if cache is None or end % cache.interval or end == len(prompt.token_ids):
            return None
        assert prompt.node is not None
        with_features = prompt.features_from is not None
        if not prompt.node.is_cached or cache.is_known(prompt.node, prompt.token_ids, end, with_features=with_features):
            return None
        return cache.take_slot(evict=end in prompt.marks)

    def _keep(self, prompt: Prompt, slot: int) -> None:
        size = self._page_size
        assert self.cache is not None and prompt.node is not None
        prompt.node = self.cache.insert(
            prompt.node,
            prompt.token_ids,
            prompt.pages,
            prompt.num_computed,
            slot,
            lambda index: prompt.features_of(index * size, size),
        )

    def _give_back(self, prompt: Prompt) -> None:
        if prompt.slot is not None:
            self.slots.free(prompt.slot)
            self.pages.free(prompt.pages)
            prompt.slot, prompt.pages = None, []
        if prompt.node is not None:
            assert self.cache is not None
            self.cache.release(prompt.node)
            prompt.node = None
