import json
import sys

import pytest
import torch

import k3svc
from k3svc.cli.main import main


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
