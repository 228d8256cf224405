"""The dashboard and the alert rules against a real Prometheus that scrapes real services under load.

Needs the programs prometheus and promtool (Debian: apt-get install prometheus).
"""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from k3svc.bench.load import Load
from k3svc.bench.workload import Shape, synthetic
from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient
from k3svc.config import load_config
from k3svc.obs.chrome_trace import chrome_trace, read_spans, request_ids

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
ALERTS = MONITORING / "alerts.yml"
SCRAPE_S = 0.5
PATIENCE_S = 60.0

on_module_loop = pytest.mark.asyncio(loop_scope="module")


def program(name: str) -> str:
    return shutil.which(name) or pytest.skip(f"{name} is not installed: apt-get install prometheus")


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(20_000, 30_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as held:
                    held.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def expressions() -> dict[str, str]:
    """`panel / legend` → expression of the dashboard, with Grafana's variables filled in."""
    board = json.loads((MONITORING / "grafana" / "dashboards" / "k3svc.json").read_text())
    found = {
        f"{panel['title']} / {target['legendFormat']}": target["expr"]
        .replace("$__rate_interval", "30s")
        .replace("$instance", ".*")
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    assert len(found) > 40
    return found


class Prometheus:
    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}/api/v1"
        self.folder = Path()

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self._base}/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            body = json.loads(answer.read())
        assert body["status"] == "success", body
        return body["data"]

    def values(self, expression: str) -> list[float]:
        return [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]


@contextmanager
def prometheus(folder: Path, targets: dict[str, list[str]]) -> Iterator[Prometheus]:
    port = free_ports(1)
    jobs = [{"job_name": job, "static_configs": [{"targets": addresses}]} for job, addresses in targets.items()]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(30)


@asynccontextmanager
async def loaded(folder: Path) -> AsyncIterator[Prometheus]:
    """One prefill and one decode service, looked at by Prometheus while requests run until the block ends."""
    settings = [f"model.path={ROOT / 'models' / 'k3-nano'}", "log.level=warning", f"metrics.port={free_ports(2)}"]
    settings.append(f"tracing.file={folder / 'spans.jsonl'}")
    async with Stack(load_config(None, settings)) as stack, AsyncClient(stack.decode_endpoints) as client:
        targets = {name.partition("-")[0]: [address] for name, address in stack.metrics_endpoints.items()}
        assert set(targets) == {"prefill", "decode"}
        with prometheus(folder, targets) as server:
            items = synthetic(10_000, Shape(input_len=80, output_len=8), vocab_size=4000, seed=1)
            load = asyncio.create_task(Load(client, items, concurrency=2, options={"ignore_eos": True}).run())
            try:
                server.folder = folder
                yield server
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prometheus]:
    async with loaded(tmp_path_factory.mktemp("prometheus")) as running:
        yield running


async def until(server: Prometheus, expression: str) -> None:
    """Until the expression has a value above 0; the test's timeout ends it otherwise."""
    while True:
        try:
            if any(value > 0 for value in await asyncio.to_thread(server.values, expression)):
                return
        except OSError:
            pass
        await asyncio.sleep(SCRAPE_S)


@on_module_loop
async def test_every_expression_of_the_dashboard_has_a_value(server: Prometheus):
    await until(server, "rate(k3svc_request_generation_tokens_count[30s]) > 0")
    await until(server, 'rate(k3svc_engine_step_seconds_count{job="prefill"}[30s]) > 0')
    values: dict[str, list[float]] = {}
    # A scrape that comes too late on a busy machine leaves a gap.
    deadline = time.monotonic() + PATIENCE_S
    while not values or (not all(values.values()) and time.monotonic() < deadline):
        values = {name: await asyncio.to_thread(server.values, text) for name, text in expressions().items()}
    assert [name for name, found in values.items() if not found] == []
    # Nothing speculates here, so what is shared out over drafts is 0/0; all else is a number.
    odd = {name for name, found in values.items() if any(value != value for value in found)}  # noqa: PLR0124  NaN
    assert {name.split(" / ")[0] for name in odd} <= {"Acceptance length", "Acceptance by position"}
    assert sum(values["Tokens per second / output"]) > 0
    assert sum(values["Tokens per second / prompt"]) > 0
    assert 0 < values["Time to first token / p50"][0] <= values["Time to first token / p99"][0]
    assert sum(values["Hand-off bytes / {{job}}"]) > 0
    assert len(values["What runs / {{role}} {{version}} {{model}} {{device}}"]) == 2


@on_module_loop
async def test_every_alert_rule_is_evaluated_and_a_healthy_stack_is_quiet(server: Prometheus):
    expected = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            rules = [
                rule for group in (await asyncio.to_thread(server.get, "rules"))["groups"] for rule in group["rules"]
            ]
        except OSError:
            rules = []
        if rules and all(rule["health"] != "unknown" for rule in rules):
            break
        assert time.monotonic() < deadline
        await asyncio.sleep(SCRAPE_S)
    assert [rule["name"] for rule in rules] == expected
    assert {rule["name"]: rule.get("lastError", "") for rule in rules} == dict.fromkeys(expected, "")
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []


@on_module_loop
async def test_names_in_the_rules_are_names_that_services_export(server: Prometheus):
    await until(server, "k3svc_num_requests_running")
    exported = set(await asyncio.to_thread(server.get, "label/__name__/values"))
    used = set(
        re.findall(r"\b(?:k3svc|grpc_server|process)_\w+", ALERTS.read_text() + " ".join(expressions().values()))
    )
    # A counter with labels appears with its first count.
    assert used - exported <= {"k3svc_handoff_failures_total", "k3svc_spec_decode_num_accepted_tokens_per_pos_total"}


@on_module_loop
async def test_real_services_write_chunks_and_steps_of_a_request_into_one_trace(server: Prometheus):
    file = server.folder / "spans.jsonl"
    while not (file.exists() and len(request_ids(read_spans([file]))) > 3):
        await asyncio.sleep(SCRAPE_S)
    read = read_spans([file])
    events = chrome_trace(read, request_ids(read)[1])["traceEvents"]
    services = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    names = [(services[event["pid"]], event["name"]) for event in events if event["ph"] == "X"]
    assert set(services.values()) == {"k3svc-decode", "k3svc-prefill"}
    assert names.count(("k3svc-prefill", "extend step")) == 1
    assert names.count(("k3svc-decode", "decode step")) == 8
    for phase in ("queue", "hand-off", "decode"):
        assert ("k3svc-decode", phase) in names


def test_each_alert_fires_on_what_it_is_for(tmp_path: Path):
    bare = re.sub(r"^        annotations:\n(?:          .*\n)+", "", ALERTS.read_text(), flags=re.MULTILINE)
    (tmp_path / "alerts.yml").write_text(bare)
    cases = (Path(__file__).parent / "alert_tests.yml").read_text().replace("ALERTS", str(tmp_path / "alerts.yml"))
    (tmp_path / "tests.yml").write_text(cases)
    assert set(re.findall(r"- alert: (\w+)", bare)) == set(re.findall(r"alertname: (\w+)", cases))
    done = subprocess.run(
        [program("promtool"), "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_of_the_compose_profile_is_valid():
    done = subprocess.run(
        [program("promtool"), "check", "config", MONITORING / "prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_what_its_script_writes():
    script = ROOT / "scripts" / "grafana_dashboard.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
