"""Files of a checkpoint that nest without end are errors that name the file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from k3svc.errors import CheckpointError
from k3svc.model.checkpoint import INDEX_FILE, Checkpoint
from k3svc.model.config import ModelConfig
from k3svc.text.tokenizer import Tokenizer

NANO = Path(__file__).parents[3] / "models" / "k3-nano"


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("config.json", ModelConfig.from_directory),
        ("config.json", Tokenizer.load),
        ("generation_config.json", Tokenizer.load),
        ("tokenizer_config.json", Tokenizer.load),
        (INDEX_FILE, Checkpoint),
    ],
)
def test_bottomless_json_names_the_file(name: str, load: Callable[[Path], object], tmp_path: Path):
    for other in ("config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model"):
        (tmp_path / other).write_bytes((NANO / other).read_bytes())
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


@pytest.mark.parametrize("name", [None, 3, True, "", "..", "../other/model.safetensors", "/etc/passwd", "a\0b", ["a"]])
def test_an_index_names_files_of_its_folder(name: object, tmp_path: Path):
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name, "b": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("vocab_size", [10**6, 2**40, 10**400])
def test_a_vocabulary_without_ranks_fills_no_memory(vocab_size: int, tmp_path: Path):
    for name in ("tokenizer_config.json", "tiktoken.model"):
        (tmp_path / name).write_bytes((NANO / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    with pytest.raises(CheckpointError, match="control tokens"):
        Tokenizer.load(tmp_path)
