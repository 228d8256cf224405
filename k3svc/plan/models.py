"""Configurations of the models that `k3svc plan` knows by name, as their config.json have them (shapes alone)."""

from collections.abc import Mapping, Sequence
from typing import Any

from k3svc.model.config import ModelConfig


def _layers(count: int, full: Sequence[int]) -> dict[str, list[int]]:
    """1-based, as in config.json."""
    return {"full_attn_layers": list(full), "kda_layers": [i for i in range(1, count + 1) if i not in set(full)]}


_K3: Mapping[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "intermediate_size": 33792,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 3072,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": 12,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            **_layers(93, [*range(4, 93, 4), 93]),
        },
        "tie_word_embeddings": False,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
    },
}
_KIMI_LINEAR: Mapping[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 9216,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "use_grouped_topk": True,
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
    "linear_attn_config": {
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        **_layers(27, [4, 8, 12, 16, 20, 24, 27]),
    },
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
}
_NANO: Mapping[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        **_K3["text_config"],
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 1024,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "routed_expert_hidden_size": 128,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "attn_res_block_size": 4,
        "linear_attn_config": {
            **_K3["text_config"]["linear_attn_config"],
            "num_heads": 4,
            "head_dim": 64,
            **_layers(8, [4, 7, 8]),
        },
        "bos_token_id": 3840,
        "eos_token_id": 3842,
        "pad_token_id": 4095,
    },
}
KNOWN: Mapping[str, Mapping[str, Any]] = {"k3": _K3, "kimi-linear": _KIMI_LINEAR, "nano": _NANO}
ROUTED_BITS: Mapping[str, float] = {"k3": 4.25, "kimi-linear": 16.0, "nano": 16.0}
"""Bits of a weight of the routed experts in the published checkpoints; MXFP4 has a scale byte for 32 weights."""


def known_model(name: str) -> ModelConfig:
    return ModelConfig.from_tree(KNOWN[name])
