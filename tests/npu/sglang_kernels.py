"""sglang's own Triton kernels on a CPU, for test_sglang.py: python -m tests.npu.sglang_kernels prints one JSON object.
TRITON_INTERPRET=1 must be there before triton is loaded, hence a process of its own.
"""

import importlib
import inspect
import json
import sys
from typing import Any

import torch

from k3svc.ops.npu.vendor import MODULES
from k3svc.ops.npu_emulated import kda
from k3svc.ops.npu_emulated.contract import Session
from k3svc.ops.npu_emulated.device import on_device
from tests.npu.bench import RELAXED

HEADS, WIDTH, ROWS = 2, 64, 3


def signatures() -> dict[str, list[str]]:
    """Parameters of each kernel that sglang has, with their defaults."""
    found = {}
    for name, module in MODULES.items():
        if module.startswith("sglang"):
            parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
            found[name] = [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters]
    return found


def decode_difference(lower_bound: float | None) -> float:
    """The largest of the outputs and the pools of states, between sglang's packed decode and its emulation. One row is
    in the last slot, one in the first, one has none.
    """
    name = "fused_sigmoid_gating_delta_rule_update"
    real = getattr(importlib.import_module(MODULES[name]), name)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows = draw(ROWS, 3 * HEADS * WIDTH)
    q, k, v = (torch.unflatten(x, -1, (HEADS, WIDTH))[None] for x in rows.chunk(3, dim=-1))
    arguments: dict[str, Any] = {
        "A_log": draw(HEADS),
        "a": draw(ROWS, HEADS * WIDTH),
        "dt_bias": draw(HEADS * WIDTH),
        "softplus_beta": 1.0,
        "softplus_threshold": 20.0,
        "q": q,
        "k": k,
        "v": v,
        "b": draw(ROWS, 2 * HEADS)[:, :HEADS],
        "initial_state_indices": torch.tensor([4, 0, -1]),
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": torch.arange(ROWS + 1),
        "is_kda": True,
        "lower_bound": lower_bound,
    }
    theirs = draw(5, HEADS, WIDTH, WIDTH)
    own = theirs.clone()
    expected = real(initial_state_source=theirs, **arguments)
    with on_device(Session(rules=RELAXED)):
        out = kda.fused_sigmoid_gating_delta_rule_update(initial_state_source=own, **arguments)
    assert expected.abs().max() > 0
    return max(float((expected.view(out.shape) - out).abs().max()), float((theirs - own).abs().max()))


if __name__ == "__main__":
    differences = [decode_difference(lower_bound) for lower_bound in (-5.0, None)]
    sys.stdout.write(json.dumps({"signatures": signatures(), "differences": differences}) + "\n")
