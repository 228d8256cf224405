"""Ranges of request fields: each edge is accepted, the step beyond is refused by the field's name."""

from dataclasses import replace

import pytest

from k3svc.core.request import GenerateRequest, SamplingParams, StopParams
from k3svc.errors import InvalidRequest

VOCAB = 100
GOOD = GenerateRequest(request_id="r", prompt=(1, 2, 3), sampling=SamplingParams(), stop=StopParams())
NAN, INF = float("nan"), float("inf")


def check(request: GenerateRequest) -> None:
    request.validate(vocab_size=VOCAB, max_context_tokens=50, max_samples=4)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0.0, 100.0], [-0.1, NAN, INF, 100.5]),
        ("top_k", [0, 1, 2**31 - 1], [-1, 2**31]),
        ("top_p", [1e-9, 1.0], [0.0, 1.1, -1.0, NAN]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, NAN]),
        ("repetition_penalty", [0.01, 10.0], [0.0, -1.0, 10.1, NAN, INF]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, NAN]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, NAN]),
        ("seed", [0, 2**64 - 1], [-1, 2**64]),
        ("logit_bias", [{0: -100.0, 99: 100.0}], [{100: 0.0}, {-1: 0.0}, {5: 101.0}, {5: NAN}]),
    ],
)
def test_sampling_ranges(field: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        check(replace(GOOD, sampling=SamplingParams(**{field: value})))  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(InvalidRequest, match=f"sampling.{field}"):
            check(replace(GOOD, sampling=SamplingParams(**{field: value})))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [None, 1, 47], [0, -1, 48]),
        ("min_tokens", [0, 5], [-1]),
        ("stop", [(), ("a",), ("x" * 256,) * 16], [("",), ("x" * 257,), ("a",) * 17]),
        ("stop_token_ids", [frozenset({0, 99})], [frozenset({100}), frozenset({-1})]),
    ],
)
def test_stop_ranges(field: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        check(replace(GOOD, stop=StopParams(**{field: value})))  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(InvalidRequest, match=f"stop.{field}"):
            check(replace(GOOD, stop=StopParams(**{field: value})))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("request_id", ["a", "x" * 128], ["", "x" * 129, "a\nb", "é"]),
        ("prompt", [(0,), (99,) * 49], [(), (100,), (5, -1), (1,) * 50]),
        ("n", [1, 4], [0, 5]),
        ("logprobs", [None, 0, 20], [-1, 21]),
    ],
)
def test_request_ranges(field: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        check(replace(GOOD, **{field: value}))  # type: ignore[arg-type]
    name = "sampling.n" if field == "n" else field
    for value in bad:
        with pytest.raises(InvalidRequest, match=name):
            check(replace(GOOD, **{field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 50])
def test_a_prompt_of_a_wrong_length_is_told_by_its_length(count: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(replace(GOOD, prompt=(1,) * count))
    assert caught.value.message == f"prompt: got '{count} tokens'; allowed: 1 to 49 tokens"


def test_absorbed_tokens_count_for_the_limits() -> None:
    short = replace(GOOD, stop=StopParams(max_tokens=3))
    check(replace(short, generated=(1, 2)))
    for bad in (
        replace(short, generated=(1, 2, 3)),
        replace(short, generated=(100,)),
        replace(short, generated=(1,), n=2),
        replace(GOOD, generated=(1,) * 47),
        replace(GOOD, stop=StopParams(max_tokens=3, min_tokens=4)),
    ):
        with pytest.raises(InvalidRequest):
            check(bad)


def test_long_values_are_cut_in_the_message() -> None:
    with pytest.raises(InvalidRequest) as error:
        check(replace(GOOD, request_id="x" * 10_000))
    assert len(error.value.message) < 250
