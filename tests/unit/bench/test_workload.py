"""Requests that are drawn or read."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from k3svc.bench.workload import Item, Shape, from_file, from_trace, synthetic, with_arrivals
from k3svc.errors import ConfigError


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_drawn_requests_have_their_lengths_and_come_from_the_seed():
    shape = Shape(input_len=100, output_len=10, range_ratio=0.5)
    first, again = (synthetic(200, shape, vocab_size=50, seed=3) for _ in range(2))
    assert first == again
    assert first != synthetic(200, shape, vocab_size=50, seed=4)
    lengths = [len(item.tokens or ()) for item in first]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert {item.output_len for item in first} == set(range(5, 16))
    assert {token for item in first for token in item.tokens or ()} == set(range(50))


def test_shared_prefixes_are_taken_in_turn():
    shape = Shape(input_len=4, output_len=1, prefix_len=32, num_prefixes=3)
    items = synthetic(9, shape, vocab_size=1000, seed=0)
    prefixes = [tuple((item.tokens or ())[:32]) for item in items]
    assert len(set(prefixes)) == 3
    assert prefixes[:3] == prefixes[3:6] == prefixes[6:]
    assert len({tuple((item.tokens or ())[32:]) for item in items}) == 9
    assert {len(item.tokens or ()) for item in items} == {36}


@pytest.mark.parametrize("changes", [{"input_len": 0}, {"range_ratio": 1.0}, {"prefix_len": -1}, {"num_prefixes": 0}])
def test_impossible_shapes_are_refused(changes: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(changes)).replace("_", "-")):
        Shape(**{"input_len": 1, "output_len": 1, **changes})


def test_a_file_gives_its_requests_again_and_again(tmp_path: Path):
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "import os", "output_tokens": 7},
        "",
        {"tokens": [1, 2]},
        {"messages": [{"role": "user", "content": "Hi"}]},
    )
    items = from_file(path, 4, output_len=9)
    assert items == [
        Item(text="import os", output_len=7),
        Item(tokens=[1, 2], output_len=9),
        Item(messages=[{"role": "user", "content": "Hi"}], output_len=9),
        Item(text="import os", output_len=7),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"p\.jsonl:1 is no JSON"),
        ([1], r"p\.jsonl:1: expected an object"),
        ({"prompt": "a", "tokens": [1]}, "exactly one"),
        ({"prompt": 5}, "exactly one"),
        ({"tokens": []}, "at least one"),
        ({"tokens": [1, -2]}, "token ids"),
        ({"prompt": "a", "output_tokens": 0}, "output_tokens: got 0"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        from_file(write_lines(tmp_path / "p.jsonl", line), 1, output_len=1)


def test_missing_and_empty_files_are_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read"):
        from_file(tmp_path / "none", 1, output_len=1)
    with pytest.raises(ConfigError, match="no requests"):
        from_file(write_lines(tmp_path / "empty", " ", ""), 1, output_len=1)


def test_a_trace_keeps_times_lengths_and_shared_blocks(tmp_path: Path):
    path = write_lines(
        tmp_path / "t.jsonl",
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 3500, "input_length": 600, "output_length": 6, "hash_ids": [7]},
        {"timestamp": 5000, "input_length": 10, "output_length": 1},
    )
    items = from_trace(path, None, vocab_size=1000, seed=0, speed=2.0)
    assert [item.due_s for item in items] == [0.0, 0.25, 1.0]
    assert [item.output_len for item in items] == [5, 6, 1]
    first, second, third = (list(item.tokens or ()) for item in items)
    assert [len(first), len(second), len(third)] == [1100, 600, 10]
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    assert from_trace(path, 1, vocab_size=1000, seed=0)[0].tokens == first
    for wrong in ({"timestamp": 0, "input_length": 5}, {"timestamp": 0, "input_length": 0, "output_length": 1}):
        with pytest.raises(ConfigError, match="input_length"):
            from_trace(write_lines(path, wrong), None, vocab_size=10, seed=0)


def test_poisson_arrivals_have_their_rate_and_spread():
    items = [Item(text="a", output_len=1)] * 4000
    due = [item.due_s for item in with_arrivals(items, 8.0, burstiness=1.0, seed=1)]
    gaps = [after - before for before, after in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert due[0] == 0.0
    assert due == sorted(due)
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert deviation / mean == pytest.approx(1.0, abs=0.06)
    steady = [item.due_s for item in with_arrivals(items, 8.0, burstiness=100.0, seed=1)]
    assert max(b - a for a, b in itertools.pairwise(steady)) < 0.2


def test_an_infinite_rate_sends_all_at_once_and_others_are_checked():
    items = [Item(text="a", output_len=1)] * 3
    assert {item.due_s for item in with_arrivals(items, math.inf, burstiness=1.0, seed=0)} == {0.0}
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ConfigError, match="request-rate"):
            with_arrivals(items, rate, burstiness=burstiness, seed=0)
