"""How the public gateway smg is started, and when it is ready."""

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from k3svc.config import Config
from k3svc.errors import ConfigError
from k3svc.rpc.waiting import within

Mode = Literal["plain", "pd"]

K3_MODEL_TYPE = "kimi_k3"
HEALTH_INTERVAL_S = 5
PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """A gateway in front of services. `mode` plain: it knows the decode services alone; pd: prefill as well."""

    mode: Mode = "plain"
    host: str = "127.0.0.1"
    port: int = 0
    """HTTP; 0: any."""


def require_smg(config: Config) -> None:
    """Raises ConfigError when smg is missing, or cannot reach services of this configuration."""
    if importlib.util.find_spec("smg") is None:
        raise ConfigError("--gateway needs the package smg: pip install 'k3svc[gateway]'")
    for name, value in (("tls.certificate", config.tls.certificate), ("auth.keys", config.auth.keys)):
        if value:
            raise ConfigError(f"--gateway: the gateway shows services neither a certificate nor a key; unset {name}")


def smg_command(
    options: GatewayOptions,
    *,
    port: int,
    metrics_port: int,
    decode: Sequence[str],
    prefill: Sequence[str],
    model: Path,
    drain_s: float,
) -> list[str]:
    """Arguments of the Python interpreter. `decode`, `prefill`: host:port of the services. `model`: the checkpoint."""
    arguments = ["-m", "smg", "launch", "--host", options.host, "--port", str(port)]
    arguments += ["--prometheus-host", options.host, "--prometheus-port", str(metrics_port)]
    arguments += ["--policy", "round_robin", "--log-json"]
    # A service that is started again has requests again after a few seconds, not after a minute.
    arguments += ["--health-check-interval-secs", str(HEALTH_INTERVAL_S), "--health-success-threshold", "1"]
    arguments += ["--cb-timeout-duration-secs", str(HEALTH_INTERVAL_S)]
    arguments += ["--shutdown-grace-period-secs", str(max(1, round(drain_s)))]
    if _model_type(model) == K3_MODEL_TYPE:
        arguments += ["--reasoning-parser", K3_MODEL_TYPE, "--tool-call-parser", K3_MODEL_TYPE]
    if options.mode == "plain":
        return [*arguments, "--worker-urls", *(f"grpc://{address}" for address in decode)]
    arguments.append("--pd-disaggregation")
    for address in prefill:
        # The second value is the port that decode is told: the one where prefill answers it, too.
        arguments += ["--prefill", f"grpc://{address}", address.rpartition(":")[2]]
    for address in decode:
        arguments += ["--decode", f"grpc://{address}"]
    return arguments


async def is_ready(host: str, port: int) -> bool:
    """Whether a gateway answers that it has the services it needs."""
    try:
        return await within(PROBE_TIMEOUT_S, _probe(host, port))
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        return False


async def _probe(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /readiness HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        return (await reader.readline()).split()[1:2] == [b"200"]
    finally:
        writer.close()


def _model_type(model: Path) -> str:
    try:
        return str(json.loads((model / "config.json").read_bytes()).get("model_type", ""))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: {model}/config.json cannot be read: {error}", key="model.path") from error
