"""Quantised matrices and checkpoints as msModelSlim writes them, for tests."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from k3svc.ops.table import QuantizedMatrix

BITS: Mapping[str, Literal[4, 8]] = {"W8A8_DYNAMIC": 8, "W8A8": 8, "W4A8_DYNAMIC": 4}


def quantized(weight: Tensor, bits: Literal[4, 8]) -> QuantizedMatrix:
    """The nearest whole numbers, by row."""
    largest = 7 if bits == 4 else 127
    scale = weight.float().abs().amax(1) / largest
    values = (weight.float() / scale[:, None]).round().clamp(-largest - 1, largest)
    return QuantizedMatrix(values=values.to(torch.int8), scale=scale, bits=bits)


def stored(name: str, matrix: QuantizedMatrix) -> dict[str, Tensor]:
    """Tensors of one module."""
    rows, columns = matrix.values.shape
    values = matrix.values
    if matrix.bits == 4:
        pairs = values.view(rows // 2, 2, columns)
        values = ((pairs[:, 0] & 15) | (pairs[:, 1] << 4)).to(torch.int8)
    found = {
        f"{name}.weight": values.contiguous(),
        f"{name}.weight_scale": matrix.scale[:, None].contiguous(),
        f"{name}.weight_offset": torch.zeros(rows, 1),
    }
    if matrix.bits == 4:
        found[f"{name}.scale_bias"] = 8 * (matrix.values.float() * matrix.scale[:, None]).sum(1, keepdim=True)
    return found


def scheme_of(name: str, experts: str, others: str) -> str:
    """Routed experts, then shared ones and latent projections; everything else stays as it is."""
    if ".experts." in name:
        return experts
    return (
        others if ".shared_experts." in name or "routed_expert_down" in name or "routed_expert_up" in name else "FLOAT"
    )


def save_quantized(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    experts: str,
    others: str,
    key: Callable[[str], str] = lambda name: name,
) -> dict[str, Tensor]:
    """Writes a two-layer checkpoint of k3-nano's tensors with a description whose keys `key` spells; the float tensors
    that it stands for.
    """
    tree = json.loads(Path("models/k3-nano/config.json").read_text())
    tree["text_config"]["num_hidden_layers"] = 2
    (directory / "config.json").write_text(json.dumps(tree))
    description: dict[str, str] = {"model_quant_type": experts, "version": "1.0.0"}
    written: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        scheme = scheme_of(name, experts, others) if name.endswith(".weight") else "FLOAT"
        if name.endswith(".weight"):
            description[key(name)] = scheme
        if scheme == "FLOAT":
            written[name] = meant[name] = tensor
        else:
            matrix = quantized(tensor, BITS[scheme])
            written |= stored(name.removesuffix(".weight"), matrix)
            meant[name] = matrix.dequantized()
    (directory / "quant_model_description.json").write_text(json.dumps(description))
    save_file(written, directory / "model.safetensors")
    return meant
