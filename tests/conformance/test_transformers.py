"""transformers against ours: the logits of tiny random Kimi-Linear checkpoints that it writes, in prefill and 64 decode
steps, and the rotary positions of drafts.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3svc.model.draft_config import parse_draft_config
from k3svc.model.draft_rope import Rope
from k3svc.model.kimi import Model
from k3svc.ops import load
from tests.oracles.loop import Loop

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.23.0 is not installed below 3.11")

VOCAB, PROMPT, STEPS = 96, 150, 64


def write_checkpoint(directory: Path, q_lora_rank: int | None) -> tuple[Tensor, Tensor]:
    """A checkpoint of 5 layers; returns ids and what transformers makes of them: the logits at every position."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 20,
        "q_lora_rank": q_lora_rank,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "model_max_length": 4096,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5],
            "num_heads": 3,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    model: Any = KimiLinearForCausalLM(KimiLinearConfig(**fields))
    model.eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("A_log"):
                tensor.uniform_(-2, 1, generator=generator)
            elif "norm" in name:
                tensor.normal_(1, 0.2, generator=generator)
            elif tensor.dim() > 1 and "conv" not in name:
                tensor.normal_(0, 1 / math.sqrt(tensor.shape[-1]), generator=generator)
            else:
                tensor.normal_(0, 1.0, generator=generator)
        ids = torch.randint(VOCAB, (PROMPT + STEPS,), generator=generator)
        logits = model(ids[None]).logits[0]
    model.save_pretrained(directory)
    return ids, logits


@pytest.fixture(scope="module", params=[None, 14], ids=["no-q-lora", "q-lora"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """Directory, ids and the logits of transformers at every position."""
    directory = tmp_path_factory.mktemp("kimi-linear")
    return directory, *write_checkpoint(directory, request.param)


def logits_of(directory: Path, ids: Tensor) -> Tensor:
    """Ours: the prompt in chunks, the rest by decode."""
    ops = load("reference", dtype="float32", threads=1)
    loop = Loop(Model.load(directory, ops), ops)
    sequence = loop.new(len(ids))
    rows = [loop.prefill(sequence, ids[:PROMPT].tolist(), 128)]
    for token in ids[PROMPT:].tolist():
        (hidden,) = loop.step("decode", [(sequence, [token])])
        rows.append(loop.model.logits(hidden))
    return torch.cat(rows)


def test_prefill_and_decode_logits(checkpoint: tuple[Path, Tensor, Tensor]) -> None:
    directory, ids, expected = checkpoint
    assert float(expected.std()) > 0.3
    torch.testing.assert_close(logits_of(directory, ids), expected, rtol=0, atol=1e-4)


def test_names_of_kimi_k3_and_a_padded_decay_load_the_same(
    checkpoint: tuple[Path, Tensor, Tensor], tmp_path: Path
) -> None:
    """language_model., A_log longer than the heads, vision tensors, and layers past the last one."""
    directory, ids, expected = checkpoint
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    nested = {"model_type": "kimi_k3", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    tensors = {f"language_model.{name}": t for name, t in load_file(directory / "model.safetensors").items()}
    padded = {
        name: torch.cat([tensor.reshape(-1), torch.full((13,), 99.0)])
        for name, tensor in tensors.items()
        if name.endswith("A_log")
    }
    tensors |= padded
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(2)
    tensors["mm_projector.post_norm.weight"] = torch.zeros(2)
    tensors["language_model.model.layers.5.input_layernorm.weight"] = torch.zeros(2)
    tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits_of(tmp_path, ids), expected, rtol=0, atol=1e-4)


K3 = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}
LLAMA = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {**LLAMA, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {**LLAMA, "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
        K3,
        {**K3, "beta_fast": 8.0, "beta_slow": 2.0},
        {**K3, "truncate": False},
        {**K3, "attention_factor": 0.9},
        {**K3, "mscale": 1.3, "mscale_all_dim": 0.7},
        {**K3, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
    ],
)
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_rotary_frequencies_of_drafts_are_those_of_transformers(scaling: dict[str, Any], theta: float):
    from transformers import Qwen3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=1 << 20,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    theirs = Qwen3RotaryEmbedding(config)
    draft = parse_draft_config(
        {
            "hidden_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "head_dim": 64,
            "intermediate_size": 8,
            "vocab_size": 16,
            "block_size": 4,
            "max_position_embeddings": 1 << 20,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1]},
        }
    )
    ours = Rope(64, draft.rope_theta, draft.rope_scaling)
    torch.testing.assert_close(ours.frequencies, theirs.inv_freq, rtol=1e-5, atol=0.0)
    assert ours.amplitude == pytest.approx(theirs.attention_scaling)
    if scaling["rope_type"] == "yarn":
        assert ours.softmax_scale == pytest.approx(yarn_apply_mscale(config.rope_parameters, 1.0))  # type: ignore[no-untyped-call]
