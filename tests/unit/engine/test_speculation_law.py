"""Chain rejection through the engines: outputs have the law of plain sampling, whatever law the drafts were drawn from,
and whatever decides how many are verified.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from k3svc.core.governor import Governor
from k3svc.core.request import GenerateRequest, SamplingParams, StopParams
from k3svc.core.speculation import StepTimes, VerifyTimes
from k3svc.engine.decode import DecodeEngine
from k3svc.engine.ports import DraftOpen, DraftProposal
from k3svc.testing.drafters import StubDrafter
from tests.oracles.statistics import assert_follows
from tests.unit.engine.nano_engines import FEATURE_WIDTH, VOCAB, Loaded, engine, load_nano, run_all

TOP_K, TEMPERATURE, LENGTH = 2, 1.5, 4
NUM_REQUESTS, NUM_SAMPLES = 200, 4
GAMMA = 3
TEXT = "def read(path):\n    "
JUNK = tuple(range(100, 106))
"""Ids that plain sampling never gives here."""

Law = Mapping[int, float]
"""Chance by token id."""


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_nano("cpu")


async def next_laws(decode: DecodeEngine, prompt: tuple[int, ...]) -> dict[tuple[int, ...], Law]:
    """The law of the next token after every output of up to LENGTH - 1 tokens, from the model's log-probabilities."""
    laws: dict[tuple[int, ...], Law] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(LENGTH):
        outputs = await run_all(
            decode,
            [
                GenerateRequest(
                    request_id=f"{place}",
                    prompt=prompt + prefix,
                    sampling=SamplingParams(temperature=0.0),
                    stop=StopParams(max_tokens=1, ignore_eos=True),
                    logprobs=TOP_K,
                )
                for place, prefix in enumerate(level)
            ],
        )
        for place, prefix in enumerate(level):
            (sampled,) = outputs[f"{place}#0"].logprobs
            top = dict(sampled.top)  # type: ignore[attr-defined]
            weights = np.exp(np.array(list(top.values())) / TEMPERATURE)
            laws[prefix] = dict(zip(top, (weights / weights.sum()).tolist(), strict=True))
        level = [(*prefix, token_id) for prefix in level for token_id in laws[prefix]]
    return laws


def joint(laws: Mapping[tuple[int, ...], Law]) -> dict[tuple[int, ...], float]:
    """The law of whole outputs."""
    out: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        out = {
            (*prefix, token_id): chance * share
            for prefix, chance in out.items()
            for token_id, share in laws[prefix].items()
        }
    return out


def near(p: Law) -> Law:
    roots = {token_id: chance**0.5 for token_id, chance in p.items()}
    return {token_id: 0.95 * root / sum(roots.values()) for token_id, root in roots.items()} | {JUNK[0]: 0.05}


def reversed_law(p: Law) -> Law:
    return dict(zip(p, reversed(list(p.values())), strict=True))


def mixed(p: Law) -> Law:
    return {token_id: 0.7 * chance + 0.3 * reversed_law(p)[token_id] for token_id, chance in p.items()}


def random_law(p: Law) -> Law:
    return dict.fromkeys((*p, *JUNK), 1 / (len(p) + len(JUNK)))


class LawDrafter(StubDrafter):
    """Draws drafts from laws with noise of its own, and is sure of those that the law likes best, of no others."""

    def __init__(self, law_after: Callable[[tuple[int, ...]], Law], prompt_len: int) -> None:
        super().__init__(num_proposals=GAMMA, feature_width=FEATURE_WIDTH)
        self._law_after, self._prompt_len = law_after, prompt_len
        self._confidences: list[float] = []
        self._probs: list[bytes] = []

    def draft(self, opened: DraftOpen, known: Sequence[int], count: int) -> Sequence[int]:
        assert opened.with_probs
        output = list(known[self._prompt_len :])
        rng = random.Random(f"{opened.key}/{len(output)}")
        self._confidences, self._probs, tokens = [], [], []
        for _ in range(min(count, LENGTH - len(output))):
            law = self._law_after(tuple(output))
            (token_id,) = rng.choices(list(law), list(law.values()))
            dense = np.zeros(VOCAB, dtype=np.float32)
            dense[list(law)] = list(law.values())
            self._probs.append(dense.tobytes())
            self._confidences.append(0.95 if law[token_id] == max(law.values()) else 0.02)
            output.append(token_id)
            tokens.append(token_id)
        return tokens

    def _deliver(self, proposal: DraftProposal) -> None:
        super()._deliver(replace(proposal, confidences=self._confidences, probs=self._probs))


class Always(Governor):
    """Speculates whatever it costs; lengths follow from chances and times."""

    FEW_SAMPLES = 1000

    def pays(self, num_samples: int) -> bool:
        return True

    def is_listening(self, num_samples: int) -> bool:
        return False

    def is_resting(self, num_samples: int) -> bool:
        return False


class Fixed(StepTimes):
    """Times that steps do not change. A row costs what makes drafts worth it that are more likely than half."""

    def __init__(self) -> None:
        super().__init__({1: 0.017, 16: 0.032, 64: 0.080})

    def observe(self, rows: int, seconds: float, rate: float = 0.0) -> None:
        pass


async def outputs_of(
    loaded: Loaded,
    prompt: tuple[int, ...],
    drafter: StubDrafter | None,
    *,
    governor: Governor | None = None,
) -> tuple[Counter[tuple[int, ...]], int, int]:
    """Outputs by how often they came, and drafts verified and accepted."""
    requests = [
        GenerateRequest(
            request_id=f"r{seed}",
            prompt=prompt,
            sampling=SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=seed),
            stop=StopParams(max_tokens=LENGTH, ignore_eos=True),
            n=NUM_SAMPLES,
        )
        for seed in range(NUM_REQUESTS)
    ]
    times = VerifyTimes(plain=Fixed(), verify=Fixed())
    async with engine(loaded, drafter, rule="rejection", governor=governor, times=times, num_pages=400) as decode:
        outputs: Counter[tuple[int, ...]] = Counter()
        for first in range(0, len(requests), 100):
            outputs.update(one.token_ids for one in (await run_all(decode, requests[first : first + 100])).values())
        if decode.speculator is None:
            return outputs, 0, 0
        stats = decode.speculator.total.stats()
        return outputs, stats.proposed, stats.accepted


@pytest.fixture(scope="module")
def prompt(loaded: Loaded) -> tuple[int, ...]:
    return tuple(loaded.tokenizer.encode(TEXT))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def laws(loaded: Loaded, prompt: tuple[int, ...]) -> dict[tuple[int, ...], Law]:
    async with engine(loaded, None) as decode:
        return await next_laws(decode, prompt)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "governor"),
    [(near, None), (reversed_law, None), (random_law, None), (near, Always())],
    ids=["near", "reversed", "random", "lengths by confidences"],
)
async def test_outputs_have_the_law_of_plain_sampling(
    loaded: Loaded,
    prompt: tuple[int, ...],
    laws: dict[tuple[int, ...], Law],
    how: Callable[[Law], Law],
    governor: Governor | None,
) -> None:
    drafter = LawDrafter(lambda output: how(laws.get(output, laws[()])), len(prompt))
    outputs, proposed, accepted = await outputs_of(loaded, prompt, drafter, governor=governor)
    assert_follows(outputs, joint(laws))
    assert 0 < accepted < proposed
    if how is near:
        assert proposed > NUM_REQUESTS * NUM_SAMPLES / 2 and accepted > 0.6 * proposed


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_plain_sampling_has_that_law(
    loaded: Loaded, prompt: tuple[int, ...], laws: dict[tuple[int, ...], Law]
) -> None:
    outputs, _, _ = await outputs_of(loaded, prompt, None)
    assert_follows(outputs, joint(laws))
    with pytest.raises(AssertionError, match="χ²"):
        assert_follows(outputs, joint({prefix: mixed(law) for prefix, law in laws.items()}))
