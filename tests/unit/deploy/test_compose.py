"""The compose files: what they name is there, what they promise is set."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from k3svc.config import Config, is_loopback, load_config

ROOT = Path(__file__).parents[3]
ROLES = {"prefill": "prefill", "decode": "decode", "decode-2": "decode", "draft": "draft"}


def with_defaults(text: str) -> str:
    """The text as compose reads it where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def services(name: str = "docker-compose.yml") -> dict[str, dict[str, Any]]:
    read: dict[str, dict[str, Any]] = yaml.safe_load(with_defaults((ROOT / name).read_text()))["services"]
    return read


def seconds(text: str) -> float:
    assert text.endswith("s"), text
    return float(text[:-1])


def configuration(service: str, folder: str = "deploy/compose") -> Config:
    return load_config(ROOT / folder / f"{ROLES[service]}.toml")


def test_which_services_start_with_which_profile():
    assert {name: one.get("profiles", []) for name, one in services().items()} == {
        "prefill": [],
        "decode": [],
        "draft": [],
        "decode-2": ["two-decodes"],
        "gateway": ["gateway"],
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
    }


@pytest.mark.parametrize("service", services())
def test_every_container_is_confined(service: str):
    one = services()[service]
    assert one["read_only"] is True
    assert one["cap_drop"] == ["ALL"]
    assert one["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"\d+[mg]", one["mem_limit"])
    assert one["restart"] == "unless-stopped"
    assert "/tmp" in one["tmpfs"]
    for port in one.get("ports", ()):
        assert is_loopback(port.split(":")[0]), port
    # A named volume would outlive `docker compose down`.
    for volume in one.get("volumes", ()):
        source, _, mode = volume.split(":")
        assert (ROOT / source).exists(), volume
        assert source.startswith("./")
        assert mode == "ro"


@pytest.mark.parametrize("service", ROLES)
def test_a_role_finds_its_configuration_its_peers_and_its_time_to_drain(service: str):
    one, config = services()[service], configuration(service)
    file = f"/etc/k3svc/{ROLES[service]}.toml"
    module, configured, *settings = one["command"]
    assert (module, configured) == (f"services.{ROLES[service]}", f"--config={file}")
    # The variables have the defaults of the configuration, so that nobody serves another model by leaving them out.
    assert (
        load_config(ROOT / "deploy/compose" / file.rpartition("/")[2], [s.partition("=")[2] for s in settings])
        == config
    )
    mounted = {target: source for source, target, _ in (volume.split(":") for volume in one["volumes"])}
    assert mounted[file] == f"./deploy/compose/{ROLES[service]}.toml"
    for path in (config.model.path, config.draft.path):
        assert (ROOT / mounted["/models"] / path.removeprefix("/models/") / "config.json").exists()
    for address in (*config.decode.prefill, *([config.draft.endpoint] if config.draft.endpoint else [])):
        host, _, port = address.removeprefix("dns:///").rpartition(":")
        assert configuration(host).server.port == int(port)
    assert seconds(one["stop_grace_period"]) > config.server.drain_s
    assert all(port.endswith(f":{config.server.port}") for port in one.get("ports", ()))
    assert config.metrics.port == 9464
    # What the health check of the image asks.
    assert f'"127.0.0.1:{config.server.port}"' in (ROOT / "Dockerfile").read_text()


def test_the_secured_file_mounts_what_its_configurations_name():
    for service, one in services("docker-compose.tls.yml").items():
        mounted = {volume.split(":")[-2] for volume in one["volumes"]}
        config = configuration(service, "deploy/compose/tls")
        assert {config.tls.certificate.rpartition("/")[0], f"/etc/k3svc/{ROLES[service]}.toml"} <= mounted
        assert config.server.port == configuration(service).server.port


def test_no_role_is_left_open_beside_secured_ones():
    assert services("docker-compose.tls.yml").keys() == ROLES.keys()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="scripts/make-certificates needs openssl")
def test_names_of_a_role_are_in_its_certificate_alone(tmp_path: Path):
    script = ROOT / "scripts" / "make-certificates"
    subprocess.run([script, tmp_path, "decode.example", "prefill=10.0.0.7", "draft=d.example", "decode=e"], check=True)
    names = {}
    for role in ("prefill", "decode", "draft", "client"):
        shown = subprocess.run(
            ["openssl", "x509", "-in", tmp_path / f"{role}.pem", "-noout", "-ext", "subjectAltName"],
            capture_output=True,
            text=True,
            check=True,
        )
        names[role] = set(re.findall(r"(?:DNS|IP Address):([^,\s]+)", shown.stdout)) - {"localhost", "127.0.0.1", role}
    assert names == {
        "prefill": {"10.0.0.7"},
        "decode": {"decode.example", "e"},
        "draft": {"d.example"},
        "client": set(),
    }


def test_prometheus_scrapes_services_that_there_are():
    jobs = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus.yml").read_text())["scrape_configs"]
    named = [(name, sd["port"]) for job in jobs for sd in job["dns_sd_configs"] for name in sd["names"]]
    (metrics_port,) = [c for c in services()["gateway"]["command"] if c.startswith("--prometheus-port=")]
    ports = {service: configuration(service).metrics.port for service in ROLES}
    ports["gateway"] = int(metrics_port.partition("=")[2])
    assert dict(named) == ports


def test_the_image_has_what_its_build_reads():
    """Each path that the Dockerfile copies from the context is let in by .dockerignore."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        source
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    # setup.py compiles the kernels of the cpu backend: without it there would be none, and no error.
    assert {"setup.py", "k3svc", "services"} <= set(copied)
    assert {source.rstrip("*") for source in copied} <= allowed
    assert all((ROOT / source).exists() for source in copied if not source.endswith("*"))
