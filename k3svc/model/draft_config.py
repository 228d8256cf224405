"""Configuration of block drafts, read from the published fields of DFlash and DSpark checkpoints.

Both families are one backbone (speculation.md 1 and 2). They differ in the row layout: with `anchor_predicts` (DSpark,
`sample_from_anchor`) γ rows [anchor, mask…] give γ proposals, row i predicting the token one place further on; without
(DFlash) a block of γ + 1 rows gives γ proposals, row i >= 1 predicting the token at its own place. A layout read
wrongly costs acceptance silently, so what the checkpoint leaves open is decided by the family and nothing else.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from k3svc.errors import CheckpointError

Family = Literal["dflash", "dspark"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
ScalingKind = Literal["default", "linear", "llama3", "yarn"]
T = TypeVar("T")
COMPUTED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "partial_rotary_factor": (1.0,),
    "aux_hidden_stream": ("attn_res",),
    "projector_type": ("linear",),
    "conv_kernel_size": (0,),
    "selector_rank": (0,),
}
"""Fields that say what a draft computes, and their values that this one does; without the field it does the same. Any
other value would cost acceptance silently. The stream is of the target's features: the residual mixture after a layer.
"""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """`rope_scaling` of a draft; fields that a kind does not use keep their defaults."""

    kind: ScalingKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, kw_only=True)
class MlaShape:
    """Widths of a draft with latent attention. q_lora_rank None: one full query projection."""

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved_rope: bool


@dataclass(frozen=True, kw_only=True)
class DraftSwitches:
    """How a draft is run. None of them changes a proposal; they decide what the backend captures and fuses.

    folded_proposal: lm_head, Markov loop, choice of tokens and confidence are part of the captured function, so that a
    replay turns ids into proposals; off, it ends at the final states and the rest runs eagerly.
    stacked_context_kv: one product over the context rows makes keys and values of all layers; off, one a layer.
    embed_in_graph: the captured function takes ids and looks them up itself; off, it takes embeddings.
    """

    folded_proposal: bool = True
    stacked_context_kv: bool = True
    embed_in_graph: bool = True


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape and meaning of a draft checkpoint. Layer numbers are 0-based outputs of target layers."""

    family: Family
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_positions: int
    mla: MlaShape | None
    target_layers: tuple[int, ...]
    num_target_layers: int | None
    mask_token_id: int
    block_size: int
    """Rows of a block as the checkpoint counts them: with the anchor for DFlash, γ for DSpark."""
    anchor_predicts: bool
    window: int | None
    """Context rows that a block sees, the newest ones; None: all."""
    is_causal: bool
    """Whether a block row sees only the rows before it in the block. Published drafts but one say no."""
    markov_head: MarkovKind | None
    markov_rank: int
    confidence_head: bool
    confidence_with_markov: bool

    @property
    def num_proposals(self) -> int:
        """γ."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @property
    def num_rows(self) -> int:
        """Query rows of a block."""
        return self.block_size

    @property
    def first_predicting_row(self) -> int:
        return 0 if self.anchor_predicts else 1


def load_draft_config(path: Path) -> DraftConfig:
    """Read `config.json` of a draft checkpoint. Raises CheckpointError."""
    file = path / "config.json"
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}", file=file) from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: got {type(fields).__name__}; allowed: one JSON object", file=file)
    return parse_draft_config(fields)


def parse_draft_config(fields: Mapping[str, Any]) -> DraftConfig:
    """`DraftConfig` from the fields of a published config.json. Raises CheckpointError naming the field."""
    reader = _Reader(fields)
    family = reader.family()
    is_dspark = family == "dspark"
    heads = reader.need("num_attention_heads", int)
    hidden_size = reader.need("hidden_size", int)
    markov_rank = reader.get("markov_rank", int, 0)
    markov_head = reader.choice("markov_head_type", ("vanilla", "gated", "rnn"), "vanilla") if markov_rank else None
    confidence_head = reader.get("enable_confidence_head", bool, False)
    config = DraftConfig(
        family=family,
        hidden_size=hidden_size,
        num_layers=reader.need("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=reader.get("num_key_value_heads", int, heads),
        head_dim=reader.get("head_dim", int, hidden_size // heads),
        intermediate_size=reader.need("intermediate_size", int),
        vocab_size=reader.need("vocab_size", int),
        rms_norm_eps=reader.get("rms_norm_eps", float, 1e-6),
        rope_theta=reader.rope("rope_theta", 10_000.0),
        rope_scaling=reader.rope_scaling(),
        max_positions=reader.get("max_position_embeddings", int, 0),
        mla=reader.mla(),
        target_layers=reader.target_layers(),
        num_target_layers=reader.get("num_target_layers", int, 0) or None,
        mask_token_id=reader.need("mask_token_id", int),
        block_size=reader.need("block_size", int),
        anchor_predicts=reader.get("sample_from_anchor", bool, is_dspark),
        window=reader.window(reader.need("num_hidden_layers", int)),
        is_causal=reader.get("is_causal", bool, False),
        markov_head=cast("MarkovKind | None", markov_head),
        markov_rank=markov_rank,
        confidence_head=confidence_head,
        confidence_with_markov=confidence_head and reader.get("confidence_head_with_markov", bool, markov_rank > 0),
    )
    _check(config, reader)
    return config


def _check(config: DraftConfig, reader: "_Reader") -> None:
    if config.num_proposals < 1:
        reader.fail("block_size", config.block_size, "at least one proposal")
    if config.num_heads % config.num_kv_heads:
        reader.fail("num_key_value_heads", config.num_kv_heads, f"a divisor of {config.num_heads}")
    if not 0 <= config.mask_token_id < config.vocab_size:
        reader.fail("mask_token_id", config.mask_token_id, f"0..{config.vocab_size - 1}")
    if config.confidence_with_markov and config.markov_head is None:
        reader.fail("confidence_head_with_markov", True, "false without a Markov head (markov_rank 0)")
    reader.refuse_what_is_not_computed(config.vocab_size)
    last = config.num_target_layers
    if last is not None and max(config.target_layers) >= last - 1:
        # The last layer's output is stored after the final norm, so no draft can have learnt it
        reader.fail("target_layer_ids", list(config.target_layers), f"layers 0..{last - 2} of {last}")


class _Reader:
    """Looks a field up in `dspark_config`, `dflash_config` and the top level, under its published spellings."""

    ALIASES: Mapping[str, tuple[str, ...]] = {
        "block_size": ("block_size", "dspark_block_size"),
        "mask_token_id": ("mask_token_id", "dspark_noise_token_id"),
        "target_layer_ids": ("target_layer_ids", "dspark_target_layer_ids"),
        "markov_rank": ("markov_rank", "dspark_markov_rank"),
    }

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._top = fields
        self._scopes: list[Mapping[str, Any]] = [fields]
        for name in ("dflash_config", "dspark_config"):
            nested = fields.get(name)
            if nested is not None and not isinstance(nested, Mapping):
                self.fail(name, nested, "an object")
            if nested is not None:
                self._scopes.insert(0, nested)

    def fail(self, field: str, given: object, allowed: str) -> None:
        raise CheckpointError(f"draft config: {field}: got {given!r}; allowed: {allowed}", field=field)

    def _find(self, field: str) -> Any:
        for scope in self._scopes:
            for name in self.ALIASES.get(field, (field,)):
                if scope.get(name) is not None:
                    return scope[name]
        return None

    def _typed(self, field: str, value: Any, kind: type[T]) -> T:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return cast("T", float(value))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.fail(field, value, kind.__name__)
        return cast("T", value)

    def need(self, field: str, kind: type[T]) -> T:
        value = self._find(field)
        if value is None:
            self.fail(field, None, f"{kind.__name__}, required")
        return self._typed(field, value, kind)

    def get(self, field: str, kind: type[T], default: T) -> T:
        value = self._find(field)
        return default if value is None else self._typed(field, value, kind)

    def choice(self, field: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.get(field, str, default)
        if value not in allowed:
            self.fail(field, value, ", ".join(allowed))
        return value

    def family(self) -> Family:
        """By the DSpark fields or the name of the architecture, which some K3 configs lack."""
        names = " ".join(map(str, self._top.get("architectures") or ())) + str(self._top.get("model_type") or "")
        has_fields = self._top.get("dspark_config") is not None or any(
            str(name).startswith("dspark_") for name in self._top
        )
        if has_fields or "dspark" in names.lower() or self._find("markov_rank"):
            return "dspark"
        if self._top.get("dflash_config") is not None or "dflash" in names.lower():
            return "dflash"
        self.fail("architectures", self._top.get("architectures"), "a DFlash or DSpark draft")
        raise AssertionError

    def target_layers(self) -> tuple[int, ...]:
        layers = self.need("target_layer_ids", list)
        if not layers or sorted(set(layers)) != layers or any(type(layer) is not int or layer < 0 for layer in layers):
            self.fail("target_layer_ids", layers, "ascending layer numbers from 0")
        return tuple(layers)

    def refuse_what_is_not_computed(self, vocab_size: int) -> None:
        for field, values in COMPUTED.items():
            given = self._find(field)
            if given is not None and given not in values:
                self.fail(field, given, " or ".join([*map(json.dumps, values), "no such field"]))
        drafted = self.get("draft_vocab_size", int, vocab_size)
        if drafted != vocab_size:
            self.fail("draft_vocab_size", drafted, f"the target's {vocab_size}")

    def window(self, num_layers: int) -> int | None:
        """`sliding_window`, where it applies to every layer; None where it applies to none."""
        size = self.get("sliding_window", int, 0)
        types = self.get("layer_types", list, [])
        if types and types not in (["sliding_attention"] * len(types), ["full_attention"] * len(types)):
            self.fail("layer_types", types, "sliding_attention for all layers, or full_attention")
        if not (types[0] == "sliding_attention" if types else self._slides(size, num_layers)):
            return None
        if size < 1:
            self.fail("sliding_window", size, "at least 1 where layers slide")
        return size

    def _slides(self, size: int, num_layers: int) -> bool:
        """Without `layer_types`. A size in the draft's own section applies. At the top level of a Qwen3 config it does
        with `use_sliding_window`, by default false, and from layer `max_window_layers` on; other architectures have no
        such fields.
        """
        if any(scope.get("sliding_window") is not None for scope in self._scopes if scope is not self._top):
            return True
        if not str(self._top.get("model_type") or "").startswith("qwen"):
            return self.get("use_sliding_window", bool, size > 0)
        if not self.get("use_sliding_window", bool, False):
            return False
        first = self.need("max_window_layers", int)
        if 0 < first < num_layers:
            self.fail("max_window_layers", first, f"0, or {num_layers} and more: all layers slide or none does")
        return first == 0

    def mla(self) -> MlaShape | None:
        rank = self.get("kv_lora_rank", int, 0)
        if not rank:
            return None
        return MlaShape(
            q_lora_rank=self.get("q_lora_rank", int, 0) or None,
            kv_lora_rank=rank,
            nope_dim=self.need("qk_nope_head_dim", int),
            rope_dim=self.need("qk_rope_head_dim", int),
            value_dim=self.need("v_head_dim", int),
            interleaved_rope=self.get("rope_interleave", bool, True),
        )

    def rope(self, field: str, default: float) -> float:
        """A RoPE field at the top level or inside `rope_parameters`, where newer configs put it."""
        inside = self.get("rope_parameters", dict, {})
        return self._typed(field, inside[field], float) if field in inside else self.get(field, float, default)

    def rope_scaling(self) -> RopeScaling:
        given = self.get("rope_scaling", dict, {}) or self.get("rope_parameters", dict, {})
        for name, value in given.items():
            if isinstance(value, Mapping):
                self.fail(f"rope_parameters.{name}", value, "no parameters by type of layer")
        if given.get("partial_rotary_factor") not in (None, 1.0):
            self.fail("rope_scaling.partial_rotary_factor", given["partial_rotary_factor"], "1.0 or no such field")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "linear", "llama3", "yarn"):
            self.fail("rope_scaling.rope_type", kind, "default, linear, llama3, yarn")

        def number(name: str, default: float) -> float:
            value = given.get(name)
            return default if value is None else self._typed(f"rope_scaling.{name}", value, float)

        attention_factor = given.get("attention_factor")
        longest = self.get("max_position_embeddings", int, 0)
        original = int(number("original_max_position_embeddings", longest))
        if kind in ("llama3", "yarn") and original < 1:
            self.fail("rope_scaling.original_max_position_embeddings", original, "at least 1")
        factor = number("factor", longest / original if kind == "yarn" else 0.0)
        if kind != "default" and factor < 1.0:
            self.fail("rope_scaling.factor", given.get("factor"), "a number of at least 1")
        truncate = given.get("truncate")
        return RopeScaling(
            kind=kind,
            factor=factor or 1.0,
            original_max_positions=original,
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=None if attention_factor is None else number("attention_factor", 1.0),
            mscale=number("mscale", 0.0),
            mscale_all_dim=number("mscale_all_dim", 0.0),
            truncate=True if truncate is None else self._typed("rope_scaling.truncate", truncate, bool),
            low_freq_factor=number("low_freq_factor", 1.0),
            high_freq_factor=number("high_freq_factor", 4.0),
        )
