"""The Prometheus endpoint: what it serves, to whom, and where."""

import asyncio
import dataclasses
import json
import re
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from k3svc.config import AuthSection, Config, MetricsSection, ServerSection, TlsSection, load_config
from k3svc.errors import ConfigError
from k3svc.obs.loop_lag import watch_loop
from k3svc.obs.metrics import Metrics
from k3svc.rpc.process import hold_port
from k3svc.rpc.scrape import MAX_CONNECTIONS, Endpoint, _Handler
from k3svc.rpc.server import serve
from k3svc.v1 import admin_service_pb2, admin_service_pb2_grpc
from tests.e2e.rpc_stack import prefill_role
from tests.unit.obs.test_metrics import LOAD

TOKEN = "token-of-prometheus-000000000"


def config(**sections: object) -> Config:
    """Port 0 is refused for endpoints of a configuration, and taken here for any port."""
    return dataclasses.replace(Config(), **sections)  # type: ignore[arg-type]


@contextmanager
def endpoint(settings: Config) -> Iterator[Endpoint]:
    made = Endpoint(Metrics("decode", lambda: LOAD).registry, settings)
    made.start()
    try:
        yield made
    finally:
        made.close()


def get(url: str, *, token: str | None = None, context: ssl.SSLContext | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def is_served(url: str) -> bool:
    try:
        return get(url)[0] == 200
    except OSError:
        return False


def test_metrics_are_at_their_path_alone():
    with endpoint(config()) as served:
        assert served.address.startswith("127.0.0.1:")
        status, text = get(f"http://{served.address}/metrics")
        assert status == 200
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["k3svc_num_requests_waiting"].samples[0].value == LOAD["waiting"]
        assert families["process_resident_memory_bytes"].samples[0].value > 1e6
        assert get(f"http://{served.address}/")[0] == 404


def test_with_keys_a_scraper_shows_one(tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[prometheus]\ntoken = "{TOKEN}"\n')
    with endpoint(config(auth=AuthSection(keys=str(keys)))) as served:
        url = f"http://{served.address}/metrics"
        assert get(url)[0] == 401
        assert get(url, token="x" * 20)[0] == 401
        assert get(url, token=TOKEN)[0] == 200


def test_with_tls_it_speaks_tls_and_knows_its_clients(tmp_path: Path):
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("prometheus")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, certificate in (("server", server), ("client", client)):
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    tls = TlsSection(
        certificate=str(tmp_path / "server.pem"), key=str(tmp_path / "server.key"), client_ca=str(tmp_path / "ca.pem")
    )
    stranger = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    known = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    known.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
    with endpoint(config(tls=tls)) as served:
        url = f"https://{served.address}/metrics"
        assert get(url, context=known)[0] == 200
        with pytest.raises((ssl.SSLError, OSError)):
            get(url, context=stranger)
        with pytest.raises(OSError, match=r"closed|reset|Remote end"):
            get(f"http://{served.address}/metrics")
        assert get(url, context=known)[0] == 200


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Handler, "timeout", 100.0)
    with endpoint(config()) as served:
        host, _, port = served.address.rpartition(":")
        idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(MAX_CONNECTIONS)]
        with pytest.raises(OSError, match=r"closed|reset|Remote end"):
            get(f"http://{served.address}/metrics")
        for connection in idle:
            connection.close()
        while not is_served(f"http://{served.address}/metrics"):
            pass


def test_a_taken_port_is_told():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=r"metrics\.port: cannot bind 127\.0\.0\.1:\d+: Address already in use"):
            Endpoint(Metrics("decode").registry, config(metrics=MetricsSection(port=port)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_beyond_loopback_the_rule_of_the_server_holds(host: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"metrics\.host: got .*loopback"):
        load_config(None, [f"metrics.host={host}"])
    assert load_config(None, [f"metrics.host={host}", "server.insecure=true"]).metrics.host == host
    assert load_config(None, [f"metrics.host={host}", "auth.keys=keys.toml"]).metrics.host == host


async def test_a_role_serves_metrics_with_what_it_is():
    role = prefill_role()[0]
    held = hold_port("127.0.0.1", 0)
    port = held.getsockname()[1]
    settings = config(metrics=MetricsSection(port=port), server=ServerSection(drain_s=5.0))
    lines: asyncio.Queue[str] = asyncio.Queue()
    served = asyncio.create_task(serve(role, settings, start=0.0, announce=lines.put_nowait))
    ready = json.loads(await lines.get())
    assert ready["metrics"] == f"127.0.0.1:{port}"
    status, text = await asyncio.to_thread(get, f"http://{ready['metrics']}/metrics")
    assert status == 200
    assert re.search(
        r'k3svc_build_info\{device="none",model="\w+",role="prefill",variant="f",version="[\d.]+"\} 1', text
    )
    async with grpc.aio.insecure_channel(ready["address"]) as channel:
        stub: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
        await stub.Drain(admin_service_pb2.DrainRequest())
    assert await served == 0
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(f"http://{ready['metrics']}/metrics")
    held.close()


async def test_the_lag_of_a_loop_is_told():
    lags: list[float] = []
    told = asyncio.Event()

    def observe(lag_s: float) -> None:
        lags.append(lag_s)
        told.set()

    watching = asyncio.create_task(watch_loop(observe, period_s=0.01))
    await told.wait()
    loop = asyncio.get_running_loop()
    until = loop.time() + 0.1
    while loop.time() < until:
        pass
    told.clear()
    await told.wait()
    watching.cancel()
    assert max(lags) > 0.05
    assert min(lags) >= 0.0
