"""What a caller writes, as a message of k3svc.v1. Ranges are checked by the service; shapes are checked here."""

import dataclasses
import difflib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict

from k3svc.errors import InvalidRequest
from k3svc.text.chat import ChatMessage
from k3svc.text.xtml import compact_json
from k3svc.v1 import decode_service_pb2, types_pb2

Message = ChatMessage | Mapping[str, Any]
"""A message of a conversation; a mapping has the fields of ChatMessage, such as {"role": "user", "content": "Hi"}."""

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1


class Options(TypedDict, total=False):
    """How a request is generated. What is left out takes the service's default."""

    request_id: str
    """At most 128 printable ASCII characters; drawn when absent."""
    temperature: float
    """Softmax temperature >= 0; 0 is greedy. Default 1."""
    top_k: int
    """Keep the k most likely tokens; 0, the default, is off."""
    top_p: float
    """Keep the smallest set of tokens with this probability mass, in (0, 1]. Default 1."""
    min_p: float
    """Drop tokens below min_p times the largest probability. Default 0."""
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    """Unsigned 64 bit; drawn by the service and told in Started when absent."""
    n: int
    """Number of samples. Default 1."""
    max_tokens: int
    """Largest number of output tokens; absent: up to the context limit."""
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    logprobs: int
    """Number of most likely tokens to report with their log-probabilities, 0 to 20."""
    generated_token_ids: Sequence[int]
    """Output of an earlier attempt: counted, continued, not given again. Needs n = 1."""
    skip_text: bool
    """Token ids only."""
    priority: int
    """Smaller is served first and preempted last, -1000 to 1000. Default 0."""
    include_control_text: bool
    """Keep control tokens in the text as their names; an answer to messages is then not parsed."""
    thinking: bool
    """Messages only: open the think channel (K3)."""
    thinking_effort: str
    """low, high or max; only with thinking."""
    tools: Sequence[Mapping[str, object]]
    """Messages only: tool declarations in the shape of the OpenAI chat API."""


SAMPLING_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("n", "seed"),
)
STOP_FIELDS = ("max_tokens", "min_tokens", "ignore_eos")
CHAT_FIELDS = ("thinking", "thinking_effort", "tools")
FLOAT_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
BOOL_FIELDS = ("ignore_eos", "skip_text", "include_control_text", "thinking")
# Fields that protobuf would refuse or wrap by their type alone, with the largest value that fits.
UNSIGNED_FIELDS = {
    **dict.fromkeys(("top_k", "n", "max_tokens", "min_tokens", "logprobs"), MAX_UINT32),
    "seed": MAX_UINT64,
}


def build_request(
    *,
    prompt: str | None,
    tokens: Sequence[int] | None,
    messages: Sequence[Message] | None,
    options: Options,
) -> decode_service_pb2.GenerateRequest:
    """The message, with a request id. Raises InvalidRequest; TypeError for an unknown option."""
    known = Options.__annotations__
    for name in sorted(options.keys() - known.keys()):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise TypeError(f"unknown option {name}; {hint}")
    given: dict[str, object] = {**options}
    for name, largest in UNSIGNED_FIELDS.items():
        _check_unsigned(name, given.get(name, 0), largest)
    for name in FLOAT_FIELDS:
        if not _is_number(given.get(name, 0.0)):
            raise InvalidRequest(name, given[name], "a number")
    for name in BOOL_FIELDS:
        if not isinstance(given.get(name, False), bool):
            raise InvalidRequest(name, given[name], "True or False")
    request = decode_service_pb2.GenerateRequest(
        request_id=_checked_text("request_id", options.get("request_id", "")) or uuid.uuid4().hex,
        sampling=types_pb2.SamplingParams(
            **{name: given[name] for name in SAMPLING_FIELDS if name in given},  # type: ignore[arg-type]
            logit_bias=_checked_bias(options.get("logit_bias", {})),
        ),
        stop=types_pb2.StopParams(
            **{name: given[name] for name in STOP_FIELDS if name in given},  # type: ignore[arg-type]
            stop=_checked_stop(options.get("stop", ())),
            stop_token_ids=_checked_ids("stop_token_ids", options.get("stop_token_ids", ())),
        ),
        logprobs=options.get("logprobs"),
        skip_text=options.get("skip_text", False),
        include_control_text=options.get("include_control_text", False),
        priority=_checked_priority(options.get("priority", 0)),
    )
    if options.get("generated_token_ids"):
        request.generated_token_ids.ids.extend(_checked_ids("generated_token_ids", options["generated_token_ids"]))
    _set_prompt(request, prompt, tokens, messages, options)
    return request


def _set_prompt(
    request: decode_service_pb2.GenerateRequest,
    prompt: str | None,
    tokens: Sequence[int] | None,
    messages: Sequence[Message] | None,
    options: Options,
) -> None:
    named = {"prompt": prompt, "tokens": tokens, "messages": messages}
    given = [name for name, value in named.items() if value is not None]
    if len(given) != 1:
        raise InvalidRequest("prompt", " and ".join(given) or "nothing", "exactly one of prompt, tokens and messages")
    if messages is None and (unfit := [name for name in CHAT_FIELDS if options.get(name)]):
        raise InvalidRequest(unfit[0], given[0], f"{unfit[0]} needs messages")
    if prompt is not None:
        request.text = _checked_text("prompt", prompt)
    elif tokens is not None:
        request.tokens.ids.extend(_checked_ids("tokens", tokens))
    else:
        request.chat.CopyFrom(_chat_to_pb(messages or (), options))


def _chat_to_pb(messages: Sequence[Message], options: Options) -> decode_service_pb2.Chat:
    tools = options.get("tools", ())
    return decode_service_pb2.Chat(
        messages=[_message_to_pb(index, message) for index, message in enumerate(messages)],
        thinking=options.get("thinking", False),
        thinking_effort=_checked_text("thinking_effort", options.get("thinking_effort", "")),
        tools_json=_checked_text("tools", compact_json(list(tools))) if tools else "",
    )


def _message_to_pb(index: int, message: Message) -> decode_service_pb2.ChatMessage:
    if isinstance(message, Mapping):
        fields = {field.name for field in dataclasses.fields(ChatMessage)}
        if "role" not in message or not message.keys() <= fields:
            raise InvalidRequest(f"messages[{index}]", dict(message), f"role and others of {', '.join(sorted(fields))}")
        message = ChatMessage(**message)
    if message.tools:
        raise InvalidRequest(f"messages[{index}].tools", message.tools, "tools as an option of the request")
    texts = {
        name: _checked_text(f"messages[{index}].{name}", getattr(message, name))
        for name in ("role", "content", "name", "reasoning", "tool_call_id")
    }
    return decode_service_pb2.ChatMessage(
        **texts,
        tool_calls=[
            decode_service_pb2.ToolCall(
                **{
                    name: _checked_text(f"messages[{index}].tool_calls[{number}].{name}", getattr(call, name))
                    for name in ("id", "name", "arguments_json")
                }
            )
            for number, call in enumerate(message.tool_calls)
        ],
    )


def _checked_ids(name: str, ids: Iterable[int]) -> list[int]:
    checked = list(ids)
    for index, token_id in enumerate(checked):
        # A plain int needs no look at its kind, which takes ten times as long.
        if type(token_id) is not int or not 0 <= token_id <= MAX_UINT32:
            _check_unsigned(f"{name}[{index}]", token_id, MAX_UINT32)
    return checked


def _checked_bias(bias: Mapping[int, float]) -> Mapping[int, float]:
    for token_id, value in bias.items():
        _check_unsigned("logit_bias", token_id, MAX_UINT32)
        if not _is_number(value):
            raise InvalidRequest(f"logit_bias[{token_id}]", value, "a number")
    return bias


def _checked_priority(value: object) -> int:
    # The service knows the range; this is what the field of the message holds.
    if isinstance(value, bool) or not (isinstance(value, Integral) and -(2**31) <= int(value) < 2**31):
        raise InvalidRequest("priority", value, "an integer from -1000 to 1000")
    return int(value)


def _checked_stop(stop: str | Iterable[str]) -> list[str]:
    texts = [stop] if isinstance(stop, str) else stop
    return [_checked_text(f"stop[{index}]", text) for index, text in enumerate(texts)]


def _checked_text(name: str, text: object) -> str:
    """Raises InvalidRequest for what protobuf cannot hold: no text, or halves of a surrogate pair."""
    if not isinstance(text, str):
        raise InvalidRequest(name, text, "text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            name,
            text[error.start : error.end],
            f"text that UTF-8 can hold; character {error.start} is a lone surrogate",
        ) from error
    return text


def _is_number(value: object) -> bool:
    # Real covers the numbers of numpy, which protobuf takes too.
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_unsigned(name: str, value: object, largest: int) -> None:
    # Integral covers the integers of numpy, which protobuf takes too.
    if isinstance(value, bool) or not (isinstance(value, Integral) and 0 <= int(value) <= largest):
        raise InvalidRequest(name, value, f"an integer from 0 to {largest}")
