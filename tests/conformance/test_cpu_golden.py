"""k3-nano on the cpu backend against its golden file, and a decode batch against its sequences alone."""

import json
from pathlib import Path

import pytest
import torch

from k3svc.model.kimi import Model
from k3svc.ops.cpu.backend import Cpu
from tests.conformance.cpu_cases import needs_compiler
from tests.oracles.loop import Loop

pytestmark = needs_compiler

NANO = Path("models/k3-nano")
PROMPTS = json.loads((NANO / "golden.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def cpu() -> Cpu:
    return Cpu()


@pytest.fixture(scope="module")
def model(cpu: Cpu) -> Model:
    return Model.load(NANO, cpu)


@pytest.mark.parametrize("chunk", [64, 192, 4096])
def test_golden_logits_and_continuations(cpu: Cpu, model: Model, chunk: int):
    for prompt in PROMPTS:
        loop = Loop(model, cpu, poison=True)
        sequence = loop.new(len(prompt["ids"]) + 48)
        logits = loop.prefill(sequence, prompt["ids"], chunk)
        for row in prompt["top5"]:
            torch.testing.assert_close(
                logits[row["position"], row["ids"]], torch.tensor(row["logits"]), rtol=0, atol=1e-3
            )
        assert loop.greedy([sequence], logits[-1:], 48) == [prompt["continuation_ids"]]


def test_a_batch_decodes_the_bits_of_its_sequences_alone(cpu: Cpu, model: Model):
    loop = Loop(model, cpu, num_slots=10, poison=True)
    alone, together = ([loop.new(len(prompt["ids"]) + 8) for prompt in PROMPTS] for _ in range(2))
    for one, other, prompt in zip(alone, together, PROMPTS, strict=True):
        loop.prefill(one, prompt["ids"], 64)
        loop.prefill(other, prompt["ids"], 4096)
    for index in range(8):
        ids = [prompt["continuation_ids"][index : index + 1] for prompt in PROMPTS]
        rows = loop.step("decode", list(zip(together, ids, strict=True)))
        for one, own, row in zip(alone, ids, rows, strict=True):
            (hidden,) = loop.step("decode", [(one, own)])
            assert torch.equal(hidden, row)
    for one, other in zip(alone, together, strict=True):
        for layer in loop.cache.spec.kda_layers:
            assert loop.cache.state_bytes(layer, one.slot) == loop.cache.state_bytes(layer, other.slot)
