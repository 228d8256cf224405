"""The model as a whole on k3-nano: layer announcements, reduced precision, cache geometry, odd steps."""

from pathlib import Path

import pytest
import torch

from k3svc.model.config import ModelConfig
from k3svc.model.kimi import Model, cache_spec
from k3svc.ops import load
from k3svc.ops.table import Mode, StepMeta
from tests.oracles.loop import Loop, Tracked, step_meta

NANO = Path("models/k3-nano")
PROMPT = torch.randint(3840, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(NANO, load("reference", dtype="float32", threads=1))


def new_loop(model: Model) -> Loop:
    return Loop(model, load("reference", dtype="float32", threads=1), poison=True)


def test_layers_are_announced_when_their_caches_are_final(model: Model) -> None:
    loop = new_loop(model)
    sequence = loop.new(128)
    geometry = loop.cache.spec
    seen: list[int] = []
    announced: list[bytes] = []

    def memory(layer: int) -> bytes:
        if layer in geometry.kda_layers:
            return bytes(loop.cache.state_bytes(layer, 1)[:]) + bytes(loop.cache.conv_bytes(layer, 1)[:])
        return b"".join(bytes(loop.cache.rows_bytes(layer, page)[:]) for page in sequence.pages)

    def on_layer(layer: int) -> None:
        seen.append(layer)
        announced.append(memory(layer))

    for mode, ids in (("extend", PROMPT), ("decode", [5])):
        seen.clear()
        announced.clear()
        meta = step_meta([(sequence, len(ids))], loop.page_size)
        checked: Mode = "extend" if mode == "extend" else "decode"
        with torch.inference_mode():
            model.forward(torch.tensor(ids), meta, loop.cache, checked, on_layer)
        sequence.length += len(ids)
        assert seen == list(range(8))
        assert announced == [memory(layer) for layer in range(8)]


def test_bfloat16_stays_close(model: Model) -> None:
    """Nothing is promised, but the choice of most tokens survives rounding."""
    ops = load("reference", dtype="bfloat16", threads=1)
    rough_model = Model.load(NANO, ops)
    loop = Loop(rough_model, ops)
    sequence = loop.new(128)
    rough = loop.prefill(sequence, PROMPT, 64)
    assert rough.dtype == torch.float32
    exact = new_loop(model)
    fine = exact.prefill(exact.new(128), PROMPT, 64)
    assert float((rough.argmax(-1) == fine.argmax(-1)).float().mean()) > 0.8
    assert loop.greedy([sequence], rough[-1:], 4)[0][0] == int(rough[-1].argmax())


def test_cache_spec_of_nano() -> None:
    config = ModelConfig.from_directory(NANO)
    spec = cache_spec(config, num_slots=3, num_pages=5, page_size=32, kv_dtype=torch.bfloat16)
    assert (spec.kda_layers, spec.mla_layers) == ((0, 1, 2, 4, 5), (3, 6, 7))
    assert (spec.kda_heads, spec.kda_key_dim, spec.kda_value_dim, spec.conv_channels) == (4, 64, 64, 768)
    assert (spec.kv_lora_rank, spec.rope_dim, spec.vocab_size) == (64, 16, 4096)
    assert (spec.num_slots, spec.num_pages, spec.page_size) == (3, 5, 32)
    assert (spec.state_dtype, spec.kv_dtype) == (torch.float32, torch.bfloat16)


def test_a_step_of_padding_alone(model: Model) -> None:
    loop = new_loop(model)
    before = [
        bytes(loop.cache.state_bytes(layer, slot)[:]) for layer in loop.cache.spec.kda_layers for slot in range(5)
    ]
    modes: list[Mode] = ["extend", "decode"]
    for mode in modes:
        (hidden,) = loop.step(mode, [(Tracked(slot=-1, pages=[]), [1])])
        assert bool(hidden.isfinite().all())
    after = [bytes(loop.cache.state_bytes(layer, slot)[:]) for layer in loop.cache.spec.kda_layers for slot in range(5)]
    assert before == after


def test_rows_before_padding() -> None:
    def live(slots: list[int], counts: list[int]) -> int:
        rows = [(Tracked(slot=slot, pages=[1]), count) for slot, count in zip(slots, counts, strict=True)]
        meta: StepMeta = step_meta(rows, 64, 64)
        return meta.num_live_rows

    assert live([1, 2], [3, 4]) == 7
    assert live([1, -1, 2, -1], [1, 1, 1, 1]) == 3
    assert live([-1, -1], [5, 1]) == 0
