"""Acceptance of a draft over recorded continuations.

Under the exact-match rule a draft is accepted iff it is the token that plain generation gives, so the continuation of a
prompt is the same with and without drafts, and acceptance can be counted over a recording: at each step the draft
proposes from the context before the anchor, the matching prefix is accepted, and the next anchor is the token after it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.bpe import END_OF_MESSAGE, EOS
from training.draft_net import DraftNet, taps_of
from training.rollouts import CLASSES, MAX_PERIOD, Rollouts, keyed_noise

NUM_TOKENS = 128


@dataclass(kw_only=True)
class Figures:
    """Counts of one class."""

    steps: int = 0
    accepted: int = 0
    tokens: int = 0
    looping_tokens: int = 0
    by_position: list[int] = field(default_factory=list)
    """Steps that accepted at least k drafts, k = 1..γ."""

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / steps with drafts."""
        return 1 + self.accepted / max(self.steps, 1)

    def count(self, matched: int, gamma: int) -> None:
        """One step with `matched` accepted drafts."""
        self.steps += 1
        self.accepted += matched
        self.by_position = self.by_position or [0] * gamma
        for position in range(matched):
            self.by_position[position] += 1

    def __str__(self) -> str:
        rates = " ".join(f"{hits / max(self.steps, 1):.2f}" for hits in self.by_position)
        return f"AL {self.acceptance_length:.3f} steps {self.steps} looping {self.looping_tokens} by position {rates}"


def loop_cut(tokens: list[int], shortest: int = 24) -> int:
    """Length without the looping tail: what follows the first period of a tail that repeats with a period up to 64.

    A tail loops if it repeats its period at least twice more and for `shortest` tokens or longer.
    """
    cut = len(tokens)
    for period in range(1, min(MAX_PERIOD, len(tokens) - 1) + 1):
        start = len(tokens)
        while start > period and tokens[start - 1] == tokens[start - 1 - period]:
            start -= 1
        if len(tokens) - start >= max(2 * period, shortest):
            cut = min(cut, start)
    return cut


def usable_length(tokens: list[int], *, stop_at_message_end: bool) -> tuple[int, int]:
    """(tokens that count, looping tokens cut) of a continuation."""
    if stop_at_message_end:
        ends = [at for at, token in enumerate(tokens) if token in (END_OF_MESSAGE, EOS)]
        tokens = tokens[: ends[0] + 1] if ends else tokens
    cut = loop_cut(tokens)
    return cut, len(tokens) - cut


def walk(matches: list[int], num_tokens: int, gamma: int, figures: Figures) -> None:
    """Count the steps over one continuation; matches[s] drafts fit at anchor s. The last block is clipped."""
    anchor = 0
    while anchor < num_tokens - 1:
        matched = min(matches[anchor], num_tokens - 1 - anchor)
        figures.count(matched, gamma)
        anchor += matched + 1


@torch.no_grad()
def matches_of(
    net: DraftNet, rollouts: Rollouts, stored: tuple[int, ...], *, common_noise: bool = True, at_once: int = 2
) -> tuple[Tensor, Tensor | None]:
    """Drafts that fit at each of the first 128 generated positions, int64 [B, 128], and confidences [B, 128, γ].

    common_noise: sampled requests are drafted with the noise that the target's sampler uses; else greedily.
    """
    config, ids = net.config, rollouts.ids
    gamma, last = config.num_proposals, ids.shape[1] - 1
    found, confidences = [], []
    for first in range(0, len(ids), at_once):
        part = slice(first, first + at_once)
        anchors = (rollouts.lengths[part, None] + torch.arange(NUM_TOKENS, device=ids.device)).clamp(max=last)
        places = anchors[..., None] + torch.arange(gamma + 1, device=ids.device)
        tokens = ids[part].gather(1, places.clamp(max=last).flatten(1)).view_as(places)
        block = torch.full((*anchors.shape, config.num_rows), config.mask_token_id, device=ids.device)
        block[..., 0] = tokens[..., 0]
        taps = taps_of(stored, config.target_layers, rollouts.taps[part])
        hidden = net.rows(taps, block, anchors, torch.zeros_like(anchors))
        seeds = rollouts.seeds[part, None, None].expand_as(places[..., 1:])
        noise = torch.zeros((), device=ids.device)
        if common_noise and bool((rollouts.temperature[part] > 0).any()):
            noise = keyed_noise(seeds.flatten(), places[..., 1:].flatten(), config.vocab_size).float()
            noise = noise.view(*seeds.shape, -1)
        temperature = rollouts.temperature[part, None, None] * common_noise
        drafts, confidence = net.pick(hidden, tokens[..., 0], temperature, noise)
        fits = (drafts == tokens[..., 1:]) & (places[..., 1:] <= last)
        found.append(fits.int().cumprod(-1).sum(-1))
        if confidence is not None:
            confidences.append(confidence)
    return torch.cat(found), torch.cat(confidences) if confidences else None


def measure(
    net: DraftNet,
    rollouts: Rollouts,
    stored: tuple[int, ...],
    *,
    stop_at_message_end: bool,
    common_noise: bool = True,
) -> dict[str, Figures]:
    """Figures by class and temperature over recorded rollouts."""
    matches = matches_of(net, rollouts, stored, common_noise=common_noise)[0].tolist()
    figures: dict[str, Figures] = {}
    for row, (kind, temperature) in enumerate(zip(rollouts.kinds.tolist(), rollouts.temperature.tolist(), strict=True)):
        length = int(rollouts.lengths[row])
        tokens = rollouts.ids[row, length : length + NUM_TOKENS].tolist()
        count, looping = usable_length(tokens, stop_at_message_end=stop_at_message_end)
        entry = figures.setdefault(f"{CLASSES[kind]} T={temperature:g}", Figures())
        entry.tokens += count
        entry.looping_tokens += looping
        walk(matches[row], count, net.config.num_proposals, entry)
    return dict(sorted(figures.items()))
