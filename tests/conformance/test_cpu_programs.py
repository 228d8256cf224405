"""Steps of the cpu backend as programs: the bits of the calls one by one, and no call left out."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.model.config import ModelConfig
from k3svc.model.kimi import Model, Taps
from k3svc.model.weights import tensor_shapes
from k3svc.ops.cpu import programs
from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.cpu.programs import MOST_PROGRAMS, Intermediates
from k3svc.ops.cpu.steps import CpuStep
from tests.conformance.cpu_cases import needs_compiler
from tests.conformance.programs_cases import Memory, OneByOne
from tests.oracles.loop import Loop, Tracked, step_meta

pytestmark = needs_compiler

NANO = Path("models/k3-nano")
PROMPT = 70
LINEAR = {
    "model_type": "kimi_linear", "vocab_size": 96, "hidden_size": 40, "intermediate_size": 72,
    "moe_intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 3,
    "kv_lora_rank": 20, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "mla_use_nope": True, "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 1,
    "num_expert_group": 2, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 2.4,
    "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 3, "head_dim": 16, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
"""Without latent experts, attention residuals, query LoRA and output gate, all of which k3-nano has."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


@pytest.fixture(scope="module", params=["nano", "linear"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "nano":
        return NANO
    directory = tmp_path_factory.mktemp("linear")
    (directory / "config.json").write_text(json.dumps(LINEAR))
    config = ModelConfig.from_directory(directory)
    shapes = dict(tensor_shapes(config))
    inner, width = config.moe_intermediate_size, config.expert_width
    for layer in range(config.num_dense_layers, config.num_layers):
        for expert in range(config.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            shapes |= {f"{prefix}{name}.weight": (inner, width) for name in ("w1", "w3")}
            shapes[f"{prefix}w2.weight"] = (width, inner)
    source = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=source) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def started(checkpoint: Path, ops: Cpu, count: int) -> tuple[Loop, list[Tracked]]:
    """Sequences behind prompts of different lengths."""
    loop = Loop(Model.load(checkpoint, ops), ops, num_slots=count, num_pages=count * 7, poison=True)
    sequences = [loop.new(PROMPT + 40) for _ in range(count)]
    for index, sequence in enumerate(sequences):
        loop.step("extend", [(sequence, [(index + 3 * place) % 90 for place in range(PROMPT - index)])])
    return loop, sequences


def caches(loop: Loop, sequences: list[Tracked]) -> list[bytes]:
    """States of the sequences, and all rows."""
    spec = loop.cache.spec
    parts = [
        bytes(view(layer, sequence.slot)[:])
        for layer in spec.kda_layers
        for sequence in sequences
        for view in (loop.cache.state_bytes, loop.cache.conv_bytes)
    ]
    return parts + [bytes(loop.cache.rows_bytes(layer, 1, spec.num_pages)[:]) for layer in spec.mla_layers]


def test_a_program_gives_the_bits_of_its_calls(checkpoint: Path, memory: Memory):
    outputs = []
    for ops in (OneByOne(), Cpu(), Cpu(threads=3)):
        loop, sequences = started(checkpoint, ops, 9)
        parts: list[Tensor] = []
        for step, count in enumerate((1, 9, 4, 9, 2)):
            memory.poison()
            rows = [(sequence, [(7 * step + index) % 90]) for index, sequence in enumerate(sequences[:count])]
            parts += loop.step("decode", rows, count + step % 2)
            memory.poison()
            drafted = [(sequence, [5, 6, 7, 8][: 1 + index % 4]) for index, sequence in enumerate(sequences[-count:])]
            parts += loop.verify(drafted, [len(ids) // 2 for _, ids in drafted], count * 4 + step % 2)
            memory.poison()
            parts += loop.verify([(sequence, [9]) for sequence in sequences[:count]], [0] * count)
        outputs.append((parts, caches(loop, sequences)))
    assert memory.parts
    expected, expected_caches = outputs[0]
    assert all(part.isfinite().all() for part in expected)
    for parts, own in outputs[1:]:
        assert all(torch.equal(part, other) for part, other in zip(parts, expected, strict=True))
        assert own == expected_caches


def test_taps_are_those_of_the_calls():
    features: list[Tensor] = []
    for ops in (OneByOne(), Cpu()):
        loop, sequences = started(NANO, ops, 3)
        taps = Taps(layers=(1, 4), sink=features.append)
        for count in (2, 3):
            meta = step_meta([(sequence, 1) for sequence in sequences[:count]], loop.page_size)
            # A program that was recorded in one mode runs in another.
            with torch.inference_mode(count == 2), torch.no_grad():
                loop.model.forward(torch.arange(count), meta, loop.cache, "decode", taps=taps)
    assert len(features) == 4
    assert torch.equal(features[0], features[2])
    assert torch.equal(features[1], features[3])


def test_one_program_serves_all_sizes_up_to_the_limit(monkeypatch: pytest.MonkeyPatch):
    recordings: list[object] = []
    init = programs.Recorder.__init__

    def counted(own: programs.Recorder, *args: Any) -> None:
        recordings.append(own)
        init(own, *args)

    monkeypatch.setattr(programs.Recorder, "__init__", counted)
    cpu = Cpu()
    loop, sequences = started(NANO, cpu, 3)
    padding = [(Tracked(slot=-1, pages=[]), [0])] * (CpuStep.MOST + 1)
    for count in (1, 2, 3):
        rows = [(sequence, [index]) for index, sequence in enumerate(sequences[:count])]
        loop.step("decode", [*rows, *padding])
    assert len(recordings) == 1
    loop.verify([(sequences[0], [1, 2])], [1])
    loop.verify([(sequences[0], [1])], [0])
    assert len(recordings) == 3
    # A row of padding between live ones, and more live rows than a program has.
    loop.step("decode", [(sequences[0], [1]), padding[0], (sequences[1], [2])])
    loop.step("decode", [(sequences[0], [index]) for index in range(CpuStep.MOST + 1)])
    assert len(recordings) == 3


def test_old_programs_make_room():
    cpu = Cpu()
    meta = step_meta([(Tracked(slot=1, pages=[1]), 1)], 16)
    step = cpu.prepare(meta, "decode", Loop(Model.load(NANO, cpu), cpu).cache.spec)
    weight = torch.ones(8)

    def norm(x: Tensor, _step: object, eps: float) -> Tensor:
        return cpu.rms_norm(x, weight, eps)

    x = torch.arange(8.0).view(1, 8)
    with torch.inference_mode():
        first = [cpu.run(norm, x, step, 0.5 + number) for number in range(MOST_PROGRAMS + 2)]
        again = [cpu.run(norm, x, step, 0.5 + number) for number in range(MOST_PROGRAMS + 2)]
    assert len(cpu._programs._programs) == MOST_PROGRAMS
    for number, (one, other) in enumerate(zip(first, again, strict=True)):
        assert torch.equal(one, cpu.rms_norm(x, weight, 0.5 + number))
        assert torch.equal(one, other)


def test_rows_that_lie_apart_enter_a_program():
    cpu, weight = Cpu(), torch.ones(8)
    step = cpu.prepare(step_meta([(Tracked(slot=1, pages=[1]), 1)] * 3, 16), "decode", None)  # type: ignore[arg-type]
    x = torch.arange(60.0).view(3, 20)[:, 5:13]
    assert torch.equal(cpu.run(lambda x, _step: cpu.rms_norm(x, weight, 1e-5), x, step), cpu.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(
    ("compute", "named"),
    [
        (lambda x: x * 2, "aten.mul"),
        (lambda x: x[:, ::2].contiguous(), "aten.contiguous"),
        (lambda x: x.clone(), "aten.clone"),
        (lambda x: x.add_(x), "aten.add_"),
        (lambda x: torch.cat([x, x]), "aten.cat"),
    ],
)
def test_what_a_program_cannot_know_is_refused(compute: Callable[[Tensor], Tensor], named: str):
    cpu = Cpu()
    step = cpu.prepare(step_meta([(Tracked(slot=1, pages=[1]), 1)], 16), "decode", None)  # type: ignore[arg-type]
    with torch.inference_mode(), pytest.raises(BackendError, match=named):
        cpu.run(lambda x, _step: compute(x), torch.ones(1, 8), step)
    # The backend is itself again.
    assert cpu.rms_norm(torch.ones(1, 8), torch.ones(8), 0.0).sum() == 8


def test_memory_is_handed_out_again_when_nothing_refers_to_it():
    memory = Intermediates()
    first = memory.new((4, 16), torch.float32)
    part = first[:, 3:5]
    place = first.data_ptr()
    del first
    gc.collect()
    other = memory.new((4, 16), torch.float32)
    assert other.data_ptr() != place
    del part
    gc.collect()
    smaller = memory.new((3, 5), torch.int64)
    assert smaller.data_ptr() == place
    assert (smaller.dtype, smaller.shape) == (torch.int64, (3, 5))


def test_an_id_outside_of_the_table_gives_nan():
    rows = Cpu().embed(torch.ones(5, 3), torch.tensor([0, 5, -1, 4]))
    assert rows.isnan().all(dim=1).tolist() == [False, True, True, False]
    assert (rows[[0, 3]] == 1).all()


def test_a_recording_loads_no_compiler_of_torch():
    """Which would cost every decode service 75 MB and a folder in TMPDIR."""
    code = f"""
import asyncio, sys
from k3svc.config import load_config
from k3svc.engine.build import load_model
from k3svc.ops.cpu.programs import Programs
recorded, record = [], Programs._record
Programs._record = lambda *args: recorded.append(record(*args)) or recorded[-1]
loaded = load_model(load_config(None, ["model.path={NANO}", "model.device=cpu"]), lambda *_: None)
asyncio.run(loaded.runner.warm_up())
assert recorded
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
