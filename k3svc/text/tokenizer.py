"""The tokenizer of the Kimi line: byte-level BPE ranks in tiktoken's file format, then control slots.

Ids 0 .. ranks-1 are byte strings, ids ranks .. vocab_size-1 are control tokens. Text never becomes a control
token: `encode` knows ordinary text alone, control tokens are asked for by name with `encode_control`. No
token is put before or after a text.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tiktoken

from k3svc.errors import CheckpointError, InvalidRequest

CONTROL_SLOTS = 256
MAX_CONTROL_SLOTS = 1 << 16
"""Most ids beyond the ranks; what a file claims beyond that is a mistake, and would fill the memory with names."""
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_RUN = re.compile(r"\s+|\S+")


class Tokenizer:
    """Text to token ids and back. Immutable after construction, so threads may share one."""

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        control: Mapping[str, int],
        *,
        stop_token_ids: tuple[int, ...],
        fingerprint: str,
    ) -> None:
        """`ranks` maps each byte string to 0 .. n-1, `control` each name to one of the ids that follow."""
        self.control: Mapping[str, int] = MappingProxyType(dict(control))
        self.vocab_size = len(ranks) + len(control)
        self.stop_token_ids = stop_token_ids
        self.fingerprint = fingerprint
        by_id = sorted([*((i, b) for b, i in ranks.items()), *((i, n.encode()) for n, i in control.items())])
        self._bytes = tuple(token for _, token in by_id)
        self._encoding = tiktoken.Encoding(
            "k3svc", pat_str=SPLIT_PATTERN, mergeable_ranks=dict(ranks), special_tokens={}
        )

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read `tiktoken.model` and `tokenizer_config.json`, and the ids that end an answer from
        `config.json` and `generation_config.json` where they exist.

        Errors: CheckpointError naming the file and what is wrong with it.
        """
        ranks_path, config_path = directory / "tiktoken.model", directory / "tokenizer_config.json"
        data = _read(ranks_path)
        ranks = _parse_ranks(data, ranks_path)
        tokenizer_config = _read_json(config_path)
        vocab_size, eos_ids = _model_facts(directory)
        if vocab_size is None:
            vocab_size = len(ranks) + CONTROL_SLOTS
        control = _control_table(tokenizer_config, config_path, first=len(ranks), vocab_size=vocab_size)
        eos_ids += _named_ids(tokenizer_config.get("eos_token"), control)
        stop_token_ids = tuple(dict.fromkeys(eos_ids))
        if not stop_token_ids:
            raise CheckpointError(f"{directory}: no file names an eos token id")
        if bad := [i for i in stop_token_ids if not 0 <= i < vocab_size]:
            raise CheckpointError(f"{directory}: eos token ids {bad} are outside the vocabulary of {vocab_size}")
        table = json.dumps(sorted(control.items()), separators=(",", ":")).encode()
        fingerprint = hashlib.sha256(hashlib.sha256(data).digest() + table).hexdigest()
        return cls(ranks, control, stop_token_ids=stop_token_ids, fingerprint=fingerprint)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; a control token's name typed by a user is encoded letter by letter."""
        ids: list[int] = []
        for piece in _pieces(text):
            ids += self._encoding.encode_ordinary(piece)
        return ids

    def encode_control(self, name: str) -> int:
        """Id of the control token `name`. Errors: CheckpointError when there is none of this name."""
        if name not in self.control:
            raise CheckpointError(f"the tokenizer has no control token {name!r}")
        return self.control[name]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, control tokens by name, bytes that are no UTF-8 replaced by U+FFFD."""
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, of a control token its name. Errors: InvalidRequest outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequest("token_id", token_id, f"0 to {self.vocab_size - 1}")
        return self._bytes[token_id]

    def is_control(self, token_id: int) -> bool:
        """Whether an id of the vocabulary is one of the control slots."""
        return token_id >= self.vocab_size - len(self.control)


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces that cost the BPE engine neither deep recursion nor quadratic time.

    At most MAX_PIECE_CHARS a piece, and no run of white space (or of other characters) beyond MAX_RUN_CHARS.
    The cuts are those of the public tokenizer, so ids agree with it on long text too.
    """
    if len(text) <= MAX_RUN_CHARS:
        yield text
        return
    for start in range(0, len(text), MAX_PIECE_CHARS):
        part = text[start : start + MAX_PIECE_CHARS]
        done = 0
        for run in _RUN.finditer(part):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield part[done:cut]
                done = cut
        yield part[done:]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror}") from exc


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _parse_ranks(data: bytes, path: Path) -> dict[bytes, int]:
    """Lines `BASE64 RANK` with ranks 0, 1, 2 … in any order; every single byte must have one."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as exc:
            raise CheckpointError(f"{path}: line {number} is not 'BASE64 RANK': {line[:60]!r}") from exc
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: ranks are not 0 to {len(ranks) - 1}, each once")
    if missing := [i for i in range(256) if bytes([i]) not in ranks]:
        raise CheckpointError(f"{path}: single bytes without a rank: {missing[:8]}")
    return ranks


def _control_table(config: dict[str, Any], path: Path, *, first: int, vocab_size: int) -> dict[str, int]:
    """Name to id for ids first .. vocab_size-1 in order; slots without a name are `<|reserved_token_ID|>`."""
    names: dict[int, str] = {}
    try:
        for key, token in config["added_tokens_decoder"].items():
            names[int(key)] = str(token["content"])
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise CheckpointError(f"{path}: added_tokens_decoder is not a table of id and content: {exc!r}") from exc
    bad = [i for i in names if not first <= i < vocab_size]
    if bad or vocab_size < first:
        raise CheckpointError(
            f"{path}: control tokens {bad[:8]} do not fit between {first} ranks and a vocabulary of {vocab_size}"
        )
    if vocab_size - first > MAX_CONTROL_SLOTS:
        raise CheckpointError(
            f"{path}: a vocabulary of {vocab_size} after {first} ranks; at most {MAX_CONTROL_SLOTS} control tokens"
        )
    control = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(first, vocab_size)}
    if len(control) != vocab_size - first:
        raise CheckpointError(f"{path}: two control tokens have the same name")
    return control


def _model_facts(directory: Path) -> tuple[int | None, list[int]]:
    """`vocab_size` and all `eos_token_id`s of generation_config.json and config.json, in this order."""
    vocab_size: Any = None
    eos_ids: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        config = _read_json(path, optional=True)
        for part in (config, config.get("text_config", {})):
            if not isinstance(part, dict):
                raise CheckpointError(f"{path}: text_config is not a JSON object")
            vocab_size = part.get("vocab_size", vocab_size)
            eos = part.get("eos_token_id")
            eos_ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(i, int) for i in (vocab_size or 0, *eos_ids)):
            raise CheckpointError(f"{path}: vocab_size or eos_token_id is not an integer")
    return vocab_size, eos_ids


def _named_ids(value: Any, control: Mapping[str, int]) -> list[int]:
    """The id of a `tokenizer_config.json` token entry: absent, a name, or a table with `content`."""
    name = value.get("content") if isinstance(value, dict) else value
    return [control[name]] if isinstance(name, str) and name in control else []
