"""The emulator's schemas against the vendor's: the real ones under make test-npu, else those of the files."""

import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.ops.npu import vendor
from k3svc.ops.npu.graphs import LENGTHS
from k3svc.ops.npu_emulated import graphs, registry
from k3svc.ops.npu_emulated.backend import emulated_vendor
from k3svc.ops.npu_emulated.contract import Session
from k3svc.ops.npu_emulated.device import on_device
from tests.npu.bench import CONTRACT

HAS_WHEEL = importlib.util.find_spec("torch_npu") is not None
BF16 = torch.bfloat16
registry.install()


@pytest.fixture
def meta() -> None:
    if not HAS_WHEEL:
        pytest.skip("torch_npu is not installed here; make test-npu has it")


def name_of(line: str) -> str:
    return line.split("(", 1)[0].removeprefix("npu::")


def test_every_used_operator_has_an_emulation_and_a_schema():
    in_files = {
        name_of(line) for source in (registry.TORCH_NPU, registry.SGL_KERNEL_NPU) for line in registry.lines(source)
    }
    assert in_files == set(registry.emulated_operators()) == set(vendor.OPERATORS)
    assert {name for name, package in vendor.OPERATORS.items() if package == "torch_npu"} == {
        name_of(line) for line in registry.lines(registry.TORCH_NPU)
    }


@pytest.mark.parametrize("source", [registry.TORCH_NPU, registry.SGL_KERNEL_NPU])
def test_registered_schemas_are_those_of_the_file(source: str, capsys: pytest.CaptureFixture[str]):
    lines = registry.lines(source)
    registered = [str(getattr(torch.ops.npu, name_of(line)).default._schema) for line in lines]
    # Files may spell a default otherwise (1.0 and 1.).
    assert registered == [str(torch._C.parse_schema(line)) for line in lines]
    is_real = HAS_WHEEL and source == registry.TORCH_NPU
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(lines)} schemas of {source} equal to {'the imported wheel' if is_real else 'the file'}\n"
        )


def test_the_wheel_is_the_one_the_file_was_read_from(meta: None):
    assert importlib.metadata.version("torch_npu") == registry.TORCH_NPU.removeprefix("torch_npu_").removesuffix(".txt")


def test_python_kernels_have_the_signatures_of_the_file(capsys: pytest.CaptureFixture[str]):
    own = emulated_vendor()
    found = {}
    for name, emulation in vars(own).items():
        plain = [
            p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(emulation).parameters.values()
        ]
        found[f"{vendor.MODULES[name]}:{name}"] = str(inspect.Signature(plain))
    expected = dict(re.fullmatch(r"([\w.]+:\w+)(\(.*\))", line).groups() for line in registry.lines(registry.FUNCTIONS))  # type: ignore[union-attr, misc]
    assert found == expected
    with capsys.disabled():
        sys.stdout.write(f"\n{len(found)} signatures of Python kernels equal to the file\n")


def arguments() -> dict[str, dict[str, Any]]:
    """A legal call of each operator that has a Meta kernel."""
    rows, place = torch.zeros(4, 16, dtype=BF16), torch.arange(4, dtype=torch.int32)
    return {
        "npu_rms_norm": {"input": torch.ones(2, 8, dtype=BF16), "gamma": torch.ones(8, dtype=BF16)},
        "npu_swiglu": {"input": torch.ones(2, 8, dtype=BF16)},
        "npu_transpose_batchmatmul": {
            "input": torch.zeros(2, 4, 16, dtype=BF16),
            "weight": torch.zeros(4, 16, 32, dtype=BF16),
            "perm_x1": [1, 0, 2],
            "perm_x2": [0, 1, 2],
            "perm_y": [1, 0, 2],
        },
        "npu_top_k_top_p": {"logits": torch.zeros(2, 9), "p": torch.ones(2), "k": torch.ones(2, dtype=torch.int32)},
        "npu_moe_gating_top_k": {
            "x": torch.zeros(2, 8),
            "k": 2,
            "bias": torch.zeros(8),
            "norm_type": 1,
            "out_flag": True,
        },
        "npu_moe_init_routing_v2": {
            "x": torch.zeros(2, 16, dtype=BF16),
            "expert_idx": torch.tensor([[0, 1], [2, 1]], dtype=torch.int32),
            "active_num": 4,
            "expert_num": 3,
            "expert_tokens_num_type": 1,
            "expert_tokens_num_flag": True,
            "active_expert_range": [0, 3],
        },
        "npu_grouped_matmul": {
            "x": [rows],
            "weight": [torch.zeros(3, 16, 32, dtype=BF16)],
            "group_list": torch.tensor([2, 0, 2]),
            "split_item": 2,
            "group_type": 0,
            "group_list_type": 1,
        },
        "npu_dynamic_quant": {"input": torch.ones(2, 8, dtype=BF16)},
        "npu_quant_matmul": {
            "x1": torch.ones(2, 16, dtype=torch.int8),
            "x2": torch.ones(16, 32, dtype=torch.int8),
            "scale": torch.ones(32),
            "pertoken_scale": torch.ones(2),
            "output_dtype": BF16,
        },
        "npu_moe_finalize_routing": {
            "expanded_permuted_rows": rows,
            "skip1": None,
            "skip2": None,
            "bias": None,
            "scales": torch.zeros(2, 2, dtype=BF16),
            "expanded_src_to_dst_row": place,
            "export_for_source_row": None,
            "drop_pad_mode": 2,
        },
        "npu_fused_infer_attention_score": {
            "query": torch.zeros(2, 1, 4, 512, dtype=BF16),
            "key": torch.zeros(3, 128, 512, dtype=BF16),
            "value": torch.zeros(3, 128, 512, dtype=BF16),
            "query_rope": torch.zeros(2, 1, 4, 64, dtype=BF16),
            "key_rope": torch.zeros(3, 128, 64, dtype=BF16),
            "num_heads": 4,
            "num_key_value_heads": 1,
            "input_layout": "BSND",
            "block_table": torch.zeros(2, 2, dtype=torch.int32),
            "block_size": 128,
            "actual_seq_lengths_kv": [1, 200],
        },
    }


def on_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [on_meta(item) for item in value]
    return value.to("meta") if isinstance(value, Tensor) else value


def described(result: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    parts = [result] if isinstance(result, Tensor) else list(result)
    return [(tuple(part.shape), part.dtype) for part in parts]


UNUSED_OUTPUTS = {
    # Outputs that nobody asked for: a size of the Meta kernel's own, which the emulator leaves empty.
    "npu_moe_init_routing_v2": 3,
}


@pytest.mark.parametrize("name", list(arguments()))
def test_outputs_have_the_shapes_of_the_meta_kernel(name: str, meta: None):
    given = arguments()[name]
    function: Callable[..., Any] = getattr(torch.ops.npu, name)
    expected = described(function(**{key: on_meta(value) for key, value in given.items()}))
    with on_device(Session(rules=CONTRACT)):
        found = described(function(**given))
    count = UNUSED_OUTPUTS.get(name, len(expected))
    assert found[:count] == expected[:count]


def test_operators_without_a_meta_kernel_are_known(meta: None):
    """docs/ascend.md lists them: of their shapes and dtypes only our reading exists."""
    missing = [
        name for name in vendor.OPERATORS if not torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta")
    ]
    assert set(missing) == {"chunk_kda_fwd", "causal_conv1d", "npu_format_cast"}


def test_graphs_are_those_of_the_wheel(meta: None):
    """Names that the emulated graphs take, and the lengths that an update changes; it ignores unknown ones."""
    from torch_npu.npu import graphs as real
    from torch_npu.npu._npugraph_handlers.ifa_handler import _IFAv1DefaultHandler

    for own, theirs in (
        (graphs.graph.__init__, real.graph.__init__),
        (graphs.NPUGraph.update, real.NPUGraph.update),
        (graphs.NPUGraph.replay, real.NPUGraph.replay),
        (graphs.graph_pool_handle, real.graph_pool_handle),
    ):
        assert list(inspect.signature(own).parameters) == list(inspect.signature(theirs).parameters)
    updated = _IFAv1DefaultHandler.UPDATE_SPECS["npu_fused_infer_attention_score.default"]
    assert {name for _, _, name in updated} == set(LENGTHS.values())
