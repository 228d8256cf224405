"""Proposals of drafts on a GPU, through graphs, against the reference backend."""

from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.model.draft import Blocks, DraftModel, Proposal
from k3svc.model.draft_config import parse_draft_config
from k3svc.model.draft_context import ContextPool
from k3svc.ops.table import Ops, SampleRows
from tests.conformance.cpu_cases import reference
from tests.conformance.cuda_cases import DEVICE, cuda_ops
from tests.unit.model.test_draft import HIDDEN, KINDS, random_weights, tables

pytestmark = [pytest.mark.slow, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")]

LENGTHS = (3, 9, 1, 14, 5)


def build(kind: str, ops: Ops) -> tuple[DraftModel, ContextPool]:
    """A draft, and contexts of LENGTHS rows in slots 1 to 5."""
    config = parse_draft_config(KINDS[kind])
    embedding, lm_head = tables()
    draft = DraftModel(config, random_weights(config), embedding=embedding, lm_head=lm_head, ops=ops)
    context = draft.new_context(num_slots=len(LENGTHS) + 1, max_window=64, scratch_rows=8)
    for slot, length in enumerate(LENGTHS, start=1):
        taps = torch.randn(length, 2 * HIDDEN, generator=torch.Generator().manual_seed(slot)).to(ops.device)
        positions = torch.arange(length, device=ops.device)
        draft.inject(draft.projector.project(taps), positions, torch.full_like(positions, slot), context)
    return draft, context


def proposal(
    draft: DraftModel, context: ContextPool, device: torch.device, slots: list[int], heats: Any, top_p: float
) -> Proposal:
    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    blocks = Blocks(
        anchors=column([slot + 1 for slot in slots]),
        base_lens=column([LENGTHS[slot - 1] for slot in slots]),
        starts=column([0 for _ in slots]),
        slots=column(slots),
    )
    count = len(slots)
    rows = heats and SampleRows(
        temperature=torch.tensor(heats[:count], device=device),
        top_k=column([0] * count),
        top_p=torch.full((count,), top_p, device=device),
        min_p=torch.zeros(count, device=device),
        seed=column(list(range(count))),
        sample_index=column([0] * count),
        position=column([0] * count),
        host_greedy=tuple(heat == 0 for heat in heats[:count]),
        host_filters=((0, torch.tensor(top_p).item(), 0.0),) * count,
    )
    return draft.propose(blocks, context, rows, with_probs=top_p == 1)


@pytest.mark.parametrize(
    ("heats", "top_p"),
    [(None, 1.0), ((1.0, 0.0, 0.5, 2.0), 1.0), ((1.0, 0.0, 0.5, 2.0), 0.8)],
    ids=["greedy", "sampled", "filtered"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_proposals(kind: str, heats: Any, top_p: float):
    ops = cuda_ops()
    draft, context = build(kind, ops)
    plain, plain_context = build(kind, reference())
    for slots in ([3], [1, 2, 4, 5], [5, 4, 1], [2, 1], [3]):
        own = proposal(draft, context, ops.device, slots, heats, top_p)
        expected = proposal(plain, plain_context, torch.device("cpu"), slots, heats, top_p)
        assert own.tokens.tolist() == expected.tokens.tolist()
        for mine, other in ((own.confidences, expected.confidences), (own.probs, expected.probs)):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                torch.testing.assert_close(mine.cpu(), other, rtol=1e-3, atol=1e-4)
