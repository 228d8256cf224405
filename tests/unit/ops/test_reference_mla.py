"""MLA of the reference backend against plain softmax attention in float64, over NaN-poisoned pages."""

import math

import pytest
import torch
from torch import Tensor

from k3svc.ops import load
from k3svc.ops.reference_cache import MlaPool
from k3svc.ops.reference_mla import tree_sum
from k3svc.ops.table import CacheSpec, Ops
from tests.oracles.loop import Tracked, poison_cache, step_meta

HEADS, NOPE, ROPE, RANK, V = 3, 12, 8, 20, 10
WIDTH = RANK + ROPE
SCALE = (NOPE + ROPE) ** -0.5


def spec(page_size: int) -> CacheSpec:
    return CacheSpec(
        kda_layers=(),
        mla_layers=(0,),
        kda_heads=1,
        kda_key_dim=1,
        kda_value_dim=1,
        conv_width=2,
        kv_lora_rank=RANK,
        rope_dim=ROPE,
        vocab_size=1,
        num_slots=4,
        num_pages=25600 // page_size,
        page_size=page_size,
        state_dtype=torch.float32,
        kv_dtype=torch.float32,
    )


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


W_KC, W_VC = normal(1, HEADS, NOPE, RANK), normal(2, HEADS, V, RANK)


def attention(q: Tensor, rows: Tensor, start: int) -> Tensor:
    """Expanded form: q [T, NH, NOPE + ROPE] at positions start .. over rows [S, C] → [T, NH·V], float64 inside."""
    q, rows, w_kc, w_vc = (x.double() for x in (q, rows, W_KC, W_VC))
    nope = torch.einsum("sr,hnr->shn", rows[:, :RANK], w_kc)
    keys = torch.cat([nope, rows[:, None, RANK:].expand(-1, HEADS, -1)], -1)
    values = torch.einsum("sr,hvr->shv", rows[:, :RANK], w_vc)
    scores = torch.einsum("thd,shd->hts", q, keys) / math.sqrt(NOPE + ROPE)
    later = torch.arange(len(rows)) > (start + torch.arange(len(q)))[:, None]
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    return torch.einsum("hts,shv->thv", weights, values).flatten(1).float()


class Sequences:
    """Sequences of given lengths over one poisoned pool, their pages interleaved; -1 lengths are padding."""

    def __init__(self, ops: Ops, page_size: int, lengths: list[int]) -> None:
        self.ops, self.page_size, self.spec = ops, page_size, spec(page_size)
        cache = ops.new_cache(self.spec)
        poison_cache(cache)
        self.pool: MlaPool = cache.layer(0)
        count = len(lengths)
        self.tracked = [
            Tracked(slot=-1, pages=[])
            if length < 0
            else Tracked(slot=index + 1, pages=[1 + index + count * page for page in range(-(-length // page_size))])
            for index, length in enumerate(lengths)
        ]
        self.rows = [normal(50 + index, max(length, 0), WIDTH) for index, length in enumerate(lengths)]

    def extend(self, counts: list[int], queries: list[Tensor], padding: int = 0) -> list[Tensor]:
        """Writes and attends the next rows of each sequence."""
        counted = list(zip(self.tracked, counts, strict=True))
        total = sum(counts) + padding
        step = self.ops.prepare(step_meta(counted, self.page_size, total), "extend", self.spec)
        rows = [own[s.length : s.length + n] for own, (s, n) in zip(self.rows, counted, strict=True)]
        filler = [torch.full((n, WIDTH), 9.0) for s, n in counted if s.slot < 0]
        rows = [own if s.slot >= 0 else filler.pop(0) for own, (s, _) in zip(rows, counted, strict=True)]
        self.ops.mla_write(torch.cat([*rows, torch.full((padding, WIDTH), 9.0)]), self.pool, step)
        q = torch.cat([*queries, torch.ones(padding, HEADS, NOPE + ROPE)])
        out = self.ops.mla_extend(q, W_KC, W_VC, self.pool, step, SCALE)
        assert bool(out.isfinite().all())
        for sequence, count in counted:
            sequence.length += count
        return list(torch.split(out[: sum(counts)], counts))


@pytest.fixture
def ops() -> Ops:
    return load("reference", dtype="float32", threads=1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
def test_extend_equals_softmax_attention(ops: Ops, page_size: int) -> None:
    """Three sequences and padding between them, prompts in two steps."""
    lengths = [200, -1, 65, 1]
    sequences = Sequences(ops, page_size, lengths)
    q = [normal(70 + index, length, HEADS, NOPE + ROPE) for index, length in enumerate([200, 4, 65, 1])]
    first = sequences.extend([128, 3, 64, 1], [q[0][:128], q[1][:3], q[2][:64], q[3]], padding=5)
    second = sequences.extend([72, 1, 1, 0], [q[0][128:], q[1][3:], q[2][64:], q[3][:0]])
    for index in (0, 2, 3):
        expected = attention(q[index], sequences.rows[index], 0)
        close(torch.cat([first[index], second[index]]), expected)
    flat = sequences.pool.rows.view(-1, WIDTH)
    written = torch.zeros(len(flat), dtype=torch.bool)
    for sequence, rows in zip(sequences.tracked, sequences.rows, strict=True):
        for position in range(len(rows)):
            place = sequence.pages[position // page_size] * page_size + position % page_size
            written[place] = True
            assert torch.equal(flat[place], rows[position])
    assert bool(flat[~written].isnan().all())


@pytest.mark.parametrize("lengths", [[1, -1, 64, 65, 300], [4096, 4097, 1, -1, 70]])
def test_decode_equals_softmax_attention(ops: Ops, lengths: list[int]) -> None:
    """The absorbed form at the last position equals the expanded one; more than a segment of 4096 rows too."""
    sequences = Sequences(ops, 32, lengths)
    flat = sequences.pool.rows.view(-1, WIDTH)
    for sequence, rows in zip(sequences.tracked, sequences.rows, strict=True):
        for position in range(len(rows) - 1):
            flat[sequence.pages[position // 32] * 32 + position % 32] = rows[position]
        sequence.length = max(len(rows) - 1, 0)
    step = ops.prepare(step_meta([(s, 1) for s in sequences.tracked], 32), "decode", sequences.spec)
    ops.mla_write(
        torch.stack([rows[-1] if len(rows) else torch.full((WIDTH,), 9.0) for rows in sequences.rows]),
        sequences.pool,
        step,
    )
    q = normal(90, len(lengths), HEADS, NOPE + ROPE)
    out = ops.mla_decode(q, W_KC, W_VC, sequences.pool, step, SCALE)
    assert bool(out.isfinite().all())
    for index, length in enumerate(lengths):
        if length > 0:
            close(out[index], attention(q[index : index + 1], sequences.rows[index], length - 1)[0])


def test_large_scores_do_not_overflow(ops: Ops) -> None:
    sequences = Sequences(ops, 64, [130])
    q = 300 * normal(91, 130, HEADS, NOPE + ROPE)
    (out,) = sequences.extend([130], [q])
    torch.testing.assert_close(out, attention(q, sequences.rows[0], 0), rtol=1e-3, atol=1e-3)


def test_tree_sum_ignores_zeros_at_the_end() -> None:
    x = normal(92, 2, 11, 3)
    padded = torch.cat([x, torch.zeros(2, 6, 3)], 1)
    assert torch.equal(tree_sum(x), tree_sum(padded))
    torch.testing.assert_close(tree_sum(x), x.double().sum(1).float())
