"""RemoteDrafter: the Drafter of a decode service that has a draft service.

A task keeps one session up, reconnects with back-off, and reads the answers; the engine's calls only look things up and
put messages into a bounded queue. What does not fit there, or comes while nobody is connected, is dropped: the context
of a sample is mended from the history that is kept here, and a token never depends on any of it.

On the wire a sample is a handle, and each time it is opened there its attempt rises, so that answers of an earlier
opening fit nothing.
"""

import asyncio
import logging
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from k3svc.core.request import SamplingParams
from k3svc.engine.draft_protocol import (
    DraftProfile,
    SampleCommit,
    SampleFeatures,
    SampleGap,
    SampleOpen,
    SampleProposal,
    SessionAnswer,
    SessionStep,
)
from k3svc.engine.ports import DraftCommit, DraftOpen, DraftProposal, FeatureRows
from k3svc.errors import Incompatible, K3svcError
from k3svc.rpc.credentials import CallerCredentials
from k3svc.rpc.draft_history import FeatureHistory
from k3svc.rpc.draft_session import DraftChannel, DraftConnection

log = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
INCOMPATIBLE_BACKOFF_S = 30.0
"""A service of another model is left alone for so long; it may have been replaced by then."""
REOPENS = 4
"""Samples that are opened again with their history in one step, so that a step stays short."""
RETRY_COMMITS = 16
"""Commits of a sample before it is opened again after a refusal, or its history sent again after a gap."""


@dataclass(kw_only=True, eq=False)
class _Followed:
    opened: DraftOpen
    handle: int
    attempt: int = 0
    """On the wire; 0: it was never opened there."""
    base_len: int
    anchor: int
    is_open: bool = False
    """The service has been told of it in this session."""
    commits: int = 0
    retry_at: int = 0
    """Not opened again, and no history sent, before so many commits."""
    was_complete: bool = False
    proposal: DraftProposal | None = None


@dataclass(kw_only=True)
class DraftClientStats:
    """What a RemoteDrafter counts since its start."""

    proposals: int = 0
    tokens: int = 0
    truncated: int = 0
    """Proposals from an incomplete context."""
    late: int = 0
    """Proposals for a base that had moved on."""
    invalid: int = 0
    """Answers that could not be."""
    gaps: int = 0
    refused: int = 0
    reopened: int = 0
    dropped: int = 0
    """Messages that the queue had no room for."""
    connects: int = 0
    reply_s: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    """From a wish to its answer, the last ones."""
    draft_us: int = 0
    """Compute time of the last answer on the service."""
    context_steps: Counter[int] = field(default_factory=Counter)
    """Steps of a sample before its first proposal from a complete context → samples."""


class RemoteDrafter:
    """A Drafter over DraftService.Session. Belongs to the event loop that calls `start`."""

    def __init__(
        self,
        target: str,
        *,
        profile: DraftProfile,
        window: int,
        history_bytes: int,
        max_message_bytes: int,
        uses_shm: bool,
        credentials: CallerCredentials | None = None,
        seed: int | None = None,
    ) -> None:
        """`window`: context rows that the service keeps, as far as is known here."""
        self.name = target
        self.stats = DraftClientStats()
        self._profile = profile
        self._channel = DraftChannel(
            target,
            profile=profile,
            max_message_bytes=max_message_bytes,
            uses_shm=uses_shm,
            credentials=credentials or CallerCredentials(),
        )
        self._history = FeatureHistory(
            window=window, ahead=profile.num_proposals + 1, row_bytes=profile.row_bytes, max_bytes=history_bytes
        )
        self._rng = random.Random(seed)
        self._samples: dict[str, _Followed] = {}
        self._keys: dict[int, str] = {}
        self._num_handles = 0
        self._closes: list[int] = []
        self._connection: DraftConnection | None = None
        self.credits = 0
        """Samples that the service would follow beside those that it does, as far as is known."""
        self._step = 0
        self._asked: deque[tuple[int, float]] = deque(maxlen=256)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to connect. Once, on a running loop."""
        self._task = asyncio.get_running_loop().create_task(self._keep_connected())

    async def stop(self) -> None:
        """Ends the session. Safe to repeat."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._channel.close()

    @property
    def num_proposals(self) -> int:
        is_up = self._connection is not None and self._connection.is_alive
        return self._profile.num_proposals if is_up else 0

    @property
    def wants_features(self) -> bool:
        return True

    def open(self, opens: Sequence[DraftOpen]) -> None:
        fresh: list[_Followed] = []
        known: list[_Followed] = []
        for opened in opens:
            if opened.key in self._samples:
                self._forget(opened.key)
            self._num_handles += 1
            self._keys[self._num_handles] = opened.key
            sample = self._samples[opened.key] = _Followed(
                opened=opened, handle=self._num_handles, base_len=len(opened.known) - 1, anchor=opened.known[-1]
            )
            start, end = self._history.span(opened.key)
            (known if start < end else fresh).append(sample)
        if fresh and self._connection is not None:
            wishes = [self._opening(sample, self._profile.num_proposals) for sample in fresh]
            for sample in fresh:
                sample.is_open = True
            if not self._send(SessionStep(step=self._next_step(), closes=self._take_closes(), opens=wishes)):
                for sample in fresh:
                    sample.is_open = False
        for sample in known:
            self._reopen(sample, self._profile.num_proposals)

    def push(self, rows: Sequence[FeatureRows]) -> None:
        pieces = []
        for row in rows:
            self._history.write(row.key, row.start, row.data)
            sample = self._samples.get(row.key)
            if sample is not None and sample.is_open and sample.opened.attempt == row.attempt:
                pieces.append(_piece(sample, row.start, row.data, row.num_rows))
        if self._connection is None:
            return
        for part in _split(pieces, self._connection.max_payload_bytes):
            self._send(SessionStep(features=part))

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        told: list[SampleCommit] = []
        pieces: list[SampleFeatures] = []
        lost: list[tuple[_Followed, int]] = []
        for commit in commits:
            sample = self._samples.get(commit.key)
            if sample is None or sample.opened.attempt != commit.attempt:
                continue
            start, count = commit.base_len - len(commit.tokens), len(commit.tokens)
            if commit.features is not None:
                self._history.write(commit.key, start, commit.features)
            self._history.crop(commit.key, commit.base_len)
            sample.base_len, sample.anchor = commit.base_len, commit.tokens[-1]
            sample.commits += 1
            want = max(0, min(commit.want, self._profile.num_proposals))
            if not sample.is_open:
                lost.append((sample, want))
                continue
            if commit.features is not None:
                pieces.append(_piece(sample, start, commit.features, count))
            told.append(
                SampleCommit(
                    handle=sample.handle,
                    attempt=sample.attempt,
                    base_len=sample.base_len,
                    count=count,
                    anchor=sample.anchor,
                    want=want,
                )
            )
        if told and self._connection is not None:
            *parts, last = _split(pieces, self._connection.max_payload_bytes) or [[]]
            for part in parts:
                self._send(SessionStep(features=part))
            step = self._next_step() if any(commit.want for commit in told) else 0
            self._send(SessionStep(step=step, closes=self._take_closes(), features=last, commits=told))
        ready = [entry for entry in lost if entry[0].commits >= entry[0].retry_at]
        for sample, want in ready[: min(REOPENS, self.credits)]:
            self._reopen(sample, want)

    def close(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key in self._samples:
                self._forget(key)
            self._history.drop(key)
        if self._closes:
            self._send(SessionStep(closes=self._take_closes()))

    def proposal(self, key: str) -> DraftProposal | None:
        sample = self._samples.get(key)
        return None if sample is None else sample.proposal

    async def wait(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self._is_outstanding and (left_s := end - loop.time()) > 0:
            self._changed.clear()
            timer = loop.call_later(left_s, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
        return not self._is_outstanding

    @property
    def _is_outstanding(self) -> bool:
        return bool(self._asked) and self.num_proposals > 0

    def _forget(self, key: str) -> None:
        sample = self._samples.pop(key)
        del self._keys[sample.handle]
        if sample.is_open:
            self._closes.append(sample.handle)

    def _take_closes(self) -> list[int]:
        closes, self._closes = self._closes, []
        return closes

    def _next_step(self) -> int:
        self._step += 1
        self._asked.append((self._step, asyncio.get_running_loop().time()))
        return self._step

    def _send(self, step: SessionStep) -> bool:
        """False: dropped. What the service does not hear of now shows as a gap, or ends with a lease."""
        if self._connection is not None and self._connection.send(step):
            return True
        self.stats.dropped += 1
        self._asked = deque((entry for entry in self._asked if entry[0] != step.step), maxlen=self._asked.maxlen)
        return False

    def _opening(self, sample: _Followed, want: int) -> SampleOpen:
        """The sample as it stands. Penalties and bias stay behind: a draft does not see them."""
        sample.attempt += 1
        opened, params = sample.opened, sample.opened.params
        return SampleOpen(
            handle=sample.handle,
            attempt=sample.attempt,
            base_len=sample.base_len,
            anchor=sample.anchor,
            want=want,
            ticket=opened.ticket,
            params=SamplingParams(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=params.seed,
            ),
            sample_index=opened.sample_index,
            with_probs=opened.with_probs,
        )

    def _reopen(self, sample: _Followed, want: int) -> None:
        """Opens a sample of which there is a history, with that."""
        if self._connection is None:
            return
        sample.retry_at = sample.commits + RETRY_COMMITS
        opening = self._opening(sample, want)
        parts = self._past(sample, 0)
        step = SessionStep(
            step=self._next_step(),
            closes=self._take_closes(),
            opens=[opening],
            features=parts[0] if parts else (),
        )
        sample.is_open = self._send(step)
        if sample.is_open:
            self.stats.reopened += 1
            for part in parts[1:]:
                self._send(SessionStep(features=part))

    def _past(self, sample: _Followed, start: int) -> list[list[SampleFeatures]]:
        """The history of a sample from `start` on, newest rows first, in parts that fit into messages."""
        assert self._connection is not None
        first, end = self._history.span(sample.opened.key)
        if end != sample.base_len:
            return []
        first = max(first, start)
        most = max(1, self._connection.max_payload_bytes // self._profile.row_bytes)
        parts: list[list[SampleFeatures]] = []
        while first < end:
            low = max(first, end - most)
            data = memoryview(self._history.read(sample.opened.key, low, end))
            parts.append([_piece(sample, low, data, end - low)])
            end = low
        return parts

    async def _keep_connected(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                self._connection = await self._channel.connect()
                log.info("draft service %s follows up to %d samples", self.name, self._connection.max_requests)
                backoff_s = MIN_BACKOFF_S
                self._connected(self._connection)
                async with aclosing(self._connection.answers()) as answers:
                    async for answer in answers:
                        self._take(answer)
            except Incompatible as error:
                log.error("draft service %s does not fit: %s", self.name, error.message)  # noqa: TRY400  no trace
                backoff_s = INCOMPATIBLE_BACKOFF_S
            except K3svcError as error:
                log.info("draft service %s is gone: %s", self.name, error.message, extra={"reason": error.reason})
            except Exception:
                # Whatever it is, speculation is not to end with it.
                log.exception("the session with draft service %s failed", self.name)
            finally:
                await self._disconnected()
            await asyncio.sleep(backoff_s * (0.5 + self._rng.random()))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _connected(self, connection: DraftConnection) -> None:
        self.stats.connects += 1
        self.credits = connection.max_requests
        for sample in self._samples.values():
            sample.retry_at = 0

    async def _disconnected(self) -> None:
        connection, self._connection = self._connection, None
        self._closes.clear()
        self._asked.clear()
        for sample in self._samples.values():
            sample.is_open = False
        self._changed.set()
        if connection is not None:
            await connection.close()

    def _take(self, answer: SessionAnswer) -> None:
        now = asyncio.get_running_loop().time()
        self.credits = answer.credits
        asked_at = next((asked for step, asked in self._asked if step == answer.step), now)
        for made in answer.proposals:
            self._take_proposal(made, answer.draft_us * 1e-6, now - asked_at)
        for gap in answer.gaps:
            self._mend(gap)
        for handle in answer.refused:
            sample = self._samples.get(self._keys.get(handle, ""))
            if sample is not None and sample.is_open:
                self.stats.refused += 1
                sample.is_open, sample.retry_at = False, sample.commits + RETRY_COMMITS
        while self._asked and self._asked[0][0] <= answer.step:
            step, asked = self._asked.popleft()
            if step == answer.step:
                self.stats.reply_s.append(now - asked)
                self.stats.draft_us = answer.draft_us
        self._changed.set()

    def _take_proposal(self, made: SampleProposal, compute_s: float, reply_s: float) -> None:
        sample = self._samples.get(self._keys.get(made.handle, ""))
        if sample is None or made.attempt != sample.attempt:
            return
        profile, count = self._profile, len(made.tokens)
        bad = (
            k for k, token in enumerate(made.tokens) if token >= profile.vocab_size or token == profile.mask_token_id
        )
        has_law = len(made.probs) == 4 * profile.vocab_size * count
        if not 0 < count <= profile.num_proposals or next(bad, None) is not None or not (has_law or not made.probs):
            self.stats.invalid += 1
            return
        trusted = all(math.isfinite(chance) and 0.0 <= chance <= 1.0 for chance in made.confidences)
        self.stats.proposals += 1
        self.stats.tokens += count
        self.stats.truncated += made.truncated
        self.stats.late += made.base_len != sample.base_len
        if not made.truncated and not sample.was_complete:
            sample.was_complete = True
            self.stats.context_steps[sample.commits] += 1
        size = 4 * profile.vocab_size
        sample.proposal = DraftProposal(
            key=sample.opened.key,
            attempt=sample.opened.attempt,
            base_len=made.base_len,
            tokens=made.tokens,
            confidences=made.confidences if trusted else (),
            probs=[made.probs[size * k : size * (k + 1)] for k in range(count)] if made.probs else (),
            truncated=made.truncated,
            compute_s=compute_s,
            reply_s=reply_s,
        )

    def _mend(self, gap: SampleGap) -> None:
        """Sends what there is of a context that the service lacks, now and then."""
        self.stats.gaps += 1
        sample = self._samples.get(self._keys.get(gap.handle, ""))
        if sample is None or gap.attempt != sample.attempt or sample.commits < sample.retry_at:
            return
        sample.retry_at = sample.commits + RETRY_COMMITS
        for part in self._past(sample, gap.start):
            self._send(SessionStep(features=part))


def _piece(sample: _Followed, start: int, data: memoryview, num_rows: int) -> SampleFeatures:
    return SampleFeatures(handle=sample.handle, attempt=sample.attempt, start=start, num_rows=num_rows, data=data)


def _split(pieces: Sequence[SampleFeatures], max_bytes: int) -> list[list[SampleFeatures]]:
    """Pieces in order, as many a message as fit; a piece that does not fit alone is left out."""
    parts: list[list[SampleFeatures]] = []
    size = 0
    for piece in pieces:
        if piece.data.nbytes > max_bytes:
            continue
        if not parts or size + piece.data.nbytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(piece)
        size += piece.data.nbytes
    return parts
