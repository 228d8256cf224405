"""What work of `benchmarks.cpu` needs at least: bytes that must be read, and products that must be computed."""

from dataclasses import dataclass

from k3svc.model.config import ModelConfig
from k3svc.model.weights import tensor_shapes

FLOAT_BYTES = 4
WEIGHT_BYTES = 2
"""The weights of both models are bfloat16 numbers, which the cpu backend keeps so in memory."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """What the machine was measured to do."""

    flops: float
    """Of sgemm, per second."""
    read: float
    """Bytes per second, read once."""
    in_place: float
    """Bytes per second, those read and those written."""


class Bounds:
    """Least seconds of steps of a model."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        matrices = {name: shape for name, shape in tensor_shapes(config).items() if len(shape) == 2}
        self._head = config.vocab_size * config.hidden_size
        self._dense = sum(a * b for a, b in matrices.values()) - 2 * self._head
        self._expert = 3 * config.moe_intermediate_size * config.expert_width
        self._moe_layers = config.num_layers - config.num_dense_layers
        self._kda_layers = config.layer_kinds.count("kda")
        self._mla_layers = config.layer_kinds.count("mla")

    def decode_s(self, batch: int, context: int, peaks: Peaks) -> float:
        """Of a step of `batch` sequences: the weights it touches, states and cached rows once, or its products.

        Experts are counted as many as even choices touch on average.
        """
        config = self._config
        missed = (1 - config.experts_per_token / config.num_experts) ** batch
        touched = self._moe_layers * config.num_experts * (1 - missed) * self._expert
        weights = WEIGHT_BYTES * (self._dense + self._head + touched)
        state = config.kda_heads * config.kda_head_dim**2 + (config.conv_width - 1) * 3 * config.kda_channels
        states = 2 * FLOAT_BYTES * batch * self._kda_layers * state
        rows = FLOAT_BYTES * batch * context * self._mla_layers * config.cache_width
        moving = (weights + rows) / peaks.read + states / peaks.in_place
        absorbed = 2 * context * self._mla_layers * config.num_heads * (config.cache_width + config.kv_lora_rank)
        return max(moving, batch * (self._token_flops() + 2 * self._head + absorbed) / peaks.flops)

    def prompt_s(self, tokens: int, peaks: Peaks) -> float:
        """Of the products of one prompt; the head sees its last row alone."""
        config = self._config
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        attention = 2 * (tokens + 1) / 2 * self._mla_layers * config.num_heads * width
        return (tokens * (self._token_flops() + attention) + 2 * self._head) / peaks.flops

    def _token_flops(self) -> float:
        """Of a token in all layers, without attention: two a weight, and 7 K V of a head in KDA's recurrence."""
        config = self._config
        active = self._dense + self._moe_layers * config.experts_per_token * self._expert
        return 2 * active + 7 * self._kda_layers * config.kda_heads * config.kda_head_dim**2
