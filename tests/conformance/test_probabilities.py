"""`probabilities` is the law that `sample` draws from, filter by filter."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3svc.core.batch import SampleSpec
from k3svc.core.request import SamplingParams
from k3svc.engine.sampler import sample_rows
from k3svc.ops.table import Ops, SampleRows
from tests.conformance.verify_cases import BACKENDS, backend

SIZE = 12


@pytest.fixture(scope="module", params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return backend(request.param)


def rows_of(params: SamplingParams, positions: range) -> SampleRows:
    specs = [SampleSpec(params=params, sample_index=0, position=position, counts=None) for position in positions]
    return sample_rows(specs, torch.device("cpu"))


def exact(logits: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.float64]:
    """temperature → top-k with ties kept → renormalise → top-p → min-p, one step at a time."""
    mass = np.exp((logits - logits.max()) / params.temperature)
    if params.top_k:
        mass[logits < np.sort(logits)[::-1][: params.top_k][-1]] = 0
    mass /= mass.sum()
    kept = mass > 0
    if params.top_p < 1:
        order = np.lexsort((np.arange(SIZE), logits))
        order = order[kept[order]]
        below = np.cumsum(mass[order]) <= 1 - params.top_p
        below[-1] = False
        kept[order[below]] = False
    kept &= mass >= params.min_p * mass.max()
    law: npt.NDArray[np.float64] = np.where(kept, mass, 0) / mass[kept].sum()
    return law


@settings(max_examples=40)
@given(data=st.data())
def test_filters_one_after_the_other(ops: Ops, data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(-8, 8), min_size=SIZE, max_size=SIZE), label="logits in halves")
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.3, 1.0, 1.7]), label="temperature"),
        top_k=data.draw(st.integers(0, SIZE + 1), label="top_k"),
        top_p=data.draw(st.sampled_from([0.05, 0.31, 0.83, 1.0]), label="top_p"),
        min_p=data.draw(st.sampled_from([0.0, 0.013, 0.47, 1.0]), label="min_p"),
    )
    logits = torch.tensor([steps, steps[::-1]]) / 2
    law = ops.probabilities(logits, rows_of(params, range(2)))
    assert law.dtype == torch.float32
    for row, own in zip(law, logits, strict=True):
        if params.top_k == 1:
            # A row with one id to keep is greedy: the lowest of equals.
            assert row.tolist() == [float(index == int(own.argmax())) for index in range(SIZE)]
        else:
            np.testing.assert_allclose(row.double().numpy(), exact(own.double().numpy(), params), atol=1e-6)


def test_a_greedy_row_is_certain_of_the_lowest_of_equals(ops: Ops) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    law = ops.probabilities(logits, rows_of(SamplingParams(temperature=0.0), range(1)))
    assert law.tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.3, top_k=5, seed=3),
        SamplingParams(temperature=1.0, top_k=8, top_p=0.85, min_p=0.02, seed=3),
    ],
)
def test_samples_follow_it(ops: Ops, params: SamplingParams) -> None:
    """χ² over 3,000 positions; the bound is exceeded by chance once in 10,000."""
    draws = 3000
    logits = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(5)) * 1.5
    rows = rows_of(params, range(draws))
    law = ops.probabilities(logits, rows_of(params, range(1)))[0].double().numpy()
    chosen = ops.sample(logits.expand(draws, -1).contiguous(), rows).numpy()
    counts = np.bincount(chosen, minlength=SIZE)
    assert not counts[law == 0].any()
    kept = law > 0
    statistic = float(((counts[kept] - draws * law[kept]) ** 2 / (draws * law[kept])).sum())
    # Wilson and Hilferty's cube for the quantile 1 - 1e-4
    freedom = int(kept.sum()) - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
