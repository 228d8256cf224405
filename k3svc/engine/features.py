"""Features of the tokens of a step, for who drafts: tapped from the model, projected, and as bytes of the wire."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from k3svc.model.draft import FeatureProjector
from k3svc.model.kimi import Taps
from k3svc.ops.table import Ops


class FeatureTap:
    """Runs on the engine thread, in the middle of a step. Features travel in the activation dtype."""

    def __init__(self, projector: FeatureProjector) -> None:
        self._projector = projector

    @classmethod
    def load(cls, path: Path, ops: Ops) -> "FeatureTap":
        """`path` is a draft checkpoint. Raises CheckpointError."""
        return cls(FeatureProjector.load(path, ops))

    def taps(self, num_rows: int, sink: Callable[[memoryview], None]) -> Taps:
        """Taps of one step: `sink` gets the features of its first num_rows rows, little-endian, once."""

        def project(rows: Tensor) -> None:
            features = self._projector.project(rows[:num_rows]).contiguous()
            sink(memoryview(features.view(torch.uint8).cpu().numpy().data).cast("B"))

        return Taps(layers=tuple(self._projector.target_layers), sink=project)
