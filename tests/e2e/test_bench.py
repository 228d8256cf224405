"""`k3svc bench` as a user calls it, against a decode service that runs in the test."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from k3svc.errors import Unavailable
from tests.unit.cli.test_commands import k3svc_run, run_main
from tests.unit.client.fake_decode import Step, running

SMALL = ("--num-prompts", "6", "--input-len", "5", "--output-len", "3", "--warmup", "1")


async def test_serve_prints_the_table_and_writes_what_is_asked_for(tmp_path: Path):
    files = ("--report", str(tmp_path / "r.html"), "--requests", str(tmp_path / "r.jsonl"))
    trace = ("--chrome-trace", str(tmp_path / "t.json"))
    async with running() as fake:
        done = await k3svc_run("bench", "serve", "--endpoint", fake.endpoint, *SMALL, *files, *trace)
        assert len(fake.service.requests) == 7
        assert {len(request.tokens.ids) for request in fake.service.requests} == {5}
        assert all(request.stop.ignore_eos for request in fake.service.requests)
    assert done.status == 0, done.err
    assert "Successful requests:                              6" in done.out
    assert "Total generated tokens:                          18" in done.out
    assert "6/6" in done.err
    assert "Load test of fake" in (tmp_path / "r.html").read_text()
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 6
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


async def test_serve_prints_one_object_with_json():
    goodput = ("--goodput", "ttft:60000", "--request-rate", "inf", "--seed", "5")
    async with running() as fake:
        done = await k3svc_run("bench", "serve", "--endpoint", fake.endpoint, *SMALL, *goodput, "--json")
    value = json.loads(done.out)
    assert (value["completed"], value["failed"], value["good_share"]) == (6, 0, 1.0)
    assert (value["model_id"], value["seed"], value["input_len"]) == ("fake", 5, 5)
    assert value["goodput"] == {"ttft_ms": 60000.0}
    assert value["request_rate"] is None
    assert value["median_ttft_ms"] > 0


async def test_prompts_and_traces_come_from_files(tmp_path: Path):
    prompts, trace = tmp_path / "p.jsonl", tmp_path / "t.jsonl"
    prompts.write_text('{"prompt": "import os", "output_tokens": 2}\n')
    trace.write_text('{"timestamp": 0, "input_length": 4, "output_length": 1}\n' * 3)
    async with running() as fake:
        for option, path in (("--prompts", prompts), ("--trace", trace)):
            done = await k3svc_run(
                "bench", "serve", "--endpoint", fake.endpoint, option, str(path), "--warmup", "0", "--json"
            )
            assert done.status == 0, done.err
    requests = fake.service.requests
    assert len(requests) == 100 + 3
    assert requests[0].text == "import os"
    assert not requests[0].stop.ignore_eos
    assert len(requests[-1].tokens.ids) == 4


async def test_sweep_prints_a_line_a_level(tmp_path: Path):
    levels = ("--concurrency", "1,2,4", "--num-prompts", "4", "--output-len", "2", "--warmup", "0")
    report = tmp_path / "s.html"
    async with running() as fake:
        done = await k3svc_run("bench", "sweep", "--endpoint", fake.endpoint, *levels, "--report", str(report))
        assert len(fake.service.requests) == 4 + 4 + 8
        prompts = {tuple(request.tokens.ids) for request in fake.service.requests}
        assert len(prompts) == 16, "no level asks again for what another asked"
    assert done.status == 0, done.err
    rows = done.out.splitlines()
    assert [row.split()[0] for row in rows] == ["concurrency", "1", "2", "4"]
    assert "<- knee" in done.out
    assert "Sweep over concurrency of fake" in report.read_text()


async def test_when_nothing_succeeds_the_exit_code_says_so():
    script = [Step(error=Unavailable("gone")) for _ in range(2)]
    async with running(*script) as fake:
        done = await k3svc_run(
            "bench", "serve", "--endpoint", fake.endpoint, "--num-prompts", "2", "--warmup", "0", "--json"
        )
    assert done.status == 1
    assert json.loads(done.out)["errors"] == {"UNAVAILABLE": 2}
    assert "no request succeeded; the first said UNAVAILABLE: gone" in done.err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("serve", "--goodput", "itl:5"), "goodput: got 'itl:5'"),
        (("serve", "--percentiles", "50,x"), "expected numbers from 0 to 100"),
        (("serve", "--trace", "t", "--request-rate", "1"), "--trace"),
        (("serve", "--report", "none/r.html"), "--report: no folder"),
        (("sweep", "--concurrency", "1,x"), "expected positive numbers"),
        (("sweep", "--concurrency", "1", "--request-rate", "1"), "--request-rate"),
    ],
)
def test_wrong_options_are_told_before_anything_is_sent(
    wrong: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, out, err = run_main(["bench", *wrong], monkeypatch, capsys)
    assert status == 2
    assert message in err
    assert out == ""


async def test_a_report_without_plotly_says_what_to_install(tmp_path: Path):
    code = "import sys; sys.modules['plotly'] = None; from k3svc.cli.main import main; main()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "bench", "serve", "--report", str(tmp_path / "r.html")),
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert "pip install 'k3svc[report]'" in err.decode()


@pytest.mark.slow
async def test_a_browser_draws_every_plot_of_a_report(tmp_path: Path):
    """Needs Chromium (Debian: apt-get install chromium)."""
    browser = shutil.which("chromium") or pytest.skip("chromium is not installed")
    report = tmp_path / "r.html"
    async with running() as fake:
        done = await k3svc_run("bench", "serve", "--endpoint", fake.endpoint, *SMALL, "--report", str(report))
    assert done.status == 0, done.err
    process = await asyncio.create_subprocess_exec(
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--virtual-time-budget=8000", "--dump-dom", report.as_uri()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    page, _ = await asyncio.wait_for(process.communicate(), 60)
    text = page.decode()
    plots = text.split('class="plotly-graph-div')[1:]
    assert len(plots) == 9
    assert all('class="main-svg"' in plot and ("<path" in plot) for plot in plots)
    assert sum(title in text for title in ("Time to First Token", "Inter-token Latency", "Hand-off tail")) == 3
