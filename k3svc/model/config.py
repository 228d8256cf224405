"""ModelConfig: what the model needs of a checkpoint's config.json, for Kimi-K3 and Kimi-Linear alike.

Kimi-K3 nests the text model in `text_config`; Kimi-Linear is flat. A field that this implementation cannot honour is an
error that names it, never ignored.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3svc.errors import CheckpointError
from k3svc.ops.table import Activation

LayerKind = Literal["kda", "mla"]
MODEL_TYPES = ("kimi_k3", "kimi_linear")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of the text model. Layer indices are 0-based."""

    model_type: str
    """kimi_k3 or kimi_linear."""
    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    num_dense_layers: int
    """Layers 0 to here have a dense MLP, the others experts."""
    intermediate_size: int
    """Width of the dense MLP."""
    activation: Activation
    situ_beta: float
    situ_linear_beta: float | None
    rms_norm_eps: float
    lora_norm_eps: float
    """eps of q_a_layernorm and kv_a_layernorm (model.md 2.1)."""
    attn_res_block_size: int | None
    """Layers of a block of attention residuals; None: plain residual stream."""

    kda_heads: int
    kda_head_dim: int
    """Key and value width of a KDA head, and rank of its low-rank projections."""
    conv_width: int
    gate_lower_bound: float | None
    """Bound of the safe gate; None: softplus gate."""
    full_rank_gate: bool
    """Whether the output gate of KDA is one matrix."""
    chunk_size: int
    """Grid of KDA chunks in tokens."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool

    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    latent_size: int | None
    """Width of the routed experts (latent MoE); None: hidden_size, without norm and projections."""
    renormalize: bool
    routed_scaling_factor: float
    num_expert_groups: int
    top_groups: int

    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def expert_width(self) -> int:
        """Width of the rows that routed experts read and write."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def kda_channels(self) -> int:
        """Channels of each of q, k, v."""
        return self.kda_heads * self.kda_head_dim

    @property
    def cache_width(self) -> int:
        """Columns of an MLA cache row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @classmethod
    def from_directory(cls, path: Path) -> "ModelConfig":
        """Reads path/config.json. Raises CheckpointError naming the file or field."""
        file = path / "config.json"
        try:
            tree = json.loads(file.read_text())
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{file}: expected an object")
        return cls.from_tree(tree)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "ModelConfig":
        """From the parsed config.json. Raises CheckpointError naming the field."""
        model_type = tree.get("model_type")
        if model_type not in MODEL_TYPES:
            raise _error("model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
        text = _Fields(tree, "")
        if "text_config" in tree:
            text = text.section("text_config")
        linear = text.section("linear_attn_config")
        _refuse_unsupported(text)
        eos = text.get("eos_token_id", tree.get("eos_token_id"))
        is_situ = text.choice("hidden_act", ("silu", "situ")) == "situ"
        has_latent = text.get("routed_expert_hidden_size") is not None
        num_layers = text.integer("num_hidden_layers")
        config = cls(
            model_type=model_type,
            vocab_size=text.integer("vocab_size"),
            hidden_size=text.integer("hidden_size"),
            layer_kinds=_layer_kinds(linear, num_layers),
            num_dense_layers=min(text.integer("first_k_dense_replace", minimum=0), num_layers),
            intermediate_size=text.integer("intermediate_size"),
            activation="situ" if is_situ else "silu",
            situ_beta=text.number("activation_situ_beta") if is_situ else 1.0,
            situ_linear_beta=text.optional_number("activation_situ_linear_beta") if is_situ else None,
            rms_norm_eps=text.number("rms_norm_eps"),
            lora_norm_eps=text.number("lora_norm_eps", 1e-6),
            attn_res_block_size=text.optional_integer("attn_res_block_size"),
            kda_heads=linear.integer("num_heads"),
            kda_head_dim=linear.integer("head_dim"),
            conv_width=linear.integer("short_conv_kernel_size", minimum=2),
            gate_lower_bound=linear.optional_number("gate_lower_bound"),
            full_rank_gate=linear.boolean("use_full_rank_gate", False),
            chunk_size=linear.integer("chunk_size", 64),
            num_heads=text.integer("num_attention_heads"),
            q_lora_rank=text.optional_integer("q_lora_rank"),
            kv_lora_rank=text.integer("kv_lora_rank"),
            qk_nope_head_dim=text.integer("qk_nope_head_dim"),
            qk_rope_head_dim=text.integer("qk_rope_head_dim"),
            v_head_dim=text.integer("v_head_dim"),
            mla_output_gate=text.boolean("mla_use_output_gate", False),
            num_experts=text.integer("num_experts"),
            experts_per_token=text.integer("num_experts_per_token"),
            num_shared_experts=text.integer("num_shared_experts", minimum=0),
            moe_intermediate_size=text.integer("moe_intermediate_size"),
            latent_size=text.integer("routed_expert_hidden_size") if has_latent else None,
            renormalize=text.boolean("moe_renormalize", True),
            routed_scaling_factor=text.number("routed_scaling_factor"),
            num_expert_groups=text.integer("num_expert_group", 1),
            top_groups=text.integer("topk_group", 1),
            max_positions=text.integer("max_position_embeddings", text.get("model_max_length", 1 << 20)),
            bos_token_id=text.get("bos_token_id", tree.get("bos_token_id")),
            eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
            pad_token_id=text.get("pad_token_id", tree.get("pad_token_id")),
        )
        _check_consistency(config, text)
        return config


def _error(field: str, given: object, allowed: str) -> CheckpointError:
    return CheckpointError(f"config.json: {field}: got {given!r}; allowed: {allowed}", field=field)


class _Fields:
    """Typed access to a section of config.json. A default of None means that the field is required."""

    def __init__(self, values: Mapping[str, Any], prefix: str) -> None:
        self._values = values
        self._prefix = prefix

    def section(self, name: str) -> "_Fields":
        value = self._values.get(name)
        if not isinstance(value, Mapping):
            raise _error(self._prefix + name, value, "an object")
        return _Fields(value, f"{self._prefix}{name}.")

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def error(self, name: str, allowed: str) -> CheckpointError:
        return _error(self._prefix + name, self._values.get(name), allowed)

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"an integer of at least {minimum}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, "a number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, allowed: Sequence[Any], default: object = None) -> Any:
        value = self.get(name, default)
        if value not in allowed:
            raise self.error(name, " or ".join(json.dumps(item) for item in allowed))
        return value

    def layers(self, name: str) -> list[int]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, int) and item >= 1 for item in value):
            raise self.error(name, "a list of layer numbers from 1")
        return value


def _refuse_unsupported(text: _Fields) -> None:
    """What both public models agree on and this implementation takes for granted."""
    text.choice("tie_word_embeddings", (False,), False)
    text.choice("mla_use_nope", (True,), True)
    text.choice("moe_layer_freq", (1,), 1)
    text.choice("moe_router_activation_func", ("sigmoid",), "sigmoid")
    text.choice("topk_method", ("noaux_tc",), "noaux_tc")
    text.choice("attention_bias", (False,), False)
    heads = text.integer("num_attention_heads")
    text.choice("num_key_value_heads", (heads,), heads)
    if text.get("routed_expert_hidden_size") is not None:
        text.choice("latent_moe_use_norm", (True,))


def _layer_kinds(linear: _Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """Kinds of layers 0 to num_layers from the 1-based lists, which may name more layers than that."""
    kda = set(linear.layers("kda_layers"))
    full = set(linear.layers("full_attn_layers"))
    both = sorted(kda & full)
    if both:
        raise linear.error("full_attn_layers", f"no layer that kda_layers names too ({both})")
    missing = [layer for layer in range(1, num_layers + 1) if layer not in kda | full]
    if missing:
        raise linear.error(
            "kda_layers", f"with full_attn_layers, every layer from 1 to {num_layers} (missing: {missing})"
        )
    return tuple("kda" if layer in kda else "mla" for layer in range(1, num_layers + 1))


def _check_consistency(config: ModelConfig, text: _Fields) -> None:
    if config.experts_per_token > config.num_experts:
        raise text.error("num_experts_per_token", f"at most num_experts ({config.num_experts})")
    groups = config.num_expert_groups
    if config.num_experts % groups:
        raise text.error("num_expert_group", f"a divisor of num_experts ({config.num_experts})")
    if config.top_groups > groups:
        raise text.error("topk_group", f"at most num_expert_group ({groups})")
    if config.experts_per_token > config.num_experts // groups * config.top_groups:
        raise text.error("num_experts_per_token", "at most the experts of topk_group groups")
    if config.gate_lower_bound is not None and config.gate_lower_bound >= 0:
        raise _error("linear_attn_config.gate_lower_bound", config.gate_lower_bound, "a number below 0")
