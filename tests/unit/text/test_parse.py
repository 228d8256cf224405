"""The parser of K3 output, split at every position, on well-formed, sloppy and cut-off answers."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3svc.text.chat import ChatMessage, ToolCall, encode_k3
from k3svc.text.detokenizer import IncrementalDetokenizer
from k3svc.text.parse import ChatOutputParser, ContentDelta, ReasoningDelta
from k3svc.text.tokenizer import Tokenizer

EOM = "<|end_of_msg|>"


def o(name: str) -> str:
    return f"<|open|>{name}<|sep|>"


def c(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


END = c("message") + EOM
CALLS = (
    o("tools")
    + o('call tool="get&amp;&quot;&amp;quot;" index="1"')
    + o('argument key="s" type="string"')
    + "x &amp; <b>\n"
    + c("argument")
    + o('argument key="n" type="number"')
    + "1.50"
    + c("argument")
    + o('argument key="o" type="object"')
    + '{"z": [1, null], "a": "é"}'
    + c("argument")
    + o('argument key="digits" type="string"')
    + "12"
    + c("argument")
    + o('argument key="bad" type="array"')
    + "[1,"
    + c("argument")
    + c("call")
    + o('call tool="put" index="2"')
    + o('json type="object"')
    + "{not json"
    + c("json")
    + c("call")
    + o('call tool="now" index="3"')
    + c("call")
    + c("tools")
)
GET = ToolCall(
    id='get&"&quot;:4',
    name='get&"&quot;',
    arguments_json='{"s":"x &amp; <b>\\n","n":1.5,"o":{"z":[1,null],"a":"é"},"digits":"12","bad":"[1,"}',
)
PUT = ToolCall(id="put:5", name="put", arguments_json="{not json")
NOW = ToolCall(id="now:6", name="now", arguments_json="{}")


@dataclass
class Answer:
    """What a reader who can take reasoning back has in the end."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def read(pieces: list[str], *, thinking: bool = True) -> Answer:
    parser = ChatOutputParser(thinking=thinking, num_previous_calls=4)
    answer = Answer()
    for event in [e for piece in pieces for e in parser.push(piece)] + parser.finish():
        if isinstance(event, ReasoningDelta):
            answer.reasoning += event.text
        elif isinstance(event, ContentDelta):
            answer.content += event.text
            if event.replaces_reasoning:
                assert event.text == answer.reasoning
                answer.reasoning = ""
        else:
            answer.calls.append(event)
    return answer


FULL = "why" + c("think") + o("response") + "ans" + c("response") + CALLS + END
CASES: dict[str, tuple[str, Answer]] = {
    "full": (FULL, Answer("why", "ans", [GET, PUT, NOW])),
    "no tools": ("why" + c("think") + o("response") + "ans" + c("response") + END, Answer("why", "ans")),
    "empty think": (c("think") + o("response") + "ans" + c("response") + END, Answer("", "ans")),
    "think not closed": ("why" + o("response") + "ans" + c("response") + END, Answer("why", "ans")),
    "think to tools": ("why" + CALLS + END, Answer("why", "", [GET, PUT, NOW])),
    "think closed, no response": ("why" + c("think") + CALLS + END, Answer("why", "", [GET, PUT, NOW])),
    "think opened again": (o("think") + "why" + c("think") + "ans" + END, Answer("why", "ans")),
    "message opened again": (
        o('message role="assistant"') + o("think") + "why" + c("think") + o("response") + "ans" + END,
        Answer("why", "ans"),
    ),
    "skipped think": ("ans" + c("response") + END, Answer("", "ans")),
    "skipped think, closed late": ("ans" + c("response") + c("think") + END, Answer("", "ans")),
    "skipped think, then tools": ("ans" + c("response") + CALLS + END, Answer("", "ans", [GET, PUT, NOW])),
    "reasoning only": ("why" + END, Answer("why")),
    "text between channels": (
        "why" + c("think") + "stray" + o("response") + "ans" + c("response") + "more" + END,
        Answer("why", "strayansmore"),
    ),
    "text after the message": (
        "why" + c("think") + o("response") + "ans" + END + o("response") + "next",
        Answer("why", "ans"),
    ),
    "end without closing": ("why" + c("think") + o("response") + "ans" + EOM + "next", Answer("why", "ans")),
    "almost marks": (
        "a < b <| <|open <|sep|> <|close|>thing<|sep|> <|open|>other" + c("think") + o("response") + "<|<|open|>",
        Answer("a < b <| <|open <|sep|> <|close|>thing<|sep|> <|open|>other", "<|"),
    ),
    "nested beginnings": ("<|open|><|open|>think<|sep|>x<<|close|>think<|sep|>y", Answer("<|open|>x<", "y")),
    "call without a name": (
        "w" + o("tools") + o('call index="1"') + c("call") + "\n" + o('call tool="now"') + c("call") + c("tools"),
        Answer("w", "", [ToolCall(id="now:4", name="now", arguments_json="{}")]),
    ),
    "tools without calls": ("w" + o("tools") + "chatter" + c("tools") + "after", Answer("w", "after")),
    "message ends within tools": ("w" + o("tools") + o('call tool="now"') + END + "x", Answer("w")),
}


@pytest.mark.parametrize("name", CASES)
def test_split_at_every_position(name: str) -> None:
    text, expected = CASES[name]
    assert read([text]) == expected
    assert read(list(text)) == expected
    for at in range(len(text) + 1):
        assert read([text[:at], text[at:]]) == expected, at
    rng = random.Random(5)
    for _ in range(100):
        cuts = sorted(rng.choices(range(len(text) + 1), k=6))
        assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == expected, cuts


def test_response_channel_open_from_the_start() -> None:
    assert read(["ans" + c("response") + CALLS + END], thinking=False) == Answer("", "ans", [GET, PUT, NOW])
    assert read([o("think") + "why" + c("think") + o("response") + "ans" + END], thinking=False) == Answer("why", "ans")


def test_cut_off_anywhere_never_shows_a_broken_mark() -> None:
    """Tokens are whole marks and pieces of names, so an answer can end after any character of a name."""
    names = ("why", "<|close|>", "think", "<|sep|>", "<|open|>", "response", "<|sep|>", "ans", "<|close|>", "response")
    whole = "".join(names)
    for end in range(len(whole) + 1):
        text = whole[:end]
        if text.endswith(tuple(m[:n] for m in ("<|close|>", "<|open|>", "<|sep|>") for n in range(1, len(m)))):
            continue
        answer = read(list(text))
        assert "why".startswith(answer.reasoning)
        assert "ans".startswith(answer.content)
        assert answer.calls == []
    for end in range(FULL.index(c("call")) + 1):
        assert read([FULL[:end]]).calls == []


def test_half_a_control_name_at_the_end_is_text() -> None:
    assert read(["why" + c("think") + o("response") + "1 <|op"]) == Answer("why", "1 <|op")


def test_text_streams_at_once() -> None:
    parser = ChatOutputParser(thinking=True)
    assert parser.push("why") == [ReasoningDelta(text="why")]
    assert parser.push(" not<") == [ReasoningDelta(text=" not")]
    assert parser.push("3") == [ReasoningDelta(text="<3")]
    assert parser.push("<|close|>thi") == []
    assert parser.push("nk<|sep|>" + o("response") + "ans") == [ContentDelta(text="ans")]
    assert parser.push(" er") == [ContentDelta(text=" er")]


def test_calls_are_given_when_complete() -> None:
    parser = ChatOutputParser(thinking=False)
    assert parser.push(o("tools") + o('call tool="now" index="1"')) == []
    assert parser.push(c("call")) == [ToolCall(id="now:0", name="now", arguments_json="{}")]
    assert parser.push(o('call tool="now" index="2"') + c("call") + "<") == [
        ToolCall(id="now:1", name="now", arguments_json="{}")
    ]


def test_skipped_think_repeats_what_was_streamed() -> None:
    parser = ChatOutputParser(thinking=True)
    assert parser.push("an") == [ReasoningDelta(text="an")]
    assert parser.push("s" + c("response")) == [
        ReasoningDelta(text="s"),
        ContentDelta(text="ans", replaces_reasoning=True),
    ]


def test_a_response_closed_in_later_reasoning_replaces_nothing() -> None:
    text = "why" + c("think") + o("think") + "more" + c("response") + "ans" + END
    assert read([text]) == Answer("whymore", "ans")


def test_nothing_after_finish() -> None:
    parser = ChatOutputParser(thinking=True)
    parser.finish()
    assert parser.push("text") == []
    assert parser.finish() == []


def test_a_lone_surrogate_in_json_becomes_valid_text() -> None:
    text = (
        o("tools") + o('call tool="f"') + o('argument key="k" type="array"') + '["\\ud800"]' + c("argument") + c("call")
    )
    [found] = read([text], thinking=False).calls
    assert json.loads(found.arguments_json) == {"k": ["\ufffd"]}
    found.arguments_json.encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    reasoning=st.text(max_size=20),
    content=st.text(max_size=20),
    calls=st.lists(
        st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=5), JSON, max_size=3)), max_size=3
    ),
)
@settings(max_examples=150)
def test_reads_back_what_the_encoder_wrote(
    tokenizer: Tokenizer, reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """An answer in the history, encoded, decoded token by token and parsed, is the answer."""
    wanted = [
        ToolCall(
            id=f"{name}:{4 + i}", name=name, arguments_json=json.dumps(a, ensure_ascii=False, separators=(",", ":"))
        )
        for i, (name, a) in enumerate(calls)
    ]
    question = ChatMessage(role="user", content="Hi")
    message = ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(wanted))
    prompt = encode_k3(tokenizer, [question], thinking=True)
    history = encode_k3(tokenizer, [question, message], thinking=True)
    assert history[: len(prompt)] == prompt
    detokenizer = IncrementalDetokenizer(tokenizer, skip_control=False)
    pieces = [detokenizer.push([i]).text for i in history[len(prompt) :]]
    assert read([*pieces, detokenizer.finish()]) == Answer(reasoning, content, wanted)


def test_long_answers_take_linear_time() -> None:
    """Two megabytes in small pieces; quadratic work would take minutes."""
    parser = ChatOutputParser(thinking=False)
    parser.push(o("tools") + o('call tool="f"') + o('argument key="k" type="string"'))
    for _ in range(100_000):
        assert parser.push("0123456789<|opened ") == []
    [found] = parser.push(c("argument") + c("call"))
    assert isinstance(found, ToolCall)
    assert len(found.arguments_json) == 1_900_000 + len('{"k":""}')
