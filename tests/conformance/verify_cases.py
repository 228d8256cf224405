"""What the tests of verification share: backends, and one layer of random weights run by decode and by verify steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.ops import load
from k3svc.ops.table import Cache, CacheSpec, KdaGate, Mode, Ops
from tests.conformance.cpu_cases import cache_spec, needs_compiler, pool_of, rand
from tests.oracles.loop import Tracked, step_meta

BACKENDS = [pytest.param("reference", id="reference"), pytest.param("cpu", id="cpu", marks=needs_compiler)]
SCALE = 0.2


def backend(name: str) -> Ops:
    """Float32 on one thread."""
    return load(name, dtype="float32", threads=1)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of one KDA and one MLA layer."""

    heads: int = 2
    key: int = 24
    value: int = 40
    width: int = 4
    bound: float | None = -5.0
    nope: int = 12
    rank: int = 24
    rope: int = 8
    page_size: int = 16


@dataclass(frozen=True, kw_only=True)
class Token:
    """Inputs of one row in both layers."""

    u: Tensor
    f: Tensor
    b: Tensor
    q: Tensor
    row: Tensor


class Layers:
    """A KDA layer (0) and an MLA layer (1) with random weights over random caches."""

    def __init__(self, ops: Ops, geometry: Geometry, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.ops, self.geometry = ops, geometry
        g = geometry
        self.spec: CacheSpec = cache_spec(
            kda_heads=g.heads, kda_key_dim=g.key, kda_value_dim=g.value, conv_width=g.width, kv_lora_rank=g.rank,
            rope_dim=g.rope, page_size=g.page_size, num_slots=12, num_pages=120,
        )  # fmt: skip
        self.conv = rand(source, self.spec.conv_channels, g.width)
        self.gate = KdaGate(a=rand(source, g.heads).exp(), dt_bias=rand(source, g.heads, g.key), lower_bound=g.bound)
        self.w_kc, self.w_vc = rand(source, g.heads, g.nope, g.rank), rand(source, g.heads, g.value, g.rank)
        self._source = source

    def tokens(self, count: int) -> list[Token]:
        """Inputs of rows to come."""
        g, source = self.geometry, self._source
        return [
            Token(
                u=rand(source, self.spec.conv_channels),
                f=rand(source, g.heads * g.key),
                b=rand(source, g.heads),
                q=rand(source, g.heads, g.nope + g.rope),
                row=rand(source, g.rank + g.rope),
            )
            for _ in range(count)
        ]

    def new_cache(self, sequences: Sequence[Tracked]) -> Cache:
        """NaN everywhere but in what the sequences have behind them, which the seed and the slot decide."""
        cache = self.ops.new_cache(self.spec)
        kda, mla = pool_of(cache, 0), pool_of(cache, 1)
        for pool in (kda.state, kda.conv, mla.rows):
            pool.fill_(torch.nan)
        for sequence in sequences:
            own = torch.Generator().manual_seed(sequence.slot)
            kda.state[sequence.slot] = rand(own, *kda.state.shape[1:])
            kda.conv[sequence.slot] = rand(own, *kda.conv.shape[1:])
            for position in range(sequence.length):
                page, offset = divmod(position, self.geometry.page_size)
                mla.rows[sequence.pages[page], offset] = rand(own, mla.rows.shape[-1])
        return cache

    def run(
        self, cache: Cache, mode: Mode, rows: Sequence[tuple[Tracked, Sequence[Token]]], num_rows: int | None = None
    ) -> tuple[list[Tensor], Any]:
        """One step: outputs of both layers side by side for the rows of each sequence, and the step. Lengths stay."""
        ops = self.ops
        meta = step_meta([(sequence, len(tokens)) for sequence, tokens in rows], self.geometry.page_size, num_rows)
        flat = [token for _, tokens in rows for token in tokens]
        padding = meta.slot_mapping.shape[0] - len(flat)

        def packed(name: str) -> Tensor:
            given = torch.stack([getattr(token, name) for token in flat])
            return torch.cat([given, given.new_full((padding, *given.shape[1:]), torch.nan)])

        step = ops.prepare(meta, mode, self.spec)
        kda, mla = cache.layer(0), cache.layer(1)
        decodes = mode == "decode"
        conv = ops.kda_conv_decode if decodes else ops.kda_conv_verify
        recur = ops.kda_decode if decodes else ops.kda_verify
        attend = ops.mla_decode if decodes else ops.mla_verify
        # Inputs as the model hands them over: columns of one wide projection.
        wide = torch.cat([packed("u"), packed("b")], dim=1)
        channels = self.spec.conv_channels
        qkv = conv(wide[:, :channels], self.conv, kda, step)
        o = recur(qkv, packed("f"), wide[:, channels:], self.gate, kda, step)
        ops.mla_write(packed("row"), mla, step)
        attended = attend(packed("q"), self.w_kc, self.w_vc, mla, step, SCALE)
        out = torch.cat([qkv, o.flatten(1), attended], dim=1)
        begins = meta.host_cu_seqlens
        return [out[begins[i] : begins[i + 1]] for i in range(len(rows))], step

    def decode(self, cache: Cache, sequence: Tracked, tokens: Sequence[Token]) -> Tensor:
        """The tokens one step at a time, the sequence alone: outputs [len(tokens), ..]; advances its length."""
        out = []
        for token in tokens:
            (part,), _ = self.run(cache, "decode", [(sequence, [token])])
            out.append(part)
            sequence.length += 1
        return torch.cat(out)


def tracked(cached: Sequence[int], room: int, page_size: int) -> list[Tracked]:
    """Sequences with these numbers of tokens behind them and pages for `room` more; slots and pages descend."""
    out: list[Tracked] = []
    page = 1
    for index, length in enumerate(cached):
        count = -(-(length + room) // page_size)
        out.append(Tracked(slot=len(cached) - index, pages=list(range(page, page + count))[::-1], length=length))
        page += count
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bytes; NaN equals itself."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
