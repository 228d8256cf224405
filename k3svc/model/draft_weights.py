"""Tensors of a draft checkpoint by their published names (speculation.md 1.4 and 2.2)."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3svc.errors import CheckpointError
from k3svc.model.draft_config import DraftConfig

ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "context_proj.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
}
OWN_TABLES = ("embed_tokens.weight", "lm_head.weight")
"""What some checkpoints carry, as a copy of the target's or trained with the draft; without, the target's are used."""
STS_FILE = "sts.json"
MASK_FILE = "mask_embedding.pt"

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: DraftConfig) -> Shapes:
    """Every tensor that a checkpoint of this config has, and its shape."""
    hidden = config.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, hidden * len(config.target_layers)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        base = f"layers.{layer}."
        shapes |= {f"{base}self_attn.{name}": shape for name, shape in _attention_shapes(config).items()}
        shapes |= {
            f"{base}mlp.gate_proj.weight": (config.intermediate_size, hidden),
            f"{base}mlp.up_proj.weight": (config.intermediate_size, hidden),
            f"{base}mlp.down_proj.weight": (hidden, config.intermediate_size),
            f"{base}input_layernorm.weight": (hidden,),
            f"{base}post_attention_layernorm.weight": (hidden,),
        }
    return shapes | _head_shapes(config)


def _attention_shapes(config: DraftConfig) -> Shapes:
    hidden, heads = config.hidden_size, config.num_heads
    mla = config.mla
    if mla is None:
        groups, width = config.num_kv_heads, config.head_dim
        return {
            "q_proj.weight": (heads * width, hidden),
            "k_proj.weight": (groups * width, hidden),
            "v_proj.weight": (groups * width, hidden),
            "o_proj.weight": (hidden, heads * width),
            "q_norm.weight": (width,),
            "k_norm.weight": (width,),
        }
    query = heads * (mla.nope_dim + mla.rope_dim)
    shapes: Shapes = {
        "kv_a_proj_with_mqa.weight": (mla.kv_lora_rank + mla.rope_dim, hidden),
        "kv_a_layernorm.weight": (mla.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (mla.nope_dim + mla.value_dim), mla.kv_lora_rank),
        "o_proj.weight": (hidden, heads * mla.value_dim),
    }
    if mla.q_lora_rank is None:
        return shapes | {"q_proj.weight": (query, hidden)}
    return shapes | {
        "q_a_proj.weight": (mla.q_lora_rank, hidden),
        "q_a_layernorm.weight": (mla.q_lora_rank,),
        "q_b_proj.weight": (query, mla.q_lora_rank),
    }


def _head_shapes(config: DraftConfig) -> Shapes:
    hidden, rank = config.hidden_size, config.markov_rank
    shapes: Shapes = {}
    if config.markov_head is not None:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.vocab_size, rank)
    if config.markov_head == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if config.markov_head == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.confidence_head:
        shapes["confidence_head.proj.weight"] = (1, hidden + rank * config.confidence_with_markov)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def load_draft_weights(path: Path, config: DraftConfig, *, only: frozenset[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a draft checkpoint under their first published names, in the dtype of the file, with the tables
    of OWN_TABLES that it has.

    only: names to read, for a process that needs a part. Unknown, missing and misshapen tensors are a CheckpointError
    that names them, also with `only`.
    """
    needed = expected_shapes(config)
    shapes = needed | dict.fromkeys(OWN_TABLES, (config.vocab_size, config.hidden_size))
    weights: dict[str, Tensor] = {}
    found: set[str] = set()
    for file in _files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for stored in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    name = ALIASES.get(stored.removeprefix("model."), stored.removeprefix("model."))
                    _check(file, stored, tuple(tensors.get_slice(stored).get_shape()), shapes.get(name), name in found)
                    found.add(name)
                    if only is None or name in only:
                        weights[name] = tensors.get_tensor(stored)
        except (OSError, SafetensorError) as error:  # noqa: PERF203 - names the file
            raise CheckpointError(f"{file}: cannot be read: {error}", file=file) from error
    missing = sorted(set(needed) - found)
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} tensors are missing, the first {missing[:3]}", tensor=missing[0])
    return weights


def _check(file: Path, name: str, shape: tuple[int, ...], wanted: tuple[int, ...] | None, is_double: bool) -> None:
    if wanted is None or is_double:
        what = "occurs twice" if is_double else "is unknown"
        raise CheckpointError(f"{file}: tensor {name!r} {what}", tensor=name)
    if shape != wanted:
        raise CheckpointError(f"{file}: {name}: got shape {list(shape)}; allowed: {list(wanted)}", tensor=name)


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return [path / "model.safetensors"]
    try:
        names: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{index}: cannot be read: {error!r}", file=index) from error
    return [path / name for name in sorted(set(names.values()))]


def load_mask_embedding(path: Path, config: DraftConfig) -> Tensor | None:
    """The trained vector [H] that stands for the mask id, or None: the target's embedding row of that id is used."""
    file = path / MASK_FILE
    if not file.exists():
        return None
    given = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(given, Tensor) or given.numel() != config.hidden_size:
        raise CheckpointError(f"{file}: allowed: one tensor of {config.hidden_size} elements", file=file)
    return given.reshape(-1)


def load_temperatures(path: Path, config: DraftConfig) -> Tensor:
    """STS temperatures of the confidences, float32 [γ]; ones where the checkpoint has no `sts.json`."""
    file = path / STS_FILE
    if not file.exists():
        return torch.ones(config.num_proposals)
    try:
        given = torch.tensor(json.loads(file.read_text())["temperatures"], dtype=torch.float32)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error!r}", file=file) from error
    if given.shape != (config.num_proposals,) or not bool((given > 0).all()):
        raise CheckpointError(f"{file}: temperatures: allowed: {config.num_proposals} positive numbers", file=file)
    return given
