"""Tokens that the cpu backend chooses against those of the reference backend, for outputs and for drafts."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3svc.core.batch import SampleSpec
from k3svc.core.request import SamplingParams
from k3svc.engine.sampler import AskedTokens
from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.table import SampleRows
from tests.conformance.cpu_cases import needs_compiler, paths, poisoned_memory, rand, reference
from tests.conformance.sampling_cases import rows_at, sample_rows

pytestmark = needs_compiler


def make_rows(count: int, temperature: float, *, top_k: int = 0, greedy: bool = False) -> SampleRows:
    source = torch.Generator().manual_seed(count)
    return SampleRows(
        temperature=torch.full((count,), 0.0 if greedy else temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        seed=torch.randint(-(2**62), 2**62, (count,), generator=source),
        sample_index=torch.arange(count) % 5,
        position=torch.arange(count) * 17,
        host_greedy=(greedy,) * count,
        host_filters=((top_k, 1.0, 0.0),) * count,
    )


def joined(parts: list[SampleRows]) -> SampleRows:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "position")
    columns: dict[str, Tensor] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return SampleRows(
        **columns,
        host_greedy=sum((part.host_greedy for part in parts), ()),
        host_filters=sum((part.host_filters for part in parts), ()),
    )


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 4.0])
def test_unfiltered_rows(scale: float, temperature: float):
    logits = rand(torch.Generator().manual_seed(3), 200, 1001, scale=scale)
    logits[::3, 100:] = -math.inf
    rows = make_rows(200, temperature)
    expected = reference().sample(logits, rows)
    assert scale == 100 or len(set(expected.tolist())) > 20
    for isa in paths():
        assert torch.equal(Cpu(isa=isa).sample(logits, rows), expected), isa


def test_kinds_of_rows_together():
    logits = rand(torch.Generator().manual_seed(4), 9, 300, scale=2.0)
    rows = joined([make_rows(3, 0.8), make_rows(3, 0.8, top_k=20), make_rows(3, 0.8, greedy=True)])
    chosen = Cpu().sample(logits, rows)
    assert torch.equal(chosen, reference().sample(logits, rows))
    assert torch.equal(chosen[6:], logits[6:].argmax(-1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_inside_the_vocabulary_and_alone(value: float):
    logits = rand(torch.Generator().manual_seed(5), 3, 50)
    rows = make_rows(3, 1.0)
    expected = Cpu().sample(logits, rows)
    logits[1] = value
    chosen = Cpu().sample(logits, rows)
    assert 0 <= int(chosen[1]) < 50
    assert torch.equal(chosen[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_of_broken_logits_disturbs_no_other(bad: float) -> None:
    """Broken rows go through the same call as the others, whose tokens are those that they get alone."""
    drawn = SamplingParams(temperature=1.0, seed=9)
    changes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 5, "top_p": 0.9},
        {"top_p": 0.8},
        {"min_p": 0.1},
    ]
    params = [replace(drawn, **change) for change in changes]
    specs = [SampleSpec(params=one, sample_index=0, position=7, counts=None) for one in params]
    backend, logits = Cpu(), rand(torch.Generator().manual_seed(3), len(specs), 1000)
    alone = [AskedTokens(backend, logits[row : row + 1], specs[row : row + 1]).read().token_ids[0] for row in range(5)]
    for row in range(5):
        broken = logits.clone()
        broken[row] = bad
        choices = AskedTokens(backend, broken, specs).read()
        assert list(choices.failed) == [row]
        assert choices.token_ids == [*alone[:row], -1, *alone[row + 1 :]]


LOGITS = {
    "vocabulary": st.integers(1, 700),
    "scale": st.sampled_from([0.01, 0.5, 3.0, 40.0]),
    "levels": st.sampled_from([0, 2, 5]),
    "masked": st.sampled_from([0.0, 0.3, 0.95]),
    "seed": st.integers(0, 2**31),
}


def logits_of(count: int, vocabulary: int, scale: float, levels: int, masked: float, seed: int) -> Tensor:
    """Rows of which the first id is never masked; with `levels` of so many different values, full of ties."""
    source = torch.Generator().manual_seed(seed)
    logits = rand(source, count, vocabulary, scale=scale)
    if levels:
        logits = torch.randint(0, levels, (count, vocabulary), generator=source).float() * scale
    logits[:, 1:].masked_fill_(torch.rand(count, vocabulary - 1, generator=source) < masked, -math.inf)
    return logits


@given(count=st.integers(1, 12), **LOGITS)
@settings(max_examples=60)
def test_all_kinds_of_rows(count: int, seed: int, **geometry: Any):
    """Any mix of parameters, on rows that lie apart; a row alone gives what it gives among others."""
    logits, rows = logits_of(count, seed=seed, **geometry), sample_rows(count, seed)
    apart = torch.cat([logits, logits], dim=1)[:, : logits.shape[1]]
    expected = reference().sample(logits, rows).tolist()
    with poisoned_memory():
        for cpu in (Cpu(isa=isa, threads=threads) for isa in paths() for threads in (1, 3)):
            assert cpu.sample(apart, rows).tolist() == expected, cpu.isa
        alone = [int(cpu.sample(logits[row : row + 1], rows_at(rows, [row]))[0]) for row in range(count)]
    assert alone == expected


@given(count=st.integers(1, 8), with_bias=st.booleans(), offset=st.integers(0, 9), **LOGITS)
@settings(max_examples=60)
def test_drafts(count: int, seed: int, *, with_bias: bool, offset: int, **geometry: Any):
    logits, rows = logits_of(count, seed=seed, **geometry), sample_rows(count, seed)
    bias = logits.roll(1, dims=0).clamp(min=-9.0) if with_bias else None
    # The first id is what keeps a row from having nothing to choose from.
    banned = logits.shape[1] - 1
    if banned == 0:
        return
    expected, sums = reference().draft.choose(logits, bias, banned, rows, offset)
    with poisoned_memory():
        for isa in paths():
            own, scores = Cpu(isa=isa).draft.choose(logits, bias, banned, rows, offset)
            assert torch.equal(scores, sums), isa
            assert own.tolist() == expected.tolist(), isa


@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_filters_decide_as_float64_does_at_their_borders(temperature: float):
    """top-p and min-p at the last float32 number before or after what an id of the row reaches."""
    count, vocabulary = 2000, 6
    source = torch.Generator().manual_seed(7)
    logits = rand(source, count, vocabulary)
    warmth = torch.full((count,), temperature)
    mass = (logits.double() / warmth.double()[:, None]).softmax(dim=1)
    ascending = mass.sort(dim=1).values
    border = torch.randint(0, vocabulary - 1, (count, 1), generator=source)
    nucleus = (1.0 - ascending.cumsum(dim=1).gather(1, border)[:, 0]).float()
    share = (ascending.gather(1, border) / ascending[:, -1:])[:, 0].float()
    aim = torch.where(torch.rand(count, generator=source) < 0.5, 0.0, 1.0)
    neither = torch.zeros(count, dtype=torch.int64)
    for top_p, min_p in ((nucleus.nextafter(aim), torch.zeros(count)), (torch.ones(count), share.nextafter(aim))):
        rows = SampleRows(
            temperature=warmth,
            top_k=neither,
            top_p=top_p,
            min_p=min_p,
            seed=torch.arange(count),
            sample_index=neither,
            position=neither,
            host_greedy=(False,) * count,
            host_filters=tuple(zip([0] * count, top_p.tolist(), min_p.tolist(), strict=True)),
        )
        expected = reference().sample(logits, rows)
        for isa in paths():
            assert torch.equal(Cpu(isa=isa).sample(logits, rows), expected), isa
