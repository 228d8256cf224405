"""DraftEngine: follows the samples of decode services, keeps their context, and proposes.

All decisions happen on the event loop, synchronously; the only awaits are the work on the engine thread and the
readers' wait for answers. What peers send is untrusted: values out of range end the session that sent them, everything
that is kept is bounded by the slots of the pool, and what is late, stale or unknown is dropped and counted.

A sample belongs to a session and holds one slot; it ends closed, superseded, expired or with its session. A ticket
holds the context of one prompt in a slot of its own until its lease ends, so that each sample that opens it copies it.
"""

import asyncio
import logging
from collections import Counter, OrderedDict

from k3svc.core.events import Load
from k3svc.core.request import SamplingParams
from k3svc.core.slots import SlotPool
from k3svc.engine.draft_peers import ContextPush, DraftSession, Sample, Ticket
from k3svc.engine.draft_protocol import (
    ContextStart,
    DraftProfile,
    SampleCommit,
    SampleFeatures,
    SampleGap,
    SampleOpen,
    SampleProposal,
    SessionStep,
)
from k3svc.engine.draft_runner import OWN_NOISE, Answer, Ask, CopyRows, DraftResult, DraftWork, Runner, WriteRows
from k3svc.engine.draft_span import ContextSpan, Piece
from k3svc.engine.observer import UNOBSERVED, Observer
from k3svc.engine.ports import Clock
from k3svc.errors import EngineFault, InvalidRequest, ResourceExhausted, Superseded, Unavailable

log = logging.getLogger(__name__)

STALL_S = 60.0
"""Work that takes longer counts as no progress."""
TICKET_PATIENCE_S = 0.5
"""So long a sample waits for the first features of its prompt; after that it is drafted for without them."""
MAX_POSITION = 1 << 31
MAX_HANDLE = 1 << 32
MAX_TICKET_CHARS = 128
SWEEPS = 4
"""Leases are looked at this often within the shorter one."""


class DraftEngine:
    """One draft service's sessions and tickets."""

    def __init__(
        self,
        *,
        runner: Runner,
        profile: DraftProfile,
        clock: Clock,
        max_requests: int,
        max_tickets: int,
        context_rows: int,
        lease_s: float,
        ticket_lease_s: float,
        observer: Observer = UNOBSERVED,
    ) -> None:
        """`context_rows`: rows before a base that a slot holds. Slots 1 to max_requests + max_tickets are used."""
        self.profile = profile
        self.context_rows = context_rows
        self.max_requests = max_requests
        self._runner = runner
        self._observer = observer
        self._clock = clock
        self._max_tickets = max_tickets
        self._lease_s, self._ticket_lease_s = lease_s, ticket_lease_s
        self._slots = SlotPool(max_requests + max_tickets)
        self._resting: list[int] = []
        """Slots of ended tickets from which rows are still to be copied."""
        self._sessions: set[DraftSession] = set()
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()
        self._joins: list[tuple[Ticket, Sample]] = []
        self._num_samples = 0
        self._wake = asyncio.Event()
        self._step_started: float | None = None
        self._running = False
        self._draining = False
        self.counts: Counter[str] = Counter()
        """Proposals, tokens, rows, and what went wrong."""
        self.context_steps: Counter[int] = Counter()
        """Commits of a sample before its first proposal from a complete context → samples."""

    @property
    def credits(self) -> int:
        """Samples that could be opened now."""
        return self.max_requests - self._num_samples

    def connect(self, profile: DraftProfile) -> DraftSession:
        """Raises Incompatible or Unavailable."""
        self._check_open()
        self.profile.check(profile)
        session = DraftSession(self, profile)
        self._sessions.add(session)
        return session

    def push_context(self, start: ContextStart) -> ContextPush:
        """Raises Incompatible, InvalidRequest, Superseded, ResourceExhausted or Unavailable."""
        self._check_open()
        self.profile.check(start.profile)
        name = start.ticket
        if not (1 <= len(name) <= MAX_TICKET_CHARS and name.isascii() and name.isprintable()):
            raise InvalidRequest("start.ticket", name, f"1 to {MAX_TICKET_CHARS} printable ASCII characters")
        _in_range("start.num_tokens", start.num_tokens, 1, MAX_POSITION)
        known = self._tickets.get(name)
        if known is not None and known.start.attempt >= start.attempt:
            raise Superseded(f"attempt {known.start.attempt} of ticket {name} is known")
        if known is not None:
            self._end_ticket(known, Superseded("a newer attempt pushes this prompt"), "superseded")
        self._make_ticket_room()
        slots = self._slots.allocate(1)
        if slots is None:
            raise ResourceExhausted("every slot of the context pool is in use", retry_after_s=self._ticket_lease_s)
        span = ContextSpan(start.num_tokens, window=self.context_rows, ahead=0)
        ticket = Ticket(start=start, slot=slots[0], span=span, touched=self._clock())
        ticket.taken.set()
        self._tickets[name] = ticket
        return ContextPush(self, ticket)

    async def run(self) -> None:
        """Works until `drain`. Sessions that live then are told Unavailable."""
        self._running = True
        sweeper = asyncio.create_task(self._sweep())
        try:
            while not self._draining:
                await self._wake.wait()
                self._wake.clear()
                await self._work()
        finally:
            self._running, self._draining = False, True
            sweeper.cancel()
            await asyncio.wait({sweeper})
            for session in list(self._sessions):
                session.fail(Unavailable("this draft service stops", reason="STOPPED"))
                self.forget(session)
            for ticket in list(self._tickets.values()):
                self._end_ticket(ticket, Superseded("this draft service stops"), "stopped")

    def drain(self) -> None:
        """Ends at once: decode goes on without proposals."""
        self._draining = True
        self._wake.set()

    def is_progressing(self) -> bool:
        """Whether the loop runs and no work hangs."""
        return self._running and (self._step_started is None or self._clock() - self._step_started < STALL_S)

    def load(self) -> Load:
        return Load(
            running=self._num_samples,
            waiting=sum(sample.want > 0 for session in self._sessions for sample in session.samples.values()),
            in_transfer=len(self._tickets),
            free_pages=0,
            total_pages=0,
            free_slots=self._slots.num_free,
            total_slots=self._slots.num_slots,
            draining=self._draining,
            num_tokens=self.counts["tokens"],
            handoff_bytes=(self.counts["rows"] + self.counts["prompt_rows"]) * self.profile.row_bytes,
            outcomes={name: self.counts[name] for name in OUTCOMES},
        )

    def check(self) -> None:
        """Raises AssertionError unless the pool is whole and held by what lives."""
        self._slots.check()
        samples = [sample for session in self._sessions for sample in session.samples.values()]
        assert len(samples) == self._num_samples, "samples miscounted"
        slots = [sample.slot for sample in samples] + [ticket.slot for ticket in self._tickets.values()]
        slots += self._resting
        assert len(set(slots)) == len(slots), "a slot with two owners"
        assert len(slots) == self._slots.num_slots - self._slots.num_free, "slots without an owner"

    def apply(self, session: DraftSession, step: SessionStep) -> None:
        """One message of a session, in the order of its parts. Raises InvalidRequest."""
        now = self._clock()
        for handle in step.closes:
            if (sample := session.samples.get(handle)) is not None:
                self._end(sample, "closed")
        for opened in step.opens:
            self._open(session, opened, now)
        for features in step.features:
            self._add_features(session, features, now)
            session.pending_bytes += features.data.nbytes
        for commit in step.commits:
            self._commit(session, commit, now)
        session.wished = max(session.wished, step.step)
        self._wake.set()

    def forget(self, session: DraftSession) -> None:
        """The session has ended."""
        for sample in list(session.samples.values()):
            self._end(sample, "disconnected")
        self._sessions.discard(session)

    def add_context(self, ticket: Ticket, position: int, data: memoryview) -> None:
        """Raises InvalidRequest or Superseded."""
        if ticket.error is not None:
            raise ticket.error
        row_bytes, left = ticket.start.profile.row_bytes, ticket.start.num_tokens - position
        if position < 0 or data.nbytes % row_bytes or data.nbytes // row_bytes > left:
            raise InvalidRequest("payload", f"{data.nbytes} bytes at {position}", f"up to {left} rows of {row_bytes}")
        ticket.touched = self._clock()
        self.counts["prompt_rows"] += data.nbytes // row_bytes
        ticket.span.add(Piece(start=position, data=data, row_bytes=row_bytes))
        if ticket.span.num_waiting:
            ticket.taken.clear()
        if ticket.span.is_complete:
            self.finish_context(ticket)
        self._wake.set()

    def finish_context(self, ticket: Ticket) -> None:
        """Samples that opened the ticket get what there is."""
        if ticket.is_done or ticket.error is not None:
            return
        ticket.is_done = True
        for session in self._sessions:
            for sample in session.samples.values():
                if sample.opened.ticket == ticket.start.ticket:
                    self._join(sample)
        self._wake.set()

    def _check_open(self) -> None:
        if self._draining:
            raise Unavailable("this draft role drains", reason="DRAINING")

    def _open(self, session: DraftSession, opened: SampleOpen, now: float) -> None:
        self._check_open_range(opened)
        known = session.samples.get(opened.handle)
        if known is not None:
            if known.opened.attempt >= opened.attempt:
                return
            self._end(known, "superseded")
        is_possible = self.credits > 0 and _is_valid(opened.params, self.profile.vocab_size)
        slots = self._slots.allocate(1) if is_possible else None
        if slots is None:
            self.counts["refused"] += 1
            session.refuse(opened.handle)
            return
        sample = Sample(
            session=session,
            opened=opened,
            slot=slots[0],
            span=ContextSpan(opened.base_len, window=self.context_rows, ahead=self.profile.num_proposals + 1),
            dtype=session.profile.feature_dtype,
            anchor=opened.anchor,
            want=opened.want,
            touched=now,
            since=now,
            is_joined=not opened.ticket,
        )
        session.samples[opened.handle] = sample
        self._num_samples += 1
        self._join(sample)

    def _check_open_range(self, opened: SampleOpen) -> None:
        _in_range("opens.handles", opened.handle, 0, MAX_HANDLE)
        _in_range("opens.base_lens", opened.base_len, 1, MAX_POSITION)
        self._check_wish(opened.anchor, opened.want)
        _in_range("opens.sample_indices", opened.sample_index, 0, OWN_NOISE)
        if len(opened.ticket) > MAX_TICKET_CHARS:
            raise InvalidRequest("opens.tickets", opened.ticket, f"at most {MAX_TICKET_CHARS} characters")

    def _check_wish(self, anchor: int, want: int) -> None:
        _in_range("anchors", anchor, 0, self.profile.vocab_size)
        _in_range("wants", want, 0, self.profile.num_proposals + 1)

    def _add_features(self, session: DraftSession, features: SampleFeatures, now: float) -> None:
        row_bytes = session.profile.row_bytes
        if features.num_rows < 1 or features.data.nbytes != features.num_rows * row_bytes:
            given = f"{features.data.nbytes} bytes"
            raise InvalidRequest(
                "features.counts", features.num_rows, f"rows of {row_bytes} bytes that make up {given}"
            )
        _in_range("features.starts", features.start, 0, MAX_POSITION)
        sample = self._find(session, features.handle, features.attempt)
        if sample is None:
            return
        sample.touched = now
        self.counts["rows"] += features.num_rows
        span = sample.span
        if features.start > span.base:
            # Decode computes rows of an anchor and its drafts, so all before the first of them is settled.
            span.advance(features.start)
            sample.want = 0
        oldest = span.start
        piece = Piece(start=features.start, data=features.data, row_bytes=row_bytes)
        if not span.add(piece) and piece.end > span.base:
            self._tell_gap(sample)
        if span.start < oldest:
            self._join(sample)

    def _commit(self, session: DraftSession, commit: SampleCommit, now: float) -> None:
        _in_range("commits.base_lens", commit.base_len, 1, MAX_POSITION)
        _in_range("commits.counts", commit.count, 1, commit.base_len + 1)
        self._check_wish(commit.anchor, commit.want)
        sample = self._find(session, commit.handle, commit.attempt)
        if sample is None or commit.base_len < sample.span.base:
            return
        sample.touched = now
        sample.commits += 1
        sample.span.advance(commit.base_len, start=commit.base_len - commit.count)
        # Decode does not repeat a wish that it takes to be worked on; one that nobody has begun is now for this base.
        sample.anchor, sample.want = commit.anchor, max(sample.want, commit.want)
        if sample.span.end < commit.base_len:
            sample.span.restart()
            self._tell_gap(sample)

    def _find(self, session: DraftSession, handle: int, attempt: int) -> Sample | None:
        """The sample of a handle. A peer that goes on about one that is not followed is told so."""
        sample = session.samples.get(handle)
        if sample is None:
            self.counts["unknown"] += 1
            session.refuse(handle)
            return None
        if sample.opened.attempt != attempt:
            self.counts["stale"] += 1
            return None
        return sample

    def _tell_gap(self, sample: Sample) -> None:
        self.counts["gaps"] += 1
        opened, span = sample.opened, sample.span
        sample.session.tell_gap(SampleGap(handle=opened.handle, attempt=opened.attempt, start=span.lowest))

    def _join(self, sample: Sample) -> None:
        """Takes the context of the prompt over from the ticket, once that is done and rows of both sides touch."""
        ticket = self._tickets.get(sample.opened.ticket)
        if sample.is_joined or ticket is None:
            return
        ticket.was_opened, ticket.touched = True, self._clock()
        span, source = sample.span, ticket.span
        if not ticket.is_done or not source.start < span.start <= source.end:
            return
        sample.is_joined = True
        self._joins.append((ticket, sample))

    def _end(self, sample: Sample, outcome: str) -> None:
        del sample.session.samples[sample.opened.handle]
        self._num_samples -= 1
        self._joins = [(ticket, other) for ticket, other in self._joins if other is not sample]
        self._slots.free(sample.slot)
        self.counts[outcome] += 1
        if self.credits == 1:
            # Sessions that were refused hear that there is room.
            for session in self._sessions:
                session.touch()

    def _end_ticket(self, ticket: Ticket, error: Superseded, outcome: str) -> None:
        if self._tickets.get(ticket.start.ticket) is ticket:
            del self._tickets[ticket.start.ticket]
        ticket.error = error
        ticket.taken.set()
        if any(source is ticket for source, _ in self._joins):
            self._resting.append(ticket.slot)
        else:
            self._slots.free(ticket.slot)
        self.counts[f"tickets_{outcome}"] += 1

    def _make_ticket_room(self) -> None:
        """Of the tickets that have done their work, the oldest gives way."""
        if len(self._tickets) < self._max_tickets:
            return
        oldest = next((t for t in self._tickets.values() if t.is_done and t.was_opened), None)
        if oldest is None:
            self.counts["tickets_refused"] += 1
            raise ResourceExhausted(f"{self._max_tickets} tickets are held", retry_after_s=self._ticket_lease_s)
        self._end_ticket(oldest, Superseded("the ticket gave way"), "evicted")

    async def _work(self) -> None:
        """One piece of work on the engine thread, and its answers."""
        wished = {session: session.wished for session in self._sessions}
        work, asked = self._take_work()
        result = DraftResult(answers=(), compute_s=0.0)
        if work.rows or work.asks:
            self._step_started = self._clock()
            try:
                result = await self._runner.run(work)
                if work.asks:
                    self._observer.draft_step(len(work.asks), result.compute_s)
            except EngineFault:
                log.exception("a draft step failed")
                self._lose_context()
                for sample, _, want in asked:
                    sample.want = max(sample.want, want)
            self._step_started = None
        for ticket in self._tickets.values():
            if not ticket.span.num_waiting:
                ticket.taken.set()
        for (sample, ask, want), answer in zip(asked, result.answers, strict=False):
            self._deliver(sample, ask, want, answer)
        draft_us = round(result.compute_s * 1e6)
        for session, step in wished.items():
            session.settle(step, draft_us)

    def _take_work(self) -> tuple[DraftWork, list[tuple[Sample, Ask, int]]]:
        """What there is to do, and whose asks these are, with how many proposals each wished for."""
        rows: list[WriteRows | CopyRows] = []
        for ticket in dict.fromkeys((*self._tickets.values(), *(ticket for ticket, _ in self._joins))):
            rows += _writes(ticket.slot, ticket.span, ticket.start.profile.feature_dtype)
        for ticket, sample in self._joins:
            start = max(ticket.span.start, sample.span.lowest)
            if start < sample.span.start:
                rows.append(CopyRows(source=ticket.slot, target=sample.slot, start=start, end=sample.span.start))
                sample.span.join(start)
        self._joins.clear()
        for session in self._sessions:
            session.take()
        samples = [sample for session in self._sessions for sample in session.samples.values()]
        for sample in samples:
            rows += _writes(sample.slot, sample.span, sample.dtype)
        # What is copied from them is copied before anything that a new owner writes, which is later work.
        for slot in self._resting:
            self._slots.free(slot)
        self._resting.clear()
        ready = [sample for sample in samples if sample.want and self._can_propose(sample)]
        asked = [(sample, self._ask(sample), sample.want) for sample in ready]
        for sample in ready:
            sample.want = 0
        return DraftWork(rows=rows, asks=[ask for _, ask, _ in asked]), asked

    def _can_propose(self, sample: Sample) -> bool:
        """Whether there is a context to propose from; while that of the prompt is on its way, nothing is."""
        span = sample.span
        if not span.reaches_base or span.is_complete:
            return span.reaches_base
        ticket = self._tickets.get(sample.opened.ticket)
        if sample.is_joined or (ticket is not None and ticket.is_done):
            return True
        return ticket is None and self._clock() - sample.since > TICKET_PATIENCE_S

    def _ask(self, sample: Sample) -> Ask:
        opened, span = sample.opened, sample.span
        if span.is_complete and not sample.was_complete:
            sample.was_complete = True
            self.context_steps[sample.commits] += 1
            self._observer.context_whole(sample.commits)
        return Ask(
            slot=sample.slot,
            start=span.start,
            base_len=span.base,
            anchor=sample.anchor,
            params=opened.params,
            sample_index=opened.sample_index,
            with_probs=opened.with_probs,
        )

    def _deliver(self, sample: Sample, ask: Ask, want: int, answer: Answer) -> None:
        opened, session = sample.opened, sample.session
        if session.samples.get(opened.handle) is not sample:
            return
        count = want
        if sample.span.base != ask.base_len:
            # Decode went on meanwhile; what it knows by now it skips.
            count = self.profile.num_proposals
            self.counts["late"] += 1
        tokens = answer.tokens[:count]
        if self.profile.mask_token_id in tokens:
            tokens = tokens[: tokens.index(self.profile.mask_token_id)]
        if not tokens:
            return
        truncated = ask.start > max(0, ask.base_len - self.context_rows)
        self.counts["proposals"] += 1
        self.counts["tokens"] += len(tokens)
        self.counts["truncated"] += truncated
        session.propose(
            SampleProposal(
                handle=opened.handle,
                attempt=opened.attempt,
                base_len=ask.base_len,
                tokens=tokens,
                confidences=answer.confidences[: len(tokens)],
                truncated=truncated,
                probs=b"".join(answer.probs[: len(tokens)]),
            )
        )

    def _lose_context(self) -> None:
        """A step failed: which rows it had written is not known."""
        self.counts["faults"] += 1
        for session in self._sessions:
            for sample in session.samples.values():
                sample.span.restart()
                sample.is_joined = True
                self._tell_gap(sample)
        for ticket in list(self._tickets.values()):
            self._end_ticket(ticket, Superseded("a draft step failed"), "failed")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(self._lease_s, self._ticket_lease_s) / SWEEPS)
            now = self._clock()
            for session in self._sessions:
                for sample in list(session.samples.values()):
                    if now - sample.touched > self._lease_s:
                        self._end(sample, "expired")
            for ticket in list(self._tickets.values()):
                if now - ticket.touched > self._ticket_lease_s:
                    self._end_ticket(ticket, Superseded("the ticket's lease ended"), "expired")


OUTCOMES = (
    *("closed", "superseded", "disconnected", "expired", "refused", "unknown", "stale", "gaps", "late", "truncated"),
    *("proposals", "faults", "tickets_superseded", "tickets_expired", "tickets_evicted", "tickets_refused"),
)
"""What the engine counts beside tokens and rows."""


def _writes(slot: int, span: ContextSpan, dtype: str) -> list[WriteRows]:
    return [
        WriteRows(
            slot=slot,
            start=piece.start,
            num_rows=piece.end - piece.start,
            data=piece.data,
            dtype=dtype,
        )
        for piece in span.take()
    ]


def _is_valid(params: SamplingParams, vocab_size: int) -> bool:
    """Parameters are those of somebody's request, which is no fault of the session."""
    try:
        params.validate(vocab_size)
    except InvalidRequest:
        return False
    return True


def _in_range(name: str, value: int, low: int, end: int) -> None:
    if not low <= value < end:
        raise InvalidRequest(name, value, f"{low} to {end - 1}")
