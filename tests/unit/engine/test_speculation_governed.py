"""What speculation gives and costs on machines of measured speeds, on virtual time: text that drafts suit, text that
they do not, and both in turn.

How many drafts of a proposal are right is drawn by what DFlash was measured at on k3-nano, which is no geometric law:
of chat, more than half of the proposals are right to the end, and a fifth from the start not.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from k3svc.core.batch import DecodeBatch, StepOutput
from k3svc.core.events import Finished
from k3svc.core.governor import Governor
from k3svc.core.speculation import StepTimes, VerifyTimes
from k3svc.engine.ports import DraftCommit, DraftOpen, FeatureRows
from k3svc.testing.drafters import OracleDrafter, SlowDrafter
from k3svc.testing.fakes import FEATURE_BYTES, VOCAB, FakeRunner, expected_tokens
from k3svc.testing.virtual import run_virtual
from k3svc.text.tokenizer import Tokenizer

from .engines import NO_TEXT, request, world

GAMMA = 7
PROMPT = 30
OUTPUT = 128
RIGHT = {
    "chat": (0.82, 0.72, 0.67, 0.65, 0.64, 0.61, 0.57),
    "files": (0.61, 0.32, 0.20, 0.12, 0.07, 0.04, 0.01),
}
"""Chance that the first 1, 2, .. drafts are right."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds."""

    plain_1: float
    plain_16: float
    verify_8: float
    """A step with 8 rows, of which 7 are drafts; others in proportion, but for a third that any step takes."""
    features: float
    """What a plain step takes longer that gives drafters features at once."""
    reply: float

    @property
    def listening(self) -> float:
        """What a plain step takes longer whose features may wait."""
        return self.features / 5

    def plain(self, rows: int) -> float:
        return self.plain_1 + (self.plain_16 - self.plain_1) * (rows - 1) / 15

    def verify(self, rows: int) -> float:
        return self.verify_8 * (1 + 2 * rows / 8) / 3


MACHINES = {
    # A step of the services, client and all; in each the least favourable that was measured.
    "AVX-512": Machine(plain_1=0.0022, plain_16=0.0105, verify_8=0.0061, features=0.00025, reply=0.0035),
    "AVX2": Machine(plain_1=0.0045, plain_16=0.02, verify_8=0.009, features=0.0003, reply=0.0065),
}


class Texts(OracleDrafter):
    """Proposes for each text, whose kind its request's name tells, as it was measured. Whoever tells it of tokens has
    told it of their features.
    """

    told: dict[str, int]
    """Positions up to which there are features, by sample."""

    def push(self, rows: Sequence[FeatureRows]) -> None:
        super().push(rows)
        self.told |= {row.key: row.start + row.num_rows for row in rows}

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        self.told |= {commit.key: commit.base_len for commit in commits if commit.features is not None}
        for commit in commits:
            assert self.told[commit.key] >= commit.base_len, f"{commit.key}: no features of {commit.base_len - 1}"
            assert len(commit.tokens) <= GAMMA + 1, "a draft service takes no more features at once"
        super().commit(commits)

    def draft(self, opened: DraftOpen, known: Sequence[int], count: int) -> Sequence[int]:
        tokens = list(self._truth(opened)[len(known) : len(known) + count])
        drawn = random.Random(f"{opened.key} {len(known)}").random()
        num_right = sum(drawn < chance for chance in RIGHT[opened.key.split()[0]])
        return [*tokens[:num_right], *((token + 1) % VOCAB for token in tokens[num_right:])]


def drafter(machine: Machine) -> SlowDrafter:
    def truth(opened: DraftOpen) -> Sequence[int]:
        prompt = opened.known[:PROMPT]
        return [*prompt, *expected_tokens(prompt, OUTPUT, seed=opened.params.seed, index=opened.sample_index)]

    texts = Texts(truth, vocab_size=VOCAB, num_proposals=GAMMA, feature_width=FEATURE_BYTES)
    texts.told = {}
    return SlowDrafter(texts, delay_s=machine.reply)


def keep_time(runner: FakeRunner, machine: Machine, rng: random.Random) -> None:
    """Steps take what they would on the machine, more or less."""
    decode = runner.decode

    async def timed(
        batch: DecodeBatch,
        on_features: Callable[[memoryview], None] | None = None,
        *,
        features_may_wait: bool = False,
    ) -> StepOutput:
        num_rows, num_tokens = max(1, len(batch.rows)), batch.num_tokens
        step_s = machine.verify(num_tokens) if num_tokens > num_rows else machine.plain(num_rows)
        if on_features is not None and num_tokens <= num_rows:
            step_s += machine.listening if features_may_wait else machine.features
        step_s *= rng.uniform(0.85, 1.15)
        runner.step_s = lambda: step_s
        return await decode(batch, on_features, features_may_wait=features_may_wait)

    runner.decode = timed  # type: ignore[method-assign]


def gains(tokenizer: Tokenizer, name: str, kinds: Sequence[str], *, streams: int = 1, seed: int = 0) -> list[float]:
    """How many times as fast as plain steps each text was, one after the other, or the first `streams` at once."""
    machine = MACHINES[name]
    # A start-up measures steps that follow each other and whose memory is warm.
    times = VerifyTimes(
        plain=StepTimes({rows: 0.7 * machine.plain(rows) for rows in (1, 2, 4, 8, 16)}),
        verify=StepTimes({rows: 0.6 * machine.verify(rows) for rows in (2, 4, 8, 16, 32, 64)}),
    )
    out: list[float] = []

    async def scenario() -> None:
        options = {"num_slots": 16, "max_batch": 16, "num_pages": 256}
        async with world(
            tokenizer,
            drafter=drafter(machine),
            governor=Governor(),
            times=times,
            **options,  # type: ignore[arg-type]
        ) as here:
            keep_time(here.runner, machine, random.Random(seed))
            loop = asyncio.get_running_loop()

            async def one(index: int, kind: str) -> float:
                begun = 0.0
                async for event in here.decode.submit(request(f"{kind} {seed} {index}", PROMPT, OUTPUT), NO_TEXT):
                    if isinstance(event, Finished):
                        break
                    begun = begun or loop.time()
                return (OUTPUT - 1) * machine.plain(streams) / (loop.time() - begun)

            for first in range(0, len(kinds), streams):
                part = list(enumerate(kinds))[first : first + streams]
                out.extend(await asyncio.gather(*(one(index, kind) for index, kind in part)))

    run_virtual(scenario())
    return out


def mean(values: Sequence[float]) -> float:
    """Of speeds."""
    return len(values) / sum(1 / value for value in values)


@pytest.mark.parametrize(("machine", "least"), [("AVX-512", 1.15), ("AVX2", 1.5)])
def test_chat_is_faster_from_the_first_text_on(tokenizer: Tokenizer, machine: str, least: float) -> None:
    found = gains(tokenizer, machine, ["chat"] * 8)
    assert mean(found) > least and mean(found[:3]) > 1.1


@pytest.mark.parametrize("machine", MACHINES)
def test_text_that_drafts_do_not_suit_costs_its_share(tokenizer: Tokenizer, machine: str) -> None:
    found = gains(tokenizer, machine, ["files"] * 8)
    share = Governor.SHARE + MACHINES[machine].listening / MACHINES[machine].plain_1
    assert mean(found[1:]) > 1 - share - 0.01
    assert found[0] > 1 - share - (Governor.MOST_CREDIT + Governor.TRUST) / OUTPUT, "what a start may cost"


@pytest.mark.parametrize("machine", MACHINES)
def test_chat_is_faster_as_soon_as_it_comes_after_other_text(tokenizer: Tokenizer, machine: str) -> None:
    found = gains(tokenizer, machine, ["files", "files", "files", "chat", "chat", "chat", "files", "files"])
    assert mean(found[3:6]) > 1.1
    assert mean(found[6:]) > 1 - Governor.SHARE - Governor.MOST_CREDIT / OUTPUT


@pytest.mark.parametrize("machine", MACHINES)
def test_sixteen_streams_are_not_slower_than_without(tokenizer: Tokenizer, machine: str) -> None:
    assert mean(gains(tokenizer, machine, ["files", "chat"] * 16, streams=16)) > 0.95
