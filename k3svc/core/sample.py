"""What the decode scheduler keeps of each output of a request, and what it tells of it."""

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from k3svc.core.batch import Fork, Sampled
from k3svc.core.request import FinishReason, GenerateRequest, Matcher


@dataclass(frozen=True, kw_only=True)
class DraftBlock:
    """Proposals for the next tokens of a sample."""

    tokens: Sequence[int]
    laws: Sequence[bytes] = ()
    """`DecodeRow.draft_laws`."""


class Phase(enum.Enum):
    """Where a sample is in its life; it only leaves ENDED by being forgotten."""

    WAITING = "waiting"
    TRANSFER = "transfer"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(kw_only=True, eq=False)
class Sample:
    """One of the n outputs of a request; owned by the scheduler."""

    key: str
    request: GenerateRequest
    index: int
    output: list[int]
    """Output tokens, the absorbed ones included."""
    prompt_ids: frozenset[int]
    counts: dict[int, int]
    """Output token id → occurrences."""
    phase: Phase = Phase.WAITING
    slot: int | None = None
    pages: "array[int]" = field(default_factory=lambda: array("q"))
    """An array, since each step copies it whole: that of 131,072 tokens takes 0.1 ms as a list and 1 us as this."""
    num_cached: int = 0
    """Tokens whose state is in the caches."""
    num_preemptions: int = 0
    matcher: Matcher | None = None
    """Where the output stands in the grammar of the request; None: there is none."""
    paused: bool = False
    """Nobody reads its tokens."""
    num_steps: int = 0
    """Steps in flight that have a row of it; its memory is theirs until they are booked."""
    fork: Fork | None = None
    """The copy that its first step begins with; None: its state has landed, or is there."""
    rank: tuple[int, int, int]
    """Order of service: priority, serial number of the request, index."""

    @property
    def sample_index(self) -> int:
        """By which the noise of samples differs."""
        return self.request.first_sample + self.index

    @property
    def num_known(self) -> int:
        return len(self.request.prompt) + len(self.output)


@dataclass(kw_only=True, eq=False)
class Job:
    """A hand-off to obtain. The first sample's memory receives it; the others are forked from it."""

    samples: list[Sample]
    admitted: float | None = None

    @property
    def lead(self) -> Sample:
        return self.samples[0]


@dataclass(frozen=True, kw_only=True)
class Emission:
    """What one step gave one sample: tokens, or the reason why it failed, or both in this order."""

    sample: Sample
    tokens: Sequence[Sampled] = ()
    finish_reason: FinishReason | None = None
    stop_token: bool = False
    """The last token is a stop token: part of the ids, not of the text."""
    failure: str | None = None
    num_drafts: int = 0
    """Drafts that were verified."""
    num_accepted: int = 0
    """Drafts among them that were right, those after the end of the output too."""
