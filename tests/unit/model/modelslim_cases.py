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


def quantized(weight: Tensor, bits: Literal[4, 8], *, group_size: int = 0) -> QuantizedMatrix:
    """The nearest whole numbers, by row or by groups of so many columns of a row."""
    largest = 7 if bits == 4 else 127
    groups = weight.float().view(weight.shape[0], -1, group_size or weight.shape[1])
    scale = groups.abs().amax(2) / largest
    values = (groups / scale[:, :, None]).round().clamp(-largest - 1, largest).view(weight.shape)
    return QuantizedMatrix(values=values.to(torch.int8), scale=scale if group_size else scale[:, 0], bits=bits)


def stored(name: str, matrix: QuantizedMatrix) -> dict[str, Tensor]:
    """Tensors of one module."""
    rows, columns = matrix.values.shape
    values = matrix.values
    if matrix.bits == 4:
        pairs = values.view(rows // 2, 2, columns)
        values = ((pairs[:, 0] & 15) | (pairs[:, 1] << 4)).to(torch.int8)
    scale = matrix.scale.view(rows, -1)
    by_row = scale.amax(1, keepdim=True)
    found = {
        f"{name}.weight": values.contiguous(),
        f"{name}.weight_scale": by_row.contiguous(),
        f"{name}.weight_offset": torch.zeros(rows, 1),
    }
    if matrix.scale.dim() == 2:
        found[f"{name}.weight_scale_second"] = scale / by_row
        found[f"{name}.weight_offset_second"] = torch.zeros_like(scale)
    if matrix.bits == 4:
        found[f"{name}.scale_bias"] = 8 * matrix.dequantized().sum(1, keepdim=True)
    return found


def meaning(name: str, matrix: QuantizedMatrix) -> Tensor:
    """The float weight that the stored tensors of a module stand for."""
    tensors = stored(name, matrix)
    scale = tensors[f"{name}.weight_scale"] * tensors.get(f"{name}.weight_scale_second", torch.ones(1, 1))
    columns = matrix.values.shape[1] // scale.shape[1]
    return matrix.values.float() * scale.repeat_interleave(columns, 1)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
DENSE = ("gate_proj", "up_proj", "down_proj")


def scheme_of(name: str, experts: str, others: str, projections: str) -> str:
    """Routed experts, then shared ones and latent projections, then attention and dense MLP as newer recipes have them;
    everything else stays as it is.
    """
    module = name.removesuffix(".weight").rpartition(".")[2]
    if ".experts." in name:
        return experts
    if ".shared_experts." in name or module in ("routed_expert_down_proj", "routed_expert_up_proj"):
        return others
    return projections if module in (*PROJECTIONS, *DENSE, "kv_b_proj") else "FLOAT"


def save_quantized(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    experts: str,
    others: str,
    projections: str = "FLOAT",
    key: Callable[[str], str] = lambda name: name,
    group_size: int = 0,
) -> dict[str, Tensor]:
    """Writes a two-layer checkpoint of k3-nano's tensors with a description whose keys `key` spells; the float tensors
    that it stands for.
    """
    tree = json.loads(Path("models/k3-nano/config.json").read_text())
    tree["text_config"]["num_hidden_layers"] = 2
    (directory / "config.json").write_text(json.dumps(tree))
    description: dict[str, str | int] = {"model_quant_type": experts, "version": "1.0.0", "group_size": group_size}
    written: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        scheme = scheme_of(name, experts, others, projections) if name.endswith(".weight") else "FLOAT"
        if name.endswith(".weight"):
            description[key(name)] = scheme
        if scheme == "FLOAT":
            written[name] = meant[name] = tensor
        else:
            matrix = quantized(tensor, BITS[scheme], group_size=group_size if BITS[scheme] == 4 else 0)
            written |= stored(name.removesuffix(".weight"), matrix)
            meant[name] = meaning(name.removesuffix(".weight"), matrix)
    (directory / "quant_model_description.json").write_text(json.dumps(description))
    save_file(written, directory / "model.safetensors")
    return meant
