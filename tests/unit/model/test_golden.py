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
    loop = Loop(model, ops, num_slots=5, poison=True)
    prompts = json.loads((NANO / "golden.json").read_text())["prompts"]
    sequences = [loop.new(len(prompt["ids"]) + 48) for prompt in prompts]
    last = []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        logits = loop.prefill(sequence, prompt["ids"], chunk)
        for row in prompt["top5"]:
            wanted = torch.tensor(row["logits"])
            torch.testing.assert_close(logits[row["position"], row["ids"]], wanted, rtol=0, atol=1e-3)
        last.append(logits[-1])
    assert loop.greedy(sequences, torch.stack(last), 48) == [prompt["continuation_ids"] for prompt in prompts]
