"""Rotary positions of a draft, with the scalings that published configs name (transformers' rope_utils)."""

import math

import torch
from torch import Tensor

from k3svc.model.draft_config import RopeScaling


class Rope:
    """Rotary positions of `dim` channels, as `DraftOps.rotation` takes them.

    frequencies: float32 [dim / 2], radians a position. amplitude: factor of cos and sin. softmax_scale: corrects the
    scores of latent attention.
    """

    def __init__(self, dim: int, theta: float, scaling: RopeScaling) -> None:
        base = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        self.amplitude = 1.0
        self.softmax_scale = 1.0
        if scaling.kind == "linear":
            base = base / scaling.factor
        elif scaling.kind == "llama3":
            base = _llama3(base, scaling)
        elif scaling.kind == "yarn":
            base = _yarn(base, dim, theta, scaling)
            self.amplitude = _yarn_amplitude(scaling)
            if scaling.mscale_all_dim:
                self.softmax_scale = _mscale(scaling.factor, scaling.mscale_all_dim) ** 2
        self.frequencies = base.float()


def _llama3(base: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    turns = scaling.original_max_positions * base / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * base / scaling.factor + blend * base


def _yarn(base: Tensor, dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Channels that turn fast keep their frequency, slow ones are interpolated, a ramp between (YaRN, 2309.00071)."""

    def channel(turns: float) -> float:
        return dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)


def _yarn_amplitude(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
