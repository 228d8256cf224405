"""Against the logits of an independent implementation that lie beside the checkpoint."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from k3svc.cli.logits import compute_logits, write_logits
from k3svc.cli.main import main
from k3svc.config import CacheSection, Config, ModelSection, PrefillSection
from k3svc.errors import ConfigError, InvalidRequest

NANO = Path(__file__).parents[3] / "models" / "k3-nano"
GOLDEN = json.loads((NANO / "golden.json").read_text())["prompts"]


def config(chunk_tokens: int = 64) -> Config:
    return Config(
        model=ModelSection(path=str(NANO)),
        prefill=PrefillSection(chunk_tokens=chunk_tokens),
        cache=CacheSection(page_size=16),
    )


def silent(_stage: str, _share: float) -> None:
    pass


def test_the_command_writes_what_the_checkpoint_should_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prompts, out = tmp_path / "prompts.json", tmp_path / "logits.npz"
    prompts.write_text(json.dumps([prompt["ids"] for prompt in GOLDEN]))
    arguments = ("logits", "--model", str(NANO), "--tokens-file", str(prompts), "--out", str(out))
    monkeypatch.setattr(sys, "argv", ["k3svc", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    with np.load(out) as file:
        arrays = dict(file)
    assert sorted(arrays) == [f"logits_{index}" for index in range(len(GOLDEN))]
    for index, prompt in enumerate(GOLDEN):
        row, last = arrays[f"logits_{index}"], prompt["top5"][-1]
        assert last["position"] == len(prompt["ids"]) - 1
        assert (row.dtype, row.shape) == (np.float32, (4096,))
        np.testing.assert_allclose(row[last["ids"]], last["logits"], atol=1e-3)
        assert row.argmax() == prompt["continuation_ids"][0]


def test_chunks_leave_no_trace_and_prompts_do_not_touch_each_other():
    """A prompt of three chunks of 64 between others, against all of it in one chunk."""
    long = [token for prompt in GOLDEN for token in prompt["ids"]][:170]
    short = GOLDEN[0]["ids"]
    chunked = compute_logits(config(64), [short, long, short], silent)
    (whole,) = compute_logits(config(192), [long], silent)
    np.testing.assert_array_equal(chunked[1], whole)
    np.testing.assert_array_equal(chunked[0], chunked[2])
    assert np.abs(chunked[0] - chunked[1]).max() > 1


def test_prompts_are_checked(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="prompt 1: got '0 tokens'; allowed: at least 1 token"):
        compute_logits(config(), [[1], []], silent)
    with pytest.raises(InvalidRequest, match=r"prompt 1\[0\]: got 4096; allowed: token ids 0 to 4095"):
        compute_logits(config(), [[1], [4096]], silent)
    with pytest.raises(ConfigError, match="cannot write"):
        write_logits(config(), [[1]], tmp_path / "no" / "folder.npz", silent)
