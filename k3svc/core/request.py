"""What a request is: its parameters, its identity and how it ends. Values only; schedulers own the changing state."""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from k3svc.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_REQUEST_ID_CHARS = 128
MAX_PRIORITY = 1000


class FinishReason(enum.Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; defaults are neutral. Ranges: `validate`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Unsigned 64 bit; the service draws one when the caller gave none."""

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
        )

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest for the first field out of range."""
        _in_range("sampling.temperature", self.temperature, 0.0, 100.0)
        _in_range("sampling.min_p", self.min_p, 0.0, 1.0)
        _in_range("sampling.presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("sampling.frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidRequest("sampling.top_p", self.top_p, "a number in (0, 1]")
        if not (math.isfinite(self.repetition_penalty) and 0.0 < self.repetition_penalty <= 10.0):
            raise InvalidRequest("sampling.repetition_penalty", self.repetition_penalty, "a number in (0, 10]")
        if not 0 <= self.top_k < 2**31:
            raise InvalidRequest("sampling.top_k", self.top_k, "0 (off) to 2147483647")
        if not 0 <= self.seed < 2**64:
            raise InvalidRequest("sampling.seed", self.seed, "0 to 2^64 - 1")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("sampling.logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS}")
        for token_id, bias in self.logit_bias.items():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest("sampling.logit_bias", token_id, f"token ids 0 to {vocab_size - 1}")
            _in_range(f"sampling.logit_bias[{token_id}]", bias, -100.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class StopParams:
    """When a sample ends."""

    max_tokens: int | None = None
    """Largest number of output tokens; None: up to the context limit."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest for the first field out of range."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest("stop.max_tokens", self.max_tokens, "at least 1")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise InvalidRequest("stop.min_tokens", self.min_tokens, "0 to max_tokens")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop.stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        for index, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(f"stop.stop[{index}]", text, f"1 to {MAX_STOP_STRING_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                "stop.stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}"
            )
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest("stop.stop_token_ids", token_id, f"token ids 0 to {vocab_size - 1}")


class Matcher(Protocol):
    """Where one output stands in a grammar. Not shared between outputs, nor between threads at a time."""

    def allowed(self, output: Sequence[int], drafts: Sequence[int] = ()) -> bytes:
        """A byte for each id of the vocabulary, not 0 where the id may follow `output` and then `drafts`. An output
        only grows from call to call; drafts are forgotten.
        """
        ...


class Grammar(Protocol):
    """What an output must be."""

    def matcher(self) -> Matcher:
        """For an output that has not begun."""
        ...


@dataclass(frozen=True, kw_only=True)
class Room:
    """A hand-off that a gateway arranged: it told both services of the prompt."""

    prefill: str
    """Name of the prefill service."""
    number: int


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One request for tokens, tokenised and complete."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    n: int = 1
    first_sample: int = 0
    """Number of the first of the n samples, by which their noise differs: a caller may ask for samples one by one."""
    generated: tuple[int, ...] = ()
    """Output tokens of an earlier attempt: absorbed by the decode path, counted, not sent again. Needs n = 1."""
    logprobs: int | None = None
    """Number of most likely tokens to report, None: no log-probabilities."""
    priority: int = 0
    """Smaller is served first, and preempted last."""
    grammar: Grammar | None = None
    """What each output must be; None: anything."""
    tenant: str = ""
    """Whose prompt it is: it never goes on from a cached one of somebody else. Empty: nobody's in particular."""
    room: Room | None = None
    """Where the state of the prompt comes from at first; None: from whichever prefill service is chosen."""

    def max_tokens_in_all(self, max_context_tokens: int) -> int:
        """Tokens of the prompt and of all samples when each grows to its limit."""
        longest = max(0, max_context_tokens - len(self.prompt))
        wanted = longest if self.stop.max_tokens is None else min(self.stop.max_tokens, longest)
        return len(self.prompt) + self.n * wanted

    def validate(self, *, vocab_size: int, max_context_tokens: int, max_samples: int) -> None:
        """Raises InvalidRequest naming the field. The limits are those of the service."""
        validate_request_id(self.request_id)
        validate_tokens("prompt", self.prompt, vocab_size)
        if not 1 <= len(self.prompt) < max_context_tokens:
            raise InvalidRequest("prompt", f"{len(self.prompt)} tokens", f"1 to {max_context_tokens - 1} tokens")
        self.sampling.validate(vocab_size)
        self.stop.validate(vocab_size)
        limit = max_context_tokens - len(self.prompt)
        if self.stop.max_tokens is not None and self.stop.max_tokens > limit:
            raise InvalidRequest(
                "stop.max_tokens",
                self.stop.max_tokens,
                f"at most {limit} after a prompt of {len(self.prompt)}",
            )
        if not 1 <= self.n <= max_samples:
            raise InvalidRequest("sampling.n", self.n, f"1 to {max_samples}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest("logprobs", self.logprobs, f"0 to {MAX_LOGPROBS}")
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidRequest("priority", self.priority, f"-{MAX_PRIORITY} to {MAX_PRIORITY}")
        validate_tokens("generated_token_ids", self.generated, vocab_size)
        if self.generated and self.n != 1:
            raise InvalidRequest("generated_token_ids", f"with n = {self.n}", "only with n = 1")
        if len(self.generated) >= (self.stop.max_tokens or limit):
            raise InvalidRequest(
                "generated_token_ids",
                f"{len(self.generated)} tokens",
                f"fewer than max_tokens = {self.stop.max_tokens or limit}",
            )


def validate_request_id(request_id: str) -> None:
    if not (1 <= len(request_id) <= MAX_REQUEST_ID_CHARS and request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest("request_id", request_id, f"1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters")


def validate_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest when any id lies outside the vocabulary."""
    if tokens and not (0 <= min(tokens) and max(tokens) < vocab_size):
        index, bad = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < vocab_size)
        raise InvalidRequest(f"{name}[{index}]", bad, f"token ids 0 to {vocab_size - 1}")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(name, value, f"a number in [{low:g}, {high:g}]")
