"""Hostile messages to a draft service and from one: InvalidRequest is all that comes of it, and nothing stays held."""

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3svc.engine.draft import DraftEngine
from k3svc.engine.draft_runner import Answer, CopyRows, DraftResult, DraftWork, WriteRows
from k3svc.errors import InvalidRequest, K3svcError
from k3svc.rpc import draft_codec
from k3svc.testing.virtual import VirtualLoop
from k3svc.v1 import draft_service_pb2 as pb
from tests.unit.engine.draft_fakes import GAMMA, PROFILE, ROW_BYTES, VOCAB, WINDOW, context_start, new_engine

SHORT = settings(max_examples=60, suppress_health_check=list(HealthCheck))
SLOTS = 1 + 4 + 3

HANDLES = st.one_of(st.integers(1, 3), st.integers(0, 2**32 - 1))
ATTEMPTS = st.one_of(st.integers(1, 3), st.integers(0, 2**32 - 1))
POSITIONS = st.one_of(st.integers(0, 60), st.integers(0, 2**64 - 1), st.sampled_from([2**31 - 1, 2**31, 2**63]))
TOKENS = st.one_of(st.integers(0, VOCAB - 1), st.integers(0, 2**32 - 1))
WANTS = st.one_of(st.integers(0, GAMMA), st.integers(0, 2**32 - 1))
FLOATS = st.one_of(st.floats(0, 1, width=32), st.floats(width=32))


class CheckingRunner:
    """Checks what no peer may be able to break: slots, the rows of one piece of work, and what is asked for."""

    def __init__(self, answers: list[tuple[int, ...]]) -> None:
        self._answers = answers

    async def run(self, work: DraftWork) -> DraftResult:
        await asyncio.sleep(0.001)
        written: set[tuple[int, int]] = set()
        for row in work.rows:
            if isinstance(row, CopyRows):
                assert 0 < row.source < SLOTS and 0 < row.target < SLOTS and 0 <= row.start < row.end
                assert row.end - row.start <= WINDOW
                continue
            assert isinstance(row, WriteRows)
            assert 0 < row.slot < SLOTS and 0 < row.num_rows and row.data.nbytes == row.num_rows * ROW_BYTES
            cells = {(row.slot, (row.start + i) % (WINDOW + GAMMA + 1)) for i in range(row.num_rows)}
            assert len(cells) == row.num_rows and not cells & written, "two rows of one step share a cell"
            written |= cells
        for ask in work.asks:
            assert 0 <= ask.start < ask.base_len < 2**31 and 0 <= ask.anchor < VOCAB
        made = [self._answers[i % len(self._answers)] if self._answers else () for i in range(len(work.asks))]
        return DraftResult(answers=[Answer(tokens=tokens, confidences=()) for tokens in made], compute_s=0.0)


def lists(*columns: st.SearchStrategy[Any]) -> st.SearchStrategy[list[list[Any]]]:
    """Columns of one length, most of the time."""
    rows = st.lists(st.tuples(*columns), max_size=4)
    whole = rows.map(lambda found: [list(column) for column in zip(*found, strict=True)] or [[] for _ in columns])
    return st.one_of(whole, whole, st.tuples(*(st.lists(column, max_size=2) for column in columns)).map(list))


@st.composite
def messages(draw: st.DrawFn) -> pb.SessionRequest:
    message = pb.SessionRequest(step=draw(st.integers(0, 2**64 - 1)), closes=draw(st.lists(HANDLES, max_size=2)))
    if draw(st.booleans()):
        tickets = st.sampled_from(["", "t", "x" * 200])
        columns = [HANDLES, ATTEMPTS, POSITIONS, TOKENS, WANTS, tickets, FLOATS, TOKENS, FLOATS, FLOATS]
        found = draw(lists(*columns, st.integers(0, 2**64 - 1), TOKENS, st.booleans()))
        names = [field.name for field in pb.DraftOpens.DESCRIPTOR.fields]
        message.opens.CopyFrom(pb.DraftOpens(**dict(zip(names, found, strict=True))))
    if draw(st.booleans()):
        handles, attempts, starts, counts = draw(lists(HANDLES, ATTEMPTS, POSITIONS, st.integers(0, GAMMA + 30)))
        size = draw(st.one_of(st.just(sum(counts) * ROW_BYTES), st.integers(0, 100)))
        message.features.CopyFrom(
            pb.DraftFeatures(handles=handles, attempts=attempts, starts=starts, counts=counts, payload=bytes(size))
        )
    if draw(st.booleans()):
        columns = [HANDLES, ATTEMPTS, POSITIONS, st.one_of(st.integers(1, GAMMA + 1), WANTS), TOKENS, WANTS]
        names = [field.name for field in pb.DraftCommits.DESCRIPTOR.fields]
        message.commits.CopyFrom(pb.DraftCommits(**dict(zip(names, draw(lists(*columns)), strict=True))))
    return message


pushes = st.tuples(POSITIONS, st.one_of(st.integers(0, 40).map(lambda rows: rows * ROW_BYTES), st.integers(0, 100)))
answers = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=GAMMA).map(tuple), max_size=3)


@SHORT
@given(st.lists(st.one_of(messages(), pushes), max_size=30), answers, st.booleans())
def test_sessions(events: list[Any], made: list[tuple[int, ...]], waits: bool) -> None:
    async def scenario() -> None:
        engine: DraftEngine = new_engine(CheckingRunner(made))  # type: ignore[arg-type]
        running = asyncio.create_task(engine.run())
        session = engine.connect(PROFILE)
        push, adding = engine.push_context(context_start(40)), set()
        for event in events:
            try:
                if isinstance(event, tuple):
                    task = asyncio.ensure_future(push.add(event[0], memoryview(bytes(event[1]))))
                    task.add_done_callback(lambda done: done.exception())
                    adding.add(task)
                else:
                    session.apply(draft_codec.step_from_pb(event, memoryview(event.features.payload), ROW_BYTES))
            except InvalidRequest:
                session.close()
                session = engine.connect(PROFILE)
            engine.check()
            if waits:
                await asyncio.sleep(0.0015)
        await asyncio.sleep(0.01)
        session.touch()
        told = await anext(session)
        assert all(proposal.tokens for proposal in told.proposals)
        engine.drain()
        await running
        for task in adding:
            assert isinstance(task.exception(), K3svcError | None)
        engine.check()
        assert engine.load().free_slots == engine.load().total_slots

    VirtualLoop().run(scenario())


@SHORT
@given(st.binary(max_size=300))
def test_answers(data: bytes) -> None:
    message = pb.SessionResponse()
    try:
        message.ParseFromString(data)
    except Exception:  # noqa: BLE001  protobuf's own; what it refuses never comes to us
        return
    try:
        draft_codec.answer_from_pb(message)
    except InvalidRequest:
        return


TARGETS = {"draft_sessions": test_sessions, "draft_answers": test_answers}
