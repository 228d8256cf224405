"""Sending a workload and writing down when what came back.

Closed loop: `concurrency` requests are under way all the time. Open loop: each request is sent when it is due, however
many are under way, or as soon after as `concurrency` allows; its latency counts from when it was due, so that a service
that falls behind cannot hide it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from k3svc.bench.workload import Item
from k3svc.client import AsyncClient, Delta, Finished, Options, ServiceLoad
from k3svc.core.events import SpeculationStats, Timings, Usage
from k3svc.errors import K3svcError
from k3svc.obs.loop_lag import watch_loop
from k3svc.rpc.status import code_of

SAMPLE_PERIOD_S = 1.0


@dataclass(kw_only=True)
class Record:
    """One request as its caller saw it; times in seconds from the start of the load."""

    index: int
    due_s: float
    """When it was to be sent; in a closed loop, when it was."""
    sent_s: float
    ended_s: float = 0.0
    stamps: list[float] = field(default_factory=list)
    """Arrival of each message with tokens."""
    counts: list[int] = field(default_factory=list)
    """Tokens of each of those messages."""
    usage: Usage | None = None
    timings: Timings | None = None
    speculation: SpeculationStats | None = None
    error_code: str = ""
    """Name of the gRPC code; empty for a request that succeeded."""
    error: str = ""

    @property
    def is_success(self) -> bool:
        return not self.error_code

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft_s(self) -> float:
        return self.stamps[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.stamps[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first message; None when nothing came after it."""
        later = self.num_tokens - self.counts[0]
        return (self.stamps[-1] - self.stamps[0]) / later if later else None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Pools and queues of one service at one time."""

    at_s: float
    endpoint: str
    load: ServiceLoad


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What a load test measured."""

    records: Sequence[Record]
    duration_s: float
    cpu_s: float
    """Processor time of this process, which sent the load."""
    loop_lags_s: Sequence[float]
    """How late the event loop of this process was, every 100 ms."""
    samples: Sequence["Sample"]
    """Pools and queues of the services that were loaded, every second."""


class Load:
    """A load under way. `records` and `running` may be looked at while `run` works."""

    def __init__(
        self,
        client: AsyncClient,
        items: Sequence[Item],
        *,
        concurrency: int | None,
        options: Options,
        timeout_s: float | None = None,
        on_progress: Callable[["Load"], None] = lambda _: None,
    ) -> None:
        """`concurrency` None: as many as are due. `on_progress` is called when a request has ended."""
        self.items = items
        self.records: list[Record] = []
        self.num_ended = 0
        self.num_tokens = 0
        self._client = client
        self._concurrency = concurrency
        self._options = options
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._started = 0.0
        self._samples: list[Sample] = []

    @property
    def num_running(self) -> int:
        return len(self.records) - self.num_ended

    async def run(self) -> LoadResult:
        """Sends everything and waits for all of it. What fails is a record with an error."""
        lags: list[float] = []
        self._started = time.perf_counter()
        watching = [asyncio.create_task(watch_loop(lags.append)), asyncio.create_task(self._sample())]
        cpu_started = time.process_time()
        left = iter(enumerate(self.items))
        num_workers = min(len(self.items), self._concurrency or len(self.items))
        workers = [asyncio.create_task(self._work(left)) for _ in range(num_workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in (*watching, *workers):
                task.cancel()
            await asyncio.gather(*watching, *workers, return_exceptions=True)
        return LoadResult(
            records=sorted(self.records, key=lambda record: record.index),
            duration_s=self._now(),
            cpu_s=time.process_time() - cpu_started,
            loop_lags_s=lags,
            samples=self._samples,
        )

    async def _work(self, left: Iterator[tuple[int, Item]]) -> None:
        """Takes requests in order until none is left, each when it is due."""
        for index, item in left:
            wait_s = item.due_s - self._now()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            now = self._now()
            record = Record(index=index, due_s=item.due_s or now, sent_s=now)
            self.records.append(record)
            await self._send(item, record)
            record.ended_s = self._now()
            self.num_ended += 1
            self._on_progress(self)

    async def _send(self, item: Item, record: Record) -> None:
        options: Options = {**self._options, "max_tokens": item.output_len}
        generation = self._client.generate(
            item.text, tokens=item.tokens, messages=item.messages, timeout_s=self._timeout_s, **options
        )
        try:
            async with generation:
                async for event in generation:
                    if isinstance(event, Delta) and event.token_ids:
                        record.stamps.append(self._now())
                        record.counts.append(len(event.token_ids))
                        self.num_tokens += len(event.token_ids)
                    elif isinstance(event, Finished):
                        record.usage, record.timings = event.usage, event.timings
                        record.speculation = event.speculation
        except K3svcError as error:
            record.error_code, record.error = code_of(error).name, error.message

    async def _sample(self) -> None:
        """Until it is cancelled. A service that does not answer leaves a gap."""
        while True:
            for endpoint in self._client.endpoints:
                with contextlib.suppress(K3svcError):
                    load = await self._client.load(endpoint, timeout_s=SAMPLE_PERIOD_S)
                    self._samples.append(Sample(at_s=self._now(), endpoint=endpoint, load=load))
            await asyncio.sleep(SAMPLE_PERIOD_S)

    def _now(self) -> float:
        return time.perf_counter() - self._started
