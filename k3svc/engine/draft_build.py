"""From a configuration to a draft role: checkpoint, the target's two tables, context pool, runner, engine."""

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from k3svc import ops
from k3svc.config import Config
from k3svc.engine.build import POOL_SHARE, PROTOCOL_VERSION, LoadedModel, Progress
from k3svc.engine.draft import DraftEngine
from k3svc.engine.draft_protocol import DraftProfile
from k3svc.engine.draft_runner import DraftRunner, feature_dtype
from k3svc.engine.observer import UNOBSERVED, Observer
from k3svc.engine.ports import Fingerprint
from k3svc.errors import CheckpointError, ConfigError
from k3svc.model.checkpoint import Checkpoint, model_hash
from k3svc.model.config import ModelConfig
from k3svc.model.draft import DraftModel
from k3svc.model.draft_config import DraftConfig, DraftSwitches, load_draft_config
from k3svc.ops.shortage import room_for, shortage
from k3svc.ops.table import Ops
from k3svc.text.tokenizer import Tokenizer

TABLES = ("model.embed_tokens.weight", "lm_head.weight")
"""What a draft borrows of its target."""


@dataclass(frozen=True, kw_only=True)
class DraftRole:
    """A draft service before it is served."""

    engine: DraftEngine
    runner: DraftRunner
    profile: DraftProfile
    fingerprint: Fingerprint
    stop_token_ids: tuple[int, ...]
    pool_bytes: int


def build_draft(config: Config, progress: Progress, observer: Observer = UNOBSERVED) -> DraftRole:
    """Raises ConfigError, CheckpointError or BackendError. Of the target only two tables are read."""
    section, target = config.draft, Path(config.model.path)
    if not section.path:
        raise ConfigError("draft.path: got nothing; allowed: the directory of a draft checkpoint", key="draft.path")
    backend = ops.load(config.model.device, dtype=config.model.dtype, threads=config.model.threads)
    tokenizer = Tokenizer.load(target)
    draft_config = load_draft_config(Path(section.path))
    check_target(draft_config, ModelConfig.from_directory(target))
    switches = DraftSwitches(
        folded_proposal=section.folded_proposal,
        stacked_context_kv=section.stacked_context_kv,
        embed_in_graph=section.embed_in_graph,
    )
    progress("weights", 0.0)
    with room_for("the weights"):
        with closing(Checkpoint(target)) as checkpoint:
            embedding, lm_head = (checkpoint.tensor(name).to(backend.device) for name in TABLES)
        model = DraftModel.load(
            Path(section.path), embedding=embedding, lm_head=lm_head, ops=backend, switches=switches
        )
    progress("weights", 1.0)
    rows = {"max_window": section.window, "scratch_rows": draft_config.num_proposals + 1}
    max_requests = section.max_requests or fitting_requests(
        model.context_slot_bytes(**rows), backend.free_memory(), section.max_tickets
    )
    num_slots = max_requests + section.max_tickets + 1
    try:
        context = model.new_context(num_slots=num_slots, **rows)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ConfigError(
            f"draft.max_requests, draft.max_tickets, draft.window: a context pool of {num_slots} slots of "
            f"{section.window} rows cannot be allocated: {shortage(error) or str(error).splitlines()[0]}",
            key="draft.max_requests",
        ) from error
    fingerprint = Fingerprint(
        protocol=PROTOCOL_VERSION,
        model=model_hash(target),
        tokenizer=tokenizer.fingerprint,
        wire_layout="",
        variant=f"{backend.name}/{backend.variant}",
    )
    profile = _profile(config, draft_config, fingerprint, backend)
    runner = DraftRunner(model, context, backend, threads=config.model.threads)
    engine = DraftEngine(
        runner=runner,
        profile=profile,
        clock=time.monotonic,
        max_requests=max_requests,
        max_tickets=section.max_tickets,
        context_rows=context.window,
        lease_s=section.lease_s,
        ticket_lease_s=section.ticket_lease_s,
        observer=observer,
    )
    return DraftRole(
        engine=engine,
        runner=runner,
        profile=profile,
        fingerprint=fingerprint,
        stop_token_ids=tuple(tokenizer.stop_token_ids),
        pool_bytes=context.nbytes,
    )


def fitting_requests(slot_bytes: int, free: int | None, max_tickets: int) -> int:
    """How many samples' contexts POOL_SHARE of `free` bytes hold beside prompts'. Raises ConfigError for none."""
    if free is None:
        raise ConfigError(
            "draft.max_requests: got 0; allowed: at least 1 on a backend whose pools lie in the host's memory",
            key="draft.max_requests",
        )
    # One slot more is the dummy.
    requests = int(free * POOL_SHARE) // slot_bytes - max_tickets - 1
    if requests < 1:
        raise ConfigError(
            f"draft.max_requests: the device has {free} bytes free, a context of draft.window rows takes {slot_bytes}, "
            f"and draft.max_tickets = {max_tickets} leaves none for samples",
            key="draft.max_requests",
        )
    return requests


def profile_of(config: Config, loaded: LoadedModel) -> DraftProfile:
    """What a role of the target has in common with the draft service of draft.path. Raises CheckpointError."""
    path = Path(config.draft.path)
    draft_config = load_draft_config(path)
    check_target(draft_config, loaded.model_config)
    return _profile(config, draft_config, loaded.fingerprint, loaded.ops)


def _profile(config: Config, draft: DraftConfig, fingerprint: Fingerprint, backend: Ops) -> DraftProfile:
    """`fingerprint` is the target's."""
    path = Path(config.draft.path)
    return DraftProfile(
        protocol=fingerprint.protocol,
        model=fingerprint.model,
        tokenizer=fingerprint.tokenizer,
        draft=model_hash(path),
        target_layers=draft.target_layers,
        feature_width=draft.hidden_size,
        feature_dtype=feature_dtype(backend),
        num_proposals=draft.num_proposals,
        anchor_predicts=draft.anchor_predicts,
        mask_token_id=draft.mask_token_id,
        vocab_size=draft.vocab_size,
        window=draft.window or 0,
        model_name=Path(config.model.path).resolve().name,
        draft_name=path.resolve().name,
    )


def check_target(draft: DraftConfig, target: ModelConfig) -> None:
    """Raises CheckpointError when a draft was made for a target of another shape."""
    for name, given, wanted in (
        ("hidden_size", draft.hidden_size, target.hidden_size),
        ("vocab_size", draft.vocab_size, target.vocab_size),
        ("num_target_layers", draft.num_target_layers or target.num_layers, target.num_layers),
    ):
        if given != wanted:
            raise CheckpointError(f"draft config: {name}: got {given}; the target needs {wanted}", field=name)
    if max(draft.target_layers) >= target.num_layers - 1:
        raise CheckpointError(
            f"draft config: target_layer_ids: got {list(draft.target_layers)}; allowed: 0..{target.num_layers - 2}",
            field="target_layer_ids",
        )
