#!/usr/bin/env python3
"""Writes a small checkpoint of random weights with the head and latent sizes that the Ascend operators take:
scripts/make_npu_tiny.py DIRECTORY [--seed N]

KV rank 512 + 64, query/key 128 + 64, value 128, KDA heads of 128; the tokenizer and all other values are k3-nano's.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from k3svc.model.config import ModelConfig  # noqa: E402 - needs the path above
from k3svc.model.weights import tensor_shapes  # noqa: E402 - needs the path above

NANO = ROOT / "models" / "k3-nano"
TOKENIZER = ("tiktoken.model", "tokenizer_config.json", "generation_config.json")
TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "routed_expert_hidden_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attn_res_block_size": 2,
}
LINEAR: dict[str, Any] = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 2, "head_dim": 128}
FLOAT32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
LOGIT_GAIN = 2.0
ROUTED_GAIN = 0.25
"""So that the other choice, where two experts are nearly level, moves logits as little as in a trained model."""


def config() -> dict[str, Any]:
    """config.json: k3-nano's with other sizes."""
    tree: dict[str, Any] = json.loads((NANO / "config.json").read_text())
    tree["text_config"] |= TEXT
    tree["text_config"]["linear_attn_config"] |= LINEAR
    return tree


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by its stored name."""
    model = ModelConfig.from_tree(config())
    shapes = tensor_shapes(model)
    inner, width = model.moe_intermediate_size, model.expert_width
    for layer in range(model.num_dense_layers, model.num_layers):
        for expert in range(model.num_experts):
            name = f"model.layers.{layer}.mlp.experts.{expert}."
            shapes |= {f"{name}w1.weight": (inner, width), f"{name}w3.weight": (inner, width)}
            shapes[f"{name}w2.weight"] = (width, inner)
    generator = torch.Generator().manual_seed(seed)
    return {f"language_model.{name}": _tensor(name, shape, generator) for name, shape in sorted(shapes.items())}


def _tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        values = values * 0.5 + 0.5
    elif "norm.weight" in name:
        values = 1 + 0.1 * values
    elif name.endswith("e_score_correction_bias"):
        values = values * 0.5
    elif name.endswith("lm_head.weight"):
        values = values * LOGIT_GAIN * shape[-1] ** -0.5
    elif name.endswith("routed_expert_up_proj.weight"):
        values = values * ROUTED_GAIN * shape[-1] ** -0.5
    elif len(shape) > 1 and not name.endswith("embed_tokens.weight"):
        values = values * shape[-1] ** -0.5
    return values if name.endswith(FLOAT32) else values.to(torch.bfloat16)


def write(directory: Path, seed: int) -> None:
    """Makes the directory and everything in it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(), indent=2) + "\n")
    for name in TOKENIZER:
        shutil.copyfile(NANO / name, directory / name)
    save_file(tensors(seed), directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.directory, arguments.seed)
    print(f"wrote {arguments.directory}")
