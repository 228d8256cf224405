"""Which drafts of a block become output: the two rules of verification (speculation.md 3.2), a sample at a time.

Row i of a block of D drafts gives the law of the token after the first i of them. What comes out is the first n drafts
and one token more, of row n. Exact match draws the token of each row as a plain step would, and accepts a draft that
equals it: the output is that of plain steps, token by token, whoever made the drafts. Chain rejection accepts more of
drafts that were drawn from a known law, and the output has the law of plain steps, but is another one.

Chain rejection takes its coins and its draws from the hash of plain sampling (k3svc.ops.reference_sampling) under
sample indices that no sample has, so that they depend on (seed, sample, position) alone, and on no draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3svc.ops.reference_sampling import gumbel, noise_bits, noise_keys

COIN = 1 << 40
"""Added to the sample index: the coins that accept drafts."""
DRAW = 2 << 40
"""Added to the sample index: the draws from what a rejection leaves, and of the token after the last draft."""
EMPTY_MASS = 1e-9
"""A residual with less mass is the difference of two equal laws, rounded (speculation.md 3.2)."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The first `num_accepted` drafts, then `token_id`."""

    num_accepted: int
    token_id: int


def match_exactly(drafts: Sequence[int], token_ids: Sequence[int]) -> Verdict:
    """token_ids[i], D + 1 of them, is what plain sampling gives after the first i drafts."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == token_ids[accepted]:
        accepted += 1
    return Verdict(num_accepted=accepted, token_id=token_ids[accepted])


def reject_in_chain(
    drafts: Sequence[int],
    target: Tensor,
    laws: Tensor | None,
    coins: Sequence[float],
    draw: Callable[[int, Tensor], int],
) -> Verdict:
    """target float64 [D + 1, X] are the laws of the rows, laws [D, X] those that the drafts were drawn from, None if
    each draft was certain; coins [D] uniform in (0, 1); draw(i, law) gives the token of row i.

    D must not depend on the drafts: with fewer rows than drafts were made, the number comes from what was known before
    they were (speculation.md 2.4).
    """
    for row, (token_id, coin) in enumerate(zip(drafts, coins, strict=True)):
        p = target[row]
        q = torch.zeros_like(p).index_fill_(0, torch.tensor([token_id]), 1.0) if laws is None else laws[row]
        chance = float(q[token_id])
        # A law that does not give its own draft proves that it is not the draft's; NaN compares false.
        if not (0.0 < chance <= 1.0 and coin * chance < float(p[token_id])):
            return Verdict(num_accepted=row, token_id=draw(row, residual(p, q)))
    return Verdict(num_accepted=len(drafts), token_id=draw(len(drafts), target[len(drafts)]))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejection leaves of p, in proportion: max(p - q, 0), or p where nothing is left. float64 [X]."""
    left = (p - q.nan_to_num()).clamp(min=0.0)
    return left if float(left.sum()) > EMPTY_MASS else p


def chain_coins(seed: int, sample_index: int, positions: Sequence[int]) -> list[float]:
    """The coin of each position, in (0, 1). `seed` signed, as in `SampleRows`."""
    zero = torch.zeros(1, dtype=torch.int64)
    bits = [int(noise_bits(key, zero)) & (1 << 64) - 1 for key in _keys(seed, sample_index + COIN, positions)]
    return [((number >> 12) + 0.5) * 2.0**-52 for number in bits]


def chain_draw(law: Tensor, seed: int, sample_index: int, position: int) -> int:
    """A token from a law in proportion, [X]: the argmax of its logarithm and Gumbel noise."""
    (key,) = _keys(seed, sample_index + DRAW, [position])
    ids = law.nonzero()[:, 0]
    noise = gumbel(noise_bits(key, ids))
    return int(ids[(law[ids].double().log() + noise).argmax()])


def _keys(seed: int, sample_index: int, positions: Sequence[int]) -> Tensor:
    place = torch.tensor(positions, dtype=torch.int64)
    return noise_keys(torch.full_like(place, seed), torch.full_like(place, sample_index), place)
