"""k3-nano against its golden file, through the smallest loop: prompt logits and greedy continuations."""

import json
from pathlib import Path

import pytest
import torch

from k3svc.model.kimi import Model
from k3svc.ops import load
from tests.oracles.loop import Loop

NANO = Path("models/k3-nano")


@pytest.mark.parametrize("chunk", [64, 192, 4096])
def test_golden_logits_and_continuations(chunk: int) -> None:
    ops = load("reference", dtype="float32", threads=1)
    model = Model.load(NANO, ops)
    for prompt in json.loads((NANO / "golden.json").read_text())["prompts"]:
        loop = Loop(model, ops, poison=True)
        sequence = loop.new(len(prompt["ids"]) + 48)
        logits = loop.prefill(sequence, prompt["ids"], chunk)
        for row in prompt["top5"]:
            torch.testing.assert_close(
                logits[row["position"], row["ids"]], torch.tensor(row["logits"]), rtol=0, atol=1e-3
            )
        assert loop.greedy(sequence, logits[-1], 48) == prompt["continuation_ids"]
