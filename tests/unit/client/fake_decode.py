"""A decode service whose output is a function of prompt length, seed, sample and position, and that fails on demand.

Text lags one token behind the ids, as it does where a character is unfinished: a client that resumes must neither lose
nor repeat the text that was held back.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from k3svc.errors import K3svcError
from k3svc.rpc.status import status_of
from k3svc.v1 import admin_service_pb2 as admin
from k3svc.v1 import admin_service_pb2_grpc as admin_grpc
from k3svc.v1 import decode_service_pb2 as decode
from k3svc.v1 import decode_service_pb2_grpc as decode_grpc
from k3svc.v1 import types_pb2 as types

SEED = 2**63 + 11
MAX_TOKENS = 8


def token(prompt_tokens: int, seed: int, sample: int, position: int) -> int:
    return (31 * prompt_tokens + 17 * (seed % 97) + 13 * sample + 7 * position) % 1000


def tokens(prompt_tokens: int, *, seed: int = SEED, sample: int = 0, n: int = MAX_TOKENS) -> tuple[int, ...]:
    return tuple(token(prompt_tokens, seed, sample, position) for position in range(n))


def text(ids: Iterable[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


@dataclass
class Step:
    """What one call does: fails, or gives `break_after` new tokens and breaks, or waits there for ever."""

    error: K3svcError | None = None
    break_after: int | None = None
    break_code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    hang_after: int | None = None
    break_before_end: bool = False
    seed_offset: int = 0
    """Makes the tokens differ from those of other calls."""
    model: str = "fake-model"
    variant: str = "fake/1"
    answer: Sequence[str] | None = None
    """Text of the tokens one by one, instead of the usual one."""


@dataclass
class FakeDecode(decode_grpc.DecodeServiceServicer, admin_grpc.AdminServiceServicer):
    role: str = "decode"
    script: list[Step] = field(default_factory=list)
    requests: list[decode.GenerateRequest] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(self, request: decode.GenerateRequest, context: Any) -> AsyncIterator[Any]:  # noqa: N802  the protocol's name
        self.requests.append(request)
        self.times.append(time.monotonic())
        self.deadlines.append(context.time_remaining())
        step = self.script.pop(0) if self.script else Step()
        if step.error is not None:
            await context.abort_with_status(status_of(step.error))
        self.live.add(request.request_id)
        try:
            async for response in self._responses(request, step, context):
                yield response
        finally:
            self.live.discard(request.request_id)
            self.ended.set()

    async def _responses(self, request: decode.GenerateRequest, step: Step, context: Any) -> AsyncIterator[Any]:
        seed = request.sampling.seed if request.sampling.HasField("seed") else SEED
        prompt = list(request.tokens.ids) or [0] * max(1, len(request.text))
        started = decode.GenerateStarted(request_id=request.request_id, seed=seed, prompt=types.TokenIds(ids=prompt))
        started.fingerprint.model, started.fingerprint.variant = step.model, step.variant
        yield decode.GenerateResponse(started=started)
        limit = request.stop.max_tokens if request.stop.HasField("max_tokens") else MAX_TOKENS
        absorbed = list(request.generated_token_ids.ids)
        samples = max(1, request.sampling.n)
        for new, position in enumerate(range(len(absorbed), limit)):
            if new == step.break_after:
                await context.abort(step.break_code, "the connection broke")
            if new == step.hang_after:
                self.reached.set()
                await asyncio.Event().wait()
            for sample in range(samples):
                ids = absorbed + [
                    token(len(prompt), seed + step.seed_offset, sample, p) for p in range(len(absorbed), position + 1)
                ]
                yield decode.GenerateResponse(delta=self._delta(request, step, sample, ids, is_last=len(ids) == limit))
        if step.break_before_end:
            await context.abort(step.break_code, "the connection broke")
        yield decode.GenerateResponse(
            finished=decode.GenerateFinished(
                usage=types.Usage(prompt_tokens=len(prompt), completion_tokens=limit * samples, cached_tokens=3),
                timings=decode.Timings(ttft_ms=12.5, tpot_ms=2.5, handoff_bytes=1000, prefill_attempts=1),
                speculation=decode.SpeculationStats(
                    steps=limit,
                    steps_with_drafts=2,
                    proposed=5,
                    accepted=3,
                    late=1,
                    salvaged=1,
                    gaps=1,
                    wait_ms=0.5,
                    verify_ms=2.5,
                    commit_ms=0.25,
                    steps_by_length=[0, 1, 1],
                    accepted_by_position=[2, 1, 0],
                    drafters=["127.0.0.1:9", "ngram"],
                    rested=7,
                ),
            )
        )

    def _delta(
        self, request: decode.GenerateRequest, step: Step, sample: int, ids: list[int], *, is_last: bool
    ) -> decode.GenerateDelta:
        pieces = list(step.answer) if step.answer is not None else [text([i]) for i in ids]
        new = pieces[max(0, len(ids) - 2) : len(ids) - 1] + (pieces[len(ids) - 1 :] if is_last else [])
        delta = decode.GenerateDelta(index=sample, token_ids=ids[-1:], text="" if request.skip_text else "".join(new))
        if is_last:
            delta.finish_reason = types.FINISH_REASON_LENGTH
        if request.HasField("logprobs"):
            entry = delta.logprobs.add()
            entry.chosen.token_id, entry.chosen.logprob = ids[-1], -0.5
            for rank in range(request.logprobs):
                entry.top.add(token_id=ids[-1] + rank, logprob=-0.5 - rank)
        return delta

    async def Abort(self, request: decode.AbortRequest, context: Any) -> decode.AbortResponse:  # noqa: N802  the protocol's name
        return decode.AbortResponse(was_live=request.request_id in self.live)

    async def GetModelInfo(self, request: Any, context: Any) -> admin.GetModelInfoResponse:  # noqa: N802  the protocol's name
        return admin.GetModelInfoResponse(
            role=self.role, version="1.2.3", model_name="fake", vocab_size=1000, max_context_tokens=64, device="none",
            stop_token_ids=[5, 6], fingerprint=types.Fingerprint(model="abc", variant="v"),
        )  # fmt: skip

    async def GetLoad(self, request: Any, context: Any) -> admin.GetLoadResponse:  # noqa: N802  the protocol's name
        return admin.GetLoadResponse(running=len(self.live), free_pages=7, total_pages=9, outcomes={"finished": 4})


@dataclass
class RunningFake:
    service: FakeDecode
    endpoint: str
    health: Any
    server: Any

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", "k3svc.v1.DecodeService"):
            await self.health.set(name, status)


@asynccontextmanager
async def running(
    *script: Step, port: int = 0, serving: bool = True, role: str = "decode"
) -> AsyncIterator[RunningFake]:
    """Another role has no Generate."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    service = FakeDecode(script=list(script), role=role)
    if role == "decode":
        decode_grpc.add_DecodeServiceServicer_to_server(service, server)
    admin_grpc.add_AdminServiceServicer_to_server(service, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    fake = RunningFake(service=service, endpoint=f"127.0.0.1:{bound}", health=health, server=server)
    await fake.set_serving(serving)
    try:
        yield fake
    finally:
        await server.stop(0)
