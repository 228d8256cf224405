"""Which prompt chunks run next on a prefill service, and which pages and slots they hold.

Plain and synchronous: callers pass the time in. A prompt is waiting (no memory), active (pages and a slot; chunks
remain), or computed (state held until it is given back). Memory of a prompt that ends while a step uses it is given
back when that step is committed.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from k3svc.core.batch import ExtendBatch, ExtendRow
from k3svc.core.chunks import next_chunk
from k3svc.core.pages import PagePool
from k3svc.core.slots import SlotPool
from k3svc.errors import InvalidRequest, ResourceExhausted


@dataclass(kw_only=True, eq=False)
class Prompt:
    """One attempt at one prompt; owned by the scheduler."""

    key: str
    token_ids: tuple[int, ...]
    priority: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_chunks: int = 0
    paused: bool = False
    """Nobody reads the hand-off; no further chunk is scheduled."""
    in_step: bool = False
    ended: bool = False

    @property
    def is_computed(self) -> bool:
        return self.num_computed == len(self.token_ids)


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
    ) -> None:
        self.pages = pages
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

    def schedule(self) -> tuple[ExtendBatch | None, list[Prompt]]:
        """Admits what fits and packs the next step. Returns the batch (None: nothing to run) and the newly admitted."""
        admitted = self._admit()
        rows: list[ExtendRow] = []
        budget = self.chunk_tokens
        for prompt in sorted(self.active.values(), key=lambda p: p.priority):
            if prompt.paused:
                continue
            count = next_chunk(len(prompt.token_ids) - prompt.num_computed, budget, self._grid)
            if count == 0:
                continue
            assert prompt.slot is not None
            start = prompt.num_computed
            rows.append(
                ExtendRow(
                    key=prompt.key,
                    slot=prompt.slot,
                    block_table=tuple(prompt.pages),
                    token_ids=prompt.token_ids[start : start + count],
                    start=start,
                    is_last=start + count == len(prompt.token_ids),
                )
            )
            prompt.in_step = True
            self._in_step[prompt.key] = prompt
            budget -= -(-count // self._grid) * self._grid
            if budget <= 0:
                break
        return (ExtendBatch(rows=tuple(rows)) if rows else None), admitted

    def commit(self, batch: ExtendBatch) -> list[Prompt]:
        """Books a step that ran; returns the prompts that it completed."""
        completed = []
        for row in batch.rows:
            prompt = self._in_step.pop(row.key)
            prompt.in_step = False
            if prompt.ended:
                self._give_back(prompt)
                continue
            prompt.num_computed += len(row.token_ids)
            prompt.num_chunks += 1
            if prompt.is_computed:
                del self.active[prompt.key]
                self.computed[prompt.key] = prompt
                completed.append(prompt)
        return completed

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
        """Raises AssertionError unless pools are whole and hold exactly what live prompts hold."""
        self.pages.check()
        self.slots.check()
        assert self.waiting_tokens == sum(len(p.token_ids) for p in self.waiting.values())
        holders = {id(p): p for p in (*self.active.values(), *self.computed.values(), *self._in_step.values())}
        assert self.slots.num_slots - self.slots.num_free == len(holders), "slots without a prompt"
        held = sum(len(p.pages) for p in holders.values())
        assert self.pages.num_pages - self.pages.num_free == held, "pages without a prompt"

    def _admit(self) -> list[Prompt]:
        admitted = []
        for prompt in sorted(self.waiting.values(), key=lambda p: p.priority):
            if prompt.paused:
                continue
            needed = -(-len(prompt.token_ids) // self._page_size)
            if self.slots.num_free == 0 or self.pages.num_free < needed:
                break
            pages, slots = self.pages.allocate(needed), self.slots.allocate(1)
            assert pages is not None and slots is not None
            prompt.pages, prompt.slot = pages, slots[0]
            del self.waiting[prompt.key]
            self.waiting_tokens -= len(prompt.token_ids)
            self.active[prompt.key] = prompt
            admitted.append(prompt)
        return admitted

    def _give_back(self, prompt: Prompt) -> None:
        if prompt.slot is not None:
            self.slots.free(prompt.slot)
            self.pages.free(prompt.pages)
            prompt.slot, prompt.pages = None, []
