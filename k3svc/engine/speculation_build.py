"""From a configuration to the speculator of a decode service."""

import logging
import time
from collections.abc import Callable

from k3svc.config import Config
from k3svc.core.governor import Governor
from k3svc.core.speculation import ReplyTimes
from k3svc.engine.build import DecodeRole
from k3svc.engine.draft_build import profile_of
from k3svc.engine.draft_protocol import DraftProfile
from k3svc.engine.ngram import NgramDrafter
from k3svc.engine.ports import Drafter
from k3svc.engine.speculator import Speculator
from k3svc.engine.verify_times import measure_verify_times

log = logging.getLogger(__name__)


async def add_speculation(config: Config, built: DecodeRole, connect: Callable[[DraftProfile], Drafter]) -> None:
    """Gives the engine a speculator, if the configuration wants one; before it runs. Measures steps for a second.

    `connect` makes the drafter of the draft service. Raises CheckpointError, EngineFault.
    """
    section, loaded = config.speculation, built.loaded
    has_service = section.drafter == "service" and bool(config.draft.endpoint)
    if not has_service and section.drafter != "ngram":
        return
    profile = profile_of(config, loaded) if has_service else None
    ngram = NgramDrafter(num_proposals=section.ngram_proposals) if section.ngram_proposals else None
    num_proposals = max(section.ngram_proposals, profile.num_proposals if profile else 0)
    times = await measure_verify_times(
        loaded.runner,
        page_size=config.cache.page_size,
        num_proposals=num_proposals,
        max_batch=config.decode.max_batch,
    )
    log.info(
        "decode steps measured",
        extra={
            "plain_ms": {rows: round(seconds * 1e3, 2) for rows, seconds in times.plain.points.items()},
            "verify_ms": {rows: round(seconds * 1e3, 2) for rows, seconds in times.verify.points.items()},
        },
    )
    remote = connect(profile) if profile is not None else None
    drafter = remote or ngram
    assert drafter is not None, "speculation without anybody to propose"
    built.engine.speculator = Speculator(
        drafter=drafter,
        fallback=ngram if remote is not None else None,
        scheduler=built.engine.scheduler,
        times=times,
        vocab_size=loaded.cache.spec.vocab_size,
        mask_token_id=profile.mask_token_id if profile is not None else None,
        rule="rejection" if section.verify == "rejection" else "exact",
        clock=time.monotonic,
        governor=Governor() if section.govern else None,
        replies=ReplyTimes(longest_s=section.max_wait_s),
    )
