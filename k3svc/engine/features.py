"""Features of the tokens of a step, for who drafts: tapped from the model, projected, and as bytes of the wire."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from k3svc.model.draft import FeatureProjector
from k3svc.model.kimi import Taps
from k3svc.ops.table import Ops

Sink = Callable[[memoryview], None]


class FeatureTap:
    """Runs on the engine thread, in the middle of a step. Features travel in the activation dtype."""

    MOST_WAITING = 8
    """Steps whose features wait for those of a later one: one row is projected in about the time of eight."""

    def __init__(self, projector: FeatureProjector) -> None:
        self._projector = projector
        self._waiting: list[tuple[Tensor, Sink]] = []

    @classmethod
    def load(cls, path: Path, ops: Ops) -> "FeatureTap":
        """`path` is a draft checkpoint. Raises CheckpointError."""
        return cls(FeatureProjector.load(path, ops))

    def taps(self, num_rows: int, sink: Sink, *, may_wait: bool = False) -> Taps:
        """Taps of one step: `sink` gets the features of its first num_rows rows, little-endian, once: at once, or if
        they may wait with those of a later step, which come behind them.
        """

        def take(rows: Tensor) -> None:
            self._waiting.append((rows[:num_rows], sink))
            if not may_wait or len(self._waiting) >= self.MOST_WAITING:
                self._project()

        return Taps(layers=tuple(self._projector.target_layers), sink=take)

    def _project(self) -> None:
        waiting, self._waiting = self._waiting, []
        rows = torch.cat([rows for rows, _ in waiting]) if len(waiting) > 1 else waiting[0][0]
        features = self._projector.project(rows).contiguous()
        data = memoryview(features.view(torch.uint8).cpu().numpy().data).cast("B")
        width, first = data.nbytes // len(rows), 0
        for tapped, sink in waiting:
            last = first + len(tapped) * width
            sink(data[first:last])
            first = last
