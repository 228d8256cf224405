"""Products with int8 weights on Ascend: rows are quantised once, whichever weights they meet."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from k3svc.ops.table import QuantizedMatrix


@dataclass(frozen=True, kw_only=True)
class Int8Columns:
    """Columns of a product, for npu_quant_matmul."""

    values: Tensor
    """int8 [in, out]."""
    scale: Tensor
    """float32 [out]."""


@dataclass(frozen=True, kw_only=True)
class QuantizedLinear:
    """A packed weight of which at least a part is of int8."""

    parts: tuple[Tensor | Int8Columns, ...]
    """Columns side by side: [in, out] of floats, or of int8."""


def pack(parts: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype, device: torch.device) -> QuantizedLinear:
    """`Ops.pack_quantized_linear`. Neighbours of one kind become one product."""
    packed: list[Tensor | Int8Columns] = []
    for is_float, run in groupby(parts, lambda part: isinstance(part, Tensor)):
        own = list(run)
        if is_float:
            rows = torch.cat([part for part in own if isinstance(part, Tensor)])
            packed.append(rows.to(device, dtype).t().contiguous())
            continue
        whole = [part for part in own if isinstance(part, QuantizedMatrix)]
        packed.append(
            Int8Columns(
                values=torch.cat([part.values for part in whole]).to(device).t().contiguous(),
                scale=torch.cat([part.scale for part in whole]).to(device),
            )
        )
    return QuantizedLinear(parts=tuple(packed))


def quantized(x: Tensor, weight: QuantizedLinear) -> Tensor:
    """`Ops.linear` [N, in] → [N, out]. The output's dtype is said: left out, it would be int8."""
    if x.shape[0] == 0:
        return x.new_empty(0, sum(_width(part) for part in weight.parts))
    rows, scale = torch.ops.npu.npu_dynamic_quant(x.contiguous())
    out = [
        torch.mm(x, part)
        if isinstance(part, Tensor)
        else torch.ops.npu.npu_quant_matmul(rows, part.values, part.scale, pertoken_scale=scale, output_dtype=x.dtype)
        for part in weight.parts
    ]
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _width(part: Tensor | Int8Columns) -> int:
    return (part if isinstance(part, Tensor) else part.values).shape[1]
