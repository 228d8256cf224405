"""Residual streams: how sub-layers read from and add to what came before them. One stream object lives for one step."""

from typing import Protocol

from torch import Tensor

from k3svc.model.config import ModelConfig
from k3svc.model.weights import Weights
from k3svc.ops.table import Ops


class Stream(Protocol):
    """The residual stream of one step, [N, H] everywhere. Layers are visited in order, mixer before ffn."""

    def mixer_input(self, layer: int) -> Tensor:
        """What the norm before the mixer reads."""
        ...

    def add_mixer(self, layer: int, y: Tensor) -> None:
        """Adds the mixer's output."""
        ...

    def ffn_input(self, layer: int) -> Tensor:
        """What the norm before the ffn reads."""
        ...

    def add_ffn(self, layer: int, y: Tensor) -> None:
        """Adds the ffn's output."""
        ...

    def mixer_base(self, layer: int) -> Tensor | None:
        """What the mixer's output is added to; None: nothing."""
        ...

    def ffn_base(self) -> Tensor:
        """What the ffn's output is added to."""
        ...

    def take_sum(self, total: Tensor) -> None:
        """Stands for `add_mixer` or `add_ffn` of one who has added to the base."""
        ...

    def output(self) -> Tensor:
        """What the final norm reads."""
        ...


class Residual(Protocol):
    """Opens the stream of a step."""

    def open(self, embedded: Tensor) -> Stream:
        """Starts from the embedding rows [N, H]."""
        ...


class PlainResidual:
    """Ordinary pre-norm residual (model.md 2.9)."""

    def open(self, embedded: Tensor) -> "PlainStream":
        """`Residual.open`."""
        return PlainStream(embedded)


class PlainStream:
    """`Stream` of PlainResidual: one running sum."""

    def __init__(self, embedded: Tensor) -> None:
        self._sum = embedded

    def mixer_input(self, _layer: int) -> Tensor:
        """The sum."""
        return self._sum

    def add_mixer(self, _layer: int, y: Tensor) -> None:
        """`Stream.add_mixer`."""
        self._sum = self._sum + y

    def ffn_input(self, _layer: int) -> Tensor:
        """The sum."""
        return self._sum

    def add_ffn(self, _layer: int, y: Tensor) -> None:
        """`Stream.add_ffn`."""
        self._sum = self._sum + y

    def mixer_base(self, _layer: int) -> Tensor | None:
        """The sum."""
        return self._sum

    def ffn_base(self) -> Tensor:
        """The sum."""
        return self._sum

    def take_sum(self, total: Tensor) -> None:
        """`Stream.take_sum`."""
        self._sum = total

    def output(self) -> Tensor:
        """The sum."""
        return self._sum


class BlockResidual:
    """Block attention residual (model.md 2.8): sub-layers read a learned mixture of earlier blocks' sums."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, block_size: int) -> None:
        self.ops = ops
        self.block_size = block_size
        self.eps = config.rms_norm_eps
        layers = [f"model.layers.{layer}." for layer in range(config.num_layers)]
        self.mixer_scores = [_score(ops, weights, f"{prefix}self_attention_res") for prefix in layers]
        """float32 [H] a layer; layer 0's is never used, since its bank is empty."""
        self.ffn_scores = [_score(ops, weights, f"{prefix}mlp_res") for prefix in layers]
        self.output_score = _score(ops, weights, "model.output_attn_res")

    def open(self, embedded: Tensor) -> "BlockStream":
        """`Residual.open`."""
        return BlockStream(self, embedded)


class BlockStream:
    """`Stream` of BlockResidual: the running sum of the open block and a bank of the sums before it."""

    def __init__(self, residual: BlockResidual, embedded: Tensor) -> None:
        self._residual = residual
        self._prefix = embedded
        self._bank: list[Tensor] = []

    def mixer_input(self, layer: int) -> Tensor:
        """Mixture of bank and prefix; the bare embedding at layer 0. A block's first layer then banks the prefix."""
        mixed = self._mix(self._residual.mixer_scores[layer]) if self._bank else self._prefix
        if layer % self._residual.block_size == 0:
            self._bank.append(self._prefix)
        return mixed

    def add_mixer(self, layer: int, y: Tensor) -> None:
        """Adds to the prefix, which a block's first layer starts from zero."""
        base = self.mixer_base(layer)
        self._prefix = y if base is None else base + y

    def ffn_input(self, layer: int) -> Tensor:
        """Mixture of bank and prefix."""
        return self._mix(self._residual.ffn_scores[layer])

    def add_ffn(self, _layer: int, y: Tensor) -> None:
        """`Stream.add_ffn`."""
        self._prefix = self._prefix + y

    def mixer_base(self, layer: int) -> Tensor | None:
        """The prefix, which a block's first layer starts from zero."""
        return None if layer % self._residual.block_size == 0 else self._prefix

    def ffn_base(self) -> Tensor:
        """The prefix."""
        return self._prefix

    def take_sum(self, total: Tensor) -> None:
        """`Stream.take_sum`."""
        self._prefix = total

    def output(self) -> Tensor:
        """Mixture of bank and prefix."""
        return self._mix(self._residual.output_score)

    def _mix(self, score: Tensor) -> Tensor:
        return self._residual.ops.mix_residual(self._prefix, self._bank, score, self._residual.eps)


def _score(ops: Ops, weights: Weights, name: str) -> Tensor:
    return (weights.float32(f"{name}_norm.weight") * weights.float32(f"{name}_proj.weight")[0]).to(ops.device)
