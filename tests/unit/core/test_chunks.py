"""Where prompts are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3svc.core.chunks import next_chunk

GRID = 64


@given(size=st.integers(1, 20_000), budget=st.integers(1, 40).map(lambda n: n * GRID))
def test_chunks_cover_the_prompt_on_the_grid(size: int, budget: int) -> None:
    start, chunks = 0, []
    while start < size:
        chunk = next_chunk(size - start, budget, GRID)
        assert 0 < chunk <= budget
        assert start % GRID == 0
        start += chunk
        chunks.append(chunk)
    assert start == size
    assert len(chunks) == -(-size // budget) or len(chunks) == -(-size // budget) + 1
    if len(chunks) > 1:
        # Two grid steps are what even splitting can lose by rounding up.
        assert chunks[-1] >= min(budget, size) // 2 - 2 * GRID


@pytest.mark.parametrize(
    ("remaining", "budget", "wanted"),
    [
        (10, 64, 10),
        (1025, 1024, 576),
        (2047, 1024, 1024),
        (2048, 1024, 1024),
        (65, 64, 64),
        (130, 128, 128),
        (5, 32, 5),
    ],
)
def test_a_rest_is_split_evenly(remaining: int, budget: int, wanted: int) -> None:
    assert next_chunk(remaining, budget, GRID) == wanted


def test_nothing_fits_below_the_grid() -> None:
    assert next_chunk(100, 32, GRID) == 0
