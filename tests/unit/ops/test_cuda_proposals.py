"""Captured proposals, by a stand-in for a graph that repeats the function it has captured over the same memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc import ops as backends
from k3svc.model.draft import Blocks, DraftModel, Proposal
from k3svc.model.draft_config import parse_draft_config
from k3svc.model.draft_context import ContextPool
from k3svc.ops.cuda.proposals import LADDER, Proposals
from k3svc.ops.reference_draft import PlainStep
from k3svc.ops.table import SampleRows
from tests.unit.model.test_draft import HIDDEN, KINDS, random_weights, tables

OPS = backends.load("reference", dtype="float32", threads=1)
LENGTHS = (3, 9, 0, 14, 5)


class Recorded:
    """`Capture`: results stay where they were when the function was captured, and a replay writes them anew."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        self.captures += 1
        return (graph := Graph(self, function)), graph.result


class Graph:
    def __init__(self, owner: Recorded, function: Callable[[], Any]) -> None:
        self._owner, self._function, self.result = owner, function, function()

    def replay(self) -> None:
        self._owner.replays += 1
        for own, new in zip(self.result, self._function(), strict=True):
            if own is not None:
                own.copy_(new)


class Rig:
    """A draft that proposes through `Proposals` and the same without; contexts of LENGTHS rows in slots 1 to 5."""

    def __init__(self, kind: str) -> None:
        self.recorded = Recorded()
        proposals = Proposals(self.recorded.capture)

        def captured(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                return proposals.run(function, args, next(arg for arg in args if isinstance(arg, PlainStep)))

            return run

        self._own, self._plain = _draft(kind, captured), _draft(kind, lambda function: function)
        self._context = self._own.new_context(num_slots=len(LENGTHS) + 1, max_window=64, scratch_rows=8)
        for slot, length in enumerate(LENGTHS, start=1):
            _fill(self._own, self._context, slot, length)

    def propose(
        self, slots: list[int], rows: SampleRows | None = None, *, with_probs: bool = False
    ) -> tuple[Proposal, Proposal]:
        blocks = Blocks(
            anchors=torch.tensor([slot + 1 for slot in slots]),
            base_lens=torch.tensor([LENGTHS[slot - 1] for slot in slots]),
            starts=torch.zeros(len(slots), dtype=torch.int64),
            slots=torch.tensor(slots),
        )
        own, plain = (
            draft.propose(blocks, self._context, rows, with_probs=with_probs) for draft in (self._own, self._plain)
        )
        return own, plain

    def check(self, slots: list[int], rows: SampleRows | None = None, *, with_probs: bool = False) -> None:
        own, plain = self.propose(slots, rows, with_probs=with_probs)
        assert torch.equal(own.tokens, plain.tokens)
        for mine, other in zip(_numbers(own), _numbers(plain), strict=True):
            torch.testing.assert_close(mine, other)


def _draft(kind: str, capture: Callable[..., Any]) -> DraftModel:
    config = parse_draft_config(KINDS[kind])
    embedding, lm_head = tables()
    return DraftModel(config, random_weights(config), embedding=embedding, lm_head=lm_head, ops=OPS, capture=capture)


def _fill(draft: DraftModel, context: ContextPool, slot: int, length: int) -> None:
    taps = torch.randn(length, 2 * HIDDEN, generator=torch.Generator().manual_seed(slot))
    positions = torch.arange(length)
    draft.inject(draft.projector.project(taps), positions, torch.full_like(positions, slot), context)


def _numbers(proposal: Proposal) -> list[Tensor]:
    return [part for part in (proposal.confidences, proposal.probs) if part is not None]


def _rows(temperatures: list[float], *, top_p: float = 1.0) -> SampleRows:
    count = len(temperatures)
    return SampleRows(
        temperature=torch.tensor(temperatures),
        top_k=torch.zeros(count, dtype=torch.int64),
        top_p=torch.full((count,), top_p),
        min_p=torch.zeros(count),
        seed=torch.arange(count),
        sample_index=torch.zeros(count, dtype=torch.int64),
        position=torch.zeros(count, dtype=torch.int64),
        host_greedy=tuple(value == 0 for value in temperatures),
        host_filters=((0, torch.tensor(top_p).item(), 0.0),) * count,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_replays_propose_what_calls_do(kind: str):
    rig = Rig(kind)
    for slots in ([3], [1, 2, 4, 5], [5, 4, 1], [2, 1, 3], [3]):
        rig.check(slots)
    # Graphs of one and of four blocks; three are four of which one was there before.
    assert (rig.recorded.captures, rig.recorded.replays) == (2, 5)


@pytest.mark.parametrize("with_probs", [False, True])
def test_sampled_rows_share_a_graph(with_probs: bool):
    rig = Rig("gated")
    for temperatures in ([1.0, 0.2], [0.3, 0.6], [0.3, 2.0]):
        rig.check([1, 2], _rows(temperatures), with_probs=with_probs)
    assert (rig.recorded.captures, rig.recorded.replays) == (1, 3)


def test_blocks_past_the_ladder_are_not_captured():
    rig = Rig("dflash")
    rig.check([1 + index % 5 for index in range(LADDER[-1] + 1)])
    assert rig.recorded.captures == 0


def test_rows_with_filters_have_graphs_of_their_own():
    rig = Rig("vanilla")
    for top_p in (1.0, 0.9, 0.5):
        # What comes of it is for the kernel to say: the reference asks the host for the filters of a row.
        rig.propose([1, 2], _rows([1.0, 0.7], top_p=top_p))
    assert (rig.recorded.captures, rig.recorded.replays) == (2, 3)
