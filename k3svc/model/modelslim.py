"""Checkpoints that msModelSlim quantised for Ascend (model.md 3.5): which scheme a weight has, and what it holds.

`quant_model_description.json` names the scheme of every weight. Its keys may spell a module in other ways than the
tensors do, so a look-up tries several. Weights are whole numbers with one scale a row; an int4 weight holds rows 2j and
2j + 1 in the low and the high nibble of its row j. Where the description has a group_size, an int4 weight has a second
scale for every group of so many columns of a row, and the product of both counts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from k3svc.errors import CheckpointError
from k3svc.ops.table import QuantizedMatrix

FILE = "quant_model_description.json"
GROUP_SIZE = "group_size"
FLOAT = "FLOAT"
BITS: Mapping[str, Literal[4, 8]] = {"W8A8": 8, "W8A8_DYNAMIC": 8, "W4A8_DYNAMIC": 4}
"""Schemes that are read, beside FLOAT, and the width of their weights."""
OFFSETS = ("weight_offset", "weight_offset_second")
"""Zero points, which are read to see that they are zero."""
EXTRAS = (*OFFSETS, "scale_bias", "input_scale", "input_offset", "quant_bias", "deq_scale")
"""Tensors of a quantised module that no result here needs: activations are quantised as they come, and the bias of
int4 kernels follows from the weight."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The schemes of a checkpoint's weights."""

    path: Path
    schemes: Mapping[str, str]
    """By the full name of a weight, as the file spells it."""
    group_size: int
    """Columns of a row that share a second scale in int4 weights; 0: there are no second scales."""

    @classmethod
    def read(cls, directory: Path) -> "Description | None":
        """Of a checkpoint's folder; None without the file. Raises CheckpointError."""
        path = directory / FILE
        if not path.exists():
            return None
        try:
            tree = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"{path}: expected an object")
        group_size = tree.get(GROUP_SIZE, 0)
        if type(group_size) is not int or group_size < 0:
            raise CheckpointError(f"{path}: {GROUP_SIZE}: got {group_size!r}; allowed: a number of columns, or 0")
        return cls(
            path=path,
            group_size=group_size,
            schemes={
                name: scheme for name, scheme in tree.items() if name.endswith(".weight") and isinstance(scheme, str)
            },
        )

    def scheme(self, module: str) -> str | None:
        """Scheme of a module's weight under any of its names; None when the file has none of them."""
        for name in spellings(module):
            if (found := self.schemes.get(f"{name}.weight")) is not None:
                return found
        return None


def spellings(module: str) -> list[str]:
    """A module's name as it is, with the other name of its experts' block, and each with and without
    `language_model.`."""
    swapped = module.replace(".mlp.", ".block_sparse_moe.") if ".mlp." in module else module
    swapped = swapped if swapped != module else module.replace(".block_sparse_moe.", ".mlp.")
    prefix = "language_model."
    names = [
        variant
        for name in (module, swapped)
        for variant in (name, name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)
    ]
    return list(dict.fromkeys(names))


def bits_of(description: Description | None, module: str, dtype: str) -> Literal[4, 8] | None:
    """Width of a module's quantised weight, stored as `dtype`; None for a plain one.

    Raises CheckpointError when description and tensor contradict each other.
    """
    is_whole = dtype == "I8"
    if description is None:
        if is_whole:
            raise CheckpointError(f"{module}.weight is int8 and there is no {FILE}")
        return None
    scheme = description.scheme(module)
    if scheme is None:
        if is_whole:
            tried = ", ".join(f"{name}.weight" for name in spellings(module))
            raise CheckpointError(f"{description.path}: no scheme of {module}.weight, which is int8; tried: {tried}")
        return None
    if scheme != FLOAT and scheme not in BITS:
        raise CheckpointError(
            f"{description.path}: {module}.weight: got {scheme!r}; allowed: {FLOAT}, {', '.join(BITS)}", scheme=scheme
        )
    if (scheme != FLOAT) != is_whole:
        raise CheckpointError(f"{description.path}: {module}.weight is described as {scheme}, and stored as {dtype}")
    return BITS.get(scheme)


def scale_shapes(
    description: Description | None, module: str, bits: Literal[4, 8], shape: tuple[int, ...], *, has_groups: bool
) -> dict[str, tuple[int, ...]]:
    """The scales of a quantised module whose weight is [out, in], by their names behind the module's.

    `has_groups`: whether there is a second scale. Raises CheckpointError when that contradicts the description.
    """
    rows, columns = shape
    scales: dict[str, tuple[int, ...]] = {"weight_scale": (rows, 1)}
    if description is None or bits == 8:
        return scales
    size = description.group_size
    if has_groups and not size:
        raise CheckpointError(
            f"{description.path}: {module}.weight_scale_second is there, and no {GROUP_SIZE}, which says of how many "
            "columns its groups are"
        )
    if size and columns % size:
        raise CheckpointError(
            f"{description.path}: {GROUP_SIZE}: got {size}; {module}.weight has {columns} columns, no multiple of it"
        )
    return scales | ({"weight_scale_second": (rows, columns // size)} if size else {})


def matrix(weight: Tensor, scale: Tensor, groups: Tensor | None, bits: Literal[4, 8]) -> QuantizedMatrix:
    """int8 [out, in] or, of int4, [out / 2, in], scale [out, 1], and scales of groups [out, groups]."""
    scale = scale.float()
    return QuantizedMatrix(
        values=weight if bits == 8 else unpack_int4(weight),
        scale=scale.reshape(-1) if groups is None else scale * groups.float(),
        bits=bits,
    )


def unpack_int4(packed: Tensor) -> Tensor:
    """int8 [out / 2, in] → int8 [out, in] in -8..7: rows 2j from low nibbles, rows 2j + 1 from high ones."""
    low = torch.bitwise_left_shift(packed, 4).bitwise_right_shift_(4)
    return torch.stack([low, packed >> 4], dim=1).flatten(0, 1)
