"""Configuration: frozen dataclasses from one TOML file plus `--set section.key=value`. Unknown keys fail.

Values are never rewritten after load; what can be derived is derived where it is used.
"""

import dataclasses
import difflib
import ipaddress
import json
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3svc.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_VARIABLE = "K3SVC_CONFIG"
ROLES = ("prefill", "decode", "draft")
CPU_KERNELS = Path(__file__).parent / "ops" / "cpu" / "libk3cpu.so"


def default_device() -> str:
    """cpu where set-up has built its kernels, else reference."""
    return "cpu" if CPU_KERNELS.exists() else "reference"


def device_reason(device: str) -> str:
    """Why a process computes on this backend, for its log."""
    if device != default_device():
        return "model.device says so"
    if device == "cpu":
        return "the default: its kernels are built"
    return f"the default, since the kernels of cpu are missing: {CPU_KERNELS}; `python -m k3svc.ops.cpu` builds them"


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The checkpoint and where it runs."""

    path: str = "models/k3-nano"
    """Directory of the checkpoint."""
    device: str = field(default_factory=default_device)
    """Backend of the operation table; `k3svc doctor` lists them. `cpu` where set-up has built its kernels, which
    takes a C++ compiler, else `reference`. Options follow behind a colon: those of `npu` are `kda-extend`,
    `graphs`, `mla-split-norm` and `mla-store`, each with its values in [ascend.md](ascend.md). `mla-split-norm` is
    `unfused` unless it is set to `fused`: the fused kernel is not numerically equivalent to split and norm, and
    sglang leaves it out for Kimi-K3. `mla-store` is `scatter` unless it is set to `prefix`, a kernel that sglang
    has off by default."""
    dtype: str = "float32"
    """Dtype of weights and activations: float32 or bfloat16."""
    threads: int = 1
    """Compute threads of this process."""
    cpus: tuple[int, ...] = ()
    """Numbers of the cores that this process may run on (Linux). Empty: those that it was started with. On machines of
    two cores `k3svc up` gives the engine of decode a core of its own, unless this or `server.cpus` is set.
    """


@dataclass(frozen=True, kw_only=True)
class ServerSection:
    """The gRPC server."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = 0
    """Port to bind; 0 picks a free one, named in the ready line."""
    max_message_bytes: int = 64 << 20
    """Largest message of a hand-off in bytes."""
    max_request_bytes: int = 4 << 20
    """Largest request in bytes; a token id takes up to 5."""
    max_connections: int = 1024
    """Connections at once; more are closed."""
    max_connection_streams: int = 512
    """Calls at once of one connection; further ones wait in the client."""
    max_streams: int = 1024
    """Streaming calls at once; more are answered RESOURCE_EXHAUSTED."""
    max_watches: int = 256
    """Streams of health and reflection at once; more are answered RESOURCE_EXHAUSTED."""
    drain_s: float = 30.0
    """Longest time that running requests get to finish after SIGTERM."""
    cpus: tuple[int, ...] = ()
    """Numbers of the cores of gRPC's own threads, which read and write the sockets (Linux). Where `model.cpus` is set
    too, the event loop may run on both. Empty: those of the process."""
    insecure: bool = False
    """Allow a host beyond loopback with neither TLS nor keys: whoever reaches the port may use the service."""


@dataclass(frozen=True, kw_only=True)
class TlsSection:
    """PEM files; they are read again when they change. Empty: none."""

    certificate: str = ""
    """Certificate chain of this service, shown to clients, and to peers that ask for one. Without: no TLS."""
    key: str = ""
    """Private key of the certificate."""
    client_ca: str = ""
    """Authorities of client certificates. With it every client must show one."""
    ca: str = ""
    """Authorities of the services that this one calls. Without: they are called without TLS."""


@dataclass(frozen=True, kw_only=True)
class AuthSection:
    """Files with secrets; they are read again when they change. Empty: none."""

    keys: str = ""
    """Keys that callers must show one of (TOML, docs/security.md). Without: anybody may call."""
    token: str = ""
    """The token that this service shows to the services that it calls."""


@dataclass(frozen=True, kw_only=True)
class CacheSection:
    """Pools; allocated once at start."""

    page_size: int = 64
    """Tokens of a page of MLA rows; a multiple of 16."""
    num_pages: int = 2048
    """Pages of the pool; 0: as many as nine tenths of the device's free memory hold beside weights, slots and, on
    decode with drafts, the states that a verify step keeps."""
    num_slots: int = 64
    """KDA and conv state slots: the most requests that hold state at once."""
    max_context_tokens: int = 32768
    """Largest prompt plus output in tokens."""
    prefix: str = "auto"
    """Keep pages and states of prompts on prefill, for later prompts that begin alike: on, off, or auto: where it
    changes no bit and the pools lie in the host's memory (`cpu` and `reference` in float32)."""
    prefix_interval: int = 128
    """A prompt goes on from a cached one at multiples of so many tokens, rounded up to whole pages and to the
    backend's grid (64)."""
    prefix_min_tokens: int = 512
    """A shorter prompt is cut into one chunk more, so that others can go on from its end, only if another began alike:
    the cut costs it up to a tenth of its time."""
    prefix_snapshots: int = 64
    """States that are kept, in slots beside cache.num_slots. Pages are kept while no prompt needs them."""
    prefix_shared: bool = False
    """Let callers with different keys or certificates go on from each other's prompts. They can tell by the time to
    the first token what others have asked."""


@dataclass(frozen=True, kw_only=True)
class PrefillSection:
    """The prefill role."""

    chunk_tokens: int = 1024
    """Prompt tokens of one step over all prompts; a multiple of the backend's grid (64)."""
    max_waiting: int = 256
    """Prompts that may wait; more are answered RESOURCE_EXHAUSTED."""
    max_waiting_tokens: int = 1 << 20
    """Prompt tokens that may wait in all."""
    lease_s: float = 60.0
    """Time that state is kept for a decode service that is silent."""
    frame_bytes: int = 2 << 20
    """Target size of a hand-off message in bytes."""


@dataclass(frozen=True, kw_only=True)
class DecodeSection:
    """The decode role."""

    prefill: tuple[str, ...] = ()
    """The prefill services: host:port, dns:///HOST:PORT for all addresses of a name, or file:PATH with a host:port a
    line. Names and files are followed while the service runs (docs/scaling.md)."""
    refresh_s: float = 1.0
    """Time between two looks at the prefill services: which there are, whether they serve, how much they have to do."""
    affinity_blocks: int = 2
    """Leading blocks of a prompt that decide which prefill service it prefers. 0: the least loaded one is taken."""
    affinity_block_tokens: int = 128
    """Tokens of such a block; prompts that share fewer leading tokens may go to different services."""
    affinity_bound: float = 1.25
    """A prefill service with more tokens to compute than so many times the mean is passed over."""
    max_batch: int = 64
    """Samples in one step."""
    overlap: bool = True
    """Ask a device for the next step while one runs, where no sample needs the tokens of that known first. Changes no
    token. Backends on the CPU do not do it."""
    max_waiting: int = 256
    """Requests that may wait; more are answered RESOURCE_EXHAUSTED."""
    max_samples: int = 16
    """Largest n of one request."""
    max_transfers: int = 8
    """Hand-offs under way at once."""
    prefill_attempts: int = 4
    """Prefill attempts of one request before it fails."""
    prefill_timeout_s: float = 60.0
    """Longest silence of a prefill stream before it counts as broken."""
    gather_s: float = 0.02
    """Longest time that tokens wait for others of their stream, to travel in one message, while 8 or more streams are
    read; the first token of a request never waits. 0: none does."""


@dataclass(frozen=True, kw_only=True)
class TransferSection:
    """How state goes from prefill to decode."""

    transport: str = "auto"
    """auto: through shared memory where both services see the same, else over gRPC; grpc: over gRPC only, by state_port
    or in the stream of the call; shm: decode takes nothing that does not come through shared memory."""
    state_port: int = 0
    """Port of server.host at which prefill gives hand-offs over gRPC with fewer copies (docs/transfer.md); 0 picks a
    free one. In a stack of `k3svc up` the port of the first prefill service; the others follow. Decode learns of it by
    itself; where it cannot reach the port, hand-offs come in the stream of their call. -1: prefill has none, decode
    uses none."""
    state_dtype: str = "float32"
    """How KDA states travel: float32, or bfloat16 for half the bytes and rounded states (docs/transfer.md). Prefill and
    decode services must agree."""


@dataclass(frozen=True, kw_only=True)
class GatewaySection:
    """The service sglang.grpc.scheduler.SglangScheduler, through which public gateways reach prefill and decode."""

    enabled: bool = False
    """Serve it beside k3svc.v1. Needs the extra k3svc[gateway]."""
    seed: int = 0
    """Seed of every request that comes that way, since the protocol has none; -1: each request draws its own."""
    room_timeout_s: float = 120.0
    """Longest time that a prompt waits on prefill for the decode service that the gateway chose to ask for it."""


@dataclass(frozen=True, kw_only=True)
class DraftSection:
    """Speculation by a draft service: the draft role itself, and what prefill and decode need to work with it."""

    path: str = ""
    """Directory of the draft checkpoint: the draft role proposes with it, prefill and decode take its projection."""
    endpoint: str = ""
    """host:port of the draft service that prefill and decode use. Empty: none."""
    folded_proposal: bool = True
    """Choose tokens and confidences inside the captured function; false: run that part eagerly."""
    stacked_context_kv: bool = True
    """One product over context rows makes keys and values of all layers; false: one product a layer."""
    embed_in_graph: bool = True
    """The captured function takes token ids; false: it takes embeddings."""
    max_requests: int = 64
    """Samples that the draft role follows at once; others get no proposals. 0: as many as nine tenths of the device's
    free memory hold beside the contexts of max_tickets."""
    window: int = 1024
    """Context rows that a proposal sees, at most those of the checkpoint's own window."""
    max_tickets: int = 64
    """Prompts whose features the draft role keeps until a sample opens them, and after."""
    lease_s: float = 60.0
    """Time that the draft role keeps a sample of which nothing is heard."""
    ticket_lease_s: float = 30.0
    """Time that the draft role keeps the features of a prompt after their last row."""
    shm: bool = True
    """Where both processes are on one host: send features through shared memory, and messages through a Unix socket."""
    history_bytes: int = 64 << 20
    """Features that decode keeps for a draft service that starts again, over all samples."""


@dataclass(frozen=True, kw_only=True)
class MetricsSection:
    """The Prometheus endpoint, GET /metrics. It speaks TLS and wants keys where the gRPC server does."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = 0
    """Port to bind; 0: no endpoint. In a stack of `k3svc up` the port of the first service; the others follow."""


@dataclass(frozen=True, kw_only=True)
class SpeculationSection:
    """How decode uses proposals. It uses none without draft.endpoint, unless `drafter` is ngram."""

    drafter: str = "service"
    """Who proposes: service, the draft service at draft.endpoint; ngram, decode itself from earlier tokens; none."""
    verify: str = "exact"
    """Rule of verification: exact gives the tokens of plain decode; rejection accepts more, and gives their law."""
    ngram_proposals: int = 4
    """Most tokens that decode itself proposes at once, also while the draft service is down; 0: none then."""
    max_wait_s: float = 0.05
    """Longest time that a step waits for proposals, whatever it gains."""
    govern: bool = True
    """Do what makes the most tokens a second; false: wait for all drafts and verify them, as measurements want it."""


@dataclass(frozen=True, kw_only=True)
class TracingSection:
    """OpenTelemetry traces. Needs the extra k3svc[otel]; without endpoint and file there are none."""

    endpoint: str = ""
    """Where spans go over OTLP/gRPC, such as 127.0.0.1:4317; https://HOST:PORT: with TLS."""
    file: str = ""
    """File that spans are appended to, one JSON object a line; services may share it. `k3svc trace` reads it."""
    sample_ratio: float = 1.0
    """Share of requests that are traced where the caller has not decided, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class LogSection:
    """Logging."""

    level: str = "info"
    """debug, info, warning or error."""
    json: bool = True
    """One JSON object a line; false: key=value text."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a role needs to start."""

    model: ModelSection = field(default_factory=ModelSection)
    server: ServerSection = field(default_factory=ServerSection)
    tls: TlsSection = field(default_factory=TlsSection)
    auth: AuthSection = field(default_factory=AuthSection)
    cache: CacheSection = field(default_factory=CacheSection)
    prefill: PrefillSection = field(default_factory=PrefillSection)
    decode: DecodeSection = field(default_factory=DecodeSection)
    transfer: TransferSection = field(default_factory=TransferSection)
    draft: DraftSection = field(default_factory=DraftSection)
    speculation: SpeculationSection = field(default_factory=SpeculationSection)
    gateway: GatewaySection = field(default_factory=GatewaySection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    tracing: TracingSection = field(default_factory=TracingSection)
    log: LogSection = field(default_factory=LogSection)

    def __post_init__(self) -> None:
        _check(
            self.model.dtype in ("float32", "bfloat16"),
            "model.dtype",
            self.model.dtype,
            "float32 or bfloat16",
        )
        _check(1 <= self.model.threads <= 1024, "model.threads", self.model.threads, "1 to 1024")
        _check(0 <= self.server.port < 65536, "server.port", self.server.port, "0 to 65535")
        _check(
            1 << 20 <= self.server.max_message_bytes < 1 << 31,
            "server.max_message_bytes",
            self.server.max_message_bytes,
            "1048576 to 2147483647",
        )
        for name in ("max_connections", "max_connection_streams", "max_streams", "max_watches"):
            _check(getattr(self.server, name) >= 1, f"server.{name}", getattr(self.server, name), "at least 1")
        smallest = 5 * self.cache.max_context_tokens + (1 << 16)
        _check(
            smallest <= self.server.max_request_bytes < 1 << 31,
            "server.max_request_bytes",
            self.server.max_request_bytes,
            f"{smallest} (65536 and 5 for each of cache.max_context_tokens) to 2147483647",
        )
        _check(
            bool(self.tls.certificate) == bool(self.tls.key),
            "tls.certificate and tls.key",
            (self.tls.certificate, self.tls.key),
            "both or none",
        )
        _check(
            bool(self.tls.certificate) or not self.tls.client_ca,
            "tls.client_ca",
            self.tls.client_ca,
            "only with tls.certificate and tls.key",
        )
        is_guarded = bool(self.tls.certificate or self.auth.keys or self.server.insecure)
        for name, host in (("server.host", self.server.host), ("metrics.host", self.metrics.host)):
            _check(
                is_guarded or is_loopback(host),
                name,
                host,
                "a loopback address, as there is neither TLS (tls.certificate, tls.key) nor authentication "
                "(auth.keys); server.insecure = true allows every address",
            )
        ratio = self.tracing.sample_ratio
        _check(0.0 <= ratio <= 1.0, "tracing.sample_ratio", ratio, "0 to 1")
        _check(0 <= self.metrics.port < 65536, "metrics.port", self.metrics.port, "0 to 65535")
        size = self.cache.page_size
        _check(size >= 16 and size % 16 == 0, "cache.page_size", size, "a positive multiple of 16")
        _check(self.cache.num_pages >= 0, "cache.num_pages", self.cache.num_pages, "at least 1, or 0")
        _check(self.cache.num_slots >= 1, "cache.num_slots", self.cache.num_slots, "at least 1")
        _check(
            self.cache.max_context_tokens >= 2,
            "cache.max_context_tokens",
            self.cache.max_context_tokens,
            ">= 2",
        )
        _check(self.cache.prefix in ("auto", "on", "off"), "cache.prefix", self.cache.prefix, "auto, on or off")
        for name in ("prefix_interval", "prefix_snapshots"):
            _check(getattr(self.cache, name) >= 1, f"cache.{name}", getattr(self.cache, name), "at least 1")
        least = self.cache.prefix_min_tokens
        _check(least >= 0, "cache.prefix_min_tokens", least, "0 or more")
        chunk = self.prefill.chunk_tokens
        _check(chunk >= 64 and chunk % 64 == 0, "prefill.chunk_tokens", chunk, "a positive multiple of 64")
        for name in ("max_waiting", "max_waiting_tokens", "lease_s"):
            _check(getattr(self.prefill, name) > 0, f"prefill.{name}", getattr(self.prefill, name), "more than 0")
        _check(0 <= self.decode.gather_s <= 1.0, "decode.gather_s", self.decode.gather_s, "0 to 1")
        frame = self.prefill.frame_bytes
        _check(
            4096 <= frame <= self.server.max_message_bytes // 2,
            "prefill.frame_bytes",
            frame,
            "4096 to half of server.max_message_bytes",
        )
        for name in (
            "max_batch",
            "max_waiting",
            "max_samples",
            "max_transfers",
            "prefill_attempts",
            "prefill_timeout_s",
            "refresh_s",
            "affinity_block_tokens",
        ):
            _check(getattr(self.decode, name) > 0, f"decode.{name}", getattr(self.decode, name), "more than 0")
        _check(self.decode.affinity_blocks >= 0, "decode.affinity_blocks", self.decode.affinity_blocks, "0 or more")
        _check(self.decode.affinity_bound > 1.0, "decode.affinity_bound", self.decode.affinity_bound, "more than 1")
        _check(-1 <= self.transfer.state_port < 65536, "transfer.state_port", self.transfer.state_port, "-1 to 65535")
        _check(
            self.transfer.transport in ("auto", "grpc", "shm"),
            "transfer.transport",
            self.transfer.transport,
            "auto, grpc or shm",
        )
        _check(
            self.transfer.state_dtype in ("float32", "bfloat16"),
            "transfer.state_dtype",
            self.transfer.state_dtype,
            "float32 or bfloat16",
        )
        _check(-1 <= self.gateway.seed < 2**63, "gateway.seed", self.gateway.seed, "-1 to 9223372036854775807")
        _check(self.gateway.room_timeout_s > 0, "gateway.room_timeout_s", self.gateway.room_timeout_s, "more than 0")
        _check(self.draft.max_requests >= 0, "draft.max_requests", self.draft.max_requests, "at least 1, or 0")
        for name in ("window", "max_tickets", "lease_s", "ticket_lease_s"):
            _check(getattr(self.draft, name) > 0, f"draft.{name}", getattr(self.draft, name), "more than 0")
        _check(self.draft.history_bytes >= 0, "draft.history_bytes", self.draft.history_bytes, "0 or more")
        _check(
            bool(self.draft.path) or not self.draft.endpoint,
            "draft.endpoint",
            self.draft.endpoint,
            "only with draft.path, whose projection makes the features that it is sent",
        )
        spec = self.speculation
        _check(
            spec.drafter in ("service", "ngram", "none"), "speculation.drafter", spec.drafter, "service, ngram or none"
        )
        _check(spec.verify in ("exact", "rejection"), "speculation.verify", spec.verify, "exact or rejection")
        least = 1 if spec.drafter == "ngram" else 0
        _check(
            least <= spec.ngram_proposals <= 64, "speculation.ngram_proposals", spec.ngram_proposals, f"{least} to 64"
        )
        _check(0 < spec.max_wait_s <= 1.0, "speculation.max_wait_s", spec.max_wait_s, "more than 0, at most 1")
        _check(
            self.log.level in ("debug", "info", "warning", "error"),
            "log.level",
            self.log.level,
            "debug, info, warning or error",
        )


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file (None: `$K3SVC_CONFIG` if set, else defaults) and applies `section.key=value` overrides.

    Raises ConfigError with the file, the key and the nearest known name.
    """
    if path is None and CONFIG_VARIABLE in os.environ:
        path = Path(os.environ[CONFIG_VARIABLE])
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        key, separator, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not separator or not dot:
            raise ConfigError(f"--set {override}: expected section.key=value, such as server.port=50051")
        values = tree.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{section}: expected a table")
        values[name] = _parse_value(text.strip())
    config: Config = _build(Config, tree, "")
    return config


def is_loopback(host: str) -> bool:
    """Whether nothing but this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def to_toml(config: Config) -> str:
    """The TOML text that load_config reads back as the same value."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        values = getattr(config, section.name)
        lines += [f"{f.name} = {_toml_value(getattr(values, f.name))}" for f in dataclasses.fields(values)]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML escapes as JSON does, and one character more.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(cls: type[Any], tree: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.0)
            raise ConfigError(f"unknown configuration key {name}; did you mean {prefix}{near[0]}?", key=name)
        values[key] = _convert(hints[key], value, name)
    return cls(**values)


def _convert(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: expected a table, got {value!r}", key=name)
        return _build(typing.cast(type[Any], hint), value, f"{name}.")
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
            what = "strings" if kind is str else "whole numbers"
            raise ConfigError(f"{name}: expected a list of {what}, got {value!r}", key=name)
        return tuple(items)
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(f"{name}: expected text in UTF-8, got {value!r}", key=name)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (
        isinstance(hint, types.UnionType)
        or not isinstance(value, hint)
        or (hint is not bool and isinstance(value, bool))
    ):
        raise ConfigError(f"{name}: expected {getattr(hint, '__name__', hint)}, got {value!r}", key=name)
    return value


def _check(condition: bool, name: str, given: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name}: got {given!r}; allowed: {allowed}", key=name)
