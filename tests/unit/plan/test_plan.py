"""Sizes against published figures, and what follows from them against sums done by hand."""

import dataclasses
import json
from pathlib import Path

import pytest

from k3svc.errors import ConfigError
from k3svc.model.config import ModelConfig
from k3svc.model.kimi import cache_spec
from k3svc.plan.capacity import Hardware, Load, Plan, Weights
from k3svc.plan.models import KNOWN, known_model
from k3svc.plan.size import cache_size, count_parameters, decode_flops, prefill_flops, touched_experts
from k3svc.transfer.manifest import build_manifest

NANO = Path(__file__).parents[3] / "models" / "k3-nano"
MIB = 1 << 20
CHAT = Load(request_rate=10.0, input_len=8192, output_len=512, tpot_ms=50.0)
NODE = Hardware(chips=32)
MXFP4 = Weights(routed_bits=4.25)


def plan(model: str = "k3", hardware: Hardware = NODE, load: Load = CHAT, weights: Weights = MXFP4) -> Plan:
    return Plan(known_model(model), hardware, load, weights=weights, chunk_tokens=4096)


def test_parameters_are_those_of_the_published_checkpoints():
    k3, linear = count_parameters(known_model("k3")), count_parameters(known_model("kimi-linear"))
    assert k3.total / 1e12 == pytest.approx(2.7795, abs=0.00005)
    assert k3.active / 1e9 == pytest.approx(104.2, abs=0.05)
    assert linear.total / 1e9 == pytest.approx(49.12, abs=0.005)
    assert (linear.active + linear.embedding) / 1e9 == pytest.approx(3.48, abs=0.005)


def test_parameters_of_nano_are_those_in_its_files():
    total = 0
    for file in NANO.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for length in tensor["shape"]:
                    size *= length
                total += size
    assert count_parameters(known_model("nano")).total == pytest.approx(total, rel=0.001)


@pytest.mark.parametrize(
    ("model", "state", "conv", "fixed", "per_token"),
    [
        ("k3", 434_110_464, 15_261_696, 449_372_160, 27_648),
        ("kimi-linear", 41_943_040, 1_474_560, 43_417_600, 8_064),
    ],
)
def test_cache_bytes(model: str, state: int, conv: int, fixed: int, per_token: int):
    size = cache_size(known_model(model))
    assert (size.state, size.conv, size.fixed, size.per_token) == (state, conv, fixed, per_token)


@pytest.mark.parametrize(
    ("model", "tokens", "fp32_mib", "bf16_mib"),
    [
        ("k3", 1024, 455.6, 248.6),
        ("k3", 8192, 644.6, 437.6),
        ("k3", 131_072, 3884.6, 3677.6),
        ("kimi-linear", 1024, 49.3, 29.3),
        ("kimi-linear", 1_048_576, 8105.4, 8085.4),
    ],
)
def test_bytes_of_a_request(model: str, tokens: int, fp32_mib: float, bf16_mib: float):
    config = known_model(model)
    assert cache_size(config).request(tokens) / MIB == pytest.approx(fp32_mib, abs=0.06)
    assert cache_size(config, state_bytes=2).request(tokens) / MIB == pytest.approx(bf16_mib, abs=0.06)


def test_the_known_models_are_those_that_ship():
    assert ModelConfig.from_directory(NANO) == known_model("nano")
    assert set(KNOWN) == {"k3", "kimi-linear", "nano"}
    assert [i for i, kind in enumerate(known_model("k3").layer_kinds) if kind == "mla"] == [*range(3, 92, 4), 92]
    assert [i for i, kind in enumerate(known_model("kimi-linear").layer_kinds) if kind == "mla"] == [
        *range(3, 24, 4), 26
    ]  # fmt: skip


def test_a_hand_off_has_the_bytes_of_its_manifest():
    config = known_model("nano")
    spec = cache_spec(config, num_slots=1, num_pages=1, page_size=64)
    manifest = build_manifest(spec, request_id="a", attempt=1, num_tokens=777)
    assert cache_size(config, kv_bytes=4).handoff(777) == manifest.total_bytes


def test_hand_off_times_over_links():
    """9 ms for the fixed state, 13.5 ms at 8k tokens and 81 ms at 128k over 400 Gbit/s."""
    for tokens, expected_ms in ((1, 9.0), (8192, 13.5), (131_072, 81.5)):
        load = dataclasses.replace(CHAT, input_len=tokens)
        assert plan(load=load).handoff_s(400) * 1e3 == pytest.approx(expected_ms, abs=0.1)
    assert plan().handoff_s(100) == pytest.approx(4 * plan().handoff_s(400))


def test_the_tail_is_hidden_by_a_long_last_chunk_and_not_by_a_slow_link():
    fast, slow = plan().handoff_tail_s(400), plan().handoff_tail_s(1)
    last_layer_s = (449_372_160 + 4096 * 27_648 + 4 * 163_840) / 93 / 50e9
    assert fast == pytest.approx(last_layer_s)
    total_s = plan().handoff_s(1)
    assert slow == pytest.approx(total_s - plan().prefill_s, rel=1e-6)


def test_short_prompts_stay_local_where_the_link_is_slower_than_computing():
    here = plan()
    border = here.local_below
    link = here.hardware.link_bytes_s
    assert here.prompt_s(border - 1) < here.cache.handoff(border - 1) / link
    assert here.prompt_s(border) >= here.cache.handoff(border) / link
    by_hand = 450_027_520 / link / (2 * 103e9 / here.hardware.flops_s - 27_648 / link)
    assert border == pytest.approx(by_hand, rel=0.05)
    faster = plan(hardware=dataclasses.replace(NODE, link_gbit_s=1600.0))
    assert faster.local_below < border / 10


def test_work_is_two_operations_a_weight_and_token_and_attention():
    config = known_model("k3")
    head = 7168 * 163_840
    per_token = 2 * (count_parameters(config).active - head) + 69 * 96 * 7 * 128**2
    attention = 24 * 96 * (192 + 128) * 1000**2
    assert prefill_flops(config, 1000) == pytest.approx(1000 * per_token + attention + 2 * head)
    assert decode_flops(config, 0) == pytest.approx(2 * count_parameters(config).active + 69 * 96 * 7 * 128**2)
    assert decode_flops(config, 10) - decode_flops(config, 0) == pytest.approx(24 * 96 * 2 * (576 + 512) * 10)


def test_a_step_touches_few_experts_with_few_tokens():
    config = known_model("k3")
    assert touched_experts(config, 1) == pytest.approx(16)
    assert touched_experts(config, 2) == pytest.approx(32 - 16 * 16 / 896)
    assert touched_experts(config, 10_000) == pytest.approx(896)


def test_the_ratio_is_rate_matched():
    here = plan()
    assert here.fits
    assert here.batch == min(here.memory_batch, here.objective_batch)
    assert here.step_s(here.batch) * 1e3 <= 50.0
    prompts_per_s = 1 / here.prefill_s
    outputs_per_s = here.batch / (512 * here.step_s(here.batch))
    assert here.prefill_instances / here.decode_instances == pytest.approx(outputs_per_s / prompts_per_s)
    doubled = plan(load=dataclasses.replace(CHAT, request_rate=20.0))
    assert doubled.prefill_instances == pytest.approx(2 * here.prefill_instances)
    assert doubled.decode_instances == pytest.approx(2 * here.decode_instances)


def test_memory_holds_weights_and_requests():
    here = plan()
    assert here.weight_bytes / 1e9 == pytest.approx(1446 + 2 * 57.1, abs=5)
    room = 0.9 * 32 * 64e9 - here.weight_bytes
    assert here.memory_batch == int(room // (449_372_160 + 8704 * 27_648))


def test_the_bottleneck_is_named():
    assert plan(hardware=Hardware(chips=8)).bottleneck.startswith("memory: weights of 15")
    assert not plan(hardware=Hardware(chips=8)).fits
    with pytest.raises(ConfigError, match="memory: weights"):
        _ = plan(hardware=Hardware(chips=8)).decode_instances
    strict = dataclasses.replace(CHAT, tpot_ms=1.0)
    assert plan(load=strict).bottleneck.startswith("objective: a step of one request takes")
    assert plan(hardware=dataclasses.replace(NODE, link_gbit_s=1.0)).bottleneck.startswith("link: a busy prefill")
    loose = dataclasses.replace(CHAT, tpot_ms=10_000.0)
    assert plan(load=loose).bottleneck.startswith("decode memory:")
    assert plan(hardware=Hardware(chips=128)).bottleneck.startswith("decode step: ")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Hardware(chips=0),
        lambda: Hardware(compute_efficiency=1.5),
        lambda: dataclasses.replace(CHAT, input_len=0),
        lambda: dataclasses.replace(CHAT, cached_share=1.0),
    ],
)
def test_impossible_values_are_refused(make: object):
    with pytest.raises(ConfigError, match="allowed"):
        make()  # type: ignore[operator]
