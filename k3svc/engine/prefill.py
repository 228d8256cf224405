"""PrefillEngine: computes prompts in chunks and hands their state out while it computes.

All decisions happen on the event loop, synchronously; the only awaits are the step on the engine thread and the
reader's wait for more frames. A job is one (request_id, attempt). It ends exactly once: released, superseded, expired
(its lease or its deadline) or failed; `_end` gives its pages and slot back. The lease runs while nobody takes what is
there to take: without a reader, and while a reader does not come back for more.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from k3svc.core.batch import ExtendBatch
from k3svc.core.events import Load
from k3svc.core.prefill_scheduler import PrefillScheduler, Prompt
from k3svc.core.prefix_cache import CacheCounts
from k3svc.core.rates import Throughput, retry_after_s
from k3svc.core.request import validate_request_id, validate_tokens
from k3svc.engine.ports import (
    Clock,
    ExtendRunner,
    FeatureSink,
    Fingerprint,
    PrefillCall,
)
from k3svc.engine.prefill_job import Handoff, Job
from k3svc.engine.prompt_features import PromptFeatures
from k3svc.errors import (
    DeadlineExceeded,
    EngineFault,
    Incompatible,
    InvalidRequest,
    K3svcError,
    ResourceExhausted,
    Superseded,
    Unavailable,
)
from k3svc.ops.table import Cache
from k3svc.transfer.manifest import Frame, PrefillDone, build_manifest, layout_difference
from k3svc.transfer.outbox import Outbox

log = logging.getLogger(__name__)

STALL_S = 60.0
"""A step of which no layer ends for longer counts as no progress."""
DRAIN_RETRY_S = 1.0
"""Hint for callers of a service that drains; its successor may be up by then."""
MAX_TENANT_CHARS = 1024
"""Of the name under which prompts are cached."""
MAX_SEEN_VARIANTS = 16
"""Kernel variants of peers that are told of in the log, once each."""
MAX_FORGOTTEN = 4096
"""Request ids whose ended attempts are remembered, so that late calls are refused."""


class PrefillEngine:
    """One prefill service's prompts, from arrival to release."""

    def __init__(
        self,
        *,
        scheduler: PrefillScheduler,
        runner: ExtendRunner,
        cache: Cache,
        fingerprint: Fingerprint,
        clock: Clock,
        lease_s: float,
        frame_bytes: int,
        is_isolated: bool = True,
    ) -> None:
        """`is_isolated`: prompts of one tenant never go on from those of another."""
        self.scheduler = scheduler
        self._is_isolated = is_isolated
        self.fingerprint = fingerprint
        self._runner = runner
        self._cache = cache
        self._clock = clock
        self._lease_s = lease_s
        self._frame_bytes = frame_bytes
        self.features: FeatureSink | None = None
        """Where the features of prompts go that have a draft ticket; None: nowhere."""
        self._jobs: dict[str, Job] = {}
        self._forgotten: OrderedDict[str, int] = OrderedDict()
        self._stepping: dict[str, tuple[Job, int, int]] = {}
        self._wake = asyncio.Event()
        self._step_started: float | None = None
        self._last_progress = 0.0
        self._running = False
        self._draining = False
        self._num_tokens = 0
        self._handoff_bytes = 0
        self._throughput = Throughput()
        self._seen_variants = {fingerprint.variant}
        self._outcomes = dict.fromkeys(("released", "superseded", "abandoned", "expired", "failed", "rejected"), 0)

    def open(self, call: PrefillCall) -> Handoff:
        """Starts, resumes or supersedes. Raises InvalidRequest, Incompatible, Superseded, ResourceExhausted,
        DeadlineExceeded or Unavailable; nothing is held then.
        """
        try:
            job = self._find_or_submit(call)
        except K3svcError:
            self._outcomes["rejected"] += 1
            raise
        self._compare_variant(call.fingerprint.variant)
        self._set_deadline(job, call.remaining_s)
        job.idle_since = self._clock()
        job.call = call
        job.handoff = Handoff(self, job)
        job.prompt.paused = False
        job.changed.set()
        self._wake.set()
        return job.handoff

    def release(self, request_id: str, attempt: int) -> bool:
        """Gives the state of this attempt and of lower ones back. Safe to repeat; unknown ids are fine. Raises
        InvalidRequest for what cannot be an id.
        """
        validate_request_id(request_id)
        self._forget(request_id, attempt)
        job = self._jobs.get(request_id)
        if job is None or job.call.attempt > attempt:
            return False
        self._end(job, Superseded("the state was released"), "released")
        return True

    async def run(self) -> None:
        """The step loop. Ends after `drain` when nothing is held any more. Streams that live when it ends otherwise are
        told Unavailable.
        """
        self._running = True
        try:
            while not (self._draining and not self._jobs):
                batch, admitted = self.scheduler.schedule()
                for prompt in admitted:
                    self._admitted(self._jobs[prompt.key.rpartition("#")[0]])
                if batch is None:
                    self._wake.clear()
                    await self._wake.wait()
                else:
                    await self._step(batch)
        finally:
            self._running = False
            self._draining = True
            for job in list(self._jobs.values()):
                self._end(job, Unavailable("this prefill service stops", reason="STOPPED"), "failed")

    def drain(self) -> None:
        """Refuses new prompts; running ones finish and held state is served until released or expired."""
        self._draining = True
        self._wake.set()

    def is_progressing(self) -> bool:
        """Whether the step loop runs and no step hangs. However many prompts wait, and however long a step takes whose
        layers end one after the other, is no matter.
        """
        return self._running and (self._step_started is None or self._clock() - self._last_progress < STALL_S)

    def load(self) -> Load:
        scheduler, cache = self.scheduler, self.scheduler.cache
        counts = CacheCounts() if cache is None else cache.counts
        return Load(
            running=len(scheduler.active),
            waiting=len(scheduler.waiting),
            in_transfer=len(scheduler.computed),
            free_pages=scheduler.num_free_pages,
            total_pages=scheduler.pages.num_pages,
            free_slots=scheduler.slots.num_free,
            total_slots=scheduler.slots.num_slots,
            draining=self._draining,
            num_tokens=self._num_tokens,
            handoff_bytes=self._handoff_bytes,
            outcomes=dict(self._outcomes),
            queued_tokens=scheduler.waiting_tokens
            + sum(len(prompt.token_ids) - prompt.num_computed for prompt in scheduler.active.values()),
            prefix_pages=0 if cache is None else cache.num_pages,
            prefix_snapshots=0 if cache is None else cache.num_snapshots,
            prefix_queried_tokens=counts.queried_tokens,
            prefix_hit_tokens=counts.hit_tokens,
            prefix_evicted_pages=counts.evicted_pages,
            prefix_evicted_snapshots=counts.evicted_snapshots,
        )

    def flush_cache(self) -> int:
        """Forgets all cached prompts, without harm to those that run; the number of pages."""
        return 0 if self.scheduler.cache is None else self.scheduler.cache.clear()

    def sent(self, frames: list[Frame]) -> None:
        """Counts frames that a stream took."""
        self._handoff_bytes += sum(frame.data.nbytes for frame in frames)

    def done(self, job: Job) -> PrefillDone:
        """The last event of a hand-off, when all frames were taken."""
        assert job.outbox is not None and job.started is not None and job.computed is not None
        if job.sent is None:
            job.sent = self._clock()
        return PrefillDone(
            num_frames=job.outbox.num_frames,
            queue_ms=(job.started - job.opened) * 1e3,
            compute_ms=(job.computed - job.started) * 1e3,
            send_tail_ms=(job.sent - job.computed) * 1e3,
            chunks=job.prompt.num_chunks,
            cached_tokens=job.prompt.num_cached,
        )

    def _find_or_submit(self, call: PrefillCall) -> Job:
        self._check(call)
        if call.attempt <= self._forgotten.get(call.request_id, 0):
            raise Superseded(f"attempt {call.attempt} of {call.request_id!r} has ended")
        job = self._jobs.get(call.request_id)
        if job is not None and call.attempt < job.call.attempt:
            raise Superseded(f"attempt {call.attempt} of {call.request_id!r} is older than {job.call.attempt}")
        if job is not None and call.attempt == job.call.attempt:
            if call.prompt != job.call.prompt:
                raise InvalidRequest("prompt", f"{len(call.prompt)} tokens", "the same prompt in one attempt")
            return job
        if self._draining:
            raise Unavailable("this prefill role drains", reason="DRAINING", retry_after_s=DRAIN_RETRY_S)
        if call.next_sequence != 0:
            raise Superseded("there is no hand-off to resume", reason="HANDOFF_GONE")
        validate_tokens("prompt", call.prompt, self._cache.spec.vocab_size)
        features = PromptFeatures(self.features, call) if self.features is not None and call.draft_ticket else None
        prompt = Prompt(
            key=f"{call.request_id}#{call.attempt}",
            token_ids=call.prompt,
            priority=call.priority,
            namespace=call.tenant if self._is_isolated else "",
            features_from=None if features is None else features.oldest,
        )
        wait_s = self._throughput.seconds_for(self.scheduler.waiting_tokens)
        if call.remaining_s is not None and wait_s is not None and wait_s >= call.remaining_s:
            raise ResourceExhausted(
                f"{self.scheduler.waiting_tokens} prompt tokens wait, about {wait_s:.1f} s of work, and the deadline "
                f"passes in {call.remaining_s:.1f} s",
                retry_after_s=retry_after_s(wait_s),
                reason="DEADLINE_TOO_NEAR",
            )
        self.scheduler.submit(prompt, retry_after_s=retry_after_s(wait_s))
        if job is not None:
            self._end(job, Superseded("a newer attempt took over"), "superseded")
        job = Job(call=call, prompt=prompt, opened=self._clock(), features=features)
        job.lease = asyncio.get_running_loop().call_later(self._lease_s, self._watch_lease, job)
        self._jobs[call.request_id] = job
        return job

    def _check(self, call: PrefillCall) -> None:
        """Raises what is wrong with a call by itself."""
        validate_request_id(call.request_id)
        field_name = self.fingerprint.difference(call.fingerprint)
        if field_name is not None:
            own, theirs = getattr(self.fingerprint, field_name), getattr(call.fingerprint, field_name)
            named = f"{field_name}: prefill has {own!r}, decode has {theirs!r}"
            if field_name == "wire_layout":
                named = layout_difference(own, theirs)
            raise Incompatible(f"fingerprint differs in {named}", field=field_name)
        if call.attempt < 1:
            raise InvalidRequest("attempt", call.attempt, "at least 1")
        if len(call.tenant) > MAX_TENANT_CHARS:
            raise InvalidRequest("tenant", f"{len(call.tenant)} characters", f"at most {MAX_TENANT_CHARS}")
        if call.remaining_s is not None and not call.remaining_s > 0:
            raise DeadlineExceeded("the deadline passed before the prompt was taken in")

    def _compare_variant(self, variant: str) -> None:
        if variant not in self._seen_variants and len(self._seen_variants) < MAX_SEEN_VARIANTS:
            self._seen_variants.add(variant)
            log.warning(
                "a decode service runs %s, this prefill service %s: equal bits are not promised between them",
                variant[:128],
                self.fingerprint.variant,
            )

    def _set_deadline(self, job: Job, remaining_s: float | None) -> None:
        if job.deadline is not None:
            job.deadline.cancel()
        job.deadline = None
        if remaining_s is not None:
            job.deadline = asyncio.get_running_loop().call_later(remaining_s, self._pass_deadline, job)

    def _admitted(self, job: Job) -> None:
        prompt, call = job.prompt, job.call
        assert prompt.slot is not None
        job.started = self._clock()
        manifest = build_manifest(
            self._cache.spec, request_id=call.request_id, attempt=call.attempt, num_tokens=len(call.prompt)
        )
        job.outbox = Outbox(
            manifest, self._cache, slot=prompt.slot, block_table=prompt.pages, frame_bytes=self._frame_bytes
        )
        for layer in self._cache.spec.mla_layers if prompt.num_cached else ():
            job.outbox.add_layer(layer, 0, prompt.num_cached)
        if job.features is not None and prompt.node is not None and self.scheduler.cache is not None:
            job.features.push_cached(self.scheduler.cache.path(prompt.node), self._cache.spec.page_size)
        job.changed.set()

    async def _step(self, batch: ExtendBatch) -> None:
        self._step_started = self._last_progress = self._clock()
        self._stepping = {
            row.key: (self._jobs[row.key.rpartition("#")[0]], row.start, row.start + len(row.token_ids))
            for row in batch.rows
        }
        try:
            layer_done = partial(self._layer_done, self._stepping)
            output = await self._runner.extend(batch, layer_done, self._features_of(batch))
            failed = dict(output.failed)
        except EngineFault as error:
            log.exception("an extend step failed")
            failed = {row.key: error.message for row in batch.rows}
        self._commit(batch, failed)

    def _layer_done(self, stepping: dict[str, tuple[Job, int, int]], layer: int) -> None:
        """The step itself may have been booked, unless a prompt ends in it or its states are kept."""
        self._last_progress = self._clock()
        for job, start, end in stepping.values():
            if not job.prompt.ended:
                assert job.outbox is not None
                job.outbox.add_layer(layer, start, end)
                job.changed.set()

    def _features_of(self, batch: ExtendBatch) -> Callable[[memoryview], None] | None:
        """What to do with the features of a step; None: nobody wants them. With a prefix cache those of older tokens
        are wanted too, for shorter prompts that begin alike.
        """
        keeps = self.scheduler.cache is not None
        wanted: list[tuple[Job, PromptFeatures, int, int, int]] = []
        first = 0
        for row in batch.rows:
            job, start, end = self._stepping[row.key]
            if job.features is not None and (keeps or job.features.oldest < end):
                wanted.append((job, job.features, start, first, first + end - start))
            first += end - start

        def take(data: memoryview) -> None:
            width = data.nbytes // first
            for job, features, position, begin, finish in wanted:
                if job.error is None:
                    rows = data[begin * width : finish * width]
                    features.push(position, rows, width)
                    if keeps:
                        job.prompt.features += rows

        return take if wanted else None

    def _commit(self, batch: ExtendBatch, failed: dict[str, str]) -> None:
        now = self._clock()
        assert self._step_started is not None
        count = sum(len(row.token_ids) for row in batch.rows)
        self._num_tokens += count
        # Prompts that wait come with as much in the cache as those before them, as far as anybody knows.
        worked = count + sum(row.start for row in batch.rows if row.restore_from is not None)
        if 2 * worked >= self.scheduler.chunk_tokens:
            # A short step says little about how fast a backlog is worked off.
            self._throughput.add(worked, now - self._step_started)
        self._step_started = None
        for key, reason in failed.items():
            self.scheduler.distrust(self._stepping[key][0].prompt)
            self._end(self._stepping[key][0], EngineFault(f"prompt computation failed: {reason}"), "failed")
        for prompt in self.scheduler.commit(batch):
            job, _, _ = self._stepping[prompt.key]
            assert job.outbox is not None
            job.outbox.add_logits()
            assert job.outbox.is_complete, "a layer was not reported"
            job.computed = now
            if job.features is not None:
                job.features.close()
            job.changed.set()
        self._stepping = {}

    def detach(self, job: Job, handoff: Handoff) -> None:
        """The stream of a job is gone: what has been computed waits for another one while the lease lasts. A prompt
        that waits for memory makes room in the queue at once; the same attempt may come again.
        """
        if job.handoff is not handoff or job.error is not None:
            return
        if job.outbox is None:
            self._end(job, Superseded("nobody waits for this prompt", reason="HANDOFF_GONE"), "abandoned")
            return
        job.handoff = None
        job.prompt.paused = True
        job.idle_since = self._clock()
        self._rearm(job, self._lease_s)

    def hand_over(self, job: Job, handoff: Handoff) -> None:
        """A reader is given something; the lease runs until it comes back for more."""
        if job.handoff is handoff:
            job.idle_since = self._clock()

    def come_back(self, job: Job, handoff: Handoff) -> None:
        """The reader came back: the lease is renewed."""
        if job.handoff is handoff:
            job.idle_since = None

    def _watch_lease(self, job: Job) -> None:
        idle_s = 0.0 if job.idle_since is None else self._clock() - job.idle_since
        if idle_s < self._lease_s:
            # The clock is not the loop's, and a rest of nanoseconds would spin.
            self._rearm(job, max(self._lease_s - idle_s, 0.01))
            return
        log.warning("lease of %s attempt %d ended", job.call.request_id, job.call.attempt)
        self._forget(job.call.request_id, job.call.attempt)
        self._end(job, Superseded("the lease ended"), "expired")

    def _rearm(self, job: Job, delay_s: float) -> None:
        if job.lease is not None:
            job.lease.cancel()
        job.lease = asyncio.get_running_loop().call_later(delay_s, self._watch_lease, job)

    def _pass_deadline(self, job: Job) -> None:
        self._forget(job.call.request_id, job.call.attempt)
        self._end(job, DeadlineExceeded("the request's deadline passed before its state was taken"), "expired")

    def _end(self, job: Job, error: K3svcError, outcome: str) -> None:
        if job.error is not None:
            return
        job.error = error
        self._outcomes[outcome] += 1
        for timer in (job.lease, job.deadline):
            if timer is not None:
                timer.cancel()
        if self._jobs.get(job.call.request_id) is job:
            del self._jobs[job.call.request_id]
        if job.features is not None:
            job.features.close()
        self.scheduler.end(job.prompt)
        job.changed.set()
        self._wake.set()

    def _forget(self, request_id: str, attempt: int) -> None:
        self._forgotten[request_id] = max(attempt, self._forgotten.pop(request_id, 0))
        while len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)
