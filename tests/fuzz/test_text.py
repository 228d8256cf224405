"""Hostile chat messages and control tokens in text; configuration, keys, checkpoint and tokenizer files."""

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from k3svc.config import Config, load_config, to_toml
from k3svc.errors import CheckpointError, ConfigError, InvalidRequest
from k3svc.model.checkpoint import Checkpoint, model_hash
from k3svc.model.config import ModelConfig
from k3svc.rpc import codec
from k3svc.rpc.access import parse_keys
from k3svc.rpc.credentials import parse_token
from k3svc.text.chat import ChatMessage, encode_chat
from k3svc.text.tokenizer import Tokenizer
from k3svc.text.xtml import CLOSE, END_OF_MESSAGE, OPEN, SEP
from k3svc.v1 import decode_service_pb2 as pb

NANO = Path(__file__).parents[2] / "models" / "k3-nano"
SHORT = settings(max_examples=60, suppress_health_check=list(HealthCheck))

MARKS = st.sampled_from(
    [
        OPEN,
        CLOSE,
        SEP,
        END_OF_MESSAGE,
        '"',
        "&quot;",
        "message",
        "think",
        "<|im_end|>",
        "<|kimi_image_placeholder|>",
        "{",
    ]
)
HOSTILE_TEXT = st.lists(st.one_of(MARKS, st.text(max_size=20)), max_size=8).map("".join)
WIRE_TEXT = HOSTILE_TEXT.map(lambda text: text.encode("utf-8", "replace").decode())
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), HOSTILE_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(HOSTILE_TEXT, inner, max_size=4)),
    max_leaves=12,
)
ROLES = st.one_of(st.sampled_from(["system", "user", "assistant", "tool", "developer", ""]), WIRE_TEXT)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


@st.composite
def chats(draw: st.DrawFn) -> pb.Chat:
    maybe_json = st.one_of(WIRE_TEXT, JSON.map(json.dumps), st.integers(1, 3000).map(lambda depth: "[" * depth))
    call = st.builds(pb.ToolCall, id=st.sampled_from(["a", "b", ""]), name=WIRE_TEXT, arguments_json=maybe_json)
    rarely = st.one_of(st.just(""), WIRE_TEXT)
    message = st.builds(
        pb.ChatMessage,
        role=ROLES,
        content=WIRE_TEXT,
        name=rarely,
        reasoning=rarely,
        tool_calls=st.one_of(st.just([]), st.lists(call, max_size=3)),
        tool_call_id=st.sampled_from(["", "a", "b"]),
    )
    return pb.Chat(
        messages=draw(st.lists(message, max_size=4)),
        thinking=draw(st.booleans()),
        thinking_effort=draw(st.sampled_from(["", "low", "max", "huge"])),
        tools_json=draw(st.one_of(st.just(""), maybe_json)),
    )


@SHORT
@given(chats())
def test_a_chat_becomes_a_prompt_or_a_named_error(chat: pb.Chat):
    request = pb.GenerateRequest(chat=chat)
    codec.check_size(request, 32768)
    try:
        made = codec.generate_request_from_pb(request, tokenizer())
    except InvalidRequest as error:
        if not error.field.startswith("chat"):
            raise
        return
    assert all(0 <= token < tokenizer().vocab_size for token in made.prompt)


def _controls(messages: list[ChatMessage], *, thinking: bool) -> list[int]:
    known = tokenizer()
    return [token for token in encode_chat(known, messages, thinking=thinking) if known.is_control(token)]


@SHORT
@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), HOSTILE_TEXT, HOSTILE_TEXT), min_size=1, max_size=4
    ),
    st.booleans(),
)
def test_text_makes_no_control_token(turns: list[tuple[str, str, str]], thinking: bool):
    """A conversation has the control tokens of the same conversation about nothing."""
    hostile = [
        ChatMessage(role=role, content=text, reasoning=other)
        if role == "assistant"
        else ChatMessage(role=role, content=text, name=other)
        for role, text, other in turns
    ]
    harmless = [
        dataclasses.replace(
            message,
            content="x",
            name="x" if message.name else "",
            reasoning="x" if message.reasoning else "",
        )
        for message in hostile
    ]
    assert _controls(hostile, thinking=thinking) == _controls(harmless, thinking=thinking)
    assert not any(tokenizer().is_control(token) for _, text, _ in turns for token in tokenizer().encode(text))


TOML_VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(repr),
    st.sampled_from(["true", "false", '""', '"0.0.0.0"', "[]", '["a:1"]', "{}", "1979-05-27", "[[1]]", "nan", "-0"]),
    st.text(max_size=10).map(json.dumps),
)
KNOWN_KEYS = st.sampled_from(
    [
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(getattr(Config(), section.name))
    ]
)


@SHORT
@given(
    st.one_of(
        st.text(max_size=200), st.lists(st.tuples(KNOWN_KEYS, TOML_VALUES).map(" = ".join), max_size=6).map("\n".join)
    ),
    st.lists(st.one_of(st.text(max_size=30), st.tuples(KNOWN_KEYS, TOML_VALUES).map("=".join)), max_size=4),
    st.binary(max_size=200),
)
def test_a_configuration_is_one_or_a_named_error(text: str, overrides: list[str], data: bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.toml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            config = load_config(path, overrides)
        except ConfigError:
            pass
        else:
            path.write_text(to_toml(config))
            assert repr(load_config(path)) == repr(config)
    for parse in (parse_keys, parse_token):
        for given_data in (data, text.encode("utf-8", "surrogatepass")):
            _expect(ConfigError, parse, "f", given_data)


@SHORT
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(
            JSON,
            st.fixed_dictionaries(
                {},
                optional={
                    "token": st.one_of(st.text(max_size=40), st.integers()),
                    "sha256": st.one_of(st.text("0123456789abcdef", max_size=70), st.booleans()),
                    "max_requests": st.one_of(st.integers(), st.booleans(), st.floats()),
                    "admin": st.one_of(st.booleans(), st.integers()),
                },
            ),
        ),
        max_size=3,
    )
)
def test_a_keys_file_is_one_or_a_named_error(tree: dict[str, Any]):
    lines = []
    for name, fields in tree.items():
        lines.append(f"[{json.dumps(name)}]")
        if isinstance(fields, dict):
            lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in fields.items()]
    _expect(ConfigError, parse_keys, "f", "\n".join(lines).encode("utf-8", "replace"))


@cache
def _small_files() -> dict[str, bytes]:
    """The files of a checkpoint; of its tensors a few small ones."""
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model")
    files = {name: (NANO / name).read_bytes() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        tensors = {"model.norm.weight": torch.ones(8), "lm_head.weight": torch.ones(4, 8, dtype=torch.bfloat16)}
        save_file(tensors, path)
        files["model.safetensors"] = path.read_bytes()
    files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    ).encode()
    return files


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is wrong with a file of a checkpoint; without data it is not there."""

    name: str
    data: bytes | None = dataclasses.field(repr=False)
    kind: str


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    name = draw(st.sampled_from(sorted(_small_files())))
    kind = draw(st.sampled_from(["absent", "bytes", "cut", "value", "noise", "deep"]))
    return Damage(name=name, kind=kind, data=_damaged(draw, name, kind))


def _damaged(draw: st.DrawFn, name: str, kind: str) -> bytes | None:
    data = bytearray(_small_files()[name])
    if kind == "absent":
        return None
    if kind == "noise":
        return draw(st.binary(max_size=100))
    if kind == "deep":
        return b"[" * 10_000
    if kind == "cut":
        return bytes(data[: draw(st.integers(0, len(data)))])
    if kind == "value" and name.endswith(".json"):
        return json.dumps(_with_changed_value(draw, json.loads(data))).encode()
    for _ in range(draw(st.integers(1, 4))):
        # Headers stand at the beginning.
        data[draw(st.integers(0, min(len(data), 400) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def _with_changed_value(draw: st.DrawFn, tree: Any) -> Any:
    if isinstance(tree, dict) and tree and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(tree)))
        return {**tree, key: _with_changed_value(draw, tree[key])}
    if isinstance(tree, dict) and tree and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(tree)))
        return {name: value for name, value in tree.items() if name != key}
    return draw(JSON)


@SHORT
@given(damages())
def test_a_damaged_checkpoint_is_loaded_or_a_named_error(damage: Damage):
    folder = Path(tempfile.mkdtemp())
    try:
        for other, contents in _small_files().items():
            (folder / other).write_bytes(contents)
        (folder / damage.name).unlink()
        if damage.data is not None:
            (folder / damage.name).write_bytes(damage.data)
        _expect(CheckpointError, Tokenizer.load, folder)
        _expect(CheckpointError, ModelConfig.from_directory, folder)
        _expect(CheckpointError, model_hash, folder)
        _expect(CheckpointError, lambda: Checkpoint(folder).close())
    finally:
        shutil.rmtree(folder)


def _expect(error: type[Exception], call: Callable[..., Any], *arguments: Any) -> None:
    """The call returns or raises this error."""
    with contextlib.suppress(error):
        call(*arguments)


TARGETS = {
    "chat": test_a_chat_becomes_a_prompt_or_a_named_error,
    "control_tokens": test_text_makes_no_control_token,
    "configuration": test_a_configuration_is_one_or_a_named_error,
    "keys_file": test_a_keys_file_is_one_or_a_named_error,
    "checkpoint": test_a_damaged_checkpoint_is_loaded_or_a_named_error,
}
