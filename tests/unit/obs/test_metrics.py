"""What a registry holds after what was fed to it."""

from typing import Any

import pytest
from prometheus_client import generate_latest

from k3svc.obs.metrics import Metrics

LOAD: dict[str, Any] = {
    "running": 1,
    "waiting": 2,
    "in_transfer": 3,
    "free_pages": 4,
    "total_pages": 5,
    "free_slots": 6,
    "total_slots": 7,
    "handoff_bytes": 8,
    "outcomes": {"finished": 9, "failed": 10},
}


def test_the_load_is_read_when_the_registry_is():
    load = dict(LOAD)
    registry = Metrics(lambda: load).registry
    assert registry.get_sample_value("k3svc_num_requests_running") == 1
    load["running"] = 11
    assert registry.get_sample_value("k3svc_num_requests_running") == 11
    assert registry.get_sample_value("k3svc_num_requests_waiting") == 2
    assert registry.get_sample_value("k3svc_num_requests_in_transfer") == 3
    assert registry.get_sample_value("k3svc_pages_free") == 4
    assert registry.get_sample_value("k3svc_pages_total") == 5
    assert registry.get_sample_value("k3svc_slots_free") == 6
    assert registry.get_sample_value("k3svc_slots_total") == 7
    assert registry.get_sample_value("k3svc_handoff_bytes_total") == 8
    assert registry.get_sample_value("k3svc_requests_total", {"outcome": "failed"}) == 10


def test_a_finished_request_is_observed_in_seconds():
    metrics = Metrics(lambda: LOAD)
    for output_tokens in (1, 11):
        metrics.observe_request(
            e2e_s=2.0,
            ttft_s=0.3,
            tpot_s=0.017,
            queue_s=0.1,
            handoff_tail_s=0.05,
            prompt_tokens=100,
            output_tokens=output_tokens,
        )
    value = metrics.registry.get_sample_value
    assert value("k3svc_time_to_first_token_seconds_sum") == pytest.approx(0.6)
    assert value("k3svc_time_to_first_token_seconds_bucket", {"le": "0.32"}) == 2
    assert value("k3svc_time_to_first_token_seconds_bucket", {"le": "0.16"}) == 0
    assert value("k3svc_time_per_output_token_seconds_count") == 1
    assert value("k3svc_e2e_request_latency_seconds_sum") == 4.0
    assert value("k3svc_request_queue_time_seconds_sum") == pytest.approx(0.2)
    assert value("k3svc_handoff_tail_seconds_sum") == pytest.approx(0.1)
    assert value("k3svc_prompt_tokens_total") == 200
    assert value("k3svc_generation_tokens_total") == 12


def test_registries_of_a_process_are_apart_and_readable():
    first, second = Metrics(lambda: LOAD), Metrics(lambda: LOAD)
    first.count_rpc("k3svc.v1.DecodeService", "Generate", "OK")
    text = generate_latest(first.registry).decode()
    line = 'grpc_server_handled_total{grpc_code="OK",grpc_method="Generate",grpc_service="k3svc.v1.DecodeService"} 1.0'
    assert line in text
    assert line not in generate_latest(second.registry).decode()
