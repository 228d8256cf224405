"""Parameters, work and memory of a model, counted from its shapes."""

from dataclasses import dataclass

from k3svc.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of weights."""

    embedding: int
    """The table of input rows; the head is dense."""
    dense: int
    """What every token passes: attention, norms, shared experts, dense MLP, router, head."""
    routed: int
    """All routed experts."""
    routed_active: int
    """Routed experts that one token passes."""

    @property
    def total(self) -> int:
        return self.embedding + self.dense + self.routed

    @property
    def active(self) -> int:
        """Without the input embedding, which is looked up."""
        return self.dense + self.routed_active


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Bytes that a request holds, and that travel in a hand-off."""

    state: int
    """KDA states of all layers."""
    conv: int
    """Rows before the convolutions of all layers."""
    per_token: int
    """MLA rows of one token over all layers."""
    logits: int
    """The logits row that a hand-off carries."""

    @property
    def fixed(self) -> int:
        return self.state + self.conv

    def request(self, num_tokens: int) -> int:
        """What a request of so many tokens holds, without the rounding to pages."""
        return self.fixed + num_tokens * self.per_token

    def handoff(self, prompt_tokens: int) -> int:
        """What a prompt ships."""
        return self.request(prompt_tokens) + self.logits


def count_parameters(config: ModelConfig) -> Parameters:
    """From the tensors that a checkpoint of this configuration has."""
    hidden = config.hidden_size
    num_mla = sum(kind == "mla" for kind in config.layer_kinds)
    num_moe = config.num_layers - config.num_dense_layers
    expert = 3 * config.moe_intermediate_size * config.expert_width
    residual = 0 if config.attn_res_block_size is None else 4 * hidden
    dense = (
        (config.num_layers - num_mla) * _kda(config)
        + num_mla * _mla(config)
        + config.num_layers * (2 * hidden + residual)
        + config.num_dense_layers * 3 * hidden * config.intermediate_size
        + num_moe * _moe_dense(config)
        + hidden * config.vocab_size
        + hidden
        + residual // 2
    )
    return Parameters(
        embedding=config.vocab_size * hidden,
        dense=dense,
        routed=num_moe * config.num_experts * expert,
        routed_active=num_moe * config.experts_per_token * expert,
    )


def cache_size(config: ModelConfig, *, state_bytes: int = 4, kv_bytes: int = 2) -> CacheSize:
    """`state_bytes` and `kv_bytes`: of an element of the KDA states, and of MLA and convolution rows."""
    num_mla = sum(kind == "mla" for kind in config.layer_kinds)
    num_kda = config.num_layers - num_mla
    return CacheSize(
        state=num_kda * config.kda_heads * config.kda_head_dim**2 * state_bytes,
        conv=num_kda * (config.conv_width - 1) * 3 * config.kda_channels * kv_bytes,
        per_token=num_mla * config.cache_width * kv_bytes,
        logits=4 * config.vocab_size,
    )


def prefill_flops(config: ModelConfig, num_tokens: int) -> float:
    """Of one prompt: two operations a weight and token, attention over what came before, the recurrence."""
    num_mla = sum(kind == "mla" for kind in config.layer_kinds)
    num_kda = config.num_layers - num_mla
    active = count_parameters(config).active - config.hidden_size * config.vocab_size
    widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    attention = num_mla * config.num_heads * widths * float(num_tokens) ** 2
    recurrence = num_kda * config.kda_heads * 7.0 * config.kda_head_dim**2 * num_tokens
    return 2.0 * active * num_tokens + attention + recurrence + 2.0 * config.hidden_size * config.vocab_size


def decode_flops(config: ModelConfig, context_tokens: float) -> float:
    """Of one token: the weights, attention over latent rows in absorbed form, the recurrence."""
    num_mla = sum(kind == "mla" for kind in config.layer_kinds)
    num_kda = config.num_layers - num_mla
    attention = num_mla * config.num_heads * 2.0 * (config.cache_width + config.kv_lora_rank) * context_tokens
    recurrence = num_kda * config.kda_heads * 7.0 * config.kda_head_dim**2
    return 2.0 * count_parameters(config).active + attention + recurrence


def touched_experts(config: ModelConfig, num_tokens: float) -> float:
    """Expected number of a layer's routed experts that a step of so many tokens reads, with even routing."""
    share = config.experts_per_token / config.num_experts
    return config.num_experts * float(1.0 - (1.0 - share) ** num_tokens)


def _kda(config: ModelConfig) -> int:
    hidden, channels, rank = config.hidden_size, config.kda_channels, config.kda_head_dim
    gate = hidden * channels if config.full_rank_gate else rank * (hidden + channels)
    projections = 3 * hidden * channels + rank * (hidden + channels) + hidden * config.kda_heads + gate
    return projections + 3 * channels * config.conv_width + config.kda_heads + channels + rank + channels * hidden


def _mla(config: ModelConfig) -> int:
    hidden, heads = config.hidden_size, config.num_heads
    query_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    value_width = heads * config.v_head_dim
    if config.q_lora_rank is None:
        query = hidden * query_width
    else:
        query = config.q_lora_rank * (hidden + 1 + query_width)
    latent = hidden * config.cache_width + config.kv_lora_rank
    expansion = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    gate = hidden * value_width if config.mla_output_gate else 0
    return query + latent + expansion + gate + value_width * hidden


def _moe_dense(config: ModelConfig) -> int:
    """Of one layer: router, shared experts, and the projections around latent experts."""
    hidden = config.hidden_size
    shared = 3 * hidden * config.num_shared_experts * config.moe_intermediate_size
    latent = 0 if config.latent_size is None else 2 * hidden * config.latent_size + config.latent_size
    return config.num_experts * (hidden + 1) + shared + latent
