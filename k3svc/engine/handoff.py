"""Obtaining one hand-off: which peer is asked, what is retried, when it is given up.

The same attempt resumes from the frames that have landed when a stream breaks; after that a higher attempt starts
afresh, on the next peer. A peer of another model is left out. What can never succeed is raised at once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from k3svc.engine.observer import UNOBSERVED, Observer
from k3svc.engine.peers import PrefillPeers
from k3svc.engine.ports import Clock, Fingerprint, PrefillCall, PrefillPeer
from k3svc.errors import (
    EngineFault,
    Incompatible,
    K3svcError,
    ResourceExhausted,
    Superseded,
    TransferError,
    Unavailable,
)
from k3svc.ops.table import Cache
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import PrefillDone, StateManifest, build_manifest

log = logging.getLogger(__name__)

BUSY_PATIENCE_S = 120.0
"""So long, full queues at the prefill services do not count as failed attempts."""
PICK_AGAIN_S = 1.0
"""Longest wait for a peer in back-off before the choice is made again."""
NOBODY_S = 1.0
"""Hint for callers while there is no prefill service at all."""
MAX_RESUMES = 2
"""Broken streams of one attempt that are resumed before a new attempt starts."""
INCOMPATIBLE_BACKOFF_S = 30.0
"""How long a peer of another model is left alone; it may have been replaced by then."""


@dataclass(frozen=True, kw_only=True)
class HandoffResult:
    """How a hand-off went; times in seconds of this process's clock."""

    done: PrefillDone
    num_bytes: int
    attempts: int
    tail_s: float
    """From the end of prompt computation to the last landed byte, with the way of the call and of the bytes."""
    landing_s: float
    """From the first to the last landed byte."""


class HandoffPuller:
    """Pulls the state of one prompt into reserved memory. `close` stops all writing at once."""

    def __init__(
        self,
        *,
        prefill_id: str,
        prompt: tuple[int, ...],
        priority: int,
        deadline: float | None,
        slot: int,
        block_table: Sequence[int],
        cache: Cache,
        peers: PrefillPeers,
        fingerprint: Fingerprint,
        clock: Clock,
        max_attempts: int,
        release: Callable[[PrefillPeer, str, int], None],
        on_landed: Callable[[int], None] = lambda _num_bytes: None,
        draft_ticket: str = "",
        tenant: str = "",
        room: int | None = None,
        observer: Observer = UNOBSERVED,
    ) -> None:
        """`on_landed` is told of bytes as they land, those of attempts that fail too."""
        self._prefill_id = prefill_id
        self._prompt = prompt
        self._priority = priority
        self._deadline = deadline
        self._slot = slot
        self._block_table = tuple(block_table)
        self._cache = cache
        self._peers = peers
        self._fingerprint = fingerprint
        self._clock = clock
        self._max_attempts = max_attempts
        self._release = release
        self._on_landed = on_landed
        self.draft_ticket = draft_ticket
        """Under which prefill pushes the prompt's features to the draft service; empty: it does not."""
        self._tenant = tenant
        self._room = room
        self._observer = observer
        self._landing: Landing | None = None
        self._asked: tuple[PrefillPeer, int] | None = None

    def close(self) -> None:
        """Ends the landing and gives the state at the peer back. Safe to repeat."""
        if self._landing is not None:
            self._landing.close()
        if self._asked is not None:
            peer, attempt = self._asked
            self._release(peer, self._prefill_id, attempt)
            self._asked = None

    async def run(self) -> HandoffResult:
        """Raises Incompatible when no peer fits; when all attempts failed ResourceExhausted or EngineFault if the last
        one did, and Unavailable for all else.
        """
        attempt, failures = 0, 0
        busy_until = self._clock() + BUSY_PATIENCE_S
        incompatible: set[PrefillPeer] = set()
        tried: set[PrefillPeer] = set()
        last: K3svcError = Unavailable("there is no prefill service now", reason="NO_PREFILL", retry_after_s=NOBODY_S)
        while failures < self._max_attempts:
            picked = self._peers.pick(incompatible, prompt=self._prompt, tried=tried)
            if picked is None:
                break
            peer, wait_s = picked
            if wait_s > 0:
                # Another may have come, or come back, by then.
                await asyncio.sleep(min(wait_s, PICK_AGAIN_S))
                continue
            attempt += 1
            tried.add(peer)
            self._peers.begin(peer, len(self._prompt))
            try:
                result = await self._attempt(peer, attempt)
            except Incompatible as error:
                self._observer.handoff_failed(error.reason)
                self._peers.failed(peer, INCOMPATIBLE_BACKOFF_S)
                incompatible.add(peer)
                last = error
            except (Unavailable, ResourceExhausted, EngineFault, TransferError, Superseded) as error:
                log.warning(
                    "attempt %d of hand-off %s at %s failed: %s",
                    attempt,
                    self._prefill_id,
                    peer.name,
                    error.message,
                    extra={"reason": error.reason},
                )
                self._observer.handoff_failed(error.reason)
                self._peers.failed(peer, getattr(error, "retry_after_s", None))
                # A full queue is no failure: the request holds its place here, and waits. A refusal for another reason,
                # such as a deadline too near, is one.
                if error.reason != ResourceExhausted.reason or self._clock() > busy_until:
                    failures += 1
                last = error
                if isinstance(error, TransferError | Superseded):
                    # Nothing is wrong with the request: its caller may try again.
                    last = Unavailable(f"no hand-off from {peer.name}: {error.message}", reason=error.reason)
            else:
                self._peers.succeeded(peer)
                return result
            finally:
                self._peers.end(peer, len(self._prompt))
                self.close()
        raise last

    async def _attempt(self, peer: PrefillPeer, attempt: int) -> HandoffResult:
        manifest = build_manifest(
            self._cache.spec, request_id=self._prefill_id, attempt=attempt, num_tokens=len(self._prompt)
        )
        landing = Landing(manifest, self._cache, slot=self._slot, block_table=self._block_table)
        self._landing, self._asked = landing, (peer, attempt)
        started, landed = self._clock(), list[float]()
        for resumes_left in range(MAX_RESUMES, -1, -1):
            try:
                done = await self._pull(peer, attempt, landing, landed)
            except (Unavailable, TransferError) as error:
                if resumes_left == 0 or landing.next_sequence == 0 or error.reason == "HANDOFF_CLOSED":
                    raise
                continue
            now = self._clock()
            tail_s = now - started - (done.queue_ms + done.compute_ms) * 1e-3
            return HandoffResult(
                done=done,
                num_bytes=landing.landed_bytes,
                attempts=attempt,
                tail_s=max(0.0, tail_s),
                landing_s=now - landed[0] if landed else 0.0,
            )
        raise AssertionError("unreachable")

    async def _pull(self, peer: PrefillPeer, attempt: int, landing: Landing, landed: list[float]) -> PrefillDone:
        """Adds the times when frames came to `landed`."""
        call = PrefillCall(
            request_id=self._prefill_id,
            attempt=attempt,
            prompt=self._prompt,
            fingerprint=self._fingerprint,
            next_sequence=landing.next_sequence,
            priority=self._priority,
            remaining_s=None if self._deadline is None else self._deadline - self._clock(),
            draft_ticket=self.draft_ticket,
            tenant=self._tenant,
            room=self._room,
            state_bytes=landing.expected.total_bytes - landing.landed_bytes,
        )
        async with aclosing(peer.prefill(call)) as events:
            async for event in events:
                if isinstance(event, StateManifest):
                    landing.accept_manifest(event)
                elif isinstance(event, PrefillDone):
                    landing.finish(event.num_frames)
                    return event
                else:
                    landed += [self._clock()] if event else []
                    for frame in event:
                        landing.accept(frame)
                        self._on_landed(frame.nbytes)
        raise TransferError("the hand-off stream ended early", reason="HANDOFF_INCOMPLETE")
