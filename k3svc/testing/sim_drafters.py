"""The drafters of a simulation: an oracle that is often right, behind links and services that fail in every way."""

import random
from collections.abc import Mapping, Sequence

from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.governor import Governor
from k3svc.core.request import GenerateRequest
from k3svc.core.speculation import ReplyTimes, StepTimes, VerifyTimes
from k3svc.engine.ngram import NgramDrafter
from k3svc.engine.ports import Clock, Drafter, DraftOpen
from k3svc.engine.speculator import Speculator
from k3svc.testing.drafters import DeadDrafter, FlakyDrafter, LiarDrafter, OracleDrafter, SlowDrafter, StaleDrafter
from k3svc.testing.fakes import FEATURE_BYTES, VOCAB, expected_tokens

NUM_PROPOSALS = 5
MASK = VOCAB - 2


def draw_drafter(rng: random.Random, requests: Mapping[str, GenerateRequest]) -> Drafter:
    """`requests` by id; the oracle knows what must come out of them."""

    def truth(opened: DraftOpen) -> Sequence[int]:
        request = requests[opened.key.split("#")[0]]
        count = request.stop.max_tokens or 0
        seed, index = request.sampling.seed, opened.sample_index
        return [*request.prompt, *expected_tokens(request.prompt, count, seed=seed, index=index)]

    drafter: Drafter = OracleDrafter(
        truth,
        epsilon=rng.choice((0.0, 0.1, 0.5)),
        vocab_size=VOCAB,
        seed=rng.randrange(1 << 30),
        num_proposals=NUM_PROPOSALS,
        feature_width=rng.choice((0, FEATURE_BYTES)),
    )
    for trouble in rng.sample(("slow", "flaky", "liar", "stale", "dead"), rng.choice((0, 1, 1, 2))):
        match trouble:
            case "slow":
                drafter = SlowDrafter(drafter, delay_s=rng.choice((0.0004, 0.002, 0.02)))
            case "flaky":
                drafter = FlakyDrafter(drafter, seed=rng.randrange(1 << 30))
            case "liar":
                drafter = LiarDrafter(drafter, vocab_size=VOCAB, mask_token_id=MASK)
            case "stale":
                drafter = StaleDrafter(drafter)
            case "dead":
                drafter = DeadDrafter(drafter, commits=rng.randrange(30), is_known=rng.random() < 0.5)
    return drafter


def draw_speculator(
    rng: random.Random, scheduler: DecodeScheduler, clock: Clock, requests: Mapping[str, GenerateRequest]
) -> Speculator:
    row_s = rng.choice((0.0, 0.0, 0.0002))
    return Speculator(
        drafter=draw_drafter(rng, requests),
        fallback=rng.choice((None, NgramDrafter(num_proposals=3))),
        scheduler=scheduler,
        times=VerifyTimes(
            plain=StepTimes({1: 0.002, 64: 0.002 + 63 * row_s}), verify=StepTimes({1: 0.002, 64: 0.002 + 63 * row_s})
        ),
        vocab_size=VOCAB,
        mask_token_id=MASK,
        rule="exact",
        clock=clock,
        governor=rng.choice((None, Governor())),
        replies=ReplyTimes(longest_s=rng.choice((0.001, 0.05))),
    )
