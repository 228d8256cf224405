"""What a load test asks for and when: requests that are drawn, or read from a file or a trace.

Everything that is drawn comes from a seed, so that two runs ask for the same.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from k3svc.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
"""Tokens behind one hash id of a trace in Mooncake's format."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One request: exactly one of text, tokens and messages."""

    text: str | None = None
    tokens: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    output_len: int
    """Tokens to ask for."""
    due_s: float = 0.0
    """When to send it, in seconds from the start; 0 with a closed loop."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Lengths in tokens of requests that are drawn."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    """Lengths are drawn evenly from [len (1 - ratio), len (1 + ratio)]."""
    prefix_len: int = 0
    """Tokens before those of input_len that several requests have in common."""
    num_prefixes: int = 1
    """Different shared prefixes, which requests take in turn."""

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')}: got {getattr(self, name)}; allowed: at least 1")
        if not 0.0 <= self.range_ratio < 1.0:
            raise ConfigError(f"range-ratio: got {self.range_ratio}; allowed: 0 to below 1")
        if self.prefix_len < 0:
            raise ConfigError(f"prefix-len: got {self.prefix_len}; allowed: at least 0")


def synthetic(count: int, shape: Shape, *, vocab_size: int, seed: int) -> list[Item]:
    """Requests of random token ids below `vocab_size`."""
    rng = np.random.default_rng(seed)
    prefixes = [_draw_tokens(rng, shape.prefix_len, vocab_size) for _ in range(shape.num_prefixes)]
    return [
        Item(
            tokens=prefixes[index % shape.num_prefixes]
            + _draw_tokens(rng, _draw_length(rng, shape.input_len, shape.range_ratio), vocab_size),
            output_len=_draw_length(rng, shape.output_len, shape.range_ratio),
        )
        for index in range(count)
    ]


def from_file(path: Path, count: int, *, output_len: int) -> list[Item]:
    """`count` requests of a JSON Lines file, from its start again when it has fewer.

    A line is an object with `prompt` (text), `tokens` or `messages`, and if need be `output_tokens`, else `output_len`.
    Raises ConfigError with the line that is wrong.
    """
    lines = [_file_item(value, place, output_len) for place, value in _json_lines(path)]
    return [lines[index % len(lines)] for index in range(count)]


def from_trace(path: Path, count: int | None, *, vocab_size: int, seed: int, speed: float = 1.0) -> list[Item]:
    """The first `count` requests of a trace, all with None; `speed` 2 sends them twice as fast.

    A line is an object in the format of Mooncake's traces: `timestamp` (ms), `input_length`, `output_length`, and if
    need be `hash_ids`: requests share the 512 tokens behind each id that they have in common. Raises ConfigError.
    """
    lines = list(_json_lines(path))[:count]
    first = min((value.get("timestamp", 0) for _, value in lines), default=0)
    return [
        _trace_item(value, place, first, speed, vocab_size, seed + index) for index, (place, value) in enumerate(lines)
    ]


def with_arrivals(items: Sequence[Item], rate: float, *, burstiness: float, seed: int) -> list[Item]:
    """The requests at `rate` a second: gaps from a gamma distribution of shape `burstiness`. 1 makes a Poisson process;
    less is burstier, more is steadier.
    """
    if not (rate > 0 and burstiness > 0):
        raise ConfigError(f"request-rate and burstiness: got {rate} and {burstiness}; allowed: more than 0")
    if math.isinf(rate):
        return [replace(item, due_s=0.0) for item in items]
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), len(items))
    return [replace(item, due_s=float(due)) for item, due in zip(items, np.cumsum(gaps) - gaps[:1], strict=True)]


def _draw_length(rng: np.random.Generator, length: int, ratio: float) -> int:
    return max(1, int(rng.integers(math.ceil(length * (1 - ratio)), math.floor(length * (1 + ratio)) + 1)))


def _draw_tokens(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    drawn: list[int] = rng.integers(0, vocab_size, count).tolist()
    return drawn


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for errors, object) of each line that is not empty."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    found = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"{path} has no requests")
    for place, line in found:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place} is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{place}: expected an object, got {type(value).__name__}")
        yield place, value


def _file_item(value: dict[str, Any], place: str, output_len: int) -> Item:
    kinds = {"prompt": str, "tokens": list, "messages": list}
    given = [kind for kind in kinds if kind in value]
    if len(given) != 1 or not isinstance(value[given[0]], kinds[given[0]]):
        raise ConfigError(f"{place}: expected exactly one of prompt (text), tokens and messages (lists)")
    asked = value.get("output_tokens", output_len)
    if not _is_count(asked) or asked < 1:
        raise ConfigError(f"{place}: output_tokens: got {asked!r}; allowed: at least 1")
    if given[0] == "tokens" and not (value["tokens"] and all(_is_count(token) for token in value["tokens"])):
        raise ConfigError(f"{place}: tokens: expected token ids, at least one")
    text, tokens, messages = (value.get(kind) for kind in kinds)
    return Item(text=text, tokens=tokens, messages=messages, output_len=asked)


def _trace_item(value: dict[str, Any], place: str, first_ms: float, speed: float, vocab_size: int, seed: int) -> Item:
    try:
        due_s = (float(value["timestamp"]) - first_ms) / 1e3 / speed
        input_len, output_len = int(value["input_length"]), int(value["output_length"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{place}: expected numbers timestamp, input_length and output_length") from error
    if input_len < 1 or output_len < 1:
        raise ConfigError(f"{place}: input_length and output_length: allowed: at least 1")
    tokens: list[int] = []
    for block in value.get("hash_ids", ()):
        tokens += _draw_tokens(np.random.default_rng([block, 0]), TRACE_BLOCK_TOKENS, vocab_size)
    rest = input_len - len(tokens)
    tokens += _draw_tokens(np.random.default_rng([seed, 1]), max(0, rest), vocab_size)
    return Item(tokens=tokens[:input_len], output_len=output_len, due_s=due_s)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
