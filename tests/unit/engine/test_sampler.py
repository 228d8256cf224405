import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from k3svc.core.batch import Guide, SampleSpec, TokenCounts
from k3svc.core.request import SamplingParams
from k3svc.engine.sampler import adjust_logits, most_likely, sample_rows
from k3svc.engine.settle import AskedBlocks, Block, settle
from k3svc.ops import reference_sampling
from k3svc.ops.table import Ops, SampleRows

CPU = torch.device("cpu")


class SamplingOps:
    """The two operations that the sampler uses; counts the rows whose log-probabilities it asks for."""

    def __init__(self) -> None:
        self.log_softmax_rows = 0

    def log_softmax(self, logits: Tensor) -> Tensor:
        self.log_softmax_rows += logits.shape[0]
        return reference_sampling.log_softmax(logits)

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        return reference_sampling.sample(logits, rows)


def spec(
    *,
    prompt: frozenset[int] = frozenset(),
    output: Mapping[int, int] | None = None,
    banned: frozenset[int] = frozenset(),
    logprobs: int | None = None,
    position: int = 10,
    sample_index: int = 0,
    **params: Any,
) -> SampleSpec:
    chosen = SamplingParams(**{"temperature": 0.0, **params})
    counts = None if output is None else TokenCounts(prompt=prompt, output=output)
    return SampleSpec(
        params=chosen, sample_index=sample_index, position=position, counts=counts, banned=banned, logprobs=logprobs
    )


def choose(logits: Tensor, specs: list[SampleSpec], ops: SamplingOps | None = None):
    """Tokens and reasons of failure, under the names r0, r1, …"""
    blocks = [Block(key=f"r{i}", spec=one) for i, one in enumerate(specs)]
    backend = cast(Ops, ops or SamplingOps())
    sampled, failed = settle(backend, AskedBlocks(backend, logits, blocks), "exact")
    return {key: only for key, (only,) in sampled.items()}, failed


def adjusted(logits: list[float], one: SampleSpec) -> list[float]:
    return cast("list[float]", adjust_logits(torch.tensor([logits]), [one])[0].tolist())


# Penalties, bias, bans


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    one = spec(prompt=frozenset({0, 1}), output={1: 3, 2: 1}, repetition_penalty=2.0)
    assert adjusted([4.0, -4.0, 3.0, 5.0, -5.0], one) == [2.0, -8.0, 1.5, 5.0, -5.0]


def test_repetition_below_one_rewards():
    assert adjusted([4.0, -4.0, 1.0], spec(output={0: 1, 1: 1}, repetition_penalty=0.5)) == [8.0, -2.0, 1.0]


def test_presence_and_frequency_look_at_the_output_alone():
    one = spec(prompt=frozenset({0, 3}), output={1: 3, 2: 1}, presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted([1.0, 1.0, 1.0, 1.0], one) == [1.0, 1.0 - 0.5 - 0.75, 1.0 - 0.5 - 0.25, 1.0]
    assert adjusted([1.0, 1.0], spec(output={1: 4}, frequency_penalty=-0.5)) == [1.0, 3.0]
    assert adjusted([1.0, 1.0], spec(output={1: 4}, presence_penalty=2.0)) == [1.0, -1.0]


def test_all_adjustments_in_order():
    one = spec(
        prompt=frozenset({0}),
        output={1: 2},
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={0: 10.0, 2: -3.0, 3: 100.0},
        banned=frozenset({3}),
    )
    assert adjusted([4.0, 4.0, 4.0, 4.0], one) == [12.0, 2.0 - 2.0, 1.0, -math.inf]


def test_penalties_without_effect_touch_nothing():
    logits = torch.tensor([[1.0, 2.0]])
    assert adjust_logits(logits, [spec()]) is logits
    assert torch.equal(adjust_logits(logits, [spec(output={})]), logits)


def test_a_tiny_repetition_penalty_makes_no_infinity():
    values = adjusted([3e38, -1.0, 0.0, 1.0], spec(output={0: 1, 1: 1, 2: 1}, repetition_penalty=1e-30))
    assert values[0] == torch.finfo(torch.float32).max and values[2:] == [0.0, 1.0]


def test_a_masked_logit_stays_masked():
    one = spec(output={0: 1}, repetition_penalty=0.5, presence_penalty=-2.0, logit_bias={0: 100.0})
    assert adjusted([-math.inf, 0.0], one) == [-math.inf, 0.0]


def test_rows_are_adjusted_apart_and_the_logits_stay_as_they_were():
    logits = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    before = logits.clone()
    out = adjust_logits(logits, [spec(banned=frozenset({3})), spec(), spec(logit_bias={0: 50.0})])
    assert out.tolist() == [[0.0, 1.0, 2.0, -math.inf], [4.0, 5.0, 6.0, 7.0], [58.0, 9.0, 10.0, 11.0]]
    assert torch.equal(logits, before)
    sampled, _ = choose(logits, [spec(banned=frozenset({3})), spec(), spec(logit_bias={0: 50.0})])
    assert [sampled[f"r{i}"].token_id for i in range(3)] == [2, 3, 0]
    assert torch.equal(logits, before)


# The rows of the operation


def test_parameters_reach_the_operation():
    rows = sample_rows(
        [
            spec(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**64 - 1, sample_index=3, position=99),
            spec(temperature=1.0, seed=2**63),
            spec(temperature=1.0, seed=2**63 - 1),
        ],
        CPU,
    )
    assert rows.temperature.tolist() == [0.5, 1.0, 1.0] and rows.temperature.dtype is torch.float32
    assert rows.top_k.tolist() == [7, 0, 0]
    assert rows.top_p.tolist() == [0.25, 1.0, 1.0]
    assert rows.min_p.tolist() == [0.125, 0.0, 0.0]
    assert rows.seed.tolist() == [-1, -(2**63), 2**63 - 1]
    assert rows.sample_index.tolist() == [3, 0, 0]
    assert rows.position.tolist() == [99, 10, 10]
    assert rows.host_greedy == (False, False, False)
    assert rows.host_filters == ((7, 0.25, 0.125), (0, 1.0, 0.0), (0, 1.0, 0.0))
    assert rows.host_filtered == (True, False, False)


@pytest.mark.parametrize(
    ("params", "greedy", "filtered"),
    [
        ({"temperature": 0.0}, True, False),
        ({"temperature": 9e-6}, True, False),
        ({"temperature": 1e-5}, False, False),
        ({"temperature": 1.0, "top_k": 1}, True, True),
        ({"temperature": 1.0, "top_k": 2}, False, True),
        ({"temperature": 1.0, "top_p": 0.99}, False, True),
        ({"temperature": 1.0, "min_p": 0.01}, False, True),
        ({"temperature": 1.0}, False, False),
    ],
)
def test_which_rows_are_greedy_or_filtered(params: dict[str, Any], greedy: bool, filtered: bool):
    rows = sample_rows([spec(**params)], CPU)
    assert rows.host_greedy == (greedy,)
    assert rows.host_filtered == (filtered,)
    assert (rows.temperature.item() == 0.0) is greedy


def test_one_choice_of_equals_is_the_lowest_id():
    sampled, _ = choose(torch.tensor([[1.0, 3.0, 2.0, 3.0]] * 2), [spec(), spec(temperature=1.0, top_k=1, seed=5)])
    assert [sampled["r0"].token_id, sampled["r1"].token_id] == [1, 1]


def test_samples_of_a_request_differ_and_repeat():
    logits = torch.zeros(40, 5000)
    specs = [spec(temperature=1.0, seed=77, sample_index=i % 4, position=i // 4) for i in range(40)]
    tokens = [s.token_id for s in choose(logits, specs)[0].values()]
    assert len(set(tokens)) > 35
    assert [s.token_id for s in choose(logits, specs)[0].values()] == tokens
    rng = torch.manual_seed(123).get_state()
    choose(logits, specs)
    assert torch.equal(torch.get_rng_state(), rng)


# Log-probabilities


def test_logprobs_are_those_of_the_raw_model():
    logits = torch.tensor([[0.0, math.log(4.0), math.log(3.0), math.log(2.0)]])
    one = spec(temperature=0.25, top_k=2, logit_bias={3: 100.0}, banned=frozenset({1}), logprobs=3)
    sampled, failed = choose(logits, [one])
    assert not failed
    assert sampled["r0"].token_id == 3
    assert sampled["r0"].logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [token_id for token_id, _ in sampled["r0"].top] == [1, 2, 3]
    assert [p for _, p in sampled["r0"].top] == pytest.approx([math.log(v) for v in (0.4, 0.3, 0.2)], abs=1e-6)


def test_logprobs_cost_nothing_where_nobody_asked():
    ops = SamplingOps()
    sampled, _ = choose(torch.zeros(3, 9), [spec(), spec(logprobs=0), spec()], ops)
    assert ops.log_softmax_rows == 1
    assert sampled["r0"].logprob is None and sampled["r2"].logprob is None
    assert sampled["r1"].logprob == pytest.approx(-math.log(9.0))
    assert all(s.top == () for s in sampled.values())


def test_equal_logprobs_are_listed_by_id():
    rows = torch.tensor([[1.0, 5.0, 1.0, 7.0, 5.0, 1.0, 1.0], [0.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    assert most_likely(rows, 4) == [[3, 1, 4, 0], [1, 2, 3, 4]]
    assert most_likely(rows, 1) == [[3], [1]]
    assert most_likely(rows, 0) == [[], []]
    assert most_likely(rows, 20) == [[3, 1, 4, 0, 2, 5, 6], [1, 2, 3, 4, 5, 6, 0]]


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_the_most_likely_are_those_of_a_sort(levels: int):
    rows = torch.randint(0, levels, (30, 200), generator=torch.Generator().manual_seed(levels)).float()
    for count in (1, 3, 20):
        ranked = [sorted((-value, token_id) for token_id, value in enumerate(row)) for row in rows.tolist()]
        assert most_likely(rows, count) == [[token_id for _, token_id in row[:count]] for row in ranked]


def test_rows_with_other_numbers_of_log_probabilities():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    sampled, _ = choose(logits, [spec(logprobs=count) for count in (0, 5, 2)])
    for index, count in enumerate((0, 5, 2)):
        values = logits[index].double().log_softmax(0)
        best = values.topk(count).indices.tolist()
        assert [token_id for token_id, _ in sampled[f"r{index}"].top] == best
        assert [value for _, value in sampled[f"r{index}"].top] == pytest.approx(values[best].tolist())


# Failures


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_broken_logits_fails_alone(bad: float):
    logits = torch.randn(5, 17, generator=torch.Generator().manual_seed(1))
    specs = [spec(temperature=1.0, seed=i, logprobs=2) for i in range(5)]
    expected, none = choose(logits, specs)
    assert none == {}
    logits[2, 4] = bad
    sampled, failed = choose(logits, specs)
    assert list(failed) == ["r2"] and str(bad) in failed["r2"]
    assert sampled == {key: value for key, value in expected.items() if key != "r2"}


def test_a_ban_does_not_hide_broken_logits():
    logits = torch.zeros(1, 4)
    logits[0, 2] = math.nan
    assert list(choose(logits, [spec(banned=frozenset({2}))])[1]) == ["r0"]


def test_a_row_without_a_choice_fails_alone():
    specs = [spec(), spec(banned=frozenset(range(4))), spec(banned=frozenset(range(3)))]
    sampled, failed = choose(torch.zeros(3, 4), specs)
    assert failed == {"r1": "bans and grammar leave no token to choose"}
    assert {key: value.token_id for key, value in sampled.items()} == {"r0": 0, "r2": 3}


def test_nothing_comes_out_when_all_rows_fail():
    sampled, failed = choose(torch.full((2, 4), math.nan), [spec(), spec()])
    assert sampled == {} and set(failed) == {"r0", "r1"}


# Grammars


class CountingMatcher:
    """Allows after n tokens the id n alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def allowed(self, output: Sequence[int], drafts: Sequence[int] = ()) -> bytes:
        count = len(output) + len(drafts)
        return bytes(token_id == count for token_id in range(self._vocab_size))


def guided(one: SampleSpec, output: Sequence[int], vocab_size: int) -> SampleSpec:
    return replace(one, guide=Guide(matcher=CountingMatcher(vocab_size), output=output))


def test_a_grammar_forbids_before_temperature_and_filters_and_leaves_log_probabilities_alone():
    logits = torch.tensor([[9.0, 0.0, 1.0, 2.0]] * 2)
    one = guided(spec(temperature=5.0, top_k=1, logprobs=2), [0], 4)
    sampled, failed = choose(logits, [one, spec(temperature=0.0)])
    assert (sampled["r0"].token_id, sampled["r1"].token_id, failed) == (1, 0, {})
    assert [token_id for token_id, _ in sampled["r0"].top] == [0, 3]
    assert sampled["r0"].logprob == pytest.approx(float(logits[0].log_softmax(0)[1]))


def test_a_grammar_goes_on_behind_drafts():
    logits = torch.tensor([[9.0, 0.0, 1.0, 2.0]] * 3)
    block = Block(key="r0", spec=guided(spec(), [0], 4), drafts=(1, 2))
    backend = cast(Ops, SamplingOps())
    sampled, _ = settle(backend, AskedBlocks(backend, logits, [block]), "exact")
    assert [token.token_id for token in sampled["r0"]] == [1, 2, 3]


def test_a_row_whose_grammar_leaves_nothing_fails_alone():
    logits = torch.zeros(2, 4)
    sampled, failed = choose(logits, [guided(spec(), range(9), 4), spec()])
    assert (list(sampled), list(failed)) == (["r1"], ["r0"])
