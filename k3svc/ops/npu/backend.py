"""`Ops` on Ascend: thin adapters, no arithmetic of their own beyond glue that no operator covers.

Nothing here asks what hardware there is, and nothing falls back silently: a missing operator stops the start
(`vendor.load`), a shape that an operator refuses raises. Results are not batch-invariant: the vendor's products choose
their tiles by the number of rows.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.ops.npu import kda, linear, mla, moe, sampling, verify
from k3svc.ops.npu.cache import KdaPool, MlaPool, NpuCache
from k3svc.ops.npu.draft import NpuDraft
from k3svc.ops.npu.graphs import GraphApi, Graphs, captured_bytes
from k3svc.ops.npu.linear import QuantizedLinear
from k3svc.ops.npu.moe import PackedExperts, QuantizedExperts
from k3svc.ops.npu.options import OPTIONS, NpuOptions, split_options
from k3svc.ops.npu.steps import (
    DecodeStep,
    ExtendStep,
    VerifyStep,
    prepare_decode,
    prepare_extend,
    prepare_verify,
)
from k3svc.ops.npu.vendor import Vendor, load
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
    SplitNorm,
    Step,
    StepMeta,
)


def load_npu(text: str, dtype: torch.dtype) -> "NpuOps":
    """The backend on a device. Raises BackendError that names what is missing and what to install."""
    options, rest = split_options(text)
    if rest:
        raise BackendError(
            f"model.device: npu has no option {', '.join(rest)}; it has: {', '.join(OPTIONS)}", device=text
        )
    vendor = load(options)
    device_module: Any = torch
    return NpuOps(dtype, vendor=vendor, options=options, device=torch.device("npu"), api=device_module.npu)


class NpuOps:
    """`Ops` through torch.ops.npu and the Python kernels of `vendor`."""

    name = "npu"
    few = None
    batch_invariant = False
    chunk = 64
    row_tile = 16
    is_asynchronous = False

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    """Activations that the kernels take."""

    def __init__(
        self, dtype: torch.dtype, *, vendor: Vendor, options: NpuOptions, device: torch.device, api: GraphApi
    ) -> None:
        """`api`: torch.npu, or what stands for it."""
        self.variant = " ".join((f"torch {torch.__version__}", *options.words))
        self.device = device
        self.activation_dtype = dtype
        self._vendor = vendor
        self._api = api
        self._is_fused = options.kda_extend == "fused"
        self._stores_prefix = options.mla_store == "prefix"
        self.split_norm: SplitNorm | None = self.fused_split_norm if options.mla_split_norm == "fused" else None
        self._graphs = Graphs(api) if options.graphs == "on" else None
        self._mask = mla.causal_mask(device)
        self.draft = NpuDraft(vendor, self._mask, self.rms_norm, self.sample)

    def pack_linear(self, weight: Tensor) -> Tensor:
        """[out, in] → contiguous [in, out]."""
        return weight.to(self.device).t().contiguous()

    def pack_quantized_linear(self, parts: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> QuantizedLinear:
        """`Ops.pack_quantized_linear`."""
        return linear.pack(parts, dtype, self.device)

    def pack_experts(self, experts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> PackedExperts:
        """`Ops.pack_experts`. Kept in ND format: a cast to NZ would re-lay storage under an unchanged shape."""
        gate_up, down = [], []
        for w1, w3, w2 in experts:
            gate_up.append(torch.cat([w1, w3]).to(self.device).t().contiguous())
            down.append(w2.to(self.device).t().contiguous())
        return PackedExperts(gate_up=torch.stack(gate_up), down=torch.stack(down))

    def pack_quantized_experts(self, experts: Iterable[QuantizedExpert], dtype: torch.dtype) -> QuantizedExperts:
        """`Ops.pack_quantized_experts`."""
        return moe.pack_quantized(experts, dtype, self.device)

    def prepare(self, meta: StepMeta, mode: Mode, spec: CacheSpec) -> Step:
        """`Ops.prepare`."""
        match mode:
            case "extend":
                return prepare_extend(meta)
            case "decode":
                return prepare_decode(meta)
            case "verify":
                return prepare_verify(meta, spec)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """`Ops.run`."""
        result: Result = function(*args) if self._graphs is None else self._graphs.run(function, args)
        return result

    def when_done(self, call: Callable[[], None]) -> None:
        """`Ops.when_done`: at once, since whoever reads the pools waits for what was asked for before."""
        call()

    def expert_rows(self, meta: StepMeta, mode: Mode) -> int | None:
        """`Ops.expert_rows`."""
        return meta.num_live_rows if self._graphs is None or mode == "extend" else None

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """`Ops.embed`."""
        return table.index_select(0, ids)

    def linear(self, x: Tensor, weight: Tensor | QuantizedLinear) -> Tensor:
        """`Ops.linear`."""
        return linear.quantized(x, weight) if isinstance(weight, QuantizedLinear) else torch.mm(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`Ops.rms_norm`."""
        if x.numel() == 0:
            return x.clone()
        out: Tensor = torch.ops.npu.npu_rms_norm(x, weight, epsilon=eps)[0]
        return out

    def mix_residual(self, prefix: Tensor, bank: Sequence[Tensor], score: Tensor, eps: float) -> Tensor:
        """`Ops.mix_residual`. A bank without rows leaves the prefix as it is."""
        if not bank or prefix.numel() == 0:
            return prefix.clone()
        out: Tensor = self._vendor.mix_fused(prefix.contiguous(), torch.stack(list(bank), dim=1), len(bank), score, eps)
        return out

    def glu(self, gate_up: Tensor, activation: Activation, beta: float, linear_beta: float | None) -> Tensor:
        """`Ops.glu`."""
        count = gate_up.shape[0]
        if count == 0:
            return gate_up.new_empty(0, gate_up.shape[1] // 2)
        counts = torch.full((1,), count, dtype=torch.int64, device=gate_up.device)
        return moe.glu(self._vendor, gate_up.contiguous(), activation, beta, linear_beta, counts)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """`Ops.sigmoid_gate`."""
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

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
        return moe.choose(
            torch.mm(x.float(), weight),
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
        packed: PackedExperts | QuantizedExperts,
        activation: Activation,
        beta: float,
        linear_beta: float | None,
    ) -> Tensor:
        """`Ops.experts`."""
        return moe.run(self._vendor, x, ids, weights, packed, activation, beta, linear_beta)

    def kda_conv_extend(self, u: Tensor, weight: Tensor, cache: KdaPool, step: ExtendStep) -> Tensor:
        """`Ops.kda_conv_extend`."""
        return kda.conv_extend(u, weight, cache, step)

    def kda_conv_decode(self, u: Tensor, weight: Tensor, cache: KdaPool, step: DecodeStep) -> Tensor:
        """`Ops.kda_conv_decode`."""
        return kda.conv_decode(u, weight, cache, step)

    def kda_extend(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: ExtendStep) -> Tensor:
        """`Ops.kda_extend`."""
        return kda.extend(self._vendor, qkv, f, b, gate, cache, step, chunk=self.chunk, is_fused=self._is_fused)

    def kda_decode(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: DecodeStep) -> Tensor:
        """`Ops.kda_decode`."""
        return kda.decode(self._vendor, qkv, f, b, gate, cache, step)

    def kda_conv_verify(self, u: Tensor, weight: Tensor, cache: KdaPool, step: VerifyStep) -> Tensor:
        """`Ops.kda_conv_verify`."""
        return verify.conv_verify(u, weight, cache, step)

    def kda_verify(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: VerifyStep) -> Tensor:
        """`Ops.kda_verify`."""
        return verify.verify(self._vendor, qkv, f, b, gate, cache, step)

    def commit(self, cache: Cache, step: VerifyStep, accepted: Sequence[int]) -> None:
        """`Ops.commit`."""
        assert isinstance(cache, NpuCache)
        verify.commit(self._vendor, cache, step, accepted)

    def gated_norm(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`Ops.gated_norm`."""
        if o.numel() == 0:
            return z.clone()
        normed: Tensor = torch.ops.npu.npu_rms_norm(o, weight, epsilon=eps)[0]
        return (normed.flatten(1) * z.float().sigmoid()).to(z.dtype)

    def fused_split_norm(
        self, kv: Tensor, q: Tensor, kv_weight: Tensor, q_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """What `Ops.split_norm` gives where it is chosen."""
        return mla.split_norm(self._vendor, kv, q, kv_weight, q_weight, eps)

    def mla_write(self, rows: Tensor, cache: MlaPool, step: ExtendStep | DecodeStep | VerifyStep) -> None:
        """`Ops.mla_write`."""
        if self._stores_prefix:
            mla.store(self._vendor, rows, cache, step)
        else:
            mla.write(rows, cache, step)

    def mla_extend(
        self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: ExtendStep, scale: float
    ) -> Tensor:
        """`Ops.mla_extend`."""
        return mla.extend(q, w_kc, w_vc, cache, step, scale, self._mask)

    def mla_decode(
        self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: DecodeStep, scale: float
    ) -> Tensor:
        """`Ops.mla_decode`."""
        return mla.decode(q, w_kc, w_vc, cache, step, scale)

    def mla_verify(
        self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: VerifyStep, scale: float
    ) -> Tensor:
        """`Ops.mla_verify`."""
        return mla.verify(q, w_kc, w_vc, cache, step, scale, self._mask)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """`Ops.log_softmax`."""
        return logits.log_softmax(dim=-1)

    def probabilities(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """`Ops.probabilities`."""
        return sampling.probabilities(logits, rows)

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """`Ops.sample`."""
        return sampling.sample(logits, rows)

    def free_memory(self) -> int | None:
        """`Ops.free_memory`."""
        return self._api.mem_get_info()[0]

    def verify_bytes(self, spec: CacheSpec, sequences: int, width: int) -> int:
        """`Ops.verify_bytes`. Rows of padding are a sequence more."""
        if width == 0:
            return 0
        if self._graphs is None:
            return spec.verify_bytes(sequences + 1, width)
        return captured_bytes(spec, sequences, width)

    def new_cache(self, spec: CacheSpec) -> Cache:
        """`Ops.new_cache`. Raises BackendError for a dtype that the kernels refuse."""
        if self.activation_dtype not in self.dtypes:
            given, *allowed = (str(dtype).removeprefix("torch.") for dtype in (self.activation_dtype, *self.dtypes))
            raise BackendError(
                f"model.dtype: got {given!r}; {self.name} takes {' or '.join(allowed)}: --set model.dtype={allowed[0]}"
            )
        return NpuCache(spec, device=self.device, activation_dtype=self.activation_dtype)
