"""Prometheus metrics of one process, in a registry of its own.

Each metric is declared once, as an attribute of `Metrics`, and fed by calling that prometheus_client object:

    self.steals = self._counter("steals", "Batches taken from a peer", "peer")     # k3svc_steals_total{peer="..."}
    metrics.steals.labels("a").inc()

`_counter`, `_gauge` and `_histogram` take the name without prefix and without the suffix `_total`, the help text, then
the names of labels; histograms take their buckets too. What an engine counts itself is a field of core.events.Load: it
is declared in `_LOAD_GAUGES` or `_LOAD_COUNTERS` and read when the registry is. Engines reach metrics through
k3svc.engine.observer.Observer, services directly.

Names and buckets follow vLLM's (`vllm:NAME` is `k3svc_NAME` here) where it has the same thing, SGLang's otherwise;
times are in seconds. `docs/observability.md` lists them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "k3svc_"
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
COUNT_BUCKETS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
SPEED_BUCKETS_GB_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
LAG_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_LOAD_GAUGES = {
    "num_requests_running": ("running", "Requests in the running batch, or prompts being computed"),
    "num_requests_waiting": ("waiting", "Requests waiting for admission"),
    "num_requests_in_transfer": ("in_transfer", "Requests whose state is on its way (decode) or held (prefill)"),
    "slots_free": ("free_slots", "Slots not in use"),
    "slots_total": ("total_slots", "Slots of the pool"),
    "draining": ("draining", "1 while the process drains"),
}
_PAGE_GAUGES = {
    "pages_free": ("free_pages", "Pages not in use"),
    "pages_total": ("total_pages", "Pages of the pool"),
}
_LOAD_COUNTERS = {
    "handoff_bytes": ("handoff_bytes", "State bytes sent (prefill) or landed (decode), features received (draft)"),
}
_DECODE_COUNTERS = {
    "num_preemptions": ("preemptions", "Samples that gave their memory up to others and were prefilled again"),
}
_PREFIX_GAUGES = {
    "prefix_cache_pages": ("prefix_pages", "Pages of the prefix cache, in use or not"),
    "prefix_cache_snapshots": ("prefix_snapshots", "States that the prefix cache keeps"),
}
_PREFIX_COUNTERS = {
    "prefix_cache_queries": ("prefix_queried_tokens", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hit_tokens", "Prompt tokens that came from the prefix cache"),
    "prefix_cache_evicted_pages": ("prefix_evicted_pages", "Pages that the prefix cache gave up for prompts"),
    "prefix_cache_evicted_snapshots": ("prefix_evicted_snapshots", "States that the prefix cache gave up for others"),
}
_TOKENS = {
    "prefill": ("prompt_tokens", "Prompt tokens computed"),
    "decode": ("generation_tokens", "Output tokens made"),
    "draft": ("draft_proposed_tokens", "Tokens proposed"),
}
_GAUGES = {
    "prefill": _LOAD_GAUGES | _PAGE_GAUGES | _PREFIX_GAUGES,
    "decode": _LOAD_GAUGES | _PAGE_GAUGES,
    "draft": _LOAD_GAUGES,
}
_COUNTERS = {
    "prefill": _LOAD_COUNTERS | _PREFIX_COUNTERS,
    "decode": _LOAD_COUNTERS | _DECODE_COUNTERS,
    "draft": _LOAD_COUNTERS,
}
_POOLS = {"pages": "kv_cache_usage_perc", "slots": "state_usage_perc"}
_HEALTH = ("healthy", "slow", "down")

HANDOFF_WAYS = ("shm", "state_port", "stream")
"""Shared memory, the state port, and the stream of the call."""

Load = Callable[[], Mapping[str, Any]]


class Metrics:
    """What a role feeds; `registry` is what its endpoint serves."""

    def __init__(self, role: str, load: Load | None = None) -> None:
        """`load` gives the fields of core.events.Load when the registry is read; see `follow`."""
        self.role = role
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        if load is not None:
            self.follow(load)
        self.rpcs = Counter(
            "grpc_server_handled",
            "RPCs ended by the server, by status code",
            ("grpc_service", "grpc_method", "grpc_code"),
            registry=self.registry,
        )
        self.build_info = self._gauge(
            "build_info", "Always 1; the labels say what runs", "version", "role", "model", "device", "variant"
        )
        self.step_s = self._histogram("engine_step_seconds", "Compute time of a step", TOKEN_BUCKETS_S, "kind")
        self.step_tokens = self._histogram("engine_step_tokens", "Tokens, or rows, of a step", COUNT_BUCKETS, "kind")
        self.loop_lag_s = self._histogram(
            "event_loop_lag_seconds", "How late the event loop runs a timer; it decides between steps", LAG_BUCKETS_S
        )
        if role != "draft":
            self.queue_s = self._histogram(
                "request_queue_time_seconds", "Waiting for pages and a slot", REQUEST_BUCKETS_S
            )
            self.prefill_s = self._histogram(
                "request_prefill_time_seconds", "Computation of the prompt, first chunk to last", REQUEST_BUCKETS_S
            )
        if role == "decode":
            self._declare_decode()
        if role == "draft":
            self.context_steps = self._histogram(
                "draft_context_steps", "Steps of a sample before its first proposal from a whole context", COUNT_BUCKETS
            )
        if role == "prefill":
            self.send_tail_s = self._histogram(
                "handoff_send_tail_seconds",
                "From the end of the prompt's computation to the last frame given to the transport",
                TTFT_BUCKETS,
            )
            self.handoffs = self._counter("handoffs", "Hand-offs that prefill has given away, by their way", "way")
            for way in HANDOFF_WAYS:
                self.handoffs.labels(way)
            self.context_pushes = self._counter(
                "draft_context_pushes", "Prompts whose features were to go to the draft service", "outcome"
            )
            for outcome in ("pushed", "failed", "dropped"):
                self.context_pushes.labels(outcome)

    def _declare_decode(self) -> None:
        self.ttft_s = self._histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS)
        self.itl_s = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one sample, as they are given out", TOKEN_BUCKETS_S
        )
        self.tpot_s = self._histogram(
            "time_per_output_token_seconds", "Mean time per output token after the first", TOKEN_BUCKETS_S
        )
        self.e2e_s = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", REQUEST_BUCKETS_S)
        self.decode_s = self._histogram(
            "request_decode_time_seconds", "From the first to the last token", REQUEST_BUCKETS_S
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", COUNT_BUCKETS)
        self.output_tokens = self._histogram("request_generation_tokens", "Output tokens of a request", COUNT_BUCKETS)
        self.handoff_tail_s = self._histogram(
            "handoff_tail_seconds", "From the end of the prompt's computation to its last landed byte", TTFT_BUCKETS
        )
        self.handoff_landing_s = self._histogram(
            "handoff_landing_seconds", "From the first to the last landed byte of a hand-off", TTFT_BUCKETS
        )
        self.handoff_speed_gb_s = self._histogram(
            "handoff_speed_gb_s", "Bytes of a hand-off per time of its landing, 10^9 bytes/s", SPEED_BUCKETS_GB_S
        )
        self.handoff_failures = self._counter("handoff_failures", "Failed attempts at hand-offs", "reason")
        self.prefill_choices = self._counter(
            "prefill_choices", "Prompts given to a prefill service, by what decided", "target", "by"
        )
        self.drafts = self._counter("spec_decode_num_drafts", "Steps of samples that verified drafts")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafts verified")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafts accepted")
        self.accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Steps that accepted the draft of a position", "position"
        )
        self.late_drafts = self._counter("spec_decode_late", "Steps without drafts because those asked for were late")
        self.salvaged_drafts = self._counter("spec_decode_salvaged", "Steps with drafts that had come late")
        self.draft_gaps = self._counter("spec_decode_gaps", "Proposals made from an incomplete context")

    def follow(self, load: Load) -> None:
        """Reads the gauges and counters of `load` from then on. Once."""
        self.registry.register(_LoadCollector(self.role, load))

    def count_rpc(self, service: str, method: str, code: str) -> None:
        self.rpcs.labels(service, method, code).inc()

    def observe_step(self, kind: str, num_tokens: int, compute_s: float) -> None:
        """One step, extend or decode."""
        self.step_s.labels(kind).observe(compute_s)
        self.step_tokens.labels(kind).observe(num_tokens)

    def observe_handoff(self, *, num_bytes: int, landing_s: float, tail_s: float) -> None:
        """State that has landed."""
        self.handoff_tail_s.observe(tail_s)
        self.handoff_landing_s.observe(landing_s)
        if landing_s > 0:
            self.handoff_speed_gb_s.observe(num_bytes / landing_s / 1e9)

    def observe_prefill(self, *, queue_s: float, compute_s: float, send_tail_s: float, way: str) -> None:
        """A prompt whose state prefill has given away. `way`: one of HANDOFF_WAYS."""
        self.handoffs.labels(way).inc()
        self.queue_s.observe(queue_s)
        self.prefill_s.observe(compute_s)
        self.send_tail_s.observe(send_tail_s)

    def observe_request(
        self,
        *,
        e2e_s: float,
        ttft_s: float,
        tpot_s: float,
        queue_s: float,
        prefill_s: float,
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        """One finished request of a decode service."""
        self.e2e_s.observe(e2e_s)
        self.ttft_s.observe(ttft_s)
        if output_tokens > 1:
            self.tpot_s.observe(tpot_s)
        self.decode_s.observe(max(0.0, e2e_s - ttft_s))
        self.queue_s.observe(queue_s)
        self.prefill_s.observe(prefill_s)
        self.prompt_tokens.observe(prompt_tokens)
        self.output_tokens.observe(output_tokens)

    def observe_speculation(
        self,
        *,
        steps: int,
        proposed: int,
        accepted: int,
        late: int,
        salvaged: int,
        accepted_by_position: Sequence[int],
        gaps: int = 0,
    ) -> None:
        """What speculation did for a request that has ended; `steps` are those with drafts."""
        self.drafts.inc(steps)
        self.draft_tokens.inc(proposed)
        self.accepted_tokens.inc(accepted)
        self.late_drafts.inc(late)
        self.salvaged_drafts.inc(salvaged)
        self.draft_gaps.inc(gaps)
        for position, count in enumerate(accepted_by_position):
            self.accepted_at.labels(str(position)).inc(count)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)


class _LoadCollector(Collector):
    def __init__(self, role: str, load: Load) -> None:
        self._role = role
        self._load = load

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        for name, (field, text) in _GAUGES[self._role].items():
            yield GaugeMetricFamily(PREFIX + name, text, value=float(load[field]))
        for name, (field, text) in _COUNTERS[self._role].items():
            yield CounterMetricFamily(PREFIX + name, text, value=load[field])
        for kind, name in _POOLS.items():
            if f"{kind}_total" in _GAUGES[self._role]:
                total = load[f"total_{kind}"]
                used = 1.0 - load[f"free_{kind}"] / total if total else 0.0
                yield GaugeMetricFamily(PREFIX + name, f"Share of the {kind} in use, 0 to 1", value=used)
        if load["drafter_health"]:
            health = GaugeMetricFamily(
                PREFIX + "drafter_health", "1 at what is to be expected of the drafter, else 0", labels=("health",)
            )
            for name in _HEALTH:
                health.add_metric((name,), float(name == load["drafter_health"]))
            yield health
        name, text = _TOKENS[self._role]
        yield CounterMetricFamily(PREFIX + name, text, value=load["num_tokens"])
        outcomes = CounterMetricFamily(PREFIX + "requests", "Requests ended, by outcome", labels=("outcome",))
        for outcome, count in load["outcomes"].items():
            outcomes.add_metric((outcome,), count)
        yield outcomes
