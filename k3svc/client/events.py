"""What a caller sees of a request: events while it runs, a Completion at its end; and what admin calls tell.

Counts, times and finish reasons are the values of `k3svc.core`; everything here is made from messages of k3svc.v1.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from k3svc.core.events import PrefillTarget, SpeculationStats, Timings, Usage
from k3svc.core.request import FinishReason
from k3svc.text.chat import ToolCall
from k3svc.v1 import admin_service_pb2, decode_service_pb2, types_pb2

Value = TypeVar("Value")

FINISH_REASONS: Mapping[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one output position, of the model's unfiltered distribution."""

    token_id: int
    """The chosen token."""
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logarithm) of the most likely tokens, best first."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """First event, exactly once."""

    request_id: str
    seed: int
    """Seed in use, also when the caller gave none."""
    prompt_token_ids: tuple[int, ...]
    fingerprint: str
    """Hash of the model's configuration and weights."""
    variant: str
    """Backend and kernel variant that makes the tokens."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """New output of one sample. Text lags behind token_ids where a character or a stop string is unfinished."""

    index: int
    """Which of the n samples."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Of a conversation: of the answer alone."""
    reasoning: str = ""
    """Of a conversation with thinking: the think channel."""
    tool_calls: tuple[ToolCall, ...] = ()
    replaces_reasoning: bool = False
    """All reasoning of the sample so far was the beginning of the answer after all; `text` repeats it."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token when asked for."""
    finish_reason: FinishReason | None = None
    """Set in the last delta of the sample."""
    stopped_by: str = ""
    """The stop string, or the name of the stop token."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Last event. After a resumed stream, `timings` and `speculation` are those of the last attempt."""

    usage: Usage
    timings: Timings | None
    """None when the stream broke after the last token, so that nothing was left to resume."""
    speculation: SpeculationStats


Event = Started | Delta | Finished


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The whole output of one of the n samples."""

    index: int
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stopped_by: str


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The whole output of a request. The properties are those of the first sample."""

    request_id: str
    seed: int
    prompt_token_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    usage: Usage
    timings: Timings | None
    speculation: SpeculationStats
    attempts: int
    """Calls that were made; 1 when nothing failed."""
    variants: tuple[str, ...]
    """Backend variants that made the tokens. With more than one the promise of equal bits does not hold: the request
    was resumed on a service with other kernels.
    """

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def reasoning(self) -> str:
        return self.samples[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.samples[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The model and the limits of a process (k3svc.v1.GetModelInfoResponse)."""

    role: str
    version: str
    model_name: str
    model: str
    """Hash of configuration and weights."""
    variant: str
    """Backend and kernel variant; equal variants give bit-identical tokens."""
    vocab_size: int
    max_context_tokens: int
    device: str
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ServiceLoad:
    """Current use of a process (k3svc.v1.GetLoadResponse)."""

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
    resident_bytes: int
    pool_bytes: int
    preemptions: int
    draft_steps: int
    accepted_drafts: int
    drafter: str
    """Who proposes tokens to decode now: host:port of a draft service, ngram for decode itself; empty: nobody."""
    speculation_rests: bool
    """Whether speculation rests now, because drafts cost more time than they save."""
    outcomes: Mapping[str, int]
    queued_tokens: int = 0
    """Prompt tokens not yet computed (prefill)."""
    drafter_health: str = ""
    """What is to be expected of the drafter: healthy, slow (decode hardly waits) or down; empty: none."""
    prefill_targets: tuple[PrefillTarget, ...] = ()
    """The prefill services that decode chooses among."""
    prefix_pages: int = 0
    """Pages of the prefix cache (prefill); those that no prompt holds are among free_pages."""
    prefix_snapshots: int = 0
    prefix_queried_tokens: int = 0
    """Prompt tokens that were looked up in it."""
    prefix_hit_tokens: int = 0
    """Those of them that came from it."""
    prefix_evicted_pages: int = 0
    prefix_evicted_snapshots: int = 0


def started_from_pb(pb: decode_service_pb2.GenerateStarted) -> Started:
    return Started(
        request_id=pb.request_id,
        seed=pb.seed,
        prompt_token_ids=tuple(pb.prompt.ids),
        fingerprint=pb.fingerprint.model,
        variant=pb.fingerprint.variant,
    )


def finished_from_pb(pb: decode_service_pb2.GenerateFinished) -> Finished:
    return Finished(
        usage=_same_fields(pb.usage, Usage),
        timings=_same_fields(pb.timings, Timings),
        speculation=speculation_from_pb(pb.speculation),
    )


def speculation_from_pb(pb: decode_service_pb2.SpeculationStats) -> SpeculationStats:
    return dataclasses.replace(
        _same_fields(pb, SpeculationStats),
        steps_by_length=tuple(pb.steps_by_length),
        accepted_by_position=tuple(pb.accepted_by_position),
        drafters=tuple(pb.drafters),
    )


def logprobs_from_pb(entries: Sequence[decode_service_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token_id=entry.chosen.token_id,
            logprob=entry.chosen.logprob,
            top=tuple((top.token_id, top.logprob) for top in entry.top),
        )
        for entry in entries
    )


def model_info_from_pb(pb: admin_service_pb2.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        role=pb.role,
        version=pb.version,
        model_name=pb.model_name,
        model=pb.fingerprint.model,
        variant=pb.fingerprint.variant,
        vocab_size=pb.vocab_size,
        max_context_tokens=pb.max_context_tokens,
        device=pb.device,
        stop_token_ids=tuple(pb.stop_token_ids),
    )


def load_from_pb(pb: admin_service_pb2.GetLoadResponse) -> ServiceLoad:
    targets = tuple(_same_fields(target, PrefillTarget) for target in pb.prefill_targets)
    return dataclasses.replace(_same_fields(pb, ServiceLoad), outcomes=dict(pb.outcomes), prefill_targets=targets)


def _same_fields(pb: Message, cls: type[Value]) -> Value:
    """The dataclass whose fields have the names and types of the message's."""
    assert dataclasses.is_dataclass(cls)
    values: dict[str, Any] = {field.name: getattr(pb, field.name) for field in dataclasses.fields(cls)}
    return cls(**values)
