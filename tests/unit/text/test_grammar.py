"""Grammars against strings that are in them and strings that are not, walked token by token."""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from k3svc.errors import InvalidRequest
from k3svc.text.chat import ChatMessage, encode_k3
from k3svc.text.grammar import Constraint, GrammarCompiler, Kind, LlgGrammar
from k3svc.text.tokenizer import Tokenizer
from k3svc.text.xtml import CLOSE, END_OF_MESSAGE, OPEN, SEP

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["a", "bc"]}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer(nano: Path) -> Tokenizer:
    return Tokenizer.load(nano)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def compile_(compiler: GrammarCompiler, kind: Kind, text: str, prompt: Sequence[int] = ()) -> LlgGrammar:
    return compiler.compile(Constraint(kind=kind, text=text, field="f"), prompt)


def num_allowed(grammar: LlgGrammar, output: Sequence[int]) -> int:
    """How many tokens of an output the grammar lets pass, one after the other."""
    matcher = grammar.matcher()
    for count, token_id in enumerate(output):
        if not matcher.allowed(output[:count])[token_id]:
            return count
    return len(output)


def allowed_ids(mask: bytes) -> list[int]:
    return [token_id for token_id, allowed in enumerate(mask) if allowed]


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[a-c]+x/?", ["ax", "abcabcx", "bx/"], ["x", "adx", "ax//"]),
        (
            "json_schema",
            SCHEMA,
            ['{"name":"bc","ok":true}', '{"name": "a", "ok": false}'],
            ['{"ok":true}', "[1]", '{"name":  "a","ok":true}'],
        ),
        ("ebnf", 'root ::= "0" | "1" root', ["0", "1110"], ["11", "2"]),
    ],
)
def test_an_output_passes_exactly_when_it_is_in_the_language(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind: Kind, text: str, good: list[str], bad: list[str]
) -> None:
    grammar = compile_(compiler, kind, text)
    eos = tokenizer.stop_token_ids[0]
    for string in good:
        ids = [*tokenizer.encode(string), eos]
        assert num_allowed(grammar, ids) == len(ids), string
    for string in bad:
        ids = [*tokenizer.encode(string), eos]
        assert num_allowed(grammar, ids) < len(ids), string


def test_only_the_end_follows_a_complete_output(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compile_(compiler, "regex", "ab").matcher()
    assert allowed_ids(matcher.allowed(tokenizer.encode("ab"))) == sorted(tokenizer.stop_token_ids)


def test_what_is_allowed_is_what_a_regular_expression_says(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Every id of the vocabulary, against the standard library: a prefix of [0-9]{1,3}."""
    mask = compile_(compiler, "regex", "[0-9]{1,3}").matcher().allowed([])
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id)
        wanted = not tokenizer.is_control(token_id) and re.fullmatch(rb"[0-9]{1,3}", text) is not None
        assert bool(mask[token_id]) is wanted, text


def test_samples_and_drafts_do_not_disturb_each_other(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compile_(compiler, "json_schema", SCHEMA)
    output = tokenizer.encode('{"name":"bc","ok":true}')
    plain, drafted = grammar.matcher(), grammar.matcher()
    eos = tokenizer.stop_token_ids[0]
    wrong = next(i for i in range(tokenizer.vocab_size) if not plain.allowed([])[i])
    for count in range(len(output)):
        want = [grammar.matcher().allowed(output[: count + extra]) for extra in range(len(output) - count)]
        drafts = [output[count : count + extra] for extra in range(len(output) - count)]
        assert [drafted.allowed(output[:count], draft) for draft in drafts] == want
        assert set(drafted.allowed(output[:count], [wrong, 5])) == {1}, "a row that is never used"
        assert plain.allowed(output[:count]) == want[0]
    assert drafted.allowed(output, [eos]) and drafted.allowed(output) == plain.allowed(output)


@pytest.mark.parametrize("thinking", [False, True])
def test_in_a_conversation_the_answer_is_bound_and_its_frame_given(
    compiler: GrammarCompiler, tokenizer: Tokenizer, thinking: bool
) -> None:
    prompt = encode_k3(tokenizer, [ChatMessage(role="user", content="Answer.")], thinking=thinking)
    grammar = compile_(compiler, "json_schema", SCHEMA, prompt)
    control = {name: tokenizer.encode_control(name) for name in (OPEN, CLOSE, SEP, END_OF_MESSAGE)}

    def ids(*parts: str) -> list[int]:
        return list(itertools.chain(*([control[p]] if p in control else tokenizer.encode(p) for p in parts)))

    thought = ("Let me {see}.", CLOSE, "think", SEP, OPEN, "response", SEP) if thinking else ()
    end = (CLOSE, "response", SEP, CLOSE, "message", SEP, END_OF_MESSAGE)
    answer = '{"name":"a","ok":false}'
    good = ids(*thought, answer, *end)
    assert num_allowed(grammar, good) == len(good)
    for bad in (ids(*thought, "Sure: ", answer, *end), ids(*thought, answer, END_OF_MESSAGE), ids(answer, *end)[:-1]):
        assert num_allowed(grammar, bad) < len(bad) or bad[-1] != control[END_OF_MESSAGE]
    if thinking:
        assert num_allowed(grammar, ids("Thought", END_OF_MESSAGE)) == len(ids("Thought"))


def call_tag(name: str, argument: dict[str, object]) -> dict[str, object]:
    """As smg writes it for K3, with one argument x."""
    elements = [
        {"type": "const_string", "value": f'{OPEN}call tool="{name}" index="'},
        {"type": "regex", "pattern": "[1-9][0-9]*"},
        {"type": "const_string", "value": f'"{SEP}{OPEN}argument key="x" type="number"{SEP}'},
        argument,
        {"type": "const_string", "value": f"{CLOSE}argument{SEP}{CLOSE}call{SEP}"},
    ]
    return {"type": "sequence", "elements": elements}


def tools_tag(*, at_least_one: bool) -> str:
    calls = [
        call_tag("add", {"type": "json_schema", "json_schema": {"type": "integer"}}),
        call_tag("say", {"type": "any_text"}),
    ]
    content = {"type": "plus", "content": {"type": "or", "elements": calls}}
    begins = [f"{OPEN}tools{SEP}", f"{CLOSE}response{SEP}{OPEN}tools{SEP}"]
    form = {
        "type": "triggered_tags",
        "triggers": [f"{OPEN}tools{SEP}", f"{CLOSE}response{SEP}"],
        "tags": [{"begin": begin, "content": content, "end": f"{CLOSE}tools{SEP}"} for begin in begins],
        "at_least_one": at_least_one,
    }
    return json.dumps({"format": form})


@pytest.mark.parametrize("at_least_one", [False, True])
def test_structural_tags_bind_tool_calls_and_leave_the_rest_free(
    compiler: GrammarCompiler, tokenizer: Tokenizer, at_least_one: bool
) -> None:
    grammar = compile_(compiler, "structural_tag", tools_tag(at_least_one=at_least_one))
    control = re.compile("(" + "|".join(map(re.escape, (OPEN, CLOSE, SEP, END_OF_MESSAGE))) + ")")

    def ids(text: str) -> list[int]:
        parts = control.split(text)
        return [
            i for p in parts for i in ([tokenizer.encode_control(p)] if control.fullmatch(p) else tokenizer.encode(p))
        ]

    def call(name: str, value: str, index: str = "1") -> str:
        head = f'{OPEN}call tool="{name}" index="{index}"{SEP}{OPEN}argument key="x" type="number"{SEP}'
        return f"{head}{value}{CLOSE}argument{SEP}{CLOSE}call{SEP}"

    end = f"{CLOSE}message{SEP}{END_OF_MESSAGE}"
    start, stop = f"{CLOSE}response{SEP}{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}"
    good = [
        f"Let me add.{start}{call('add', '12')}{stop}{end}",
        f"{start}{call('say', 'hi <there>')}{call('add', '-3', '2')}{stop}{end}",
    ]
    bad = [
        f"{start}{call('add', 'twelve')}{stop}{end}",
        f"{start}{call('mul', '1')}{stop}{end}",
        f"{start}{call('add', '1', '0')}{stop}{end}",
        f"{start}{stop}{end}",
        f"Done.{CLOSE}response{SEP}{end}",
    ]
    for text in good:
        assert num_allowed(grammar, ids(text)) == len(ids(text)), text
    for text in bad:
        assert num_allowed(grammar, ids(text)) < len(ids(text)), text
    without = ids(f"No tool.{end}")
    assert (num_allowed(grammar, without) == len(without)) is not at_least_one


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"type": "triggered_tags", "triggers": ["<tool>"], "tags": []}, "trigger '<tool>'"),
        ({"type": "sequence"}, "needs 'elements'"),
        ({"type": "grammar"}, "'grammar' are not known"),
        ({"type": "const_string", "value": 3}, "another type"),
        (None, "with a format"),
    ],
)
def test_structural_tags_that_are_not_understood_are_refused(
    compiler: GrammarCompiler, form: object, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        compile_(compiler, "structural_tag", json.dumps({"format": form}))


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "[a-", "unclosed"),
        ("json_schema", "not json", "line 1"),
        ("json_schema", '{"type":"x"}', "Invalid type"),
    ],
)
def test_what_does_not_compile_is_refused_by_the_name_of_the_field(
    compiler: GrammarCompiler, kind: Kind, text: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^f: .*{reason}") as caught:
        compile_(compiler, kind, text)
    assert caught.value.field == "f"
