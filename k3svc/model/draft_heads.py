"""Heads of DSpark: a bias on a row's logits by the token chosen before it, and a confidence (speculation.md 2.1, 2.2).

vanilla: W2 W1[x]. gated: W2 (sigmoid(G [h; e]) * e) with e = W1[x]. rnn: a gated recurrence over the rows of a block.
What a head reads of the rows' states is projected for all rows at once, before the first token is chosen.

Letters: R requests, γ proposals, H hidden size, r rank, X vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from k3svc.model.draft_config import DraftConfig
from k3svc.ops.table import Ops


class MarkovHead:
    """The head of a checkpoint with `markov_head`."""

    def __init__(self, config: DraftConfig, weights: Mapping[str, Tensor], ops: Ops) -> None:
        self._ops = ops
        self._is_recurrent, rank = config.markov_head == "rnn", config.markov_rank
        self._w1 = weights["markov_head.markov_w1.weight"]
        self._w2 = ops.pack_linear(weights["markov_head.markov_w2.weight"])
        self._by_state: Any = None
        if config.markov_head == "vanilla":
            return
        joint = weights[f"markov_head.{'joint' if self._is_recurrent else 'gate'}_proj.weight"]
        self._joint_bias = weights[f"markov_head.{'joint' if self._is_recurrent else 'gate'}_proj.bias"].float()
        # Columns of the gated head: state, embedding; of the recurrent one: memory, embedding, state.
        by_state, by_token = joint[:, : config.hidden_size], joint[:, config.hidden_size :]
        if self._is_recurrent:
            by_token, by_state = joint[:, : 2 * rank], joint[:, 2 * rank :]
        self._by_state, self._by_token = ops.pack_linear(by_state), ops.pack_linear(by_token)
        self._no_memory = self._w1.new_zeros(1, rank)

    def begin(self, states: Tensor) -> "MarkovWalk":
        """Before the first row of blocks, states [R, γ, H]."""
        given = None
        if self._by_state is not None:
            given = self._ops.linear(states.flatten(0, 1), self._by_state).float() + self._joint_bias
            given = given.view(*states.shape[:2], -1)
        return MarkovWalk(self, given)

    def embed(self, tokens: Tensor) -> Tensor:
        """W1: int64 [R] → [R, r]."""
        return self._ops.embed(self._w1, tokens)

    def bias(self, mixed: Tensor) -> Tensor:
        """W2: [R, r] → [R, X]."""
        return self._ops.linear(mixed, self._w2)

    def mix(self, given: Tensor, embedded: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What W2 takes of a row, [R, r], and the memory for the next one; given float32 [R, ·] of the state."""
        if not self._is_recurrent:
            joint = given + self._ops.linear(embedded, self._by_token).float()
            return self._ops.draft.gate(embedded, joint), None
        if memory is None:
            memory = self._no_memory.expand(len(embedded), -1)
        joint = given + self._ops.linear(torch.cat([memory, embedded], dim=1), self._by_token).float()
        return self._ops.draft.recur(joint, memory)


class MarkovWalk:
    """A head on its way along the rows of blocks."""

    def __init__(self, head: MarkovHead, given: Tensor | None) -> None:
        self._head, self._given = head, given
        self._memory: Tensor | None = None
        self.embedded: list[Tensor] = []
        """W1 of the token before each row so far, [R, r]; the confidence head reads them."""

    def bias(self, previous: Tensor) -> Tensor:
        """Of the next row, [R, X], where the tokens before it are int64 [R]."""
        row, embedded = len(self.embedded), self._head.embed(previous)
        self.embedded.append(embedded)
        mixed = embedded
        if self._given is not None:
            mixed, self._memory = self._head.mix(self._given[:, row], embedded, self._memory)
        return self._head.bias(mixed)


class ConfidenceHead:
    """Chance that a row is accepted if those before it are."""

    def __init__(
        self, config: DraftConfig, weights: Mapping[str, Tensor], temperatures: Tensor | None, ops: Ops
    ) -> None:
        """temperatures float32 [γ]; None: ones."""
        self._ops, self._reads_tokens = ops, config.confidence_with_markov
        self._weight = weights["confidence_head.proj.weight"][0].float().contiguous()
        self._bias = float(weights["confidence_head.proj.bias"])
        ones = torch.ones(config.num_proposals)
        self._temperatures = (ones if temperatures is None else temperatures).to(ops.device)

    def __call__(self, states: Tensor, embedded: Sequence[Tensor]) -> Tensor:
        """states [R, γ, H], embedded [R, r] of each row (`MarkovWalk`) → float32 [R, γ]."""
        rows = torch.cat(list(embedded), dim=1).view(*states.shape[:2], -1) if self._reads_tokens else None
        return self._ops.draft.confidences(states, rows, self._weight, self._bias, self._temperatures)
