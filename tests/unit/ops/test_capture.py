"""What captures of graphs need of Python."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from k3svc.ops.capture import without_collection
from k3svc.ops.cuda.graphs import WARM_UPS, Graphs


class Freed(list["Freed"]):
    """Garbage that is found by collection alone."""

    num_freed = 0

    def __init__(self) -> None:
        self.append(self)

    def __del__(self) -> None:
        Freed.num_freed += 1


@pytest.fixture(autouse=True)
def _eager_collection() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    Freed.num_freed = 0
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_garbage_stays_until_the_capture_has_ended() -> None:
    with without_collection():
        Freed()
        assert [[[]] for _ in range(1000)]
        assert Freed.num_freed == 0
    gc.collect()
    assert Freed.num_freed == 1


def test_collection_goes_on_as_before() -> None:
    with pytest.raises(ZeroDivisionError), without_collection():
        1 / 0  # noqa: B018
    assert gc.isenabled()
    gc.disable()
    with without_collection():
        pass
    assert not gc.isenabled()


def test_collection_waits_for_the_last_of_several_captures() -> None:
    first, second = without_collection(), without_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_nothing_is_collected_while_cuda_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("graph_pool_handle", "Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_args, **_options: nullcontext())
    seen: list[bool] = []
    Graphs()._graph(lambda: seen.append(gc.isenabled()))
    assert seen == [True] * WARM_UPS + [False]
    assert gc.isenabled()
