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
    """What speculation did for a request, over all its samples (k3svc.v1.SpeculationStats); zero without a drafter."""

    steps: int = 0
    """Steps that gave tokens, each sample's counted apart."""
    steps_with_drafts: int = 0
    """Those that verified drafts."""
    proposed: int = 0
    """Drafts that were verified."""
    accepted: int = 0
    """Drafts among them that were right."""
    late: int = 0
    """Steps without drafts because the proposals asked for had not come; what answers that it has none is not late."""
    salvaged: int = 0
    """Steps with drafts of a proposal that had come late."""
    gaps: int = 0
    """Proposals that were made from an incomplete context."""
    wait_ms: float = 0.0
    """Time between steps in which proposals were waited for."""
    draft_ms: float = 0.0
    """Time that making the proposals took where they were made, most of it waited for."""
    verify_ms: float = 0.0
    """Compute time of the steps with drafts, whoever else was in them."""
    commit_ms: float = 0.0
    """Part of it in which states advanced by accepted drafts."""
    steps_by_length: tuple[int, ...] = ()
    """Steps that verified 1, 2, … drafts."""
    accepted_by_position: tuple[int, ...] = ()
    """Steps that accepted at least 1, 2, … drafts."""
    drafters: tuple[str, ...] = ()
    """Who proposed the drafts that were verified: host:port of a draft service, ngram for decode itself."""
    rested: int = 0
    """Steps without drafts because speculation rested: drafts had cost more time than they saved."""

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a step with drafts: 1 + accepted / steps_with_drafts; None where there is none."""
        return 1 + self.accepted / self.steps_with_drafts if self.steps_with_drafts else None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of a request, exactly once."""

    usage: Usage
    timings: Timings
    speculation: SpeculationStats


@dataclass(frozen=True, kw_only=True)
class PrefillTarget:
    """A prefill service as a decode service sees it."""

    address: str
    state: str
    """serving; busy: it failed or refused lately; down: it drains or does not answer."""
    chosen: int
    """Prompts that were given to it, attempts counted apart."""
    queued_tokens: int
    """Prompt tokens that it has to do, as far as is known here."""


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
    draft_steps: int = 0
    """Steps that verified drafts, of requests that have ended."""
    accepted_drafts: int = 0
    """Drafts that those steps accepted."""
    prefix_pages: int = 0
    """Pages of the prefix cache; those that no prompt holds are among free_pages."""
    prefix_snapshots: int = 0
    """States that it keeps."""
    prefix_queried_tokens: int = 0
    """Tokens of the prompts that were looked up in it."""
    prefix_hit_tokens: int = 0
    """Tokens of them that came from it."""
    prefix_evicted_pages: int = 0
    """Pages that it gave up for prompts."""
    prefix_evicted_snapshots: int = 0
    """States that it gave up for others."""
    drafter: str = ""
    """Who proposes tokens to decode now: host:port of a draft service, ngram for decode itself; empty: nobody."""
    speculation_rests: bool = False
    """Whether speculation rests now, because drafts cost more time than they save."""
    drafter_health: str = ""
    """What is to be expected of the drafter: healthy, slow (half of its last replies were late, so decode hardly waits)
    or down (there is nobody to ask); empty: no speculation.
    """
    queued_tokens: int = 0
    """Prompt tokens not yet computed (prefill)."""
    prefill_targets: tuple[PrefillTarget, ...] = ()
    """The prefill services that decode chooses among."""
