"""Requests of the gateway's protocol as values of core.

The protocol has no presence for most numbers, so 0 means unset where 0 makes no sense (top_p, repetition_penalty, n);
temperature 0 is greedy. What a service cannot do is refused and never ignored, but for what only concerns the gateway:
text options, since it makes the text itself, `stream_interval`, `timestamp` and `log_metrics`.
"""

import re
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from k3svc.core.request import GenerateRequest, Room, SamplingParams, StopParams
from k3svc.errors import InvalidRequest
from k3svc.gateway.protos import sglang_scheduler_pb2 as pb2
from k3svc.rpc import codec
from k3svc.text.grammar import Constraint, Kind

_KINDS: dict[str, Kind] = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "ebnf",
    "structural_tag": "structural_tag",
}
_SAMPLE = re.compile(r"(?:^|-)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}-([0-9]{1,4})$")

DRAWN_SEED = -1
"""Value of gateway.seed with which each request draws its own."""

_UNSUPPORTED = (
    "mm_inputs",
    "token_ids_logprob",
    "return_hidden_states",
    "custom_logit_processor",
    "input_embeds",
    "lora_id",
)
_NAMES = {
    "prompt": "tokenized.input_ids",
    "stop.max_tokens": "sampling_params.max_new_tokens",
    "stop.min_tokens": "sampling_params.min_new_tokens",
    "stop.stop_token_ids": "sampling_params.stop_token_ids",
    "stop.stop": "sampling_params.stop",
    "sampling": "sampling_params",
    "logprobs": "top_logprobs_num",
}
"""Names of core → those of the protocol."""


def generate_request_from_pb(
    pb: pb2.GenerateRequest, *, seed: int, max_context_tokens: int, prefill: Collection[str] | None = None
) -> GenerateRequest:
    """`prefill`: names of the prefill services that a request may name together with a room; None: this service is one
    and wants a room. Raises InvalidRequest with the field of the protocol; ranges are the business of core.
    """
    codec.check_num_tokens("tokenized.input_ids", len(pb.tokenized.input_ids), max_context_tokens)
    _check_unsupported(pb)
    sampling = pb.sampling_params
    return GenerateRequest(
        request_id=pb.request_id,
        prompt=tuple(pb.tokenized.input_ids),
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=max(sampling.top_k, 0) if sampling.top_k >= -1 else sampling.top_k,
            top_p=sampling.top_p or 1.0,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=_bias_from_pb(sampling.logit_bias),
            seed=secrets.randbits(64) if seed == DRAWN_SEED else seed,
        ),
        stop=StopParams(
            max_tokens=sampling.max_new_tokens if sampling.HasField("max_new_tokens") else None,
            min_tokens=sampling.min_new_tokens,
            stop=tuple(sampling.stop),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
        ),
        n=sampling.n or 1,
        first_sample=_sample_of_id(pb.request_id) if pb.HasField("disaggregated_params") else 0,
        logprobs=pb.top_logprobs_num if pb.return_logprob else None,
        room=_room_from_pb(pb, prefill),
    )


@contextmanager
def field_names() -> Iterator[None]:
    """Errors of core that pass name the fields of the protocol."""
    try:
        yield
    except InvalidRequest as error:
        for ours, theirs in _NAMES.items():
            rest = error.field.removeprefix(ours)
            if error.field.startswith(ours) and rest[:1] in {"", ".", "["}:
                error.message = theirs + rest + error.message.removeprefix(error.field)
                error.field = error.metadata["field"] = theirs + rest
                error.args = (error.message,)
                break
        raise


def constraint_from_pb(pb: pb2.GenerateRequest) -> Constraint | None:
    """What the output must be; None: anything. Raises InvalidRequest for a kind that is not served."""
    sampling = pb.sampling_params
    name = sampling.WhichOneof("constraint")
    if name is None:
        return None
    field = f"sampling_params.{name}"
    if name not in _KINDS:
        raise InvalidRequest(field, "a constraint", f"one of {', '.join(_KINDS)}")
    if sampling.ignore_eos or sampling.min_new_tokens:
        raise InvalidRequest(field, "a constraint", "none together with ignore_eos or min_new_tokens")
    return Constraint(kind=_KINDS[name], text=getattr(sampling, name), field=field)


def _check_unsupported(pb: pb2.GenerateRequest) -> None:
    for name in _UNSUPPORTED:
        value = getattr(pb, name)
        if value.ByteSize() if name == "mm_inputs" else value:
            raise InvalidRequest(name, "a value", "nothing: no model here has it")
    if pb.data_parallel_rank:
        raise InvalidRequest("data_parallel_rank", pb.data_parallel_rank, "0")
    if pb.return_logprob and pb.logprob_start_len > 0:
        raise InvalidRequest("logprob_start_len", pb.logprob_start_len, "-1: log-probabilities are those of the output")
    if len(pb.sampling_params.custom_params.fields):
        raise InvalidRequest("sampling_params.custom_params", list(pb.sampling_params.custom_params.fields), "nothing")


def _bias_from_pb(bias: Any) -> dict[int, float]:
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError as error:
        raise InvalidRequest("sampling_params.logit_bias", sorted(bias)[:8], "token ids as keys") from error


def _sample_of_id(request_id: str) -> int:
    """A gateway asks for the samples of a pair one by one, under the id of the request (which ends in a UUID) and a
    number. They would all be the same if they had the same number here, since they have the same seed.
    """
    found = _SAMPLE.search(request_id)
    return int(found[1]) if found else 0


def _room_from_pb(pb: pb2.GenerateRequest, prefill: Collection[str] | None) -> Room | None:
    if not pb.HasField("disaggregated_params"):
        if prefill is None:
            raise InvalidRequest(
                "disaggregated_params", "nothing", "a room: this is a prefill service; decode services take it without"
            )
        return None
    asked = pb.disaggregated_params
    host = f"[{asked.bootstrap_host}]" if ":" in asked.bootstrap_host else asked.bootstrap_host
    name = f"{host}:{asked.bootstrap_port}"
    if prefill is not None and name not in prefill:
        raise InvalidRequest("disaggregated_params", name, f"one of decode.prefill: {', '.join(prefill)}")
    return Room(prefill=name, number=asked.bootstrap_room)
