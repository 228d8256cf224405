"""Which of several services gets the next piece of work: the decisions alone, for callers who know how targets are.

Prompts go to prefill services by prefix affinity within a bound of load: rendezvous hashing (Thaler and Ravishankar,
1998) gives each prefix an order of targets of its own, in which a new or a lost target moves no more than its own share
of the prefixes; bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018) pass over a target that has too much to do.

Requests go to decode services in proportion to their free room by smooth weighted round robin: a caller's own requests
are spread as evenly as the weights allow, and callers that saw the same loads do not all run to the same target.
"""

import hashlib
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

LEAST_ROOM = 0.01
"""Room of a target that is full: it queues what comes, so it is chosen where all are full."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a target says it is."""

    serving: bool
    """It takes work: healthy and not draining."""
    free_share: float = 1.0
    """Of its pages or of its slots, whichever is scarcer; 0 to 1."""
    total_slots: int = 0
    """0: unknown."""
    waiting: int = 0
    """Requests that wait for admission."""
    queued_tokens: int = 0
    """Prompt tokens not yet computed."""


@dataclass(frozen=True, kw_only=True)
class Affinity:
    """Prompts that begin alike go to the same target, within a bound of load."""

    num_blocks: int = 2
    """Leading blocks of a prompt that decide; 0: none do, the least loaded target is taken."""
    block_tokens: int = 128
    """Tokens of a block; part of one decides nothing."""
    bound: float = 1.25
    """A target that has more to do than so many times the mean is passed over; above 1."""

    def key(self, prompt: Sequence[int]) -> bytes:
        """Equal for prompts with the same leading whole blocks; empty where there is no whole block."""
        count = min(self.num_blocks, len(prompt) // self.block_tokens) * self.block_tokens
        return hashlib.blake2b(struct.pack(f"<{count}I", *prompt[:count]), digest_size=16).digest() if count else b""

    def choose(self, key: bytes, work: Mapping[str, int], tokens: int) -> tuple[str, str]:
        """The target of a prompt of `tokens` tokens, and what decided: prefix, bound (the favourite of the prefix has
        too much to do) or load. `work`: tokens that each target that may be chosen has to do.

        With a key, the first in its order that has no more than `bound` times what would be the mean with the prompt;
        so no target ever has more than that and one prompt. Without, the first of those with the least.
        """
        if not key:
            return min(work, key=lambda name: work[name]), "load"
        limit = self.bound * (sum(work.values()) + tokens) / len(work)
        rank, chosen = next((rank, name) for rank, name in enumerate(ranked(key, work)) if work[name] <= limit)
        return chosen, "bound" if rank else "prefix"


def ranked(key: bytes, names: Collection[str]) -> list[str]:
    """The names in the order that belongs to a key: the same everywhere, whatever the order they are given in."""

    def score(name: str) -> tuple[bytes, str]:
        return hashlib.blake2b(name.encode(), digest_size=8, key=key).digest(), name

    return sorted(names, key=score)


def room(report: Report | None, new: int) -> float:
    """How much of a decode service is free, above 0. `new`: requests sent to it since the report; None: no report."""
    if report is None:
        return 1.0
    # A request takes at least one slot; how many pages it will take is not known.
    taken = new / report.total_slots if report.total_slots else 0.0
    return max(LEAST_ROOM, report.free_share - taken) / (1 + report.waiting)


class WeightedTurns:
    """Smooth weighted round robin: over any stretch each name is chosen in proportion to its weight."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def next(self, weights: Mapping[str, float]) -> str:
        """One of the names; weights are above 0. Of equals the first. A name that was not there before, or was left out
        the last time, begins without credit: it gets its share from now on, not what it has missed.
        """
        total = sum(weights.values())
        self._credit = {name: self._credit.get(name, 0.0) + weight / total for name, weight in weights.items()}
        chosen = max(self._credit, key=lambda name: self._credit[name])
        self._credit[chosen] -= 1.0
        return chosen
