"""Products of whole numbers of torch_npu, npu_grouped_matmul plain too, with what prepares their operands."""

import torch
from torch import Tensor

from k3svc.ops.npu_emulated.contract import (
    poisoned,
    require,
    require_contiguous,
    require_dtype,
    require_size,
    session,
)
from k3svc.ops.npu_emulated.registry import operator

_COUNTS = 1
_NZ = 29
_CODES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
"""Dtypes as the operator's integers."""


@operator("npu_format_cast")
def npu_format_cast(input: Tensor, acl_format: int) -> Tensor:  # noqa: A002 - the schema's name
    """A copy in the fractal format. Shape and strides say nothing of it, so the device remembers it by the memory."""
    name = "npu_format_cast"
    require(acl_format == _NZ, name, f"acl_format {acl_format} is not emulated")
    require(input.dtype == torch.int8 and input.dim() == 3, name, f"{input.dtype} of rank {input.dim()}")
    require_size(input.shape[1] % 16 == 0 and input.shape[2] % 32 == 0, name, f"{tuple(input.shape)}: 16 and 32 bytes")
    require_contiguous(name, input=input)
    out = input.clone()
    session().fractal.add(out.data_ptr())
    return out


@operator("npu_dynamic_quant")
def npu_dynamic_quant(input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002 - the schema's name
    """(int8, scale float32 [rows]) of each row, half to even."""
    require_dtype("npu_dynamic_quant", "input", input, torch.float16, torch.bfloat16)
    require(input.dim() == 2 and input.shape[0] > 0, "npu_dynamic_quant", f"input {tuple(input.shape)}")
    scale = input.double().abs().amax(-1) / 127
    whole = (input.double() / scale.clamp_min(1e-30)[:, None]).round().clamp(-128, 127)
    return whole.to(torch.int8), scale.float()


@operator("npu_quant_matmul")
def npu_quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, pertoken_scale: Tensor | None, output_dtype: int | None
) -> Tensor:
    """int8 [M, K] · int8 [K, N], times the scales of rows and columns. Without a dtype of the output that is int8."""
    name = "npu_quant_matmul"
    require(x1.dtype == x2.dtype == torch.int8 and x1.dim() == x2.dim() == 2, name, f"x1 {x1.dtype}, x2 {x2.dtype}")
    require(x1.shape[1] == x2.shape[0], name, f"x1 {tuple(x1.shape)}, x2 {tuple(x2.shape)}")
    require(x1.numel() > 0, name, "empty x1")
    require(max(x1.shape[1], x2.shape[1]) <= 65535, name, f"last axes {x1.shape[1]} and {x2.shape[1]}")
    require_contiguous(name, x1=x1, x2=x2, scale=scale, pertoken_scale=pertoken_scale)
    require(scale.dtype in (torch.float32, torch.bfloat16), name, f"scale {scale.dtype}")
    require(scale.shape == (x2.shape[1],), name, f"scale {tuple(scale.shape)}")
    require(pertoken_scale is not None, name, "another pertoken_scale than of each row is not emulated")
    assert pertoken_scale is not None
    require(pertoken_scale.dtype == torch.float32, name, f"pertoken_scale {pertoken_scale.dtype}")
    require(pertoken_scale.shape == (x1.shape[0],), name, f"pertoken_scale {tuple(pertoken_scale.shape)}")
    require(output_dtype is None or output_dtype in _CODES, name, f"output_dtype {output_dtype}")
    dtype = torch.int8 if output_dtype is None else _CODES[output_dtype]
    require(dtype != torch.float32 or session().rules.fp32, name, f"output_dtype {dtype}")
    require(dtype != torch.float16 or scale.dtype == torch.float32, name, f"output_dtype {dtype}, scale {scale.dtype}")
    out = x1.double() @ x2.double() * scale.double() * pertoken_scale.double()[:, None]
    return (out.round().clamp(-128, 127) if output_dtype is None else out).to(dtype)


@operator("npu_grouped_matmul")
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    scale: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    group_list: Tensor | None,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    output_dtype: int | None,
) -> list[Tensor]:
    """One product an expert: x [rows, K] in groups, weight [E, K, N]. Rows past the groups are left unwritten.

    int8 rows want scales of rows and of outputs, and int8 weights, or int4 ones eight to an int32, in NZ format.
    """
    name = "npu_grouped_matmul"
    require(len(x) == len(weight) == 1, name, "one x and one weight are emulated")
    require(split_item == 2 and group_type == 0, name, f"split_item {split_item}, group_type {group_type}: 2 and 0")
    require(group_list is not None and group_list.dtype == torch.int64, name, "group_list must be int64")
    assert group_list is not None
    rows, weights = x[0], weight[0]
    require_contiguous(name, x=rows, weight=weights, group_list=group_list)
    if rows.dtype == torch.int8:
        columns, factors, dtype = _quantised(name, weights, bias, scale, per_token_scale, output_dtype, rows.shape[0])
    else:
        require_dtype(name, "x", rows, torch.float16, torch.bfloat16)
        require(weights.dtype == rows.dtype, name, f"weight {weights.dtype}, x {rows.dtype}")
        require(bias is scale is per_token_scale is None, name, "another bias than the default is not emulated")
        require(output_dtype is None, name, "another output_dtype than the default is not emulated")
        columns, factors, dtype = weights.double(), torch.ones(rows.shape[0], dtype=torch.float64), rows.dtype
    require(columns.dim() == 3 and columns.shape[1] == rows.shape[1], name, f"weight {tuple(weights.shape)}")
    require(group_list.shape == (columns.shape[0],), name, f"{group_list.numel()} groups, {columns.shape[0]} experts")
    require_size(1 < group_list.numel() <= 1024 and max(columns.shape[1:]) < 65536, name, "illegal sizes")
    sizes: list[int] = group_list.tolist()
    if group_list_type != _COUNTS:
        sizes = [b - a for a, b in zip([0, *sizes], sizes, strict=False)]
    require(min(sizes) >= 0 and sum(sizes) == rows.shape[0], name, f"groups of {sizes} for {rows.shape[0]} rows")
    out = poisoned((rows.shape[0], columns.shape[2]), dtype)
    begin = 0
    for expert, size in enumerate(sizes):
        own = slice(begin, begin + size)
        if size:
            out[own] = (rows[own].double() @ columns[expert] * factors[own, None]).to(dtype)
        begin += size
    return [out]


def _quantised(
    name: str,
    weights: Tensor,
    bias: list[Tensor] | None,
    scale: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    output_dtype: int | None,
    rows: int,
) -> tuple[Tensor, Tensor, torch.dtype]:
    """float64 weights [E, K, N], factors of rows, dtype of the output."""
    require(scale is not None and per_token_scale is not None, name, "int8 rows want scale and per_token_scale")
    assert scale is not None and per_token_scale is not None
    factors, outputs = per_token_scale[0], scale[0]
    require(factors.dtype == torch.float32 and factors.shape == (rows,), name, f"per_token_scale {factors.dtype}")
    require(weights.data_ptr() in session().fractal, name, "the weight must be in NZ format")
    require(output_dtype is None or output_dtype in _CODES, name, f"output_dtype {output_dtype}")
    asked = None if output_dtype is None else _CODES[output_dtype]
    if weights.dtype == torch.int8:
        require(bias is None, name, "a bias of int8 weights is not emulated")
        require(outputs.shape == (weights.shape[0], weights.shape[2]), name, f"scale {tuple(outputs.shape)}")
        implied = {torch.bfloat16: torch.bfloat16, torch.float32: torch.float16}.get(outputs.dtype)
        if session().rules.fp32 and outputs.dtype == torch.float32:
            implied = torch.float32
        require(implied is not None, name, f"scale {outputs.dtype}")
        assert implied is not None
        require(asked in (None, implied), name, f"output_dtype {asked}, scale {outputs.dtype}")
        return weights.double() * outputs.double()[:, None], factors.double(), implied
    require(weights.dtype == torch.int32, name, f"weight {weights.dtype} for int8 rows")
    values = torch.stack([(weights << (28 - 4 * n)) >> 28 for n in range(8)], dim=-1).flatten(-2).double()
    require(outputs.dtype == torch.int64, name, f"scale {outputs.dtype} of int4 weights, the bits of float32 in int64")
    count, inputs, width = values.shape
    groups = outputs.shape[1] if outputs.dim() == 3 else 0
    fits = groups > 0 and inputs % groups == 0 and outputs.shape == (count, groups, width)
    require(fits, name, f"scale {tuple(outputs.shape)}")
    # The lower 32 bits of each, which come first in memory.
    factor = outputs.contiguous().view(torch.float32)[..., 0::2].double().repeat_interleave(inputs // groups, 1)
    require(bias is not None, name, "int4 weights want a bias")
    assert bias is not None
    shift = 8 * (values * factor).sum(1)
    require(
        bias[0].dtype == torch.float32 and bool(torch.allclose(bias[0].double(), shift, rtol=1e-4, atol=1e-6)),
        name,
        "the bias of int4 weights is 8 times the sum of a column times its scale",
    )
    require(asked is not None, name, "output_dtype is not said")
    assert asked is not None
    require(asked != torch.float32 or session().rules.fp32, name, f"output_dtype {asked}")
    return values * factor, factors.double(), asked
