"""Messages to values and back."""

import math
from pathlib import Path
from typing import Any

import pytest

from k3svc.core.batch import Sampled
from k3svc.core.events import Delta, Finished, Load, SpeculationStats, Timings, Usage
from k3svc.core.request import FinishReason, GenerateRequest, SamplingParams, StopParams
from k3svc.engine.decode import TextOptions
from k3svc.engine.ports import Fingerprint, PrefillCall
from k3svc.errors import InvalidRequest
from k3svc.rpc import codec
from k3svc.text.chat import ChatMessage, ToolCall, encode_chat
from k3svc.text.tokenizer import Tokenizer
from k3svc.v1 import decode_service_pb2 as decode_pb
from k3svc.v1 import types_pb2

FINGERPRINT = Fingerprint(protocol=1, model="m", tokenizer="t", wire_layout="w", variant="v")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(__file__).parents[3] / "models" / "k3-nano")


def with_tokens(**fields: Any) -> decode_pb.GenerateRequest:
    return decode_pb.GenerateRequest(tokens=types_pb2.TokenIds(ids=[5, 6]), **fields)


def test_unset_fields_take_the_stated_defaults(tokenizer: Tokenizer):
    request = codec.generate_request_from_pb(with_tokens(request_id="r"), tokenizer)
    seed = request.sampling.seed
    assert request == GenerateRequest(
        request_id="r", prompt=(5, 6), sampling=SamplingParams(seed=seed), stop=StopParams()
    )
    other = codec.generate_request_from_pb(with_tokens(), tokenizer)
    assert other.sampling.seed != seed
    assert len(other.request_id) == 32
    other.validate(vocab_size=tokenizer.vocab_size, max_context_tokens=100, max_samples=1)


def test_every_field_arrives(tokenizer: Tokenizer):
    request = codec.generate_request_from_pb(
        with_tokens(
            request_id="r",
            sampling=types_pb2.SamplingParams(
                temperature=0.0,
                top_k=4,
                top_p=0.5,
                min_p=0.25,
                repetition_penalty=1.5,
                presence_penalty=-1.0,
                frequency_penalty=2.0,
                logit_bias={7: -2.0},
                seed=0,
                n=3,
            ),
            stop=types_pb2.StopParams(
                max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[1, 2], ignore_eos=True
            ),
            generated_token_ids=types_pb2.TokenIds(ids=[8]),
            logprobs=0,
        ),
        tokenizer,
    )
    assert request == GenerateRequest(
        request_id="r",
        prompt=(5, 6),
        sampling=SamplingParams(
            temperature=0.0,
            top_k=4,
            top_p=0.5,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-1.0,
            frequency_penalty=2.0,
            logit_bias={7: -2.0},
            seed=0,
        ),
        stop=StopParams(max_tokens=9, min_tokens=2, stop=("a", "b"), stop_token_ids=frozenset({1, 2}), ignore_eos=True),
        n=3,
        generated=(8,),
        logprobs=0,
    )


def test_explicit_zeros_and_nan_reach_validation(tokenizer: Tokenizer):
    for field, pb in {
        "stop.max_tokens": with_tokens(stop=types_pb2.StopParams(max_tokens=0)),
        "sampling.n": with_tokens(sampling=types_pb2.SamplingParams(n=0)),
        "sampling.top_p": with_tokens(sampling=types_pb2.SamplingParams(top_p=0.0)),
        "sampling.temperature": with_tokens(sampling=types_pb2.SamplingParams(temperature=math.nan)),
    }.items():
        request = codec.generate_request_from_pb(pb, tokenizer)
        with pytest.raises(InvalidRequest) as caught:
            request.validate(vocab_size=100, max_context_tokens=100, max_samples=4)
        assert caught.value.field == field


def test_text_and_chat_become_prompt_ids(tokenizer: Tokenizer):
    text = codec.generate_request_from_pb(decode_pb.GenerateRequest(text="def f(x): <|open|>"), tokenizer)
    assert text.prompt == tuple(tokenizer.encode("def f(x): <|open|>"))
    assert not any(tokenizer.is_control(token) for token in text.prompt)

    chat = decode_pb.Chat(
        messages=[
            decode_pb.ChatMessage(role="user", content="What is 2 + 2?", name="ann"),
            decode_pb.ChatMessage(
                role="assistant",
                reasoning="easy",
                tool_calls=[decode_pb.ToolCall(id="add:0", name="add", arguments_json='{"a": 2}')],
            ),
            decode_pb.ChatMessage(role="tool", content="4", tool_call_id="add:0"),
        ],
        thinking=True,
        thinking_effort="low",
        tools_json='[{"type": "function", "function": {"name": "add"}}]',
    )
    request = codec.generate_request_from_pb(decode_pb.GenerateRequest(chat=chat), tokenizer)
    assert list(request.prompt) == encode_chat(
        tokenizer,
        [
            ChatMessage(role="user", content="What is 2 + 2?", name="ann"),
            ChatMessage(
                role="assistant",
                reasoning="easy",
                tool_calls=(ToolCall(id="add:0", name="add", arguments_json='{"a": 2}'),),
            ),
            ChatMessage(role="tool", content="4", tool_call_id="add:0"),
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
        thinking=True,
        thinking_effort="low",
    )


USER = decode_pb.ChatMessage(role="user", content="hi")


@pytest.mark.parametrize(
    ("field", "pb"),
    [
        ("prompt", decode_pb.GenerateRequest()),
        ("stop.stop", with_tokens(skip_text=True, stop=types_pb2.StopParams(stop=["x"]))),
        ("chat.messages", decode_pb.GenerateRequest(chat=decode_pb.Chat())),
        (
            "chat.messages[1].role",
            decode_pb.GenerateRequest(chat=decode_pb.Chat(messages=[USER, decode_pb.ChatMessage(role="robot")])),
        ),
        (
            "chat.thinking_effort",
            decode_pb.GenerateRequest(chat=decode_pb.Chat(messages=[USER], thinking=True, thinking_effort="huge")),
        ),
        ("chat.tools_json", decode_pb.GenerateRequest(chat=decode_pb.Chat(messages=[USER], tools_json="{}"))),
        ("chat.tools_json", decode_pb.GenerateRequest(chat=decode_pb.Chat(messages=[USER], tools_json="[1]"))),
        ("chat.tools_json", decode_pb.GenerateRequest(chat=decode_pb.Chat(messages=[USER], tools_json="[" * 100000))),
    ],
)
def test_bad_requests_name_the_field_of_the_proto(tokenizer: Tokenizer, field: str, pb: decode_pb.GenerateRequest):
    with pytest.raises(InvalidRequest) as caught:
        codec.generate_request_from_pb(pb, tokenizer)
    error = caught.value
    assert error.field == field
    assert error.metadata["field"] == field
    assert str(error) == error.message
    assert error.message.startswith(f"{field}: got ")


def test_deltas_become_messages():
    delta = Delta(
        index=2,
        token_ids=(3, 4),
        text="ab",
        logprobs=(Sampled(token_id=3, logprob=-0.5, top=((3, -0.5), (9, -1.25))), Sampled(token_id=4, logprob=-2.0)),
        finish_reason=FinishReason.LENGTH,
        stopped_by="x",
    )
    assert codec.event_to_pb(delta) == decode_pb.GenerateResponse(
        delta=decode_pb.GenerateDelta(
            index=2,
            token_ids=[3, 4],
            text="ab",
            logprobs=[
                decode_pb.TokenLogprobs(
                    chosen=decode_pb.Logprob(token_id=3, logprob=-0.5),
                    top=[decode_pb.Logprob(token_id=3, logprob=-0.5), decode_pb.Logprob(token_id=9, logprob=-1.25)],
                ),
                decode_pb.TokenLogprobs(chosen=decode_pb.Logprob(token_id=4, logprob=-2.0)),
            ],
            finish_reason=types_pb2.FINISH_REASON_LENGTH,
            stopped_by="x",
        )
    )
    reasons = [codec.event_to_pb(Delta(index=0, finish_reason=reason)).delta.finish_reason for reason in FinishReason]
    assert reasons == [
        types_pb2.FINISH_REASON_STOP,
        types_pb2.FINISH_REASON_LENGTH,
        types_pb2.FINISH_REASON_ABORT,
    ]
    assert codec.event_to_pb(Delta(index=0)).delta.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED


def test_the_end_has_every_figure():
    finished = codec.event_to_pb(
        Finished(
            usage=Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=3),
            timings=Timings(
                queue_ms=0.5,
                prefill_ms=1.5,
                handoff_tail_ms=2.5,
                ttft_ms=3.5,
                tpot_ms=4.5,
                handoff_bytes=5,
                preemptions=6,
                prefill_attempts=7,
            ),
            speculation=SpeculationStats(steps=8, proposed=9, accepted=10),
        )
    ).finished
    messages = (finished.usage, finished.timings, finished.speculation)
    assert [value for message in messages for _, value in message.ListFields()] == [
        *(1, 2, 3),
        *(0.5, 1.5, 2.5, 3.5, 4.5, 5, 6, 7),
        *(8, 9, 10),
    ]


def test_text_options(tokenizer: Tokenizer):
    assert codec.text_options_from_pb(with_tokens()) == TextOptions(enabled=True, include_control=False)
    request = with_tokens(skip_text=True, include_control_text=True)
    assert codec.text_options_from_pb(request) == TextOptions(enabled=False, include_control=True)


def test_started_tells_what_was_drawn(tokenizer: Tokenizer):
    request = codec.generate_request_from_pb(with_tokens(), tokenizer)
    started = codec.started_to_pb(request, FINGERPRINT).started
    assert started.request_id == request.request_id
    assert started.seed == request.sampling.seed
    assert list(started.prompt.ids) == [5, 6]
    assert codec.fingerprint_from_pb(started.fingerprint) == FINGERPRINT


def test_prefill_calls_go_both_ways():
    call = PrefillCall(
        request_id="r", attempt=2, prompt=(1, 2, 3), fingerprint=FINGERPRINT, next_sequence=2**40, priority=-3
    )
    assert codec.prefill_call_from_pb(codec.prefill_call_to_pb(call)) == call


def test_load_has_every_figure():
    load = Load(
        running=1,
        waiting=2,
        in_transfer=3,
        free_pages=4,
        total_pages=5,
        free_slots=6,
        total_slots=7,
        draining=True,
        num_tokens=8,
        handoff_bytes=9,
        outcomes={"finished": 10},
    )
    pb = codec.load_to_pb(load, resident_bytes=11, pool_bytes=12)
    values = [value for field, value in pb.ListFields() if field.name != "outcomes"]
    assert values == [1, 2, 3, 4, 5, 6, 7, True, 8, 9, 11, 12]
    assert dict(pb.outcomes) == {"finished": 10}
