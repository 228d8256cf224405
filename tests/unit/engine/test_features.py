"""Features that may wait for those of a later step."""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from k3svc.engine.features import FeatureTap
from k3svc.model.draft import FeatureProjector


class Doubler:
    target_layers = (1, 2)

    def __init__(self) -> None:
        self.calls: list[int] = []

    def project(self, taps: Tensor) -> Tensor:
        self.calls.append(len(taps))
        return taps * 2


def test_features_that_may_wait_come_with_the_next_that_may_not_in_the_order_of_steps():
    projector = Doubler()
    tap = FeatureTap(cast(FeatureProjector, projector))
    got: list[tuple[str, list[float]]] = []

    def step(name: str, values: list[float], num_rows: int, *, may_wait: bool) -> None:
        rows = torch.tensor(values).view(-1, 1)
        taps = tap.taps(
            num_rows,
            lambda data: got.append((name, torch.frombuffer(data, dtype=torch.float32).tolist())),
            may_wait=may_wait,
        )
        assert taps.layers == (1, 2)
        taps.sink(rows)

    step("a", [1.0, 9.0], 1, may_wait=True)
    step("b", [2.0, 3.0], 2, may_wait=True)
    assert got == [] and projector.calls == []
    step("c", [4.0], 1, may_wait=False)
    assert got == [("a", [2.0]), ("b", [4.0, 6.0]), ("c", [8.0])] and projector.calls == [4]
    step("d", [5.0], 1, may_wait=False)
    assert got[3:] == [("d", [10.0])] and projector.calls == [4, 1]


def _note(got: list[int], index: int, _data: memoryview) -> None:
    got.append(index)


def test_no_more_than_a_few_steps_wait():
    projector = Doubler()
    tap = FeatureTap(cast(FeatureProjector, projector))
    got: list[int] = []
    for index in range(20):
        tap.taps(1, partial(_note, got, index), may_wait=True).sink(torch.zeros(1, 1))
        assert index - len(got) < FeatureTap.MOST_WAITING
    assert got == list(range(16))
