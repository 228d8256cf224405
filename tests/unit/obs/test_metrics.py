"""What a registry holds after what was fed to it."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow
from k3svc.core.events import Load
from k3svc.engine.observer import UNOBSERVED, Observer
from k3svc.obs.metrics import Metrics

LOAD: dict[str, Any] = {
    "running": 1,
    "waiting": 2,
    "in_transfer": 3,
    "free_pages": 4,
    "total_pages": 5,
    "free_slots": 6,
    "total_slots": 8,
    "draining": True,
    "num_tokens": 77,
    "handoff_bytes": 8,
    "preemptions": 12,
    "draft_steps": 13,
    "accepted_drafts": 14,
    "prefix_pages": 15,
    "prefix_snapshots": 16,
    "prefix_queried_tokens": 17,
    "prefix_hit_tokens": 18,
    "prefix_evicted_pages": 19,
    "prefix_evicted_snapshots": 20,
    "drafter": "ngram",
    "speculation_rests": False,
    "drafter_health": "slow",
    "queued_tokens": 21,
    "prefill_targets": (),
    "outcomes": {"finished": 9, "failed": 10},
}


def test_the_load_of_the_test_has_the_fields_of_a_load():
    assert set(LOAD) == {field.name for field in dataclasses.fields(Load)}


def test_the_load_is_read_when_the_registry_is():
    load = dict(LOAD)
    value = Metrics("decode", lambda: load).registry.get_sample_value
    assert value("k3svc_num_requests_running") == 1
    load["running"] = 11
    assert value("k3svc_num_requests_running") == 11
    assert value("k3svc_num_requests_waiting") == 2
    assert value("k3svc_num_requests_in_transfer") == 3
    assert value("k3svc_pages_free") == 4
    assert value("k3svc_pages_total") == 5
    assert value("k3svc_kv_cache_usage_perc") == pytest.approx(0.2)
    assert value("k3svc_slots_free") == 6
    assert value("k3svc_slots_total") == 8
    assert value("k3svc_state_usage_perc") == pytest.approx(0.25)
    assert value("k3svc_draining") == 1
    assert value("k3svc_handoff_bytes_total") == 8
    assert value("k3svc_num_preemptions_total") == 12
    assert value("k3svc_requests_total", {"outcome": "failed"}) == 10


def test_the_health_of_the_drafter_is_one_of_three():
    def states(health: str) -> list[float | None]:
        value = Metrics("decode", lambda: {**LOAD, "drafter_health": health}).registry.get_sample_value
        return [value("k3svc_drafter_health", {"health": name}) for name in ("healthy", "slow", "down")]

    assert [states(health) for health in ("healthy", "slow", "down", "")] == [
        [1.0, 0.0, 0.0],
        [0.0, 1.0, 0.0],
        [0.0, 0.0, 1.0],
        [None, None, None],
    ]


def test_the_prefix_cache_is_that_of_prefill():
    names = ("pages", "snapshots", "queries_total", "hits_total", "evicted_pages_total", "evicted_snapshots_total")
    values = {
        role: [Metrics(role, lambda: LOAD).registry.get_sample_value(f"k3svc_prefix_cache_{name}") for name in names]
        for role in ("prefill", "decode")
    }
    assert values == {"prefill": [15, 16, 17, 18, 19, 20], "decode": [None] * 6}


def test_a_pool_of_nothing_is_not_in_use():
    value = Metrics("prefill", lambda: {**LOAD, "total_pages": 0, "free_pages": 0}).registry.get_sample_value
    assert value("k3svc_kv_cache_usage_perc") == 0.0


def test_the_documentation_lists_every_metric_under_the_roles_that_serve_it():
    page = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
    letters = {"prefill": "P", "decode": "D", "draft": "S"}
    documented = {
        (name, role)
        for names, roles in re.findall(r"^\| (`.*?`) \| ([PDS ]+) \|", page, re.MULTILINE)
        for name in re.findall(r"`((?:k3svc|grpc)_\w+)", names)
        for role, letter in letters.items()
        if letter in roles.split()
    }
    served = set[tuple[str, str]]()
    for role in letters:
        # Without speculation nobody tells of a drafter, which these two never have.
        load = LOAD if role == "decode" else LOAD | {"drafter_health": ""}
        families = list(Metrics(role, lambda load=load: load).registry.collect())  # type: ignore[misc]
        names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
        served |= {(name, role) for name in names if not name.startswith("process_")}
    assert documented == served


@pytest.mark.parametrize(
    ("role", "name", "other"),
    [("decode", "generation_tokens", "prompt_tokens"), ("prefill", "prompt_tokens", "generation_tokens")],
)
def test_tokens_are_those_that_the_role_makes(role: str, name: str, other: str):
    value = Metrics(role, lambda: LOAD).registry.get_sample_value
    assert value(f"k3svc_{name}_total") == 77
    assert value(f"k3svc_{other}_total") is None


def test_a_finished_request_is_observed_in_seconds():
    metrics = Metrics("decode")
    for output_tokens in (1, 11):
        metrics.observe_request(
            e2e_s=2.0,
            ttft_s=0.3,
            tpot_s=0.017,
            queue_s=0.1,
            prefill_s=0.05,
            prompt_tokens=100,
            output_tokens=output_tokens,
        )
    value = metrics.registry.get_sample_value
    assert value("k3svc_time_to_first_token_seconds_sum") == pytest.approx(0.6)
    assert value("k3svc_time_to_first_token_seconds_bucket", {"le": "0.5"}) == 2
    assert value("k3svc_time_to_first_token_seconds_bucket", {"le": "0.25"}) == 0
    assert value("k3svc_time_per_output_token_seconds_count") == 1
    assert value("k3svc_e2e_request_latency_seconds_sum") == 4.0
    assert value("k3svc_request_decode_time_seconds_sum") == pytest.approx(3.4)
    assert value("k3svc_request_queue_time_seconds_sum") == pytest.approx(0.2)
    assert value("k3svc_request_prefill_time_seconds_sum") == pytest.approx(0.1)
    assert value("k3svc_request_prompt_tokens_sum") == 200
    assert value("k3svc_request_generation_tokens_sum") == 12


def test_speculation_is_counted_under_the_names_of_vllm():
    metrics = Metrics("decode")
    for _ in range(2):
        metrics.observe_speculation(
            steps=10, proposed=40, accepted=25, late=2, salvaged=1, accepted_by_position=(10, 9, 6), gaps=3
        )
    value = metrics.registry.get_sample_value
    assert value("k3svc_spec_decode_num_drafts_total") == 20
    assert value("k3svc_spec_decode_num_draft_tokens_total") == 80
    assert value("k3svc_spec_decode_num_accepted_tokens_total") == 50
    assert value("k3svc_spec_decode_num_accepted_tokens_per_pos_total", {"position": "2"}) == 12
    assert value("k3svc_spec_decode_late_total") == 4
    assert value("k3svc_spec_decode_salvaged_total") == 2
    assert value("k3svc_spec_decode_gaps_total") == 6


def test_an_observer_counts_steps_and_handoffs():
    metrics = Metrics("decode")
    observer = Observer(metrics)
    row = ExtendRow(key="a#1", slot=1, block_table=[1], token_ids=[5, 6, 7], start=0, is_last=True)
    observer.step(ExtendBatch(rows=[row, row]), 0.25)
    decode = DecodeRow(key="b", slot=2, block_table=[2], token_id=1, position=3, sample=None)
    observer.step(DecodeBatch(rows=[decode, decode, decode]), 0.004)
    observer.handoff(num_bytes=3_000_000, landing_s=0.5, tail_s=0.002)
    observer.handoff(num_bytes=10, landing_s=0.0, tail_s=0.001)
    observer.handoff_failed("HANDOFF_SILENT")
    value = metrics.registry.get_sample_value
    assert value("k3svc_engine_step_seconds_sum", {"kind": "extend"}) == 0.25
    assert value("k3svc_engine_step_tokens_sum", {"kind": "extend"}) == 6
    assert value("k3svc_engine_step_tokens_sum", {"kind": "decode"}) == 3
    assert value("k3svc_handoff_tail_seconds_sum") == pytest.approx(0.003)
    assert value("k3svc_handoff_landing_seconds_count") == 2
    assert value("k3svc_handoff_speed_gb_s_sum") == pytest.approx(0.006)
    assert value("k3svc_handoff_speed_gb_s_count") == 1
    assert value("k3svc_handoff_failures_total", {"reason": "HANDOFF_SILENT"}) == 1


def test_a_prefill_observes_what_its_hand_offs_took():
    metrics = Metrics("prefill")
    metrics.observe_prefill(queue_s=0.25, compute_s=0.5, send_tail_s=0.125, way="state_port")
    value = metrics.registry.get_sample_value
    assert value("k3svc_request_queue_time_seconds_sum") == 0.25
    assert value("k3svc_request_prefill_time_seconds_sum") == 0.5
    assert value("k3svc_handoff_send_tail_seconds_sum") == 0.125
    assert [value("k3svc_handoffs_total", {"way": way}) for way in ("shm", "state_port", "stream")] == [0, 1, 0]


def test_without_metrics_an_observer_drops_what_it_is_told():
    UNOBSERVED.step(DecodeBatch(rows=[]), 1.0)
    UNOBSERVED.handoff(num_bytes=1, landing_s=1.0, tail_s=1.0)
    UNOBSERVED.handoff_failed("X")


def test_registries_of_a_process_are_apart_and_readable():
    first, second = Metrics("decode", lambda: LOAD), Metrics("prefill", lambda: LOAD)
    first.count_rpc("k3svc.v1.DecodeService", "Generate", "OK")
    text = generate_latest(first.registry).decode()
    line = 'grpc_server_handled_total{grpc_code="OK",grpc_method="Generate",grpc_service="k3svc.v1.DecodeService"} 1.0'
    assert line in text
    assert line not in generate_latest(second.registry).decode()


def test_names_are_ours_or_those_of_grpc_and_of_the_process():
    text = generate_latest(Metrics("decode", lambda: LOAD).registry).decode()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert {name.partition("_")[0] for name in names} == {"k3svc", "grpc", "process"}
