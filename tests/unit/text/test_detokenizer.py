"""Incremental decoding equals decoding at once, and stop strings behave like a search in the whole text."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3svc.errors import InvalidRequest
from k3svc.text.detokenizer import IncrementalDetokenizer
from k3svc.text.tokenizer import Tokenizer

OPEN, SEP = 3843, 3845


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, so that characters and stop strings lie across tokens."""
    table = {tokenizer.token_bytes(i): i for i in range(256)}
    return [table[bytes([b])] for b in data]


def split(items: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(c % (len(items) + 1) for c in cuts), len(items)]
    return [items[a:b] for a, b in pairwise(edges)]


def run(detokenizer: IncrementalDetokenizer, blocks: list[list[int]]) -> tuple[list[str], str | None, int]:
    """(deltas with the tail, stop string, tokens consumed)."""
    texts, stopped_by, consumed = [], None, 0
    for block in blocks:
        delta = detokenizer.push(block)
        texts.append(delta.text)
        consumed += delta.num_tokens_consumed
        assert stopped_by in {None, delta.stopped_by}
        stopped_by = delta.stopped_by
    return [*texts, detokenizer.finish()], stopped_by, consumed


ids_strategy = st.lists(st.integers(0, 4095), max_size=40)
cuts_strategy = st.lists(st.integers(0, 1000), max_size=8)


@given(ids=ids_strategy, cuts=cuts_strategy)
@settings(max_examples=300)
def test_deltas_join_to_the_whole_text(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    texts, stopped_by, consumed = run(IncrementalDetokenizer(tokenizer, skip_control=False), split(ids, cuts))
    assert "".join(texts) == tokenizer.decode(ids)
    assert (stopped_by, consumed) == (None, len(ids))


@given(
    data=st.binary(max_size=40) | st.text(max_size=20).map(lambda t: t.encode("utf-8", "replace")), cuts=cuts_strategy
)
@settings(max_examples=300)
def test_any_bytes_in_any_split(tokenizer: Tokenizer, data: bytes, cuts: list[int]) -> None:
    texts, _, _ = run(IncrementalDetokenizer(tokenizer), split(byte_ids(tokenizer, data), cuts))
    assert "".join(texts) == data.decode("utf-8", errors="replace")


@given(ids=st.lists(st.integers(3800, 3900) | st.integers(0, 255), max_size=30), cuts=cuts_strategy)
@settings(max_examples=100)
def test_control_tokens_are_skipped(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    texts, _, consumed = run(IncrementalDetokenizer(tokenizer), split(ids, cuts))
    assert "".join(texts) == tokenizer.decode(i for i in ids if i < 3840)
    assert consumed == len(ids)


def test_never_half_a_character(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    texts = [detokenizer.push([i]).text for i in byte_ids(tokenizer, "é🙂!".encode())]
    assert texts == ["", "é", "", "", "", "🙂", "!"]
    detokenizer.push(byte_ids(tokenizer, "日".encode()[:2]))
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_control_names_on_request(tokenizer: Tokenizer) -> None:
    ids = [OPEN, *tokenizer.encode("think"), SEP]
    assert IncrementalDetokenizer(tokenizer, skip_control=False).push(ids).text == "<|open|>think<|sep|>"
    assert IncrementalDetokenizer(tokenizer).push(ids).text == "think"
    stopping = IncrementalDetokenizer(tokenizer, skip_control=False, stop=["<|open|>think<|sep|>"])
    assert run(stopping, [[*ids, 5]]) == (["", ""], "<|open|>think<|sep|>", len(ids))


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The shortest beginning of `text` that ends with a stop string, less the longest such stop string."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text(alphabet="abé🙂", max_size=25),
    stop=st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=cuts_strategy,
)
@settings(max_examples=500)
def test_stop_strings_equal_a_search_of_the_whole(
    tokenizer: Tokenizer, text: str, stop: list[str], cuts: list[int]
) -> None:
    data = text.encode()
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stop)
    texts, stopped_by, consumed = run(detokenizer, split(byte_ids(tokenizer, data), cuts))
    expected_text, expected_stop = first_stop(text, stop)
    assert "".join(texts) == expected_text
    assert stopped_by == expected_stop
    expected_bytes = len(data) if expected_stop is None else len((expected_text + expected_stop).encode())
    assert consumed == expected_bytes
    assert detokenizer.push([5]).num_tokens_consumed == (0 if expected_stop else 1)


@given(
    text=st.text(alphabet="abé", max_size=25),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=3),
)
@settings(max_examples=200)
def test_holds_back_exactly_what_may_become_a_stop_string(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stop)
    given_out = ""
    for end, char in enumerate(text, 1):
        delta = detokenizer.push(byte_ids(tokenizer, char.encode()))
        given_out += delta.text
        if delta.stopped_by:
            return
        seen = text[:end]
        beginnings = (seen[i:] for i in range(end) if any(s.startswith(seen[i:]) for s in stop))
        assert given_out + next(beginnings, "") == seen


def test_stop_string_within_a_pushed_block(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("import os\nimport sys\n\ndef main(")
    assert [tokenizer.token_bytes(i) for i in ids[3:6]] == [b"import", b" sys", b"\n\n"]
    delta = IncrementalDetokenizer(tokenizer, stop=["s\n"]).push(ids)
    assert (delta.text, delta.stopped_by, delta.num_tokens_consumed) == ("import o", "s\n", 3)
    delta = IncrementalDetokenizer(tokenizer, stop=["sys", "\nd"]).push(ids)
    assert (delta.text, delta.stopped_by, delta.num_tokens_consumed) == ("import os\nimport ", "sys", 5)


def test_a_stop_string_that_never_completes_is_given_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["END🙂"])
    texts, stopped_by, _ = run(detokenizer, [byte_ids(tokenizer, b"the END"), byte_ids(tokenizer, "🙂".encode()[:3])])
    assert texts == ["the ", "", "END\ufffd"]
    assert stopped_by is None


def test_the_replaced_tail_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    texts, _, _ = run(IncrementalDetokenizer(tokenizer, stop=["x\ufffd"]), [byte_ids(tokenizer, b"ax\xe6")])
    assert texts == ["a", ""]


def test_nothing_after_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["b"])
    assert detokenizer.push(byte_ids(tokenizer, b"ab")).num_tokens_consumed == 2
    later = detokenizer.push(byte_ids(tokenizer, b"cd"))
    assert (later.text, later.stopped_by, later.num_tokens_consumed) == ("", "b", 0)
    assert detokenizer.finish() == ""


def test_half_a_character_after_a_stop_string_is_dropped() -> None:
    ranks = {bytes([b]): b for b in range(256)} | {b"b\xe6": 256}
    tokenizer = Tokenizer(ranks, {"[EOS]": 257}, stop_token_ids=(257,), fingerprint="")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["b"])
    assert detokenizer.push([97, 256, 97]).num_tokens_consumed == 2
    assert detokenizer.finish() == ""


def test_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"stop\[1\]"):
        IncrementalDetokenizer(tokenizer, stop=["a", ""])


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="0 to 4095"):
        IncrementalDetokenizer(tokenizer).push([4096])


def test_state_does_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["a" * 50])
    for _ in range(2000):
        detokenizer.push([rng.randrange(4096)])
        assert len(detokenizer._held) < 50


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one stop two stop three")
    completed = next(i for i in range(len(ids)) if "stop" in tokenizer.decode(ids[: i + 1])) + 1
    wanted = {0: "one ", completed: "one ", completed + 1: "one stop two ", len(ids) + 1: "one stop two stop three"}
    for min_tokens, text in wanted.items():
        detokenizer = IncrementalDetokenizer(tokenizer, stop=["stop"], min_tokens=min_tokens)
        delta = detokenizer.push(ids)
        assert delta.text + detokenizer.finish() == text
        assert delta.stopped_by == (None if text.endswith("three") else "stop")
