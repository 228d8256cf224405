"""Writes a checkpoint of the K3 architecture as a GGUF file of llama.cpp's architecture `kimi-k3`.

Same weights, no vocabulary. The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3;
names, fused and split tensors are those of llama.cpp's own converter.
"""

import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from k3svc.model.checkpoint import Checkpoint
from k3svc.model.config import ModelConfig
from k3svc.model.weights import Weights

ALIGNMENT = 32
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
TENSOR_TYPES = {torch.float32: 0, torch.bfloat16: 30}
SIGMOID = 2
"""Of llama.cpp's gating functions."""
ARCHITECTURE = "kimi-k3"

_KDA = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "g_proj": "ssm_g",
    "f_a_proj": "ssm_f_a", "f_b_proj": "ssm_f_b", "b_proj": "ssm_beta",
}  # fmt: skip
_MLA = {
    "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa", "g_proj": "attn_gate",
    "o_proj": "attn_output",
}  # fmt: skip
_DENSE = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_SHARED = {f"shared_experts.{name}": f"{target}_shexp" for name, target in _DENSE.items()}
_LATENT = {"routed_expert_down_proj": "ffn_routed_down", "routed_expert_up_proj": "ffn_routed_up"}


def write_gguf(directory: Path, target: Path, dtype: torch.dtype) -> None:
    """The checkpoint in `directory`, matrices in float32 or bfloat16 (the router's in float32, as llama.cpp has it).

    Raises CheckpointError, and ValueError for an architecture that is not all of K3's.
    """
    config = ModelConfig.from_directory(directory)
    fields = _fields(config)
    unfinished = target.with_suffix(".part")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with closing(Checkpoint(directory, num_layers=config.num_layers)) as checkpoint:
        tensors = dict(_tensors(config, Weights(checkpoint, config, dtype)))
    with unfinished.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
        for name, value in fields.items():
            file.write(_string(name) + _value(value))
        offset = 0
        for name, tensor in tensors.items():
            file.write(_string(name) + struct.pack("<I", tensor.dim()))
            file.write(struct.pack(f"<{tensor.dim()}Q", *reversed(tensor.shape)))
            file.write(struct.pack("<IQ", TENSOR_TYPES[tensor.dtype], offset))
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        for tensor in tensors.values():
            _pad(file)
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        _pad(file)
    unfinished.rename(target)


def _fields(config: ModelConfig) -> dict[str, Any]:
    """Hyperparameters under the keys that llama.cpp reads."""
    needed = {
        "attn_res_block_size": config.attn_res_block_size,
        "routed_expert_hidden_size": config.latent_size,
        "q_lora_rank": config.q_lora_rank,
        "gate_lower_bound": config.gate_lower_bound,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "use_full_rank_gate": config.full_rank_gate or None,
        "mla_use_output_gate": config.mla_output_gate or None,
    }
    missing = [name for name, value in needed.items() if value is None]
    if missing or config.num_heads != config.kda_heads:
        raise ValueError(f"a {ARCHITECTURE} file needs as many KDA heads as MLA heads, and of config.json: {missing}")
    values = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
        "expert_shared_count": config.num_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_latent_length": config.latent_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.renormalize,
        "expert_gating_func": SIGMOID,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": [int(kind == "mla") for kind in config.layer_kinds],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.cache_width,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "ssm.conv_kernel": config.conv_width,
        "kda.head_dim": config.kda_head_dim,
        "kda.gate_lower_bound": config.gate_lower_bound,
        "attn_res.block_size": config.attn_res_block_size,
        "activation.situ_beta": config.situ_beta,
        "activation.situ_linear_beta": config.situ_linear_beta,
    }
    own = {f"{ARCHITECTURE}.{name}": value for name, value in values.items()}
    return {"general.architecture": ARCHITECTURE, "tokenizer.ggml.model": "none", **own}


def _tensors(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, whose dimensions are in the order of torch."""
    yield "token_embd.weight", weights.matrix("model.embed_tokens")
    yield "output.weight", weights.matrix("lm_head")
    yield "output_norm.weight", weights.float32("model.norm.weight")
    yield "output_res_score.weight", _score(weights, "model.output_attn_res")
    for layer, kind in enumerate(config.layer_kinds):
        source, target = f"model.layers.{layer}.", f"blk.{layer}."
        yield f"{target}attn_norm.weight", weights.float32(f"{source}input_layernorm.weight")
        yield f"{target}ffn_norm.weight", weights.float32(f"{source}post_attention_layernorm.weight")
        yield f"{target}attn_res_score.weight", _score(weights, f"{source}self_attention_res")
        yield f"{target}ffn_res_score.weight", _score(weights, f"{source}mlp_res")
        mixer = _kda if kind == "kda" else _mla
        yield from mixer(config, weights, f"{source}self_attn.", target)
        if layer < config.num_dense_layers:
            yield from _matrices(weights, _DENSE, f"{source}mlp.", target)
        else:
            yield from _moe(weights, f"{source}mlp.", target)


def _score(weights: Weights, name: str) -> Tensor:
    """Both weights of a score of attention residuals, which meet nowhere but in their product."""
    return weights.float32(f"{name}_norm.weight") * weights.float32(f"{name}_proj.weight")[0]


def _matrices(weights: Weights, names: dict[str, str], source: str, target: str) -> Iterator[tuple[str, Tensor]]:
    for name, own in names.items():
        yield f"{target}{own}.weight", weights.matrix(f"{source}{name}")


def _kda(config: ModelConfig, weights: Weights, source: str, target: str) -> Iterator[tuple[str, Tensor]]:
    yield from _matrices(weights, _KDA, source, target)
    for name in "qkv":
        kernel = weights.float32(f"{source}{name}_conv1d.weight")
        yield f"{target}ssm_conv1d_{name}.weight", kernel.view(1, config.kda_channels, 1, config.conv_width)
    yield f"{target}ssm_a", -weights.head_decay(f"{source}A_log")
    yield f"{target}ssm_dt.bias", weights.float32(f"{source}dt_bias")
    yield f"{target}ssm_norm.weight", weights.float32(f"{source}o_norm.weight")


def _mla(config: ModelConfig, weights: Weights, source: str, target: str) -> Iterator[tuple[str, Tensor]]:
    yield from _matrices(weights, _MLA, source, target)
    yield f"{target}attn_q_a_norm.weight", weights.float32(f"{source}q_a_layernorm.weight")
    yield f"{target}attn_kv_a_norm.weight", weights.float32(f"{source}kv_a_layernorm.weight")
    both = weights.matrix(f"{source}kv_b_proj").view(config.num_heads, -1, config.kv_lora_rank)
    yield f"{target}attn_k_b.weight", both[:, : config.qk_nope_head_dim].transpose(1, 2).contiguous()
    yield f"{target}attn_v_b.weight", both[:, config.qk_nope_head_dim :].contiguous()


def _moe(weights: Weights, source: str, target: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{target}ffn_gate_inp.weight", weights.float32(f"{source}gate.weight")
    yield f"{target}exp_probs_b.bias", weights.float32(f"{source}gate.e_score_correction_bias")
    yield f"{target}ffn_routed_norm.weight", weights.float32(f"{source}routed_expert_norm.weight")
    yield from _matrices(weights, _LATENT | _SHARED, source, target)
    parts = zip(*weights.experts(source), strict=True)
    for name, part in zip(("gate", "up", "down"), parts, strict=True):
        yield f"{target}ffn_{name}_exps.weight", torch.stack(part)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", UINT32, value)
        case float():
            return struct.pack("<If", FLOAT32, value)
        case str():
            return struct.pack("<I", STRING) + _string(value)
        case _:
            return struct.pack(f"<IIQ{len(value)}I", ARRAY, UINT32, len(value), *value)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
