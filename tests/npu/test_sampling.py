"""Sampling through npu_top_k_top_p against the reference: the same tokens, row by row."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from k3svc.ops.npu import sampling
from k3svc.ops.npu_emulated.backend import NpuEmulated
from k3svc.ops.table import SampleRows
from k3svc.ops.upload import to_host
from tests.npu.bench import RawCalls, emulated, reference

VOCAB = 1500


def sample_rows(rows: list[dict[str, Any]], seed: int = 0) -> SampleRows:
    """Each row names what differs from: temperature 1, no filter."""
    count = len(rows)
    values = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **row} for row in rows]
    top_k, top_p, min_p = (torch.tensor([row[name] for row in values]) for name in ("top_k", "top_p", "min_p"))
    return SampleRows(
        temperature=torch.tensor([row["temperature"] for row in values]),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=torch.arange(count) * 77 + seed,
        sample_index=torch.zeros(count, dtype=torch.int64),
        position=torch.arange(count) + 5,
        host_greedy=tuple(row["temperature"] == 0 for row in values),
        host_filters=tuple(zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)),
    )


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 1},
    {"top_k": 20},
    {"top_k": 1200},
    {"top_k": 5000},
    {"top_p": 0.8},
    {"top_k": 50, "top_p": 0.5},
    {"min_p": 0.1},
    {"temperature": 1.6, "top_k": 1100, "top_p": 0.9, "min_p": 0.01},
]


def logits(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_the_reference(seed: int):
    order = torch.randperm(len(KINDS), generator=torch.Generator().manual_seed(seed)).tolist()
    rows, x = sample_rows([KINDS[i] for i in order], seed), logits(len(KINDS), seed)
    before = x.clone()
    assert emulated().sample(x, rows).tolist() == reference().sample(x, rows).tolist()
    assert torch.equal(x, before)


def calls(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Arguments (logits, p, k) of the filter's calls."""
    with RawCalls() as raw:
        emulated().sample(logits(len(rows), 1), sample_rows(rows))
    return [positional for name, positional, _ in raw.calls if name == "npu_top_k_top_p"]


def test_rows_are_split_by_their_filters():
    found = calls(KINDS)
    shapes = {(p is not None, k is not None): x.shape[0] for x, p, k in found}
    # k = 1 and 20 | p = .8, and p = .9 whose k is past the operator's limit | k and p.
    assert shapes == {(False, True): 2, (True, False): 2, (True, True): 1}


def test_p_comes_before_k_in_their_dtypes():
    ((x, p, k),) = calls([{"top_k": 7, "top_p": 0.25}])
    assert (x.dtype, p.dtype, p.tolist()) == (torch.float32, torch.float32, [0.25])
    assert (k.dtype, k.tolist()) == (torch.int32, [7])


@pytest.mark.parametrize(
    "row", [{}, {"temperature": 0.0}, {"top_k": 0, "min_p": 0.2}, {"top_k": VOCAB}, {"top_k": 1400}]
)
def test_no_filter_is_no_call(row: dict[str, Any]):
    assert calls([row]) == []


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
def test_a_row_without_a_finite_logit_disturbs_no_other(bad: float):
    rows = sample_rows([{"top_k": 20}, {"top_k": 20, "top_p": 0.9}, {"top_k": 20}, {}])
    x = logits(4, 2)
    expected = emulated().sample(x, rows).tolist()
    for index in range(4):
        broken = x.clone()
        broken[index] = bad
        with RawCalls() as raw:
            found = emulated().sample(broken, rows).tolist()
        given = [positional[0] for name, positional, _ in raw.calls if name == "npu_top_k_top_p"]
        assert given and all(bool(x.isfinite().any(dim=1).all()) for x in given)
        assert 0 <= found[index] < VOCAB
        assert found[:index] + found[index + 1 :] == expected[:index] + expected[index + 1 :]


def test_all_greedy_needs_no_device_filter():
    ops = emulated()
    assert isinstance(ops, NpuEmulated)
    x = torch.tensor([[1.0, 5.0, 5.0], [2.0, 0.0, 1.0]])
    assert ops.sample(x, sample_rows([{"temperature": 0.0}] * 2)).tolist() == [1, 0]
    assert ops.session.calls == []


class Reads(TorchFunctionMode):
    """Names of calls by which the host waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cpu", "item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "numpy"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", ["sample", "probabilities"])
def test_the_device_is_waited_for_once_when_all_has_been_asked(call: str, monkeypatch: pytest.MonkeyPatch):
    before: list[list[str]] = []

    def copied(*tensors: torch.Tensor) -> list[torch.Tensor]:
        before.append(list(reads.seen))
        return to_host(*tensors)

    monkeypatch.setattr(sampling, "to_host", copied)
    rows, x, ops = sample_rows(KINDS), logits(len(KINDS), 3), emulated()
    with Reads() as reads:
        getattr(ops, call)(x, rows)
    assert before == [[]]


@pytest.mark.parametrize("seed", range(4))
def test_laws_are_those_of_the_reference(seed: int):
    order = torch.randperm(len(KINDS), generator=torch.Generator().manual_seed(seed)).tolist()
    rows, x = sample_rows([KINDS[i] for i in order], seed), logits(len(KINDS), seed)
    found, expected = emulated().probabilities(x, rows), reference().probabilities(x, rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found.sum(-1), torch.ones(len(KINDS)))


def test_a_law_without_a_finite_logit_disturbs_no_other():
    rows, x = sample_rows([{"top_k": 20}, {"top_p": 0.9}, {}]), logits(3, 2)
    expected = emulated().probabilities(x, rows)
    for index in range(3):
        broken = x.clone()
        broken[index] = -torch.inf
        found = emulated().probabilities(broken, rows)
        others = [n for n in range(3) if n != index]
        assert torch.equal(found[others], expected[others])
        assert float(found[index].sum()) == 1.0
