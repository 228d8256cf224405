"""A model without tensors: its state is a hash of the tokens, kept in the bytes of a cache like the real one's.

A token depends on every byte of state, so a frame that is lost, doubled, stale or swapped changes the tokens that come
out. `expected_tokens` says, without any cache, what must come out.
"""

import asyncio
import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow, Sampled, SampleSpec, StepOutput
from k3svc.engine.ports import StepReader
from k3svc.errors import EngineFault
from k3svc.ops.table import CacheSpec, LayerCache, Staging

KDA_LAYERS = (0, 2)
MLA_LAYERS = (1, 3)
VOCAB = 64
FEATURE_BYTES = 8


def fake_spec(*, num_slots: int = 8, num_pages: int = 32, page_size: int = 16) -> CacheSpec:
    """Two KDA and two MLA layers of a few bytes; K != V."""
    return CacheSpec(
        kda_layers=KDA_LAYERS,
        mla_layers=MLA_LAYERS,
        kda_heads=2,
        kda_key_dim=4,
        kda_value_dim=6,
        conv_width=4,
        kv_lora_rank=6,
        rope_dim=2,
        vocab_size=VOCAB,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=page_size,
        state_dtype=torch.float32,
        kv_dtype=torch.float32,
    )


class FakeCache:
    """Pools of plain bytes with the views of `k3svc.ops.table.Cache`; filled with 0xff so that unset bytes show."""

    staging: Staging | None = None

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.state_size = spec.kda_heads * spec.kda_key_dim * spec.kda_value_dim * 4
        self.conv_size = (spec.conv_width - 1) * spec.conv_channels * 4
        self.row_size = (spec.kv_lora_rank + spec.rope_dim) * 4
        slots, pages = spec.num_slots + 1, spec.num_pages + 1
        self._state = {layer: _pool(slots * self.state_size) for layer in spec.kda_layers}
        self._conv = {layer: _pool(slots * self.conv_size) for layer in spec.kda_layers}
        self._rows = {layer: _pool(pages * spec.page_size * self.row_size) for layer in spec.mla_layers}
        self._logits = _pool(slots * spec.vocab_size * 4)
        pools = [*self._state.values(), *self._conv.values(), *self._rows.values(), self._logits]
        self.nbytes = sum(pool.nbytes for pool in pools)

    def layer(self, index: int) -> LayerCache:
        raise NotImplementedError(f"no kernel reads layer {index} of a fake cache")

    def clear_slot(self, slot: int) -> None:
        for view in self._slot_views(slot):
            view[:] = bytes(view.nbytes)

    def copy_slot(self, source: int, target: int) -> None:
        for from_view, to_view in zip(self._slot_views(source), self._slot_views(target), strict=True):
            to_view[:] = from_view

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            if target >= 0:
                for layer in self.spec.kda_layers:
                    self.state_bytes(layer, target)[:] = self.state_bytes(layer, source)
                    self.conv_bytes(layer, target)[:] = self.conv_bytes(layer, source)

    def copy_page(self, source: int, target: int) -> None:
        for layer in self.spec.mla_layers:
            self.rows_bytes(layer, target)[:] = self.rows_bytes(layer, source)

    def logits(self, slots: Sequence[int]) -> Tensor:
        raise NotImplementedError(f"no sampler reads the logits of fake slots {slots}")

    def set_logits(self, slot: int, row: Tensor) -> None:
        raise NotImplementedError(f"no kernel writes the logits of fake slot {slot}: {row}")

    def state_bytes(self, layer: int, slot: int) -> memoryview:
        return self._state[layer][slot * self.state_size : (slot + 1) * self.state_size]

    def conv_bytes(self, layer: int, slot: int) -> memoryview:
        return self._conv[layer][slot * self.conv_size : (slot + 1) * self.conv_size]

    def rows_bytes(self, layer: int, page: int, num_pages: int = 1) -> memoryview:
        size = self.spec.page_size * self.row_size
        return self._rows[layer][page * size : (page + num_pages) * size]

    def logits_bytes(self, slot: int) -> memoryview:
        size = self.spec.vocab_size * 4
        return self._logits[slot * size : (slot + 1) * size]

    def row_bytes(self, layer: int, block_table: Sequence[int], position: int) -> memoryview:
        """Bytes of one token's row."""
        page, offset = divmod(position, self.spec.page_size)
        return self.rows_bytes(layer, block_table[page])[offset * self.row_size : (offset + 1) * self.row_size]

    def is_finite(self, slot: int) -> bool:
        return 0 < slot <= self.spec.num_slots

    def _slot_views(self, slot: int) -> list[memoryview]:
        views = [self.state_bytes(layer, slot) for layer in self.spec.kda_layers]
        views += [self.conv_bytes(layer, slot) for layer in self.spec.kda_layers]
        return [*views, self.logits_bytes(slot)]


class FakeRunner:
    """ExtendRunner, DecodeRunner and AheadRunner over a FakeCache.

    A step takes `step_s` of the loop's time, layer by layer, and touches pool memory all that time, as a device does.
    `fails` says of each step whether it breaks at its end, with the caches half written. Features are FEATURE_BYTES a
    token, made of its position and id.
    """

    def __init__(
        self,
        cache: FakeCache,
        *,
        step_s: float | Callable[[], float] = 0.001,
        fails: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cache = cache
        self.step_s: Callable[[], float] = step_s if callable(step_s) else lambda: step_s
        self._fails = fails
        self.fail_next = False
        """Whether the next step breaks."""
        self.last_step_s = 0.0
        self.num_steps = 0
        self.num_extend_tokens = 0
        self.num_ahead = 0
        """Decode steps that were asked for while one ran."""
        self._last: asyncio.Task[StepOutput] | None = None
        """The decode step that was asked for last."""

    async def extend(
        self,
        batch: ExtendBatch,
        on_layer: Callable[[int], None],
        on_features: Callable[[memoryview], None] | None = None,
    ) -> StepOutput:
        self.num_extend_tokens += batch.num_tokens
        restored = [row for row in batch.rows if row.restore_from is not None]
        self._cache.copy_states([row.restore_from or 0 for row in restored], [row.slot for row in restored])
        await self._run(batch.rows, on_layer, _features(batch.rows, on_features))
        self._cache.copy_states(
            [row.slot for row in batch.rows],
            [-1 if row.snapshot_to is None else row.snapshot_to for row in batch.rows],
        )
        for row in batch.rows:
            if row.is_last:
                total = row.start + len(row.token_ids)
                digest = self._read(row.slot, row.block_table, total)
                self._cache.logits_bytes(row.slot)[:] = _stretch(digest, self._cache.spec.vocab_size * 4)
        return StepOutput()

    async def decode(
        self,
        batch: DecodeBatch,
        on_features: Callable[[memoryview], None] | None = None,
        *,
        features_may_wait: bool = False,  # noqa: ARG002  they may, and do not
    ) -> StepOutput:
        blocks = [
            ExtendRow(
                key=row.key,
                slot=row.slot,
                block_table=tuple(row.block_table),
                token_ids=(_id_of(row), *row.drafts),
                start=row.position,
                is_last=True,
            )
            for row in batch.rows
        ]
        for fork in batch.forks:
            self._cache.copy_slot(fork.source_slot, fork.target_slot)
            if fork.source_page is not None and fork.target_page is not None:
                self._cache.copy_page(fork.source_page, fork.target_page)
        anchors = [replace(block, token_ids=block.token_ids[:1]) for block in blocks]
        await self._run(anchors, lambda _layer: None, _features(blocks, on_features))
        sampled: dict[str, list[Sampled]] = {}
        for first in batch.first:
            logits = bytes(self._cache.logits_bytes(first.slot))
            sampled[first.key] = [_pick(hashlib.blake2b(logits, digest_size=16).digest(), first.sample)]
        for row, block in zip(batch.rows, blocks, strict=True):
            if row.sample is not None:
                sampled[row.key] = self._verify(row, block, row.sample)
        return StepOutput(sampled=sampled, compute_s=self.last_step_s)

    def ask(self, batch: DecodeBatch) -> StepReader:
        """`AheadRunner.ask`."""
        before = self._last
        self.num_ahead += before is not None and not before.done()
        step = self._last = asyncio.create_task(self._after(before, batch))
        # A reader that was cancelled leaves the device at work, and nobody to hear of a failure.
        step.add_done_callback(lambda done: done.cancelled() or done.exception())

        async def read() -> StepOutput:
            return await asyncio.shield(step)

        return read

    async def _after(self, before: "asyncio.Task[StepOutput] | None", batch: DecodeBatch) -> StepOutput:
        chosen: Mapping[str, Sequence[Sampled]] = {}
        if before is not None:
            await asyncio.wait({before})
            chosen = {} if before.exception() is not None else before.result().sampled
        return await self.decode(replace(batch, rows=[_known(row, chosen) for row in batch.rows]))

    def _verify(self, row: DecodeRow, block: ExtendRow, spec: SampleSpec) -> list[Sampled]:
        """Drafts write their rows whatever becomes of them, and advance the state while they are right."""
        for layer in MLA_LAYERS:
            self._extend_layer(layer, block)
        out: list[Sampled] = []
        while True:
            count = len(out)
            digest = self._read(row.slot, block.block_table, row.position + 1 + count)
            logits = _stretch(digest, self._cache.spec.vocab_size * 4)
            out.append(_pick(hashlib.blake2b(logits, digest_size=16).digest(), spec.after(row.drafts[:count])))
            if count == len(row.drafts) or row.drafts[count] != out[-1].token_id:
                return out
            accepted = replace(block, token_ids=(row.drafts[count],), start=row.position + 1 + count)
            for layer in KDA_LAYERS:
                self._extend_layer(layer, accepted)

    async def _run(
        self, rows: Sequence[ExtendRow], on_layer: Callable[[int], None], send_features: Callable[[], None]
    ) -> None:
        """Raises EngineFault when the step is to fail."""
        self.num_steps += 1
        slots = [row.slot for row in rows]
        assert len(set(slots)) == len(slots) and 0 not in slots, f"a step on slots {slots}"
        layers = sorted(KDA_LAYERS + MLA_LAYERS)
        step_s = self.last_step_s = self.step_s()
        for layer in layers:
            await asyncio.sleep(step_s / len(layers))
            for row in rows:
                self._extend_layer(layer, row)
            on_layer(layer)
            if layer == layers[-2]:
                send_features()
        fails, self.fail_next = self.fail_next, False
        if fails or self._fails():
            raise EngineFault("the step was made to fail")

    def _extend_layer(self, layer: int, row: ExtendRow) -> None:
        cache = self._cache
        if layer in MLA_LAYERS:
            for index, token_id in enumerate(row.token_ids):
                view = cache.row_bytes(layer, row.block_table, row.start + index)
                view[:] = _stretch(_row_digest(layer, row.start + index, token_id), cache.row_size)
            return
        state, conv = cache.state_bytes(layer, row.slot), cache.conv_bytes(layer, row.slot)
        digest = _start_digest(layer) if row.start == 0 else bytes(state[:16])
        for token_id in row.token_ids:
            digest = _next_digest(digest, token_id)
        state[:] = _stretch(digest, cache.state_size)
        conv[:] = _stretch(digest[::-1], cache.conv_size)

    def _read(self, slot: int, block_table: Sequence[int], num_tokens: int) -> bytes:
        """A digest of every byte that a real model would read at the end of num_tokens."""
        cache, hasher = self._cache, hashlib.blake2b(digest_size=16)
        for layer in KDA_LAYERS:
            hasher.update(cache.state_bytes(layer, slot))
            hasher.update(cache.conv_bytes(layer, slot))
        for layer in MLA_LAYERS:
            for index in range(math.ceil(num_tokens / cache.spec.page_size)):
                size = min(cache.spec.page_size, num_tokens - index * cache.spec.page_size) * cache.row_size
                hasher.update(cache.rows_bytes(layer, block_table[index])[:size])
        return hasher.digest()


def _known(row: DecodeRow, chosen: Mapping[str, Sequence[Sampled]]) -> DecodeRow:
    """The row with its token; after a step that failed it is void, and may be anything."""
    if row.token_id is not None:
        return row
    assert row.key in chosen or not chosen, f"nothing was chosen for {row.key}"
    return replace(row, token_id=chosen[row.key][-1].token_id if chosen else 0)


def _id_of(row: DecodeRow) -> int:
    assert row.token_id is not None, f"the token of {row.key} is not known"
    return row.token_id


def expected_tokens(
    prompt: Sequence[int], count: int, *, seed: int = 0, index: int = 0, spec: CacheSpec | None = None
) -> list[int]:
    """The first `count` tokens after a prompt, computed from the tokens alone."""
    spec = spec or fake_spec()
    state_size = spec.kda_heads * spec.kda_key_dim * spec.kda_value_dim * 4
    conv_size = (spec.conv_width - 1) * spec.conv_channels * 4
    row_size = (spec.kv_lora_rank + spec.rope_dim) * 4
    tokens = list(prompt)
    states = {layer: _start_digest(layer) for layer in KDA_LAYERS}
    rows: dict[int, list[bytes]] = {layer: [] for layer in MLA_LAYERS}
    done = 0
    while len(tokens) < len(prompt) + count:
        for position in range(done, len(tokens)):
            for layer in KDA_LAYERS:
                states[layer] = _next_digest(states[layer], tokens[position])
            for layer in MLA_LAYERS:
                rows[layer].append(_stretch(_row_digest(layer, position, tokens[position]), row_size))
        done = len(tokens)
        hasher = hashlib.blake2b(digest_size=16)
        for layer in KDA_LAYERS:
            hasher.update(_stretch(states[layer], state_size) + _stretch(states[layer][::-1], conv_size))
        for layer in MLA_LAYERS:
            hasher.update(b"".join(rows[layer]))
        row = _stretch(hasher.digest(), spec.vocab_size * 4)
        tokens.append(_token(hashlib.blake2b(row, digest_size=16).digest(), seed, index, len(tokens)))
    return tokens[len(prompt) :]


def features(token_ids: Sequence[int], start: int) -> bytes:
    """What FakeRunner gives for tokens from an absolute position on."""
    return b"".join(struct.pack("<II", start + index, token_id) for index, token_id in enumerate(token_ids))


def _features(rows: Sequence[ExtendRow], sink: Callable[[memoryview], None] | None) -> Callable[[], None]:
    if sink is None or not rows:
        return lambda: None
    return lambda: sink(memoryview(b"".join(features(row.token_ids, row.start) for row in rows)))


def _pool(nbytes: int) -> memoryview:
    return memoryview(bytearray(b"\xff" * nbytes))


def _stretch(digest: bytes, nbytes: int) -> bytes:
    return (digest * math.ceil(nbytes / len(digest)))[:nbytes]


def _start_digest(layer: int) -> bytes:
    return hashlib.blake2b(b"start%d" % layer, digest_size=16).digest()


def _next_digest(digest: bytes, token_id: int) -> bytes:
    return hashlib.blake2b(digest + struct.pack("<I", token_id), digest_size=16).digest()


def _row_digest(layer: int, position: int, token_id: int) -> bytes:
    return hashlib.blake2b(struct.pack("<III", layer, position, token_id), digest_size=16).digest()


def _token(digest: bytes, seed: int, index: int, position: int) -> int:
    key = digest + struct.pack("<QII", seed, index, position)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % VOCAB


def _pick(digest: bytes, sample: SampleSpec) -> Sampled:
    return Sampled(token_id=_token(digest, sample.params.seed, sample.sample_index, sample.position), logprob=-1.0)
