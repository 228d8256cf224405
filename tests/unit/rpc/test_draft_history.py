"""FeatureHistory against lists of rows."""

import random

from k3svc.rpc.draft_history import FeatureHistory

WINDOW, AHEAD = 20, 4


def history(max_bytes: int = 1 << 20, window: int = WINDOW) -> FeatureHistory:
    return FeatureHistory(window=window, ahead=AHEAD, row_bytes=1, max_bytes=max_bytes)


def test_the_newest_committed_rows_are_kept():
    kept, rng = history(), random.Random(2)
    truth = [rng.randrange(256) for _ in range(5)]
    start = len(truth)
    for _ in range(100):
        base, count = len(truth), rng.randint(1, AHEAD)
        stays = rng.randint(1, count)
        rows = [rng.randrange(256) for _ in range(count)]
        kept.write("a", base, memoryview(bytes(rows)))
        truth += rows[:stays]
        kept.crop("a", len(truth))
        oldest, end = kept.span("a")
        assert end == len(truth)
        assert oldest <= max(start, end - WINDOW)
        assert list(kept.read("a", oldest, end)) == truth[oldest:end]
    kept.drop("a")
    assert kept.span("a") == (0, 0)


def test_a_gap_begins_anew_and_long_writes_keep_their_end():
    kept = history()
    kept.write("a", 3, memoryview(bytes([1, 2, 3])))
    kept.write("a", 9, memoryview(bytes([4, 5])))
    assert (kept.span("a"), kept.read("a", 9, 11)) == ((9, 11), bytes([4, 5]))
    kept.write("a", 11, memoryview(bytes(range(100))))
    assert kept.span("a") == (111 - WINDOW - AHEAD, 111)
    assert kept.read("a", 100, 111) == bytes(range(89, 100))


def test_memory_is_bounded_and_the_sample_that_was_quiet_longest_gives_way():
    kept = history(max_bytes=2 * (WINDOW + AHEAD))
    for key in ("a", "b", "a", "c"):
        kept.write(key, 0, memoryview(b"xy"))
    assert [kept.span(key) for key in "abc"] == [(0, 2), (0, 0), (0, 2)]
    none = history(max_bytes=0)
    none.write("a", 0, memoryview(b"xy"))
    none.crop("a", 1)
    assert none.span("a") == (0, 0)
