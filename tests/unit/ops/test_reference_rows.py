"""Row-wise operations of the reference backend against their formulas, computed independently in float64."""

import math

import pytest
import torch
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.ops import load
from k3svc.ops.table import Activation, Ops
from tests.oracles import naive


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def ops() -> Ops:
    return load("reference", dtype="float32", threads=1)


def test_load_names_what_this_build_has() -> None:
    ops = load("reference", dtype="bfloat16", threads=1)
    assert (ops.name, ops.activation_dtype, ops.batch_invariant) == ("reference", torch.bfloat16, False)
    with pytest.raises(BackendError, match=r"'tpu'.*reference"):
        load("tpu", dtype="float32", threads=1)
    with pytest.raises(BackendError, match=r"'float16'.*float32, bfloat16"):
        load("reference", dtype="float16", threads=1)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 70])
def test_linear_and_embed(ops: Ops, count: int) -> None:
    weight, x = normal(1, 37, 24), normal(2, count, 24)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight)), expected, rtol=1e-5, atol=1e-5)
    strided = torch.cat([x, x], 1)[:, 24:]
    assert torch.equal(ops.linear(strided, ops.pack_linear(weight)), ops.linear(x, ops.pack_linear(weight)))
    ids = torch.arange(count) % 37
    assert torch.equal(ops.embed(weight, ids), weight[ids])


def test_norms(ops: Ops) -> None:
    x, weight = 3 * normal(3, 5, 48), normal(4, 48)
    expected = naive.rms(x.double(), weight.double(), 1e-5).float()
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected, rtol=1e-6, atol=1e-6)
    tiny = torch.full((1, 48), 1e-4)
    torch.testing.assert_close(ops.rms_norm(tiny, torch.ones(48), 1e-5)[0, 0], torch.tensor(1e-4 / math.sqrt(1.001e-5)))
    o, z, head = normal(5, 4, 3, 16), 2 * normal(6, 4, 48), normal(7, 16)
    gated = naive.rms(o.double(), head.double(), 1e-5) * torch.sigmoid(z.double().view(4, 3, 16))
    torch.testing.assert_close(ops.gated_norm(o, z, head, 1e-5), gated.view(4, 48).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [0, 1, 5])
def test_mixture_of_residuals(ops: Ops, size: int) -> None:
    """Scores are those of normed rows, values the raw rows; the prefix is the last row."""
    rows = [10 * normal(10 + index, 3, 32) for index in range(size + 1)]
    norm, proj = normal(8, 32), normal(9, 32)
    out = ops.mix_residual(rows[-1], rows[:-1], norm * proj, 1e-5)
    for token in range(3):
        own = [row[token].double() for row in rows]
        expected = naive.mixture(own, norm.double(), proj.double(), 1e-5)
        torch.testing.assert_close(out[token], expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("activation", "linear_beta"), [("situ", 25.0), ("situ", None), ("silu", None)])
def test_gated_units(ops: Ops, activation: Activation, linear_beta: float | None) -> None:
    gate_up = 30 * normal(20, 7, 26)
    gate, up = gate_up.double().chunk(2, 1)
    expected = gate * torch.sigmoid(gate) * up
    if activation == "situ":
        expected = naive.situ(gate, up, 4.0, linear_beta)
    torch.testing.assert_close(ops.glu(gate_up, activation, 4.0, linear_beta), expected.float(), rtol=2e-6, atol=1e-6)


def test_situ_saturates_and_is_silu_for_small_signals(ops: Ops) -> None:
    """|β · λ| = 100 is the bound; near zero tanh(x/c)·c is x."""
    large = torch.tensor([[1000.0, 1000.0], [-1000.0, 1000.0]])
    out = ops.glu(large, "situ", 4.0, 25.0)
    torch.testing.assert_close(out, torch.tensor([[100.0], [0.0]]))
    small = torch.tensor([[1e-2, 2e-2]])
    torch.testing.assert_close(ops.glu(small, "situ", 4.0, 25.0), ops.glu(small, "silu", 4.0, None), rtol=1e-5, atol=0)


def test_sigmoid_gate_at_extremes(ops: Ops) -> None:
    x, gate = normal(21, 2, 4), torch.tensor([[200.0, -200.0, 0.0, 1.0]] * 2)
    expected = x * torch.tensor([1.0, 0.0, 0.5, 0.7310586])
    torch.testing.assert_close(ops.sigmoid_gate(x, gate), expected)
