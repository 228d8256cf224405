"""ContextSpan against a dictionary of rows, for random orders of what decode may send and lose."""

from hypothesis import given, settings
from hypothesis import strategies as st

from k3svc.engine.draft_span import ContextSpan, Piece

WINDOW, AHEAD = 8, 4

step = st.tuples(
    st.integers(1, AHEAD),  # rows of a step
    st.integers(1, AHEAD),  # of them stay
    st.sampled_from(["kept", "kept", "kept", "rows lost", "commit lost", "both lost"]),
    st.booleans(),  # whether what waits is written before the next step
    st.integers(0, 12),  # rows of history that are sent again after a gap
)


def piece(start: int, tokens: list[int]) -> Piece:
    return Piece(start=start, data=memoryview(bytes(tokens)), row_bytes=1)


@settings(max_examples=300)
@given(st.integers(1, 20), st.lists(step, max_size=25))
def test_rows_that_reach_the_base_are_those_of_the_committed_tokens(
    base: int, steps: list[tuple[int, int, str, bool, int]]
):
    span = ContextSpan(base, window=WINDOW, ahead=AHEAD)
    written: dict[int, int] = {}
    truth: dict[int, int] = {position: position % 251 for position in range(base)}

    def write() -> None:
        for part in span.take():
            for index, value in enumerate(part.data):
                written[part.start + index] = value
        # What a ring of that size would have overwritten.
        for position in [p for p in written if p + WINDOW + AHEAD in written]:
            del written[position]

    for number, (count, kept, fate, writes, history) in enumerate(steps):
        rows = [(base + index + 31 * number) % 251 for index in range(count)]
        stays = min(kept, count)
        if fate in ("kept", "commit lost"):
            if base > span.base:
                span.advance(base)
            span.add(piece(base, rows))
        truth.update({base + index: rows[index] for index in range(stays)})
        began, base = base, base + stays
        if writes:
            write()
        if fate in ("kept", "rows lost"):
            span.advance(base, start=began)
            if span.end < base:
                span.restart()
                oldest = max(0, base - history)
                if oldest < base:
                    span.add(piece(oldest, [truth[position] for position in range(oldest, base)]))
        if span.base == base and span.reaches_base:
            write()
            seen = range(max(span.start, span.lowest), base)
            assert [written[position] for position in seen] == [truth[position] for position in seen]
            assert span.is_complete == (span.start <= max(0, base - WINDOW))
        assert span.num_waiting <= WINDOW + AHEAD


def test_history_that_does_not_touch_is_left_out():
    span = ContextSpan(20, window=WINDOW, ahead=AHEAD)
    assert span.add(piece(20, [1, 2]))
    assert not span.add(piece(14, [3, 4, 5]))
    assert (span.start, span.end) == (20, 22)
    assert span.add(piece(14, [3, 4, 5, 6, 7, 8]))
    assert (span.start, span.end, span.is_complete) == (14, 22, False)
    assert [(part.start, bytes(part.data)) for part in span.take()] == [(14, bytes([3, 4, 5, 6, 7, 8])), (20, b"\1\2")]
