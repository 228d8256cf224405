"""The gateway as the Kubernetes chart starts it: it finds decode pods by their labels, and follows them.

The API server is a stand-in that knows pods; the gateway and the services are real.
"""

import asyncio
import json
import os
import queue
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient
from k3svc.config import load_config
from tests.e2e.test_monitoring import free_ports
from tests.unit.deploy.manifests import named, parse, pod_of

helm = pytest.importorskip("helm_python", reason="Helm as a library has wheels for Linux on x86-64 only")

ROOT = Path(__file__).parents[2]
PODS = "/api/v1/namespaces/serving/pods"
STOP = None

pytestmark = pytest.mark.slow


class Cluster:
    """The pods of a namespace, as an API server tells them."""

    def __init__(self, pods: list[dict[str, Any]]) -> None:
        self.pods = pods
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.asked: list[tuple[str, dict[str, list[str]]]] = []

    def chosen(self, selector: str) -> list[dict[str, Any]]:
        wanted = dict(part.split("=") for part in selector.split(","))
        return [pod for pod in self.pods if wanted.items() <= pod["metadata"]["labels"].items()]

    def delete(self, pod: dict[str, Any]) -> None:
        self.pods.remove(pod)
        self.events.put({"type": "DELETED", "object": pod})


@contextmanager
def api_server(cluster: Cluster) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query)
            cluster.asked.append((parts.path, query))
            self.send_response(200)
            self.send_header("content-type", "application/json")
            if query.get("watch") == ["true"]:
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                while (event := cluster.events.get()) is not STOP:
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    self.wfile.flush()
                self.close_connection = True
                return
            items = cluster.chosen(query["labelSelector"][0])
            body = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}
            data = json.dumps(body).encode()
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        cluster.events.put(STOP)
        server.shutdown()
        thread.join()
        server.server_close()


def running_pod(name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "serving", "uid": name, "resourceVersion": "1", "labels": labels},
        "spec": {"containers": [{"name": "decode", "image": "k3svc"}]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@asynccontextmanager
async def gateway(arguments: list[str], kubeconfig: Path) -> AsyncIterator[None]:
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, env=environment, stdout=quiet, stderr=quiet
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


async def until_workers(port: int, count: int) -> None:
    """Until the gateway has so many healthy workers; the test's timeout ends it otherwise."""
    while True:
        try:
            workers = (await asyncio.to_thread(ask, port, "/workers"))["workers"]
            if len(workers) == count and all(worker["is_healthy"] for worker in workers):
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)


async def test_the_gateway_finds_decode_pods_by_their_labels_and_forgets_them(tmp_path: Path):
    with helm.Chart.load(ROOT / "deploy" / "kubernetes" / "k3svc") as chart:
        values = {"gateway": {"enabled": True}}
        objects = parse(chart.render(values, name="demo", namespace="serving"))
    labels = {
        role: dict(pod_of(named(objects, "Deployment", f"demo-k3svc-{role}"))[0]) for role in ("prefill", "decode")
    }
    (container,) = pod_of(named(objects, "Deployment", "demo-k3svc-gateway"))[1]["containers"]
    settings = [f"model.path={ROOT / 'models' / 'k3-nano'}", "log.level=warning", "gateway.enabled=true"]
    async with Stack(load_config(None, settings)) as stack, AsyncClient(stack.decode_endpoints) as native:
        port = free_ports(2)
        ports = {"--port": port, "--prometheus-port": port + 1}
        ports["--service-discovery-port"] = int(stack.decode_endpoints[0].rpartition(":")[2])
        arguments = [
            f"{name}={ports[name]}" if (name := argument.partition("=")[0]) in ports else argument
            for argument in container["args"]
        ]
        # The port is one for all pods, so a prefill pod that was taken for a decode pod would be a second worker.
        cluster = Cluster([running_pod(role, labels[role]) for role in ("prefill", "decode")])
        with api_server(cluster) as api_port:
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{api_port}"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
            (tmp_path / "config").write_text(json.dumps(config))
            async with gateway(arguments, tmp_path / "config"):
                await until_workers(port, 1)
                body = {"model": "k3-nano", "prompt": "import os\n", "max_tokens": 8, "temperature": 0}
                answer = await asyncio.to_thread(ask, port, "/v1/completions", body)
                expected = await native.generate("import os\n", max_tokens=8, temperature=0.0).result()
                assert answer["choices"][0]["text"] == expected.text
                cluster.delete(cluster.pods[1])
                await until_workers(port, 0)
    # No more than the Role of the chart lets it: get, list and watch pods of its namespace.
    assert {path for path, _ in cluster.asked} == {PODS}
