"""A draft model without tensors: a feature says which token it is of, and a proposal which tokens it was made from."""

import asyncio
import struct
import zlib
from collections.abc import Callable, Sequence

from k3svc.core.request import SamplingParams
from k3svc.engine.draft import DraftEngine
from k3svc.engine.draft_protocol import ContextStart, DraftProfile, SampleCommit, SampleFeatures, SampleOpen
from k3svc.engine.draft_runner import Answer, Ask, CopyRows, DraftResult, DraftWork, WriteRows
from k3svc.errors import EngineFault

VOCAB, GAMMA, WINDOW, ROW_BYTES = 1000, 4, 16, 16
PROFILE = DraftProfile(
    protocol=1,
    model="m",
    tokenizer="t",
    draft="d",
    target_layers=(1, 3),
    feature_width=4,
    feature_dtype="float32",
    num_proposals=GAMMA,
    anchor_predicts=True,
    mask_token_id=999,
    vocab_size=VOCAB,
    window=WINDOW,
)


def rows(tokens: Sequence[int], start: int) -> bytes:
    """The features of consecutive tokens."""
    return b"".join(struct.pack("<QQ", start + index, token) for index, token in enumerate(tokens))


def drafts(context: Sequence[int], anchor: int, count: int = GAMMA) -> tuple[int, ...]:
    """What is proposed from the tokens of a context and the anchor."""
    seed = zlib.crc32(repr((tuple(context), anchor)).encode())
    return tuple((seed + 7 * index) % (VOCAB - 1) for index in range(count))


class FakeDraftRunner:
    """Keeps rows by slot and cell as the real pool does, and finds out when a wrong one is read."""

    def __init__(self, *, work_s: float = 0.001, ahead: int = GAMMA + 1) -> None:
        self._capacity = WINDOW + ahead
        self._cells: dict[tuple[int, int], bytes] = {}
        self.work_s: float | Callable[[], float] = work_s
        self.fail_next = False
        self.asks: list[Ask] = []
        self.num_rows = 0

    async def run(self, work: DraftWork) -> DraftResult:
        await asyncio.sleep(self.work_s() if callable(self.work_s) else self.work_s)
        for row in work.rows:
            if isinstance(row, WriteRows):
                assert row.data.nbytes == row.num_rows * ROW_BYTES
                self.num_rows += row.num_rows
                for index in range(row.num_rows):
                    cell = (row.slot, (row.start + index) % self._capacity)
                    self._cells[cell] = bytes(row.data[index * ROW_BYTES : (index + 1) * ROW_BYTES])
            else:
                assert isinstance(row, CopyRows)
                for position in range(row.start, row.end):
                    place = position % self._capacity
                    self._cells[row.target, place] = self._cells[row.source, place]
        if self.fail_next:
            self.fail_next = False
            raise EngineFault("the step was made to fail")
        self.asks += work.asks
        return DraftResult(answers=[self._answer(ask) for ask in work.asks], compute_s=0.001)

    def _answer(self, ask: Ask) -> Answer:
        tokens = []
        for position in range(max(ask.start, ask.base_len - WINDOW), ask.base_len):
            stored, token = struct.unpack("<QQ", self._cells[ask.slot, position % self._capacity])
            assert stored == position, f"the row of position {stored} where that of {position} should be"
            tokens.append(token)
        made = drafts(tokens, ask.anchor)
        return Answer(tokens=made, confidences=(0.5,) * len(made))


def new_engine(runner: FakeDraftRunner | None = None, *, max_requests: int = 4, max_tickets: int = 3) -> DraftEngine:
    return DraftEngine(
        runner=runner or FakeDraftRunner(),
        profile=PROFILE,
        clock=asyncio.get_running_loop().time,
        max_requests=max_requests,
        max_tickets=max_tickets,
        context_rows=WINDOW,
        lease_s=60.0,
        ticket_lease_s=30.0,
    )


def opening(
    known: Sequence[int], *, handle: int = 1, attempt: int = 1, ticket: str = "", want: int = GAMMA
) -> SampleOpen:
    return SampleOpen(
        handle=handle,
        attempt=attempt,
        base_len=len(known) - 1,
        anchor=known[-1],
        want=want,
        ticket=ticket,
        params=SamplingParams(temperature=0.0),
        sample_index=0,
        with_probs=False,
    )


def features(tokens: Sequence[int], start: int, *, handle: int = 1, attempt: int = 1) -> SampleFeatures:
    """Of tokens that stand at `start` and after."""
    data = memoryview(rows(tokens, start))
    return SampleFeatures(handle=handle, attempt=attempt, start=start, num_rows=len(tokens), data=data)


def commit(known: Sequence[int], count: int, *, handle: int = 1, attempt: int = 1, want: int = GAMMA) -> SampleCommit:
    """A step added the last `count` of the known tokens."""
    return SampleCommit(
        handle=handle, attempt=attempt, base_len=len(known) - 1, count=count, anchor=known[-1], want=want
    )


def context_start(num_tokens: int, *, ticket: str = "t", attempt: int = 1) -> ContextStart:
    return ContextStart(profile=PROFILE, ticket=ticket, attempt=attempt, num_tokens=num_tokens)
