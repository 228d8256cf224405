"""DecodeEngine: admits requests, obtains their prompt state, and runs them in continuous batches.

All decisions happen on the event loop, synchronously; awaits are the step on the engine thread, the hand-offs and the
wait for work. A request ends exactly once, in `_end`: its samples' memory goes back, its hand-off is closed, its stream
gets Finished or an error, its outcome is counted. A request whose tokens are not read is paused, then ended.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from k3svc.core.batch import DecodeBatch, StepOutput
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.events import Delta, Finished, Load, SpeculationStats, Timings, Usage
from k3svc.core.rates import BusyInterval, retry_after_s
from k3svc.core.request import FinishReason, GenerateRequest
from k3svc.core.sample import Emission, Job, Sample
from k3svc.core.targets import Affinity
from k3svc.engine.handoff import HandoffPuller, HandoffResult
from k3svc.engine.observer import UNOBSERVED, Observer
from k3svc.engine.peers import PrefillPeers
from k3svc.engine.pipeline import StepPipeline
from k3svc.engine.ports import AheadRunner, Clock, DecodeRunner, Fingerprint, PrefillPeer
from k3svc.engine.speculator import Speculator
from k3svc.engine.stream import TokenStream
from k3svc.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    K3svcError,
    ResourceExhausted,
    Unavailable,
)
from k3svc.ops.table import Cache
from k3svc.text.detokenizer import IncrementalDetokenizer
from k3svc.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DRAIN_RETRY_S = 1.0
"""Hint for callers of a service that drains; its successor may be up by then."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Whether and how tokens become text."""

    enabled: bool = True
    include_control: bool = False


@dataclass(kw_only=True, eq=False)
class _Live:
    """A request that has not ended."""

    request: GenerateRequest
    stream: TokenStream
    text: list[IncrementalDetokenizer | None]
    arrived: float
    samples: list[Sample]
    unfinished: set[int]
    """Indices of samples whose finish reason has not been put into the stream."""
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    handoff: HandoffResult | None = None
    num_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    deadline: float | None
    expiry: asyncio.TimerHandle | None = None
    """Ends the request at its deadline."""
    stall: asyncio.TimerHandle | None = None
    """Set while the request is paused: ends it when nobody reads."""
    context: Context = field(default_factory=copy_context)
    """Of the call, for log lines and calls that are made for it."""


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    puller: HandoffPuller
    task: "asyncio.Task[None]"


class DecodeEngine:
    """One decode service's requests, from arrival to the last token."""

    def __init__(
        self,
        *,
        scheduler: DecodeScheduler,
        runner: DecodeRunner,
        ahead: AheadRunner | None = None,
        cache: Cache,
        peers: Sequence[PrefillPeer],
        tokenizer: Tokenizer,
        fingerprint: Fingerprint,
        clock: Clock,
        instance: str,
        prefill_attempts: int,
        max_samples: int,
        max_unread_tokens: int = 2048,
        reader_timeout_s: float = 60.0,
        observer: Observer = UNOBSERVED,
        affinity: Affinity | None = None,
    ) -> None:
        """`ahead` is asked for steps while others run; None: the runner does not do that. `instance` makes ids at the
        prefill services unique over decode processes and restarts. A request of which `max_unread_tokens` wait for its
        reader is paused, and ended when that lasts `reader_timeout_s`.
        """
        self.scheduler = scheduler
        self.fingerprint = fingerprint
        self._steps = StepPipeline(scheduler=scheduler, runner=runner, ahead=ahead, clock=clock)
        self._cache = cache
        self.peers = PrefillPeers(peers, clock, affinity, observer)
        self._tokenizer = tokenizer
        self._clock = clock
        self._instance = instance
        self._observer = observer
        self.speculator: Speculator | None = None
        """Set before `run`: who follows drafters. None: every step is a plain one."""
        self._prefill_attempts = prefill_attempts
        self._max_samples = max_samples
        self._max_unread_tokens = max_unread_tokens
        self._reader_timeout_s = reader_timeout_s
        self._admissions = BusyInterval()
        self._live: dict[str, _Live] = {}
        self._transfers: dict[str, _Transfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._serial = 0
        self._wake = asyncio.Event()
        self._running = False
        self._draining = False
        self._num_tokens = 0
        self._handoff_bytes = 0
        self._draft_steps = 0
        self._accepted_drafts = 0
        self._outcomes = dict.fromkeys(("finished", "aborted", "cancelled", "failed", "rejected"), 0)

    def submit(self, request: GenerateRequest, text: TextOptions, *, deadline: float | None = None) -> TokenStream:
        """Admits a request. `deadline` in seconds of the clock. Raises InvalidRequest, AlreadyExists,
        ResourceExhausted, Unavailable or DeadlineExceeded; nothing is held then.
        """
        now = self._clock()
        try:
            if self._draining:
                raise Unavailable("this decode service drains", reason="DRAINING", retry_after_s=DRAIN_RETRY_S)
            if deadline is not None and deadline <= now:
                raise DeadlineExceeded("the deadline passed before the request was admitted")
            request.validate(
                vocab_size=self._cache.spec.vocab_size,
                max_context_tokens=self.scheduler.max_context_tokens,
                max_samples=self._max_samples,
            )
            texts = [self._detokenizer(request, text) for _ in range(request.n)]
            samples = self.scheduler.submit(request, retry_after_s=retry_after_s(self._admissions.mean_s(now)))
        except K3svcError:
            self._outcomes["rejected"] += 1
            raise
        stream = TokenStream(request.request_id, on_cancel=self._cancel, on_read=self._read)
        live = _Live(
            request=request,
            stream=stream,
            text=texts,
            arrived=now,
            samples=list(samples),
            unfinished={sample.index for sample in samples},
            deadline=deadline,
        )
        if deadline is not None:
            live.expiry = asyncio.get_running_loop().call_later(deadline - now, self._expire, live)
        self._live[request.request_id] = live
        self._wake.set()
        return stream

    def abort(self, request_id: str) -> bool:
        """Ends a request; its stream closes with FinishReason.ABORT. Unknown and finished ids are fine."""
        live = self._live.get(request_id)
        if live is None:
            return False
        for sample in self.scheduler.live_samples(request_id):
            live.stream.put(Delta(index=sample.index, text=self._flush(live, sample), finish_reason=FinishReason.ABORT))
        self._end(live, None, "aborted")
        return True

    async def run(self) -> None:
        """The step loop. Ends after `drain` when no request is left. Requests that live when it ends otherwise are told
        Unavailable, so that their callers go on elsewhere.
        """
        self._running = True
        try:
            while not (self._draining and not self._live):
                if self.speculator is not None:
                    await self.speculator.wait()
                self._start_transfers()
                batch = self.scheduler.schedule(self.speculator.plan() if self.speculator is not None else {})
                if batch is not None:
                    await self._steps.run(batch, self.speculator, self._book)
                    continue
                self._start_transfers()
                idle = not self.scheduler.transfers and not all(job.lead.paused for job in self.scheduler.waiting)
                assert not idle, "nothing runs, yet a request waits"
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._running = False
            self._draining = True
            for live in list(self._live.values()):
                self._end(live, Unavailable("this decode service stops", reason="STOPPED"), "failed")
            await self._stop_tasks()

    def drain(self) -> None:
        """Refuses new requests; running ones finish."""
        self._draining = True
        self._wake.set()

    def is_progressing(self) -> bool:
        """Whether the step loop runs and no step hangs."""
        return self._running and not self._steps.is_stalled

    def load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            in_transfer=len(scheduler.transfers),
            free_pages=scheduler.pages.num_free,
            total_pages=scheduler.pages.num_pages,
            free_slots=scheduler.slots.num_free,
            total_slots=scheduler.slots.num_slots,
            draining=self._draining,
            num_tokens=self._num_tokens,
            handoff_bytes=self._handoff_bytes,
            outcomes=dict(self._outcomes),
            preemptions=scheduler.num_preemptions,
            draft_steps=self._draft_steps,
            accepted_drafts=self._accepted_drafts,
            prefill_targets=self.peers.states(),
            drafter=self.speculator.drafter if self.speculator is not None else "",
            speculation_rests=self.speculator is not None and self.speculator.rests,
            drafter_health=self.speculator.health.value if self.speculator is not None else "",
        )

    def _start_transfers(self) -> None:
        now = self._clock()
        for job in self.scheduler.admit(now=now):
            self._admissions.add(now)
            live = self._live[job.lead.request.request_id]
            if live.admitted is None:
                live.admitted = job.admitted
            self._serial += 1
            prefill_id = f"{self._instance}.{self._serial}"
            log.debug("prefill %s for %s", prefill_id, live.request.request_id)
            assert job.lead.slot is not None
            # A preempted sample comes back for its prompt when the gateway has long left the room.
            room = live.request.room if job.lead.num_preemptions == 0 else None
            puller = HandoffPuller(
                prefill_id=prefill_id,
                prompt=live.request.prompt,
                priority=live.request.priority,
                tenant=live.request.tenant,
                deadline=live.deadline,
                slot=job.lead.slot,
                block_table=job.lead.pages,
                cache=self._cache,
                peers=self.peers if room is None else self.peers.only(room.prefill),
                fingerprint=self.fingerprint,
                clock=self._clock,
                max_attempts=self._prefill_attempts,
                release=self._release,
                on_landed=self._count_landed,
                room=None if room is None else room.number,
                draft_ticket=prefill_id if self.speculator is not None and self.speculator.wants_prompts() else "",
                observer=self._observer,
            )
            task = live.context.run(self._spawn, self._transfer(live, job, puller))
            self._transfers[job.lead.key] = _Transfer(puller=puller, task=task)
        if not self.scheduler.waiting:
            self._admissions.reset()

    def _count_landed(self, num_bytes: int) -> None:
        self._handoff_bytes += num_bytes

    async def _transfer(self, live: _Live, job: Job, puller: HandoffPuller) -> None:
        key = job.lead.key
        try:
            result = await puller.run()
        except Exception as error:  # noqa: BLE001  whatever it is, the request must not wait for ever
            del self._transfers[key]
            self._end(live, _as_fault(error), "failed")
            return
        del self._transfers[key]
        live.handoff = result
        self._observer.handoff(num_bytes=result.num_bytes, landing_s=result.landing_s, tail_s=result.tail_s)
        self.scheduler.landed(job)
        if self.speculator is not None:
            self.speculator.landed(job.samples, puller.draft_ticket)
        self._wake.set()

    def _book(self, batch: DecodeBatch, output: StepOutput) -> None:
        now = self._clock()
        emissions = self.scheduler.commit(batch, output)
        if self.speculator is not None:
            self.speculator.learn(batch, output, emissions)
        going = [emission for emission in emissions if emission.finish_reason is None and emission.failure is None]
        for emission in emissions:
            if emission.finish_reason is not None or emission.failure is not None:
                self._pass_on(emission, now)
        if self.speculator is not None:
            # Drafters begin while readers are told. One whose text turns out to have ended proposes for nothing.
            self.speculator.settle()
        for emission in going:
            self._pass_on(emission, now)
        # Another step may be in flight already, which is no reason to keep hand-offs waiting.
        self._start_transfers()

    def _pass_on(self, emission: Emission, now: float) -> None:
        live = self._live.get(emission.sample.request.request_id)
        if live is None or emission.sample not in live.samples:
            return
        if emission.tokens:
            self._emit(live, emission, now)
        if emission.failure is not None and emission.sample.index in live.unfinished:
            self._end(live, EngineFault(f"decode step failed: {emission.failure}"), "failed")

    def _emit(self, live: _Live, emission: Emission, now: float) -> None:
        """One delta with what a step gave; output ends at the first stop string, whatever else came with it."""
        sample, reason, stopped_by = emission.sample, emission.finish_reason, ""
        text, taken = "", list(emission.tokens)
        detokenizer = live.text[sample.index]
        for count, sampled in enumerate(emission.tokens, start=1):
            if emission.stop_token and count == len(emission.tokens):
                stopped_by = self._token_name(sampled.token_id)
            elif detokenizer is not None:
                delta = detokenizer.push([sampled.token_id])
                text += delta.text
                if delta.stopped_by is not None:
                    reason, stopped_by = FinishReason.STOP, delta.stopped_by
                    del taken[count:]
                    break
        self._num_tokens += len(taken)
        live.num_tokens += len(taken)
        live.first_token = now if live.first_token is None else live.first_token
        live.last_token = now
        if reason is not None:
            text += self._flush(live, sample)
            self.scheduler.end(sample)
            self.scheduler.cut(sample, len(sample.output) - len(emission.tokens) + len(taken))
            live.unfinished.discard(sample.index)
        live.stream.put(
            Delta(
                index=sample.index,
                token_ids=tuple(sampled.token_id for sampled in taken),
                text=text,
                logprobs=tuple(taken) if live.request.logprobs is not None else (),
                finish_reason=reason,
                stopped_by=stopped_by,
            )
        )
        if not live.unfinished:
            self._end(live, None, "finished")
        elif live.stall is None and live.stream.num_unread >= self._max_unread_tokens:
            self.scheduler.pause(live.request.request_id, paused=True)
            live.stall = asyncio.get_running_loop().call_later(self._reader_timeout_s, self._give_up, live)

    def _end(self, live: _Live, error: K3svcError | None, outcome: str) -> None:
        request_id = live.request.request_id
        del self._live[request_id]
        for timer in (live.expiry, live.stall):
            if timer is not None:
                timer.cancel()
        for sample in self.scheduler.live_samples(request_id):
            transfer = self._transfers.pop(sample.key, None)
            if transfer is not None:
                transfer.puller.close()
                transfer.task.cancel()
            self.scheduler.end(sample)
        live.speculation = SpeculationStats(steps=live.num_tokens)
        if self.speculator is not None:
            live.speculation = self.speculator.ended(request_id, live.samples)
        self._draft_steps += live.speculation.steps_with_drafts
        self._accepted_drafts += live.speculation.accepted
        self._outcomes[outcome] += 1
        if error is None:
            live.stream.finish(self._finished(live))
        else:
            live.stream.fail(error)
        self._wake.set()

    def _cancel(self, stream: TokenStream) -> None:
        live = self._live.get(stream.request_id)
        if live is not None and live.stream is stream:
            self._end(live, Cancelled("the caller ended the request"), "cancelled")

    def _read(self, stream: TokenStream) -> None:
        """Tokens were read: a paused request goes on."""
        live = self._live.get(stream.request_id)
        if live is None or live.stream is not stream or live.stall is None:
            return
        if stream.num_unread <= self._max_unread_tokens // 2:
            live.stall.cancel()
            live.stall = None
            self.scheduler.pause(stream.request_id, paused=False)
            self._wake.set()

    def _give_up(self, live: _Live) -> None:
        if not live.stream.is_ended:
            unread = f"{live.stream.num_unread} tokens were not read for {self._reader_timeout_s:g} s"
            self._end(live, ResourceExhausted(unread, retry_after_s=0.0, reason="SLOW_READER"), "failed")

    def _expire(self, live: _Live) -> None:
        if not live.stream.is_ended:
            self._end(live, DeadlineExceeded("the request's deadline passed"), "failed")

    def _finished(self, live: _Live) -> Finished:
        num_output = sum(len(sample.output) for sample in live.samples)
        new_tokens = live.num_tokens / len(live.samples)
        ttft = tpot = 0.0
        if live.first_token is not None and live.last_token is not None:
            ttft = live.first_token - live.arrived
            tpot = (live.last_token - live.first_token) / (new_tokens - 1) if new_tokens > 1 else 0.0
        handoff = live.handoff
        return Finished(
            usage=Usage(
                prompt_tokens=len(live.request.prompt),
                completion_tokens=num_output,
                cached_tokens=handoff.done.cached_tokens if handoff else 0,
            ),
            timings=Timings(
                queue_ms=((live.admitted or live.arrived) - live.arrived) * 1e3,
                prefill_ms=handoff.done.compute_ms if handoff else 0.0,
                handoff_tail_ms=handoff.tail_s * 1e3 if handoff else 0.0,
                ttft_ms=ttft * 1e3,
                tpot_ms=tpot * 1e3,
                handoff_bytes=handoff.num_bytes if handoff else 0,
                preemptions=sum(sample.num_preemptions for sample in live.samples),
                prefill_attempts=handoff.attempts if handoff else 0,
                handoff_ms=handoff.landing_s * 1e3 if handoff else 0.0,
            ),
            speculation=live.speculation,
        )

    def _detokenizer(self, request: GenerateRequest, text: TextOptions) -> IncrementalDetokenizer | None:
        if not text.enabled:
            return None
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            stop=request.stop.stop,
            skip_control=not text.include_control,
            min_tokens=request.stop.min_tokens,
        )
        stopped_by = detokenizer.push(request.generated).stopped_by
        if stopped_by is not None:
            raise InvalidRequest(
                "generated_token_ids", f"a text with the stop string {stopped_by!r}", "tokens of an unfinished output"
            )
        return detokenizer

    def _flush(self, live: _Live, sample: Sample) -> str:
        detokenizer = live.text[sample.index]
        return "" if detokenizer is None else detokenizer.finish()

    def _token_name(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def _release(self, peer: PrefillPeer, prefill_id: str, attempt: int) -> None:
        self._spawn(peer.release(prefill_id, attempt))

    def _spawn(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop_tasks(self) -> None:
        """Waits for the hand-offs that were cancelled, and for releases, which are bounded in time."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _as_fault(error: Exception) -> K3svcError:
    if isinstance(error, K3svcError):
        return error
    log.error("a hand-off failed", exc_info=error)
    return EngineFault(f"the hand-off failed: {type(error).__name__}: {error}")
