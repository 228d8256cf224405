"""ModelSlim checkpoints: they compute what their weights stand for, under any spelling, and say what does not fit."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3svc.errors import CheckpointError
from k3svc.model.checkpoint import model_hash
from k3svc.model.kimi import Model
from k3svc.model.modelslim import FILE, spellings, unpack_int4
from k3svc.ops import load
from tests.oracles.loop import Loop
from tests.unit.model.modelslim_cases import save_quantized

NANO = Path("models/k3-nano")
MOE = "language_model.model.layers.1.block_sparse_moe."
EXPERT = f"{MOE}experts.3."


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Two layers of k3-nano."""
    found: dict[str, Tensor] = {}
    for file in NANO.glob("*.safetensors"):
        found |= {
            name: tensor
            for name, tensor in load_file(file).items()
            if ".layers." not in name or ".layers.0." in name or ".layers.1." in name
        }
    return found


def logits(directory: Path) -> Tensor:
    ops = load("reference", dtype="float32", threads=1)
    loop = Loop(Model.load(directory, ops), ops)
    return loop.prefill(loop.new(64), list(range(20)), 64)


def plain(directory: Path, tensors: Mapping[str, Tensor]) -> Path:
    """The same as an ordinary checkpoint."""
    tree = json.loads((NANO / "config.json").read_text())
    tree["text_config"]["num_hidden_layers"] = 2
    (directory / "config.json").write_text(json.dumps(tree))
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


SPELLINGS: dict[str, Callable[[str], str]] = {
    "as the tensors": lambda name: name,
    "mlp": lambda name: name.replace(".block_sparse_moe.", ".mlp."),
    "without language_model": lambda name: name.removeprefix("language_model."),
    "both": lambda name: name.removeprefix("language_model.").replace(".block_sparse_moe.", ".mlp."),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("experts", ["W8A8_DYNAMIC", "W4A8_DYNAMIC"])
def test_logits_are_those_of_the_weights_they_stand_for(
    tensors: dict[str, Tensor], experts: str, spelling: str, tmp_path_factory: pytest.TempPathFactory
):
    quantised, plainly = (tmp_path_factory.mktemp(name) for name in ("quantised", "plain"))
    meant = save_quantized(quantised, tensors, experts=experts, others="W8A8_DYNAMIC", key=SPELLINGS[spelling])
    assert torch.equal(logits(quantised), logits(plain(plainly, meant)))


@pytest.mark.parametrize("group_size", [16, 32])
def test_logits_with_scales_of_groups(
    tensors: dict[str, Tensor], group_size: int, tmp_path_factory: pytest.TempPathFactory
):
    """Experts and dequantised matrices alike."""
    quantised, plainly = (tmp_path_factory.mktemp(name) for name in ("quantised", "plain"))
    meant = save_quantized(quantised, tensors, experts="W4A8_DYNAMIC", others="W4A8_DYNAMIC", group_size=group_size)
    by_row = save_quantized(tmp_path_factory.mktemp("rows"), tensors, experts="W4A8_DYNAMIC", others="W4A8_DYNAMIC")
    name = f"{EXPERT}w1.weight"
    wanted = tensors[name].float()
    assert (meant[name] - wanted).norm() < 0.9 * (by_row[name] - wanted).norm()
    assert torch.equal(logits(quantised), logits(plain(plainly, meant)))


def test_int4_holds_two_rows_in_one():
    packed = torch.tensor([[0x21, -1], [-128, 0x7F]], dtype=torch.int8)
    assert unpack_int4(packed).tolist() == [[1, -1], [2, -1], [0, -1], [-8, 7]]


def test_spellings_of_a_module():
    expected = {
        "model.layers.1.mlp.gate",
        "language_model.model.layers.1.mlp.gate",
        "model.layers.1.block_sparse_moe.gate",
        "language_model.model.layers.1.block_sparse_moe.gate",
    }
    for name in expected:
        assert set(spellings(name)) == expected
        assert spellings(name)[0] == name
    assert spellings("lm_head") == ["lm_head", "language_model.lm_head"]


def described(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tree = json.loads((directory / FILE).read_text())
        change(tree)
        (directory / FILE).write_text(json.dumps(tree))

    return apply


def stored(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return apply


BROKEN: list[tuple[Callable[[Path], Any], tuple[str, ...]]] = [
    (lambda directory: (directory / FILE).unlink(), ("is int8 and there is no quant_model_description.json",)),
    (lambda directory: (directory / FILE).write_text("{"), ("cannot read", FILE)),
    (lambda directory: (directory / FILE).write_text("[]"), ("expected an object",)),
    (
        described(lambda tree: tree.pop(f"{EXPERT}w1.weight")),
        ("no scheme of model.layers.1.mlp.experts.3.w1.weight", "tried: model.layers.1.mlp.experts.3.w1.weight, "),
    ),
    (
        described(lambda tree: tree.update({f"{EXPERT}w1.weight": "W4A4_DYNAMIC"})),
        ("got 'W4A4_DYNAMIC'; allowed: FLOAT, W8A8, W8A8_DYNAMIC, W4A8_DYNAMIC",),
    ),
    (
        described(lambda tree: tree.update({f"{EXPERT}w1.weight": "FLOAT"})),
        ("experts.3.w1.weight is described as FLOAT, and stored as I8",),
    ),
    (
        described(lambda tree: tree.update({"language_model.lm_head.weight": "W8A8_DYNAMIC"})),
        ("lm_head.weight is described as W8A8_DYNAMIC, and stored as ",),
    ),
    (
        described(lambda tree: tree.update({f"{EXPERT}w1.weight": "W4A8_DYNAMIC"})),
        ("shape of model.layers.1.mlp.experts.3.w1.weight",),
    ),
    (
        stored(lambda tensors: tensors.pop(f"{EXPERT}w2.weight_scale")),
        ("missing: model.layers.1.mlp.experts.3.w2.weight_scale",),
    ),
    (
        stored(lambda tensors: tensors.update({f"{EXPERT}w2.weight_scale": torch.ones(3, 1)})),
        ("shape of model.layers.1.mlp.experts.3.w2.weight_scale: [3, 1]",),
    ),
    (
        stored(lambda tensors: tensors.update({"language_model.model.norm.bias": torch.ones(3)})),
        ("unknown: model.norm.bias",),
    ),
]


NEVER_WHOLE = {
    "model.layers.1.block_sparse_moe.gate": (2, "W8A8_DYNAMIC"),
    "model.layers.0.self_attention_res_proj": (2, "W8A8"),
    "model.layers.0.self_attn.q_conv1d": (3, "W8A8"),
    "model.norm": (1, "W8A8"),
}


@pytest.mark.parametrize("module", NEVER_WHOLE)
def test_what_computes_in_float32_is_never_of_whole_numbers(tensors: dict[str, Tensor], module: str, tmp_path: Path):
    """Router, scores of residuals, convolutions and norms: an int8 tensor there would be read as its bare numbers."""
    rank, scheme = NEVER_WHOLE[module]
    name = f"language_model.{module}.weight"
    assert tensors[name].dim() == rank
    save_quantized(tmp_path, tensors, experts="W8A8_DYNAMIC", others="W8A8_DYNAMIC")
    described(lambda tree: tree.update({name: scheme}))(tmp_path)
    stored(lambda written: written.update({name: torch.ones_like(tensors[name]).to(torch.int8)}))(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        Model.load(tmp_path, load("reference", dtype="float32", threads=1))
    named = module.replace("block_sparse_moe", "mlp")
    assert f"{named}.weight: got a scheme of whole numbers; allowed: FLOAT" in str(caught.value)


@pytest.mark.parametrize("scheme", ["W8A8", "W8A8_DYNAMIC", "W4A8_DYNAMIC"])
def test_attention_and_dense_layers_of_whole_numbers(
    tensors: dict[str, Tensor], scheme: str, tmp_path_factory: pytest.TempPathFactory
):
    """Beside gates that stay as they are, in one product with them."""
    quantised, plainly = (tmp_path_factory.mktemp(name) for name in ("quantised", "plain"))
    meant = save_quantized(quantised, tensors, experts="W4A8_DYNAMIC", others="W8A8_DYNAMIC", projections=scheme)
    schemes = json.loads((quantised / FILE).read_text())
    names = [name for name, own in schemes.items() if name.endswith(".weight") and own == scheme]
    found = {name.split(".")[-2] for name in names if "experts" not in name}
    assert {"q_proj", "o_proj", "gate_proj"} <= found
    assert torch.equal(logits(quantised), logits(plain(plainly, meant)))


@pytest.mark.parametrize(("breaks", "messages"), BROKEN)
def test_what_does_not_fit_is_named(
    tensors: dict[str, Tensor], breaks: Callable[[Path], Any], messages: tuple[str, ...], tmp_path: Path
):
    save_quantized(tmp_path, tensors, experts="W8A8_DYNAMIC", others="W8A8_DYNAMIC")
    breaks(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        Model.load(tmp_path, load("reference", dtype="float32", threads=1))
    for message in messages:
        assert message in str(caught.value)


BROKEN_GROUPS: list[tuple[Callable[[Path], Any], str]] = [
    (described(lambda tree: tree.pop("group_size")), "w1.weight_scale_second is there, and no group_size"),
    (described(lambda tree: tree.update(group_size="32")), "group_size: got '32'; allowed: a number of columns, or 0"),
    (described(lambda tree: tree.update(group_size=-1)), "group_size: got -1"),
    (described(lambda tree: tree.update(group_size=16)), "w1.weight_scale_second: ["),
    (described(lambda tree: tree.update(group_size=33)), "columns, no multiple of it"),
    (
        stored(lambda tensors: tensors.pop(f"{EXPERT}w2.weight_scale_second")),
        "missing: model.layers.1.mlp.experts.3.w2.weight_scale_second",
    ),
    (
        stored(lambda tensors: tensors[f"{EXPERT}w2.weight_offset_second"].fill_(1)),
        "w2.weight_offset_second: got a zero point other than 0",
    ),
    (
        stored(lambda tensors: tensors[f"{EXPERT}w3.weight_offset"].fill_(1)),
        "w3.weight_offset: got a zero point other than 0",
    ),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN_GROUPS)
def test_scales_of_groups_that_do_not_fit_are_named(
    tensors: dict[str, Tensor], breaks: Callable[[Path], Any], message: str, tmp_path: Path
):
    save_quantized(tmp_path, tensors, experts="W4A8_DYNAMIC", others="FLOAT", group_size=32)
    breaks(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        Model.load(tmp_path, load("reference", dtype="float32", threads=1))
    assert message in str(caught.value)


def test_gate_and_up_of_an_expert_have_one_width(tensors: dict[str, Tensor], tmp_path: Path):
    save_quantized(tmp_path, tensors, experts="W8A8_DYNAMIC", others="FLOAT")

    def narrow(found: dict[str, Tensor]) -> None:
        found[f"{EXPERT}w3.weight"] = found[f"{EXPERT}w3.weight"][::2].contiguous()

    stored(narrow)(tmp_path)
    described(lambda tree: tree.update({f"{EXPERT}w3.weight": "W4A8_DYNAMIC"}))(tmp_path)
    with pytest.raises(CheckpointError, match=r"w1: 8, .*w3: 4, .*must agree"):
        Model.load(tmp_path, load("reference", dtype="float32", threads=1))


def test_the_description_is_part_of_the_hash(tensors: dict[str, Tensor], tmp_path: Path):
    save_quantized(tmp_path, tensors, experts="W8A8_DYNAMIC", others="FLOAT")
    before = model_hash(tmp_path)
    described(lambda tree: tree.update({"version": "2.0.0"}))(tmp_path)
    assert model_hash(tmp_path) != before
