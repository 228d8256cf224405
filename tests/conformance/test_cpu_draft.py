"""Drafts on the cpu backend: each operation against the reference backend, and programs against calls one by one."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.model.draft import Blocks, DraftModel, Proposal
from k3svc.model.draft_config import DraftSwitches, parse_draft_config
from k3svc.model.draft_context import ContextPool
from k3svc.ops.cpu import programs
from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.cpu.draft import BlockStep
from k3svc.ops.reference_draft import visible_cells
from k3svc.ops.table import Ops
from tests.conformance.cpu_cases import needs_compiler, paths, poisoned_memory, rand, reference
from tests.conformance.programs_cases import Memory, OneByOne
from tests.conformance.sampling_cases import rows_at, sample_rows
from tests.oracles.blocks import block_meta
from tests.unit.model.test_draft import HIDDEN, KINDS, random_weights, tables

pytestmark = needs_compiler

TIGHT: dict[str, Any] = {"rtol": 2e-5, "atol": 1e-5}
SLOTS, WINDOW, SCRATCH = 20, 12, 6


@pytest.fixture(params=paths())
def cpu(request: pytest.FixtureRequest) -> Iterator[Cpu]:
    """On each instruction set, where memory that no kernel writes shows."""
    with poisoned_memory():
        yield Cpu(isa=request.param)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_rotation(cpu: Cpu, num_rows: int):
    positions, frequencies = torch.tensor([0, 3, 1000, 2**20 + 1]), torch.rand(19, generator=source())
    given = (positions, num_rows, frequencies, 1.25)
    for own, expected in zip(cpu.draft.rotation(*given), reference().draft.rotation(*given), strict=True):
        torch.testing.assert_close(own, expected, **TIGHT)


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 2, 64), (3, 1, 6), (0, 2, 40), (2, 2, 128)])
def test_norm_rope(cpu: Cpu, heads: int, key_heads: int, width: int):
    generator = source(width)
    whole = rand(generator, 9, (heads + 2 * key_heads) * width + 3)
    rows, weights = whole[:, 3:], rand(generator, 2, width)
    angle = rand(generator, 9, width // 2)
    given = (rows, heads, *weights, 1e-5, angle.cos(), angle.sin())
    own, expected = cpu.draft.norm_rope(*given), reference().draft.norm_rope(*given)
    for mine, theirs in zip(own, expected, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, **TIGHT)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [6, 64])
def test_rotate(cpu: Cpu, width: int, interleaved: bool):
    generator = source(width)
    x = rand(generator, 7, 3, width + 5)[..., 5:]
    angle = rand(generator, 7, width // 2)
    own, expected = (
        each.draft.rotate(x, angle.cos(), angle.sin(), interleaved=interleaved) for each in (cpu, reference())
    )
    torch.testing.assert_close(own, expected, **TIGHT)


def test_project_heads(cpu: Cpu):
    generator = source()
    x, weight = rand(generator, 7, 3, 25)[..., 5:], rand(generator, 3, 33, 20)
    own = cpu.draft.project_heads(x, cpu.draft.pack_heads(weight))
    torch.testing.assert_close(own, torch.stack([x[:, i] @ weight[i].T for i in range(3)], dim=1), **TIGHT)


@pytest.mark.parametrize(("heads", "width"), [(2, 64), (1, 7)])
def test_write_context(cpu: Cpu, heads: int, width: int):
    """Rows and cells that lie apart; all other cells stay as they are."""
    generator = source(width)
    rows = rand(generator, 9, heads * width + 3)[:, 3:].view(9, heads, width)
    positions, slots = torch.tensor([8, 9, 10, 11, 12, 13, 0, 3, 5]), torch.tensor([3] * 6 + [0] * 3)
    own, expected = (torch.full((4, 10, heads, width + 2), 7.0)[..., :width] for _ in range(2))
    if heads > 1:
        own, expected = (torch.full((4, 10, heads, width), 7.0) for _ in range(2))
    cpu.draft.write_context(rows, own, slots, positions)
    reference().draft.write_context(rows, expected, slots, positions)
    assert torch.equal(own, expected)
    assert (own == 7).all(dim=(2, 3)).sum() == 31


class Attention:
    """Random rows of a step of blocks; cells that are not visible hold NaN."""

    def __init__(self, seed: int, shape: tuple[int, int, int, int], num_rows: int, window: int) -> None:
        heads, key_heads, self.width, self.values = shape
        self.meta = block_meta(seed, num_rows, slots=SLOTS, window=window, capacity=window + 7)
        generator, count = source(seed), len(self.meta.slots)
        self.query = rand(generator, count, num_rows, heads, self.width)
        self.block = rand(generator, count, num_rows, key_heads, self.width)
        written = rand(generator, SLOTS, self.meta.capacity, key_heads, self.width)
        self.context = torch.full_like(written, torch.nan)
        for slot, cells in zip(self.meta.slots, visible_cells(self.meta), strict=True):
            (seen,) = cells.nonzero(as_tuple=True)
            self.context[slot, seen] = written[slot, seen]

    def values_of(self, keys: Tensor) -> Tensor:
        """Latent keys hold their values; else values are rows of their own."""
        return keys[..., : self.values] if self.values < self.width else keys * 2 + 1

    def run(self, ops: Ops, rows: slice = slice(None), *, is_causal: bool) -> Tensor:
        """Of these requests."""
        columns = ("slots", "base_lens", "starts", "host_lengths")
        meta = replace(self.meta, **{name: getattr(self.meta, name)[rows] for name in columns})
        block = self.block[rows]
        return ops.draft.block_attention(
            self.query[rows],
            block,
            self.values_of(block),
            self.context,
            self.values_of(self.context),
            ops.draft.prepare(meta),
            scale=0.3,
            is_causal=is_causal,
        )


SHAPES = [(4, 2, 64, 64), (6, 1, 40, 40), (3, 1, 44, 24), (2, 2, 6, 6)]
"""Query heads, key heads, key width, value width."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_rows", "window"), [(4, 10), (8, 57), (7, 150), (70, 30)])
def test_block_attention(cpu: Cpu, shape: tuple[int, int, int, int], num_rows: int, window: int, is_causal: bool):
    for seed in range(4):
        case = Attention(seed, shape, num_rows, window)
        own = case.run(cpu, is_causal=is_causal)
        torch.testing.assert_close(own, case.run(reference(), is_causal=is_causal), **TIGHT)
        # No bit depends on other requests, nor on the instruction set.
        for index in range(len(own)):
            assert torch.equal(case.run(cpu, slice(index, index + 1), is_causal=is_causal)[0], own[index])
        assert torch.equal(case.run(Cpu(threads=2), is_causal=is_causal), own)


@pytest.mark.parametrize("width", [5, 16, 48])
def test_gate_and_recurrence(cpu: Cpu, width: int):
    generator = source(width)
    joint, memory, x = rand(generator, 6, 3 * width, scale=3), rand(generator, 6, width), rand(generator, 6, width)
    torch.testing.assert_close(
        cpu.draft.gate(x, joint[:, :width]), reference().draft.gate(x, joint[:, :width]), **TIGHT
    )
    for given in (memory, torch.zeros(1, width).expand(6, -1)):
        own, expected = (each.draft.recur(joint, given) for each in (cpu, reference()))
        for mine, theirs in zip(own, expected, strict=True):
            torch.testing.assert_close(mine, theirs, **TIGHT)


@pytest.mark.parametrize("rank", [0, 6, 32])
def test_confidences(cpu: Cpu, rank: int):
    generator = source(rank)
    states, embedded = rand(generator, 3, 5, 40), rand(generator, 3, 5, rank) if rank else None
    weight, temperatures = rand(generator, 40 + rank), torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0, 9.0])
    given = (states, embedded, weight, 0.25, temperatures)
    own, expected = (each.draft.confidences(*given) for each in (cpu, reference()))
    torch.testing.assert_close(own, expected, **TIGHT)


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_choose(cpu: Cpu, scale: float, with_bias: bool):
    generator = source(7)
    count, vocabulary, banned = 160, 300, 17
    logits = rand(generator, count, 2, vocabulary, scale=scale)[:, 1]
    logits[:, banned] = 1e4
    bias = rand(generator, count, vocabulary, scale=scale) if with_bias else None
    for rows in (None, sample_rows(count), sample_rows(count, seed=1, top_k=0, top_p=1.0, min_p=0.0)):
        (own, scores), (expected, sums) = (
            each.draft.choose(logits, bias, banned, rows, 3) for each in (cpu, reference())
        )
        assert torch.equal(scores, sums)
        assert own.tolist() == expected.tolist()
        assert banned not in own.tolist()


@pytest.mark.parametrize("top_k", [0, 2, 7])
def test_choices_among_equal_logits(top_k: int):
    """Ties at the border of top-k stay, and of those at the border of top-p the first go."""
    logits = torch.randint(0, 4, (300, 24), generator=source()).float()
    for top_p in (1.0, 0.7, 0.2, 1e-6):
        rows = sample_rows(300, temperature=0.8, top_k=top_k, top_p=top_p, min_p=0.0)
        own, expected = (each.draft.choose(logits, None, 3, rows, 1)[0] for each in (Cpu(), reference()))
        assert own.tolist() == expected.tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_inside_the_vocabulary_and_alone(value: float):
    logits, rows = rand(source(5), 12, 50), sample_rows(12)
    expected = Cpu().draft.choose(logits, None, 0, rows, 1)[0].tolist()
    logits[4] = value
    own = Cpu().draft.choose(logits, None, 0, rows, 1)[0].tolist()
    assert 0 <= own.pop(4) < 50
    expected.pop(4)
    assert own == expected


# Proposals


def build(kind: str, ops: Ops, switches: DraftSwitches | None = None) -> DraftModel:
    config = parse_draft_config({**KINDS[kind], "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2})
    embedding, lm_head = tables()
    return DraftModel(config, random_weights(config), embedding=embedding, lm_head=lm_head, ops=ops, switches=switches)


def filled(draft: DraftModel, lengths: list[int]) -> ContextPool:
    """A context of so many rows in each slot, the ring around as often as it takes; all else is NaN."""
    context = draft.new_context(num_slots=len(lengths), max_window=WINDOW, scratch_rows=SCRATCH)
    context.keys.fill_(math.nan)
    context.values.fill_(math.nan)
    for slot, length in enumerate(lengths):
        features = draft.projector.project(rand(source(slot), length, 2 * HIDDEN))
        for first in range(0, length, 10):
            positions = torch.arange(first, min(first + 10, length))
            draft.inject(features[positions], positions, torch.full_like(positions, slot), context)
    return context


def blocks_of(lengths: list[int], slots: list[int]) -> Blocks:
    base_lens = torch.tensor([lengths[slot] for slot in slots])
    return Blocks(
        anchors=torch.tensor([1 + slot % 30 for slot in slots]),
        base_lens=base_lens,
        starts=torch.tensor([slot % 3 for slot in slots]).minimum(base_lens),
        slots=torch.tensor(slots),
    )


def parts_of(proposal: Proposal) -> list[Tensor]:
    return [part for part in (proposal.tokens, proposal.confidences, proposal.probs) if part is not None]


LENGTHS = [random.Random(4).choice([0, 1, 4, 11, 12, 13, 30, 77]) for _ in range(SLOTS)]
BATCHES = [[3], [0, 1, 2, 3, 4], list(range(BlockStep.MOST)), list(range(BlockStep.MOST + 1)), [7, 3]]
SWITCHES = [DraftSwitches(), DraftSwitches(folded_proposal=False), DraftSwitches(embed_in_graph=False)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("switches", SWITCHES)
def test_proposals(kind: str, switches: DraftSwitches, monkeypatch: pytest.MonkeyPatch):
    """Bits of a program are those of its calls, a request's do not depend on others, tokens are the reference's."""
    memory = Memory(monkeypatch)
    drafts = [build(kind, ops, switches) for ops in (Cpu(), OneByOne(), Cpu(threads=2), reference())]
    contexts = [filled(draft, LENGTHS) for draft in drafts]
    alone: dict[tuple[int, bool], list[Tensor]] = {}
    for is_sampled in (False, True):
        for slots in BATCHES:
            rows = sample_rows(SLOTS, seed=5) if is_sampled else None
            if rows is not None:
                rows = rows_at(rows, slots)
            memory.poison()
            found = [
                parts_of(draft.propose(blocks_of(LENGTHS, slots), context, rows))
                for draft, context in zip(drafts, contexts, strict=True)
            ]
            own, *others, expected = found
            for other in others:
                assert all(torch.equal(one, two) for one, two in zip(own, other, strict=True))
            assert own[0].tolist() == expected[0].tolist()
            for one, two in zip(own[1:], expected[1:], strict=True):
                torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
            for index, slot in enumerate(slots):
                request = [part[index] for part in own]
                first = alone.setdefault((slot, is_sampled), request)
                assert all(torch.equal(one, two) for one, two in zip(request, first, strict=True))
    assert memory.parts


@pytest.mark.parametrize("kind", KINDS)
def test_laws(kind: str):
    rows = sample_rows(3, top_k=0, top_p=1.0, min_p=0.0)
    found = []
    for ops in (Cpu(), OneByOne(), reference()):
        draft = build(kind, ops)
        found.append(draft.propose(blocks_of(LENGTHS, [4, 5, 6]), filled(draft, LENGTHS), rows, with_probs=True))
    own, calls, expected = found
    assert own.tokens.tolist() == calls.tokens.tolist() == expected.tokens.tolist()
    assert own.probs is not None
    assert calls.probs is not None
    assert expected.probs is not None
    assert torch.equal(own.probs, calls.probs)
    torch.testing.assert_close(own.probs, expected.probs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_of_any_number_of_requests_are_one_program(kind: str, monkeypatch: pytest.MonkeyPatch):
    recorded: list[programs.Recorder] = []
    init = programs.Recorder.__init__

    def counted(own: programs.Recorder, *args: Any) -> None:
        recorded.append(own)
        init(own, *args)

    monkeypatch.setattr(programs.Recorder, "__init__", counted)
    cpu = Cpu()
    draft = build(kind, cpu)
    context = filled(draft, LENGTHS)
    for slots in BATCHES:
        draft.propose(blocks_of(LENGTHS, slots), context)
    assert len(recorded) == 1
    for seed in range(3):
        draft.propose(blocks_of(LENGTHS, [1, 2]), context, sample_rows(2, seed))
    assert len(recorded) == 2
