"""k3-nano: verify steps against plain decode, logits, states and taps, bit by bit."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3svc.model.kimi import Model, Taps
from k3svc.ops.table import Mode, Ops
from tests.conformance.verify_cases import BACKENDS, backend, same_bits
from tests.oracles.loop import Loop, Tracked, step_meta
from training.recurrent import RecurrentTarget

NANO = Path("models/k3-nano")
PROMPTS = json.loads((NANO / "golden.json").read_text())["prompts"]
TAPPED = (1, 3, 5, 6)


@pytest.fixture(scope="module", params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


@pytest.fixture(scope="module")
def model(ops: Ops) -> Model:
    return Model.load(NANO, ops)


def memory(loop: Loop, sequence: Tracked) -> list[bytes]:
    """States, and the MLA rows that the sequence has behind it."""
    spec = loop.cache.spec
    parts = [
        bytes(view(layer, sequence.slot)[:])
        for layer in spec.kda_layers
        for view in (loop.cache.state_bytes, loop.cache.conv_bytes)
    ]
    for layer in spec.mla_layers:
        rows = b"".join(bytes(loop.cache.rows_bytes(layer, page)[:]) for page in sequence.pages)
        parts.append(rows[: sequence.length * len(rows) // (len(sequence.pages) * spec.page_size)])
    return parts


def drafts_of(known: Sequence[int], source: random.Random) -> tuple[list[int], int]:
    """Up to 7 drafts, the first of which continue what is known to follow, and how many of them do."""
    count = source.choice([0, 1, 4, 7])
    right = source.randint(0, count)
    drafts = list(known[:right])
    right = len(drafts)
    while len(drafts) < count:
        drafts.append(source.randrange(3800))
    return drafts, right


def test_steps_with_drafts_leave_what_plain_decode_leaves(ops: Ops, model: Model) -> None:
    """Three prompts with their golden continuations, ragged steps with padding, against decode in the same batch."""
    source = random.Random(0)
    loop = Loop(model, ops, num_slots=8, num_pages=200, poison=True)
    prompts = [prompt for prompt in PROMPTS if len(prompt["ids"]) < 300][:3]
    continuations = [prompt["continuation_ids"] for prompt in prompts]
    plain, drafted = ([loop.new(len(prompt["ids"]) + 64) for prompt in prompts] for _ in range(2))
    for sequences in (plain, drafted):
        for sequence, prompt in zip(sequences, prompts, strict=True):
            loop.prefill(sequence, prompt["ids"], 4096)
            sequence.hidden.clear()
    for index in range(40):
        ids = [continuation[index : index + 1] for continuation in continuations]
        loop.step("decode", list(zip(plain, ids, strict=True)))
    ends = [len(prompt["ids"]) + 40 for prompt in prompts]
    while any(sequence.length < end for sequence, end in zip(drafted, ends, strict=True)):
        rows, accepted = [], []
        for sequence, end, continuation in zip(drafted, ends, continuations, strict=True):
            done = sequence.length - end + 40
            if sequence.length == end:
                continue
            drafts, right = drafts_of(continuation[done + 1 : 40], source)
            rows.append((sequence, [continuation[done], *drafts]))
            accepted.append(right)
        live = sum(len(tokens) for _, tokens in rows)
        rows.append((Tracked(slot=-1, pages=[]), [0]))
        loop.verify(rows, [*accepted, 0], live + 3)
    for sequence, other in zip(plain, drafted, strict=True):
        assert same_bits(torch.cat(sequence.hidden), torch.cat(other.hidden))
        assert memory(loop, sequence) == memory(loop, other)
    logits = [model.logits(torch.cat(sequence.hidden)) for sequence in (plain[0], drafted[0])]
    assert same_bits(*logits)


def test_taps_are_what_the_drafts_were_trained_on(ops: Ops, model: Model) -> None:
    """Against the recurrent form of the training, for prompt, decode and verify rows; and early enough."""
    ids = next(prompt["ids"] for prompt in PROMPTS if len(prompt["ids"]) > 40)[:20]
    target = RecurrentTarget(NANO, "cpu", TAPPED)
    state = target.new_state(1, len(ids))
    steps = [target.step(torch.tensor([token]), torch.tensor([at]), state).taps for at, token in enumerate(ids)]
    expected = torch.cat(steps)

    loop = Loop(model, ops)
    sequence = loop.new(64)
    got: list[Tensor] = []
    layers_done: list[int] = []

    def take(features: Tensor) -> None:
        got.append(features.clone())
        layers_done.append(-1)

    modes: tuple[tuple[Mode, int, int], ...] = (("extend", 0, 12), ("decode", 12, 13), ("verify", 13, 20))
    for mode, first, last in modes:
        meta = step_meta([(sequence, last - first)], loop.page_size)
        with torch.inference_mode():
            taps = Taps(layers=TAPPED, sink=take)
            model.forward(torch.tensor(ids[first:last]), meta, loop.cache, mode, layers_done.append, taps=taps)
        sequence.length = last
        assert layers_done == [*range(7), -1, 7]
        layers_done.clear()
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-3, atol=1e-3)
    shifted = torch.cat([expected[:, 256:], expected[:, :256]], dim=1)
    assert (torch.cat(got) - shifted).abs().max() > 0.5


def test_a_tap_behind_the_last_layer_is_refused(model: Model, ops: Ops) -> None:
    loop = Loop(model, ops)
    sequence = loop.new(4)
    meta = step_meta([(sequence, 1)], loop.page_size)
    with pytest.raises(AssertionError, match="tapped"):
        model.forward(
            torch.tensor([1]), meta, loop.cache, "extend", taps=Taps(layers=(1, 7), sink=lambda _features: None)
        )
