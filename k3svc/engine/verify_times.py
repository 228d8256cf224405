"""T(rows): how long decode steps take on this machine, measured before a service serves (speculation.md 2.4)."""

from collections.abc import Sequence

from k3svc.core.batch import DecodeBatch, DecodeRow, SampleSpec
from k3svc.core.request import SamplingParams
from k3svc.core.speculation import StepTimes, VerifyTimes
from k3svc.engine.runner import ModelRunner

CONTEXT_TOKENS = 256
"""What each sequence has in the caches."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
REPEATS = 3


async def measure_verify_times(
    runner: ModelRunner, *, page_size: int, num_proposals: int, max_batch: int
) -> VerifyTimes:
    """Of plain steps of up to max_batch rows, and of steps whose sequences have up to num_proposals drafts, which make
    features. The least of a few runs each, on the dummy slot and page; greedy rows.
    """
    plain, verify = {}, {}
    # A step of each kind is slow when it is the first, those without drafts while drafters listen too.
    await _shortest(runner, [0], page_size, with_features=True)
    for rows in ROWS:
        if rows <= max_batch:
            plain[rows] = await _shortest(runner, [0] * rows, page_size, with_features=False)
        if rows > 1:
            verify[rows] = await _shortest(runner, _split(rows, num_proposals + 1), page_size, with_features=True)
    # A step without drafts does less than one of as many rows with some.
    plain = {rows: min(seconds, verify.get(rows, seconds)) for rows, seconds in plain.items()}
    return VerifyTimes(plain=StepTimes(plain), verify=StepTimes(verify))


def _split(rows: int, most: int) -> list[int]:
    """Drafts of as few sequences as have so many rows."""
    whole, rest = divmod(rows, most)
    return [most - 1] * whole + ([rest - 1] if rest else [])


async def _shortest(runner: ModelRunner, drafts: Sequence[int], page_size: int, *, with_features: bool) -> float:
    batch = DecodeBatch(rows=[_row(count, page_size, index) for index, count in enumerate(drafts)])
    return min([await runner.time_step(batch, with_features=with_features) for _ in range(REPEATS)])


def _row(num_drafts: int, page_size: int, index: int) -> DecodeRow:
    last = CONTEXT_TOKENS + num_drafts
    spec = SampleSpec(params=SamplingParams(temperature=0.0), sample_index=0, position=CONTEXT_TOKENS + 1, counts=None)
    return DecodeRow(
        key=str(index),
        slot=0,
        block_table=[0] * (last // page_size + 1),
        token_id=0,
        position=CONTEXT_TOKENS,
        sample=spec,
        drafts=tuple(range(1, num_drafts + 1)),
    )
