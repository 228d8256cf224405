"""Captures of graphs in a process that collects garbage at every turn, on a GPU."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conformance.cuda_cases import DEVICE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")]


@pytest.fixture(autouse=True)
def _eager_collection() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


def test_older_graphs_that_become_garbage_end_no_capture() -> None:
    """As do those of an engine that is gone: its parts know each other, so collection alone frees them."""
    from k3svc.ops.cuda.graphs import Graphs

    x = torch.arange(8.0, device=DEVICE)
    older: list[Any] = []
    dropped: list[weakref.ref[Any]] = []
    for number in range(20):

        def call(number: int = number) -> torch.Tensor:
            if older and torch.cuda.is_current_stream_capturing():
                dropped.append(weakref.ref(older[0]))
                ring: list[Any] = [older.pop()]
                ring.append(ring)
                del ring
                assert [[[]] for _ in range(1000)]
                assert dropped[-1]() is not None, "freed during the capture"
            return x + number

        graph, result = Graphs()._graph(call)
        gc.collect()
        assert len(dropped) == number and all(one() is None for one in dropped)
        graph.replay()
        assert result.tolist() == (x + number).tolist()
        older.append(graph)
        del graph
