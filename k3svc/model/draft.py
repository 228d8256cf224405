"""The block draft: DFlash and DSpark from one backbone (speculation.md 1 and 2).

A block [anchor, mask, …] is embedded with the target's table, run once through a few layers that see the context of the
request and the whole block, and read out through the target's lm_head. The context comes from target features alone:
the residual mixture after each tapped layer (`attn_res`, never the running prefix), projected by `FeatureProjector` on
the target's side or here. DSpark adds a Markov bias by the token chosen before and a confidence for each row.

Letters: R requests, G block rows, γ proposals, N rows, H hidden size, X vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3svc.errors import CheckpointError
from k3svc.model.draft_attention import DraftAttention, new_attention
from k3svc.model.draft_config import DraftConfig, DraftSwitches, load_draft_config
from k3svc.model.draft_context import ContextPool
from k3svc.model.draft_heads import ConfidenceHead, MarkovHead
from k3svc.model.draft_rope import Rope
from k3svc.model.draft_weights import load_draft_weights, load_mask_embedding, load_temperatures
from k3svc.ops.table import Ops, SampleRows, Step

Capture = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Turns a function of tensors into a captured one (a graph, a compiled function)."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """What to draft for: one block a request."""

    anchors: Tensor
    """int64 [R], the last committed token, which has no feature yet."""
    base_lens: Tensor
    """int64 [R], context rows before the anchor; the anchor's position."""
    starts: Tensor
    """int64 [R], first context position that was written."""
    slots: Tensor
    """int64 [R], slots of the context pool."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafts of R requests; token k is meant for position base_len + k + 1."""

    tokens: Tensor
    """int64 [R, γ]."""
    confidences: Tensor | None
    """float32 [R, γ]: chance that a row is accepted if those before it are; None without a confidence head."""
    probs: Tensor | None
    """float32 [R, γ, X], the law that each token was drawn from, where asked for."""


class FeatureProjector:
    """fc and hidden_norm: the part of a draft that may live beside the target, [N, taps · H] → [N, H]."""

    NAMES = frozenset({"fc.weight", "hidden_norm.weight"})

    def __init__(self, config: DraftConfig, weights: Mapping[str, Tensor], ops: Ops) -> None:
        self.target_layers = config.target_layers
        self._ops, self._eps = ops, config.rms_norm_eps
        self._fc = ops.pack_linear(weights["fc.weight"].to(ops.activation_dtype))
        self._norm = weights["hidden_norm.weight"].to(ops.device, ops.activation_dtype)

    @classmethod
    def load(cls, path: Path, ops: Ops) -> "FeatureProjector":
        """Read only what projects. Raises CheckpointError."""
        config = load_draft_config(path)
        return cls(config, load_draft_weights(path, config, only=cls.NAMES), ops)

    def project(self, taps: Tensor) -> Tensor:
        """taps [N, taps · H], the mixtures after the tapped layers side by side, in ascending order of layers."""
        return self._ops.rms_norm(self._ops.linear(taps, self._fc), self._norm, self._eps)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    attention: DraftAttention
    input_norm: Tensor
    mlp_norm: Tensor
    gate_up: Any
    down: Any


class DraftModel:
    """A draft checkpoint with the target's embedding and lm_head."""

    def __init__(
        self,
        config: DraftConfig,
        weights: Mapping[str, Tensor],
        *,
        embedding: Tensor,
        lm_head: Tensor,
        ops: Ops,
        mask_embedding: Tensor | None = None,
        temperatures: Tensor | None = None,
        switches: DraftSwitches | None = None,
        capture: Capture | None = None,
    ) -> None:
        """embedding and lm_head [X, H] of the target; temperatures float32 [γ] of the confidences (STS)."""
        for name, table in (("embed_tokens", embedding), ("lm_head", lm_head)):
            if table.shape != (config.vocab_size, config.hidden_size):
                wanted = [config.vocab_size, config.hidden_size]
                raise CheckpointError(f"target's {name}: got shape {list(table.shape)}; the draft needs {wanted}")
        dtype = ops.activation_dtype
        cast = {name: tensor.to(ops.device, dtype) for name, tensor in weights.items()}
        self.config, self._ops = config, ops
        self.switches = switches or DraftSwitches()
        self.projector = FeatureProjector(config, cast, ops)
        rotated = config.head_dim if config.mla is None else config.mla.rope_dim
        self._rope = Rope(rotated, config.rope_theta, config.rope_scaling)
        self._frequencies = self._rope.frequencies.to(ops.device)
        self._layers = [self._load_layer(cast, layer) for layer in range(config.num_layers)]
        self._context = self._pack_context()
        self._norm = cast["norm.weight"]
        self._embedding = embedding.to(ops.device, dtype)
        if mask_embedding is not None:
            self._embedding = self._embedding.clone()
            self._embedding[config.mask_token_id] = mask_embedding.to(dtype)
        self._lm_head = ops.pack_linear(lm_head.to(dtype))
        self._markov = None if config.markov_head is None else MarkovHead(config, cast, ops)
        self._confidence = ConfidenceHead(config, cast, temperatures, ops) if config.confidence_head else None
        wrap = capture or (lambda function: partial(ops.run, function))
        if self.switches.folded_proposal:
            self._run = wrap(self._propose_from_ids if self.switches.embed_in_graph else self._propose_from_rows)
        else:
            self._run = wrap(self._states_from_ids if self.switches.embed_in_graph else self._states_from_rows)

    @classmethod
    def load(
        cls, path: Path, *, embedding: Tensor, lm_head: Tensor, ops: Ops, switches: DraftSwitches | None = None
    ) -> "DraftModel":
        """Read a checkpoint folder, whose own embedding and lm_head take the place of the target's. Raises
        CheckpointError.
        """
        config = load_draft_config(path)
        weights = load_draft_weights(path, config)
        return cls(
            config,
            weights,
            embedding=weights.pop("embed_tokens.weight", embedding),
            lm_head=weights.pop("lm_head.weight", lm_head),
            ops=ops,
            mask_embedding=load_mask_embedding(path, config),
            temperatures=load_temperatures(path, config),
            switches=switches,
        )

    def _load_layer(self, weights: Mapping[str, Tensor], layer: int) -> _Layer:
        base = f"layers.{layer}."
        attention = {
            name.removeprefix(f"{base}self_attn."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"{base}self_attn.")
        }
        gate_up = torch.cat([weights[f"{base}mlp.gate_proj.weight"], weights[f"{base}mlp.up_proj.weight"]])
        return _Layer(
            attention=new_attention(self.config, attention, self._rope, self._ops),
            input_norm=weights[f"{base}input_layernorm.weight"],
            mlp_norm=weights[f"{base}post_attention_layernorm.weight"],
            gate_up=self._ops.pack_linear(gate_up),
            down=self._ops.pack_linear(weights[f"{base}mlp.down_proj.weight"]),
        )

    def _pack_context(self) -> list[Any]:
        parts = [layer.attention.context_weight for layer in self._layers]
        groups = [torch.cat(parts)] if self.switches.stacked_context_kv else parts
        return [self._ops.pack_linear(group) for group in groups]

    def new_context(self, *, num_slots: int, max_window: int, scratch_rows: int) -> ContextPool:
        """Context memory. The window is the checkpoint's, but at most `max_window` rows."""
        return ContextPool(
            [layer.attention for layer in self._layers],
            num_slots=num_slots,
            window=self._window(max_window),
            scratch_rows=scratch_rows,
            ops=self._ops,
        )

    def context_slot_bytes(self, *, max_window: int, scratch_rows: int) -> int:
        """Of a slot of `new_context`."""
        return ContextPool.slot_bytes(
            [layer.attention for layer in self._layers],
            capacity=self._window(max_window) + scratch_rows,
            dtype=self._ops.activation_dtype,
        )

    def _window(self, max_window: int) -> int:
        return min(self.config.window or max_window, max_window)

    def inject(self, features: Tensor, positions: Tensor, slots: Tensor, context: ContextPool) -> None:
        """Write context rows: features [N, H] from `FeatureProjector`, positions and slots int64 [N]."""
        rotation = self._rotation(positions, 1)
        projected = torch.cat([self._ops.linear(features, weight) for weight in self._context], dim=-1)
        for index, part in enumerate(projected.chunk(len(self._layers), dim=-1)):
            context.write(index, slots, positions, *self._layers[index].attention.context_rows(part, rotation))

    def propose(
        self, blocks: Blocks, context: ContextPool, sampling: SampleRows | None = None, *, with_probs: bool = False
    ) -> Proposal:
        """γ drafts a request.

        sampling: the R requests' own parameters (`position` is set here). A sampled request is drafted with the noise
        that the target's sampler will use at the same positions, so that under the exact-match rule both fall on the
        same token wherever their laws allow it; without it, drafts are greedy. For chain rejection, whose coins must
        not depend on the drafts, pass rows with another sample index.
        """
        ids = self._block_ids(blocks)
        given = ids if self.switches.embed_in_graph else self._ops.embed(self._embedding, ids)
        step = self._ops.draft.prepare(
            context.block_meta(blocks.slots, blocks.base_lens, blocks.starts, self.config.num_rows)
        )
        rows = None if sampling is None else replace(sampling, position=blocks.base_lens)
        if self.switches.folded_proposal:
            tokens, confidences, scores = self._run(given, blocks, step, context, rows, with_probs)
        else:
            states = self._run(given, blocks, step, context)
            tokens, confidences, scores = self._pick(states, blocks, rows, with_probs)
        probs = None if scores is None else _laws(scores, tokens, sampling)
        return Proposal(tokens=tokens, confidences=confidences, probs=probs)

    def _rotation(self, positions: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        return self._ops.draft.rotation(positions, num_rows, self._frequencies, self._rope.amplitude)

    def _block_ids(self, blocks: Blocks) -> Tensor:
        """int64 [R · G]."""
        ids = blocks.anchors.new_full((len(blocks.anchors), self.config.num_rows), self.config.mask_token_id)
        ids[:, 0] = blocks.anchors
        return ids.flatten()

    def _propose_from_ids(
        self, ids: Tensor, blocks: Blocks, step: Step, context: ContextPool, rows: SampleRows | None, with_scores: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self._pick(self._states_from_ids(ids, blocks, step, context), blocks, rows, with_scores)

    def _propose_from_rows(
        self, x: Tensor, blocks: Blocks, step: Step, context: ContextPool, rows: SampleRows | None, with_scores: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self._pick(self._states_from_rows(x, blocks, step, context), blocks, rows, with_scores)

    def _states_from_ids(self, ids: Tensor, blocks: Blocks, step: Step, context: ContextPool) -> Tensor:
        return self._states_from_rows(self._ops.embed(self._embedding, ids), blocks, step, context)

    def _states_from_rows(self, x: Tensor, blocks: Blocks, step: Step, context: ContextPool) -> Tensor:
        """Embedded rows [R · G, H] → normed final states of the predicting rows, [R, γ, H]."""
        ops, config, count = self._ops, self.config, self.config.num_rows
        rotation = self._rotation(blocks.base_lens, count)
        for index, layer in enumerate(self._layers):
            attention = layer.attention
            normed = ops.rms_norm(x, layer.input_norm, config.rms_norm_eps)
            query, keys, values = (
                part.unflatten(0, (-1, count))  # type: ignore[no-untyped-call]
                for part in attention.block_rows(normed, rotation)
            )
            mixed = ops.draft.block_attention(
                query, keys, values, *context.layer(index), step, scale=attention.scale, is_causal=config.is_causal
            )
            x = x + attention.output(mixed.flatten(0, 1))
            normed = ops.rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            x = x + ops.linear(ops.glu(ops.linear(normed, layer.gate_up), "silu", 1.0, None), layer.down)
        predicting = x.view(-1, count * config.hidden_size)[:, config.first_predicting_row * config.hidden_size :]
        states = ops.rms_norm(predicting.reshape(-1, config.hidden_size), self._norm, config.rms_norm_eps)
        return states.view(-1, count - config.first_predicting_row, config.hidden_size)

    def _pick(
        self, states: Tensor, blocks: Blocks, rows: SampleRows | None, with_scores: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Tokens left to right; each Markov bias reads the token chosen before it. rows: at positions base_lens.

        Tokens [R, γ], confidences [R, γ], and scores float32 [R, γ, X] that the tokens were chosen from.
        """
        logits = self._ops.linear(states.flatten(0, 1), self._lm_head).float().view(*states.shape[:2], -1)
        walk = None if self._markov is None else self._markov.begin(states)
        previous = blocks.anchors
        tokens, scores = [], []
        for row in range(self.config.num_proposals):
            bias = None if walk is None else walk.bias(previous)
            previous, score = self._ops.draft.choose(logits[:, row], bias, self.config.mask_token_id, rows, row + 1)
            tokens.append(previous)
            if with_scores:
                scores.append(score)
        confidences = None
        if self._confidence is not None:
            confidences = self._confidence(states, walk.embedded if walk is not None else ())
        return torch.stack(tokens, dim=1), confidences, torch.stack(scores, dim=1) if scores else None


def _laws(scores: Tensor, chosen: Tensor, sampling: SampleRows | None) -> Tensor:
    """float32 [R, γ, X] that `chosen` [R, γ] was drawn from: one-hot for greedy rows, softmax at the temperature for
    others.
    """
    greedy = torch.zeros_like(scores).scatter_(-1, chosen[..., None], 1.0)
    if sampling is None:
        return greedy
    assert not any(sampling.host_filtered), "a draft's law has no filters: pass rows without them"
    temperature = sampling.temperature[:, None, None]
    return torch.where(temperature > 0, (scores / temperature.clamp(min=1e-5)).softmax(-1), greedy)
