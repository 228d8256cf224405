"""Registers the emulated operators under the vendor's schemas, and reads those schemas.

Where torch_npu is imported its operators exist already, and an emulation becomes their CPU kernel; else the operator is
defined from the schema file. Either way a wrong keyword is refused by the schema, not by the emulation.
"""

from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch._C import FunctionSchema, _jit_get_schemas_for_operator, parse_schema

from k3svc.ops.npu_emulated.contract import require

TORCH_NPU = "torch_npu_2.13.0.txt"
SGL_KERNEL_NPU = "sgl_kernel_npu.txt"
FUNCTIONS = "functions.txt"

Emulation = Callable[..., Any]
_emulations: dict[str, Emulation] = {}
_libraries: list[torch.library.Library] = []
_new_library: Callable[..., Any] = torch.library.Library


def operator(name: str) -> Callable[[Emulation], Emulation]:
    """Declares the emulation of npu::name. It names the arguments that it emulates, as the schema does."""

    def declare(function: Emulation) -> Emulation:
        _emulations[name] = function
        return function

    return declare


def emulated_operators() -> list[str]:
    """Names of all declared emulations."""
    return sorted(_emulations)


@cache
def lines(source: str) -> tuple[str, ...]:
    """The lines of a schema file."""
    return tuple(resources.files(f"{__package__}.schemas").joinpath(source).read_text(encoding="utf-8").splitlines())


@cache
def install() -> None:
    """Registers every emulation as the CPU kernel of its operator, once in a process."""
    schemas = {line.split("(", 1)[0].removeprefix("npu::"): line for line in lines(TORCH_NPU) + lines(SGL_KERNEL_NPU)}
    for name, function in _emulations.items():
        is_defined = bool(_jit_get_schemas_for_operator(f"npu::{name}"))
        library = _new_library("npu", "IMPL" if is_defined else "FRAGMENT")
        if not is_defined:
            library.define(schemas[name].removeprefix("npu::"))
        library.impl(name, _bound(name, function, parse_schema(schemas[name])), "CPU")
        # A library that is collected takes its kernels along.
        _libraries.append(library)


def _bound(name: str, function: Emulation, schema: FunctionSchema) -> Emulation:
    """function with arguments by name and the defaults of the schema; refuses values that it does not emulate."""
    emulated = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
        chosen = {}
        for argument in schema.arguments:
            default = argument.default_value if argument.has_default_value() else None
            value = given.get(argument.name, default)
            if argument.name in emulated:
                chosen[argument.name] = value
            else:
                require(_is_default(value, default), name, f"another {argument.name} than the default is not emulated")
        return function(**chosen)

    return call


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, torch.Tensor) and value == default)
