"""From a configuration to a role: checkpoint, backend, pools, runner, engine. Blocks while it loads."""

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from k3svc import ops
from k3svc.config import CacheSection, Config
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.pages import PagePool
from k3svc.core.prefill_scheduler import PrefillScheduler
from k3svc.core.prefix_cache import PrefixCache
from k3svc.core.slots import SlotPool
from k3svc.core.targets import Affinity
from k3svc.engine.decode import DecodeEngine
from k3svc.engine.features import FeatureTap
from k3svc.engine.observer import UNOBSERVED, Observer
from k3svc.engine.ports import Fingerprint, PrefillPeer
from k3svc.engine.prefill import PrefillEngine
from k3svc.engine.runner import ModelRunner
from k3svc.errors import ConfigError
from k3svc.model.checkpoint import model_hash
from k3svc.model.config import ModelConfig
from k3svc.model.draft_config import load_draft_config
from k3svc.model.kimi import Model, cache_spec
from k3svc.ops.shortage import room_for, shortage
from k3svc.ops.table import Cache, CacheSpec, Ops
from k3svc.text.tokenizer import Tokenizer
from k3svc.transfer.manifest import wire_layout

PROTOCOL_VERSION = 1
POOL_SHARE = 0.9
"""Of the memory that is free after the weights; the rest is for steps."""

Progress = Callable[[str, float], None]
"""(stage, share of it that is done in [0, 1])."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """What both roles need: a model on a backend with its pools, and the thread that runs its steps."""

    model_config: ModelConfig
    tokenizer: Tokenizer
    cache: Cache
    runner: ModelRunner
    fingerprint: Fingerprint
    grid: int
    ops: Ops
    num_snapshots: int
    """Slots of the pools past cache.num_slots, which keep states of the prefix cache."""


@dataclass(frozen=True, kw_only=True)
class PrefillRole:
    """A prefill service before it is served."""

    engine: PrefillEngine
    loaded: LoadedModel


@dataclass(frozen=True, kw_only=True)
class DecodeRole:
    """A decode service before it is served."""

    engine: DecodeEngine
    loaded: LoadedModel


def build_prefill(config: Config, progress: Progress, observer: Observer = UNOBSERVED) -> PrefillRole:
    """Raises ConfigError, CheckpointError or BackendError."""
    loaded = load_model(config, progress, observer, keeps_prefixes=True)
    cache, section = config.cache, config.prefill
    if section.chunk_tokens % loaded.grid:
        raise ConfigError(
            f"prefill.chunk_tokens: got {section.chunk_tokens}; allowed: a multiple of {loaded.grid} on this backend",
            key="prefill.chunk_tokens",
        )
    pages = PagePool(loaded.cache.spec.num_pages)
    scheduler = PrefillScheduler(
        pages=pages,
        slots=SlotPool(cache.num_slots),
        page_size=cache.page_size,
        chunk_tokens=section.chunk_tokens,
        grid=loaded.grid,
        max_waiting=section.max_waiting,
        max_waiting_tokens=section.max_waiting_tokens,
        max_prompt_tokens=cache.max_context_tokens - 1,
        cache=_prefix_cache(config, loaded, pages),
    )
    engine = PrefillEngine(
        scheduler=scheduler,
        runner=loaded.runner,
        cache=loaded.cache,
        fingerprint=loaded.fingerprint,
        clock=time.monotonic,
        lease_s=section.lease_s,
        frame_bytes=section.frame_bytes,
        is_isolated=not cache.prefix_shared,
    )
    return PrefillRole(engine=engine, loaded=loaded)


def _prefix_cache(config: Config, loaded: LoadedModel, pages: PagePool) -> PrefixCache | None:
    section = config.cache
    if loaded.num_snapshots == 0:
        return None
    slots = SlotPool(loaded.num_snapshots, first=section.num_slots + 1)
    unit = math.lcm(section.page_size, loaded.grid)
    interval = -(-section.prefix_interval // unit) * unit
    return PrefixCache(
        pages=pages,
        slots=slots,
        page_size=section.page_size,
        interval=interval,
        min_tokens=section.prefix_min_tokens,
    )


def num_snapshots(section: CacheSection, backend: Ops) -> int:
    """States that a prefill service keeps; 0: it has no prefix cache."""
    # What a chunk computes may differ in bits where a prompt is cut elsewhere, unless the backend says otherwise.
    is_exact = backend.batch_invariant and backend.free_memory() is None
    if section.prefix == "off" or (section.prefix == "auto" and not is_exact):
        return 0
    return section.prefix_snapshots


def build_decode(
    config: Config, peers: Sequence[PrefillPeer], progress: Progress, observer: Observer = UNOBSERVED
) -> DecodeRole:
    """`peers`: those that are known at the start. Raises ConfigError, CheckpointError or BackendError."""
    if not config.decode.prefill:
        raise ConfigError(
            "decode.prefill: got no address; allowed: one or more host:port of prefill services", key="decode.prefill"
        )
    proposals = most_proposals(config)
    loaded = load_model(config, progress, observer, verify_width=1 + proposals if proposals else 0)
    cache, section = config.cache, config.decode
    scheduler = DecodeScheduler(
        pages=PagePool(loaded.cache.spec.num_pages),
        slots=SlotPool(cache.num_slots),
        page_size=cache.page_size,
        max_batch=section.max_batch,
        max_waiting=section.max_waiting,
        max_transfers=section.max_transfers,
        max_context_tokens=cache.max_context_tokens,
        stop_token_ids=loaded.tokenizer.stop_token_ids,
    )
    engine = DecodeEngine(
        scheduler=scheduler,
        runner=loaded.runner,
        ahead=loaded.runner if section.overlap and loaded.ops.is_asynchronous else None,
        cache=loaded.cache,
        peers=peers,
        tokenizer=loaded.tokenizer,
        fingerprint=loaded.fingerprint,
        clock=time.monotonic,
        instance=secrets.token_hex(8),
        prefill_attempts=section.prefill_attempts,
        max_samples=section.max_samples,
        observer=observer,
        affinity=Affinity(
            num_blocks=section.affinity_blocks,
            block_tokens=section.affinity_block_tokens,
            bound=section.affinity_bound,
        ),
    )
    return DecodeRole(engine=engine, loaded=loaded)


def most_proposals(config: Config) -> int:
    """Drafts of a sample that a verify step of decode may have. Raises CheckpointError."""
    section = config.speculation
    if section.drafter == "service" and config.draft.endpoint:
        return max(section.ngram_proposals, load_draft_config(Path(config.draft.path)).num_proposals)
    return section.ngram_proposals if section.drafter == "ngram" else 0


def fitting_pages(spec: CacheSpec, free: int | None, max_context_tokens: int, *, reserved: int = 0) -> int:
    """How many pages `free` bytes hold beside the slots and `reserved` bytes. Raises ConfigError for less than one
    context.
    """
    if free is None:
        raise ConfigError(
            "cache.num_pages: got 0; allowed: at least 1 on a backend whose pools lie in the host's memory",
            key="cache.num_pages",
        )
    left = int(free * POOL_SHARE) - (spec.num_slots + 1) * spec.slot_bytes - reserved
    # One page more is the dummy.
    pages = left // max(spec.page_bytes, 1) - 1
    needed = -(-max_context_tokens // spec.page_size)
    if pages < needed:
        raise ConfigError(
            f"cache.num_pages: the device has {free} bytes free, {spec.num_slots} slots take {spec.slot_bytes} each, "
            f"the states that a verify step keeps (decode.max_batch, drafts) {reserved}, "
            f"and {max(pages, 0)} pages are left; cache.max_context_tokens = {max_context_tokens} needs {needed}",
            key="cache.num_pages",
        )
    return pages


def load_model(
    config: Config,
    progress: Progress,
    observer: Observer = UNOBSERVED,
    *,
    keeps_prefixes: bool = False,
    verify_width: int = 0,
) -> LoadedModel:
    """Loads checkpoint and tokenizer and allocates the pools, with `keeps_prefixes` also for the prefix cache.

    `verify_width`: rows of a sample in the widest verify step, whose memory pools of any size leave free.
    """
    path = Path(config.model.path)
    backend = ops.load(config.model.device, dtype=config.model.dtype, threads=config.model.threads)
    tokenizer = Tokenizer.load(path)
    with room_for("the weights"):
        model = Model.load(path, backend, lambda done, total: progress("weights", done / max(total, 1)))
        features = FeatureTap.load(Path(config.draft.path), backend) if config.draft.path else None
    snapshots = num_snapshots(config.cache, backend) if keeps_prefixes else 0
    spec = cache_spec(
        model.config,
        num_slots=config.cache.num_slots + snapshots,
        num_pages=config.cache.num_pages,
        page_size=config.cache.page_size,
        state_dtype=torch.float32,
        kv_dtype=backend.activation_dtype,
    )
    if config.transfer.state_dtype == "bfloat16":
        spec = replace(spec, wire_state_dtype=torch.bfloat16)
    if config.cache.num_pages == 0:
        reserved = backend.verify_bytes(spec, config.decode.max_batch, verify_width)
        pages = fitting_pages(spec, backend.free_memory(), config.cache.max_context_tokens, reserved=reserved)
        spec = replace(spec, num_pages=pages)
    progress("pools", 0.0)
    try:
        cache = backend.new_cache(spec)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ConfigError(
            f"cache.num_pages, cache.num_slots: the pools of {spec.num_pages} pages of {spec.page_size} tokens and "
            f"{spec.num_slots} slots cannot be allocated: {shortage(error) or str(error).splitlines()[0]}",
            key="cache.num_pages",
        ) from error
    progress("pools", 1.0)
    fingerprint = Fingerprint(
        protocol=PROTOCOL_VERSION,
        model=model_hash(path),
        tokenizer=tokenizer.fingerprint,
        wire_layout=wire_layout(spec),
        variant=f"{backend.name}/{backend.variant}",
    )
    return LoadedModel(
        model_config=model.config,
        tokenizer=tokenizer,
        cache=cache,
        runner=ModelRunner(
            model,
            cache,
            backend,
            threads=config.model.threads,
            cpus=config.model.cpus,
            observer=observer,
            features=features,
            rule="rejection" if config.speculation.verify == "rejection" else "exact",
        ),
        fingerprint=fingerprint,
        grid=backend.chunk,
        ops=backend,
        num_snapshots=snapshots,
    )
