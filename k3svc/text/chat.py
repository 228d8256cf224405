"""Conversations to prompt ids: K3's XTML format and the ChatML of Kimi-Linear.

Only the format's own marks become control tokens. Whatever a user, a tool or a model wrote is encoded as
ordinary text, segment by segment, so a typed `<|open|>` can neither close a message nor open a channel. The
prompts end where the assistant's answer begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from k3svc.errors import InvalidRequest
from k3svc.text.tokenizer import Tokenizer
from k3svc.text.xtml import CLOSE, END_OF_MESSAGE, OPEN, SEP, compact_json, parse_json, tag

ChatFormat = Literal["k3", "chatml"]

THINKING_EFFORTS = ("low", "high", "max")
TOOL_CHOICES = ("auto", "none", "required")

_FIELDS_OF_ROLE = {
    "system": {"name", "tools"},
    "user": {"name"},
    "assistant": {"reasoning", "tool_calls"},
    "tool": {"name", "tool_call_id"},
}
_ROLE_ALIASES = {"developer": "system"}

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
    "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "none": "You MUST NOT call any tools in the next message.",
    "required": "You MUST call tools in the next message.",
}
_RAW_JSON = "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"

_IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
_CHATML_ROLES = {"system": "<|im_system|>", "user": "<|im_user|>", "assistant": "<|im_assistant|>"}


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool. `arguments_json` holds a JSON object, unless the model failed to write one."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """One message. Empty fields are absent.

    `name`: speaker of a system or user message. `reasoning`, `tool_calls`: of an assistant message.
    `tool_call_id`: the call that a tool message answers. `tools`: declarations that a system message without
    content adds.
    """

    role: str
    content: str = ""
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tools: tuple[Mapping[str, object], ...] = ()


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Which format the model was trained on, by the names of its control tokens.

    Errors: InvalidRequest when the tokenizer has the marks of neither.
    """
    if OPEN in tokenizer.control and END_OF_MESSAGE in tokenizer.control:
        return "k3"
    if "<|im_middle|>" in tokenizer.control:
        return "chatml"
    raise InvalidRequest("messages", "a conversation", "text or token ids: the model has no chat format")


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Mapping[str, object]] = (),
    thinking: bool = False,
    thinking_effort: str | None = None,
    tool_choice: str = "auto",
    response_format: Mapping[str, Any] | None = None,
) -> list[int]:
    """Prompt ids in the model's own format; the options are those of `encode_k3`.

    Errors: InvalidRequest naming the field, also for an option that the model's format lacks.
    """
    if chat_format(tokenizer) == "k3":
        return encode_k3(
            tokenizer,
            messages,
            tools=tools,
            thinking=thinking,
            thinking_effort=thinking_effort,
            tool_choice=tool_choice,
            response_format=response_format,
        )
    for field, value, absent in (
        ("tools", tools, not tools),
        ("thinking", thinking, not thinking),
        ("thinking_effort", thinking_effort, thinking_effort is None),
        ("tool_choice", tool_choice, tool_choice == "auto"),
        ("response_format", response_format, response_format is None),
    ):
        if not absent:
            raise InvalidRequest(field, value, "nothing: the model's chat format has no such option")
    return encode_chatml(tokenizer, messages)


def encode_k3(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Mapping[str, object]] = (),
    thinking: bool,
    thinking_effort: str | None = None,
    tool_choice: str = "auto",
    response_format: Mapping[str, Any] | None = None,
) -> list[int]:
    """Prompt ids in K3's format, up to the opened `think` or `response` channel of the answer.

    `tools` and `response_format` have the shape of the OpenAI chat API. `thinking_effort` is low, high or max
    (default) and needs `thinking`. Without `thinking` the reasoning of earlier answers is left out.

    Errors: InvalidRequest naming the field.
    """
    roles = _check_messages(messages)
    all_tools = [*tools, *(tool for message in messages for tool in message.tools)]
    _check_options(all_tools, thinking=thinking, thinking_effort=thinking_effort, tool_choice=tool_choice)
    prompt = _Prompt(tokenizer)
    if tools:
        prompt.system("tool-declare", _TOOLS.format(compact_json(tools, sort_keys=True)))
    if thinking:
        prompt.system("thinking-effort", _EFFORT.format(thinking_effort or "max"))
    calls: Sequence[ToolCall] = ()
    for is_answer, run in groupby(range(len(messages)), key=lambda i: roles[i] == "tool"):
        if is_answer:
            for index, name, content in _answers({i: messages[i] for i in run}, calls):
                prompt.open("message", role="tool", tool=name, index=str(index))
                prompt.text(content)
                prompt.end_message()
            continue
        for i in run:
            if roles[i] == "assistant":
                prompt.assistant(messages[i], thinking=thinking)
                calls = messages[i].tool_calls
            elif messages[i].tools:
                prompt.system("tool-declare", _MORE_TOOLS.format(compact_json(messages[i].tools, sort_keys=True)))
            else:
                named = {"name": messages[i].name} if messages[i].name else {}
                prompt.open("message", role=roles[i], **named)
                prompt.text(messages[i].content)
                prompt.end_message()
    if all_tools and tool_choice != "auto":
        invoked = f"The system is invoked with `tool_choice={tool_choice}`.\n"
        prompt.system("tool-choice", invoked + _TOOL_CHOICE[tool_choice])
    if wanted := _response_format_text(response_format):
        prompt.system("response-format", wanted)
    prompt.open("message", role="assistant")
    prompt.open("think" if thinking else "response")
    return prompt.ids


def encode_chatml(tokenizer: Tokenizer, messages: Sequence[ChatMessage]) -> list[int]:
    """Prompt ids in Kimi-Linear's format: system, user and assistant messages of plain text.

    Errors: InvalidRequest naming the field, also for reasoning, tools and names, which the format lacks.
    """
    roles = _check_messages(messages)
    middle, end = tokenizer.encode_control("<|im_middle|>"), tokenizer.encode_control("<|im_end|>")
    ids: list[int] = []
    for i, message in enumerate(messages):
        if roles[i] not in _CHATML_ROLES:
            raise InvalidRequest(f"messages[{i}].role", message.role, "system, user or assistant")
        for field in ("name", "reasoning", "tool_calls", "tools"):
            if value := getattr(message, field):
                raise InvalidRequest(f"messages[{i}].{field}", value, "nothing: the model's chat format has none")
        start = tokenizer.encode_control(_CHATML_ROLES[roles[i]])
        ids += [start, *tokenizer.encode(roles[i]), middle, *tokenizer.encode(message.content), end]
    return [
        *ids,
        tokenizer.encode_control(_CHATML_ROLES["assistant"]),
        *tokenizer.encode("assistant"),
        middle,
    ]


class _Prompt:
    """Token ids under construction: marks as control tokens, everything else as ordinary text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._open, self._close, self._sep, self._end = map(
            tokenizer.encode_control, (OPEN, CLOSE, SEP, END_OF_MESSAGE)
        )

    def open(self, name: str, /, **attributes: str) -> None:
        self.ids += [self._open, *self._tokenizer.encode(tag(name, **attributes)), self._sep]

    def close(self, name: str) -> None:
        self.ids += [self._close, *self._tokenizer.encode(name), self._sep]

    def text(self, text: str) -> None:
        """Ordinary text; a typed image placeholder is broken up, so that no image is looked for."""
        self.ids += self._tokenizer.encode(text.replace(_IMAGE_PLACEHOLDER, "<| kimi_image_placeholder |>"))

    def end_message(self) -> None:
        self.close("message")
        self.ids.append(self._end)

    def system(self, kind: str, text: str) -> None:
        self.open("message", role="system", type=kind)
        self.text(text)
        self.end_message()

    def assistant(self, message: ChatMessage, *, thinking: bool) -> None:
        self.open("message", role="assistant")
        channels = [("think", message.reasoning)] if thinking else []
        for channel, content in [*channels, ("response", message.content)]:
            self.open(channel)
            self.text(content)
            self.close(channel)
        if message.tool_calls:
            self.open("tools")
            for index, call in enumerate(message.tool_calls, 1):
                self.open("call", tool=call.name, index=str(index))
                self._arguments(call.arguments_json)
                self.close("call")
            self.close("tools")
        self.end_message()

    def _arguments(self, arguments_json: str) -> None:
        """An element an argument; text that is no JSON object goes into one element as it is."""
        if not arguments_json.strip():
            return
        try:
            arguments = parse_json(arguments_json)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            self.open("json", type="object")
            self.text(arguments_json)
            self.close("json")
            return
        for key, value in arguments.items():
            self.open("argument", key=key, type=_json_type(value))
            self.text(value if isinstance(value, str) else compact_json(value))
            self.close("argument")


def _answers(run: Mapping[int, ChatMessage], calls: Sequence[ToolCall]) -> list[tuple[int, str, str]]:
    """(1-based index of the call, tool, content) of adjacent tool messages, in the order of their calls.

    `run` is keyed by the position in the conversation, `calls` are those of the assistant message before it.
    """
    known = {call.id: (index, call.name) for index, call in enumerate(calls, 1)}
    answers = []
    for i, message in run.items():
        if message.tool_call_id not in known:
            allowed = f"a call of the assistant message before it: {', '.join(known) or 'there is none'}"
            raise InvalidRequest(f"messages[{i}].tool_call_id", message.tool_call_id, allowed)
        index, name = known[message.tool_call_id]
        if message.name not in {"", name}:
            raise InvalidRequest(f"messages[{i}].name", message.name, f"{name!r}, the tool that was called")
        answers.append((index, name, message.content))
    return sorted(answers, key=lambda answer: answer[0])


def _check_options(
    tools: Sequence[Mapping[str, object]], *, thinking: bool, thinking_effort: str | None, tool_choice: str
) -> None:
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InvalidRequest(f"tools[{i}]", tool, "a JSON object")
    if thinking_effort is not None and not (thinking and thinking_effort in THINKING_EFFORTS):
        allowed = ", ".join(THINKING_EFFORTS) if thinking else "nothing while thinking is off"
        raise InvalidRequest("thinking_effort", thinking_effort, allowed)
    if tool_choice not in TOOL_CHOICES:
        raise InvalidRequest("tool_choice", tool_choice, ", ".join(TOOL_CHOICES))
    if tool_choice == "required" and not tools:
        raise InvalidRequest("tool_choice", tool_choice, "auto or none: there are no tools")


def _check_messages(messages: Sequence[ChatMessage]) -> list[str]:
    """The role of each message without aliases."""
    if not messages:
        raise InvalidRequest("messages", [], "at least one message")
    roles = []
    for i, message in enumerate(messages):
        role = _ROLE_ALIASES.get(message.role, message.role)
        if role not in _FIELDS_OF_ROLE:
            raise InvalidRequest(f"messages[{i}].role", message.role, "system, developer, user, assistant or tool")
        for field in ("name", "reasoning", "tool_calls", "tool_call_id", "tools"):
            if (value := getattr(message, field)) and field not in _FIELDS_OF_ROLE[role]:
                raise InvalidRequest(f"messages[{i}].{field}", value, f"nothing in a message of role {role}")
        if message.tools and message.content:
            raise InvalidRequest(f"messages[{i}].content", message.content, "nothing in a message with tools")
        seen: set[str] = set()
        for j, call in enumerate(message.tool_calls):
            if not call.name:
                raise InvalidRequest(f"messages[{i}].tool_calls[{j}].name", call.name, "the name of a tool")
            if not call.id or call.id in seen:
                allowed = "an id that no other call of the message has"
                raise InvalidRequest(f"messages[{i}].tool_calls[{j}].id", call.id, allowed)
            seen.add(call.id)
        roles.append(role)
    return roles


def _response_format_text(response_format: Mapping[str, Any] | None) -> str:
    """What the system message about the wanted format says; empty for plain text."""
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return ""
    if kind not in {"json_object", "json_schema"}:
        raise InvalidRequest("response_format.type", kind, "text, json_object or json_schema")
    text = f"The system is invoked with `response_format={kind}`.\n{_RAW_JSON}"
    if kind == "json_object":
        return text
    schema = (response_format.get("json_schema") or {}).get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest("response_format.json_schema.schema", schema, "a JSON object")
    return text + _SCHEMA.format(compact_json(schema, sort_keys=True))


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
