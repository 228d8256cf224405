"""How the gateway is started, and what is said where it cannot be."""

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3svc.config import AuthSection, Config
from k3svc.errors import ConfigError
from k3svc.gateway import launch
from k3svc.gateway.build import require_gateway
from k3svc.gateway.launch import GatewayOptions, Mode, is_ready, require_smg, smg_command

DECODE, PREFILL = ("127.0.0.1:1", "127.0.0.1:2"), ("127.0.0.1:3", "[::1]:4")


def command(mode: Mode, model: Path) -> list[str]:
    return smg_command(
        GatewayOptions(mode=mode),
        port=80,
        metrics_port=81,
        decode=DECODE,
        prefill=PREFILL,
        model=model,
        drain_s=2.5,
    )


def checkpoint(folder: Path, model_type: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_plain_names_decode_and_pd_names_prefill_with_the_port_that_decode_asks(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "kimi_k3")
    plain, pd = command("plain", model), command("pd", model)
    assert plain[-3:] == ["--worker-urls", "grpc://127.0.0.1:1", "grpc://127.0.0.1:2"]
    start = pd.index("--pd-disaggregation")
    assert pd[start + 1 : start + 7] == ["--prefill", "grpc://127.0.0.1:3", "3", "--prefill", "grpc://[::1]:4", "4"]
    assert pd[start + 7 :] == ["--decode", "grpc://127.0.0.1:1", "--decode", "grpc://127.0.0.1:2"]
    assert "--pd-disaggregation" not in plain and PREFILL[0] not in " ".join(plain)


def test_the_parsers_of_k3_are_for_k3(tmp_path: Path) -> None:
    assert "--reasoning-parser kimi_k3 --tool-call-parser kimi_k3" in " ".join(
        command("plain", checkpoint(tmp_path, "kimi_k3"))
    )
    assert "parser" not in " ".join(command("plain", checkpoint(tmp_path, "kimi_linear")))


@pytest.mark.parametrize(
    ("package", "check"),
    [("smg", lambda: require_smg(Config())), ("smg_grpc_proto", require_gateway), ("llguidance", require_gateway)],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str, check: Callable[[], None]) -> None:
    check()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    name = package.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"package {name}: pip install 'k3svc\[gateway\]'"):
        check()


def test_services_with_keys_are_out_of_reach() -> None:
    with pytest.raises(ConfigError, match=r"auth\.keys"):
        require_smg(Config(auth=AuthSection(keys="keys.toml")))


@pytest.mark.parametrize(("line", "ready"), [(b"HTTP/1.1 200 OK", True), (b"HTTP/1.1 503 no", False), (b"", False)])
async def test_readiness_is_what_http_says(line: bytes, ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PROBE_TIMEOUT_S", 60.0)

    async def answer(reader: asyncio.StreamReader, writer: Any) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        assert request.startswith(b"GET /readiness HTTP/1.1\r\n")
        writer.write(line + b"\r\n\r\n" if line else b"")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await is_ready("127.0.0.1", port) is ready
    assert await is_ready("127.0.0.1", port) is False
