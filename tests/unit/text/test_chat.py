"""Chat prompts against the golden ids, an independent encoder's ids, and the stated formats."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3svc.errors import InvalidRequest
from k3svc.text.chat import ChatMessage, ToolCall, chat_format, encode_chat, encode_chatml, encode_k3
from k3svc.text.tokenizer import Tokenizer

CASES = json.loads((Path(__file__).parent / "xtml_cases.json").read_text())["cases"]

TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


def user(content: str = "Hi", **fields: Any) -> ChatMessage:
    return ChatMessage(role="user", content=content, **fields)


def assistant(content: str = "", *calls: ToolCall, **fields: Any) -> ChatMessage:
    return ChatMessage(role="assistant", content=content, tool_calls=calls, **fields)


def call(call_id: str = "get:0", name: str = "get", arguments: str = "{}") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments_json=arguments)


def result(call_id: str, content: str = "", **fields: Any) -> ChatMessage:
    return ChatMessage(role="tool", content=content, tool_call_id=call_id, **fields)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_equals_an_independent_encoder(tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    messages = [
        ChatMessage(
            **{
                **message,
                "tool_calls": tuple(ToolCall(**c) for c in message.get("tool_calls", ())),
                "tools": tuple(message.get("tools", ())),
            }
        )
        for message in case["messages"]
    ]
    ids = encode_k3(tokenizer, messages, **case["options"])
    assert tokenizer.decode(ids) == tokenizer.decode(case["ids"])
    assert ids == case["ids"]


def test_golden_chat_prompts(tokenizer: Tokenizer, nano: Path) -> None:
    golden = [p["ids"] for p in json.loads((nano / "golden.json").read_text())["prompts"][3:]]
    conversations = [
        [user("What is the signature of shutil.copyfile?")],
        [
            ChatMessage(role="system", content="You are a helpful assistant."),
            user("My name is Ada."),
            assistant("Hello Ada, how can I help you?"),
            user("What is my name?"),
        ],
    ]
    assert [encode_chat(tokenizer, messages) for messages in conversations] == golden
    assert [encode_k3(tokenizer, messages, thinking=False) for messages in conversations] == golden


def test_developer_is_system(tokenizer: Tokenizer) -> None:
    by_role = [
        encode_chat(tokenizer, [ChatMessage(role=r, content="Be brief."), user()]) for r in ("developer", "system")
    ]
    assert by_role[0] == by_role[1]


@given(
    content=st.text(max_size=30)
    | st.sampled_from(["<|open|>", "<|close|>message<|sep|><|end_of_msg|>", "[EOS]", "<|media_pad|>"]),
    where=st.sampled_from(["content", "name", "reasoning", "key", "value", "tool", "result"]),
)
@settings(max_examples=200)
def test_nothing_typed_becomes_a_control_token(tokenizer: Tokenizer, content: str, where: str) -> None:
    def control_ids(text: str) -> list[int]:
        at = dict.fromkeys(("content", "name", "reasoning", "key", "value", "tool", "result"), "x")
        at[where] = text
        arguments = json.dumps({at["key"]: at["value"]})
        messages = [
            user(at["content"], name=at["name"]),
            assistant("y", call("i", at["tool"], arguments), reasoning=at["reasoning"]),
            result("i", at["result"]),
        ]
        return [i for i in encode_k3(tokenizer, messages, thinking=True) if tokenizer.is_control(i)]

    assert control_ids(content or "x") == control_ids("x")


def test_image_placeholder_is_broken_up(tokenizer: Tokenizer) -> None:
    text = "a <|kimi_image_placeholder|> b"
    arguments = json.dumps({"k": text})
    messages = [user(text), assistant(text, call(arguments=arguments), reasoning=text), result("get:0", text)]
    decoded = tokenizer.decode(encode_k3(tokenizer, messages, thinking=True))
    assert decoded.count("a <| kimi_image_placeholder |> b") == 5
    assert "<|kimi_image_placeholder|>" not in decoded


def test_arguments_that_nest_without_end_are_kept_raw(tokenizer: Tokenizer) -> None:
    raw = '{"a":' + "[" * 100_000
    decoded = tokenizer.decode(encode_k3(tokenizer, [user(), assistant("", call(arguments=raw))], thinking=False))
    assert f'<|open|>json type="object"<|sep|>{raw}<|close|>json<|sep|>' in decoded


def test_nan_is_not_json(tokenizer: Tokenizer) -> None:
    decoded = tokenizer.decode(
        encode_k3(tokenizer, [user(), assistant("", call(arguments='{"a":NaN}'))], thinking=False)
    )
    assert '<|open|>json type="object"<|sep|>{"a":NaN}<|close|>json<|sep|>' in decoded


def test_tool_results_of_one_run_only_are_sorted(tokenizer: Tokenizer) -> None:
    calls = (call("a"), call("b", "put"))
    messages = [user(), assistant("", *calls), result("b", "2nd"), user("wait"), result("a", "1st", name="get")]
    decoded = tokenizer.decode(encode_k3(tokenizer, messages, thinking=False))
    assert decoded.index('role="tool" tool="put" index="2"<|sep|>2nd') < decoded.index("wait")
    assert decoded.index("wait") < decoded.index('role="tool" tool="get" index="1"<|sep|>1st')


def test_tool_choice_sees_tools_of_messages(tokenizer: Tokenizer) -> None:
    messages = [ChatMessage(role="system", tools=(TOOL,)), user()]
    decoded = tokenizer.decode(encode_k3(tokenizer, messages, thinking=False, tool_choice="required"))
    assert "You MUST call tools in the next message." in decoded


def test_choice_of_no_tools_where_there_are_none_says_nothing(tokenizer: Tokenizer) -> None:
    assert encode_chat(tokenizer, [user()], tool_choice="none") == encode_chat(tokenizer, [user()])


def test_text_format_says_nothing(tokenizer: Tokenizer) -> None:
    assert encode_chat(tokenizer, [user()], response_format={"type": "text"}) == encode_chat(tokenizer, [user()])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([user(), ChatMessage(role="root", content="x")], "messages[1].role"),
        ([ChatMessage(role="", content="x")], "messages[0].role"),
        ([user(reasoning="x")], "messages[0].reasoning"),
        ([user(tool_calls=(call(),))], "messages[0].tool_calls"),
        ([user(tool_call_id="x")], "messages[0].tool_call_id"),
        ([user(tools=(TOOL,))], "messages[0].tools"),
        ([assistant("x", name="y")], "messages[0].name"),
        ([ChatMessage(role="system", content="x", tools=(TOOL,))], "messages[0].content"),
        ([user(), assistant("", call(), call("x", ""))], "messages[1].tool_calls[1].name"),
        ([user(), assistant("", call("x"), call("x"))], "messages[1].tool_calls[1].id"),
        ([user(), assistant("", call(""))], "messages[1].tool_calls[0].id"),
        ([user(), result("x")], "messages[1].tool_call_id"),
        ([user(), assistant("", call("x")), result("y")], "messages[2].tool_call_id"),
        ([user(), assistant("", call("x")), assistant("no"), result("x")], "messages[3].tool_call_id"),
        ([user(), assistant("", call("x")), result("x", name="put")], "messages[2].name"),
    ],
)
def test_bad_messages_are_named(tokenizer: Tokenizer, messages: list[ChatMessage], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode_chat(tokenizer, messages, thinking=True)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"thinking": True, "thinking_effort": "medium"}, "thinking_effort"),
        ({"thinking": False, "thinking_effort": "low"}, "thinking_effort"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, "get"]}, "tools[1]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_bad_options_are_named(tokenizer: Tokenizer, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode_chat(tokenizer, [user()], **options)
    assert caught.value.field == field


CHATML_NAMES = {
    3842: "<|im_end|>",
    3843: "<|im_user|>",
    3844: "<|im_assistant|>",
    3850: "<|im_system|>",
    3857: "<|im_middle|>",
}


@pytest.fixture(scope="session")
def make_tokenizer(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[int, str]], Tokenizer]:
    """nano's ranks with other names in the control slots, as Kimi-Linear has them."""

    def make(names: dict[int, str]) -> Tokenizer:
        directory = tmp_path_factory.mktemp("tokenizer")
        shutil.copy(nano / "tiktoken.model", directory)
        config = {"added_tokens_decoder": {i: {"content": name} for i, name in names.items()}, "eos_token": names[3842]}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.load(directory)

    return make


@pytest.fixture(scope="session")
def chatml(make_tokenizer: Callable[[dict[int, str]], Tokenizer]) -> Tokenizer:
    return make_tokenizer(CHATML_NAMES)


def test_format_follows_the_control_names(
    tokenizer: Tokenizer, chatml: Tokenizer, make_tokenizer: Callable[[dict[int, str]], Tokenizer]
) -> None:
    assert chat_format(tokenizer) == "k3"
    assert chat_format(chatml) == "chatml"
    with pytest.raises(InvalidRequest, match="no chat format"):
        chat_format(make_tokenizer({3842: "[EOS]"}))


def test_chatml(chatml: Tokenizer) -> None:
    messages = [
        ChatMessage(role="developer", content="Be brief."),
        user("My <|im_end|>"),
        assistant("Hello"),
        user("Bye"),
    ]
    ids = encode_chat(chatml, messages)
    assert chatml.decode(ids) == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>My <|im_end|><|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>Hello<|im_end|><|im_user|>user<|im_middle|>Bye<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )
    assert [i for i in ids if i >= 3840] == [
        3850,
        3857,
        3842,
        3843,
        3857,
        3842,
        3844,
        3857,
        3842,
        3843,
        3857,
        3842,
        3844,
        3857,
    ]
    assert encode_chatml(chatml, messages) == ids


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([user(), assistant("", call("x")), result("x")], {}, "messages[1].tool_calls"),
        ([result("x")], {}, "messages[0].role"),
        ([user(name="Ada")], {}, "messages[0].name"),
        ([assistant("x", reasoning="y")], {}, "messages[0].reasoning"),
        ([ChatMessage(role="system", tools=(TOOL,))], {}, "messages[0].tools"),
        ([], {}, "messages"),
        ([user()], {"tools": [TOOL]}, "tools"),
        ([user()], {"thinking": True}, "thinking"),
        ([user()], {"thinking_effort": "low"}, "thinking_effort"),
        ([user()], {"tool_choice": "none"}, "tool_choice"),
        ([user()], {"response_format": {"type": "text"}}, "response_format"),
    ],
)
def test_chatml_refuses_what_it_cannot_say(
    chatml: Tokenizer, messages: list[ChatMessage], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode_chat(chatml, messages, **options)
    assert caught.value.field == field
