"""What `benchmarks.cpu` measures side by side, and those of its peers that are made of torch."""

import copy
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.cpu_models import Session

STEPS = 16
ENOUGH_S = 0.4
"""Decode steps of a measurement end after STEPS of them, or after this time."""
PROMPT = 128
CLOSE = 0.05
"""Wide enough for a choice between two experts that score alike within rounding."""
PARTS = ("prompts", "batches", "decode")


class Peer(Protocol):
    """Tokens/s of the work that all peers do."""

    @property
    def parts(self) -> Sequence[str]:
        """Those of PARTS that it can do."""
        ...

    def prompts(self, lengths: list[int]) -> dict[int, float]:
        """Of one prompt of each length."""
        ...

    def batch_prompts(self, tokens: int, batches: list[int]) -> dict[int, float]:
        """Of as many prompts of this length at once."""
        ...

    def decode(self, context: int, batches: list[int]) -> dict[int, float]:
        """Of decode steps of each number of sequences behind as many tokens."""
        ...


class TorchPeer:
    """A model of this project on one of its backends."""

    def __init__(self, session: Session, parts: Sequence[str] = PARTS) -> None:
        self.parts = parts
        self._session = session

    def prompts(self, lengths: list[int]) -> dict[int, float]:
        """`Peer.prompts`."""
        return {tokens: tokens / seconds_of(partial(self._session.prompt, 1, tokens), 1) for tokens in lengths}

    def batch_prompts(self, tokens: int, batches: list[int]) -> dict[int, float]:
        """`Peer.batch_prompts`."""
        return {
            batch: batch * tokens / seconds_of(partial(self._session.prompt, batch, tokens), 1) for batch in batches
        }

    def decode(self, context: int, batches: list[int]) -> dict[int, float]:
        """`Peer.decode`, after one step to warm up."""
        rates = {}
        for batch in batches:
            self._session.decode(batch, context)
            rates[batch] = batch / seconds_of(partial(self._session.decode, batch, context), STEPS)
        return rates


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Wall seconds of one of at most `repeats` runs on end."""
    started = time.perf_counter()
    done, passed = 0, 0.0
    while done < repeats and passed < ENOUGH_S:
        work()
        done += 1
        passed = time.perf_counter() - started
    return passed / done


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the body after `seconds`."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compiled(
    session: Session, limit_s: float, prompts: Sequence[int], decodes: Sequence[tuple[int, int]]
) -> tuple[TorchPeer, dict[str, str]]:
    """The model of a session by torch.compile: prompts of these lengths and decode steps of (batch, context), each of
    which is compiled here and compared with the eager ones. Parts where that fails, or takes longer than limit_s, are
    left out; why, by part.
    """
    twin = copy.copy(session)
    twin.forward = torch.compile(session.model.forward)
    # Dynamo's guards refuse arrays of numpy in inference mode.
    twin.guard = torch.no_grad
    work: dict[str, list[Callable[[Session], Tensor]]] = {
        "decode": [partial(Session.decode, batch=batch, position=context) for batch, context in decodes],
        "prompts": [partial(Session.prompt, sequences=1, tokens=tokens) for tokens in prompts],
    }
    found = {part: _compile(cases, session, twin, limit_s) for part, cases in work.items()}
    reasons = {part: reason for part, reason in found.items() if reason is not None}
    return TorchPeer(twin, [part for part in work if part not in reasons]), reasons


def _compile(cases: list[Callable[[Session], Tensor]], session: Session, twin: Session, limit_s: float) -> str | None:
    """Runs the cases on the twin for the first time; what went wrong."""
    try:
        with time_limit(limit_s), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in cases:
                _compare(case, session, twin)
    except Exception as error:  # noqa: BLE001  dynamo and inductor raise what they like, and all of it is an answer
        # The first line of inductor's says no more than that it was inductor.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
        return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]
    return None


def _compare(case: Callable[[Session], Tensor], session: Session, twin: Session) -> None:
    """Runs a case on both from the same state. Raises ValueError when the logits are not about those of the session."""
    logits = []
    for each in (session, twin):
        session.prompt(1, PROMPT)
        logits.append(case(each)[:1])
    difference = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    if not difference <= CLOSE:
        raise ValueError(f"logits differ by {difference:.1e} of the largest")
