"""Weights: the tensors that a configuration calls for, checked against a checkpoint and read one at a time.

Every tensor of the text model must be there, with its shape, and no other. Experts may be plain, MXFP4 (model.md 3.3)
or of whole numbers; so may any projection of a ModelSlim checkpoint (`modelslim`), and one of int8 is handed on so.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from k3svc.errors import CheckpointError
from k3svc.model import modelslim
from k3svc.model.checkpoint import Checkpoint
from k3svc.model.config import ModelConfig
from k3svc.ops.table import Ops, QuantizedExpert, QuantizedMatrix

Shape = tuple[int, ...]

MX_GROUP = 32
"""Columns that share a scale."""
SHOWN_PROBLEMS = 20
FLOAT_MODULES = (".mlp.gate", "_res_proj")
"""Router and scores of residuals, which compute in float32: matrices that are never of whole numbers."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Weights:
    """Typed access to the tensors of an open checkpoint that fits the configuration."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> None:
        """`dtype` is that of matrices. Raises CheckpointError listing missing, unknown and misshapen tensors."""
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        _check(checkpoint, config)

    def matrix(self, *names: str) -> Tensor:
        """Rows of the `weight` tensors of these modules one below the other, [sum of out, in]."""
        if len(names) == 1:
            return self._read(names[0])
        rows = [self._checkpoint.shape(f"{name}.weight")[0] * (2 if self._bits(name) == 4 else 1) for name in names]
        out = torch.empty(sum(rows), self._checkpoint.shape(f"{names[0]}.weight")[1], dtype=self._dtype)
        for part, name in zip(torch.split(out, rows), names, strict=True):
            part.copy_(self._read(name))
        return out

    def linear(self, ops: Ops, *names: str) -> Any:
        """`matrix`, packed for `Ops.linear`; int8 weights as such, for a backend that multiplies them."""
        if all(self._bits(name) != 8 for name in names):
            return ops.pack_linear(self.matrix(*names))
        parts = [self._quantized(name) if self._bits(name) == 8 else self._read(name) for name in names]
        return ops.pack_quantized_linear(parts, self._dtype)

    def norm(self, name: str) -> Tensor:
        """Weight of a norm, in the dtype of matrices."""
        return self._checkpoint.tensor(f"{name}.weight", self._dtype)

    def float32(self, name: str) -> Tensor:
        """A tensor in float32, named in full."""
        return self._checkpoint.tensor(name, torch.float32)

    def head_decay(self, name: str) -> Tensor:
        """exp(A_log), float32 [HV]: stored [1, 1, HV, 1], or longer than HV and then padded at the end."""
        return self.float32(name).reshape(-1)[: self._config.kda_heads].exp()

    def experts(self, prefix: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """w1, w3, w2 of one plain or MXFP4 expert after the other."""
        for expert in range(self._config.num_experts):
            w1, w3, w2 = (self._expert_matrix(f"{prefix}experts.{expert}.{name}") for name in ("w1", "w3", "w2"))
            yield w1, w3, w2

    def has_quantized_experts(self, prefix: str) -> bool:
        """Whether the experts of a layer are of whole numbers."""
        return self._bits(f"{prefix}experts.0.w1") is not None

    def quantized_experts(self, prefix: str) -> Iterator[QuantizedExpert]:
        """w1, w3, w2 of one expert of whole numbers after the other. Raises CheckpointError where w1 and w3 differ."""
        for expert in range(self._config.num_experts):
            names = [f"{prefix}experts.{expert}.{name}" for name in ("w1", "w3", "w2")]
            widths = [self._bits(name) for name in names]
            if None in widths or widths[0] != widths[1]:
                found = ", ".join(f"{name}: {width or 'plain'}" for name, width in zip(names, widths, strict=True))
                raise CheckpointError(
                    f"bits of an expert's weights: got {found}; w1 and w3 must agree, and none be plain"
                )
            w1, w3, w2 = (self._quantized(name) for name in names)
            yield w1, w3, w2

    def _read(self, name: str) -> Tensor:
        """The weight of a module, in the dtype of matrices."""
        if self._bits(name) is None:
            return self._checkpoint.tensor(f"{name}.weight", self._dtype)
        return self._quantized(name).dequantized().to(self._dtype)

    def _bits(self, name: str) -> Literal[4, 8] | None:
        if f"{name}.weight" not in self._checkpoint.names:
            return None
        return modelslim.bits_of(self._checkpoint.description, name, self._checkpoint.dtype(f"{name}.weight"))

    def _quantized(self, name: str) -> QuantizedMatrix:
        bits = self._bits(name)
        assert bits is not None, f"{name} is plain"
        for offset in (f"{name}.{part}" for part in modelslim.OFFSETS):
            if offset in self._checkpoint.names and bool(self._checkpoint.tensor(offset).any()):
                raise CheckpointError(f"{offset}: got a zero point other than 0; weights are read as symmetric")
        weight, scale = (self._checkpoint.tensor(f"{name}.{part}") for part in ("weight", "weight_scale"))
        second = f"{name}.weight_scale_second"
        groups = self._checkpoint.tensor(second) if second in self._checkpoint.names else None
        return modelslim.matrix(weight, scale, groups, bits)

    def _expert_matrix(self, name: str) -> Tensor:
        if f"{name}.weight" in self._checkpoint.names:
            return self._read(name)
        packed = self._checkpoint.tensor(f"{name}.weight_packed")
        return decode_mxfp4(packed, self._checkpoint.tensor(f"{name}.weight_scale")).to(self._dtype)


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 [out, in/2] and uint8 [out, in/32] → float32 [out, in] (model.md 3.3).

    The low nibble of byte j is column 2j. A nibble is sign and E2M1 magnitude; a scale byte s means 2^(s-127), 255 NaN.
    """
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    exponents = torch.arange(256, dtype=torch.float64) - 127
    scales = torch.pow(2.0, exponents).float()
    scales[255] = torch.nan
    groups = values[nibbles.long()].view(*scale.shape, MX_GROUP)
    return groups.mul_(scales[scale.long()][..., None]).flatten(1)


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name → shape of every tensor but the routed experts'."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "lm_head.weight": (config.vocab_size, hidden),
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if config.attn_res_block_size is not None:
        shapes |= _residual_shapes("model.output_attn_res", hidden)
    for layer, kind in enumerate(config.layer_kinds):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if config.attn_res_block_size is not None:
            shapes |= _residual_shapes(f"{prefix}self_attention_res", hidden)
            shapes |= _residual_shapes(f"{prefix}mlp_res", hidden)
        attention = _kda_shapes(config) if kind == "kda" else _mla_shapes(config)
        shapes |= {f"{prefix}self_attn.{name}": shape for name, shape in attention.items()}
        is_dense = layer < config.num_dense_layers
        mlp = _mlp_shapes("", hidden, config.intermediate_size) if is_dense else _moe_shapes(config)
        shapes |= {f"{prefix}mlp.{name}": shape for name, shape in mlp.items()}
    return shapes


def _residual_shapes(name: str, hidden: int) -> dict[str, Shape]:
    return {f"{name}_norm.weight": (hidden,), f"{name}_proj.weight": (1, hidden)}


def _kda_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, heads, dim, channels = config.hidden_size, config.kda_heads, config.kda_head_dim, config.kda_channels
    shapes: dict[str, Shape] = {f"{name}_proj.weight": (channels, hidden) for name in "qkv"}
    shapes |= {f"{name}_conv1d.weight": (channels, 1, config.conv_width) for name in "qkv"}
    shapes |= {
        "f_a_proj.weight": (dim, hidden),
        "f_b_proj.weight": (channels, dim),
        "b_proj.weight": (heads, hidden),
        "A_log": (heads,),
        "dt_bias": (channels,),
        "o_norm.weight": (dim,),
        "o_proj.weight": (hidden, channels),
    }
    if config.full_rank_gate:
        return shapes | {"g_proj.weight": (channels, hidden)}
    return shapes | {"g_a_proj.weight": (dim, hidden), "g_b_proj.weight": (channels, dim)}


def _mla_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    values = heads * config.v_head_dim
    shapes: dict[str, Shape] = {
        "kv_a_proj_with_mqa.weight": (config.cache_width, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank),
        "o_proj.weight": (hidden, values),
    }
    if config.mla_output_gate:
        shapes["g_proj.weight"] = (values, hidden)
    if config.q_lora_rank is None:
        return shapes | {"q_proj.weight": (queries, hidden)}
    return shapes | {
        "q_a_proj.weight": (config.q_lora_rank, hidden),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "q_b_proj.weight": (queries, config.q_lora_rank),
    }


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def _moe_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, latent = config.hidden_size, config.latent_size
    shapes: dict[str, Shape] = {
        "gate.weight": (config.num_experts, hidden),
        "gate.e_score_correction_bias": (config.num_experts,),
    }
    if config.num_shared_experts:
        shared = config.num_shared_experts * config.moe_intermediate_size
        shapes |= _mlp_shapes("shared_experts.", hidden, shared)
    if latent is not None:
        shapes |= {
            "routed_expert_down_proj.weight": (latent, hidden),
            "routed_expert_norm.weight": (latent,),
            "routed_expert_up_proj.weight": (hidden, latent),
        }
    return shapes


def _expert_shapes(config: ModelConfig, names: frozenset[str]) -> dict[str, Shape]:
    """Shapes of the routed experts, packed where the checkpoint has a packed tensor."""
    width, inner = config.expert_width, config.moe_intermediate_size
    shapes: dict[str, Shape] = {}
    for layer in range(config.num_dense_layers, config.num_layers):
        for expert in range(config.num_experts):
            for name, (rows, columns) in {"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)}.items():
                tensor = f"model.layers.{layer}.mlp.experts.{expert}.{name}."
                if f"{tensor}weight_packed" in names:
                    shapes[f"{tensor}weight_packed"] = (rows, columns // 2)
                    shapes[f"{tensor}weight_scale"] = (rows, columns // MX_GROUP)
                else:
                    shapes[f"{tensor}weight"] = (rows, columns)
    return shapes


def _check(checkpoint: Checkpoint, config: ModelConfig) -> None:
    expected = tensor_shapes(config) | _expert_shapes(config, checkpoint.names)
    plain = frozenset(expected)
    for name in sorted(plain & checkpoint.names):
        expected |= _quantized_shapes(checkpoint, name, expected[name])
    extras = {f"{name.removesuffix('weight')}{extra}" for name in plain for extra in modelslim.EXTRAS}
    known = expected.keys() | (extras if checkpoint.description is not None else set())
    problems = [f"missing: {name}" for name in sorted(expected.keys() - checkpoint.names)]
    problems += [f"unknown: {name}" for name in sorted(checkpoint.names - known)]
    for name in sorted(expected.keys() & checkpoint.names):
        given, shape = checkpoint.shape(name), expected[name]
        is_decay = name.endswith(".A_log")
        fits = _fits_heads(given, config.kda_heads) if is_decay else given == shape
        if not fits:
            problems.append(f"shape of {name}: {list(given)}, expected {list(shape)}{' or more' * is_decay}")
        is_code = name in plain and name.endswith((".weight_packed", ".weight_scale"))
        if (checkpoint.dtype(name) == "U8") != is_code:
            problems.append(f"dtype of {name}: {checkpoint.dtype(name)}")
    if problems:
        shown = problems[:SHOWN_PROBLEMS]
        more = f"\n  and {len(problems) - len(shown)} more" * (len(problems) > len(shown))
        raise CheckpointError(f"{len(problems)} tensors do not fit config.json:\n  " + "\n  ".join(shown) + more)


def _quantized_shapes(checkpoint: Checkpoint, name: str, shape: Shape) -> dict[str, Shape]:
    """What is stored of a matrix of this name; nothing new of a plain one."""
    if not name.endswith(".weight"):
        return {}
    module = name.removesuffix(".weight")
    bits = modelslim.bits_of(checkpoint.description, module, checkpoint.dtype(name))
    if bits is None:
        return {}
    if len(shape) != 2 or module.endswith(FLOAT_MODULES):
        raise CheckpointError(
            f"{modelslim.FILE}: {module}.weight: got a scheme of whole numbers; allowed: {modelslim.FLOAT}, since only "
            "experts, projections, embedding and head are read so",
            tensor=f"{module}.weight",
        )
    rows, columns = shape
    has_groups = f"{module}.weight_scale_second" in checkpoint.names
    scales = modelslim.scale_shapes(checkpoint.description, module, bits, shape, has_groups=has_groups)
    return {name: (rows * bits // 8, columns)} | {f"{module}.{scale}": size for scale, size in scales.items()}


def _fits_heads(shape: Shape, heads: int) -> bool:
    return shape == (1, 1, heads, 1) or (len(shape) == 1 and shape[0] >= heads)
