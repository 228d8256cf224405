"""Prometheus metrics of one process, in a registry of its own.

Names and units follow what dashboards of LLM serving and of gRPC servers expect, with the prefix k3svc.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_GAUGES = {
    "running": ("num_requests_running", "Requests in the running batch, or prompts being computed"),
    "waiting": ("num_requests_waiting", "Requests waiting for admission"),
    "in_transfer": ("num_requests_in_transfer", "Requests whose state is on its way (decode) or held (prefill)"),
    "free_pages": ("pages_free", "Pages not in use"),
    "total_pages": ("pages_total", "Pages of the pool"),
    "free_slots": ("slots_free", "Slots not in use"),
    "total_slots": ("slots_total", "Slots of the pool"),
}


class Metrics:
    """What a role feeds. `load` gives the fields of core.events.Load when the registry is read."""

    def __init__(self, load: Callable[[], Mapping[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_LoadCollector(load))
        self._rpcs = Counter(
            "grpc_server_handled",
            "RPCs ended by the server, by status code",
            ("grpc_service", "grpc_method", "grpc_code"),
            registry=self.registry,
        )
        self._ttft_s, self._tpot_s, self._e2e_s, self._queue_s, self._handoff_tail_s = (
            Histogram(f"k3svc_{name}_seconds", text, buckets=buckets, registry=self.registry)
            for name, text, buckets in (
                ("time_to_first_token", "From arrival to the first token", _TTFT_BUCKETS),
                ("time_per_output_token", "Mean time per output token after the first", _TPOT_BUCKETS),
                ("e2e_request_latency", "From arrival to the last token", _E2E_BUCKETS),
                ("request_queue_time", "Waiting for pages and a slot", _TTFT_BUCKETS),
                ("handoff_tail", "From the end of prompt computation to the last landed byte", _TTFT_BUCKETS),
            )
        )
        self._prompt_tokens = Counter(
            "k3svc_prompt_tokens", "Prompt tokens of finished requests", registry=self.registry
        )
        self._output_tokens = Counter(
            "k3svc_generation_tokens", "Output tokens of finished requests", registry=self.registry
        )

    def count_rpc(self, service: str, method: str, code: str) -> None:
        self._rpcs.labels(service, method, code).inc()

    def observe_request(
        self,
        *,
        e2e_s: float,
        ttft_s: float,
        tpot_s: float,
        queue_s: float,
        handoff_tail_s: float,
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        """One finished request."""
        self._e2e_s.observe(e2e_s)
        self._ttft_s.observe(ttft_s)
        if output_tokens > 1:
            self._tpot_s.observe(tpot_s)
        self._queue_s.observe(queue_s)
        self._handoff_tail_s.observe(handoff_tail_s)
        self._prompt_tokens.inc(prompt_tokens)
        self._output_tokens.inc(output_tokens)


class _LoadCollector(Collector):
    def __init__(self, load: Callable[[], Mapping[str, Any]]) -> None:
        self._load = load

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"k3svc_{name}", text, value=load[field])
        yield CounterMetricFamily(
            "k3svc_handoff_bytes", "State bytes sent (prefill) or landed (decode)", value=load["handoff_bytes"]
        )
        outcomes = CounterMetricFamily("k3svc_requests", "Requests ended, by outcome", labels=("outcome",))
        for outcome, count in load["outcomes"].items():
            outcomes.add_metric((outcome,), count)
        yield outcomes
