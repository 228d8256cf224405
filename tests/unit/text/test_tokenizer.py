"""The tokenizer against the golden ids, a slow encoder written from the ranks alone, and broken files."""

import base64
import json
import random
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from k3svc.errors import CheckpointError, InvalidRequest
from k3svc.text.tokenizer import Tokenizer, _pieces

# The alternatives as sets of code points instead of the product's intersections of classes.
UP, LOW, LEAD = (
    r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--\p{Han}]",
    r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--\p{Han}]",
    r"[^\r\n\p{L}\p{N}]?",
)
TAIL = r"(?:'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL]))?"
PIECES = regex.compile(
    rf"\p{{Han}}+|{LEAD}{UP}*{LOW}+{TAIL}|{LEAD}{UP}+{LOW}*{TAIL}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)


def slow_encode(ranks: dict[bytes, int], text: str) -> list[int]:
    """Split, then join the adjacent pair of lowest rank until none is left."""
    ids: list[int] = []
    for piece in PIECES.findall(text):
        parts = [bytes([b]) for b in piece.encode()]
        while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.fixture(scope="session")
def ranks(nano: Path) -> dict[bytes, int]:
    lines = (nano / "tiktoken.model").read_text().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


SCRIPTS = "aZé ñ\t\n\r'’sSTllREve日本語中文한국あアДжαΩאبहि12345٣½_-=()[]{}<|>.,;:#\"\\🙂👩‍👩‍👧́ǅʰª  "


def test_golden_prompts(tokenizer: Tokenizer, nano: Path) -> None:
    prompts = json.loads((nano / "golden.json").read_text())["prompts"]
    plain = [p for p in prompts if not p["text"].startswith("<|open|>")]
    assert len(plain) == 3
    for prompt in plain:
        assert tokenizer.encode(prompt["text"]) == prompt["ids"]
    for prompt in prompts:
        assert tokenizer.decode(prompt["ids"]) == prompt["text"]
        assert tokenizer.decode(prompt["continuation_ids"]) == prompt["continuation_text"]


def test_facts_of_nano(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 4096
    assert tokenizer.stop_token_ids == (3842, 3841)
    assert len(tokenizer.control) == 256
    assert tokenizer.encode_control("<|open|>") == tokenizer.control["<|open|>"] == 3843
    assert tokenizer.encode_control("<|reserved_token_3848|>") == 3848
    assert tokenizer.token_bytes(3845) == b"<|sep|>"
    assert tokenizer.token_bytes(780) == b"import"
    assert [tokenizer.is_control(i) for i in (0, 3839, 3840, 4095)] == [False, False, True, True]
    with pytest.raises(CheckpointError, match="no control token '<think>'"):
        tokenizer.encode_control("<think>")


@pytest.mark.parametrize("token_id", [-1, 4096])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(InvalidRequest, match="0 to 4095"):
        tokenizer.token_bytes(token_id)
    with pytest.raises(InvalidRequest, match="0 to 4095"):
        tokenizer.decode([5, token_id])


def test_control_names_in_text_stay_text(tokenizer: Tokenizer) -> None:
    text = "".join(tokenizer.control)
    ids = tokenizer.encode(text)
    assert max(ids) < 3840
    assert tokenizer.decode(ids) == text


def test_equals_the_slow_encoder_on_random_text(tokenizer: Tokenizer, ranks: dict[bytes, int]) -> None:
    rng = random.Random(7)
    for _ in range(400):
        text = "".join(rng.choices(SCRIPTS, k=rng.randrange(1, 60)))
        assert tokenizer.encode(text) == slow_encode(ranks, text), repr(text)
    for _ in range(100):
        points = (rng.choice((rng.randrange(0x3000), rng.randrange(0x110000))) for _ in range(20))
        text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        assert tokenizer.encode(text) == slow_encode(ranks, text), repr(text)


def by_piece(text: str) -> Tokenizer:
    """A tokenizer that joins every piece of `text` into one token: its ranks are all byte strings in `text`."""
    data = text.encode()
    found = {data[a:b] for a in range(len(data)) for b in range(a + 2, len(data) + 1)}
    tokens = [*(bytes([b]) for b in range(256)), *sorted(found, key=lambda token: (len(token), token))]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return Tokenizer(ranks, {"[EOS]": len(ranks)}, stop_token_ids=(len(ranks),), fingerprint="")


SPLITS = {
    "I've we'LL it'S he'd x'q 'tis": ["I've", " we'LL", " it'S", " he'd", " x", "'q", " '", "tis"],
    "HTTPServer getURL2": ["HTTPServer", " get", "URL", "2"],
    "a日本b 日本語x": ["a", "日本", "b", " ", "日本語", "x"],
    "A日本 ひらがなアZa": ["A", "日本", " ひらがなアZa"],
    "1234567": ["123", "456", "7"],
    "if (x):\n\n    y = 1\n": ["if", " (", "x", "):\n\n", "   ", " y", " =", " ", "1", "\n"],
    "end  \n  ": ["end", "  \n", "  "],
    "\tdéjà_vu": ["\tdéjà", "_vu"],
}


@pytest.mark.parametrize("text", SPLITS)
def test_splits(text: str) -> None:
    tokenizer = by_piece(text)
    assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == SPLITS[text] == PIECES.findall(text)


def test_splits_of_random_text() -> None:
    rng = random.Random(11)
    for _ in range(150):
        text = "".join(rng.choices(SCRIPTS, k=14))
        tokenizer = by_piece(text)
        assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == PIECES.findall(text)


def test_equals_the_slow_encoder_on_source_text(tokenizer: Tokenizer, ranks: dict[bytes, int]) -> None:
    text = Path(random.__file__).read_text()[:6000]
    assert tokenizer.encode(text) == slow_encode(ranks, text)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_can_be_spelled_and_decoded(tokenizer: Tokenizer, ranks: dict[bytes, int], data: bytes) -> None:
    ids = [ranks[bytes([b])] for b in data]
    assert b"".join(map(tokenizer.token_bytes, ids)) == data
    assert tokenizer.decode(ids) == data.decode("utf-8", errors="replace")


def test_lone_surrogates_do_not_fail(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def slow_pieces(text: str) -> list[str]:
    """Cut at every 400,000 characters; within, before the 25,001st of a run of one class, counting anew."""
    pieces, current, run = [], "", 0
    for i, char in enumerate(text):
        same = i % 400_000 > 0 and char.isspace() == text[i - 1].isspace()
        run = run + 1 if same else 1
        if i and (i % 400_000 == 0 or run > 25_000):
            pieces.append(current)
            current, run = "", 1
        current += char
    return [*pieces, current]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x" * 25_000,
        "x" * 25_001,
        " " * 60_000 + "y",
        "ab " * 20_000 + "\n" * 50_001 + "c" * 75_000 + " d",
        "word " * 170_000,
        "\x1c\u00a0\u3000" * 9_000 + "\u200b" * 26_000,
    ],
    ids=["empty", "limit", "over", "spaces", "mixed", "long", "odd-spaces"],
)
def test_long_text_is_cut(text: str) -> None:
    pieces = list(_pieces(text))
    assert pieces == slow_pieces(text)
    assert "".join(pieces) == text


def test_long_runs_are_encoded_in_reasonable_time(tokenizer: Tokenizer) -> None:
    text = "a" * 300_000 + " " * 300_000 + "日" * 100_000
    start = time.thread_time()
    ids = tokenizer.encode(text)
    assert time.thread_time() - start < 5
    assert tokenizer.decode(ids) == text


def test_fingerprint_follows_ranks_and_control_names(tokenizer: Tokenizer, nano: Path, tmp_path: Path) -> None:
    assert len(bytes.fromhex(tokenizer.fingerprint)) == 32
    assert Tokenizer.load(nano).fingerprint == tokenizer.fingerprint
    model = copy(nano, tmp_path)
    edit(model / "tokenizer_config.json", lambda c: c["added_tokens_decoder"]["3849"].update(content="[OTHER]"))
    renamed = Tokenizer.load(model).fingerprint
    text = (model / "tiktoken.model").read_text()
    first, last = text.splitlines()[0].split()[0], text.splitlines()[255].split()[0]
    (model / "tiktoken.model").write_text(
        text.replace(f"{first} 0\n", f"{last} 0\n").replace(f"{last} 255\n", f"{first} 255\n")
    )
    assert len({tokenizer.fingerprint, renamed, Tokenizer.load(model).fingerprint}) == 3


def copy(nano: Path, target: Path) -> Path:
    for name in ("tiktoken.model", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(nano / name, target / name)
    return target


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_unnamed_slots_and_missing_optional_files(nano: Path, tmp_path: Path) -> None:
    model = copy(nano, tmp_path)
    (model / "config.json").unlink()
    (model / "generation_config.json").unlink()
    edit(
        model / "tokenizer_config.json",
        lambda c: c.update(added_tokens_decoder={"3842": {"content": "<|im_end|>"}}, eos_token="<|im_end|>"),
    )
    tokenizer = Tokenizer.load(model)
    assert tokenizer.vocab_size == 4096
    assert tokenizer.control["<|reserved_token_3841|>"] == 3841
    assert tokenizer.control["<|im_end|>"] == 3842
    assert "<|open|>" not in tokenizer.control
    assert tokenizer.stop_token_ids == (3842,)


def test_stop_ids_come_from_every_file(nano: Path, tmp_path: Path) -> None:
    model = copy(nano, tmp_path)
    edit(model / "generation_config.json", lambda c: c.update(eos_token_id=3849))
    edit(model / "tokenizer_config.json", lambda c: c.update(eos_token={"content": "[EOS]"}))
    assert Tokenizer.load(model).stop_token_ids == (3849, 3842, 3841)


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("tiktoken.model", None, "cannot be read"),
        ("tiktoken.model", b"AA== 0\n?? 1\n", "line 2 is not 'BASE64 RANK'"),
        ("tiktoken.model", b"AA== 0\nAQ== two\n", "line 2 is not 'BASE64 RANK'"),
        ("tiktoken.model", b"AA== 0\nAQ== 2\n", "ranks are not 0 to 1"),
        ("tiktoken.model", b"AA== 0\nAQ== 1\n", "single bytes without a rank"),
        ("tokenizer_config.json", None, "cannot be read"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"\xff\xfe\x00", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "expected a JSON object, found list"),
        ("tokenizer_config.json", b"{}", "added_tokens_decoder"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"3840": "a"}}', "added_tokens_decoder"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"4096": {"content": "a"}}}', r"\[4096\] do not fit"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"3839": {"content": "a"}}}', r"\[3839\] do not fit"),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"3840": {"content": "a"}, "3841": {"content": "a"}}}',
            "the same name",
        ),
        ("config.json", b"nonsense", "not valid JSON"),
        ("config.json", b'{"vocab_size": "many"}', "not an integer"),
        ("config.json", b'{"text_config": 5}', "text_config is not a JSON object"),
        ("generation_config.json", b'{"eos_token_id": [3842, "x"]}', "not an integer"),
    ],
)
def test_broken_files_are_named(nano: Path, tmp_path: Path, name: str, content: bytes | None, cause: str) -> None:
    model = copy(nano, tmp_path)
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=cause) as caught:
        Tokenizer.load(model)
    assert str(model / name) in caught.value.message


def test_sizes_that_do_not_fit_together(nano: Path, tmp_path: Path) -> None:
    model = copy(nano, tmp_path)
    edit(model / "generation_config.json", lambda c: c.update(eos_token_id=5000))
    with pytest.raises(CheckpointError, match=r"eos token ids \[5000\] are outside the vocabulary of 4096"):
        Tokenizer.load(model)
    (model / "config.json").write_text('{"vocab_size": 512}')
    with pytest.raises(CheckpointError, match="do not fit between 3840 ranks and a vocabulary of 512"):
        Tokenizer.load(model)


def test_a_model_without_eos_is_refused(nano: Path, tmp_path: Path) -> None:
    model = copy(nano, tmp_path)
    (model / "generation_config.json").unlink()
    (model / "config.json").unlink()
    edit(model / "tokenizer_config.json", lambda c: c.pop("eos_token"))
    with pytest.raises(CheckpointError, match="no file names an eos token id"):
        Tokenizer.load(model)
