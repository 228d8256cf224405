"""The rules of verification: exact by enumeration, and by counting what the production functions draw."""

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from k3svc.core.batch import SampleSpec, TokenCounts
from k3svc.core.request import SamplingParams
from k3svc.engine.settle import AskedBlocks, Block, VerifyRule, settle
from k3svc.engine.verify import Verdict, chain_coins, chain_draw, match_exactly, reject_in_chain, residual
from k3svc.ops import load
from k3svc.ops.table import Ops

V, D = 3, 2
Law = dict[tuple[int, ...], list[float]]
"""Law of the next token after a prefix."""


def draw_laws(rng: random.Random, *, sparse: bool = False) -> Law:
    laws: Law = {}
    for size in range(D + 2):
        for prefix in itertools.product(range(V), repeat=size):
            weights = [rng.random() * (not sparse or rng.random() < 0.7) for _ in range(V)]
            weights[rng.randrange(V)] += 0.05
            laws[prefix] = [weight / sum(weights) for weight in weights]
    return laws


def joint(p: Law) -> dict[tuple[int, ...], float]:
    """Law of the first D + 1 tokens of plain sampling."""
    out = {}
    for tokens in itertools.product(range(V), repeat=D + 1):
        chance = 1.0
        for place, token in enumerate(tokens):
            chance *= p[tokens[:place]][token]
        out[tokens] = chance
    return out


def finish(p: Law, verdicts: Iterator[tuple[float, tuple[int, ...]]]) -> dict[tuple[int, ...], float]:
    """Law of the first D + 1 tokens when a step gives these and plain steps the rest."""
    out: dict[tuple[int, ...], float] = defaultdict(float)
    for chance, tokens in verdicts:
        for rest in itertools.product(range(V), repeat=D + 1 - len(tokens)):
            full, weight = tokens + rest, chance
            for place in range(len(tokens), D + 1):
                weight *= p[full[:place]][full[place]]
            out[full] += weight
    return out


def proposals(q: Law) -> Iterator[tuple[float, tuple[int, ...]]]:
    for drafts in itertools.product(range(V), repeat=D):
        chance = 1.0
        for place, token in enumerate(drafts):
            chance *= q[drafts[:place]][token]
        yield chance, drafts


def exact_outcomes(p: Law, q: Law) -> Iterator[tuple[float, tuple[int, ...]]]:
    for chance, drafts in proposals(q):
        for chosen in itertools.product(range(V), repeat=D + 1):
            weight = chance
            for place, token in enumerate(chosen):
                weight *= p[drafts[:place]][token]
            verdict = match_exactly(drafts, chosen)
            yield weight, (*drafts[: verdict.num_accepted], verdict.token_id)


def chain_outcomes(
    p: Law, q: Law, *, certain: bool = False, num_rows: int = D
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every draft, every side of every coin, every draw, with its chance; num_rows: drafts that are verified."""
    for chance, made in proposals(q):
        drafts = made[:num_rows]
        target = torch.tensor([p[drafts[:place]] for place in range(num_rows + 1)], dtype=torch.float64)
        laws = None if certain else torch.tensor([q[drafts[:i]] for i in range(num_rows)], dtype=torch.float64)
        thresholds = []
        for place, token in enumerate(drafts):
            made_with = 1.0 if certain else q[drafts[:place]][token]
            thresholds.append(min(1.0, p[drafts[:place]][token] / made_with) if made_with else 0.0)
        for sides in itertools.product((True, False), repeat=num_rows):
            weight, coins = chance, []
            for is_low, threshold in zip(sides, thresholds, strict=True):
                weight *= threshold if is_low else 1.0 - threshold
                coins.append(threshold / 2 if is_low else (1.0 + threshold) / 2)
            if weight == 0.0:
                continue
            drawn: list[Tensor] = []

            def note(_row: int, law: Tensor, drawn: list[Tensor] = drawn) -> int:
                drawn.append(law / law.sum())
                return -1

            verdict = reject_in_chain(drafts, target, laws, coins, note)
            for token, share in enumerate(drawn[0].tolist()):
                yield weight * share, (*drafts[: verdict.num_accepted], token)


def error(law: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float]) -> float:
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return max(abs(law.get(tokens, 0.0) - chance) for tokens, chance in wanted.items())


@pytest.mark.parametrize("seed", range(6))
def test_exact_match_has_the_law_of_plain_sampling(seed: int) -> None:
    rng = random.Random(seed)
    p, q = draw_laws(rng, sparse=seed % 2 == 1), draw_laws(rng)
    assert error(finish(p, exact_outcomes(p, q)), joint(p)) <= 1e-12


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_chain_rejection_has_the_law_of_plain_sampling(seed: int, num_rows: int) -> None:
    rng = random.Random(seed)
    p, q = draw_laws(rng, sparse=seed % 2 == 1), draw_laws(rng, sparse=seed % 3 == 2)
    assert error(finish(p, chain_outcomes(p, q, num_rows=num_rows)), joint(p)) <= 1e-12
    assert error(finish(p, chain_outcomes(p, q, certain=True, num_rows=num_rows)), joint(p)) <= 1e-12
    assert error(finish(p, chain_outcomes(p, p, num_rows=num_rows)), joint(p)) <= 1e-12, "nothing is left to reject"


def test_the_enumeration_sees_a_wrong_law() -> None:
    rng = random.Random(1)
    p, q = draw_laws(rng), draw_laws(rng)
    greedy = {prefix: [float(token == law.index(max(law))) for token in range(V)] for prefix, law in q.items()}
    # A draft that is the argmax of q, tested as if it had been drawn from q.
    wrong: dict[tuple[int, ...], float] = defaultdict(float)
    for chance, drafts in proposals(greedy):
        if chance:
            target = torch.tensor([p[drafts[:place]] for place in range(D + 1)], dtype=torch.float64)
            laws = torch.tensor([q[drafts[:place]] for place in range(D)], dtype=torch.float64)
            for coins in itertools.product([(i + 0.5) / 40 for i in range(40)], repeat=D):
                drawn: list[Tensor] = []

                def note(_row: int, law: Tensor, drawn: list[Tensor] = drawn) -> int:
                    drawn.append(law / law.sum())
                    return -1

                verdict = reject_in_chain(drafts, target, laws, coins, note)
                for token, share in enumerate(drawn[0].tolist()):
                    key = (*drafts[: verdict.num_accepted], token)
                    wrong[key] += chance * share / 40**D
    assert error(finish(p, ((chance, tokens) for tokens, chance in wrong.items())), joint(p)) > 0.01


def test_laws_that_cannot_be_are_rejected() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]] * 2, dtype=torch.float64)
    for chance in (float("nan"), 0.0, -0.5, 1.5, float("inf")):
        laws = torch.tensor([[chance, 0.1, 0.1]], dtype=torch.float64)
        verdict = reject_in_chain([0], p, laws, [0.001], lambda _row, law: int(law.argmax()))
        assert verdict.num_accepted == 0
    never = reject_in_chain([2], p, None, [1e-300], lambda _row, law: int(law.argmax()))
    assert never.num_accepted == 0, "a token without mass is never accepted"


def test_nothing_left_is_drawn_from_the_target() -> None:
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.equal(residual(p, p + 1e-12), p)
    assert residual(p, torch.tensor([0.75, 0.25], dtype=torch.float64)).tolist() == [0.0, 0.5]


def test_coins_and_draws_depend_on_seed_sample_and_position_alone() -> None:
    coins = chain_coins(7, 1, range(1000))
    assert coins[400:500] == chain_coins(7, 1, range(400, 500))
    assert all(0.0 < coin < 1.0 for coin in coins) and len(set(coins)) == 1000
    assert sum(coins) / 1000 == pytest.approx(0.5, abs=0.03)
    assert coins != chain_coins(8, 1, range(1000)) != chain_coins(7, 2, range(1000))
    law = torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64)
    draws = [chain_draw(law, 7, 1, position) for position in range(2000)]
    assert draws[30] == chain_draw(law, 7, 1, 30)
    assert 1 not in draws and draws.count(2) / 2000 == pytest.approx(0.8, abs=0.03)


# What a step makes of its rows


@pytest.fixture(scope="module")
def ops() -> Ops:
    return load(device="reference", dtype="float32", threads=1)


def spec(seed: int, position: int = 5, **changes: object) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams(temperature=1.0, seed=seed, **changes),  # type: ignore[arg-type]
        sample_index=0,
        position=position,
        counts=None,
    )


def chi_square(counts: Sequence[int], chances: Sequence[float]) -> float:
    total = sum(counts)
    return sum((count - total * chance) ** 2 / (total * chance) for count, chance in zip(counts, chances, strict=True))


@pytest.mark.parametrize("rule", ["exact", "rejection"])
@pytest.mark.parametrize("with_laws", [True, False])
def test_three_positions_have_the_law_of_plain_sampling(ops: Ops, rule: VerifyRule, with_laws: bool) -> None:
    rng = random.Random(4)
    p, q = draw_laws(rng), draw_laws(rng)
    counts = dict.fromkeys(joint(p), 0)
    accepted = rounds = 0
    for seed in range(60):
        blocks, logits = [], []
        for index in range(20):
            drafts: tuple[int, ...] = ()
            for _ in range(D):
                drafts += tuple(rng.choices(range(V), q[drafts]))
            laws = tuple(torch.tensor(q[drafts[:i]]).numpy().tobytes() for i in range(D)) if with_laws else ()
            blocks.append(Block(key=str(index), spec=spec(1000 * seed + index), drafts=drafts, laws=laws))
            logits += [p[drafts[:place]] for place in range(D + 1)]
        sampled, failed = settle(ops, AskedBlocks(ops, torch.tensor(logits).log(), blocks), rule)
        assert not failed
        for block in blocks:
            tokens = tuple(one.token_id for one in sampled[block.key])
            accepted, rounds = accepted + len(tokens) - 1, rounds + 1
            while len(tokens) < D + 1:
                tokens += tuple(rng.choices(range(V), p[tokens]))
            counts[tokens] += 1
    # 26 degrees of freedom: 0.999 of the law lies below 54.05.
    assert chi_square(list(counts.values()), list(joint(p).values())) < 54.05
    expected = 0.0
    for tokens in itertools.chain([()], ((token,) for token in range(V))):
        both = [p[tokens], q[tokens]]
        chance = sum(min(a, b) if rule == "rejection" and with_laws else a * b for a, b in zip(*both, strict=True))
        reach = (
            1.0
            if not tokens
            else (
                min(p[()][tokens[0]], q[()][tokens[0]])
                if rule == "rejection" and with_laws
                else p[()][tokens[0]] * q[()][tokens[0]]
            )
        )
        expected += reach * chance
    assert accepted / rounds == pytest.approx(expected, abs=0.04)


def test_random_drafts_are_accepted_as_often_as_they_are_right(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = [Block(key=str(i), spec=spec(i), drafts=(i % 50,)) for i in range(600)]
    logits = torch.randn(1200, 50, generator=generator)
    sampled, _ = settle(ops, AskedBlocks(ops, logits, blocks), "exact")
    accepted = sum(len(tokens) - 1 for tokens in sampled.values())
    assert 2 <= accepted <= 30, "about 1 in 50"


def test_rows_of_a_block_are_chosen_as_plain_rows(ops: Ops) -> None:
    """Penalties, bans and positions move on with each draft: the same rows one by one give the same tokens."""
    generator = torch.Generator().manual_seed(3)
    for seed in range(40):
        logits = torch.randn(4, 30, generator=generator)
        first = SampleSpec(
            params=SamplingParams(
                temperature=0.8,
                top_k=9,
                repetition_penalty=1.5,
                presence_penalty=0.4,
                frequency_penalty=0.3,
                logit_bias={3: 0.5},
                seed=seed,
            ),
            sample_index=2,
            position=17,
            counts=TokenCounts(prompt=frozenset({1, 2}), output={4: 2}),
            banned=frozenset(range(20, 30)),
            num_banned=2,
            logprobs=2,
        )
        plain, known = [], dict(first.counts.output) if first.counts else {}
        for place in range(4):
            one = SampleSpec(
                params=first.params,
                sample_index=2,
                position=17 + place,
                counts=TokenCounts(prompt=frozenset({1, 2}), output=dict(known)),
                banned=first.banned if place < 2 else frozenset(),
                logprobs=2,
            )
            (token,) = settle(ops, AskedBlocks(ops, logits[place : place + 1], [Block(key="a", spec=one)]), "exact")[0][
                "a"
            ]
            plain.append(token)
            known[token.token_id] = known.get(token.token_id, 0) + 1
        drafts = [token.token_id for token in plain[:3]]
        assert settle(ops, AskedBlocks(ops, logits, [Block(key="a", spec=first, drafts=drafts)]), "exact") == (
            {"a": plain},
            {},
        )
        wrong = [drafts[0], (drafts[1] + 1) % 20, drafts[2]]
        assert settle(ops, AskedBlocks(ops, logits, [Block(key="a", spec=first, drafts=wrong)]), "exact")[0] == {
            "a": plain[:2]
        }
        assert all(token.token_id < 20 for token in plain[:2])


def test_a_row_that_fails_ends_its_block_after_the_drafts_before_it(ops: Ops) -> None:
    logits = torch.zeros(5, 4)
    logits[:, 1] = 5.0
    logits[1] = float("nan")
    blocks = [
        Block(key="a", spec=SampleSpec(params=SamplingParams(temperature=0.0), sample_index=0, position=3, counts=None),
              drafts=(1, 1)),
        Block(key="b", spec=SampleSpec(params=SamplingParams(temperature=0.0), sample_index=0, position=3, counts=None),
              drafts=(1,)),
    ]  # fmt: skip
    for rule in ("exact", "rejection"):
        sampled, failed = settle(ops, AskedBlocks(ops, logits, blocks), rule)
        assert [one.token_id for one in sampled["a"]] == [1]
        assert [one.token_id for one in sampled["b"]] == [1, 1]
        assert failed.keys() == {"a"} and "largest logit" in failed["a"]


def test_a_draft_after_which_nothing_is_allowed_is_rejected_as_any_other(ops: Ops) -> None:
    """As a grammar does it: token 0 may not come, and what would follow it has no token to choose."""
    logits = torch.tensor([[-torch.inf, 0.0, 0.0], [-torch.inf] * 3])
    law = torch.tensor([0.5, 0.5, 0.0])
    counts = [0, 0, 0]
    for seed in range(400):
        block = Block(key="a", spec=spec(seed), drafts=(0,), laws=(law.numpy().tobytes(),))
        sampled, failed = settle(ops, AskedBlocks(ops, logits, [block]), "rejection")
        assert not failed
        (token,) = sampled["a"]
        counts[token.token_id] += 1
    assert counts[:2] == [0, 0], "the residual of p = (0, 1/2, 1/2) and q = (1/2, 1/2, 0) is token 2"


def test_an_unusable_match_counts_nothing() -> None:
    assert match_exactly((), [4]) == Verdict(num_accepted=0, token_id=4)
    assert match_exactly((1, 2, 3), [1, 2, 4, 5]) == Verdict(num_accepted=2, token_id=4)
    assert match_exactly((1, 2), [1, 2, 9]) == Verdict(num_accepted=2, token_id=9)
    assert match_exactly((1, 2), [0, 2, 9]) == Verdict(num_accepted=0, token_id=0)
