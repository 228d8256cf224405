"""The reference backend: every operation of the table in plain torch on the CPU, and the oracle of the other backends.

With float32 activations and pools it is batch-invariant bit by bit: products run over tiles of 16 rows of one shape
(torch.bmm), functions of single elements are built from operations that treat every element alike, reductions run over
the last dimension of rows of one layout, and attention walks fixed blocks. Head sizes and ranks must be multiples of 4
for it, as those of every public model are: a product whose rows are not aligned depends on where in memory they lie.
With bfloat16 nothing is promised.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from k3svc.ops import reference_kda, reference_mla, reference_moe, reference_sampling
from k3svc.ops.reference_cache import KdaPool, MlaPool, ReferenceCache
from k3svc.ops.reference_draft import PlainDraft
from k3svc.ops.reference_math import cast, inverse_rms, rms_norm, scaled_by_sigmoid
from k3svc.ops.reference_moe import PackedExperts
from k3svc.ops.reference_steps import (
    GRID,
    DecodeStep,
    ExtendStep,
    VerifyStep,
    prepare_decode,
    prepare_extend,
    prepare_verify,
)
from k3svc.ops.table import (
    Activation,
    Cache,
    CacheSpec,
    KdaGate,
    Mode,
    QuantizedExpert,
    QuantizedMatrix,
    Result,
    SampleRows,
    StepMeta,
    dequantized_experts,
    dequantized_rows,
)

ROW_TILE = 16


class Reference:
    """`Ops` in plain torch. `threads` is the number of compute threads of the process that uses it."""

    name = "reference"
    few = None
    chunk = GRID
    row_tile = ROW_TILE
    is_asynchronous = False
    split_norm = None

    def __init__(self, dtype: torch.dtype, *, threads: int) -> None:
        self.variant = f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
        self.batch_invariant = dtype == torch.float32
        self.device = torch.device("cpu")
        self.activation_dtype = dtype
        self.draft = PlainDraft(self.rms_norm, self.sample)
        # Several threads may share the sum of a product that is alone in its batch, which changes its bits.
        self._min_tiles = 1 if threads == 1 else 2

    def pack_linear(self, weight: Tensor) -> Tensor:
        """[out, in] → contiguous [in, out]."""
        return weight.t().contiguous()

    def pack_quantized_linear(self, parts: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> Tensor:
        """`Ops.pack_quantized_linear`: as float weights."""
        return self.pack_linear(dequantized_rows(parts, dtype))

    def pack_experts(self, experts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> PackedExperts:
        """`Ops.pack_experts`."""
        gate_up: list[Tensor] = []
        down: list[Tensor] = []
        for w1, w3, w2 in experts:
            gate_up.append(torch.cat([w1, w3]).t().contiguous())
            down.append(w2.t().contiguous())
        return PackedExperts(gate_up=gate_up, down=down)

    def pack_quantized_experts(self, experts: Iterable[QuantizedExpert], dtype: torch.dtype) -> PackedExperts:
        """`Ops.pack_quantized_experts`."""
        return self.pack_experts(dequantized_experts(experts, dtype))

    def prepare(self, meta: StepMeta, mode: Mode, spec: CacheSpec) -> ExtendStep | DecodeStep | VerifyStep:
        """`Ops.prepare`."""
        if mode == "extend":
            return prepare_extend(meta, spec.conv_width)
        return prepare_decode(meta) if mode == "decode" else prepare_verify(meta)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """`Ops.run`."""
        return function(*args)

    def when_done(self, call: Callable[[], None]) -> None:
        """`Ops.when_done`."""
        call()

    def expert_rows(self, meta: StepMeta, mode: Mode) -> int | None:  # noqa: ARG002 - the table's
        """`Ops.expert_rows`."""
        return meta.num_live_rows

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """`Ops.embed`."""
        return table.index_select(0, ids)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`Ops.linear`: a batch of products of 16 rows, each as if it were alone."""
        count, width = x.shape
        if count == 0:
            return x.new_empty(0, weight.shape[1])
        tiles = max(-(-count // ROW_TILE), self._min_tiles)
        if count == tiles * ROW_TILE:
            rows = x.contiguous()
        else:
            rows = x.new_zeros(tiles * ROW_TILE, width)
            rows[:count] = x
        out = torch.bmm(rows.view(tiles, ROW_TILE, width), weight.expand(tiles, -1, -1))
        return out.view(tiles * ROW_TILE, -1)[:count]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`Ops.rms_norm`: one rounding, at the end."""
        return cast(rms_norm(x.float(), weight.float(), eps), x.dtype)

    def mix_residual(self, prefix: Tensor, bank: Sequence[Tensor], score: Tensor, eps: float) -> Tensor:
        """`Ops.mix_residual`."""
        rows = torch.stack([*bank, prefix], dim=1).float()
        scores = (rows * score).sum(-1, keepdim=True).mul_(inverse_rms(rows, eps))
        weights = scores.squeeze(-1).softmax(-1)
        out = rows[:, 0] * weights[:, :1]
        for index in range(1, rows.shape[1]):
            out.addcmul_(rows[:, index], weights[:, index : index + 1])
        return cast(out, prefix.dtype)

    def glu(self, gate_up: Tensor, activation: Activation, beta: float, linear_beta: float | None) -> Tensor:
        """`Ops.glu`."""
        return reference_moe.glu(gate_up, activation, beta, linear_beta)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """`Ops.sigmoid_gate`."""
        return cast(scaled_by_sigmoid(x.float(), gate.float()), x.dtype)

    def route(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        *,
        top_k: int,
        renormalize: bool,
        scale: float,
        num_groups: int,
        top_groups: int,
    ) -> tuple[Tensor, Tensor]:
        """`Ops.route`. weight is packed from float32."""
        return reference_moe.choose_experts(
            self.linear(x.float(), weight),
            bias,
            top_k=top_k,
            renormalize=renormalize,
            scale=scale,
            num_groups=num_groups,
            top_groups=top_groups,
        )

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        packed: PackedExperts,
        activation: Activation,
        beta: float,
        linear_beta: float | None,
    ) -> Tensor:
        """`Ops.experts`."""
        return reference_moe.run_experts(x, ids, weights, packed, activation, beta, linear_beta)

    def kda_conv_extend(self, u: Tensor, weight: Tensor, cache: KdaPool, step: ExtendStep) -> Tensor:
        """`Ops.kda_conv_extend`."""
        return reference_kda.conv_extend(u, weight, cache, step)

    def kda_conv_decode(self, u: Tensor, weight: Tensor, cache: KdaPool, step: DecodeStep) -> Tensor:
        """`Ops.kda_conv_decode`."""
        return reference_kda.conv_decode(u, weight, cache, step)

    def kda_extend(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: ExtendStep) -> Tensor:
        """`Ops.kda_extend`."""
        return reference_kda.extend(qkv, f, b, gate, cache, step)

    def kda_decode(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: DecodeStep) -> Tensor:
        """`Ops.kda_decode`."""
        return reference_kda.decode(qkv, f, b, gate, cache, step)

    def kda_conv_verify(self, u: Tensor, weight: Tensor, cache: KdaPool, step: VerifyStep) -> Tensor:
        """`Ops.kda_conv_verify`."""
        return reference_kda.conv_verify(u, weight, cache, step)

    def kda_verify(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: VerifyStep) -> Tensor:
        """`Ops.kda_verify`."""
        return reference_kda.verify(qkv, f, b, gate, cache, step)

    def commit(self, cache: Cache, step: VerifyStep, accepted: Sequence[int]) -> None:  # noqa: ARG002  the records know
        """`Ops.commit`."""
        reference_kda.commit(step, accepted)

    def gated_norm(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`Ops.gated_norm`."""
        normed = rms_norm(o, weight, eps).view(z.shape)
        return cast(scaled_by_sigmoid(normed, z.float()), z.dtype)

    def mla_write(self, rows: Tensor, cache: MlaPool, step: ExtendStep | DecodeStep | VerifyStep) -> None:
        """`Ops.mla_write`."""
        reference_mla.write(rows, cache, step)

    def mla_extend(
        self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: ExtendStep, scale: float
    ) -> Tensor:
        """`Ops.mla_extend`."""
        return reference_mla.extend(q, w_kc, w_vc, cache, step, scale)

    def mla_decode(
        self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: DecodeStep, scale: float
    ) -> Tensor:
        """`Ops.mla_decode`."""
        return reference_mla.decode(q, w_kc, w_vc, cache, step, scale)

    def mla_verify(
        self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: VerifyStep, scale: float
    ) -> Tensor:
        """`Ops.mla_verify`."""
        return reference_mla.decode(q, w_kc, w_vc, cache, step.attention, scale)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """`Ops.log_softmax`."""
        return reference_sampling.log_softmax(logits)

    def probabilities(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """`Ops.probabilities`."""
        return reference_sampling.probabilities(logits, rows)

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """`Ops.sample`."""
        return reference_sampling.sample(logits, rows)

    def free_memory(self) -> int | None:
        """`Ops.free_memory`."""
        return None

    def verify_bytes(self, spec: CacheSpec, sequences: int, width: int) -> int:  # noqa: ARG002 - nothing is kept
        """`Ops.verify_bytes`."""
        return 0

    def new_cache(self, spec: CacheSpec) -> ReferenceCache:
        """`Ops.new_cache`."""
        return ReferenceCache(spec)
