"""Tokens that the cpu backend chooses against those of the reference backend."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.core.batch import SampleSpec
from k3svc.core.request import SamplingParams
from k3svc.engine.sampler import choose_tokens
from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.table import SampleRows
from tests.conformance.cpu_cases import needs_compiler, paths, rand, reference

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
        host_filtered=(top_k > 0,) * count,
    )


def joined(parts: list[SampleRows]) -> SampleRows:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "position")
    columns: dict[str, Tensor] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return SampleRows(
        **columns,
        host_greedy=sum((part.host_greedy for part in parts), ()),
        host_filtered=sum((part.host_filtered for part in parts), ()),
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
    alone = [choose_tokens(backend, logits[row : row + 1], specs[row : row + 1]).token_ids[0] for row in range(5)]
    for row in range(5):
        broken = logits.clone()
        broken[row] = bad
        choices = choose_tokens(backend, broken, specs)
        assert list(choices.failed) == [row]
        assert choices.token_ids == [*alone[:row], -1, *alone[row + 1 :]]
