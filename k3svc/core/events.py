"""What comes out of a request, step by step: deltas of its samples, then one Finished."""

from collections.abc import Sequence
from dataclasses import dataclass

from k3svc.core.batch import Sampled
from k3svc.core.request import FinishReason


@dataclass(frozen=True, kw_only=True)
class Delta:
    """New tokens of one sample; several tokens may share a delta."""

    index: int
    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[Sampled] = ()
    """One entry per token when the request asked for log-probabilities."""
    finish_reason: FinishReason | None = None
    stopped_by: str = ""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Where the time of a request went (k3svc.v1.Timings); milliseconds."""

    queue_ms: float
    prefill_ms: float
    handoff_tail_ms: float
    ttft_ms: float
    tpot_ms: float
    handoff_bytes: int
    preemptions: int
    prefill_attempts: int
    handoff_ms: float = 0.0
    """From the first to the last landed byte, most of it beside the computation of the prompt."""


@dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """What speculation did for a request; zero without a drafter."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of a request, exactly once."""

    usage: Usage
    timings: Timings
    speculation: SpeculationStats


@dataclass(frozen=True, kw_only=True)
class Load:
    """Current use of a role's pools and queues (k3svc.v1.GetLoadResponse without process figures)."""

    running: int
    waiting: int
    in_transfer: int
    free_pages: int
    total_pages: int
    free_slots: int
    total_slots: int
    draining: bool
    num_tokens: int
    handoff_bytes: int
    outcomes: dict[str, int]
    preemptions: int = 0
