"""Figures of records whose times are known."""

import dataclasses

import pytest

from k3svc.bench.figures import Objectives, figures, parse_objectives, text_table, tokens_per_second
from k3svc.core.events import SpeculationStats
from k3svc.errors import ConfigError
from tests.unit.bench.records import failure, record, result

NONE = Objectives()


def test_latencies_and_rates():
    records = [record(index, due_s=float(index), first_s=0.1 * (index + 1), gap_s=0.02) for index in range(4)]
    values = figures(result(*records), NONE)
    assert values["completed"] == 4
    assert values["total_input_tokens"] == 400
    assert values["total_output_tokens"] == 20
    assert values["request_throughput"] == pytest.approx(0.4)
    assert values["output_throughput"] == pytest.approx(2.0)
    assert values["total_token_throughput"] == pytest.approx(42.0)
    assert values["mean_ttft_ms"] == pytest.approx(250.0)
    assert values["median_ttft_ms"] == pytest.approx(250.0)
    assert values["p99_ttft_ms"] == pytest.approx(397.0)
    assert values["std_ttft_ms"] == pytest.approx(111.803, abs=0.001)
    assert values["median_tpot_ms"] == pytest.approx(20.0)
    assert values["p99_itl_ms"] == pytest.approx(20.0)
    assert values["mean_e2el_ms"] == pytest.approx(330.0)
    assert values["max_concurrent_requests"] == 1
    assert values["max_output_tokens_per_s"] == 5
    assert "request_goodput" not in values


def test_tokens_that_share_a_message_count_in_tpot_and_once_in_itl():
    values = figures(result(record(n=3, gap_s=0.03, counts=[1, 2, 3])), NONE)
    assert values["median_tpot_ms"] == pytest.approx(60.0 / 5)
    assert values["median_itl_ms"] == pytest.approx(30.0)
    assert values["total_output_tokens"] == 6


def test_a_single_token_has_no_tpot():
    values = figures(result(record(n=1)), NONE)
    assert values["median_tpot_ms"] is None
    assert values["median_ttft_ms"] == pytest.approx(100.0)


def test_latency_counts_from_when_a_request_was_due():
    values = figures(result(record(due_s=2.0, sent_s=2.5, first_s=0.7)), NONE)
    assert values["median_ttft_ms"] == pytest.approx(700.0)


def test_failures_count_by_code_and_in_nothing_else():
    records = [record(0), failure(1, "UNAVAILABLE"), failure(2, "UNAVAILABLE"), failure(3, "RESOURCE_EXHAUSTED")]
    values = figures(result(*records), Objectives(ttft_ms=500.0))
    assert values["failed"] == 3
    assert values["errors"] == {"UNAVAILABLE": 2, "RESOURCE_EXHAUSTED": 1}
    assert values["total_output_tokens"] == 5
    assert values["good_share"] == 0.25
    assert "UNAVAILABLE errors:" in text_table(values)


def test_nothing_that_succeeded_gives_no_latencies():
    values = figures(result(failure(0, "INTERNAL")), NONE)
    assert values["median_ttft_ms"] is None
    assert values["handoff_gb_s"] is None
    assert "Failed requests:                                  1" in text_table(values)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        (Objectives(ttft_ms=150.0), 2),
        (Objectives(ttft_ms=250.0), 4),
        (Objectives(ttft_ms=250.0, tpot_ms=25.0), 2),
        (Objectives(e2el_ms=200.0), 1),
    ],
)
def test_goodput_wants_every_objective(objectives: Objectives, good: int):
    records = [record(first_s=first, gap_s=gap) for first in (0.1, 0.2) for gap in (0.02, 0.03)]
    values = figures(result(*records), objectives)
    assert values["request_goodput"] == pytest.approx(good / 10.0)


def test_what_the_service_reports():
    values = figures(result(record(0), record(1, first_s=0.15)), NONE)
    assert values["median_queue_ms"] == 10.0
    assert values["median_handoff_tail_ms"] == 5.0
    assert values["handoff_bytes_per_request"] == 4_000_000
    assert values["handoff_gb_s"] == pytest.approx(0.1)
    assert values["handoff_tail_share_of_ttft"] == pytest.approx(0.01 / 0.25)
    assert values["preemptions"] == 2
    assert values["prefill_retries"] == 2
    assert values["acceptance_length"] is None
    assert values["generator_cpu_ms_per_token"] == pytest.approx(50.0)
    assert values["generator_tpot_excess_ms"] == pytest.approx(0.0)


def test_acceptance_is_over_the_steps_that_had_drafts():
    stats = SpeculationStats(steps=20, steps_with_drafts=10, proposed=40, accepted=25, rested=4, drafters=("ngram",))
    values = figures(result(record(speculation=stats), record(speculation=stats), record(n=10)), NONE)
    assert values["acceptance_length"] == pytest.approx(3.5)
    assert values["draft_acceptance_rate"] == pytest.approx(0.625)
    assert values["drafters"] == ["ngram"]
    assert values["drafted_step_share"] == pytest.approx(20 / 50)
    assert values["rested_step_share"] == pytest.approx(8 / 50)
    lines = dict(line.rsplit(maxsplit=1) for line in text_table(values).splitlines() if "drafts" in line)
    assert lines == {"Steps with drafts (%):": "40.00", "Steps at which drafts rested (%):": "16.00"}
    without = text_table(figures(result(record()), NONE))
    assert "drafts" not in without


def test_overlapping_requests_and_their_tokens():
    records = [record(0, due_s=0.0, first_s=0.5, gap_s=0.5), record(1, due_s=1.0, first_s=0.5, gap_s=0.5)]
    assert figures(result(*records), NONE)["max_concurrent_requests"] == 2
    assert tokens_per_second(records) == [1, 3, 4, 2]


def test_objectives_are_read():
    assert parse_objectives(["ttft:500", "tpot:50.5"]) == Objectives(ttft_ms=500.0, tpot_ms=50.5)
    assert not parse_objectives([]).are_set
    for text in ("ttft", "ttft:", "itl:5", "ttft:0", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match="goodput"):
            parse_objectives([text])


def test_the_table_has_the_lines_that_vllm_prints():
    table = text_table(figures(result(record()), Objectives(ttft_ms=1.0)))
    for line in (
        "Successful requests:                              1",
        "Benchmark duration (s):                       10.00",
        "Request goodput (req/s):                          0",
        "Total generated tokens:                           5",
        "Median TTFT (ms):                            100.00",
        "P99 ITL (ms):                                 20.00",
        "Median E2EL (ms):                            180.00",
    ):
        assert line.split(":")[0] in table
        assert line.split()[-1] in next(row for row in table.splitlines() if row.startswith(line.split(":")[0])), line
    assert all(len(row) == 51 for row in table.splitlines())


def test_every_figure_is_json():
    values = figures(result(record(), failure(1, "INTERNAL")), Objectives(ttft_ms=1.0))
    assert dataclasses.is_dataclass(NONE)
    assert {type(value) for value in values.values()} <= {int, float, type(None), dict, list}
