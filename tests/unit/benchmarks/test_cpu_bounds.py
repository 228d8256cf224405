"""Least times of the CPU benchmark, against counts made by hand."""

import pytest

from benchmarks.cpu import least_s, ratios
from benchmarks.cpu_bounds import Bounds, Peaks
from benchmarks.cpu_models import NANO
from k3svc.model.config import ModelConfig

NANO_WEIGHTS = {
    # hidden 256, 4 heads of 64: q, k, v, g and o; f_a and f_b; b; 5 layers
    "kda": 5 * (5 * 256 * 256 + 256 * 64 + 64 * 256 + 4 * 256),
    # q_a and q_b of rank 96; latent 64 and rope 16; kv_b; g and o of 4 heads of 32; 3 layers
    "mla": 3 * (256 * 96 + 96 * 4 * 48 + 256 * 80 + 64 * 4 * 64 + 2 * 256 * 128),
    # layer 0 dense with 1024; then router of 16, latent 128, 2 shared experts of 128
    "ffn": 3 * 256 * 1024 + 7 * (16 * 256 + 2 * 256 * 128 + 3 * 256 * 256),
    # scores of attention residuals: two a layer, one at the end
    "residual": 17 * 256,
}
DENSE = sum(NANO_WEIGHTS.values())
EXPERT = 3 * 128 * 128
HEAD = 4096 * 256


@pytest.fixture
def bounds() -> Bounds:
    return Bounds(ModelConfig.from_directory(NANO))


def test_a_decode_step_of_one_reads_active_weights_and_its_state(bounds: Bounds):
    peaks = Peaks(flops=1e30, read=2.0, in_place=4.0)
    state = 5 * (4 * 64 * 64 + 3 * 3 * 256)
    rows = 3 * 80 * 128
    expected = (2 * (DENSE + HEAD + 7 * 4 * EXPERT) + 4 * rows) / 2.0 + 8 * state / 4.0
    assert bounds.decode_s(1, 128, peaks) == pytest.approx(expected, rel=1e-12)


def test_many_sequences_touch_all_experts(bounds: Bounds):
    peaks = Peaks(flops=1e30, read=1.0, in_place=1e30)
    assert bounds.decode_s(1000, 0, peaks) == pytest.approx(2 * (DENSE + HEAD + 7 * 16 * EXPERT), rel=1e-9)


def test_a_prompt_is_bound_by_its_products(bounds: Bounds):
    peaks = Peaks(flops=1.0, read=1e-30, in_place=1e-30)
    token = 2 * (DENSE + 7 * 4 * EXPERT) + 7 * 5 * 4 * 64 * 64
    pairs = 100 * 101 // 2
    attention = 2 * pairs * 3 * 4 * (48 + 32)
    assert bounds.prompt_s(100, peaks) == pytest.approx(100 * token + attention + 2 * HEAD, rel=1e-12)


def test_the_name_of_a_case_tells_its_tokens(bounds: Bounds):
    peaks = Peaks(flops=1e9, read=1e9, in_place=1e9)
    assert least_s("decode_16_at_128", bounds, peaks) == (16, bounds.decode_s(16, 128, peaks))
    assert least_s("prefill_512", bounds, peaks) == (512, bounds.prompt_s(512, peaks))
    assert least_s("prefill_4x128", bounds, peaks) == (512, 4 * bounds.prompt_s(128, peaks))


def test_ratios_are_taken_round_by_round():
    assert ratios({"a": [4.0, 9.0], "b": [1.0, 1.0]}, {"a": [2.0, 3.0]}) == {"a": [2.0, 3.0]}
