"""Hash and names of a checkpoint's files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from k3svc.errors import CheckpointError
from k3svc.model import checkpoint
from k3svc.model.checkpoint import canonical_name, model_hash


def write(directory: Path, tensors: dict[str, Tensor], config: str = "{}") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config)
    save_file(tensors, directory / "model.safetensors")
    return directory


def tensors() -> dict[str, Tensor]:
    return {
        "lm_head.weight": torch.arange(20000.0).view(100, 200),
        "model.norm.weight": torch.ones(3, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("whole_bytes", [1 << 30, 0], ids=["whole", "sampled"])
def test_hash_sees_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int) -> None:
    monkeypatch.setattr(checkpoint, "WHOLE_HASH_BYTES", whole_bytes)
    base = model_hash(write(tmp_path / "a", tensors()))
    assert base == model_hash(write(tmp_path / "b", tensors()))
    assert len(base) == 64
    hashes = {base}
    for index in (0, -1):
        changed = tensors()
        changed["lm_head.weight"].view(-1)[index] += 1
        hashes.add(model_hash(write(tmp_path / "b", changed)))
    renamed = tensors()
    renamed["model.other.weight"] = renamed.pop("model.norm.weight")
    hashes.add(model_hash(write(tmp_path / "b", renamed)))
    reshaped = tensors()
    reshaped["lm_head.weight"] = reshaped["lm_head.weight"].view(200, 100)
    hashes.add(model_hash(write(tmp_path / "b", reshaped)))
    retyped = tensors()
    retyped["model.norm.weight"] = retyped["model.norm.weight"].view(torch.int16)
    hashes.add(model_hash(write(tmp_path / "b", retyped)))
    hashes.add(model_hash(write(tmp_path / "b", tensors(), config='{"a": 1}')))
    assert len(hashes) == 7


def test_only_the_ends_of_large_checkpoints_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tensors()
    changed["lm_head.weight"][50, 100] += 1
    a, b = write(tmp_path / "a", tensors()), write(tmp_path / "b", changed)
    assert model_hash(a) != model_hash(b)
    monkeypatch.setattr(checkpoint, "WHOLE_HASH_BYTES", 0)
    assert model_hash(a) == model_hash(b)


def test_hash_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*config.json"):
        model_hash(tmp_path)


def test_one_spelling_of_names() -> None:
    expected = "model.layers.3.mlp.experts.0.w1.weight"
    for source in (
        "language_model.model.layers.3.block_sparse_moe.experts.0.w1.weight",
        "language_model.layers.3.mlp.experts.0.w1.weight",
        "model.layers.3.block_sparse_moe.experts.0.w1.weight",
    ):
        assert canonical_name(source) == expected
