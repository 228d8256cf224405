"""Grammars of outputs: as masks over the vocabulary, made by llguidance.

In a conversation of K3 a grammar is about the text of the answer. What stands before it (the think channel, if the
prompt has opened it) is free, the marks around it are those of the format, and after the last mark the output ends.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import llguidance

from k3svc.errors import InvalidRequest
from k3svc.text.structural_tag import JSON_OPTIONS, structural_tag_to_lark
from k3svc.text.tokenizer import Tokenizer
from k3svc.text.xtml import CLOSE, OPEN, SEP

Kind = Literal["regex", "json_schema", "ebnf", "structural_tag"]

_FREE = "FREE: /(.|\\n)*/\n"


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What an output must be, as its caller wrote it."""

    kind: Kind
    text: str
    field: str
    """Name of the caller's field, for errors."""


class LlgMatcher:
    """`k3svc.core.request.Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_consumed = 0
        self._everything = bytes([1]) * vocab_size

    def allowed(self, output: Sequence[int], drafts: Sequence[int] = ()) -> bytes:
        new = output[self._num_consumed :]
        self._num_consumed += len(new)
        self._matcher.consume_tokens(list(new))
        num_tried = self._matcher.try_consume_tokens(list(drafts)) if drafts else 0
        # The row after a draft that is not allowed is never used.
        mask = self._matcher.compute_logit_bias() if num_tried == len(drafts) else self._everything
        if num_tried:
            self._matcher.rollback(num_tried)
        return mask


@dataclass(frozen=True, kw_only=True)
class LlgGrammar:
    """`k3svc.core.request.Grammar`."""

    start: Callable[[], LlgMatcher]

    def matcher(self) -> LlgMatcher:
        return self.start()


class GrammarCompiler:
    """Grammars for the outputs of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._control = list(tokenizer.control)
        self._tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer)),
            n_vocab=tokenizer.vocab_size,
            eos_token=list(tokenizer.stop_token_ids),
        )
        self._frames = _frames(tokenizer) if OPEN in tokenizer.control and SEP in tokenizer.control else {}

    def compile(self, constraint: Constraint, prompt: Sequence[int]) -> LlgGrammar:
        """The grammar of the output after a prompt. Takes milliseconds, or longer for a large schema. Raises
        InvalidRequest.
        """
        try:
            grammar = self._grammar(constraint, prompt)
            error = llguidance.LLMatcher.validate_grammar(grammar, self._tokens)
        except ValueError as caught:
            error = str(caught)
        if error:
            raise InvalidRequest(constraint.field, constraint.text, f"what compiles ({' '.join(error.split())[:200]})")
        first = llguidance.LLMatcher(self._tokens, grammar)
        return LlgGrammar(start=lambda: LlgMatcher(first.deep_copy(), self._vocab_size))

    def _grammar(self, constraint: Constraint, prompt: Sequence[int]) -> str:
        """JSON or Lark, both of which llguidance takes. Raises ValueError."""
        if constraint.kind == "structural_tag":
            # It is about the whole output, marks included.
            return structural_tag_to_lark(constraint.text, self._control)
        if constraint.kind == "json_schema":
            schema = llguidance.LLMatcher.grammar_from_json_schema(constraint.text, overrides=JSON_OPTIONS)
            return self._framed(schema, prompt)
        return self._framed(llguidance.grammar_from(constraint.kind, constraint.text), prompt)

    def _framed(self, body: str, prompt: Sequence[int]) -> str:
        for tail, (before, after) in self._frames.items():
            if tuple(prompt[-len(tail) :]) == tail:
                main = {"name": "main", "lark_grammar": f"start: {before} @body {after}\n{_FREE}"}
                return json.dumps({"grammars": [main, {**_first_grammar(body), "name": "body"}]})
        return body


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.stop_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control.values())

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode())


def _frames(tokenizer: Tokenizer) -> dict[tuple[int, ...], tuple[str, str]]:
    """Last ids of a prompt → what Lark has before and after the text of the answer."""
    open_mark, sep = tokenizer.encode_control(OPEN), tokenizer.encode_control(SEP)
    close = f'{CLOSE} "response" {SEP} {CLOSE} "message" {SEP}'
    think, response = ((open_mark, *tokenizer.encode(name), sep) for name in ("think", "response"))
    return {
        think: (f'FREE {CLOSE} "think" {SEP} {OPEN} "response" {SEP}', close),
        response: ("", close),
    }


def _first_grammar(body: str) -> dict[str, object]:
    if body.lstrip().startswith("{"):
        grammar: dict[str, object] = json.loads(body)["grammars"][0]
        return {key: value for key, value in grammar.items() if value is not None}
    return {"lark_grammar": body}
