"""The decode engine with drafters of every kind, on virtual time: whatever they do, the tokens are those of plain
decode.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from k3svc.core.events import Delta, Finished, SpeculationStats
from k3svc.core.governor import Governor
from k3svc.core.request import GenerateRequest, StopParams
from k3svc.core.speculation import StepTimes, VerifyTimes
from k3svc.engine.ngram import NgramDrafter
from k3svc.engine.ports import Drafter, DraftOpen
from k3svc.engine.stream import TokenStream
from k3svc.errors import Cancelled, EngineFault
from k3svc.testing.drafters import (
    DeadDrafter,
    FlakyDrafter,
    LiarDrafter,
    OracleDrafter,
    RandomDrafter,
    RepeatLastDrafter,
    SlowDrafter,
    StaleDrafter,
)
from k3svc.testing.fakes import FEATURE_BYTES, VOCAB, expected_tokens
from k3svc.testing.virtual import run_virtual
from k3svc.text.tokenizer import Tokenizer

from .engines import NO_TEXT, World, collect, request, want, world

GAMMA = 4


def truth(opened: DraftOpen) -> Sequence[int]:
    """Prompt and 80 tokens of output; the first token, or more, is in `known`."""
    name = opened.key.split("#")[0]
    size = PROMPTS[name]
    prompt = opened.known[:size]
    return [*prompt, *expected_tokens(prompt, 80, seed=opened.params.seed, index=opened.sample_index)]


PROMPTS: dict[str, int] = {}


def asked(name: str, size: int, max_tokens: int = 8, **changes: object) -> GenerateRequest:
    PROMPTS[name] = size
    return request(name, size, max_tokens, **changes)


def oracle(epsilon: float = 0.0) -> OracleDrafter:
    return OracleDrafter(
        truth, epsilon=epsilon, vocab_size=VOCAB, num_proposals=GAMMA, feature_width=FEATURE_BYTES, seed=3
    )


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "oracle": oracle,
    "often wrong": lambda: oracle(0.4),
    "random": lambda: RandomDrafter(vocab_size=VOCAB, num_proposals=GAMMA),
    "repeat-last": lambda: RepeatLastDrafter(num_proposals=GAMMA),
    "ngram": lambda: NgramDrafter(num_proposals=GAMMA),
    "slow": lambda: SlowDrafter(oracle(0.1), delay_s=0.0015),
    "very slow": lambda: SlowDrafter(oracle(0.1), delay_s=0.02),
    "flaky": lambda: FlakyDrafter(oracle(0.1), seed=1),
    "liar": lambda: LiarDrafter(oracle(0.1), vocab_size=VOCAB, mask_token_id=VOCAB - 1),
    "stale": lambda: StaleDrafter(oracle()),
    "dead": lambda: DeadDrafter(oracle(), commits=5),
    "dead and nobody knows": lambda: DeadDrafter(oracle(), commits=5, is_known=False),
}


def run(
    tokenizer: Tokenizer,
    drafter: Callable[[], Drafter],
    scenario: Callable[[World, Drafter], Awaitable[None]],
    **options: object,
) -> None:
    async def main() -> None:
        made = drafter()
        async with world(tokenizer, drafter=made, **options) as here:  # type: ignore[arg-type]
            await scenario(here, made)
            assert here.speculator is not None and here.speculator.num_followed == 0

    run_virtual(main())


async def finish(world: World, req: GenerateRequest) -> tuple[list[int], SpeculationStats]:
    tokens: list[int] = []
    async for event in world.decode.submit(req, NO_TEXT):
        if isinstance(event, Finished):
            assert event.usage.completion_tokens == len(tokens)
            return tokens, event.speculation
        tokens += event.token_ids
    raise AssertionError("no end")


async def drain(stream: TokenStream, tokens: list[int]) -> None:
    async for event in stream:
        if isinstance(event, Delta):
            tokens += event.token_ids


@pytest.mark.parametrize("name", DRAFTERS)
def test_output_is_that_of_plain_decode(tokenizer: Tokenizer, name: str) -> None:
    async def scenario(here: World, _drafter: Drafter) -> None:
        rng = random.Random(name)
        requests = [
            asked(f"{name}{index}", rng.randint(1, 60), rng.randint(1, 40), n=rng.choice([1, 1, 1, 2]))
            for index in range(10)
        ]

        async def one(req: GenerateRequest) -> None:
            await asyncio.sleep(rng.random() * 0.3)
            count = req.stop.max_tokens or 0
            assert await collect(here.decode, req) == {i: want(req, count, i) for i in range(req.n)}
            here.check()

        await asyncio.gather(*(one(req) for req in requests))

    run(tokenizer, DRAFTERS[name], scenario)


@pytest.mark.parametrize("name", ["oracle", "often wrong", "slow", "flaky"])
def test_preemption_for_want_of_pages_changes_nothing(tokenizer: Tokenizer, name: str) -> None:
    async def scenario(here: World, drafter: Drafter) -> None:
        requests = [asked(f"p{index}", 20 + 7 * index, 60) for index in range(5)]
        got = await asyncio.gather(*(collect(here.decode, req) for req in requests))
        assert got == [{0: want(req, 60)} for req in requests]
        assert here.decode.load().preemptions > 0
        if isinstance(drafter, OracleDrafter):
            assert drafter.num_opens > len(requests), "a sample that comes back is opened again"

    run(tokenizer, DRAFTERS[name], scenario, num_pages=12)


def test_an_oracle_gives_its_drafts_and_one_more_each_step(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, drafter: Drafter) -> None:
        req = asked("o", 30, 41)
        tokens, stats = await finish(here, req)
        assert tokens == want(req, 41)
        # The first token comes with the hand-off, 40 in blocks of GAMMA + 1.
        assert (stats.steps, stats.steps_with_drafts) == (9, 8)
        assert here.decode.load().drafter_health == "healthy"
        assert (stats.proposed, stats.accepted) == (32, 32)
        assert stats.acceptance_length == GAMMA + 1
        assert stats.accepted_by_position == (8, 8, 8, 8) and stats.steps_by_length == (0, 0, 0, 8)
        # Each step of the model pushed the features of its rows: prompt features come from prefill.
        assert isinstance(drafter, OracleDrafter) and drafter.num_rows == 8 * (GAMMA + 1)

    run(tokenizer, oracle, scenario)


def test_drafts_end_where_the_output_may(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, _drafter: Drafter) -> None:
        for count in range(1, 14):
            req = asked(f"m{count}", 30, count)
            tokens, stats = await finish(here, req)
            assert tokens == want(req, count)
            # The last step is as long as what is missing: what is proposed fits, and all of it is right.
            assert stats.steps == 1 + -(-(count - 1) // (GAMMA + 1))
            assert stats.proposed == stats.accepted == max(0, count - stats.steps)

    run(tokenizer, oracle, scenario)


def test_a_stop_token_inside_a_block_ends_the_output_there(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, _drafter: Drafter) -> None:
        for place in range(1, 12):
            plain = want(asked(f"s{place}", 25, 30), 30)
            stop = plain[place]
            first = plain.index(stop)
            req = replace(asked(f"s{place}", 25, 30), stop=StopParams(max_tokens=30, stop_token_ids=frozenset({stop})))
            tokens, _ = await finish(here, req)
            assert tokens == plain[: first + 1]
            least = replace(req, stop=replace(req.stop, min_tokens=first + 2))
            assert (await finish(here, least))[0][: first + 1] == plain[: first + 1]

    run(tokenizer, oracle, scenario)


def test_late_proposals_are_salvaged(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, _drafter: Drafter) -> None:
        req = asked("l", 30, 60)
        tokens, stats = await finish(here, req)
        assert tokens == want(req, 60)
        assert stats.late > 0 and stats.salvaged > 0
        assert stats.drafters == ("slow",)
        assert stats.accepted == stats.proposed

    # A step takes 1 ms, so that the answer to one commit comes during the step after it.
    run(tokenizer, lambda: SlowDrafter(oracle(), delay_s=0.0012), scenario, patience_s=0.0003)


def test_an_answer_without_tokens_is_not_late(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, _drafter: Drafter) -> None:
        req = asked("n", 30, 60)
        tokens, stats = await finish(here, req)
        assert tokens == want(req, 60)
        assert stats.steps_with_drafts < stats.steps - 1, "the tokens of the fake model hardly repeat"
        assert stats.late == 0

    run(tokenizer, lambda: NgramDrafter(num_proposals=GAMMA), scenario)


def test_steps_at_which_speculation_rests_are_counted(tokenizer: Tokenizer) -> None:
    class Resting(Governor):
        MOST_CREDIT = 1.5

        def would_try(self, num_samples: int) -> bool:
            return False

    governor = Resting()
    governor.rest(1)
    rest = round(Resting.MOST_CREDIT / Resting.SHARE)

    async def scenario(here: World, drafter: Drafter) -> None:
        load = here.decode.load()
        assert (load.drafter, load.speculation_rests) == ("oracle", True)
        assert isinstance(drafter, OracleDrafter) and here.speculator is not None
        assert not here.speculator.wants_prompts()
        _, stats = await finish(here, asked("r", 30, 80))
        assert rest - 2 <= stats.rested <= rest
        assert drafter.num_commits == stats.steps - stats.rested - 1, "nobody hears of steps at which speculation rests"
        assert stats.steps_with_drafts > 0, "the rest has ended"
        assert not here.decode.load().speculation_rests

    run(tokenizer, oracle, scenario, governor=governor)


def test_nobody_waits_for_a_drafter_that_is_silent(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, _drafter: Drafter) -> None:
        plain = asyncio.get_running_loop().time()
        await finish(here, asked("w", 30, 200))
        took = asyncio.get_running_loop().time() - plain
        # 200 steps of 1 ms; half of 32 waits missed end the waiting, but for a probe each 16 steps.
        assert took < 0.30

    run(tokenizer, lambda: DeadDrafter(oracle(), commits=0, is_known=False), scenario, governor=Governor())


def test_a_drafter_that_is_silent_is_called_slow(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, _drafter: Drafter) -> None:
        seen = []
        for index in range(4):
            await finish(here, asked(f"h{index}", 30, 200))
            seen.append(here.decode.load().drafter_health)
        # A sample asks again after 16 steps without an answer, so 200 tokens are some 12 waits; 32 are looked at.
        assert (seen[0], seen[-1]) == ("healthy", "slow")

    run(tokenizer, lambda: DeadDrafter(oracle(), commits=0, is_known=False), scenario)


def test_a_drafter_that_is_down_is_replaced(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, _drafter: Drafter) -> None:
        req = asked("d", 30, 60)
        tokens, stats = await finish(here, req)
        assert tokens == want(req, 60)
        assert stats.accepted > 40, "the fallback knows the output"
        assert stats.drafters == ("oracle",) and here.speculator is not None and here.speculator.drafter == "oracle"
        assert (here.decode.load().drafter, here.decode.load().drafter_health) == ("oracle", "down")

    run(tokenizer, lambda: DeadDrafter(oracle(), commits=0), scenario, fallback=oracle())


def test_pauses_cancels_and_failures_leave_no_sample_with_the_drafter(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, drafter: Drafter) -> None:
        assert isinstance(drafter, OracleDrafter)
        paused = here.decode.submit(asked("a", 30, 60), NO_TEXT)
        cancelled = here.decode.submit(asked("b", 20, 60), NO_TEXT)
        await anext(cancelled)
        cancelled.cancel()
        with pytest.raises(Cancelled):
            await drain(cancelled, [])
        await asyncio.sleep(0.2)
        assert drafter.keys == {"a#0"}, "the paused one is kept"
        here.runner.fail_next = True
        tokens: list[int] = []
        with pytest.raises(EngineFault):
            await drain(paused, tokens)
        assert tokens == want(asked("a", 30, 60), 60)[: len(tokens)] and tokens
        await asyncio.sleep(0.01)
        assert drafter.keys == set()
        assert await collect(here.decode, asked("a", 30, 12)) == {0: want(asked("a", 30, 12), 12)}

    run(tokenizer, oracle, scenario, max_unread_tokens=8)


def test_a_request_that_resumes_is_followed_from_its_first_replayed_token(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, drafter: Drafter) -> None:
        assert isinstance(drafter, OracleDrafter)
        known = want(asked("r", 30, 40), 40)
        req = replace(asked("r", 30, 40), generated=tuple(known[:7]))
        tokens = await collect(here.decode, req)
        assert tokens == {0: known[7:]}
        # 7 rows replay, the last of them with drafts; features of all of them were pushed.
        assert drafter.num_rows == 6 + 33 + (33 // (GAMMA + 1) + 1) - 7

    run(tokenizer, oracle, scenario)


def test_speculation_that_does_not_pay_ends(tokenizer: Tokenizer) -> None:
    async def scenario(here: World, drafter: Drafter) -> None:
        assert isinstance(drafter, RandomDrafter)
        requests = [asked(f"g{index}", 20, 200) for index in range(6)]
        await asyncio.gather(*(collect(here.decode, req) for req in requests))
        speculator = here.speculator
        assert speculator is not None
        share = speculator.total.steps_with_drafts / speculator.total.steps
        assert share < 0.2, "random drafts are not worth their rows"

    times = VerifyTimes(plain=StepTimes({1: 0.001, 8: 0.001}), verify=StepTimes({1: 0.001, 64: 0.008}))
    run(
        tokenizer,
        lambda: RandomDrafter(vocab_size=VOCAB, num_proposals=GAMMA),
        scenario,
        governor=Governor(),
        times=times,
        num_pages=128,
    )
