"""Published config fields and tensor names of drafts."""

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from k3svc.errors import CheckpointError
from k3svc.model.draft_config import RopeScaling, parse_draft_config
from k3svc.model.draft_rope import Rope
from k3svc.model.draft_weights import (
    expected_shapes,
    load_draft_weights,
    load_mask_embedding,
    load_temperatures,
)

QWEN3_8B_DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "block_size": 16,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "sliding_window": None,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
K3_DSPARK = {
    "hidden_size": 7168,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "intermediate_size": 14336,
    "vocab_size": 163840,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "dspark_block_size": 7,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 163824,
    "dspark_target_layer_ids": [2, 23, 47, 71, 89],
    "enable_confidence_head": True,
    "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536},
    "max_position_embeddings": 1048576,
}
TAPS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
TINY = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 12,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 11, "target_layer_ids": [1]},
}


def test_a_published_dflash_config():
    config = parse_draft_config(QWEN3_8B_DFLASH)
    assert (config.family, config.num_rows, config.num_proposals, config.first_predicting_row) == ("dflash", 16, 15, 1)
    assert config.target_layers == (1, 9, 17, 25, 33)
    assert (config.mla, config.window, config.markov_head, config.confidence_head) == (None, None, None, False)
    # 11 tensors a layer and 3 more: the count of the published checkpoint
    assert len(expected_shapes(config)) == 58


def test_a_k3_dspark_config_with_bundled_names_and_without_architectures():
    config = parse_draft_config(K3_DSPARK)
    assert (config.family, config.num_rows, config.num_proposals, config.first_predicting_row) == ("dspark", 7, 7, 0)
    assert (config.markov_head, config.markov_rank, config.confidence_with_markov) == ("vanilla", 256, True)
    assert config.rope_scaling.kind == "yarn"
    shapes = expected_shapes(config)
    assert shapes["layers.0.self_attn.kv_b_proj.weight"] == (64 * 256, 512)
    assert shapes["confidence_head.proj.weight"] == (1, 7168 + 256)


ALL_SLIDE = ["sliding_attention"] * 5


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({}, None),
        ({"layer_types": ALL_SLIDE}, 2048),
        ({"layer_types": ALL_SLIDE, "use_sliding_window": False}, 2048),
        # As transformers' Qwen3Config: a size alone says nothing.
        ({"layer_types": None}, None),
        ({"layer_types": None, "use_sliding_window": False}, None),
        ({"layer_types": None, "use_sliding_window": True, "max_window_layers": 0}, 2048),
        ({"layer_types": None, "use_sliding_window": True, "max_window_layers": 28}, None),
        # Other architectures have no such switch.
        ({"layer_types": None, "model_type": None}, 2048),
        ({"layer_types": None, "model_type": None, "use_sliding_window": False}, None),
        ({"layer_types": None, "dflash_config": {**QWEN3_8B_DFLASH["dflash_config"], "sliding_window": 512}}, 512),
    ],
)
def test_windows_apply_only_where_layers_slide(change: dict[str, Any], window: int | None):
    assert parse_draft_config({**QWEN3_8B_DFLASH, "sliding_window": 2048, **change}).window == window


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"dflash_config": [1]}, "dflash_config"),
        ({"num_hidden_layers": "5"}, "num_hidden_layers"),
        ({"block_size": 1}, "block_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_sink_bias": True}, "attention_sink_bias"),
        ({"attention_value_scale": 0.5}, "attention_value_scale"),
        ({"output_multiplier": 0.25}, "output_multiplier"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size"),
        ({"dflash_config": {**TAPS, "aux_hidden_stream": "prefix"}}, "aux_hidden_stream"),
        ({"dflash_config": {**TAPS, "projector_type": "dynamic_conv"}}, "projector_type"),
        ({"dflash_config": {**TAPS, "conv_kernel_size": 2}}, "conv_kernel_size"),
        ({"dflash_config": {**TAPS, "selector_rank": 64}}, "selector_rank"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types"),
        ({"layer_types": ALL_SLIDE}, "sliding_window"),
        ({"layer_types": None, "sliding_window": 9, "use_sliding_window": True}, "max_window_layers"),
        (
            {"layer_types": None, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            "max_window_layers",
        ),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "rope_scaling.truncate"),
        (
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_scaling.partial_rotary_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention"),
        ({"dflash_config": {"mask_token_id": 151936, "target_layer_ids": [1]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [9, 1]}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [35]}}, "target_layer_ids"),
        ({"architectures": ["LlamaForCausalLM"], "dflash_config": None}, "architectures"),
    ],
)
def test_what_cannot_be_used_is_named(change: dict[str, object], field: str):
    with pytest.raises(CheckpointError, match=field):
        parse_draft_config({**copy.deepcopy(QWEN3_8B_DFLASH), **change})


def test_what_is_computed_anyway_may_be_said():
    said = {
        "hidden_act": "silu",
        "attention_bias": False,
        "output_multiplier": 1,
        "final_logit_softcapping": None,
        "draft_vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "dflash_config": {**TAPS, "aux_hidden_stream": "attn_res", "projector_type": "linear"},
    }
    assert parse_draft_config({**QWEN3_8B_DFLASH, **said}) == parse_draft_config(QWEN3_8B_DFLASH)


def test_a_yarn_factor_that_is_not_given_is_the_growth_of_the_context():
    scaling = {"type": "yarn", "original_max_position_embeddings": 10240}
    assert parse_draft_config({**QWEN3_8B_DFLASH, "rope_scaling": scaling}).rope_scaling.factor == 4.0


def test_a_config_of_neither_family_is_refused():
    fields = {key: value for key, value in TINY.items() if key not in ("architectures", "dflash_config")}
    with pytest.raises(CheckpointError, match="architectures"):
        parse_draft_config(fields)


def test_yarn_keeps_fast_channels_and_stretches_slow_ones():
    scaling = RopeScaling(kind="yarn", factor=8.0, original_max_positions=4096)
    rope, plain = Rope(64, 10_000.0, scaling), Rope(64, 10_000.0, RopeScaling())
    ratio = (plain.frequencies / rope.frequencies).tolist()
    # Channel i makes 4096 · 10000^(-i/32) / 2π turns: above 32 (i <= 10) kept, below 1 (i >= 23) stretched by 8
    assert ratio[:10] == pytest.approx([1.0] * 10)
    assert ratio[23:] == pytest.approx([8.0] * 9, rel=1e-5)
    assert all(low <= high for low, high in itertools.pairwise(ratio))
    assert rope.amplitude == pytest.approx(0.1 * math.log(8) + 1)


def test_llama3_and_linear_scaling():
    base = 500_000.0
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_positions=8192)
    ratio = (Rope(128, base, RopeScaling()).frequencies / Rope(128, base, scaling).frequencies).tolist()
    for channel, got in enumerate(ratio):
        wavelength = 2 * math.pi * base ** (2 * channel / 128)
        if wavelength < 8192 / 4:
            assert got == pytest.approx(1.0)
        elif wavelength > 8192:
            assert got == pytest.approx(8.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            assert got == pytest.approx(1 / ((1 - smooth) / 8 + smooth), rel=1e-4)
    halved = Rope(8, 10_000.0, RopeScaling(kind="linear", factor=2.0)).frequencies
    torch.testing.assert_close(halved, Rope(8, 10_000.0, RopeScaling()).frequencies / 2)


def write_draft(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    config = parse_draft_config(TINY)
    tensors = {name: torch.zeros(shape) for name, shape in expected_shapes(config).items()}
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")


def test_aliases_are_read_and_tables_of_its_own(tmp_path: Path):
    fc, norm, lm_head = torch.ones(8, 8), torch.ones(8), torch.full((12, 8), 2.0)
    write_draft(
        tmp_path,
        {
            "fc.weight": None,
            "context_proj.weight": fc,
            "norm.weight": None,
            "model.final_norm.weight": norm,
            "lm_head.weight": lm_head,
        },
    )
    weights = load_draft_weights(tmp_path, parse_draft_config(TINY))
    assert torch.equal(weights["fc.weight"], fc)
    assert torch.equal(weights["norm.weight"], norm)
    assert torch.equal(weights["lm_head.weight"], lm_head)
    assert "embed_tokens.weight" not in weights
    only = load_draft_weights(tmp_path, parse_draft_config(TINY), only=frozenset({"fc.weight"}))
    assert set(only) == {"fc.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.0.mlp.up_proj.weight": None}, "layers.0.mlp.up_proj.weight"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(16, 8)}, "'layers.1.mlp.up_proj.weight' is unknown"),
        ({"fc.weight": torch.zeros(8, 16)}, "fc.weight: got shape"),
        ({"context_proj.weight": torch.zeros(8, 8)}, "occurs twice"),
        ({"lm_head.weight": torch.zeros(9, 8)}, "lm_head.weight: got shape"),
        ({"d2t": torch.zeros(9)}, "'d2t' is unknown"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str):
    write_draft(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_draft_weights(tmp_path, parse_draft_config(TINY))


def test_mask_embedding_and_temperatures(tmp_path: Path):
    config = parse_draft_config(TINY)
    assert load_mask_embedding(tmp_path, config) is None
    assert load_temperatures(tmp_path, config).tolist() == [1.0, 1.0, 1.0]
    torch.save(torch.arange(8.0)[None], tmp_path / "mask_embedding.pt")
    loaded = load_mask_embedding(tmp_path, config)
    assert loaded is not None
    assert loaded.tolist() == list(range(8))
    (tmp_path / "sts.json").write_text(json.dumps({"temperatures": [1.5, 2, 3]}))
    assert load_temperatures(tmp_path, config).tolist() == [1.5, 2.0, 3.0]
    (tmp_path / "sts.json").write_text(json.dumps({"temperatures": [1.5, 0, 3]}))
    with pytest.raises(CheckpointError, match="3 positive numbers"):
        load_temperatures(tmp_path, config)
