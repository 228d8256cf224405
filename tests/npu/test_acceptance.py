"""The script that a person with an NPU runs first, on the emulated device."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.ops.npu_emulated.backend import NpuEmulated


@pytest.fixture
def script() -> Any:
    sys.path.append(str(Path("scripts").resolve()))
    import npu_acceptance  # type: ignore[import-not-found]

    return npu_acceptance


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("device", "tokens"), [("npu-emulated", 3 * 6), ("npu-emulated:fp32,shape-relaxed", 5 * 6)])
def test_the_whole_script_accepts_the_emulated_device(
    script: Any, device: str, tokens: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every operation in both forms of extend and with the other choices of MLA, the model, its tokens (fewer of them),
    speeds; then captured steps."""
    monkeypatch.setattr(script, "NUM_TOKENS", 6)
    monkeypatch.setattr(script, "PROMPT_LENGTHS", (1, 66, 9))
    monkeypatch.setattr(sys, "argv", ["npu_acceptance.py", "--device", device, "--seconds-per-op", "0"])
    assert script.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "accepted"
    names = [name for name, _ in script.operations()]
    assert {"linear_int8", "experts_int8", "draft_blocks", "kda_extend", "split_norm", "mla_verify", "commit"} <= set(
        names
    )
    measured = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in names]
    assert measured == names * 3
    assert lines.count("the last slot beside padding: bit-identical") == 3
    heads = [line for line in lines if line.startswith(device.partition(":")[0])]
    assert [line.rpartition(":")[2].split(",")[-1] for line in heads] == [
        "kda-extend=fused",
        "kda-extend=decomposed",
        "mla-store=prefix",
        "graphs=on",
    ]
    assert sum(line.startswith("model: ms a step: extend ") for line in lines) == 4
    golden = [line.split() for line in lines if line.startswith("tokens: ")]
    assert [int(words[3]) for words in golden] == [tokens] * 4
    if "fp32" in device:
        assert all(words[1] == words[3] == words[-3] == words[-1] for words in golden)


def test_an_operation_out_of_bounds_and_a_touched_slot_are_failures(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    operations = script.operations
    monkeypatch.setattr(script, "operations", lambda: itertools.islice(operations(), 3))
    assert script.check_operations("npu-emulated", 0.0) == 0
    linear = NpuEmulated.linear

    def off(self: NpuEmulated, x: Tensor, weight: Any) -> Tensor:
        return linear(self, x, weight) * 1.05

    monkeypatch.setattr(NpuEmulated, "linear", off)
    assert script.check_operations("npu-emulated", 0.0) == 2
    marked = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("OUT OF BOUNDS")]
    assert marked == ["linear", "linear_int8"]


def test_a_choice_that_the_installation_lacks_fails_alone(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    checked: list[str] = []

    def check_operations(device: str, _: float) -> int:
        if "mla-store=prefix" in device:
            raise BackendError("npu lacks a kernel")
        return 0

    def check(device: str, **_: Any) -> int:
        checked.append(device)
        return 0

    monkeypatch.setattr(script, "check_operations", check_operations)
    monkeypatch.setattr(script, "check_model", check)
    monkeypatch.setattr(script, "check_tokens", check)
    monkeypatch.setattr(sys, "argv", ["npu_acceptance.py"])
    assert script.main() == 1
    assert len(checked) == 2 * 3
    lines = capsys.readouterr().out.splitlines()
    assert "npu lacks a kernel" in lines
    assert lines[-1] == "1 checks failed"


def test_other_tokens_than_the_golden_ones_are_failures(script: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "NUM_TOKENS", 6)
    monkeypatch.setattr(script, "PROMPT_LENGTHS", (1, 5, 9))
    assert script.check_tokens("npu-emulated", is_relaxed=False) == 0
    norm = NpuEmulated.rms_norm

    def reversed_rows(self: NpuEmulated, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(self, x, weight, eps).flip(0)

    monkeypatch.setattr(NpuEmulated, "rms_norm", reversed_rows)
    assert script.check_tokens("npu-emulated", is_relaxed=False) == 1
