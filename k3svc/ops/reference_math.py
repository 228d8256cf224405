"""Functions of elements and rows that treat every element and every row alike, wherever it lies in a tensor.

exp and tanh of torch do so on the CPU; its sigmoid, silu and softplus do not (their vector bodies and scalar tails
differ in the last bit), hence the forms built from exp here. A row of a sum over the last dimension does not depend on
the others either.
"""

from functools import cache

import torch
from torch import Tensor


@cache
def scalar(value: float) -> Tensor:
    """float32 tensor [] of a constant: torch spends as long on a Python number as on a small operation."""
    return torch.tensor(value, dtype=torch.float32)


ONE = scalar(1.0)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; x itself when it has it already."""
    return x if x.dtype == dtype else x.to(dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float32."""
    return x.neg().exp_().add_(ONE).reciprocal_()


def scaled_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x · sigmoid(gate), float32."""
    return x / gate.neg().exp_().add_(ONE)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """(mean(x²) + eps)^-½ over the last dimension, which is kept with size 1; float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def inverse_norm(x: Tensor, eps: float) -> Tensor:
    """(Σ x² + eps)^-½ over the last dimension, which is kept with size 1; float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(scalar(eps), norm, norm).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x · inverse_rms(x) · weight, float32."""
    return (x * inverse_rms(x, eps)).mul_(weight)


def silu_glu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, float32."""
    return scaled_by_sigmoid(gate, gate).mul_(up)


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """β · tanh(gate/β) · sigmoid(gate) · λ · tanh(up/λ), float32; λ None: · up (model.md 2.7)."""
    out = (gate * scalar(1 / beta)).tanh_().div_(gate.neg().exp_().add_(ONE))
    if linear_beta is None:
        return out.mul_(up).mul_(scalar(beta))
    return out.mul_((up * scalar(1 / linear_beta)).tanh_()).mul_(scalar(beta * linear_beta))
