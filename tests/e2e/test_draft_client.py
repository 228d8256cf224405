"""RemoteDrafter against draft services that lie, fall silent or break off: it never raises, blocks or believes them."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from k3svc.core.request import SamplingParams
from k3svc.engine.draft_protocol import DraftProfile
from k3svc.engine.ports import DraftCommit, DraftOpen, FeatureRows
from k3svc.rpc import draft_client, draft_codec, draft_session, local_stream
from k3svc.rpc.draft_client import RemoteDrafter
from k3svc.rpc.local_stream import LocalStream
from k3svc.v1 import draft_service_pb2 as pb
from k3svc.v1 import draft_service_pb2_grpc
from tests.unit.engine.draft_fakes import GAMMA, PROFILE, ROW_BYTES, VOCAB, WINDOW

Answers = Callable[[pb.SessionRequest], Sequence[pb.SessionResponse]]
KNOWN = tuple(range(10))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds makes no service silent."""
    monkeypatch.setattr(draft_session, "SILENCE_S", 60.0)
    monkeypatch.setattr(draft_session, "DEAD_S", 60.0)


class StubService(draft_service_pb2_grpc.DraftServiceServicer):
    """Welcomes, and answers each message with what `answers` makes of it; None: ends the session."""

    def __init__(self, answers: Answers | None, *, profile: DraftProfile = PROFILE) -> None:
        self._answers, self._profile = answers, profile
        self.requests: list[pb.SessionRequest] = []
        self.num_sessions = 0

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        self.num_sessions += 1
        await anext(requests)
        profile = draft_codec.profile_to_pb(self._profile)
        yield pb.SessionResponse(
            welcome=pb.DraftWelcome(profile=profile, max_requests=4, context_rows=WINDOW, max_message_bytes=1 << 20)
        )
        if self._answers is None:
            return
        async for request in requests:
            self.requests.append(request)
            for answer in self._answers(request):
                yield answer


class HungService(draft_service_pb2_grpc.DraftServiceServicer):
    """Welcomes through a socket, stands still from then on, and keeps the socket when the call has ended."""

    def __init__(self) -> None:
        self.streams: list[LocalStream] = []

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        hello = (await anext(requests)).hello
        stream = await local_stream.connect(hello.socket_name, hello.socket_token, 1 << 20)
        assert stream is not None
        self.streams.append(stream)
        welcome = pb.DraftWelcome(profile=draft_codec.profile_to_pb(PROFILE), max_requests=4, uses_socket=True)
        yield pb.SessionResponse(welcome=welcome)
        await asyncio.Event().wait()


@asynccontextmanager
async def following(
    service: draft_service_pb2_grpc.DraftServiceServicer, *, profile: DraftProfile = PROFILE, uses_shm: bool = False
) -> AsyncIterator[RemoteDrafter]:
    server = grpc.aio.server()
    draft_service_pb2_grpc.add_DraftServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    drafter = RemoteDrafter(
        f"127.0.0.1:{port}",
        profile=profile,
        window=WINDOW,
        history_bytes=1 << 20,
        max_message_bytes=1 << 20,
        uses_shm=uses_shm,
        seed=1,
    )
    drafter.start()
    try:
        yield drafter
    finally:
        await drafter.stop()
        await server.stop(0)


async def until(is_so: Callable[[], bool]) -> None:
    """The test's timeout ends it otherwise."""
    while not is_so():
        await asyncio.sleep(0.005)


def follow(drafter: RemoteDrafter, *, with_probs: bool = False) -> None:
    params = SamplingParams(temperature=0.7, seed=5)
    drafter.open(
        [
            DraftOpen(
                key="r#0",
                attempt=3,
                known=KNOWN,
                params=params,
                sample_index=2,
                ticket="ticket",
                with_probs=with_probs,
            )
        ]
    )


def proposals(**changes: Any) -> pb.DraftProposals:
    """For the sample that `follow` opens; one token."""
    values: dict[str, Any] = {
        "handles": [1],
        "attempts": [1],
        "base_lens": [9],
        "counts": [1],
        "tokens": [5],
        "confidences": [0.5],
        "truncated": [False],
    }
    return pb.DraftProposals(**(values | changes))


def saying(**changes: Any) -> Answers:
    return lambda request: [pb.SessionResponse(step=request.step, proposals=proposals(**changes), credits=4)]


async def test_an_honest_answer_is_taken_and_a_sample_is_described_in_full():
    service = StubService(saying(truncated=[True]))
    async with following(service) as drafter:
        await until(lambda: drafter.num_proposals == GAMMA)
        follow(drafter)
        assert await drafter.wait(60.0)
        made = drafter.proposal("r#0")
        assert made is not None
        assert (made.key, made.attempt, made.base_len) == ("r#0", 3, 9)
        assert (tuple(made.tokens), tuple(made.confidences), made.truncated) == ((5,), (0.5,), True)
        opens = service.requests[0].opens
        assert (list(opens.base_lens), list(opens.anchors), list(opens.tickets)) == ([9], [9], ["ticket"])
        assert (list(opens.seeds), list(opens.sample_indices), list(opens.with_probs)) == ([5], [2], [False])
        assert list(opens.temperatures) == pytest.approx([0.7])
        drafter.close(["r#0", "unknown"])
        await until(lambda: list(service.requests[-1].closes) == [1])
        assert drafter.proposal("r#0") is None


@pytest.mark.parametrize(
    "lie",
    [
        {"handles": [2]},
        {"attempts": [2]},
        {"attempts": [0]},
        {"tokens": [VOCAB]},
        {"tokens": [(1 << 32) - 1]},
        {"tokens": [PROFILE.mask_token_id]},
        {"counts": [0], "tokens": [], "confidences": []},
        {"counts": [GAMMA + 1], "tokens": [5] * (GAMMA + 1), "confidences": [0.5] * (GAMMA + 1)},
        {"probs": [bytes(7)]},
    ],
)
async def test_a_lie_is_no_proposal(lie: dict[str, Any]):
    async with following(StubService(saying(**lie))) as drafter:
        await until(lambda: drafter.num_proposals == GAMMA)
        follow(drafter)
        assert await drafter.wait(60.0)
        assert drafter.proposal("r#0") is None
        assert drafter.num_proposals == GAMMA


@pytest.mark.parametrize("chance", [float("nan"), float("inf"), -0.1, 1.5])
async def test_chances_that_are_none_are_left_out(chance: float):
    async with following(StubService(saying(confidences=[chance]))) as drafter:
        await until(lambda: drafter.num_proposals == GAMMA)
        follow(drafter)
        assert await drafter.wait(60.0)
        made = drafter.proposal("r#0")
        assert made is not None
        assert (tuple(made.tokens), tuple(made.confidences)) == ((5,), ())


async def test_laws_come_one_a_token():
    laws = bytes(range(256)) * (2 * 4 * VOCAB // 256 + 1)
    laws = laws[: 2 * 4 * VOCAB]
    answers = saying(counts=[2], tokens=[5, 6], confidences=[], probs=[laws])
    async with following(StubService(answers)) as drafter:
        await until(lambda: drafter.num_proposals == GAMMA)
        follow(drafter, with_probs=True)
        assert await drafter.wait(60.0)
        made = drafter.proposal("r#0")
        assert made is not None
        assert b"".join(made.probs) == laws
        assert [len(law) for law in made.probs] == [4 * VOCAB] * 2


@pytest.mark.parametrize(
    "broken",
    [
        {"attempts": []},
        {"counts": [5]},
        {"counts": [(1 << 32) - 1]},
        {"confidences": [0.5, 0.5]},
        {"truncated": []},
        {"probs": [b"", b""]},
    ],
)
async def test_a_message_that_does_not_fit_together_ends_the_session(broken: dict[str, Any]):
    service = StubService(saying(**broken))
    async with following(service) as drafter:
        await until(lambda: drafter.num_proposals == GAMMA)
        follow(drafter)
        await until(lambda: service.num_sessions >= 2)
        assert await drafter.wait(60.0)
        assert drafter.proposal("r#0") is None


async def test_gaps_and_refusals_of_nobody_mean_nothing():
    def answers(request: pb.SessionRequest) -> Sequence[pb.SessionResponse]:
        gaps = pb.DraftGaps(handles=[1, 1, 77], attempts=[1, 9, 1], starts=[0, 0, 1 << 60])
        return [pb.SessionResponse(step=1 << 40, gaps=gaps, refused=[77, 78], credits=1 << 31)]

    async with following(StubService(answers)) as drafter:
        await until(lambda: drafter.num_proposals == GAMMA)
        follow(drafter)
        assert await drafter.wait(60.0)
        assert (drafter.stats.gaps, drafter.stats.refused) == (3, 0)


async def test_silence_means_down_and_a_sign_of_life_means_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_session, "SILENCE_S", 0.3)
    monkeypatch.setattr(draft_session, "PING_S", 0.05)
    answers_pings = True

    def answers(request: pb.SessionRequest) -> Sequence[pb.SessionResponse]:
        return [pb.SessionResponse(pong=request.ping)] if answers_pings else []

    service = StubService(answers)
    async with following(service) as drafter:
        await until(lambda: drafter.num_proposals == GAMMA)
        await until(lambda: len(service.requests) >= 10)
        await until(lambda: drafter.num_proposals == GAMMA)
        answers_pings = False
        await until(lambda: drafter.num_proposals == 0)
        # Nobody is waited for, though the wish is open.
        follow(drafter)
        assert await drafter.wait(60.0)
        assert service.num_sessions == 1
        monkeypatch.setattr(draft_session, "DEAD_S", 0.1)
        await until(lambda: service.num_sessions >= 2)


async def test_silence_behind_a_socket_ends_a_session_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_session, "DEAD_S", 0.1)
    monkeypatch.setattr(draft_session, "PING_S", 0.05)
    service = HungService()
    async with following(service, uses_shm=True) as drafter:
        await until(lambda: len(service.streams) >= 3)
        # Pings at most: whoever gave up closed its end.
        first = [message async for message in service.streams[0]]
        assert all(pb.SessionRequest.FromString(message).ping for message in first)
        assert drafter.stats.connects >= 2
    for stream in service.streams:
        stream.close()


async def test_a_service_of_another_draft_is_never_used_but_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_client, "INCOMPATIBLE_BACKOFF_S", 0.01)
    service = StubService(saying(), profile=dataclasses.replace(PROFILE, draft="another"))
    async with following(service) as drafter:
        follow(drafter)
        await until(lambda: service.num_sessions >= 3)
        assert (drafter.num_proposals, drafter.stats.connects, service.requests) == (0, 0, [])


async def test_calls_without_a_service_cost_nothing():
    drafter = RemoteDrafter(
        "127.0.0.1:1",
        profile=PROFILE,
        window=WINDOW,
        history_bytes=1 << 20,
        max_message_bytes=1 << 20,
        uses_shm=True,
    )
    follow(drafter)
    rows = FeatureRows(key="r#0", attempt=3, start=9, num_rows=2, data=memoryview(bytes(2 * ROW_BYTES)))
    drafter.push([rows, dataclasses.replace(rows, key="unknown")])
    commit = DraftCommit(key="r#0", attempt=3, base_len=11, tokens=(1, 2), want=4)
    drafter.commit([commit, dataclasses.replace(commit, key="unknown"), dataclasses.replace(commit, attempt=9)])
    assert (drafter.num_proposals, drafter.proposal("r#0"), await drafter.wait(60.0)) == (0, None, True)
    drafter.close(["r#0", "unknown"])
    await drafter.stop()
