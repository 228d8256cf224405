"""k3-nano through the adapters, on the emulated device with fp32 and shape-relaxed, against its golden file."""

import json
import random
from pathlib import Path

import pytest
import torch

from k3svc.model.kimi import Model
from k3svc.ops import load
from k3svc.ops.npu_emulated.backend import NpuEmulated
from k3svc.ops.table import QuantizedMatrix
from tests.npu.bench import emulated
from tests.npu.test_sampling import sample_rows
from tests.oracles.loop import Loop, Tracked

NANO = Path("models/k3-nano")
PROMPTS = json.loads((NANO / "golden.json").read_text())["prompts"]
COUNT = 48
VERIFIED = 16
"""Tokens of the test of verification, which takes its time."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        "kda-extend=fused",
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ("kda-extend=decomposed", "graphs=on", "graphs=on,mla-split-norm=fused,mla-store=prefix")
        ),
    ],
)
def test_continuous_batching_gives_the_golden_tokens(options: str):
    """Prompts in two chunks where they are long, then one decode batch that requests join and padding fills up."""
    ops = load(f"npu-emulated:fp32,shape-relaxed,{options}", dtype="float32", threads=1)
    model = Model.load(NANO, ops)
    loop = Loop(model, ops, num_slots=len(PROMPTS), num_pages=80, poison=True)
    waiting = [(loop.new(len(prompt["ids"]) + COUNT), prompt) for prompt in PROMPTS]
    running: list[tuple[Tracked, list[int], list[int]]] = []
    padding = Tracked(slot=-1, pages=[0])
    done = 0
    while waiting or running:
        if waiting:
            sequence, prompt = waiting.pop()
            logits = loop.prefill(sequence, prompt["ids"], 64)
            for row in prompt["top5"]:
                expected = torch.tensor(row["logits"])
                torch.testing.assert_close(logits[row["position"], row["ids"]], expected, rtol=0, atol=1e-3)
            running.append((sequence, [int(logits[-1].argmax())], prompt["continuation_ids"]))
        rows = [(sequence, out[-1:]) for sequence, out, _ in running]
        rows += [(padding, [0])] * (-len(rows) % 4)
        hidden = loop.step("decode", rows)
        padding.length = 0
        for (_, tokens, _), own in zip(running, hidden, strict=False):
            tokens.append(int(model.logits(own)[0].argmax()))
        for _, tokens, golden in [entry for entry in running if len(entry[1]) == COUNT]:
            assert tokens == golden
            done += 1
        running = [entry for entry in running if len(entry[1]) < COUNT]
    assert done == len(PROMPTS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verify_with_partial_accepts_gives_the_golden_tokens():
    """Ragged verify steps beside padding, captured: some drafts are right up to a point, some sequences have none."""
    ops = load("npu-emulated:fp32,shape-relaxed,graphs=on", dtype="float32", threads=1)
    model = Model.load(NANO, ops)
    loop = Loop(model, ops, num_slots=len(PROMPTS), num_pages=80, poison=True)
    draw = random.Random(5)
    chosen: list[list[int]] = []
    sequences = []
    for prompt in PROMPTS:
        sequences.append(loop.new(len(prompt["ids"]) + VERIFIED + 8))
        chosen.append([int(loop.prefill(sequences[-1], prompt["ids"], 64)[-1].argmax())])
    rejected = 0
    while open_ := [n for n, tokens in enumerate(chosen) if len(tokens) < VERIFIED]:
        rows, accepted = [], []
        for n in open_:
            coming = PROMPTS[n]["continuation_ids"][len(chosen[n]) : VERIFIED]
            drafts = coming[: draw.choice([0, 1, 3, 7])]
            right = draw.randint(0, len(drafts))
            drafts[right:] = [(token + 1) % 100 for token in drafts[right:]]
            rejected += len(drafts) - right
            rows.append((sequences[n], [chosen[n][-1], *drafts]))
            accepted.append(right)
        rows.append((Tracked(slot=-1, pages=[0]), [0, 0]))
        count = sum(len(tokens) for _, tokens in rows)
        hidden = loop.verify(rows, [*accepted, 0], -(-count // 16) * 16)
        for n, own, right, (_, fed) in zip(open_, hidden, accepted, rows, strict=False):
            best = model.logits(own).argmax(-1).tolist()
            assert best[:right] == fed[1 : right + 1]
            chosen[n] += best[: right + 1]
    assert [tokens[:VERIFIED] for tokens in chosen] == [prompt["continuation_ids"][:VERIFIED] for prompt in PROMPTS]
    assert rejected > 10
    _assert_states_of_plain_decode(loop, sequences, chosen)


def _assert_states_of_plain_decode(loop: Loop, sequences: list[Tracked], chosen: list[list[int]]) -> None:
    """Every slot's state and conv state equal those of prefill and eager decode steps over the same tokens."""
    ops = load("npu-emulated:fp32,shape-relaxed", dtype="float32", threads=1)
    plain = Loop(Model.load(NANO, ops), ops, num_slots=len(PROMPTS), num_pages=80)
    others = [plain.new(len(prompt["ids"]) + VERIFIED + 8) for prompt in PROMPTS]
    for other, prompt in zip(others, PROMPTS, strict=True):
        plain.prefill(other, prompt["ids"], 64)
    for step in range(max(map(len, chosen))):
        rows = [
            (other, tokens[step : step + 1])
            for other, sequence, tokens in zip(others, sequences, chosen, strict=True)
            if other.length < sequence.length
        ]
        if rows:
            plain.step("decode", rows)
    for sequence, other in zip(sequences, others, strict=True):
        for layer in loop.cache.spec.kda_layers:
            mine, theirs = loop.cache.layer(layer), plain.cache.layer(layer)
            torch.testing.assert_close(mine.state[sequence.slot], theirs.state[other.slot], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(mine.conv[sequence.slot], theirs.conv[other.slot], rtol=1e-3, atol=1e-4)


def test_every_operator_is_reached():
    """The list of the schema files is what models, drafts and sampling call, and nothing else."""
    calls = set()
    for options in ("kda-extend=fused", "kda-extend=decomposed,mla-split-norm=fused,mla-store=prefix"):
        ops = load(f"npu-emulated:fp32,shape-relaxed,{options}", dtype="float32", threads=1)
        assert isinstance(ops, NpuEmulated)
        loop = Loop(Model.load(NANO, ops), ops)
        sequence = loop.new(8)
        loop.prefill(sequence, [5, 6, 7], 64)
        loop.step("decode", [(sequence, [8])])
        loop.verify([(sequence, [9, 10, 11])], [1])
        calls |= {call.name for call in ops.session.calls}
    ops = emulated()
    matrix = QuantizedMatrix(values=torch.ones(16, 16, dtype=torch.int8), scale=torch.ones(16), bits=8)
    expert = (matrix, matrix, matrix)
    x, ids = torch.ones(2, 16), torch.tensor([[0], [1]])
    ops.linear(x, ops.pack_quantized_linear([matrix], torch.float32))
    packed = ops.pack_quantized_experts([expert, expert], torch.float32)
    ops.experts(x, ids, torch.ones(2, 1), packed, "silu", 1.0, None)
    ops.sample(x, sample_rows([{"top_k": 3}, {}]))
    ops.draft.norm_rope(torch.ones(1, 32), 2, torch.ones(8), torch.ones(8), 1e-5, torch.ones(1, 4), torch.ones(1, 4))
    calls |= {call.name for call in ops.session.calls}
    lines = [*_lines("torch_npu_2.13.0.txt"), *_lines("sgl_kernel_npu.txt")]
    operators = {line.split("(")[0] for line in lines}
    functions = {line.split(":")[1].split("(")[0] for line in _lines("functions.txt")}
    assert calls == operators | functions


def _lines(name: str) -> list[str]:
    return (Path("k3svc/ops/npu_emulated/schemas") / name).read_text().splitlines()
