"""`k3svc plan` as a user calls it."""

import json

import pytest

from tests.unit.cli.test_commands import run_main


def test_the_table_tells_sizes_times_and_the_bottleneck(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, out, err = run_main(["plan", "--model", "k3", "--chips", "64"], monkeypatch, capsys)
    assert (status, err) == (0, "")
    assert "2,779.48 G, 104.19 G active" in out
    assert "449.37 MB + 27,648 B/token" in out
    assert "over 400 Gbit/s" in out
    assert "<- this link" in out
    assert "P:D" in out
    assert "\nbottleneck: " in out


def test_json_has_all_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    arguments = ["plan", "--model", "kimi-linear", "--chips", "4", "--state-dtype", "bfloat16", "--json"]
    status, out, _ = run_main(arguments, monkeypatch, capsys)
    value = json.loads(out)
    assert status == 0
    assert value["cache_bytes_fixed"] == 22_446_080
    assert value["cache_bytes_per_request"] == 22_446_080 + 8704 * 8_064
    assert value["handoff_bytes"] == 22_446_080 + 8192 * 8_064 + 4 * 163_840
    assert value["prefill_per_decode"] == pytest.approx(value["prefill_instances"] / value["decode_instances"])
    assert [link["gbit_s"] for link in value["handoff"]] == [10, 25, 100, 200, 400, 1600]


def test_what_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    status, out, _ = run_main(["plan", "--chips", "1"], monkeypatch, capsys)
    assert status == 0
    assert "bottleneck: memory: weights of" in out
    assert "P:D" not in out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--model", "none"), "'none' is no folder and none of k3, kimi-linear, nano"),
        (("--state-dtype", "int8"), "allowed: float32, bfloat16"),
        (("--tflops", "0"), "tflops: got 0.0; allowed: more than 0"),
    ],
)
def test_wrong_options_are_named(
    wrong: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, _, err = run_main(["plan", *wrong], monkeypatch, capsys)
    assert status == 2
    assert message in err
