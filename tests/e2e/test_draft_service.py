"""The draft service over real sockets: RemoteDrafter and ContextPusher against a DraftEngine on a fake runner."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from k3svc.config import AuthSection, ServerSection
from k3svc.core.request import SamplingParams
from k3svc.engine.draft import DraftEngine
from k3svc.engine.draft_protocol import DraftProfile, SampleOpen, SessionStep
from k3svc.engine.ports import DraftCommit, DraftOpen, DraftProposal, FeatureRows, Fingerprint
from k3svc.rpc import draft_codec, draft_session
from k3svc.rpc.admin import RoleInfo
from k3svc.rpc.credentials import CallerCredentials
from k3svc.rpc.draft_client import RemoteDrafter
from k3svc.rpc.draft_push import ContextPusher
from k3svc.rpc.local_stream import LocalListener, LocalStream
from k3svc.rpc.process import hold_port
from k3svc.rpc.server import Role, RoleServer, metrics_of
from k3svc.v1 import draft_service_pb2 as pb
from k3svc.v1 import draft_service_pb2_grpc
from services.draft.service import SERVICE, DraftServicer
from tests.unit.engine.draft_fakes import (
    GAMMA,
    PROFILE,
    ROW_BYTES,
    VOCAB,
    WINDOW,
    FakeDraftRunner,
    drafts,
    new_engine,
    rows,
)

TRUTH = [(31 * i + i * i) % 900 for i in range(4000)]
PROMPT_LEN = 40
INFO = RoleInfo(
    role="draft",
    fingerprint=Fingerprint(protocol=1, model="m", tokenizer="t", wire_layout="", variant="f"),
    model_name="fake",
    vocab_size=VOCAB,
    max_context_tokens=4096,
    device="none",
    stop_token_ids=(),
    pool_bytes=0,
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds makes no service silent."""
    monkeypatch.setattr(draft_session, "SILENCE_S", 60.0)
    monkeypatch.setattr(draft_session, "DEAD_S", 60.0)


@dataclass(kw_only=True)
class Served:
    address: str
    engine: DraftEngine
    runner: FakeDraftRunner
    server: RoleServer

    async def stop(self) -> None:
        self.server.request_drain()
        assert await self.server.run_until_stopped() == 0
        self.engine.check()


async def start(
    *, port: int = 0, max_message_bytes: int = 1 << 20, max_requests: int = 4, auth: AuthSection | None = None
) -> Served:
    runner = FakeDraftRunner(work_s=0.0)
    engine = new_engine(runner, max_requests=max_requests)
    servicer = DraftServicer(engine, max_message_bytes=max_message_bytes, uses_shm=True)
    role = Role(info=INFO, engine=engine, metrics=metrics_of(engine), services={SERVICE: servicer.register})
    server = RoleServer(role, ServerSection(port=port), auth=auth)
    return Served(address=await server.start(), engine=engine, runner=runner, server=server)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Served]:
    served = await start(**options)
    try:
        yield served
    finally:
        await served.stop()


@asynccontextmanager
async def following(
    address: str,
    *,
    profile: DraftProfile = PROFILE,
    uses_shm: bool = False,
    history_bytes: int = 1 << 20,
    credentials: CallerCredentials | None = None,
) -> AsyncIterator[RemoteDrafter]:
    drafter = RemoteDrafter(
        address,
        profile=profile,
        window=WINDOW,
        history_bytes=history_bytes,
        max_message_bytes=1 << 20,
        uses_shm=uses_shm,
        credentials=credentials,
        seed=0,
    )
    drafter.start()
    try:
        yield drafter
    finally:
        await drafter.stop()


async def until(is_so: Callable[[], bool]) -> None:
    """The test's timeout ends it otherwise."""
    while not is_so():
        await asyncio.sleep(0.005)


class Walk:
    """A sample that decodes TRUTH, with blocks of which some drafts are right."""

    def __init__(self, drafter: RemoteDrafter, *, key: str = "r#0", ticket: str = "", length: int = PROMPT_LEN) -> None:
        self.drafter, self.key, self.attempt = drafter, key, 1
        self.known = length + 1
        self.open(ticket)

    def open(self, ticket: str = "") -> None:
        self.drafter.open(
            [
                DraftOpen(
                    key=self.key,
                    attempt=self.attempt,
                    known=TRUTH[: self.known],
                    params=SamplingParams(temperature=0.0, seed=1 << 63),
                    sample_index=0,
                    ticket=ticket,
                )
            ]
        )

    async def step(self, accepted: int) -> DraftProposal | None:
        """The proposal that a step was answered with, None where there is none in time."""
        base = self.known - 1
        block = [*TRUTH[base : base + 1 + accepted], *[899] * (GAMMA - accepted)]
        data = bytearray(rows(block, base))
        view = memoryview(data)
        self.drafter.push([FeatureRows(key=self.key, attempt=self.attempt, start=base, num_rows=len(block), data=view)])
        # The data is valid during the call only.
        data[:] = bytes(len(data))
        self.known += accepted + 1
        tokens = TRUTH[base + 1 : self.known]
        self.drafter.commit(
            [DraftCommit(key=self.key, attempt=self.attempt, base_len=self.known - 1, tokens=tokens, want=GAMMA)]
        )
        await self.drafter.wait(60.0)
        made = self.drafter.proposal(self.key)
        return made if made is not None and made.base_len == self.known - 1 else None

    def tell(self, count: int) -> None:
        """Of so many plain steps at once, whose features come along."""
        base = self.known - 1
        data = bytearray(rows(TRUTH[base : base + count], base))
        self.known += count
        self.drafter.commit(
            [
                DraftCommit(
                    key=self.key,
                    attempt=self.attempt,
                    base_len=self.known - 1,
                    tokens=TRUTH[base + 1 : self.known],
                    want=0,
                    features=memoryview(data),
                )
            ]
        )
        data[:] = bytes(len(data))

    def expected(self, start: int) -> tuple[int, ...]:
        """Proposals from the context that begins at `start`."""
        base = self.known - 1
        return drafts(TRUTH[max(start, base - WINDOW) : base], TRUTH[base])


@pytest.mark.parametrize("uses_shm", [False, True])
async def test_features_may_come_with_the_commit(uses_shm: bool):
    async with serving() as served, following(served.address, uses_shm=uses_shm) as drafter:
        await until(lambda: drafter.num_proposals == GAMMA)
        walk = Walk(drafter)
        for count in (1, GAMMA + 1, 2, GAMMA + 1):
            walk.tell(count)
            made = await walk.step(1)
            assert made is not None and tuple(made.tokens) == walk.expected(PROMPT_LEN)
        assert (drafter.stats.gaps, drafter.stats.dropped) == (0, 0)


@pytest.mark.parametrize("uses_shm", [False, True])
async def test_proposals_are_made_from_the_committed_tokens(uses_shm: bool):
    async with serving() as served, following(served.address, uses_shm=uses_shm) as drafter:
        await until(lambda: drafter.num_proposals == GAMMA)
        walk = Walk(drafter)
        for number in range(60):
            made = await walk.step(number % (GAMMA + 1))
            assert made is not None
            assert tuple(made.tokens) == walk.expected(PROMPT_LEN)
            assert made.truncated == (walk.known - 1 - PROMPT_LEN < WINDOW)
        assert served.runner.num_rows >= 60
        assert len(drafter.stats.reply_s) >= 60
        assert (drafter.stats.gaps, drafter.stats.dropped, drafter.stats.invalid) == (0, 0, 0)
        assert sum(drafter.stats.context_steps.values()) == 1
        assert max(drafter.stats.context_steps) <= WINDOW
        drafter.close(["r#0"])
        await until(lambda: served.engine.load().running == 0)


async def test_prompt_features_reach_the_drafter_beside_decode_and_give_whole_contexts():
    async with serving() as served, following(served.address) as drafter:
        await until(lambda: drafter.num_proposals == GAMMA)
        outcomes: list[str] = []
        pusher = ContextPusher(
            served.address, profile=PROFILE, window=WINDOW, max_message_bytes=1 << 20, on_end=outcomes.append
        )
        stream = pusher.open(ticket="ticket", attempt=1, num_tokens=PROMPT_LEN)
        stream.push(24, memoryview(rows(TRUTH[24:30], 24)))
        await until(lambda: served.runner.num_rows == 6)
        walk = Walk(drafter, ticket="ticket")
        assert await walk.step(1) is None
        stream.push(30, memoryview(rows(TRUTH[30:PROMPT_LEN], 30)))
        stream.close()
        await until(lambda: outcomes == ["pushed"])
        for _ in range(8):
            made = await walk.step(1)
            assert made is not None
            assert (tuple(made.tokens), made.truncated) == (walk.expected(0), False)
        assert drafter.stats.context_steps.total() == 1
        assert max(drafter.stats.context_steps) <= 2
        await pusher.stop()


async def test_a_service_that_comes_back_is_given_the_history():
    async with following("127.0.0.1:1") as idle:
        assert (idle.num_proposals, await idle.wait(60.0)) == (0, True)
    held = hold_port("127.0.0.1", 0)
    port = held.getsockname()[1]
    served = await start(port=port)
    async with following(served.address) as drafter:
        await until(lambda: drafter.num_proposals > 0)
        walk = Walk(drafter)
        for _ in range(10):
            assert await walk.step(2) is not None
        await served.stop()
        await until(lambda: drafter.num_proposals == 0)
        for _ in range(5):
            assert await walk.step(2) is None
        served = await start(port=port)
        try:
            await until(lambda: drafter.num_proposals > 0)
            for _ in range(3):
                made = await walk.step(2)
                assert made is not None
                assert (tuple(made.tokens), made.truncated) == (walk.expected(0), False)
            assert (drafter.stats.connects, drafter.stats.reopened) == (2, 1)
        finally:
            await served.stop()
            held.close()


async def test_a_history_too_large_for_a_message_comes_in_parts_and_without_one_the_context_grows_anew():
    limit = draft_session.MESSAGE_MARGIN + 5 * ROW_BYTES
    for history_bytes in (1 << 20, 0):
        held = hold_port("127.0.0.1", 0)
        port = held.getsockname()[1]
        served = await start(port=port, max_message_bytes=limit)
        async with following(served.address, history_bytes=history_bytes) as drafter:
            await until(lambda drafter=drafter: drafter.num_proposals > 0)  # type: ignore[misc]
            walk = Walk(drafter)
            for _ in range(10):
                assert await walk.step(2) is not None
            await served.stop()
            await until(lambda drafter=drafter: drafter.num_proposals == 0)  # type: ignore[misc]
            served = await start(port=port, max_message_bytes=limit)
            try:
                await until(lambda drafter=drafter: drafter.num_proposals > 0)  # type: ignore[misc]
                await walk.step(2)
                began = walk.known - 1
                made = await walk.step(2)
                assert made is not None
                assert tuple(made.tokens) == walk.expected(0 if history_bytes else began)
                assert made.truncated == (history_bytes == 0)
            finally:
                await served.stop()
                held.close()


async def test_what_a_full_queue_drops_is_mended(monkeypatch: pytest.MonkeyPatch):
    async with serving() as served, following(served.address) as drafter:
        await until(lambda: drafter.num_proposals > 0)
        walk = Walk(drafter)
        for _ in range(10):
            await walk.step(2)
        monkeypatch.setattr(draft_session, "MAX_QUEUED", 0)
        for _ in range(3):
            assert await walk.step(2) is None
        assert drafter.stats.dropped == 6
        monkeypatch.undo()
        await walk.step(2)
        made = await walk.step(2)
        assert made is not None
        assert (tuple(made.tokens), made.truncated) == (walk.expected(0), False)
        assert drafter.stats.gaps >= 1


async def test_refused_samples_are_opened_again_when_there_is_room():
    async with serving(max_requests=1) as served, following(served.address) as drafter:
        await until(lambda: drafter.num_proposals > 0)
        first, second = Walk(drafter), Walk(drafter, key="r#1")
        for _ in range(4):
            assert await first.step(1) is not None
            assert await second.step(1) is None
        assert drafter.stats.refused == 1
        drafter.close(["r#0"])
        await until(lambda: drafter.credits == 1)
        for _ in range(16):
            made = await second.step(1)
        assert made is not None
        assert (tuple(made.tokens), made.truncated) == (second.expected(0), False)


@pytest.mark.parametrize(("name", "value"), [("draft", "another"), ("mask_token_id", 7), ("anchor_predicts", False)])
async def test_a_service_of_another_draft_is_refused_with_the_field(name: str, value: object):
    other = dataclasses.replace(PROFILE, **{name: value})  # type: ignore[arg-type]
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        stub = draft_service_pb2_grpc.DraftServiceStub(channel)
        call = stub.Session()
        hello = pb.DraftHello(profile=draft_codec.profile_to_pb(other))
        await call.write(pb.SessionRequest(hello=hello))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (caught.value.details() or "").startswith(f"{name}: got ")
        async with following(served.address, profile=other) as drafter:
            Walk(drafter)
            assert drafter.num_proposals == 0


async def read_all(call: Any) -> None:
    while (await call.read()) is not grpc.aio.EOF:
        pass


def hello() -> pb.SessionRequest:
    return pb.SessionRequest(hello=pb.DraftHello(profile=draft_codec.profile_to_pb(PROFILE)))


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("hello", hello()),
        ("opens.attempts", pb.SessionRequest(opens=pb.DraftOpens(handles=[1]))),
        ("features.payload", pb.SessionRequest(features=pb.DraftFeatures(payload=b"x"))),
        (
            "features.payload",
            pb.SessionRequest(
                features=pb.DraftFeatures(handles=[1], attempts=[1], starts=[0], counts=[1 << 31], payload=bytes(16))
            ),
        ),
        ("features.shm", pb.SessionRequest(features=pb.DraftFeatures(shm=pb.ShmPayload(size=1)))),
        ("commits.counts", pb.SessionRequest(commits=pb.DraftCommits(handles=[1], attempts=[1], base_lens=[5]))),
        ("closes", pb.SessionRequest(closes=range(5000))),
    ],
)
async def test_a_message_that_cannot_be_ends_its_session_alone(field: str, request_: pb.SessionRequest):
    async with serving() as served, following(served.address) as drafter:
        await until(lambda: drafter.num_proposals > 0)
        walk = Walk(drafter)
        await walk.step(1)
        async with grpc.aio.insecure_channel(served.address) as channel:
            call = draft_service_pb2_grpc.DraftServiceStub(channel).Session()
            await call.write(hello())
            assert (await call.read()).HasField("welcome")
            await call.write(request_)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(f"{field}: got ")
        assert await walk.step(1) is not None
        assert drafter.stats.connects == 1


async def greeted(call: Any) -> tuple[pb.DraftWelcome, LocalStream]:
    """A session whose messages go through a socket."""
    listener = LocalListener(1 << 20)
    request = hello()
    request.hello.socket_name, request.hello.socket_token = listener.name, listener.token
    await call.write(request)
    welcome = (await call.read()).welcome
    stream = await listener.accept()
    listener.close()
    return welcome, stream


@pytest.mark.parametrize("data", [pb.SessionRequest(closes=range(5000)).SerializeToString(), b"\xff"])
async def test_what_cannot_be_ends_a_session_through_a_socket_too(data: bytes):
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        call = draft_service_pb2_grpc.DraftServiceStub(channel).Session()
        welcome, stream = await greeted(call)
        assert welcome.uses_socket
        stream.send(pb.SessionRequest(ping=7).SerializeToString())
        assert pb.SessionResponse.FromString(await anext(stream)).pong == 7
        stream.send(data)
        assert [answer async for answer in stream] == []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stream.close()


async def test_a_socket_that_breaks_ends_the_session_and_frees_its_samples():
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        call = draft_service_pb2_grpc.DraftServiceStub(channel).Session()
        _, stream = await greeted(call)
        opened = SampleOpen(
            handle=1,
            attempt=1,
            base_len=5,
            anchor=1,
            want=1,
            ticket="",
            params=SamplingParams(),
            sample_index=0,
            with_probs=False,
        )
        stream.send(draft_codec.step_to_pb(SessionStep(step=1, opens=[opened])).SerializeToString())
        await until(lambda: served.engine.load().running == 1)
        stream.close()
        await read_all(call)
        assert served.engine.load().running == 0


async def test_a_socket_that_is_not_there_leaves_the_messages_to_the_call():
    async with serving() as served, grpc.aio.insecure_channel(served.address) as channel:
        call = draft_service_pb2_grpc.DraftServiceStub(channel).Session()
        request = hello()
        request.hello.socket_name, request.hello.socket_token = f"k3svc-{'0' * 32}", bytes(16)
        await call.write(request)
        assert not (await call.read()).welcome.uses_socket
        await call.write(pb.SessionRequest(ping=7))
        assert (await call.read()).pong == 7
        call.cancel()


async def test_a_service_with_keys_serves_who_shows_one(tmp_path: Path):
    token = "a-token-of-at-least-16-characters"
    (tmp_path / "keys.toml").write_text(f'[decode]\ntoken = "{token}"\n')
    (tmp_path / "token").write_text(token)
    served = await start(auth=AuthSection(keys=str(tmp_path / "keys.toml")))
    outcomes: list[str] = []
    try:
        shows = CallerCredentials(token_file=tmp_path / "token")
        async with following(served.address) as stranger, following(served.address, credentials=shows) as drafter:
            await until(lambda: drafter.num_proposals > 0)
            assert await Walk(drafter).step(1) is not None
            assert stranger.num_proposals == 0
            for number, credentials in enumerate((None, shows), 1):
                pusher = ContextPusher(
                    served.address,
                    profile=PROFILE,
                    window=WINDOW,
                    max_message_bytes=1 << 20,
                    credentials=credentials,
                    on_end=outcomes.append,
                )
                stream = pusher.open(ticket="t", attempt=1, num_tokens=2)
                stream.push(0, memoryview(rows(TRUTH[:2], 0)))
                stream.close()
                await until(lambda number=number: len(outcomes) == number)  # type: ignore[misc]
                await pusher.stop()
    finally:
        await served.stop()
    assert outcomes == ["failed", "pushed"]


async def test_pushes_to_nobody_cost_nothing_and_are_counted():
    outcomes: list[str] = []
    pusher = ContextPusher(
        "127.0.0.1:1", profile=PROFILE, window=WINDOW, max_message_bytes=1 << 20, on_end=outcomes.append
    )
    stream = pusher.open(ticket="t", attempt=1, num_tokens=100)
    stream.push(0, memoryview(bytes(100 * ROW_BYTES)))
    stream.close()
    await until(lambda: outcomes == ["failed"])
    later = pusher.open(ticket="u", attempt=1, num_tokens=100)
    later.push(0, memoryview(bytes(ROW_BYTES)))
    later.close()
    assert (outcomes, pusher.queued_bytes) == (["failed", "dropped"], 0)
    await pusher.stop()
