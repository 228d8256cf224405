"""Requests and answers of the gateway's protocol against values of core."""

import json
import math
import secrets
from dataclasses import replace
from typing import Any

import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb2

from k3svc.core.batch import Sampled
from k3svc.core.events import Delta, Finished, SpeculationStats, Timings, Usage
from k3svc.core.request import FinishReason, GenerateRequest, Room, SamplingParams, StopParams
from k3svc.errors import InvalidRequest
from k3svc.gateway.answers import Answer
from k3svc.gateway.requests import DRAWN_SEED, field_names, generate_request_from_pb

UUID = "01a228e8-7b8f-77fd-82a2-ffb149ef3b83"


def translate(pb: pb2.GenerateRequest, *, seed: int = 4, prefill: tuple[str, ...] | None = ()) -> GenerateRequest:
    return generate_request_from_pb(pb, seed=seed, max_context_tokens=100, prefill=prefill)


def message(request_id: str = "r", **sampling: Any) -> pb2.GenerateRequest:
    return pb2.GenerateRequest(
        request_id=request_id,
        tokenized=pb2.TokenizedInput(input_ids=[5, 6]),
        sampling_params=pb2.SamplingParams(**sampling),
    )


def test_every_field_arrives() -> None:
    pb = message(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.25,
        max_new_tokens=9,
        stop=["x", "yz"],
        stop_token_ids=[3, 4],
        n=2,
        min_new_tokens=1,
        ignore_eos=True,
        logit_bias={"8": 1.5},
    )
    pb.return_logprob, pb.top_logprobs_num, pb.logprob_start_len = True, 3, -1
    assert translate(pb) == GenerateRequest(
        request_id="r",
        prompt=(5, 6),
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.25,
            logit_bias={8: 1.5},
            seed=4,
        ),
        stop=StopParams(
            max_tokens=9, min_tokens=1, stop=("x", "yz"), stop_token_ids=frozenset({3, 4}), ignore_eos=True
        ),
        n=2,
        logprobs=3,
    )


def test_what_is_unset_is_neutral_and_temperature_is_greedy() -> None:
    request = translate(message())
    assert request.sampling == SamplingParams(temperature=0.0, seed=4)
    assert (request.stop, request.n, request.logprobs) == (StopParams(), 1, None)
    assert translate(message(top_k=-1)).sampling.top_k == 0


def test_a_seed_is_fixed_or_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter((17, 18))
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(drawn) if bits == 64 else None)
    seeds = [translate(message(), seed=seed).sampling.seed for seed in (3, 3, DRAWN_SEED, DRAWN_SEED)]
    assert seeds == [3, 3, 17, 18]


@pytest.mark.parametrize(
    ("request_id", "first"),
    [(f"chatcmpl-X-{UUID}-1", 1), (f"{UUID}-12", 12), (f"chatcmpl-X-{UUID}", 0), ("mine-3", 0), (f"{UUID}-x", 0)],
)
def test_the_number_of_a_sample_is_read_from_the_id_of_a_pair(request_id: str, first: int) -> None:
    pb = message(request_id)
    assert translate(pb).first_sample == 0, "without a room there is one request for all samples"
    pb.disaggregated_params.bootstrap_host, pb.disaggregated_params.bootstrap_port = "::1", 5
    request = translate(pb, prefill=("[::1]:5",))
    assert (request.first_sample, request.room) == (first, Room(prefill="[::1]:5", number=0))


def test_errors_of_core_name_the_fields_of_the_protocol() -> None:
    for field, name in (
        ("prompt[3]", "tokenized.input_ids[3]"),
        ("stop.stop[0]", "sampling_params.stop[0]"),
        ("stop.stop_token_ids", "sampling_params.stop_token_ids"),
        ("sampling.top_p", "sampling_params.top_p"),
        ("priority", "priority"),
    ):
        with pytest.raises(InvalidRequest) as caught, field_names():
            raise InvalidRequest(field, 1, "2")
        assert caught.value.field == caught.value.metadata["field"] == name
        assert str(caught.value) == caught.value.message == f"{name}: got 1; allowed: 2"


REQUEST = GenerateRequest(
    request_id="r", prompt=(5, 6), sampling=SamplingParams(), stop=StopParams(stop_token_ids=frozenset({3}))
)
FINISHED = Finished(
    usage=Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1),
    timings=Timings(
        queue_ms=0,
        prefill_ms=0,
        handoff_tail_ms=0,
        ttft_ms=0,
        tpot_ms=0,
        handoff_bytes=0,
        preemptions=0,
        prefill_attempts=1,
        handoff_ms=0,
    ),
    speculation=SpeculationStats(steps=4, proposed=9, accepted=6),
)


def test_the_last_complete_brings_the_counts_of_the_request() -> None:
    answer = Answer(replace(REQUEST, n=2), stream=True, eos_token_ids=(1,))
    sent = answer.messages(Delta(index=1, token_ids=(8, 1), finish_reason=FinishReason.STOP, stopped_by="[EOS]"))
    assert [m.WhichOneof("response") for m in sent] == ["chunk", "complete"]
    assert (sent[1].complete.index, sent[1].complete.matched_token_id) == (1, 1)
    assert sent[1].complete.spec_draft_tokens == 0
    sent = answer.messages(Delta(index=0, token_ids=(9,), finish_reason=FinishReason.LENGTH))
    assert [m.WhichOneof("response") for m in sent] == ["chunk"]
    (last,) = answer.messages(FINISHED)
    assert last.complete == pb2.GenerateComplete(
        index=0,
        output_ids=[9],
        finish_reason="length",
        prompt_tokens=2,
        completion_tokens=1,
        cached_tokens=1,
        spec_accepted_tokens=6,
        spec_draft_tokens=9,
    )


def test_without_chunks_completes_come_in_the_order_of_samples() -> None:
    answer = Answer(replace(REQUEST, n=3), stream=False, eos_token_ids=())
    for index in (2, 0, 1):
        assert not answer.messages(Delta(index=index, token_ids=(8 + index,), finish_reason=FinishReason.LENGTH))
    sent = answer.messages(FINISHED)
    assert [(m.complete.index, list(m.complete.output_ids)) for m in sent] == [(0, [8]), (1, [9]), (2, [10])]
    assert [m.complete.spec_accepted_tokens for m in sent] == [0, 6, 0], "the sample that ended last has the counts"


@pytest.mark.parametrize(
    ("ignore_eos", "token_id", "stopped_by", "matched"),
    [
        (False, 1, "[EOS]", {"matched_token_id": 1}),
        (False, 3, "t", {"matched_token_id": 3}),
        (True, 3, "t", {"matched_token_id": 3}),
        (True, 1, "END", {"matched_stop_str": "END"}),
        (False, 8, "END", {"matched_stop_str": "END"}),
    ],
)
def test_what_stopped_a_sample(ignore_eos: bool, token_id: int, stopped_by: str, matched: dict[str, Any]) -> None:
    request = replace(REQUEST, stop=replace(REQUEST.stop, ignore_eos=ignore_eos))
    answer = Answer(request, stream=False, eos_token_ids=(1,))
    delta = Delta(index=0, token_ids=(token_id,), finish_reason=FinishReason.STOP, stopped_by=stopped_by)
    assert answer.messages(delta) == []
    (last,) = answer.messages(FINISHED)
    name = last.complete.WhichOneof("matched_stop")
    assert {name: getattr(last.complete, name)} == matched


def test_log_probabilities_are_new_in_chunks_and_all_in_complete() -> None:
    answer = Answer(replace(REQUEST, logprobs=1), stream=True, eos_token_ids=())
    values = [Sampled(token_id=8, logprob=-0.5, top=((8, -0.5), (7, -1.5))), Sampled(token_id=9, logprob=-0.25)]
    chunks = []
    for sampled in values:
        reason = FinishReason.LENGTH if sampled.token_id == 9 else None
        delta = Delta(index=0, token_ids=(sampled.token_id,), logprobs=(sampled,), finish_reason=reason)
        chunks += answer.messages(delta)
    assert [list(m.chunk.output_logprobs.token_ids) for m in chunks] == [[8], [9]]
    (last,) = answer.messages(FINISHED)
    logprobs = last.complete.output_logprobs
    assert (list(logprobs.token_ids), list(logprobs.token_logprobs)) == ([8, 9], [-0.5, -0.25])
    assert list(logprobs.top_logprobs[0].token_ids) == [8, 7]
    assert [math.isclose(v, w) for v, w in zip(logprobs.top_logprobs[0].values, (-0.5, -1.5), strict=True)] == [
        True
    ] * 2
    assert json.dumps(list(logprobs.top_logprobs[1].values)) == "[]"
