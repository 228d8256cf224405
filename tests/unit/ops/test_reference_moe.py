"""Router and experts of the reference backend against a loop over tokens in float64."""

import pytest
import torch
from torch import Tensor

from k3svc.ops import load
from k3svc.ops.reference_moe import choose_experts
from k3svc.ops.table import Ops
from tests.oracles import naive

EXPERTS, WIDTH, INNER, TOP = 12, 24, 20, 3


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def ops() -> Ops:
    return load("reference", dtype="float32", threads=1)


def test_weights_come_from_scores_without_bias(ops: Ops) -> None:
    x, gate, bias = normal(1, 9, WIDTH), normal(2, EXPERTS, WIDTH), 2 * normal(3, EXPERTS)
    ids, weights = ops.route(
        x, ops.pack_linear(gate), bias, top_k=TOP, renormalize=True, scale=2.446, num_groups=1, top_groups=1
    )
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    score = torch.sigmoid(x.double() @ gate.double().T)
    for row in range(9):
        chosen = sorted(range(EXPERTS), key=lambda e: -float(score[row, e] + bias[e]))[:TOP]
        assert ids[row].tolist() == chosen
        own = score[row, chosen]
        torch.testing.assert_close(weights[row], (own / own.sum() * 2.446).float(), rtol=1e-5, atol=0)


def test_without_renormalisation(ops: Ops) -> None:
    logits = normal(4, 2, EXPERTS)
    ids, weights = choose_experts(
        logits, torch.zeros(EXPERTS), top_k=TOP, renormalize=False, scale=1.0, num_groups=1, top_groups=1
    )
    torch.testing.assert_close(weights, torch.sigmoid(logits).gather(1, ids))


def test_ties_go_to_the_lowest_id() -> None:
    ids, _ = choose_experts(
        torch.zeros(2, 300), torch.zeros(300), top_k=5, renormalize=True, scale=1.0, num_groups=1, top_groups=1
    )
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_groups_are_ranked_by_their_two_best() -> None:
    """Group 0 has the best expert, groups 1 and 2 the better pairs; expert 0 is out of reach. Negative scores count."""
    logits = torch.full((1, 6), -8.0)
    bias = torch.tensor([0.9, -3.0, 0.6, 0.5, 0.55, 0.54]) - 1.0
    ids, _ = choose_experts(logits, bias, top_k=3, renormalize=True, scale=1.0, num_groups=3, top_groups=2)
    assert ids.tolist() == [[2, 4, 5]]


@pytest.mark.parametrize("count", [0, 1, 50])
def test_experts_equal_a_loop_over_tokens(ops: Ops, count: int) -> None:
    weights = [
        (normal(10 + e, INNER, WIDTH), normal(30 + e, INNER, WIDTH), normal(50 + e, WIDTH, INNER))
        for e in range(EXPERTS)
    ]
    x = normal(5, count, WIDTH)
    # Expert 0 gets half of the tokens in first place, expert 11 none.
    ids = torch.stack(
        [torch.randperm(EXPERTS - 1, generator=torch.Generator().manual_seed(i))[:TOP] for i in range(50)]
    )
    ids = ids[:count]
    share = torch.rand(count, TOP, generator=torch.Generator().manual_seed(6))
    out = ops.experts(x, ids, share, ops.pack_experts(iter(weights)), "situ", 4.0, 25.0)
    assert out.shape == x.shape
    for row in range(count):
        expected = torch.zeros(WIDTH, dtype=torch.float64)
        for expert, weight in zip(ids[row].tolist(), share[row].tolist(), strict=True):
            w1, w3, w2 = (w.double() for w in weights[expert])
            own = x[row].double()
            expected += weight * (w2 @ naive.situ(w1 @ own, w3 @ own, 4.0, 25.0))
        torch.testing.assert_close(out[row], expected.float(), rtol=1e-5, atol=1e-4)
