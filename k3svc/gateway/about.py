"""What a service tells a gateway of itself: model, pairing labels, load, tokenizer files."""

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import k3svc
from k3svc.config import Config
from k3svc.core.events import Load
from k3svc.engine.ports import Fingerprint
from k3svc.errors import CheckpointError
from k3svc.gateway.protos import common_pb2
from k3svc.gateway.protos import sglang_scheduler_pb2 as pb2
from k3svc.rpc.admin import RoleInfo

TOKENIZER_FILES = (
    "tiktoken.model",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Sent where a checkpoint has them; the first three make K3's layout."""
CHUNK_BYTES = 64 << 10
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


class About:
    """The answers of one service, apart from those that need a request."""

    def __init__(self, info: RoleInfo, config: Config, load: Callable[[], Load]) -> None:
        """Raises CheckpointError."""
        self._info = info
        self._config = config
        self._load = load
        self._started = time.time()
        self._directory = Path(config.model.path)
        self._model = _read_json(self._directory / "config.json")
        self._defaults = _read_json(self._directory / "generation_config.json", optional=True)
        self._archive = tokenizer_archive(self._directory)
        self._counted = (time.monotonic(), 0)

    def model(self) -> pb2.GetModelInfoResponse:
        info, pad, bos = self._info, self._model.get("pad_token_id"), self._model.get("bos_token_id")
        defaults = {key: self._defaults[key] for key in _SAMPLING_DEFAULTS if key in self._defaults}
        return pb2.GetModelInfoResponse(
            model_path=info.model_name,
            # No path of the gateway's machine, so that it asks for the files.
            tokenizer_path=f"{info.model_name}@{info.fingerprint.tokenizer[:16]}",
            is_generation=True,
            weight_version=info.fingerprint.model[:16],
            served_model_name=info.model_name,
            max_context_length=info.max_context_tokens,
            max_req_input_len=info.max_context_tokens - 1,
            vocab_size=info.vocab_size,
            model_type=self._model.get("model_type", ""),
            architectures=self._model.get("architectures", []),
            eos_token_ids=info.stop_token_ids,
            pad_token_id=pad if isinstance(pad, int) else 0,
            bos_token_id=bos if isinstance(bos, int) else 0,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    def server(self) -> pb2.GetServerInfoResponse:
        """`server_args` has the labels by which a gateway pairs prefill and decode."""
        load, cache = self._load(), self._config.cache
        response = pb2.GetServerInfoResponse(
            active_requests=load.running + load.waiting + load.in_transfer,
            uptime_seconds=time.time() - self._started,
            last_receive_timestamp=time.time(),
            sglang_version=f"k3svc {k3svc.__version__}",
            server_type="k3svc",
            max_total_num_tokens=load.total_pages * cache.page_size,
        )
        response.start_time.FromNanoseconds(int(self._started * 1e9))
        response.server_args.update(
            {
                "served_model_name": self._info.model_name,
                "disaggregation_mode": self._info.role,
                "disaggregation_bootstrap_port": self._config.server.port,
                "disaggregation_transfer_backend": "k3svc",
                "pairing_protocol": pairing_protocol(self._info.fingerprint),
                "page_size": cache.page_size,
                "kv_cache_dtype": self._config.model.dtype,
                "max_running_requests": self._max_running,
                "tp_size": 1,
                "dp_size": 1,
            }
        )
        return response

    def loads(self) -> pb2.GetLoadsResponse:
        load, size = self._load(), self._config.cache.page_size
        used = (load.total_pages - load.free_pages) / max(load.total_pages, 1)
        now = time.monotonic()
        before, counted = self._counted
        self._counted = (now, load.num_tokens)
        throughput = (load.num_tokens - counted) / max(now - before, 1e-3)
        running = load.running + load.in_transfer
        utilization = running / self._max_running
        queues = {"prefill_inflight_queue_reqs": load.in_transfer}
        if self._info.role == "decode":
            queues = {"decode_prealloc_queue_reqs": load.waiting, "decode_transfer_queue_reqs": load.in_transfer}
        scheduler = pb2.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=running + load.waiting,
            num_used_tokens=(load.total_pages - load.free_pages) * size,
            max_total_num_tokens=load.total_pages * size,
            token_usage=used,
            gen_throughput=throughput,
            utilization=utilization,
            cache_hit_rate=load.prefix_hit_tokens / max(load.prefix_queried_tokens, 1),
            max_running_requests=self._max_running,
            memory=pb2.MemoryMetrics(kv_cache_gb=self._info.pool_bytes / 1e9, token_capacity=load.total_pages * size),
            disaggregation=pb2.DisaggregationMetrics(mode=self._info.role, **queues),
            queues=pb2.QueueMetrics(waiting=load.waiting),
        )
        return pb2.GetLoadsResponse(
            timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            version=f"k3svc {k3svc.__version__}",
            dp_rank_count=1,
            loads=[scheduler],
            aggregate=pb2.AggregateMetrics(
                total_running_reqs=running,
                total_waiting_reqs=load.waiting,
                total_reqs=running + load.waiting,
                avg_token_usage=used,
                avg_throughput=throughput,
                avg_utilization=utilization,
            ),
        )

    def tokenizer(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """A zip archive in chunks, its SHA-256 in the last one."""
        digest = hashlib.sha256(self._archive).hexdigest()
        for start in range(0, len(self._archive), CHUNK_BYTES):
            data = self._archive[start : start + CHUNK_BYTES]
            is_last = start + CHUNK_BYTES >= len(self._archive)
            yield common_pb2.GetTokenizerChunk(data=data, sha256=digest if is_last else "")

    @property
    def _max_running(self) -> int:
        slots = self._config.cache.num_slots
        return slots if self._info.role == "prefill" else min(slots, self._config.decode.max_batch)


def pairing_protocol(fingerprint: Fingerprint) -> str:
    """Equal where a hand-off is possible: a digest of all that two services compare before one."""
    compared = (fingerprint.protocol, fingerprint.model, fingerprint.tokenizer, fingerprint.wire_layout)
    return f"k3svc-{hashlib.sha256(repr(compared).encode()).hexdigest()[:16]}"


def tokenizer_archive(directory: Path) -> bytes:
    """The same bytes for the same files. Raises CheckpointError."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in TOKENIZER_FILES:
            if (directory / name).is_file():
                archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), _read(directory / name), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value
