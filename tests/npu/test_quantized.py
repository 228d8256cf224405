"""Experts of whole numbers on the emulated device, and ModelSlim checkpoints there against the reference."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3svc.model.kimi import Model
from k3svc.ops import load
from k3svc.ops.npu_emulated import registry
from k3svc.ops.npu_emulated.contract import ContractViolation, Session
from k3svc.ops.npu_emulated.device import on_device
from k3svc.ops.table import Activation, Ops, QuantizedExpert, QuantizedMatrix
from tests.npu.bench import CONTRACT, RELAXED, RawCalls, emulated, reference
from tests.oracles.loop import Loop
from tests.unit.model.modelslim_cases import quantized, save_quantized

registry.install()
npu = torch.ops.npu
BF16 = torch.bfloat16
WIDTH, INNER, EXPERTS = 32, 16, 5
NANO = Path("models/k3-nano")


def experts(
    bits: Literal[4, 8], generator: torch.Generator, *, down_bits: Literal[4, 8] | None = None, group_size: int = 0
) -> Any:
    """Random experts, each weight with its own scales."""

    def draw(rows: int, columns: int, width: Literal[4, 8]) -> QuantizedMatrix:
        matrix = quantized(torch.randn(rows, columns, generator=generator), width, group_size=group_size)
        # The kernel gets scales of groups in the precision of float16.
        return replace(matrix, scale=matrix.scale.half().float()) if group_size else matrix

    return [
        (draw(INNER, WIDTH, bits), draw(INNER, WIDTH, bits), draw(WIDTH, INNER, down_bits or bits))
        for _ in range(EXPERTS)
    ]


def rounded(x: Tensor, *, half_up: bool) -> tuple[Tensor, float]:
    scale = float(x.abs().max()) / 127
    return ((x / scale + 0.5).floor() if half_up else (x / scale).round()), scale


def by_hand(x: Tensor, ids: Tensor, weights: Tensor, packed: list[QuantizedExpert], activation: Activation) -> Tensor:
    """One row and one expert at a time in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for n, row in enumerate(x.double()):
        whole, scale = rounded(row, half_up=False)
        for expert, share in zip(ids[n].tolist(), weights[n].tolist(), strict=True):
            gate, up, down = (
                w.values.double()
                * w.scale.double()
                .view(len(w.scale), -1)
                .repeat_interleave(w.values.shape[1] * len(w.scale) // w.scale.numel(), 1)
                for w in packed[expert]
            )
            gate, up = gate @ whole * scale, up @ whole * scale
            if activation == "situ":
                hidden = 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()
            else:
                hidden = gate * gate.sigmoid() * up
            again, factor = rounded(hidden, half_up=activation == "situ")
            out[n] += share * (down @ again) * factor
    return out.float()


def case(bits: Literal[4, 8], **more: Any) -> tuple[Tensor, Tensor, Tensor, list[QuantizedExpert]]:
    generator = torch.Generator().manual_seed(bits)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:3] for _ in range(9)])
    x, weights = torch.randn(9, WIDTH, generator=generator), torch.rand(9, 3, generator=generator)
    return x, ids, weights, experts(bits, generator, **more)


@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize(("bits", "down_bits", "group_size"), [(8, 8, 0), (4, 4, 0), (4, 8, 0), (4, 4, 8)])
def test_experts_of_whole_numbers(
    bits: Literal[4, 8], down_bits: Literal[4, 8], group_size: int, activation: Activation
):
    x, ids, weights, packed = case(bits, down_bits=down_bits, group_size=group_size)
    ops, linear_beta = emulated(), 25.0 if activation == "situ" else None
    own = ops.experts(x, ids, weights, ops.pack_quantized_experts(packed, x.dtype), activation, 4.0, linear_beta)
    torch.testing.assert_close(own, by_hand(x, ids, weights, packed, activation), rtol=1e-3, atol=1e-4)
    plain = reference()
    expected = plain.experts(
        x, ids, weights, plain.pack_quantized_experts(packed, x.dtype), activation, 4.0, linear_beta
    )
    assert float((own - expected).norm() / expected.norm()) < 0.03


def test_situ_without_a_linear_bound_is_requantised():
    x, ids, weights, packed = case(8)
    ops = emulated()
    backends: list[Ops] = [ops, reference()]
    own, expected = (
        each.experts(x, ids, weights, each.pack_quantized_experts(packed, x.dtype), "situ", 4.0, None)
        for each in backends
    )
    assert float((own - expected).norm() / expected.norm()) < 0.03
    assert "npu::npu_dynamic_quant" in {call.name for call in ops.session.calls}


def test_activation_and_quantisation_pick_the_kernel():
    """SwiGLU's fused kernels of int8 rows are never taken for a SiTU model."""
    x, ids, weights, packed = case(8)
    found = {}
    kinds: list[tuple[Activation, float | None]] = [("situ", 25.0), ("silu", None)]
    for activation, linear_beta in kinds:
        ops = emulated()
        ops.experts(x, ids, weights, ops.pack_quantized_experts(packed, x.dtype), activation, 4.0, linear_beta)
        found[activation] = {call.name for call in ops.session.calls}
    assert found["situ"] & {"situ", "npu::npu_swiglu", "npu::npu_dynamic_quant"} == {"situ"}
    assert "npu::npu_swiglu" in found["silu"]
    assert "npu::npu_dynamic_quant" in found["silu"]


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_products_have_explicit_arguments(bits: Literal[4, 8]):
    x, ids, weights, packed = case(bits)
    ops = emulated()
    own = ops.pack_quantized_experts(packed, x.dtype)
    with RawCalls() as raw:
        ops.experts(x, ids, weights, own, "situ", 4.0, 25.0)
    assert raw.keywords("npu_moe_init_routing_v2")["quant_mode"] == 1
    grouped = [keywords for name, _, keywords in raw.calls if name == "npu_grouped_matmul"]
    assert [given["output_dtype"] for given in grouped] == [torch.float32] * 2
    assert [given["group_list_type"] for given in grouped] == [1, 1]
    assert all(given["per_token_scale"][0].dtype == torch.float32 for given in grouped)


def test_int4_is_packed_eight_to_an_int32():
    values = torch.tensor([[n - 8] for n in range(16)], dtype=torch.int8)
    scale = torch.arange(1.0, 17.0) / 16
    weight = QuantizedMatrix(values=values, scale=scale, bits=4)
    packed = emulated().pack_quantized_experts([(weight, weight, weight)] * 2, torch.float32)
    assert packed.down.values.shape == (2, 1, 2)
    # -8 .. -1 as nibbles 8 .. f and 0 .. 7, the lowest first.
    assert [hex(int(v) & 0xFFFFFFFF) for v in packed.down.values[0, 0]] == ["0xfedcba98", "0x76543210"]
    assert packed.down.scale[0, 0, 0].item() == int(torch.tensor(1 / 16).view(torch.int32))
    torch.testing.assert_close(packed.down.bias, (8.0 * values[:, 0] * scale).expand(2, -1))


def test_scales_of_groups_are_packed_in_the_precision_of_float16():
    values = torch.tensor([[1, 2, 3, 4], [-1, -2, -3, -8]] * 8, dtype=torch.int8)
    scale = torch.tensor([[0.1, 0.2], [0.3, 0.4]] * 8)
    weight = QuantizedMatrix(values=values, scale=scale, bits=4)
    packed = emulated().pack_quantized_experts([(weight, weight, weight)] * 2, torch.float32)
    assert packed.down.scale.shape == (2, 2, 16)
    rounded_scale = [0.0999755859375, 0.199951171875, 0.300048828125, 0.39990234375]
    bits = [int(torch.tensor(value).view(torch.int32)) for value in rounded_scale]
    assert packed.down.scale[0, :, :2].tolist() == [[bits[0], bits[2]], [bits[1], bits[3]]]
    bias = [8 * (3 * rounded_scale[0] + 7 * rounded_scale[1]), 8 * (-3 * rounded_scale[2] - 11 * rounded_scale[3])]
    assert packed.down.bias is not None
    torch.testing.assert_close(packed.down.bias[1, :2], torch.tensor(bias))


def test_contract_mode_takes_experts_of_whole_numbers():
    generator = torch.Generator().manual_seed(1)
    ops = emulated(rules=CONTRACT, dtype=BF16)
    sizes = ((128, 64), (128, 64), (64, 128))
    widths: tuple[Literal[4, 8], ...] = (8, 4)
    for bits in widths:
        packed = []
        for _ in range(3):
            w1, w3, w2 = (quantized(torch.randn(size, generator=generator), bits) for size in sizes)
            packed.append((w1, w3, w2))
        x, ids = torch.randn(4, 64, generator=generator).to(BF16), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
        own = ops.experts(x, ids, torch.ones(4, 2), ops.pack_quantized_experts(packed, BF16), "situ", 4.0, 25.0)
        assert own.dtype == BF16
        assert own.isfinite().all()


def grouped_arguments() -> dict[str, Any]:
    weight = npu.npu_format_cast(torch.ones(3, 16, 32, dtype=torch.int8), 29)
    return {
        "x": [torch.ones(5, 16, dtype=torch.int8)],
        "weight": [weight],
        "scale": [torch.ones(3, 32, dtype=BF16)],
        "per_token_scale": [torch.ones(5)],
        "group_list": torch.tensor([2, 0, 3]),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
        "output_dtype": BF16,
    }


BREACHES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("weight", lambda w: [w[0].clone()], "NZ format"),
    ("scale", lambda s: [s[0].float()], r"output_dtype torch\.bfloat16, scale torch\.float32"),
    ("scale", lambda s: [s[0][:, None]], "scale"),
    ("scale", lambda _: None, "want scale and per_token_scale"),
    ("per_token_scale", lambda s: [s[0].to(BF16)], "per_token_scale"),
    ("per_token_scale", lambda _: None, "want scale and per_token_scale"),
    ("output_dtype", lambda _: torch.float16, "output_dtype"),
    ("bias", lambda _: [torch.zeros(3, 32)], "bias of int8 weights"),
    ("group_list_type", lambda _: 0, "groups of"),
]


@pytest.mark.parametrize(("argument", "change", "message"), BREACHES)
def test_breaches_of_quantised_products_raise(argument: str, change: Callable[[Any], Any], message: str):
    with on_device(Session(rules=CONTRACT)):
        given = grouped_arguments()
        npu.npu_grouped_matmul(**given)
        given[argument] = change(given.get(argument))
        with pytest.raises(ContractViolation, match=message):
            npu.npu_grouped_matmul(**given)


def test_float32_scales_mean_float16():
    with on_device(Session(rules=CONTRACT)):
        given = grouped_arguments() | {"scale": [torch.ones(3, 32)], "output_dtype": None}
        assert npu.npu_grouped_matmul(**given)[0].dtype == torch.float16


def test_dynamic_quant_rounds_half_to_even():
    with on_device(Session(rules=RELAXED)):
        whole, scale = npu.npu_dynamic_quant(torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0]]))
    assert whole.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert scale.tolist() == [1.0, 0.0]


def parts_of_both_kinds() -> tuple[list[Tensor | QuantizedMatrix], Tensor]:
    """Rows of int8, of floats, of int8 twice, and what they stand for."""
    generator = torch.Generator().manual_seed(9)
    drawn = [torch.randn(rows, WIDTH, generator=generator) for rows in (16, 3, 8, 24)]
    parts: list[Tensor | QuantizedMatrix] = [x if n == 1 else quantized(x, 8) for n, x in enumerate(drawn)]
    return parts, torch.cat([part if isinstance(part, Tensor) else part.dequantized() for part in parts])


def test_int8_rows_beside_floats_in_one_product():
    """Rows are quantised once, neighbours of a kind are one product, and columns come in the order of the weights."""
    parts, meant = parts_of_both_kinds()
    x = torch.randn(5, 2 * WIDTH, generator=torch.Generator().manual_seed(2))[:, ::2]
    ops = emulated()
    packed = ops.pack_quantized_linear(parts, torch.float32)
    with RawCalls() as raw:
        own = ops.linear(x, packed)
    whole, scales = zip(*(rounded(row, half_up=False) for row in x.double()), strict=True)
    again = torch.stack([row * scale for row, scale in zip(whole, scales, strict=True)])
    expected = again @ meant.double().t()
    expected[:, 16:19] = x.double() @ meant[16:19].double().t()
    torch.testing.assert_close(own, expected.float(), rtol=1e-4, atol=1e-4)
    calls = [call.name for call in ops.session.calls]
    assert (calls.count("npu::npu_dynamic_quant"), calls.count("npu::npu_quant_matmul")) == (1, 2)
    assert [given["output_dtype"] for name, _, given in raw.calls if name == "npu_quant_matmul"] == [torch.float32] * 2
    assert ops.linear(x[:0], packed).shape == (0, 51)
    plain = reference()
    torch.testing.assert_close(plain.linear(x, plain.pack_quantized_linear(parts, torch.float32)), x @ meant.t())


def test_contract_mode_takes_int8_projections():
    parts, meant = parts_of_both_kinds()
    ops = emulated(rules=CONTRACT, dtype=BF16)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(BF16)
    own = ops.linear(x, ops.pack_quantized_linear(parts, BF16))
    assert own.dtype == BF16
    expected = x.float() @ meant.t()
    assert float((own.float() - expected).norm() / expected.norm()) < 0.02


def test_a_product_of_int8_is_int8_unless_its_dtype_is_said():
    """Against a product of whole numbers by hand; what the device refuses is refused."""
    x1, x2 = torch.tensor([[1, -2], [3, 100]], dtype=torch.int8), torch.tensor([[5, 7], [-9, 11]], dtype=torch.int8)
    scale, rows = torch.tensor([0.5, 0.25]), torch.tensor([2.0, 0.125])
    with on_device(Session(rules=CONTRACT)):
        own = npu.npu_quant_matmul(x1, x2, scale, pertoken_scale=rows, output_dtype=BF16)
        assert own.tolist() == [[23.0, -7.5], [-55.25, 35.0]]
        assert npu.npu_quant_matmul(x1, x2, scale, pertoken_scale=rows).tolist() == [[23, -8], [-55, 35]]
        breaches: list[tuple[dict[str, Any], str]] = [
            ({"x1": x1.to(BF16)}, "x1"),
            ({"x1": x1[:0]}, "empty"),
            ({"x2": x2.t()}, "contiguous"),
            ({"scale": scale[:1]}, "scale"),
            ({"pertoken_scale": rows.to(BF16)}, "pertoken_scale"),
            ({"output_dtype": torch.float32}, "output_dtype"),
        ]
        for change, message in breaches:
            given = {"x1": x1, "x2": x2, "scale": scale, "pertoken_scale": rows, "output_dtype": BF16} | change
            with pytest.raises(ContractViolation, match=message):
                npu.npu_quant_matmul(**given)


@pytest.mark.parametrize(
    ("scheme", "group_size", "projections"),
    [
        ("W8A8_DYNAMIC", 0, "FLOAT"),
        ("W4A8_DYNAMIC", 0, "W8A8"),
        ("W4A8_DYNAMIC", 32, "W8A8_DYNAMIC"),
        ("W8A8_DYNAMIC", 0, "W4A8_DYNAMIC"),
    ],
)
def test_a_modelslim_checkpoint_agrees_with_the_reference(
    scheme: str, group_size: int, projections: str, tmp_path: Path
):
    """Two layers of k3-nano: float products of dequantised weights there, whole numbers here."""
    tensors: dict[str, Tensor] = {}
    for file in NANO.glob("*.safetensors"):
        tensors |= {
            name: tensor
            for name, tensor in load_file(file).items()
            if ".layers." not in name or ".layers.0." in name or ".layers.1." in name
        }
    save_quantized(
        tmp_path, tensors, experts=scheme, others="W8A8_DYNAMIC", projections=projections, group_size=group_size
    )
    ids = json.loads((NANO / "golden.json").read_text())["prompts"][0]["ids"]
    results, calls = [], set()
    for device in ("reference", "npu-emulated:fp32,shape-relaxed"):
        ops = load(device, dtype="float32", threads=1)
        loop = Loop(Model.load(tmp_path, ops), ops)
        results.append(loop.prefill(loop.new(len(ids)), ids, 64))
        calls |= {call.name for call in getattr(ops, "session", Session()).calls}
    expected, own = (x.double().log_softmax(-1) for x in results)
    assert float((expected.exp() * (expected - own)).sum(-1).mean()) < 5e-3
    assert {"npu::npu_moe_init_routing_v2", "npu::npu_quant_matmul"} <= calls
