"""State after prompts and decode steps against the naive implementation, tensor by tensor, on k3-nano."""

from pathlib import Path

import pytest
import torch

from k3svc.model.kimi import Model
from k3svc.ops import load
from tests.oracles.loop import Loop, Tracked
from tests.oracles.naive import NaiveModel, State

NANO = Path("models/k3-nano")
PROMPT = torch.randint(3840, (150,), generator=torch.Generator().manual_seed(7)).tolist()
DECODED = torch.randint(3840, (6,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(NANO, load("reference", dtype="float32", threads=1))


@pytest.fixture(scope="module")
def expected() -> list[tuple[State, torch.Tensor]]:
    """State and logits after the prompt, and after the decoded tokens."""
    naive, state = NaiveModel(NANO), State()
    logits = naive.prompt(PROMPT, state)
    after_prompt = State(
        kda=dict(state.kda),
        conv={layer: list(rows) for layer, rows in state.conv.items()},
        rows={layer: list(rows) for layer, rows in state.rows.items()},
    )
    return [(after_prompt, logits), (state, naive.prompt(DECODED, state))]


def assert_state(loop: Loop, sequence: Tracked, expected: State) -> None:
    spec = loop.cache.spec
    for layer in spec.kda_layers:
        state = torch.frombuffer(loop.cache.state_bytes(layer, sequence.slot), dtype=torch.float32)
        state = state.view(spec.kda_heads, spec.kda_value_dim, spec.kda_key_dim)
        torch.testing.assert_close(state, expected.kda[layer].mT.float(), rtol=1e-4, atol=2e-5)
        conv = torch.frombuffer(loop.cache.conv_bytes(layer, sequence.slot), dtype=torch.float32)
        rows = torch.stack(expected.conv[layer][-(spec.conv_width - 1) :]).float()
        torch.testing.assert_close(conv.view(rows.shape), rows, rtol=1e-4, atol=5e-5)
    for layer in spec.mla_layers:
        pages = [torch.frombuffer(loop.cache.rows_bytes(layer, p), dtype=torch.float32) for p in sequence.pages]
        rows = torch.stack(expected.rows[layer]).float()
        stored = torch.cat(pages).view(-1, rows.shape[1])[: len(rows)]
        torch.testing.assert_close(stored, rows, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("chunk", [64, 4096])
def test_every_state_tensor_equals_the_naive_one(
    model: Model, expected: list[tuple[State, torch.Tensor]], chunk: int
) -> None:
    loop = Loop(model, load("reference", dtype="float32", threads=1), poison=True)
    sequence = loop.new(len(PROMPT) + len(DECODED))
    logits = loop.prefill(sequence, PROMPT, chunk)
    torch.testing.assert_close(logits, expected[0][1].float(), rtol=0, atol=1e-3)
    assert_state(loop, sequence, expected[0][0])
    for token, row in zip(DECODED, expected[1][1], strict=True):
        (hidden,) = loop.step("decode", [(sequence, [token])])
        torch.testing.assert_close(model.logits(hidden)[0], row.float(), rtol=0, atol=1e-3)
    assert_state(loop, sequence, expected[1][0])
