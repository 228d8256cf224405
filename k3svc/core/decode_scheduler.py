"""Which samples take the next decode step, and which pages and slots they hold.

Plain and synchronous; callers pass times in. A sample is WAITING (no memory), in TRANSFER (pages and a slot reserved,
its state on the way), RUNNING (state present) or ENDED. A hand-off is obtained for a Job: all n samples of a fresh
request, or one sample that was preempted. A preempted sample keeps its tokens; after its prompt is prefilled again they
are replayed through decode steps, one by one, so that the same operations make the same bits.

Samples are served in order of rank: priority, then age of the request. The order never changes, and the lowest rank
gives its memory up first, so the highest always gets on. A paused sample takes no steps and gives its memory up to
whoever needs it.
"""

import bisect
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from k3svc.core.batch import DecodeBatch, DecodeRow, FirstRow, Fork, Guide, Sampled, SampleSpec, StepOutput, TokenCounts
from k3svc.core.pages import PagePool
from k3svc.core.request import FinishReason, GenerateRequest
from k3svc.core.sample import DraftBlock, Emission, Job, Phase, Sample
from k3svc.core.slots import SlotPool
from k3svc.errors import AlreadyExists, InvalidRequest, ResourceExhausted


class DecodeScheduler:
    """Admission, continuous batching and preemption of one decode service."""

    def __init__(
        self,
        *,
        pages: PagePool,
        slots: SlotPool,
        page_size: int,
        max_batch: int,
        max_waiting: int,
        max_transfers: int,
        max_context_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.pages = pages
        self.slots = slots
        self._page_size = page_size
        self._max_batch = min(max_batch, slots.num_slots)
        self._max_waiting = max_waiting
        self._max_transfers = max_transfers
        self.max_context_tokens = min(max_context_tokens, pages.num_pages * page_size)
        self._stop_token_ids = frozenset(stop_token_ids)
        self.waiting: list[Job] = []
        self.transfers: list[Job] = []
        self.running: list[Sample] = []
        self._serial = 0
        self._live: dict[str, list[Sample]] = {}
        self._in_flight: deque[dict[str, Sample]] = deque()
        """Samples of the steps in flight by key, the oldest step first."""
        self.num_preemptions = 0

    @property
    def is_in_step(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    def submit(self, request: GenerateRequest, *, retry_after_s: float) -> list[Sample]:
        """Queues a validated request and returns its samples. Raises AlreadyExists, ResourceExhausted, or
        InvalidRequest when the pools could never hold it.
        """
        if request.request_id in self._live:
            raise AlreadyExists(f"request {request.request_id!r} is live", request_id=request.request_id)
        if request.n > self._max_batch:
            raise InvalidRequest("sampling.n", request.n, f"1 to {self._max_batch} on this service")
        if self._pages_to_admit(request, request.n, 0) > self.pages.num_pages:
            raise InvalidRequest("prompt", f"{len(request.prompt)} tokens, n = {request.n}", "what the page pool holds")
        if len(self.waiting) >= self._max_waiting:
            raise ResourceExhausted(f"decode queue is full: {len(self.waiting)} wait", retry_after_s=retry_after_s)
        self._serial += 1
        samples = [self._new_sample(request, index) for index in range(request.n)]
        self._live[request.request_id] = samples
        self._enqueue(Job(samples=list(samples)))
        return samples

    def admit(self, *, now: float) -> list[Job]:
        """Reserves memory for waiting jobs in order; their hand-offs are to be started now."""
        admitted = []
        for job in [job for job in self.waiting if not job.lead.paused]:
            if len(self.transfers) == self._max_transfers or not self._make_room(job):
                break
            self.waiting.remove(job)
            self._reserve(job)
            job.admitted = now
            self.transfers.append(job)
            admitted.append(job)
        return admitted

    def landed(self, job: Job) -> None:
        """The state of the prompt has arrived complete; the others of the job begin with a copy of it."""
        self.transfers.remove(job)
        lead = job.lead
        size = len(lead.request.prompt)
        full = size // self._page_size
        for sample in job.samples:
            assert sample.phase is Phase.TRANSFER
            sample.phase = Phase.RUNNING
            sample.num_cached = size
            bisect.insort(self.running, sample, key=lambda other: other.rank)
            if sample is not lead:
                assert lead.slot is not None
                assert sample.slot is not None
                partial = size % self._page_size != 0
                sample.fork = Fork(
                    source_slot=lead.slot,
                    target_slot=sample.slot,
                    source_page=lead.pages[full] if partial else None,
                    target_page=sample.pages[full] if partial else None,
                )

    def schedule(self, blocks: Mapping[str, DraftBlock] = MappingProxyType({})) -> DecodeBatch | None:
        """Packs the next step, in order of rank; preempts paused samples and the lowest ranks when pages run out. No
        step may be in flight.

        `blocks` are proposals by key of sample: as many of their tokens are verified as may still come out and as pages
        are left for when everybody has got on; nobody is preempted for them.
        """
        assert not self._in_flight, "a step is in flight"
        rows: list[DecodeRow] = []
        first: list[FirstRow] = []
        taken: dict[str, Sample] = {}
        forks: list[Fork] = []
        for sample in list(self.running):
            if sample.phase is not Phase.RUNNING or sample.paused:
                continue
            needs_page = sample.num_cached < sample.num_known and not self._has_page(sample)
            if needs_page and not self._grow(sample):
                continue
            assert sample.slot is not None
            taken[sample.key] = sample
            if sample.fork is not None:
                # Its source ranks higher and is paused with it, so it is in this step too, and has not moved yet.
                forks.append(sample.fork)
                sample.fork = None
            if sample.num_cached == sample.num_known:
                first.append(FirstRow(key=sample.key, slot=sample.slot, sample=self._spec(sample)))
                continue
            index = sample.num_cached - len(sample.request.prompt)
            rows.append(
                DecodeRow(
                    key=sample.key,
                    slot=sample.slot,
                    block_table=sample.pages,
                    token_id=sample.output[index],
                    position=sample.num_cached,
                    sample=self._spec(sample) if sample.num_cached + 1 == sample.num_known else None,
                )
            )
        if blocks:
            rows = [
                self._with_drafts(taken[row.key], row, blocks[row.key]) if row.key in blocks else row for row in rows
            ]
        return self._start(DecodeBatch(rows=rows, first=first, forks=forks), taken)

    def schedule_ahead(self, batch: DecodeBatch) -> DecodeBatch | None:
        """Packs the step after `batch`, the only one in flight: each sample one position on. Preempts nobody.

        None: there is nothing to run, or what that step does is to be known first. So it is where a sample waits to
        begin or to go on, where pages are short, and where a sample has drafts, a penalty, a grammar, or wants
        log-probabilities, which are read off logits that must not wait for another step.
        """
        (in_flight,) = self._in_flight
        before = {row.key: row for row in batch.all_rows}
        rows: list[DecodeRow] = []
        taken: dict[str, Sample] = {}
        for sample in self.running:
            if sample.paused:
                continue
            # Another sample may have had the key and be in the step still.
            if in_flight.get(sample.key) is not sample:
                return None
            row = before[sample.key]
            if not _can_be_followed(row):
                return None
            num_new = int(row.sample is not None)
            if num_new and self.num_left(sample) == 1:
                continue
            position = sample.num_cached + isinstance(row, DecodeRow)
            if position == len(sample.pages) * self._page_size:
                pages = self.pages.allocate(1)
                if pages is None:
                    return None
                sample.pages.extend(pages)
            assert sample.slot is not None
            is_known = position < sample.num_known
            rows.append(
                DecodeRow(
                    key=sample.key,
                    slot=sample.slot,
                    block_table=sample.pages,
                    token_id=sample.output[position - len(sample.request.prompt)] if is_known else None,
                    position=position,
                    sample=self._spec(sample, num_new) if position + 1 == sample.num_known + num_new else None,
                )
            )
            taken[sample.key] = sample
        return self._start(DecodeBatch(rows=rows), taken)

    def _start(self, batch: DecodeBatch, samples: dict[str, Sample]) -> DecodeBatch | None:
        """The batch, which is in flight; None: it is empty."""
        if not samples:
            return None
        for sample in samples.values():
            sample.num_steps += 1
        self._in_flight.append(samples)
        return batch

    def _with_drafts(self, sample: Sample, row: DecodeRow, block: DraftBlock) -> DecodeRow:
        """The row with what can be verified of a block."""
        count = min(len(block.tokens), self.num_left(sample) - 1) if row.sample is not None else 0
        while count > 0 and len(sample.pages) * self._page_size <= row.position + count:
            pages = self.pages.allocate(1)
            if pages is None:
                count = len(sample.pages) * self._page_size - row.position - 1
                break
            sample.pages.extend(pages)
        if count <= 0:
            return row
        return replace(row, drafts=tuple(block.tokens[:count]), draft_laws=tuple(block.laws[:count]))

    def _trim(self, sample: Sample) -> None:
        """Gives back the pages that drafts needed and the next token does not."""
        keep = sample.num_cached // self._page_size + 1
        self.pages.free(sample.pages[keep:])
        sample.pages = sample.pages[:keep]

    def commit(self, batch: DecodeBatch, output: StepOutput) -> list[Emission]:
        """Books the oldest step in flight. Samples that end here have given their memory back when this returns, or
        when the step after it is booked, if they are in that.
        """
        emissions = []
        samples = self._in_flight.popleft()
        for row in batch.all_rows:
            sample = samples[row.key]
            sample.num_steps -= 1
            if sample.phase is Phase.ENDED:
                if sample.num_steps == 0:
                    self._give_back(sample)
                continue
            tokens = output.sampled.get(row.key, ())
            if isinstance(row, DecodeRow):
                sample.num_cached += max(1, len(tokens))
                if row.drafts:
                    self._trim(sample)
            failure = output.failed.get(row.key)
            if row.sample is not None or failure is not None:
                emissions.append(self._append(sample, row, tokens, failure))
        return emissions

    def cut(self, sample: Sample, num_output: int) -> None:
        """Forgets what an ended sample put out after its first num_output tokens."""
        assert sample.phase is Phase.ENDED
        del sample.output[num_output:]

    def end(self, sample: Sample) -> None:
        """Ends a sample: its memory goes back now, or when the last step that it is in is booked. Safe to repeat."""
        if sample.phase is Phase.ENDED:
            return
        if sample.phase is Phase.RUNNING:
            self.running.remove(sample)
        else:
            queue = self.waiting if sample.phase is Phase.WAITING else self.transfers
            job = next(job for job in queue if sample in job.samples)
            job.samples.remove(sample)
            if not job.samples:
                queue.remove(job)
        sample.phase = Phase.ENDED
        live = self._live[sample.request.request_id]
        live.remove(sample)
        if not live:
            del self._live[sample.request.request_id]
        if sample.num_steps == 0:
            self._give_back(sample)

    def pause(self, request_id: str, *, paused: bool) -> None:
        """Whether the samples of a request sit out the next steps."""
        for sample in self.live_samples(request_id):
            sample.paused = paused

    def live_samples(self, request_id: str) -> list[Sample]:
        """The samples of a live request that have not ended."""
        return list(self._live.get(request_id, ()))

    def num_left(self, sample: Sample) -> int:
        """Tokens that the output may still take."""
        limit = self.max_context_tokens - len(sample.request.prompt)
        if sample.request.stop.max_tokens is not None:
            limit = min(limit, sample.request.stop.max_tokens)
        return limit - len(sample.output)

    def check(self) -> None:
        """Raises AssertionError unless pools are whole and hold exactly what live samples hold."""
        self.pages.check()
        self.slots.check()
        holders = [*self.running, *(s for job in self.transfers for s in job.samples)]
        in_flight = Counter(sample for samples in self._in_flight for sample in samples.values())
        assert all(sample.num_steps == in_flight[sample] for sample in [*holders, *in_flight]), "steps miscounted"
        holders += [sample for sample in in_flight if sample.phase is Phase.ENDED]
        assert self.slots.num_slots - self.slots.num_free == len(holders), "slots without a sample"
        held = {page for sample in holders for page in sample.pages}
        assert self.pages.num_pages - self.pages.num_free == len(held), "pages without a sample"
        ranks = [sample.rank for sample in self.running]
        assert ranks == sorted(ranks), "samples run out of order"

    def _new_sample(self, request: GenerateRequest, index: int) -> Sample:
        counts: dict[int, int] = {}
        for token_id in request.generated:
            counts[token_id] = counts.get(token_id, 0) + 1
        return Sample(
            key=f"{request.request_id}#{index}",
            request=request,
            index=index,
            output=list(request.generated),
            prompt_ids=frozenset(request.prompt),
            counts=counts,
            matcher=None if request.grammar is None else request.grammar.matcher(),
            rank=(request.priority, self._serial, index),
        )

    def _enqueue(self, job: Job) -> None:
        bisect.insort(self.waiting, job, key=lambda other: other.lead.rank)

    def _make_room(self, job: Job) -> bool:
        """Whether the job can be admitted, if need be by preempting paused samples."""
        while not self._fits(job):
            idle = next((one for one in reversed(self.running) if one.paused and one.num_steps == 0), None)
            if idle is None:
                return False
            self._preempt(idle)
        return True

    def _fits(self, job: Job) -> bool:
        """Each sample in flight keeps a page to grow into, or admitting would at once preempt somebody."""
        count = len(job.samples)
        needed = self._pages_to_admit(job.lead.request, count, len(job.lead.output))
        in_flight = len(self.running) + sum(len(other.samples) for other in self.transfers)
        return (
            in_flight + count <= self._max_batch
            and count <= self.slots.num_free
            and needed + in_flight <= self.pages.num_free
        )

    def _pages_to_admit(self, request: GenerateRequest, count: int, num_output: int) -> int:
        """Pages for the prompt and known output plus one token; forked samples share the prompt's full pages."""
        total = -(-(len(request.prompt) + num_output + 1) // self._page_size)
        return total + (count - 1) * (total - len(request.prompt) // self._page_size)

    def _reserve(self, job: Job) -> None:
        lead = job.lead
        total = -(-(lead.num_known + 1) // self._page_size)
        shared = len(lead.request.prompt) // self._page_size
        slots = self.slots.allocate(len(job.samples))
        assert slots is not None
        for sample, slot in zip(job.samples, slots, strict=True):
            own = self.pages.allocate(total if sample is lead else total - shared)
            assert own is not None
            sample.pages = array("q", own)
            if sample is not lead:
                self.pages.share(lead.pages[:shared])
                sample.pages = lead.pages[:shared] + sample.pages
            sample.slot, sample.phase = slot, Phase.TRANSFER

    def _has_page(self, sample: Sample) -> bool:
        return sample.num_cached < len(sample.pages) * self._page_size

    def _grow(self, sample: Sample) -> bool:
        """One more page for a running sample. False: it was the one to give way."""
        while True:
            pages = self.pages.allocate(1)
            if pages is not None:
                sample.pages.extend(pages)
                return True
            victim = next((other for other in reversed(self.running) if other.paused), self.running[-1])
            self._preempt(victim)
            if victim is sample:
                return False

    def _preempt(self, sample: Sample) -> None:
        self.running.remove(sample)
        self._give_back(sample)
        sample.phase = Phase.WAITING
        sample.num_cached = 0
        sample.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(Job(samples=[sample]))

    def _give_back(self, sample: Sample) -> None:
        if sample.slot is not None:
            self.slots.free(sample.slot)
            self.pages.free(sample.pages)
            sample.slot, sample.pages, sample.fork = None, array("q"), None

    def _spec(self, sample: Sample, num_new: int = 0) -> SampleSpec:
        """How the token after the known ones is chosen, and after num_new that are to be known by then."""
        request = sample.request
        params = request.sampling
        penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )
        num_banned = request.stop.min_tokens - len(sample.output) - num_new
        return SampleSpec(
            params=params,
            sample_index=sample.sample_index,
            position=sample.num_known + num_new,
            counts=TokenCounts(prompt=sample.prompt_ids, output=sample.counts) if penalised else None,
            banned=self._stops(request) if num_banned > 0 else frozenset(),
            num_banned=num_banned,
            logprobs=request.logprobs,
            guide=None if sample.matcher is None else Guide(matcher=sample.matcher, output=sample.output),
        )

    def _stops(self, request: GenerateRequest) -> frozenset[int]:
        return request.stop.stop_token_ids | (frozenset() if request.stop.ignore_eos else self._stop_token_ids)

    def _append(
        self, sample: Sample, row: DecodeRow | FirstRow, tokens: Sequence[Sampled], failure: str | None
    ) -> Emission:
        """Takes tokens until the output ends with one; the rest is dropped."""
        num_drafts = len(row.drafts) if isinstance(row, DecodeRow) else 0
        num_accepted = len(tokens) - (failure is None)
        for count, sampled in enumerate(tokens, start=1):
            token_id = sampled.token_id
            sample.output.append(token_id)
            sample.counts[token_id] = sample.counts.get(token_id, 0) + 1
            is_stop = token_id in self._stops(sample.request)
            if is_stop or self.num_left(sample) <= 0:
                self.end(sample)
                return Emission(
                    sample=sample,
                    tokens=tokens[:count],
                    finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
                    stop_token=is_stop,
                    num_drafts=num_drafts,
                    num_accepted=num_accepted,
                )
        if failure is not None:
            self.end(sample)
        return Emission(sample=sample, tokens=tokens, failure=failure, num_drafts=num_drafts, num_accepted=num_accepted)


def _can_be_followed(row: DecodeRow | FirstRow) -> bool:
    """Whether it is known what the row after this one does before this one has given its token."""
    if isinstance(row, DecodeRow) and row.drafts:
        return False
    spec = row.sample
    return spec is None or (spec.counts is None and spec.guide is None and spec.logprobs is None)
