"""Markov heads of DSpark: a bias on a row's logits by the token chosen before it (speculation.md 2.1).

vanilla: W2 W1[x]. gated: W2 (sigmoid(G [h; e]) * e) with e = W1[x]. rnn: a gated recurrence over the rows of a block.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3svc.model.draft_config import DraftConfig, MarkovKind
from k3svc.ops.table import Ops


@dataclass(frozen=True, kw_only=True)
class MarkovStep:
    bias: Tensor
    """[R, X]."""
    embedded: Tensor
    """[R, r], W1 of the previous token; the confidence head reads it."""
    memory: Tensor
    """[R, r], what the next row needs (rnn)."""


def new_markov_head(config: DraftConfig, weights: Mapping[str, Tensor], ops: Ops) -> "MarkovHead | None":
    """The head that the config names, None without one."""
    if config.markov_head is None:
        return None
    return MarkovHead(config.markov_head, config.markov_rank, weights, ops)


class MarkovHead:
    def __init__(self, kind: MarkovKind, rank: int, weights: Mapping[str, Tensor], ops: Ops) -> None:
        self._kind, self._rank, self._ops = kind, rank, ops
        self._w1 = weights["markov_head.markov_w1.weight"]
        self._w2 = ops.pack_linear(weights["markov_head.markov_w2.weight"])
        self._joint: Any = None
        if kind != "vanilla":
            name = "gate_proj" if kind == "gated" else "joint_proj"
            self._joint = ops.pack_linear(weights[f"markov_head.{name}.weight"])
            self._bias = weights[f"markov_head.{name}.bias"].float()

    def begin(self, count: int) -> Tensor:
        """Memory before the first row, [count, r]."""
        return self._w1.new_zeros(count, self._rank)

    def step(self, state: Tensor, previous: Tensor, memory: Tensor) -> MarkovStep:
        """state [R, H], previous int64 [R], memory [R, r]."""
        embedded = mixed = self._ops.embed(self._w1, previous)
        if self._kind == "gated":
            joined = torch.cat([state, embedded], dim=-1)
            mixed = torch.sigmoid(self._ops.linear(joined, self._joint).float() + self._bias).to(state.dtype) * embedded
        elif self._kind == "rnn":
            joined = torch.cat([memory, embedded, state], dim=-1)
            gate, change, out = (self._ops.linear(joined, self._joint).float() + self._bias).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            memory = (gate * memory.float() + (1 - gate) * torch.tanh(change)).to(state.dtype)
            mixed = torch.tanh(out).to(state.dtype)
        return MarkovStep(bias=self._ops.linear(mixed, self._w2), embedded=embedded, memory=memory)
