"""From sizes, hardware and a load to times, numbers of instances and what limits them.

prefill      prompt work / (peak * compute efficiency), one prompt after the other
decode step  the longer of work / (peak * efficiency) and bytes / (memory bandwidth * efficiency): weights that the
             batch touches, the states of all requests read and written, their MLA rows read
hand-off     bytes / link; most of it hides behind the computation of the last chunk, its tail does not
"""

from dataclasses import dataclass
from functools import cached_property

from k3svc.errors import ConfigError
from k3svc.model.config import ModelConfig
from k3svc.plan.size import CacheSize, cache_size, count_parameters, decode_flops, prefill_flops, touched_experts

LINK_SPEEDS_GBIT_S = (10, 25, 100, 200, 400, 1600)
MAX_BATCH = 4096
FULL = 0.8
"""Use of a link beyond which queues grow."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One instance of a role: a group of chips that work as one."""

    chips: int = 1
    tflops: float = 400.0
    """Peak of one chip in 10^12 operations per second."""
    memory_gb: float = 64.0
    """Of one chip, 10^9 bytes."""
    memory_gb_s: float = 1600.0
    """Memory bandwidth of one chip."""
    link_gbit_s: float = 100.0
    """From a prefill instance to a decode instance."""
    compute_efficiency: float = 0.4
    memory_efficiency: float = 0.6

    def __post_init__(self) -> None:
        for name in ("chips", "tflops", "memory_gb", "memory_gb_s", "link_gbit_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: got {getattr(self, name)}; allowed: more than 0")
        for name in ("compute_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}; allowed: above 0, at most 1")

    @property
    def flops_s(self) -> float:
        return self.chips * self.tflops * 1e12 * self.compute_efficiency

    @property
    def bytes_s(self) -> float:
        return self.chips * self.memory_gb_s * 1e9 * self.memory_efficiency

    @property
    def link_bytes_s(self) -> float:
        return self.link_gbit_s * 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the deployment."""

    request_rate: float
    """Per second."""
    input_len: int
    output_len: int
    tpot_ms: float
    """Objective of the time per output token."""
    cached_share: float = 0.0
    """Share of prompt tokens that a prefix cache spares."""

    def __post_init__(self) -> None:
        for name in ("request_rate", "input_len", "output_len", "tpot_ms"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name.replace('_', '-')}: got {getattr(self, name)}; allowed: more than 0")
        if not 0 <= self.cached_share < 1:
            raise ConfigError(f"cached-share: got {self.cached_share}; allowed: 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Bits of a stored weight."""

    dense_bits: float = 16.0
    routed_bits: float = 16.0


class Plan:
    """The figures of one model on one kind of instance under one load. Times in seconds."""

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        load: Load,
        *,
        weights: Weights,
        chunk_tokens: int,
        state_bytes: int = 4,
        kv_bytes: int = 2,
    ) -> None:
        self.config = config
        self.hardware = hardware
        self.load = load
        self.chunk_tokens = chunk_tokens
        self.cache: CacheSize = cache_size(config, state_bytes=state_bytes, kv_bytes=kv_bytes)
        self.parameters = count_parameters(config)
        self._weights = weights

    @cached_property
    def weight_bytes(self) -> float:
        sizes, bits = self.parameters, self._weights
        return (sizes.embedding + sizes.dense) * bits.dense_bits / 8 + sizes.routed * bits.routed_bits / 8

    @cached_property
    def prefill_s(self) -> float:
        """Computation of one prompt."""
        return self.prompt_s(self.load.input_len, 1.0 - self.load.cached_share)

    def prompt_s(self, num_tokens: int, share: float = 1.0) -> float:
        return prefill_flops(self.config, num_tokens) * share / self.hardware.flops_s

    @cached_property
    def handoff_bytes(self) -> int:
        return self.cache.handoff(self.load.input_len)

    def handoff_s(self, link_gbit_s: float | None = None) -> float:
        """All bytes of a hand-off over a link."""
        gbit_s = self.hardware.link_gbit_s if link_gbit_s is None else link_gbit_s
        return self.handoff_bytes / (gbit_s * 1e9 / 8)

    def handoff_tail_s(self, link_gbit_s: float | None = None) -> float:
        """What of it shows in the time to first token: states leave layer by layer while the last chunk computes, so
        that at best the last layer's share is left.
        """
        last_chunk = min(self.chunk_tokens, self.load.input_len)
        hiding_s = self.prompt_s(self.load.input_len) - self.prompt_s(self.load.input_len - last_chunk)
        total_s = self.handoff_s(link_gbit_s)
        late = self.cache.fixed + last_chunk * self.cache.per_token + self.cache.logits
        late_s = total_s * late / self.handoff_bytes
        backlog_s = max(0.0, total_s - late_s - self.prompt_s(self.load.input_len - last_chunk))
        return max(backlog_s + late_s - hiding_s, total_s * late / self.handoff_bytes / self.config.num_layers)

    @cached_property
    def local_below(self) -> int:
        """Prompts of fewer tokens take less time to compute on decode than their state takes on the link; 0: none."""
        low, high = 0, self.config.max_positions
        while low < high:
            middle = (low + high) // 2
            if self.prompt_s(middle) < self.cache.handoff(middle) / self.hardware.link_bytes_s:
                low = middle + 1
            else:
                high = middle
        return low

    def step_s(self, batch: int) -> float:
        """One decode step of `batch` requests halfway through their output."""
        return max(self._compute_s(batch), self._memory_s(batch))

    @cached_property
    def memory_batch(self) -> int:
        """Requests whose state fits beside the weights."""
        room = 0.9 * self.hardware.chips * self.hardware.memory_gb * 1e9 - self.weight_bytes
        return max(0, int(room // self.cache.request(self.load.input_len + self.load.output_len)))

    @cached_property
    def objective_batch(self) -> int:
        """Requests at which a step still keeps the objective; 0: not even one."""
        low, high = 0, MAX_BATCH
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.step_s(middle) * 1e3 <= self.load.tpot_ms else (low, middle - 1)
        return low

    @cached_property
    def batch(self) -> int:
        """Requests of a decode instance at once."""
        return min(self.memory_batch, self.objective_batch)

    @property
    def fits(self) -> bool:
        return self.batch >= 1

    @cached_property
    def prefill_instances(self) -> float:
        """Not rounded: the work of all prompts in instances."""
        return self.load.request_rate * self.prefill_s

    @cached_property
    def decode_instances(self) -> float:
        """Not rounded. Raises ConfigError when no request fits."""
        if not self.fits:
            raise ConfigError(self.bottleneck)
        return self.load.request_rate * self.load.output_len * self.step_s(self.batch) / self.batch

    @cached_property
    def link_use(self) -> float:
        """Share of the link of one prefill instance that works all the time."""
        return self.handoff_bytes / self.prefill_s / self.hardware.link_bytes_s

    @cached_property
    def bottleneck(self) -> str:
        """What to change first."""
        if self.memory_batch < 1:
            return (
                f"memory: weights of {self.weight_bytes / 1e9:.0f} GB and one request do not fit "
                f"{self.hardware.chips} x {self.hardware.memory_gb:g} GB; more chips in an instance, or fewer bits"
            )
        if self.objective_batch < 1:
            return (
                f"objective: a step of one request takes {self.step_s(1) * 1e3:.1f} ms, more than "
                f"{self.load.tpot_ms:g} ms; more chips in an instance, fewer bits, or speculation"
            )
        if self.link_use > FULL:
            return (
                f"link: a busy prefill instance fills {100 * self.link_use:.0f} % of {self.hardware.link_gbit_s:g} "
                f"Gbit/s; a faster link, bf16 states, or prompts below {self.local_below} tokens on decode"
            )
        if self.memory_batch < self.objective_batch:
            return (
                f"decode memory: {self.memory_batch} requests fit, the objective allows {self.objective_batch}; raise "
                "cache.num_slots and cache.num_pages with more memory, or hold smaller states"
            )
        what = "computation" if self._compute_s(self.batch) > self._memory_s(self.batch) else "memory bandwidth"
        return (
            f"decode step: {what} takes {self.step_s(self.batch) * 1e3:.1f} ms at {self.batch} requests; a wider "
            "instance, or speculation"
        )

    def _compute_s(self, batch: int) -> float:
        context = self.load.input_len + self.load.output_len / 2
        return batch * decode_flops(self.config, context) / self.hardware.flops_s

    def _memory_s(self, batch: int) -> float:
        context = self.load.input_len + self.load.output_len / 2
        sizes, bits = self.parameters, self._weights
        routed = sizes.routed / self.config.num_experts * touched_experts(self.config, batch)
        weights = sizes.dense * bits.dense_bits / 8 + routed * bits.routed_bits / 8
        caches = batch * (2 * self.cache.fixed + context * self.cache.per_token)
        return (weights + caches) / self.hardware.bytes_s
