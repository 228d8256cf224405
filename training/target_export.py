"""k3-nano's weights and configuration in the layout of the public checkpoint."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from training import target_net as net
from training.bpe import BOS, END_OF_MESSAGE, EOS, NUM_CONTROLS, NUM_RANKS

PREFIX = "language_model.model."
SHARD_BYTES = 14 << 20
FULL_PRECISION = ("conv1d", "A_log", "dt_bias", "o_norm")
"""Parameters that stay float32 in the file; the others are bfloat16."""
IDS = {"bos_token_id": BOS, "eos_token_id": END_OF_MESSAGE, "pad_token_id": NUM_RANKS + NUM_CONTROLS - 1}


def round_weights(model: net.TargetNet) -> None:
    """Round to what the file will hold."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(FULL_PRECISION):
                parameter.copy_(parameter.bfloat16().float())


def _stored(name: str, tensor: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith(FULL_PRECISION) else torch.bfloat16
    return tensor.detach().to(dtype).cpu().contiguous()


def public(model: net.TargetNet) -> dict[str, Tensor]:
    """Tensors under their public names."""
    mix_out = model.mix_out
    tensors = {
        "language_model.lm_head.weight": _stored("", model.head),
        f"{PREFIX}embed_tokens.weight": _stored("", model.embed),
        f"{PREFIX}norm.weight": _stored("", mix_out.out),
        f"{PREFIX}output_attn_res_norm.weight": _stored("", mix_out.norm),
        f"{PREFIX}output_attn_res_proj.weight": _stored("", mix_out.proj)[None],
    }
    for layer in range(net.LAYERS):
        base = f"{PREFIX}layers.{layer}."
        for mix, residual, norm in (
            (model.mix_attn[layer], "self_attention_res", "input_layernorm"),
            (model.mix_ffn[layer], "mlp_res", "post_attention_layernorm"),
        ):
            tensors[f"{base}{norm}.weight"] = _stored("", mix.get_parameter("out"))
            tensors[f"{base}{residual}_norm.weight"] = _stored("", mix.get_parameter("norm"))
            tensors[f"{base}{residual}_proj.weight"] = _stored("", mix.get_parameter("proj"))[None]
        tensors |= _attention(model.attn[layer], f"{base}self_attn.")
        tensors |= _feed_forward(model.ffn[layer], base)
    return tensors


def _attention(module: torch.nn.Module, base: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        tensor = _stored(name, parameter)
        if name == "A_log":
            tensors[base + name] = F.pad(
                tensor, (0, net.KDA_WIDTH - net.KDA_HEADS)
            )  # wider than the heads, as published
        elif name == "dt_bias":
            tensors[base + name] = tensor
        else:
            tensors[f"{base}{name}.weight"] = tensor[:, None] if name.endswith("conv1d") else tensor
    return tensors


def _feed_forward(module: torch.nn.Module, base: str) -> dict[str, Tensor]:
    if not isinstance(module, net.MoE):
        return {f"{base}mlp.{name}.weight": _stored(name, parameter) for name, parameter in module.named_parameters()}
    base += "block_sparse_moe."
    tensors = {
        f"{base}gate.weight": _stored("", module.gate),
        f"{base}gate.e_score_correction_bias": module.bias.detach().float().cpu(),
        f"{base}routed_expert_down_proj.weight": _stored("", module.down),
        f"{base}routed_expert_norm.weight": _stored("", module.norm),
        f"{base}routed_expert_up_proj.weight": _stored("", module.up),
    }
    for name, parameter in module.shared_experts.named_parameters():
        tensors[f"{base}shared_experts.{name}.weight"] = _stored(name, parameter)
    for name in ("w1", "w2", "w3"):
        for expert, part in enumerate(_stored(name, getattr(module, name)).chunk(net.EXPERTS)):
            tensors[f"{base}experts.{expert}.{name}.weight"] = part.contiguous()
    return tensors


def write(model: net.TargetNet, out: Path) -> None:
    """Shards, their index, config.json and generation_config.json."""
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in public(model).items():
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    sampling = {**IDS, "eos_token_id": [END_OF_MESSAGE, EOS], "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    for name, content in (
        ("model.safetensors.index", index),
        ("config", config()),
        ("generation_config", {**sampling, "transformers_version": "4.56.2"}),
    ):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def config() -> dict[str, Any]:
    """config.json."""
    full = [layer + 1 for layer in net.FULL_ATTENTION]
    text = {
        "model_type": "kimi_linear",
        "vocab_size": net.VOCAB,
        "hidden_size": net.HIDDEN,
        "num_hidden_layers": net.LAYERS,
        "num_attention_heads": net.HEADS,
        "num_key_value_heads": net.HEADS,
        "intermediate_size": net.DENSE,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": net.EXPERT_WIDTH,
        "num_experts": net.EXPERTS,
        "num_experts_per_token": net.CHOSEN,
        "num_shared_experts": net.SHARED,
        "routed_expert_hidden_size": net.LATENT,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "q_lora_rank": net.Q_RANK,
        "kv_lora_rank": net.KV_RANK,
        "qk_nope_head_dim": net.NOPE,
        "qk_rope_head_dim": net.ROPE,
        "v_head_dim": net.VALUE,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": net.RESIDUAL_BLOCK,
        "hidden_act": "situ",
        "activation_situ_beta": net.BETA,
        "activation_situ_linear_beta": net.LINEAR_BETA,
        "rms_norm_eps": net.EPS,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, net.LAYERS + 1) if layer not in full],
            "num_heads": net.KDA_HEADS,
            "head_dim": net.KDA_WIDTH,
            "short_conv_kernel_size": net.CONV,
            "use_full_rank_gate": True,
            "gate_lower_bound": net.GATE_BOUND,
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        **IDS,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
        **IDS,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": NUM_RANKS + 21,
        "tie_word_embeddings": False,
        "transformers_version": "4.56.2",
    }
