"""Ways to break the Ascend adapters, by what they break; scripts/npu_mutants.py runs them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs exactly once in k3svc/ops/npu/<file>.py, becomes `new`; tests/npu/<test> must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


AGREE = "test_adapters.py::test_extends_agree_on_ragged_batches[0]"
TRAPS, TRACKING, LATENTS = "test_traps.py::", "test_tracking.py::", "test_latents.py::"
QUANTIZED, DRAFT, GRAPHS = "test_quantized.py::", "test_draft.py::", "test_graphs.py::"
VERIFY = "test_verify.py::test_verify_and_commit_equal_decode_steps[0]"
