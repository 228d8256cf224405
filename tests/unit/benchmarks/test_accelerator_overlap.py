import pytest

from benchmarks.accelerator_overlap import share_under


@pytest.mark.parametrize(
    ("copies", "share"),
    [
        ([(0.0, 2.0)], 0.5),
        ([(1.0, 3.0), (5.0, 6.0)], 1.0),
        ([(3.5, 4.5)], 0.0),
        ([(2.0, 6.0), (8.0, 9.0)], 0.4),
    ],
)
def test_kernels_that_overlap_count_once(copies: list[tuple[float, float]], share: float):
    assert share_under(copies, [(1.0, 2.5), (2.0, 3.0), (5.0, 7.0)]) == pytest.approx(share)
