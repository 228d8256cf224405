"""Row-wise operations, router and experts of the cpu backend against the reference, with poisoned outputs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.table import Activation
from tests.conformance.cpu_cases import expert, needs_compiler, poisoned_memory, rand, reference

pytestmark = needs_compiler

SHAPES = settings(max_examples=25)
ROWS = st.integers(0, 40)
WIDTHS = st.integers(1, 80)


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(scope="module")
def cpu() -> Cpu:
    return Cpu()


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) % 2**31)


def strided(x: Tensor) -> Tensor:
    """The same rows, further apart."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), torch.nan)
    wide[:, 3 : 3 + x.shape[1]] = x
    return wide[:, 3 : 3 + x.shape[1]]


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=tolerance * max(scale, 1e-3))


@SHAPES
@given(rows=st.integers(0, 130), width=st.integers(1, 600), out=st.integers(1, 150), is_bf16=st.booleans())
def test_linear(cpu: Cpu, rows: int, width: int, out: int, is_bf16: bool):
    source = generator(rows, width, out)
    x, weight = strided(rand(source, rows, width)), rand(source, out, width)
    weight = weight.bfloat16() if is_bf16 else weight
    packed = cpu.pack_linear(weight)
    assert packed.data.dtype == weight.dtype
    close(cpu.linear(x, packed), (x.double() @ weight.double().t()).float(), 1e-5)


@SHAPES
@given(rows=ROWS, width=WIDTHS)
def test_rms_norm_and_sigmoid_gate(cpu: Cpu, rows: int, width: int):
    source = generator(rows, width)
    x, gate, weight = strided(rand(source, rows, width)), strided(rand(source, rows, width)), rand(source, width)
    close(cpu.rms_norm(x, weight, 1e-5), reference().rms_norm(x, weight, 1e-5))
    close(cpu.sigmoid_gate(x, gate), reference().sigmoid_gate(x, gate))


@SHAPES
@given(rows=ROWS, heads=st.integers(1, 3), width=WIDTHS)
def test_gated_norm(cpu: Cpu, rows: int, heads: int, width: int):
    source = generator(rows, heads, width)
    o, z, weight = rand(source, rows, heads, width), rand(source, rows, heads * width), rand(source, width)
    close(cpu.gated_norm(o, strided(z), weight, 1e-5), reference().gated_norm(o, z, weight, 1e-5))


@SHAPES
@given(rows=ROWS, width=WIDTHS, count=st.integers(1, 9))
def test_mix_residual(cpu: Cpu, rows: int, width: int, count: int):
    source = generator(rows, width, count)
    bank = [strided(rand(source, rows, width, scale=3)) for _ in range(count)]
    prefix, score = rand(source, rows, width), rand(source, width)
    close(cpu.mix_residual(prefix, bank, score, 1e-5), reference().mix_residual(prefix, bank, score, 1e-5), 1e-5)


@SHAPES
@given(
    rows=ROWS,
    width=WIDTHS,
    activation=st.sampled_from(["silu", "situ"]),
    linear_beta=st.sampled_from([None, 25.0]),
    scale=st.sampled_from([1e-3, 1.0, 40.0, 1e4]),
)
def test_glu(cpu: Cpu, rows: int, width: int, activation: Activation, linear_beta: float | None, scale: float):
    x = strided(rand(generator(rows, width), rows, 2 * width, scale=scale))
    expected = reference().glu(x.double(), activation, 4.0, linear_beta).float()
    close(cpu.glu(x, activation, 4.0, linear_beta), expected)


@SHAPES
@given(
    rows=ROWS,
    num_groups=st.integers(1, 3),
    group_size=st.integers(2, 20),
    renormalize=st.booleans(),
    data=st.data(),
)
def test_route(cpu: Cpu, rows: int, num_groups: int, group_size: int, renormalize: bool, data: st.DataObject):
    top_groups = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, min(8, top_groups * group_size)))
    source = generator(rows, num_groups, group_size)
    num_experts = num_groups * group_size
    # Coarse logits make ties, which the lowest id wins.
    x, weight = rand(source, rows, 24).round(), rand(source, num_experts, 24).round()
    bias = rand(source, num_experts, scale=0.25).mul_(4).round_().div_(4)
    options: dict[str, Any] = {
        "top_k": top_k,
        "renormalize": renormalize,
        "scale": 2.5,
        "num_groups": num_groups,
        "top_groups": top_groups,
    }
    ids, weights = cpu.route(x, cpu.pack_linear(weight), bias, **options)
    expected_ids, expected = reference().route(x, reference().pack_linear(weight), bias, **options)
    # Saturated scores may differ in the last bit, so ranks are compared by what they are worth.
    score = torch.sigmoid(x.double() @ weight.double().t()) + bias
    close(score.gather(1, ids), score.gather(1, expected_ids))
    close(weights, expected, 1e-5)
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_route_of_no_rows(cpu: Cpu):
    x, weight, bias = torch.empty(0, 24), torch.ones(6, 24), torch.zeros(6)
    for ops in (cpu, reference()):
        packed: Any = ops.pack_linear(weight)
        ids, weights = ops.route(x, packed, bias, top_k=2, renormalize=True, scale=1.0, num_groups=2, top_groups=1)
        assert ids.shape == weights.shape == (0, 2)


def test_route_breaks_ties_by_the_lowest_id(cpu: Cpu):
    weight = torch.ones(12, 8)
    bias = torch.zeros(12)
    bias[[3, 7]] = 1
    ids, weights = cpu.route(
        torch.ones(2, 8),
        cpu.pack_linear(weight),
        bias,
        top_k=4,
        renormalize=True,
        scale=1.0,
        num_groups=1,
        top_groups=1,
    )
    assert ids.tolist() == [[3, 7, 0, 1]] * 2
    torch.testing.assert_close(weights, torch.full((2, 4), 0.25))


@pytest.mark.parametrize("num_experts", [5, 16, 40, 256])
def test_route_takes_nan_for_the_smallest(cpu: Cpu, num_experts: int):
    """All scores are sigmoid(0), so that the biases rank; few values make ties in and across all lanes."""
    source = generator(num_experts)
    for _ in range(20):
        bias = torch.randint(-2, 3, (num_experts,), generator=source).float()
        bias[torch.rand(num_experts, generator=source) < 0.4] = torch.nan
        bias[torch.rand(num_experts, generator=source) < 0.1] = -torch.inf
        counted = [index for index in range(num_experts) if bias[index] > -torch.inf]
        ranked = sorted(counted, key=lambda index: (-float(bias[index]), index))
        ids, weights = cpu.route(
            torch.zeros(9, 8),
            cpu.pack_linear(torch.ones(num_experts, 8)),
            bias,
            top_k=5,
            renormalize=False,
            scale=1.0,
            num_groups=1,
            top_groups=1,
        )
        assert ids.tolist() == [(ranked + list(range(num_experts))[len(ranked) :])[:5]] * 9
        assert (weights == 0.5).all()


@SHAPES
@given(
    rows=ROWS,
    width=WIDTHS,
    inner=st.integers(1, 40),
    count=st.integers(1, 7),
    is_bf16=st.booleans(),
    data=st.data(),
)
def test_experts(cpu: Cpu, rows: int, width: int, inner: int, count: int, is_bf16: bool, data: st.DataObject):
    top_k = data.draw(st.integers(1, count))
    source = generator(rows, width, inner, count)
    matrices = [expert(source, inner, width) for _ in range(count)]
    if is_bf16:
        matrices = [(w1.bfloat16(), w3.bfloat16(), w2.bfloat16()) for w1, w3, w2 in matrices]
    x, weights = strided(rand(source, rows, width)), rand(source, rows, top_k).abs()
    ids = torch.rand(rows, count, generator=source).argsort(-1)[:, :top_k]
    packed = cpu.pack_experts(iter(matrices))
    assert packed.down.data.dtype == matrices[0][0].dtype
    wide = [(w1.float(), w3.float(), w2.float()) for w1, w3, w2 in matrices]
    actual = cpu.experts(x, ids, weights, packed, "situ", 4.0, 25.0)
    close(actual, reference().experts(x, ids, weights, reference().pack_experts(iter(wide)), "situ", 4.0, 25.0), 1e-5)


def operations(cpu: Cpu) -> dict[str, Callable[[Tensor], Tensor]]:
    """Row-wise operations on rows [N, 80]."""
    source = generator(5)
    plain, coarse = cpu.pack_linear(rand(source, 100, 80)), cpu.pack_linear(rand(source, 100, 80).bfloat16())
    deep = cpu.pack_linear(rand(source, 40, 640))
    norm, score, bias = rand(source, 80), rand(source, 80), rand(source, 9)
    router = cpu.pack_linear(rand(source, 9, 80))
    experts = cpu.pack_experts(expert(source, 24, 80) for _ in range(9))

    def routed(x: Tensor) -> Tensor:
        ids, weights = cpu.route(x, router, bias, top_k=3, renormalize=True, scale=1.0, num_groups=3, top_groups=2)
        return torch.cat([cpu.experts(x, ids, weights, experts, "silu", 1.0, None), ids.float(), weights], dim=1)

    return {
        "linear": lambda x: cpu.linear(x, plain),
        "linear bf16": lambda x: cpu.linear(x, coarse),
        "linear deep": lambda x: cpu.linear(x.repeat(1, 8), deep),
        "rms_norm": lambda x: cpu.rms_norm(x, norm, 1e-5),
        "gated_norm": lambda x: cpu.gated_norm(x.view(-1, 2, 40), x, norm[:40], 1e-5),
        "mix_residual": lambda x: cpu.mix_residual(x, [x.cos(), x.sin()], score, 1e-5),
        "glu": lambda x: cpu.glu(x, "situ", 4.0, 25.0),
        "sigmoid_gate": lambda x: cpu.sigmoid_gate(x, x),
        "experts": routed,
    }


def test_a_row_has_the_same_bits_in_any_batch(cpu: Cpu):
    x = rand(generator(1), 64, 80)
    for name, operation in operations(cpu).items():
        alone = torch.cat([operation(x[row : row + 1]) for row in range(64)])
        for count in range(1, 65):
            assert torch.equal(operation(x[:count]), alone[:count]), (name, count)
        assert torch.equal(operation(x[7:40]), alone[7:40]), name


def test_nan_stays_in_its_row(cpu: Cpu):
    x = rand(generator(2), 20, 80)
    broken = x.clone()
    broken[6, 3] = torch.nan
    others = [row for row in range(20) if row != 6]
    for name, operation in operations(cpu).items():
        actual = operation(broken)
        assert torch.equal(actual[others], operation(x)[others]), name
        assert actual[6].isnan().any(), name


def test_values_at_the_ends_of_float32(cpu: Cpu):
    ends = torch.tensor([[0.0, -0.0, 1e-40, 1e-6, -1e-6, 20.0, -20.0, 88.0, -88.0, 104.0, -104.0, 3e38, -3e38]])
    ones = torch.ones_like(ends)
    close(cpu.sigmoid_gate(ones, ends), torch.sigmoid(ends.double()).float(), 1e-7)
    situ = cpu.glu(torch.cat([ends, ends], dim=1), "situ", 4.0, 25.0)
    gate = ends.double()
    close(situ, (4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(gate / 25)).float(), 1e-6)


@pytest.mark.parametrize(("beta", "linear_beta"), [(4.0, 25.0), (0.3, 7.0), (1.0, 1.0), (4.0, None)])
def test_situ_over_all_of_float32(cpu: Cpu, beta: float, linear_beta: float | None):
    sizes = torch.cat([torch.logspace(-45, 38.5, 4000, dtype=torch.float64), torch.linspace(0, 100, 8000).double()])
    values = torch.cat([sizes, -sizes, torch.tensor([0.0, -0.0, torch.inf, -torch.inf]).double()]).float()
    ups = values if linear_beta is not None else values.clamp(-1e3, 1e3)
    for gate, up in (
        (values, ups[torch.randperm(len(ups), generator=generator(3))]),
        (values, torch.full_like(values, 0.5)),
        (torch.full_like(values, -1.5), ups),
    ):
        wide = up.double() if linear_beta is None else linear_beta * torch.tanh(up.double() / linear_beta)
        expected = beta * torch.tanh(gate.double() / beta) * torch.sigmoid(gate.double()) * wide
        actual = cpu.glu(torch.cat([gate, up])[None], "situ", beta, linear_beta)[0].double()
        # 4 ulp; gates below -87.3 count as minus infinity.
        least = 1.3e-38 * beta * (linear_beta or 1e3)
        assert ((actual - expected).abs() <= 5e-7 * expected.abs() + least).all()
    nan, one = torch.tensor([torch.nan]), torch.ones(1)
    for pair in ([nan, one], [one, nan], [nan, nan]):
        assert cpu.glu(torch.cat(pair)[None], "situ", beta, linear_beta).isnan().all()
