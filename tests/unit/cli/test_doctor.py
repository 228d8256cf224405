import json
import sys

import pytest
import torch

import k3svc
from k3svc import ops
from k3svc.cli.main import main
from k3svc.ops.npu.options import NpuOptions
from k3svc.ops.npu.vendor import CHOSEN, MODULES, OPERATORS, Need, called


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["k3svc", "doctor", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0), capsys.readouterr().out


def test_versions_and_backends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    status, out = run(["--json"], monkeypatch, capsys)
    values = json.loads(out)
    assert status == 0
    assert (values["k3svc"], values["torch"]) == (k3svc.__version__, torch.__version__)
    assert values["cpu"]["cores"] >= 1
    (reference,) = [backend for backend in values["backends"] if backend["name"] == "reference"]
    assert reference["available"]
    assert reference["batch_invariant"]
    status, out = run([], monkeypatch, capsys)
    assert status == 0
    assert f"torch     {torch.__version__}" in out.splitlines()
    assert any(line.startswith("backend   reference: ") and "batch-invariant" in line for line in out.splitlines())


def test_a_missing_backend_is_named_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, out = run(["--device", "abacus"], monkeypatch, capsys)
    assert status == 1
    assert "backend   abacus: missing. " in out
    assert "reference" in out


def test_what_serves_each_operator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Of a real installation packages and versions; of the emulated device the package of the emulation."""
    status, out = run(["--device", "npu-emulated:fp32,shape-relaxed"], monkeypatch, capsys)
    assert status == 0
    served = [line for line in out.splitlines() if line.startswith("operator  ")]
    assert served == [
        f"operator  {name}: k3svc.ops.npu_emulated {k3svc.__version__}"
        for name in called((*OPERATORS, *MODULES), NpuOptions())
    ]
    chosen = "npu-emulated:kda-extend=decomposed,mla-split-norm=fused,mla-store=prefix"
    _, out = run(["--device", chosen], monkeypatch, capsys)
    names = [line.split()[1].rstrip(":") for line in out.splitlines() if line.startswith("operator  ")]
    assert names == [
        name for name in (*OPERATORS, *MODULES) if CHOSEN.get(name) not in ("kda-extend=fused", "mla-store=scatter")
    ]
    needs = [
        Need(name="npu_rms_norm", package="torch_npu", version="2.13.0", problem=None),
        Need(name="situ", package="sgl-kernel-npu", version=None, problem=None),
        Need(name="chunk_kda_fwd", package="sgl-kernel-npu", version="2026.8", problem="returns 12 values, not 11"),
    ]
    monkeypatch.setattr(ops, "probe", lambda _: needs)
    status, out = run(["--device", "npu"], monkeypatch, capsys)
    assert [line for line in out.splitlines() if line.startswith("operator  ")] == [
        "operator  npu_rms_norm: torch_npu 2.13.0",
        "operator  situ: sgl-kernel-npu of unknown version",
    ]
    _, out = run(["--device", "npu", "--json"], monkeypatch, capsys)
    assert json.loads(out)["operators"][2]["problem"] == "returns 12 values, not 11"
    for arguments in ([], ["--device", "npu-emulated:fp64"]):
        _, out = run(arguments, monkeypatch, capsys)
        assert not [line for line in out.splitlines() if line.startswith("operator")]


class Absent:
    """Lets no vendor package be found."""

    def find_spec(self, name: str, *_: object) -> None:
        if name in ("torch_npu", "sgl_kernel_npu", "sglang"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def unwrapped(lines: list[str]) -> list[str]:
    """What stands two columns in, with what goes on below it."""
    entries: list[str] = []
    for line in lines:
        if line.startswith("    "):
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.removeprefix("  "))
    return entries


def test_the_report_has_100_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """On a machine without a GPU and vendor packages, whose backends have the longest lines; commands stand whole."""
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    _, out = run([], monkeypatch, capsys)
    assert "backend   npu: missing. " in out
    assert max(map(len, out.splitlines())) <= 100
    for command in ("pip install 'k3svc[npu]'", "pip install FILE.whl", "pip install --no-deps sglang==0.5.23"):
        assert command in out


def test_what_the_npu_backend_lacks_is_told_operator_by_operator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """On a machine without vendor packages: each operator once, under its package, with what is to be installed."""
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    status, out = run(["--device", "npu"], monkeypatch, capsys)
    assert status == 1
    lines = out.splitlines()
    first = lines.index("backend   npu: missing. model.device: npu lacks")
    expected = {
        "torch_npu": "pip install 'k3svc[npu]' (torch_npu pinned to the minor version of torch), with CANN installed",
        "sgl-kernel-npu": "pip install FILE.whl, the wheel for this CANN version, not older than 2026-09, of "
        "https://github.com/sgl-project/sgl-kernel-npu/releases",
        "sglang": "pip install 'k3svc[npu]' (what it imports) and pip install --no-deps sglang==0.5.23 (its Triton "
        "kernels of linear attention), with triton-ascend",
    }
    assert not [line for line in lines if line.startswith("operator")]
    told = unwrapped(lines[first + 1 :])
    named: list[str] = []
    for lack, need, (package, cure) in zip(told[::2], told[1::2], expected.items(), strict=True):
        names, _, problem = lack.partition(": ")
        assert problem == f"No module named '{package.replace('-', '_')}'."
        assert need == f"Needs {package}: {cure}"
        named += names.split(", ")
    default = called((*OPERATORS, *MODULES), NpuOptions())
    assert sorted(named) == sorted(f"{name} ({CHOSEN[name]})" if name in CHOSEN else name for name in default)
    assert len(named) == len(set(named)) == 23


def test_a_value_that_an_option_has_not_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["k3svc", "doctor", "--device", "npu:mla-store=page"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    captured = capsys.readouterr()
    assert "mla-store='page'; allowed: scatter, prefix" in captured.out + captured.err
