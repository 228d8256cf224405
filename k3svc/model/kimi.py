"""The text model of Kimi-K3 and Kimi-Linear over an operation table: token ids in, hidden rows and logits out."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.model.attn_res import BlockResidual, PlainResidual, Residual
from k3svc.model.checkpoint import Checkpoint, Progress
from k3svc.model.config import ModelConfig
from k3svc.model.kda import KdaMixer
from k3svc.model.mla import MlaMixer
from k3svc.model.moe import DenseFfn, MoeFfn
from k3svc.model.weights import Weights
from k3svc.ops.few_table import FewOps, Norm
from k3svc.ops.table import Cache, CacheSpec, LayerCache, Mode, Ops, Step, StepMeta


class Mixer(Protocol):
    """Token mixing of one layer: normed rows [N, H] → [N, H], caches updated in place."""

    def extend(self, x: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Prompt rows."""
        ...

    def decode(self, x: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """One row per sequence."""
        ...

    def verify(self, x: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """An anchor and drafts per sequence."""
        ...

    def few(
        self, few: FewOps, x: Tensor, norm: Norm, cache: LayerCache, step: Step, mode: Mode, base: Tensor | None
    ) -> Tensor:
        """base + decode or verify of the rows, which are yet to be normed."""
        ...


class Ffn(Protocol):
    """The other half of a layer: normed rows [N, H] → [N, H], of which the first num_live count."""

    def __call__(self, x: Tensor, num_live: int) -> Tensor: ...

    def few(self, few: FewOps, x: Tensor, norm: Norm, base: Tensor) -> Tensor:
        """base + the same of rows that are yet to be normed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Taps:
    """Layers whose outputs a draft reads, and who gets them."""

    layers: tuple[int, ...]
    """Ascending, below the last layer."""
    sink: Callable[[Tensor], None]
    """Called once a step with [N, len(layers) · H] in the activation dtype, as soon as the last of them is there."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer."""

    input_norm: Tensor
    mixer: Mixer
    ffn_norm: Tensor
    ffn: Ffn


class Model:
    """A loaded checkpoint. Immutable after loading; caches and steps come with each call."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights) -> None:
        if config.chunk_size != ops.chunk:
            raise BackendError(f"the model's chunk size is {config.chunk_size}, that of {ops.name} {ops.chunk}")
        self.config = config
        self._ops = ops
        self._embedding = weights.matrix("model.embed_tokens").to(ops.device)
        self._layers = [_layer(config, ops, weights, index) for index in range(config.num_layers)]
        self._residual: Residual = PlainResidual()
        if config.attn_res_block_size is not None:
            self._residual = BlockResidual(config, ops, weights, config.attn_res_block_size)
        self._norm = weights.norm("model.norm").to(ops.device)
        self._head = weights.linear(ops, "lm_head")

    @classmethod
    def load(cls, directory: Path, ops: Ops, progress: Progress | None = None) -> "Model":
        """Reads config.json and the weights, one tensor at a time. Raises CheckpointError."""
        config = ModelConfig.from_directory(directory)
        with closing(Checkpoint(directory, num_layers=config.num_layers, progress=progress)) as checkpoint:
            return cls(config, ops, Weights(checkpoint, config, ops.activation_dtype))

    def forward(
        self,
        ids: Tensor,
        meta: StepMeta,
        cache: Cache,
        mode: Mode,
        on_layer: Callable[[int], None] | None = None,
        *,
        step: Step | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """ids int64 [N] → rows after the final norm [N, H]; on_layer(i) is called when layer i's caches are final.

        step: what `Ops.prepare` made of meta, mode and the cache's spec, from a caller who needs it for `Ops.commit`;
        None prepares one. The tap of layer i is what layer i + 1's mixer reads, before its norm: with attention
        residuals the mixture, else the sum.
        """
        ops = self._ops
        step = ops.prepare(meta, mode, cache.spec) if step is None else step
        live, layers = ops.expert_rows(meta, mode), () if taps is None else taps.layers
        assert max(layers, default=0) < len(self._layers) - 1, f"tapped layers {layers}"
        if mode == "extend" or on_layer is not None:
            sink = None if taps is None else taps.sink
            return self._rows(ids, step, cache, mode, live, layers, on_layer, sink)[0]
        hidden, tapped = ops.run(self._rows, ids, step, cache, mode, live, layers)
        if taps is not None and tapped is not None:
            taps.sink(tapped)
        return hidden

    def _rows(
        self,
        ids: Tensor,
        step: Step,
        cache: Cache,
        mode: Mode,
        live: int | None,
        layers: tuple[int, ...],
        on_layer: Callable[[int], None] | None = None,
        sink: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Rows after the final norm, and the taps of `layers` side by side, if any; `sink` gets those early."""
        ops, eps = self._ops, self.config.rms_norm_eps
        parts: list[Tensor] = []
        tapped: Tensor | None = None
        few = ops.few if ops.few is not None and ops.few.takes(step) else None
        stream = self._residual.open(ops.embed(self._embedding, ids))
        for index, layer in enumerate(self._layers):
            entering = stream.mixer_input(index)
            if index - 1 in layers:
                parts.append(entering)
                if len(parts) == len(layers):
                    tapped = torch.cat(parts, dim=1)
                    if sink is not None:
                        sink(tapped)
            pool = cache.layer(index)
            if few is not None:
                base = stream.mixer_base(index)
                stream.take_sum(layer.mixer.few(few, entering, (layer.input_norm, eps), pool, step, mode, base))
                total = layer.ffn.few(few, stream.ffn_input(index), (layer.ffn_norm, eps), stream.ffn_base())
                stream.take_sum(total)
                continue
            x = ops.rms_norm(entering, layer.input_norm, eps)
            stream.add_mixer(index, _mix(layer.mixer, mode)(x, pool, step))
            if on_layer is not None:
                on_layer(index)
            x = ops.rms_norm(stream.ffn_input(index), layer.ffn_norm, eps)
            stream.add_ffn(index, layer.ffn(x, x.shape[0] if live is None else live))
        return ops.rms_norm(stream.output(), self._norm, eps), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows after the final norm [R, H] → float32 [R, X]."""
        return self._ops.linear(hidden, self._head).float()


def cache_spec(
    config: ModelConfig,
    *,
    num_slots: int,
    num_pages: int,
    page_size: int,
    state_dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
) -> CacheSpec:
    """Geometry of the pools that the model needs."""
    return CacheSpec(
        kda_layers=tuple(layer for layer, kind in enumerate(config.layer_kinds) if kind == "kda"),
        mla_layers=tuple(layer for layer, kind in enumerate(config.layer_kinds) if kind == "mla"),
        kda_heads=config.kda_heads,
        kda_key_dim=config.kda_head_dim,
        kda_value_dim=config.kda_head_dim,
        conv_width=config.conv_width,
        kv_lora_rank=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        vocab_size=config.vocab_size,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=page_size,
        state_dtype=state_dtype,
        kv_dtype=kv_dtype,
    )


def _mix(mixer: Mixer, mode: Mode) -> Callable[[Tensor, LayerCache, Step], Tensor]:
    match mode:
        case "extend":
            return mixer.extend
        case "decode":
            return mixer.decode
        case "verify":
            return mixer.verify


def _layer(config: ModelConfig, ops: Ops, weights: Weights, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    mixer = KdaMixer if config.layer_kinds[index] == "kda" else MlaMixer
    ffn = DenseFfn if index < config.num_dense_layers else MoeFfn
    return Layer(
        input_norm=weights.norm(f"{prefix}input_layernorm").to(ops.device),
        mixer=mixer(config, ops, weights, f"{prefix}self_attn."),
        ffn_norm=weights.norm(f"{prefix}post_attention_layernorm").to(ops.device),
        ffn=ffn(config, ops, weights, f"{prefix}mlp."),
    )
