"""Order of the block residual: what each mixture sees, when a block opens, what a sub-layer adds to."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from k3svc.model.attn_res import BlockStream, PlainResidual
from k3svc.model.kimi import Model
from k3svc.ops.reference import Reference

NANO = Path("models/k3-nano")


class Recording(Reference):
    """Records the first column of what is mixed, and mixes by summing."""

    def __init__(self) -> None:
        super().__init__(torch.float32, threads=1)
        self.mixed: list[list[float]] = []

    def mix_residual(self, prefix: Tensor, bank: Sequence[Tensor], score: Tensor, eps: float) -> Tensor:
        assert eps == 1e-5
        self.mixed.append([float(row[0, 0]) for row in (*bank, prefix)])
        return sum((*bank, prefix), torch.zeros_like(prefix))


def test_blocks_open_every_four_layers() -> None:
    ops = Recording()
    residual = Model.load(NANO, ops)._residual
    stream = residual.open(torch.ones(1, 256))
    assert isinstance(stream, BlockStream)
    assert torch.equal(stream.mixer_input(0), torch.ones(1, 256))
    assert ops.mixed == []
    for layer in range(8):
        if layer:
            stream.mixer_input(layer)
        stream.add_mixer(layer, torch.full((1, 256), 10.0))
        stream.ffn_input(layer)
        stream.add_ffn(layer, torch.full((1, 256), 100.0))
    stream.output()
    # The embedding is banked at layer 0; block 0 sums to 440 over its four layers and is banked at layer 4.
    assert ops.mixed == [
        [1.0, 10.0],
        [1.0, 110.0],
        [1.0, 120.0],
        [1.0, 220.0],
        [1.0, 230.0],
        [1.0, 330.0],
        [1.0, 340.0],
        [1.0, 440.0],
        [1.0, 440.0, 10.0],
        [1.0, 440.0, 110.0],
        [1.0, 440.0, 120.0],
        [1.0, 440.0, 220.0],
        [1.0, 440.0, 230.0],
        [1.0, 440.0, 330.0],
        [1.0, 440.0, 340.0],
        [1.0, 440.0, 440.0],
    ]


def test_plain_residual_is_a_running_sum() -> None:
    stream = PlainResidual().open(torch.ones(2, 3))
    assert torch.equal(stream.mixer_input(0), torch.ones(2, 3))
    stream.add_mixer(0, torch.full((2, 3), 2.0))
    assert torch.equal(stream.ffn_input(0), torch.full((2, 3), 3.0))
    stream.add_ffn(0, torch.full((2, 3), 4.0))
    assert torch.equal(stream.output(), torch.full((2, 3), 7.0))
