"""The least that runs a model over its caches: sequences with a slot and pages, extend and decode steps of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3svc.model.kimi import Model, cache_spec
from k3svc.ops.table import Cache, Mode, Ops, StepMeta


@dataclass(kw_only=True)
class Tracked:
    """A sequence in the caches. Slot -1 is padding."""

    slot: int
    pages: list[int]
    length: int = 0
    hidden: list[Tensor] = field(default_factory=list)


def step_meta(rows: Sequence[tuple[Tracked, int]], page_size: int, num_rows: int | None = None) -> StepMeta:
    """StepMeta of (sequence, number of its rows), padded to num_rows packed rows."""
    bounds = [0]
    mapping: list[int] = []
    for sequence, count in rows:
        bounds.append(bounds[-1] + count)
        for position in range(sequence.length, sequence.length + count):
            page = sequence.pages[position // page_size] if sequence.slot >= 0 else 0
            mapping.append(page * page_size + position % page_size if sequence.slot >= 0 else -1)
    mapping += [-1] * ((num_rows or 0) - len(mapping))
    width = max(len(sequence.pages) for sequence, _ in rows)
    tables = torch.zeros(len(rows), max(width, 1), dtype=torch.int64)
    for index, (sequence, _) in enumerate(rows):
        tables[index, : len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int64)
    slots = [sequence.slot for sequence, _ in rows]
    starts = [sequence.length for sequence, _ in rows]
    return StepMeta(
        slots=torch.tensor(slots),
        starts=torch.tensor(starts),
        cu_seqlens=torch.tensor(bounds),
        slot_mapping=torch.tensor(mapping, dtype=torch.int64),
        block_tables=tables,
        host_slots=tuple(slots),
        host_starts=tuple(starts),
        host_cu_seqlens=tuple(bounds),
        page_size=page_size,
    )


class Loop:
    """A model with caches. Slots and pages are handed out in order and never come back."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        *,
        num_slots: int = 4,
        num_pages: int = 64,
        page_size: int = 16,
        poison: bool = False,
    ) -> None:
        self.model = model
        self.ops = ops
        self.cache: Cache = ops.new_cache(
            cache_spec(model.config, num_slots=num_slots, num_pages=num_pages, page_size=page_size)
        )
        self.page_size = page_size
        self._next_slot = 1
        self._next_page = 1
        if poison:
            poison_cache(self.cache)

    def new(self, max_tokens: int) -> Tracked:
        """A sequence with room for max_tokens tokens, its pages in descending order."""
        count = -(-max_tokens // self.page_size)
        pages = list(range(self._next_page, self._next_page + count))[::-1]
        self._next_page += count
        self._next_slot += 1
        return Tracked(slot=self._next_slot - 1, pages=pages)

    def step(
        self, mode: Mode, rows: Sequence[tuple[Tracked, Sequence[int]]], num_rows: int | None = None
    ) -> list[Tensor]:
        """Feeds ids of each sequence in one step; hidden rows of each, which the sequence also keeps."""
        ids = [token for _, tokens in rows for token in tokens]
        meta = step_meta([(sequence, len(tokens)) for sequence, tokens in rows], self.page_size, num_rows)
        ids += [0] * (meta.slot_mapping.shape[0] - len(ids))
        with torch.inference_mode():
            hidden = self.model.forward(torch.tensor(ids), meta, self.cache, mode)
        parts: list[Tensor] = []
        for index, (sequence, tokens) in enumerate(rows):
            first = meta.host_cu_seqlens[index]
            parts.append(hidden[first : first + len(tokens)])
            sequence.hidden.append(parts[-1])
            sequence.length += len(tokens)
        return parts

    def verify(
        self, rows: Sequence[tuple[Tracked, Sequence[int]]], accepted: Sequence[int], num_rows: int | None = None
    ) -> list[Tensor]:
        """Feeds an anchor and drafts of each sequence and commits the first accepted[b] drafts of sequence b; hidden
        rows of all, of which the sequence keeps those that are committed.
        """
        ids = [token for _, tokens in rows for token in tokens]
        meta = step_meta([(sequence, len(tokens)) for sequence, tokens in rows], self.page_size, num_rows)
        ids += [0] * (meta.slot_mapping.shape[0] - len(ids))
        with torch.inference_mode():
            step = self.ops.prepare(meta, "verify", self.cache.spec)
            hidden = self.model.forward(torch.tensor(ids), meta, self.cache, "verify", step=step)
            self.ops.commit(self.cache, step, accepted)
        parts: list[Tensor] = []
        for index, (sequence, tokens) in enumerate(rows):
            first = meta.host_cu_seqlens[index]
            parts.append(hidden[first : first + len(tokens)])
            if sequence.slot >= 0:
                sequence.hidden.append(parts[-1][: accepted[index] + 1])
                sequence.length += accepted[index] + 1
        return parts

    def prefill(self, sequence: Tracked, ids: Sequence[int], chunk: int) -> Tensor:
        """Prompt in chunks; logits of all its rows [len(ids), X]."""
        for first in range(0, len(ids), chunk):
            self.step("extend", [(sequence, ids[first : first + chunk])])
        return self.model.logits(torch.cat(sequence.hidden))

    def greedy(self, sequences: Sequence[Tracked], logits: Tensor, count: int) -> list[list[int]]:
        """`count` greedy ids of each sequence after its row of logits [len(sequences), X], all in one batch."""
        out: list[list[int]] = []
        for _ in range(count):
            out.append(logits.argmax(-1).tolist())
            rows = [(sequence, [token]) for sequence, token in zip(sequences, out[-1], strict=True)]
            logits = self.model.logits(torch.cat(self.step("decode", rows)))
        return [list(ids) for ids in zip(*out, strict=True)]


def poison_cache(cache: Cache) -> None:
    """Fills every pool byte with 0xff, a NaN in each dtype."""
    spec = cache.spec
    views = [cache.rows_bytes(layer, 0, spec.num_pages + 1) for layer in spec.mla_layers]
    for slot in range(spec.num_slots + 1):
        views += [view(layer, slot) for layer in spec.kda_layers for view in (cache.state_bytes, cache.conv_bytes)]
        views.append(cache.logits_bytes(slot))
    for view in views:
        view[:] = b"\xff" * view.nbytes
