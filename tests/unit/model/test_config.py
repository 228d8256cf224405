"""ModelConfig from config.json: both models, and every field that cannot be honoured is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from k3svc.errors import CheckpointError
from k3svc.model.config import ModelConfig

NANO = Path("models/k3-nano")

KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.446,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "model_max_length": 1048576,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 28) if layer not in (4, 8, 12, 16, 20, 24, 27)],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}


def nano() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((NANO / "config.json").read_text())
    return tree


def test_kimi_k3() -> None:
    config = ModelConfig.from_directory(NANO)
    assert config.model_type == "kimi_k3"
    assert config.layer_kinds == ("kda", "kda", "kda", "mla", "kda", "kda", "mla", "mla")
    assert (config.num_dense_layers, config.num_experts, config.experts_per_token) == (1, 16, 4)
    assert (config.latent_size, config.expert_width, config.num_shared_experts) == (128, 128, 2)
    assert (config.activation, config.situ_beta, config.situ_linear_beta) == ("situ", 4.0, 25.0)
    assert (config.gate_lower_bound, config.full_rank_gate, config.chunk_size) == (-5.0, True, 64)
    assert (config.q_lora_rank, config.mla_output_gate, config.attn_res_block_size) == (96, True, 4)
    assert (config.rms_norm_eps, config.lora_norm_eps) == (1e-5, 1e-6)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (3840, (3842,), 4095)
    assert config.max_positions == 1048576


def test_kimi_linear() -> None:
    config = ModelConfig.from_tree(KIMI_LINEAR)
    assert [layer for layer, kind in enumerate(config.layer_kinds) if kind == "mla"] == [3, 7, 11, 15, 19, 23, 26]
    assert (config.q_lora_rank, config.mla_output_gate, config.attn_res_block_size) == (None, False, None)
    assert (config.latent_size, config.expert_width) == (None, 2304)
    assert (config.gate_lower_bound, config.full_rank_gate) == (None, False)
    assert (config.activation, config.situ_linear_beta) == ("silu", None)
    assert config.routed_scaling_factor == 2.446
    assert config.max_positions == 1048576


def test_fewer_layers_than_the_lists_name() -> None:
    config = ModelConfig.from_tree({**KIMI_LINEAR, "num_hidden_layers": 4})
    assert config.layer_kinds == ("kda", "kda", "kda", "mla")


def test_several_stop_tokens_and_optional_fields() -> None:
    tree = {**KIMI_LINEAR, "eos_token_id": [1, 2], "lora_norm_eps": 1e-5, "pad_token_id": None}
    config = ModelConfig.from_tree(tree)
    assert (config.eos_token_ids, config.lora_norm_eps, config.pad_token_id) == ((1, 2), 1e-5, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, r"model_type: got 'llama'; allowed: one of kimi_k3, kimi_linear"),
        ({"hidden_size": None}, r"hidden_size: got None"),
        ({"hidden_size": "2304"}, r"hidden_size: got '2304'; allowed: an integer of at least 1"),
        ({"vocab_size": True}, r"vocab_size: got True"),
        ({"hidden_act": "gelu"}, r"hidden_act: got 'gelu'; allowed: \"silu\" or \"situ\""),
        ({"rms_norm_eps": "x"}, r"rms_norm_eps: got 'x'; allowed: a number"),
        ({"moe_renormalize": 1}, r"moe_renormalize: got 1; allowed: true or false"),
        ({"mla_use_nope": False}, r"mla_use_nope: got False; allowed: true"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings"),
        ({"moe_router_activation_func": "softmax"}, r"moe_router_activation_func: got 'softmax'"),
        ({"moe_layer_freq": 2}, r"moe_layer_freq"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads: got 8; allowed: 32"),
        ({"num_experts_per_token": 300}, r"num_experts_per_token: got 300; allowed: at most num_experts \(256\)"),
        ({"num_expert_group": 3}, r"num_expert_group: got 3; allowed: a divisor"),
        ({"topk_group": 2}, r"topk_group: got 2"),
        ({"routed_expert_hidden_size": 128, "latent_moe_use_norm": False}, r"latent_moe_use_norm: got False"),
        ({"linear_attn_config": None}, r"linear_attn_config: got None; allowed: an object"),
        ({"num_hidden_layers": 29}, r"linear_attn_config.kda_layers: .*missing: \[28, 29\]"),
    ],
)
def test_fields_that_cannot_be_honoured(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_tree({**KIMI_LINEAR, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_attn_layers": [4, 5]}, r"full_attn_layers: .*no layer that kda_layers names too"),
        ({"full_attn_layers": [0]}, r"full_attn_layers: got \[0\]; allowed: a list of layer numbers from 1"),
        ({"gate_lower_bound": 5.0}, r"linear_attn_config.gate_lower_bound: got 5.0; allowed: a number below 0"),
        ({"short_conv_kernel_size": 1}, r"linear_attn_config.short_conv_kernel_size: got 1"),
        ({"use_full_rank_gate": "yes"}, r"use_full_rank_gate: got 'yes'"),
    ],
)
def test_fields_of_linear_attention(change: dict[str, Any], message: str) -> None:
    linear = {**KIMI_LINEAR["linear_attn_config"], **change}
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_tree({**KIMI_LINEAR, "linear_attn_config": linear})


def test_nested_fields_are_named_in_full() -> None:
    tree = nano()
    del tree["text_config"]["kv_lora_rank"]
    with pytest.raises(CheckpointError, match=r"config.json: text_config.kv_lora_rank: got None"):
        ModelConfig.from_tree(tree)
    tree = nano()
    del tree["text_config"]["activation_situ_beta"]
    with pytest.raises(CheckpointError, match=r"text_config.activation_situ_beta"):
        ModelConfig.from_tree(tree)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*config.json: No such file"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected an object"):
        ModelConfig.from_directory(tmp_path)
