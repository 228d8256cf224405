"""Structural tags, by which gateways ask for tool calls, as Lark grammars of llguidance.

A format is a JSON object with a type; the leaves are constant strings, regular expressions, JSON schemas and any text.
Names of control tokens in a string are the tokens themselves. `triggered_tags` leaves the text free until a trigger,
after which one of the tags that begin with it must follow; triggers here are marks of K3's format, such as
`<|open|>tools<|sep|>`, so that text that a token spells cannot be one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from k3svc.text.xtml import CLOSE, OPEN, SEP

JSON_OPTIONS: Any = {"whitespace_pattern": " ?"}
"""At most one space between the parts of a JSON value: a small model may go on with white space for ever."""
MAX_DEPTH = 32

_TRIGGER = re.compile(f"({re.escape(OPEN)}|{re.escape(CLOSE)})([^<]*){re.escape(SEP)}")
_ANY = "/(.|\\n)+/"


def structural_tag_to_lark(text: str, control: Sequence[str]) -> str:
    """`control`: names of control tokens. Raises ValueError that says what is not understood."""
    value = json.loads(text)
    known = isinstance(value, dict) and isinstance(value.get("format"), dict)
    if not known:
        raise ValueError("expected an object with a format")
    writer = _Writer(control)
    start = writer.rule(value["format"])
    return "\n".join([f"start: {start}", f"ANY: {_ANY}", *writer.terminals]) + "\n"


class _Writer:
    """Expressions of Lark, and the terminals that they need."""

    def __init__(self, control: Sequence[str]) -> None:
        self.terminals: list[str] = []
        self._names = re.compile("(" + "|".join(map(re.escape, control)) + ")")

    def rule(self, value: Mapping[str, Any], depth: int = 0) -> str:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        try:
            return self._rule(value, depth + 1)
        except KeyError as error:
            raise ValueError(f"a format of type {value.get('type')!r} needs {error}") from error
        except (AttributeError, TypeError) as error:
            raise ValueError(f"a format of type {value.get('type')!r} has a value of another type") from error

    def _rule(self, value: Mapping[str, Any], depth: int) -> str:
        kind = value["type"]
        if kind == "const_string":
            return self._literal(value["value"])
        if kind == "regex":
            return _regex(value["pattern"])
        if kind == "json_schema":
            return _schema(value["json_schema"])
        if kind == "any_text":
            return "ANY?"
        if kind == "sequence":
            return " ".join(f"({self.rule(element, depth)})" for element in value["elements"])
        if kind == "or":
            return " | ".join(f"({self.rule(element, depth)})" for element in value["elements"])
        if kind in _REPEATED:
            return f"({self.rule(value['content'], depth)}){_REPEATED[kind]}"
        if kind == "tag":
            return self._tag(value, depth)
        if kind == "triggered_tags":
            return self._triggered_tags(value, depth)
        raise ValueError(f"formats of type {kind!r} are not known")

    def _tag(self, value: Mapping[str, Any], depth: int) -> str:
        return f"{self._literal(value['begin'])} ({self.rule(value['content'], depth)}) {self._literal(value['end'])}"

    def _triggered_tags(self, value: Mapping[str, Any], depth: int) -> str:
        names: dict[str, list[str]] = {OPEN: [], CLOSE: []}
        for trigger in value["triggers"]:
            found = _TRIGGER.fullmatch(trigger)
            if found is None:
                raise ValueError(f"trigger {trigger!r} is no mark of K3's format")
            names[found[1]].append(found[2])
        free = f"(ANY | {' | '.join(self._other(mark, forbidden) for mark, forbidden in names.items())})*"
        tags = " | ".join(f"({self._tag(tag, depth)})" for tag in value["tags"])
        return f"{free} (({tags}) {free}){'+' if value.get('at_least_one') else '*'}"

    def _other(self, mark: str, forbidden: Sequence[str]) -> str:
        """An element whose name is none of the forbidden ones."""
        name = f"OTHER_{len(self.terminals)}"
        exclude = "".join(f" & ~{_regex(re.escape(word))}" for word in forbidden)
        self.terminals.append(f"{name}: {_ANY}{exclude}")
        return f"{mark} {name} {SEP}"

    def _literal(self, text: str) -> str:
        parts = [part for part in self._names.split(text) if part]
        return " ".join(part if self._names.fullmatch(part) else json.dumps(part) for part in parts)


_REPEATED = {"plus": "+", "star": "*", "optional": "?"}


def _regex(pattern: str) -> str:
    grammar = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return str(grammar).removeprefix("start: ")


def _schema(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"
