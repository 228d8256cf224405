"""The text of a K3 answer, as it streams in, to reasoning, content and tool calls.

The parser reads text in which control tokens appear by name (`IncrementalDetokenizer(skip_control=False)`)
and begins where the prompt of `encode_k3` ends. Joined events do not depend on how the text was split. A call
is given when it is complete. Wrappers of channels and messages vanish, and so does a mark that the token
limit cut off.

Models do not always keep to the format. A think channel may end with the opening of the next channel. Text
between channels is content. On very long prompts K3 may answer without closing the think channel that the
prompt opened: a bare `<|close|>response<|sep|>` shows that what was read as reasoning is the answer; it is
given again as content with `replaces_reasoning`. What follows the end of the message is not part of it. Calls
without a name or an end are left out.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto

from k3svc.text.chat import ToolCall
from k3svc.text.xtml import (
    CLOSE,
    END_OF_MESSAGE,
    OPEN,
    closing,
    compact_json,
    opening,
    parse_attributes,
    parse_json,
)


@dataclass(frozen=True, kw_only=True)
class ReasoningDelta:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ContentDelta:
    """More text of the answer.

    With `replaces_reasoning` all reasoning given so far was the beginning of the answer: `text` repeats it, and
    a reader that can take reasoning back should.
    """

    text: str
    replaces_reasoning: bool = False


ChatEvent = ReasoningDelta | ContentDelta | ToolCall


class _Channel(Enum):
    REASONING = auto()
    CONTENT = auto()
    TOOLS = auto()
    DONE = auto()


_CLOSE_RESPONSE = closing("response")
_CLOSE_CALL = closing("call")
_OPEN_JSON = opening("json", type="object")

_ENDS = {closing("message"): _Channel.DONE, END_OF_MESSAGE: _Channel.DONE}
# A mark that may stand in the text of a channel, and the channel that follows it; None: the same as before.
_TEXT_MARKS: dict[str, _Channel | None] = {
    opening("think"): _Channel.REASONING,
    closing("think"): _Channel.CONTENT,
    opening("response"): _Channel.CONTENT,
    _CLOSE_RESPONSE: _Channel.CONTENT,
    opening("tools"): _Channel.TOOLS,
    closing("tools"): _Channel.CONTENT,
    opening("message", role="assistant"): None,
    **_ENDS,
}
_TOOLS_MARKS: dict[str, _Channel | None] = {_CLOSE_CALL: None, closing("tools"): _Channel.CONTENT, **_ENDS}


def _any_of(marks: dict[str, _Channel | None]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


_TEXT_PATTERN = _any_of(_TEXT_MARKS)
_TOOLS_PATTERN = _any_of(_TOOLS_MARKS)
_LONGEST_MARK = max(map(len, _TEXT_MARKS))

_CALL = re.compile(r"<\|open\|>call (.*?)<\|sep\|>(.*)", re.DOTALL)
_ARGUMENT = re.compile(r"<\|open\|>argument (.*?)<\|sep\|>(.*?)" + re.escape(closing("argument")), re.DOTALL)


class ChatOutputParser:
    """The events of one answer."""

    def __init__(self, *, thinking: bool, num_previous_calls: int = 0) -> None:
        """`thinking`: the prompt ended with an open think channel, else with an open response channel.

        `num_previous_calls`: tool calls in the conversation so far; ids go on from there as `NAME:N`.
        """
        self._channel = _Channel.REASONING if thinking else _Channel.CONTENT
        self._num_calls = num_previous_calls
        self._buffer = ""
        self._call_parts: list[str] = []
        # What was given as reasoning and may still turn out to be the answer; None once that is settled.
        self._doubtful: list[str] | None = [] if thinking else None

    def push(self, text: str) -> list[ChatEvent]:
        """Take the next text. At most the length of a mark is held back, and an unfinished call."""
        events: list[ChatEvent] = []
        buffer, start = self._buffer + text, 0
        while self._channel is not _Channel.DONE:
            in_tools = self._channel is _Channel.TOOLS
            marks = _TOOLS_MARKS if in_tools else _TEXT_MARKS
            found = (_TOOLS_PATTERN if in_tools else _TEXT_PATTERN).search(buffer, start)
            end = found.start() if found else _held_from(buffer, start, marks)
            if end > start:
                self._take(buffer[start:end], events)
            if found is None:
                self._buffer = buffer[end:]
                return events
            self._pass(found[0], marks[found[0]], events)
            start = found.end()
        self._buffer = ""
        return events

    def finish(self) -> list[ChatEvent]:
        """The text held back, less a mark that was cut off. The parser takes no more text."""
        events: list[ChatEvent] = []
        if self._buffer and not self._buffer.startswith((OPEN, CLOSE)):
            self._take(self._buffer, events)
        self._buffer, self._channel = "", _Channel.DONE
        return events

    def _take(self, text: str, events: list[ChatEvent]) -> None:
        if self._channel is _Channel.CONTENT:
            events.append(ContentDelta(text=text))
        elif self._channel is _Channel.REASONING:
            events.append(ReasoningDelta(text=text))
            if self._doubtful is not None:
                self._doubtful.append(text)
        else:
            self._call_parts.append(text)

    def _pass(self, mark: str, following: _Channel | None, events: list[ChatEvent]) -> None:
        """Go over a mark into the channel that follows it."""
        if mark == _CLOSE_RESPONSE and self._doubtful:
            events.append(ContentDelta(text="".join(self._doubtful), replaces_reasoning=True))
        if mark == _CLOSE_CALL:
            call = _parse_call("".join(self._call_parts), self._num_calls)
            if call is not None:
                self._num_calls += 1
                events.append(call)
        self._call_parts.clear()
        if following is not None:
            if following is not _Channel.REASONING:
                self._doubtful = None
            self._channel = following


def _held_from(buffer: str, start: int, marks: dict[str, _Channel | None]) -> int:
    """Where the end of `buffer` begins that may become a mark."""
    at = buffer.find("<", max(start, len(buffer) - _LONGEST_MARK + 1))
    while at >= 0:
        tail = buffer[at:]
        if any(mark.startswith(tail) for mark in marks):
            return at
        at = buffer.find("<", at + 1)
    return len(buffer)


def _parse_call(text: str, number: int) -> ToolCall | None:
    """The call whose text, up to its closing mark, is `text`; None when it has no opening or no name.

    A value of type string is raw text, of any other type JSON, or raw text where it is no JSON after all.
    """
    found = _CALL.search(text)
    name = parse_attributes(found[1]).get("tool", "") if found else ""
    if found is None or not name:
        return None
    body = found[2]
    if body.startswith(_OPEN_JSON):
        arguments_json = body.removeprefix(_OPEN_JSON).partition(closing("json"))[0]
    else:
        arguments: dict[str, object] = {}
        for attributes_text, value in _ARGUMENT.findall(body):
            attributes = parse_attributes(attributes_text)
            arguments[attributes.get("key", "")] = _parse_value(value, attributes.get("type", "string"))
        arguments_json = compact_json(arguments)
    return ToolCall(id=f"{name}:{number}", name=name, arguments_json=arguments_json)


def _parse_value(text: str, kind: str) -> object:
    if kind == "string":
        return text
    try:
        return parse_json(text)
    except ValueError:
        return text
