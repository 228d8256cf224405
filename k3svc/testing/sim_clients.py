"""The clients of a simulation: each tells one story and checks every token that it gets against the oracle."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache

from k3svc.core.events import Delta, Finished
from k3svc.core.request import FinishReason, GenerateRequest, SamplingParams, StopParams
from k3svc.engine.decode import TextOptions
from k3svc.errors import (
    AlreadyExists,
    DeadlineExceeded,
    EngineFault,
    Incompatible,
    K3svcError,
    ResourceExhausted,
    TransferError,
    Unavailable,
)
from k3svc.testing.fakes import VOCAB, expected_tokens
from k3svc.testing.links import Broken, Host, Network

PROMPT_SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 40, 48, 63, 65)
"""Few, so that hand-offs of different requests have the same manifest but for their names."""
STOP_TOKEN = 63
BACKOFF_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Story:
    """One request and what its caller does."""

    request: GenerateRequest
    arrival_s: float
    cancel_after_s: float | None = None
    abort_after_s: float | None = None
    timeout_s: float | None = None
    read_delay_max_s: float = 0.0


def draw_story(rng: random.Random, index: int, *, max_context_tokens: int, span_s: float) -> Story:
    size = min(rng.choice(PROMPT_SIZES), max_context_tokens // 2)
    max_tokens = rng.choice((1, 2, 5, 12, 25, 40))
    request = GenerateRequest(
        request_id=f"r{index}",
        prompt=tuple(rng.randrange(VOCAB) for _ in range(size)),
        sampling=SamplingParams(seed=rng.randrange(1000)),
        stop=StopParams(max_tokens=min(max_tokens, max_context_tokens - size)),
        n=rng.choice((1, 1, 1, 1, 2)),
        priority=rng.choice((0, 0, 0, -1, 2)),
    )
    ending = rng.choice(("none", "none", "none", "cancel", "abort", "timeout"))
    after_s = rng.choice((0.0, 0.01, 0.05, 0.2, 1.0)) * rng.random()
    return Story(
        request=request,
        arrival_s=rng.uniform(0.0, span_s),
        cancel_after_s=after_s if ending == "cancel" else None,
        abort_after_s=after_s if ending == "abort" else None,
        timeout_s=after_s if ending == "timeout" else None,
        # Two samples start again when they are ended as a slow reader's, so these never come to an end.
        read_delay_max_s=rng.choice((0.0, 0.0, 0.0, 0.01, 0.5)) if request.n == 1 else 0.0,
    )


def share_beginnings(stories: list[Story], rng: random.Random) -> list[Story]:
    """The same stories, but that most prompts begin alike: each with some tokens of one of two texts."""
    texts = [tuple(rng.randrange(VOCAB) for _ in range(max(PROMPT_SIZES))) for _ in range(2)]
    shared = []
    for story in stories:
        prompt = story.request.prompt
        head = rng.choice(texts)[: rng.choice((0, 20, 40, 64))]
        request = replace(story.request, prompt=(*head, *prompt[len(head) :])[: len(prompt)])
        shared.append(replace(story, request=request))
    return shared


@lru_cache(maxsize=4096)
def _expected(prompt: tuple[int, ...], count: int, seed: int, index: int) -> tuple[int, ...]:
    tokens = expected_tokens(prompt, count, seed=seed, index=index)
    return tuple(tokens[: tokens.index(STOP_TOKEN) + 1] if STOP_TOKEN in tokens else tokens)


class SimClient:
    """Runs a story to its end; `outcome` says how it went. Raises Broken."""

    def __init__(
        self,
        story: Story,
        network: Network,
        addresses: tuple[str, ...],
        rng: random.Random,
        *,
        may_fail: tuple[type[K3svcError], ...],
    ) -> None:
        """`may_fail`: the errors with which a request may end in this world."""
        request = story.request
        self.story = story
        self.outcome = ""
        self.counts: Counter[str] = Counter()
        self._network = network
        self._addresses = addresses
        self._rng = rng
        self._may_fail = may_fail
        self._address = addresses[0]
        self._tokens: list[list[int]] = [[] for _ in range(request.n)]
        self._reasons: dict[int, FinishReason] = {}
        self._want = [
            _expected(request.prompt, request.stop.max_tokens or 0, request.sampling.seed, index)
            for index in range(request.n)
        ]
        self._deadline: float | None = None

    async def run(self) -> None:
        story, loop = self.story, asyncio.get_running_loop()
        await asyncio.sleep(story.arrival_s)
        if story.timeout_s is not None:
            self._deadline = loop.time() + story.timeout_s
        reading = asyncio.create_task(self._read())
        if story.abort_after_s is not None:
            await asyncio.wait({reading}, timeout=story.abort_after_s)
            await self._abort()
        if story.cancel_after_s is not None:
            await asyncio.wait({reading}, timeout=story.cancel_after_s)
            reading.cancel()
            await asyncio.wait({reading})
            if reading.cancelled():
                self.outcome = "cancelled"
                return
        self.outcome = await reading

    async def _read(self) -> str:
        """Reads until the request has ended, on as many services as it takes."""
        attempts = 0
        while True:
            self._address = self._rng.choice(self._addresses)
            attempts += 1
            try:
                await self._attempt()
            except DeadlineExceeded:
                self._must(self._deadline is not None, "no deadline was set, yet it passed")
                return "expired"
            except AlreadyExists:
                self._must(attempts > 1, "the id is new, yet known")
                retry_s = BACKOFF_S
            except (Unavailable, ResourceExhausted) as error:
                self.counts[error.reason] += 1
                retry_s = BACKOFF_S if error.retry_after_s is None else error.retry_after_s
                self._must(0 <= retry_s <= 30, f"retry after {retry_s} s")
            except (EngineFault, Incompatible) as error:
                self._must(isinstance(error, self._may_fail), f"{type(error).__name__}: {error.message}")
                return type(error).__name__
            else:
                return self._ending()
            if self._deadline is not None and asyncio.get_running_loop().time() + retry_s > self._deadline:
                return "expired"
            await asyncio.sleep(retry_s)

    async def _attempt(self) -> None:
        request, absorbed = self.story.request, tuple(self._tokens[0])
        resumes = request.n == 1 and 0 < len(absorbed) < (request.stop.max_tokens or 0)
        if all(index in self._reasons for index in range(request.n)):
            return
        if resumes:
            self.counts["resumed"] += 1
            request = replace(request, generated=absorbed)
        else:
            self._tokens = [[] for _ in range(request.n)]
        self._reasons.clear()
        finished = False
        serve = self._serve
        async with aclosing(self._network.stream("client", self._address, lambda host: serve(host, request))) as events:
            try:
                async for event in events:
                    self._must(not finished, "something came after Finished")
                    if isinstance(event, Finished):
                        finished = True
                        self.counts["preempted"] += event.timings.preemptions
                    else:
                        self._take(event)
                    if self.story.read_delay_max_s:
                        await asyncio.sleep(self._rng.uniform(0, self.story.read_delay_max_s))
            except TransferError as error:
                raise Unavailable(f"keepalive: {error.message}") from error
        self._must(finished, "the stream ended without Finished")
        self._must(len(self._reasons) == request.n, "a sample without a finish reason")

    async def _serve(self, host: Host, request: GenerateRequest) -> AsyncGenerator[Delta | Finished, None]:
        """What services.decode does with a call; the deadline is that of the call."""
        stream = host.decode.submit(request, TextOptions(enabled=False), deadline=self._deadline)
        host.streams[stream] = self._deadline
        try:
            async for event in stream:
                yield event
        finally:
            stream.cancel()
            del host.streams[stream]

    def _take(self, delta: Delta) -> None:
        tokens, want = self._tokens[delta.index], self._want[delta.index]
        self._must(delta.index not in self._reasons, "tokens after the finish reason")
        tokens += delta.token_ids
        self._must(tuple(tokens) == want[: len(tokens)], f"sample {delta.index} has {tokens}, expected {want}")
        if delta.finish_reason is not None:
            self._reasons[delta.index] = delta.finish_reason
            if delta.finish_reason is not FinishReason.ABORT:
                self._must(len(tokens) == len(want), f"{len(tokens)} tokens of {len(want)}")

    def _ending(self) -> str:
        if FinishReason.ABORT in self._reasons.values():
            self._must(self.story.abort_after_s is not None, "aborted by nobody")
            return "aborted"
        return "finished"

    async def _abort(self) -> None:
        try:
            host = await self._network.reach("client", self._address)
        except Unavailable:
            return
        host.decode.abort(self.story.request.request_id)

    def _must(self, holds: bool, message: str) -> None:
        if not holds:
            raise Broken(f"{self.story.request.request_id}: {message}")
