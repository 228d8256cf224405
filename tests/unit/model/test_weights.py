"""Loading: names, shapes and files that do not fit are named; MXFP4; progress. On the first two layers of k3-nano."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3svc.errors import BackendError, CheckpointError
from k3svc.model.kimi import Model
from k3svc.model.weights import decode_mxfp4
from k3svc.ops import load
from k3svc.ops.reference import Reference
from tests.oracles.loop import Loop

NANO = Path("models/k3-nano")
FILE = "model.safetensors"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Tensors of layers 0 (KDA, dense) and 1 (KDA, experts) and what is outside of layers."""
    found: dict[str, Tensor] = {}
    for file in NANO.glob("*.safetensors"):
        found |= {
            name: tensor
            for name, tensor in load_file(file).items()
            if ".layers." not in name or ".layers.0." in name or ".layers.1." in name
        }
    return found


def write(directory: Path, tensors: Mapping[str, Tensor]) -> Path:
    tree = json.loads((NANO / "config.json").read_text())
    tree["text_config"]["num_hidden_layers"] = 2
    (directory / "config.json").write_text(json.dumps(tree))
    save_file(dict(tensors), directory / FILE)
    return directory


def logits(directory: Path) -> Tensor:
    ops = load("reference", dtype="float32", threads=1)
    loop = Loop(Model.load(directory, ops), ops)
    return loop.prefill(loop.new(64), list(range(20)), 64)


def refused(directory: Path, *messages: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Model.load(directory, load("reference", dtype="float32", threads=1))
    for message in messages:
        assert message in str(caught.value)


ATTENTION = "language_model.model.layers.0.self_attn."


def test_progress_reaches_the_total(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    ops = load("reference", dtype="float32", threads=1)
    Model.load(write(tmp_path, tensors), ops, progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert {total for _, total in calls} == {total}
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1][0] == total


def test_missing_unknown_and_misshapen_tensors_are_listed(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    changed = dict(tensors)
    del changed[f"{ATTENTION}f_a_proj.weight"]
    changed["language_model.model.layers.1.self_attn.rope.weight"] = torch.zeros(2)
    changed[f"{ATTENTION}o_norm.weight"] = torch.zeros(63)
    changed[f"{ATTENTION}A_log"] = torch.zeros(3)
    refused(
        write(tmp_path, changed),
        "4 tensors do not fit config.json",
        "missing: model.layers.0.self_attn.f_a_proj.weight",
        "unknown: model.layers.1.self_attn.rope.weight",
        "shape of model.layers.0.self_attn.o_norm.weight: [63], expected [64]",
        "shape of model.layers.0.self_attn.A_log: [3], expected [4] or more",
    )


def test_a_long_list_is_cut(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    few = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    refused(write(tmp_path, few), "48 tensors do not fit", "and 28 more")


def test_two_spellings_of_one_tensor(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    twice = {**tensors, "lm_head.weight": tensors["language_model.lm_head.weight"].clone()}
    refused(write(tmp_path, twice), "is the same tensor as")


def test_files_that_cannot_be_read(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    directory = write(tmp_path, tensors)
    whole = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(whole[:-1])
    refused(directory, f"cannot read {directory / FILE}")
    (directory / FILE).unlink()
    refused(directory, "no *.safetensors files")
    index = directory / "model.safetensors.index.json"
    index.write_text("{}")
    refused(directory, f"{index}: expected an object with weight_map")
    index.write_text(json.dumps({"weight_map": {"a": "elsewhere.safetensors"}}))
    refused(directory, "elsewhere.safetensors")


def test_another_chunk_size_than_the_backend(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write(tmp_path, tensors)
    tree = json.loads((tmp_path / "config.json").read_text())
    tree["text_config"]["linear_attn_config"]["chunk_size"] = 32
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(BackendError, match="chunk size is 32, that of reference 64"):
        Model.load(tmp_path, Reference(torch.float32, threads=1))


def encode_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [out, in] → uint8 [out, in/2], uint8 [out, in/32], by the nearest code."""
    groups = weight.view(len(weight), -1, 32)
    exponent = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / 2.0 ** exponent[..., None]
    code = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    code = code.view(len(weight), -1, 2).to(torch.uint8)
    return code[..., 0] | code[..., 1] << 4, (exponent + 127).to(torch.uint8)


def test_mxfp4_by_hand() -> None:
    """Low nibble first; index 8 is -0; scale 128 doubles, 255 is NaN, 0 is 2^-127."""
    packed = torch.zeros(1, 64, dtype=torch.uint8)
    packed[0, 0], packed[0, 1], packed[0, 16], packed[0, 32] = 0x71, 0x8F, 0x02, 0x02
    out = decode_mxfp4(packed, torch.tensor([[128, 127, 0, 255]], dtype=torch.uint8))
    assert out.shape == (1, 128)
    assert out[0, :5].tolist() == [1.0, 12.0, -12.0, 0.0, 0.0]
    assert torch.signbit(out[0, 3])
    assert float(out[0, 32]) == 1.0
    assert float(out[0, 64]) == 2.0**-127
    assert bool(out[0, 96:].isnan().all())


def test_every_code_of_mxfp4() -> None:
    packed = torch.arange(16, dtype=torch.uint8)[None] * 16 + torch.arange(16, dtype=torch.uint8)[None]
    out = decode_mxfp4(packed, torch.full((1, 1), 126, dtype=torch.uint8))
    assert out[0, ::2].tolist() == (torch.cat([E2M1, -E2M1]) / 2).tolist()
    assert out[0, 1::2].tolist() == out[0, ::2].tolist()


def test_packed_experts_load_like_their_decoded_values(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    plain, packed = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if ".experts." in name:
            code, scale = encode_mxfp4(tensor.float())
            plain[name] = decode_mxfp4(code, scale)
            assert float((plain[name] - tensor).abs().max()) < 0.25 * float(tensor.abs().max())
            del packed[name]
            packed[f"{name}_packed"], packed[f"{name}_scale"] = code, scale
    (tmp_path / "plain").mkdir()
    (tmp_path / "packed").mkdir()
    expected = logits(write(tmp_path / "plain", plain))
    assert torch.equal(logits(write(tmp_path / "packed", packed)), expected)
    del packed["language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"]
    refused(write(tmp_path / "packed", packed), "missing: model.layers.1.mlp.experts.3.w2.weight_scale")


def test_codes_are_not_taken_for_weights(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    name = "language_model.lm_head.weight"
    changed = {**tensors, name: tensors[name].to(torch.uint8)}
    refused(write(tmp_path, changed), "dtype of lm_head.weight: U8")
