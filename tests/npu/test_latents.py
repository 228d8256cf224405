"""What MLA does to its latents before attention: split and norm, apart or fused, and the ways into the cache."""

import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.model.config import ModelConfig
from k3svc.model.kimi import Model
from k3svc.model.mla import MlaMixer
from k3svc.ops import load, needs
from k3svc.ops.npu import mla, vendor
from k3svc.ops.npu.options import OPTIONS, split_options
from k3svc.ops.npu_emulated import attention, rowwise
from k3svc.ops.npu_emulated.backend import NpuEmulated
from k3svc.ops.npu_emulated.contract import ContractViolation, Session
from k3svc.ops.npu_emulated.device import on_device
from k3svc.ops.table import Mode, Ops, StepMeta
from tests.npu.bench import CONTRACT, STORES, NoKernels, emulated, fill, reference, small_spec, steps
from tests.oracles.loop import Loop

NANO = Path("models/k3-nano")
BF16 = torch.bfloat16
STEPS: list[tuple[Mode, StepMeta]] = [
    ("extend", steps([(2, 64, 5), (-1, 0, 3), (5, 0, 20), (1, 0, 0)], num_rows=32)),
    ("extend", steps([(3, 0, 16)])),
    ("decode", steps([(2, 20, 1), (-1, 0, 1), (5, 0, 1), (-1, 0, 1)])),
    ("verify", steps([(2, 70, 3), (6, 5, 1), (-1, 0, 2), (4, 0, 5)], num_rows=16)),
]
"""Padding in the middle, at the end and none."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def called(ops: NpuEmulated) -> list[str]:
    return [call.name.removeprefix("npu::") for call in ops.session.calls]


# Split and norm


def norm_arguments(**changes: Any) -> dict[str, Any]:
    """A legal call: 3 rows of 8, 16 and 4 channels."""
    weights = [SimpleNamespace(weight=draw(width).to(BF16)) for width in (8, 16)]
    given = {"fused": draw(3, 28).to(BF16), "q_a_layernorm": weights[0], "kv_a_layernorm": weights[1]}
    return {**given, "q_lora_rank": 8, "kv_lora_rank": 16, "qk_rope_dim": 4, "eps": 0.1, **changes}


def by_hand(row: list[float], weight: list[float], eps: float) -> list[float]:
    """Rounded before the weight and after it."""
    factor = 1 / math.sqrt(sum(x * x for x in row) / len(row) + eps)
    normed = torch.tensor([x * factor for x in row], dtype=torch.float64).to(BF16).tolist()
    return [a * b for a, b in zip(normed, weight, strict=True)]


def test_fused_split_qk_norm():
    given = norm_arguments()
    with on_device(Session(rules=CONTRACT)):
        q, latent, rope = rowwise.fused_split_qk_norm(**given)
    assert (q.shape, latent.shape, rope.shape) == ((3, 8), (3, 1, 16), (3, 1, 4))
    assert torch.equal(rope[:, 0], given["fused"][:, 24:])
    for out, first, norm in ((q, 0, given["q_a_layernorm"]), (latent[:, 0], 8, given["kv_a_layernorm"])):
        rows = given["fused"][:, first : first + out.shape[1]].tolist()
        expected = torch.tensor([by_hand(row, norm.weight.tolist(), 0.1) for row in rows], dtype=torch.float64)
        assert torch.equal(out, expected.to(BF16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fused": draw(3, 28)}, "fused is torch.float32"),
        ({"fused": draw(3, 56).to(BF16)[:, ::2]}, "must be contiguous"),
        ({"fused": draw(3, 29).to(BF16)}, "rows"),
        ({"fused": draw(0, 28).to(BF16)}, "0 rows"),
        ({"fused": torch.zeros(65535, 28, dtype=BF16)}, "65535 rows"),
        ({"q_lora_rank": 16, "kv_lora_rank": 8}, "weight"),
        ({"q_a_layernorm": SimpleNamespace(weight=torch.ones(8))}, "weight torch.float32"),
    ],
)
def test_breaches_of_the_fused_norm_raise(changes: dict[str, Any], message: str):
    with on_device(Session(rules=CONTRACT)), pytest.raises(ContractViolation, match=message):
        rowwise.fused_split_qk_norm(**norm_arguments(**changes))


@pytest.mark.parametrize("rows", [5, 0])
def test_fused_norms_are_those_of_the_parts(rows: int, monkeypatch: pytest.MonkeyPatch):
    """In float32, where rounding is no matter; eps is none that a default could be. More rows than the kernel takes go
    in several calls.
    """
    ops = emulated(mla_split_norm="fused")
    monkeypatch.setattr(mla, "SPLIT_NORM_ROWS", 2)
    kv, q, kv_weight, q_weight = draw(rows, 48), draw(rows, 24), draw(32), draw(24)
    assert ops.split_norm is not None
    cached, normed = ops.split_norm(kv, q, kv_weight, q_weight, 0.1)
    oracle = reference()
    torch.testing.assert_close(normed, oracle.rms_norm(q, q_weight, 0.1))
    torch.testing.assert_close(cached[:, :32], oracle.rms_norm(kv[:, :32], kv_weight, 0.1))
    assert torch.equal(cached[:, 32:], kv[:, 32:])
    assert called(ops).count("fused_split_qk_norm") == -(-rows // 2)


@pytest.mark.parametrize(("options", "fused", "apart"), [("", 0, 2), (",mla-split-norm=fused", 1, 0)])
def test_one_option_picks_how_the_model_norms_its_latents(options: str, fused: int, apart: int):
    """Norms as wide as a latent, of one decode step of k3-nano, for each of its MLA layers."""
    ops = load(f"npu-emulated:fp32,shape-relaxed{options}", dtype="float32", threads=1)
    assert isinstance(ops, NpuEmulated)
    loop = Loop(Model.load(NANO, ops), ops)
    sequence = loop.new(4)
    loop.prefill(sequence, [5, 6], 64)
    ops.session.calls.clear()
    loop.step("decode", [(sequence, [7])])
    config = ModelConfig.from_directory(NANO)
    layers = len(loop.cache.spec.mla_layers)
    shapes = [call.shapes[0] for call in ops.session.calls if call.name == "npu::npu_rms_norm"]
    assert sum(shape in ((1, config.kv_lora_rank), (1, config.q_lora_rank)) for shape in shapes) == apart * layers
    assert called(ops).count("fused_split_qk_norm") == fused * layers


def test_a_model_without_a_latent_of_queries_refuses_the_fused_norm():
    config = replace(ModelConfig.from_directory(NANO), q_lora_rank=None)
    nothing: Any = None
    with pytest.raises(BackendError, match="q_lora_rank"):
        MlaMixer(config, emulated(mla_split_norm="fused"), nothing, "")


# The cache


def store_arguments(**changes: Any) -> dict[str, Any]:
    """Three blocks of two rows, of which the first is valid whole, the second nowhere, the third by half."""
    src_k, src_v = draw(6, 1, 8), draw(6, 1, 4)
    places = torch.tensor([[7, 2], [10**6, -1], [0, -5]])
    for src in (src_k, src_v):
        src[[2, 3, 5]] = torch.nan
    given = {"dst_k": draw(9, 1, 8), "dst_v": draw(9, 1, 4), "src_k": src_k, "src_v": src_v, "loc_2d": places}
    return {**given, "commit_lens": torch.tensor([2, 0, 1], dtype=torch.int32), **changes}


def test_store_kv_cache_prefix_valid_npu_triton():
    """What lies past a block's prefix is neither read, wherever it points, nor written."""
    given = store_arguments()
    before = {name: given[name].clone() for name in ("dst_k", "dst_v")}
    with on_device(Session(rules=CONTRACT)):
        attention.store_kv_cache_prefix_valid_npu_triton(**given)
    for name, old in before.items():
        rows = {7: 0, 2: 1, 0: 4}
        source = given[name.replace("dst", "src")]
        expected = [source[rows[n]] if n in rows else old[n] for n in range(9)]
        assert torch.equal(given[name], torch.stack(expected))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loc_2d": torch.tensor([7, 2, 0, 0, 0, 0])}, "loc_2d"),
        ({"loc_2d": torch.tensor([[7, 9], [0, 0], [0, 0]])}, "outside of"),
        ({"loc_2d": torch.tensor([[7, -1], [0, 0], [0, 0]])}, "outside of"),
        ({"loc_2d": torch.tensor([[7.0, 2.0]] * 3)}, "loc_2d"),
        ({"commit_lens": torch.tensor([2, 0])}, "commit_lens"),
        ({"commit_lens": torch.tensor([2, 0, 3])}, "commit_lens"),
        ({"src_v": draw(5, 1, 4)}, "src_v"),
        ({"src_v": draw(6, 1, 8)}, "src_v"),
        ({"dst_k": draw(9, 1, 1, 8)}, "rank 4"),
        ({"src_k": draw(6, 1, 8).to(BF16)}, "src_k"),
        ({"src_k": draw(6, 1, 16)[..., ::2]}, "last two axes"),
    ],
)
def test_breaches_of_the_store_raise(changes: dict[str, Any], message: str):
    with on_device(Session(rules=CONTRACT)), pytest.raises(ContractViolation, match=message):
        attention.store_kv_cache_prefix_valid_npu_triton(**store_arguments(**changes))


@pytest.mark.parametrize(("mode", "meta"), STEPS)
@pytest.mark.parametrize("mla_store", STORES)
def test_either_store_writes_what_the_reference_writes(mla_store: str, mode: Mode, meta: StepMeta):
    spec = small_spec()
    backends: list[Ops] = [emulated(mla_store=mla_store), reference()]
    own, other = (backend.new_cache(spec).layer(1) for backend in backends)
    fill(other, torch.Generator().manual_seed(1))
    own.latent.copy_(other.rows[..., :32])
    own.rope.copy_(other.rows[..., 32:])
    rows = draw(meta.slot_mapping.shape[0], 48)
    for backend, pool in zip(backends, (own, other), strict=True):
        backend.mla_write(rows, pool, backend.prepare(meta, mode, spec))
    assert torch.equal(torch.cat([own.latent, own.rope], dim=-1)[1:], other.rows[1:])


@pytest.mark.parametrize(("mode", "meta"), STEPS)
def test_the_prefix_store_leaves_out_padding(mode: Mode, meta: StepMeta):
    """One launch for both parts, seen as [rows, 1, width]; rows of padding, which hold NaN, go nowhere, the dummy page
    included.
    """
    spec = small_spec()
    ops = emulated(mla_store="prefix")
    pool = ops.new_cache(spec).layer(1)
    fill(pool, torch.Generator().manual_seed(1))
    before = pool.latent.clone(), pool.rope.clone()
    rows = draw(meta.slot_mapping.shape[0], 48)
    rows[meta.slot_mapping < 0] = torch.nan
    ops.session.calls.clear()
    ops.mla_write(rows, pool, ops.prepare(meta, mode, spec))
    places = meta.slot_mapping[meta.slot_mapping >= 0]
    others = torch.ones(41 * 16, dtype=torch.bool)
    others[places] = False
    for part, old in zip((pool.latent, pool.rope), before, strict=True):
        assert torch.equal(part.view(-1, part.shape[-1])[others], old.view(-1, part.shape[-1])[others])
        assert part.isfinite().all()
    (call,) = [call for call in ops.session.calls if call.name == "store_kv_cache_prefix_valid_npu_triton"]
    assert call.shapes[:2] == ((41 * 16, 1, 32), (41 * 16, 1, 16))
    assert "npu_scatter_nd_update_" not in called(ops)


# What is wanted of the vendor


def test_what_no_choice_calls_may_be_missing():
    """Every name is wanted under some choice, and none under two choices of one option alone."""
    default = {need.name for need in needs("npu-emulated")}
    assert default == {*vendor.OPERATORS, *vendor.MODULES} - {
        name for name, choice in vendor.CHOSEN.items() if choice not in [f"{o}={v[0]}" for o, v in OPTIONS.items()]
    }
    for choice in set(vendor.CHOSEN.values()):
        names = {need.name for need in needs(f"npu-emulated:{choice}")}
        assert {name for name, own in vendor.CHOSEN.items() if own == choice} <= names
        option = choice.partition("=")[0]
        assert not {n for n, own in vendor.CHOSEN.items() if own != choice and own.startswith(f"{option}=")} & names


@pytest.mark.parametrize(
    ("choice", "name", "module"),
    [
        ("mla-split-norm=fused", "fused_split_qk_norm", "sgl_kernel_npu.norm.fused_split_qk_norm"),
        ("mla-store=prefix", "store_kv_cache_prefix_valid_npu_triton", "sgl_kernel_npu.mem_cache.kv_cache_store"),
    ],
)
def test_a_package_without_the_kernel_is_refused_under_its_choice_alone(
    choice: str, name: str, module: str, monkeypatch: pytest.MonkeyPatch
):
    """The text says what was looked for and which choice wants it."""
    monkeypatch.setattr(sys, "meta_path", [NoKernels(), *sys.meta_path])
    real: Callable[..., Any] = importlib.import_module

    def found(asked: str, package: str | None = None) -> Any:
        return SimpleNamespace() if asked == module else real(asked, package)

    monkeypatch.setattr(importlib, "import_module", found)
    (need,) = [need for need in vendor.probe(split_options(choice)[0]) if need.name == name]
    assert (need.package, need.problem) == ("sgl-kernel-npu", f"{module} has no {name}")
    with pytest.raises(BackendError, match=rf"{name} \({choice}\): {module} has no {name}\.\s+Needs sgl-kernel-npu: "):
        vendor.load(split_options(choice)[0])
    with pytest.raises(BackendError) as caught:
        vendor.load(split_options("")[0])
    assert name not in str(caught.value)
