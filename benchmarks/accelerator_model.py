"""Whole steps of models of full geometry with random bfloat16 weights: decode behind a context, and prefill."""

import statistics
import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.accelerator_timing import Ceilings
from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow
from k3svc.engine.inputs import decode_inputs, extend_inputs
from k3svc.model.config import ModelConfig
from k3svc.model.kimi import Model, cache_spec
from k3svc.model.weights import Weights, tensor_shapes
from k3svc.ops.table import Ops

PAGE = 64
KIMI_LINEAR_48B = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27,
    "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "routed_scaling_factor": 2.446, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "model_max_length": 1048576,
    "linear_attn_config": {
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 28) if layer not in (4, 8, 12, 16, 20, 24, 27)],
    },
    "tie_word_embeddings": False, "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
}  # fmt: skip

KIMI_K3_LAYERS = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 4,
    "num_attention_heads": 96, "num_key_value_heads": 96, "intermediate_size": 33792, "moe_intermediate_size": 3072,
    "num_experts": 224, "num_experts_per_token": 16, "num_shared_experts": 2, "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True, "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.0,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
    "use_grouped_topk": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
    "attn_res_block_size": 12, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576,
    "linear_attn_config": {
        "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
        "gate_lower_bound": -5.0, "full_attn_layers": [4], "kda_layers": [1, 2, 3],
    },
    "tie_word_embeddings": False, "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839,
}  # fmt: skip
"""The first four layers of Kimi-K3 (KDA with the dense MLP, two of KDA and one of MLA with experts) and its head; a
quarter of the experts, of which as many are chosen, since 896 of bfloat16 take 59 GB a layer."""


class RandomWeights:
    """Stands for `Weights` of a checkpoint: matrices of a scale that keeps activations finite, made on the card."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._shapes = tensor_shapes(config)

    def matrix(self, *names: str) -> Tensor:
        """`Weights.matrix`."""
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        return self._normal(sum(shape[0] for shape in shapes), shapes[0][1])

    def linear(self, ops: Ops, *names: str) -> Any:
        """`Weights.linear`."""
        return ops.pack_linear(self.matrix(*names))

    def norm(self, name: str) -> Tensor:
        """`Weights.norm`."""
        return torch.ones(self._shapes[f"{name}.weight"], dtype=self._dtype, device="cuda")

    def float32(self, name: str) -> Tensor:
        """`Weights.float32`."""
        return torch.randn(self._shapes[name], device="cuda") * 0.1

    def head_decay(self, name: str) -> Tensor:  # noqa: ARG002 - the same for all
        """`Weights.head_decay`."""
        return torch.rand(self._config.kda_heads, device="cuda") + 0.5

    def has_quantized_experts(self, prefix: str) -> bool:  # noqa: ARG002 - the same for all
        """`Weights.has_quantized_experts`."""
        return False

    def experts(self, prefix: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # noqa: ARG002 - the same for all
        """`Weights.experts`."""
        width, inner = self._config.expert_width, self._config.moe_intermediate_size
        for _ in range(self._config.num_experts):
            yield self._normal(inner, width), self._normal(inner, width), self._normal(width, inner)

    def _normal(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self._dtype, device="cuda").normal_(std=columns**-0.5)


def build(tree: dict[str, Any], ops: Ops, *, slots: int, pages: int) -> tuple[Model, Any]:
    """A model with random weights and its caches, filled with random numbers."""
    config = ModelConfig.from_tree(tree)
    model = Model(config, ops, cast("Weights", RandomWeights(config, ops.activation_dtype)))
    spec = cache_spec(
        config, num_slots=slots, num_pages=pages, page_size=PAGE, state_dtype=torch.float32, kv_dtype=torch.bfloat16
    )
    cache: Any = ops.new_cache(spec)
    for layer in spec.mla_layers:
        cache.layer(layer).rows.normal_()
    for layer in spec.kda_layers:
        cache.layer(layer).state.normal_(std=0.1)
        cache.layer(layer).conv.normal_()
    return model, cache


def step_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """Bytes that a decode step must move: weights that are read (of routed experts those that random choices hit, each
    once), states read and written, cache rows read."""
    shapes = tensor_shapes(config)
    dense = sum(torch.Size(shape).numel() for name, shape in shapes.items() if "embed_tokens" not in name)
    routers = [shape for name, shape in shapes.items() if name.endswith("mlp.gate.weight")]
    weights = 2 * dense + 2 * sum(torch.Size(shape).numel() for shape in routers)
    hit = config.num_experts * (1 - (1 - config.experts_per_token / config.num_experts) ** batch)
    expert = 3 * config.expert_width * config.moe_intermediate_size * 2
    kda = sum(kind == "kda" for kind in config.layer_kinds)
    mla = config.num_layers - kda
    state = config.kda_heads * config.kda_head_dim**2 * 4 + 3 * 3 * config.kda_channels * 2
    rows = context * config.cache_width * 2
    return int(weights + hit * expert * len(routers) + batch * (2 * kda * state + mla * rows))


def prompt_flops(config: ModelConfig, tokens: int) -> float:
    """Of the products of one prompt: weights that a token meets, once a token, and causal attention. Logits of one row;
    the recurrence of KDA left out."""
    shapes = tensor_shapes(config)
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2 and "embed_tokens" not in name]
    head = config.vocab_size * config.hidden_size
    moe = config.num_layers - config.num_dense_layers
    routed = moe * config.experts_per_token * 3 * config.expert_width * config.moe_intermediate_size
    mla = sum(kind == "mla" for kind in config.layer_kinds)
    widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    attention = mla * config.num_heads * widths * tokens**2
    return 2.0 * tokens * (sum(rows * columns for rows, columns in matrices) - head + routed) + 2 * head + attention


def decode_case(model: Model, cache: Any, ops: Ops, batch: int, context: int, ceilings: Ceilings) -> dict[str, Any]:
    """One decode step with logits and greedy choice: wall clock over steps that follow each other, on the device alone,
    and the host's share."""
    pages = context // PAGE + 1
    rows = [
        DecodeRow(key=str(row), slot=row + 1, block_table=list(range(1 + row * pages, 1 + (row + 1) * pages)),
                  token_id=5 + row, position=context, sample=None)
        for row in range(batch)
    ]  # fmt: skip

    def step() -> Tensor:
        with torch.inference_mode():
            ids, meta, _ = decode_inputs(DecodeBatch(rows=rows, first=[]), PAGE, ops.device, ops.row_tile)
            return model.logits(model.forward(ids, meta, cache, "decode")).argmax(-1)

    started = time.perf_counter()
    out = step()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - started
    assert out.shape[0] == batch
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    times, host = [], []
    for _ in range(40):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin_event.record()
    for _ in range(40):
        step()
    end_event.record()
    end_event.synchronize()
    steady_s = begin_event.elapsed_time(end_event) * 1e-3 / 40
    bound_s = step_bytes(model.config, batch, context) / ceilings.copy_bytes_per_s
    return {
        "batch": batch, "context": context, "ms": statistics.median(times) * 1e3, "steady_ms": steady_s * 1e3,
        "host_ms": statistics.median(host) * 1e3, "bound_ms": bound_s * 1e3,
        "share_of_bound": bound_s / statistics.median(times), "steady_share": bound_s / steady_s, "first_s": first_s,
    }  # fmt: skip


def prefill_case(model: Model, cache: Any, ops: Ops, tokens: int, ceilings: Ceilings) -> dict[str, Any]:
    """One prompt in one step, beside its products at the matrix rate."""
    row = ExtendRow(key="a", slot=1, block_table=list(range(1, tokens // PAGE + 2)),
                    token_ids=[(7 * i) % 3000 for i in range(tokens)], start=0, is_last=True)  # fmt: skip
    batch = ExtendBatch(rows=[row])

    def step() -> None:
        with torch.inference_mode():
            ids, meta, last = extend_inputs(batch, PAGE, ops.device, ops.row_tile)
            model.logits(model.forward(ids, meta, cache, "extend")[last])

    step()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    bound_s = prompt_flops(model.config, tokens) / ceilings.matrix_flops
    return {"tokens": tokens, "ms": seconds * 1e3, "tokens_per_s": tokens / seconds, "bound_ms": bound_s * 1e3,
            "share_of_bound": bound_s / seconds}  # fmt: skip
