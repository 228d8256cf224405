"""Messages of DraftService to the values of k3svc.engine.draft_protocol, and back.

What a peer sends is untrusted: lists that do not fit together raise InvalidRequest with the path of the field. Ranges
of single values are the business of the engine and, for answers, of the caller.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from k3svc.core.request import SamplingParams
from k3svc.engine.draft_protocol import (
    ContextStart,
    DraftProfile,
    SampleCommit,
    SampleFeatures,
    SampleGap,
    SampleOpen,
    SampleProposal,
    SessionAnswer,
    SessionStep,
)
from k3svc.errors import InvalidRequest
from k3svc.v1 import draft_service_pb2 as pb

MAX_LISTED = 4096
"""Most samples of one message."""

Parsed = TypeVar("Parsed", bound=Message)


def profile_to_pb(profile: DraftProfile) -> pb.DraftProfile:
    return pb.DraftProfile(**dataclasses.asdict(profile))


def profile_from_pb(given: pb.DraftProfile) -> DraftProfile:
    names = [field.name for field in dataclasses.fields(DraftProfile) if field.name != "target_layers"]
    values: dict[str, Any] = {name: getattr(given, name) for name in names}
    return DraftProfile(target_layers=tuple(given.target_layers), **values)


def context_start_to_pb(start: ContextStart) -> pb.PushContextStart:
    return pb.PushContextStart(
        profile=profile_to_pb(start.profile),
        ticket=start.ticket,
        attempt=start.attempt,
        num_tokens=start.num_tokens,
    )


def context_start_from_pb(given: pb.PushContextStart) -> ContextStart:
    return ContextStart(
        profile=profile_from_pb(given.profile),
        ticket=given.ticket,
        attempt=given.attempt,
        num_tokens=given.num_tokens,
    )


def step_from_pb(given: pb.SessionRequest, payload: memoryview, row_bytes: int) -> SessionStep:
    """payload: the rows of `features`, wherever they came from. Raises InvalidRequest."""
    if len(given.closes) > MAX_LISTED:
        raise InvalidRequest("closes", f"{len(given.closes)} entries", f"at most {MAX_LISTED}")
    return SessionStep(
        step=given.step,
        closes=tuple(given.closes),
        opens=_opens_from_pb(given.opens),
        features=_features_from_pb(given.features, payload, row_bytes),
        commits=_commits_from_pb(given.commits),
    )


def step_to_pb(step: SessionStep, *, inline: bool = True) -> pb.SessionRequest:
    """With the features' rows as a payload in the message, unless they are elsewhere."""
    message = pb.SessionRequest(step=step.step, closes=step.closes)
    if step.opens:
        message.opens.CopyFrom(_opens_to_pb(step.opens))
    if step.features:
        message.features.CopyFrom(_features_to_pb(step.features))
        if inline:
            message.features.payload = b"".join(piece.data for piece in step.features)
    if step.commits:
        message.commits.CopyFrom(
            pb.DraftCommits(
                handles=[commit.handle for commit in step.commits],
                attempts=[commit.attempt for commit in step.commits],
                base_lens=[commit.base_len for commit in step.commits],
                counts=[commit.count for commit in step.commits],
                anchors=[commit.anchor for commit in step.commits],
                wants=[commit.want for commit in step.commits],
            )
        )
    return message


def _features_to_pb(features: Sequence[SampleFeatures]) -> pb.DraftFeatures:
    return pb.DraftFeatures(
        handles=[piece.handle for piece in features],
        attempts=[piece.attempt for piece in features],
        starts=[piece.start for piece in features],
        counts=[piece.num_rows for piece in features],
    )


def answer_to_pb(answer: SessionAnswer) -> pb.SessionResponse:
    message = pb.SessionResponse(
        step=answer.step, credits=answer.credits, draft_us=answer.draft_us, refused=answer.refused
    )
    if answer.proposals:
        message.proposals.CopyFrom(
            pb.DraftProposals(
                handles=[made.handle for made in answer.proposals],
                attempts=[made.attempt for made in answer.proposals],
                base_lens=[made.base_len for made in answer.proposals],
                counts=[len(made.tokens) for made in answer.proposals],
                tokens=[token for made in answer.proposals for token in made.tokens],
                confidences=[chance for made in answer.proposals for chance in made.confidences],
                truncated=[made.truncated for made in answer.proposals],
                probs=[made.probs for made in answer.proposals] if any(made.probs for made in answer.proposals) else (),
            )
        )
    if answer.gaps:
        message.gaps.CopyFrom(
            pb.DraftGaps(
                handles=[gap.handle for gap in answer.gaps],
                attempts=[gap.attempt for gap in answer.gaps],
                starts=[gap.start for gap in answer.gaps],
            )
        )
    return message


def request_from_bytes(data: bytes) -> pb.SessionRequest:
    """Raises InvalidRequest for bytes that are none."""
    return _parsed(pb.SessionRequest(), data)


def response_from_bytes(data: bytes) -> pb.SessionResponse:
    """Raises InvalidRequest for bytes that are none."""
    return _parsed(pb.SessionResponse(), data)


def answer_from_pb(given: pb.SessionResponse) -> SessionAnswer:
    """Raises InvalidRequest for lists that do not fit together."""
    gaps = given.gaps
    count = _common_length("gaps", gaps, ("handles", "attempts", "starts"))
    return SessionAnswer(
        step=given.step,
        credits=given.credits,
        draft_us=given.draft_us,
        proposals=_proposals_from_pb(given.proposals),
        gaps=[SampleGap(handle=gaps.handles[i], attempt=gaps.attempts[i], start=gaps.starts[i]) for i in range(count)],
        refused=tuple(given.refused),
    )


def _parsed(message: Parsed, data: bytes) -> Parsed:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidRequest("message", f"{len(data)} bytes", f"a {type(message).__name__}") from error
    return message


def _opens_from_pb(given: pb.DraftOpens) -> list[SampleOpen]:
    names = ("handles", "attempts", "base_lens", "anchors", "wants", "tickets", "temperatures", "top_ks", "top_ps")
    count = _common_length("opens", given, (*names, "min_ps", "seeds", "sample_indices", "with_probs"))
    return [
        SampleOpen(
            handle=given.handles[i],
            attempt=given.attempts[i],
            base_len=given.base_lens[i],
            anchor=given.anchors[i],
            want=given.wants[i],
            ticket=given.tickets[i],
            params=SamplingParams(
                temperature=given.temperatures[i],
                top_k=given.top_ks[i],
                top_p=given.top_ps[i],
                min_p=given.min_ps[i],
                seed=given.seeds[i],
            ),
            sample_index=given.sample_indices[i],
            with_probs=given.with_probs[i],
        )
        for i in range(count)
    ]


def _opens_to_pb(opens: Sequence[SampleOpen]) -> pb.DraftOpens:
    return pb.DraftOpens(
        handles=[opened.handle for opened in opens],
        attempts=[opened.attempt for opened in opens],
        base_lens=[opened.base_len for opened in opens],
        anchors=[opened.anchor for opened in opens],
        wants=[opened.want for opened in opens],
        tickets=[opened.ticket for opened in opens],
        temperatures=[opened.params.temperature for opened in opens],
        top_ks=[opened.params.top_k for opened in opens],
        top_ps=[opened.params.top_p for opened in opens],
        min_ps=[opened.params.min_p for opened in opens],
        seeds=[opened.params.seed for opened in opens],
        sample_indices=[opened.sample_index for opened in opens],
        with_probs=[opened.with_probs for opened in opens],
    )


def _features_from_pb(given: pb.DraftFeatures, payload: memoryview, row_bytes: int) -> list[SampleFeatures]:
    count = _common_length("features", given, ("handles", "attempts", "starts", "counts"))
    total = sum(given.counts) * row_bytes
    if total != payload.nbytes:
        raise InvalidRequest("features.payload", f"{payload.nbytes} bytes", f"{total} bytes, rows of {row_bytes}")
    pieces, position = [], 0
    for i in range(count):
        size = given.counts[i] * row_bytes
        pieces.append(
            SampleFeatures(
                handle=given.handles[i],
                attempt=given.attempts[i],
                start=given.starts[i],
                num_rows=given.counts[i],
                data=payload[position : position + size],
            )
        )
        position += size
    return pieces


def _commits_from_pb(given: pb.DraftCommits) -> list[SampleCommit]:
    count = _common_length("commits", given, ("handles", "attempts", "base_lens", "counts", "anchors", "wants"))
    return [
        SampleCommit(
            handle=given.handles[i],
            attempt=given.attempts[i],
            base_len=given.base_lens[i],
            count=given.counts[i],
            anchor=given.anchors[i],
            want=given.wants[i],
        )
        for i in range(count)
    ]


def _proposals_from_pb(given: pb.DraftProposals) -> list[SampleProposal]:
    count = _common_length("proposals", given, ("handles", "attempts", "base_lens", "counts", "truncated"))
    total = sum(given.counts)
    for name, allowed in (("tokens", (total,)), ("confidences", (0, total)), ("probs", (0, count))):
        if len(getattr(given, name)) not in allowed:
            raise InvalidRequest(f"proposals.{name}", f"{len(getattr(given, name))} entries", f"{allowed[-1]}")
    made, position = [], 0
    for i in range(count):
        end = position + given.counts[i]
        made.append(
            SampleProposal(
                handle=given.handles[i],
                attempt=given.attempts[i],
                base_len=given.base_lens[i],
                tokens=tuple(given.tokens[position:end]),
                confidences=tuple(given.confidences[position:end]),
                truncated=given.truncated[i],
                probs=given.probs[i] if given.probs else b"",
            )
        )
        position = end
    return made


def _common_length(path: str, given: Any, names: Sequence[str]) -> int:
    """The length of all these lists. Raises InvalidRequest."""
    count = len(getattr(given, names[0]))
    if count > MAX_LISTED:
        raise InvalidRequest(f"{path}.{names[0]}", f"{count} entries", f"at most {MAX_LISTED}")
    for name in names:
        if len(getattr(given, name)) != count:
            raise InvalidRequest(f"{path}.{name}", f"{len(getattr(given, name))} entries", f"{count}, as {names[0]}")
    return count
