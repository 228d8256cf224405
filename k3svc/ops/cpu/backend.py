"""The cpu backend: the operations of the table as calls of a small C++ library (csrc/), float32 throughout.

Batch-invariant bit by bit, and the same bits on every vector width and number of threads: each output element has one
order of operations, which csrc/ states where it is chosen. Prompts go through the recurrence that decode steps, so for
KDA a prompt and the same tokens one by one agree bit by bit too; MLA does not, being expanded in one and absorbed in
the other.

Weights that are bfloat16 numbers stay bfloat16 in memory.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.ops import reference_sampling
from k3svc.ops.cpu import packing, steps
from k3svc.ops.cpu.draft import CpuDraft, draws_of
from k3svc.ops.cpu.library import ABI_VERSION, Conv, Glu, Kda, Mla, Router, load_library
from k3svc.ops.cpu.memory import LargePages
from k3svc.ops.cpu.packing import PackedExperts, PackedWeight
from k3svc.ops.cpu.programs import Programs, Recorder
from k3svc.ops.cpu.steps import CpuStep, LayerRows, VerifyStep
from k3svc.ops.reference_cache import KdaPool, MlaPool, ReferenceCache
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

ISAS = ("avx512", "avx2", "portable")


class Cpu:
    """`Ops` of the cpu backend."""

    name = "cpu"
    few = None
    chunk = 64
    row_tile = 1
    is_asynchronous = False
    split_norm = None
    batch_invariant = True

    def __init__(self, *, threads: int = 1, isa: str | None = None, library: Path | None = None) -> None:
        """`isa` forces an instruction set (ISAS), `library` another build. Raises BackendError.

        `self.library` is what operations call; a recording puts its recorder there.
        """
        self.library: Any = load_library(library)
        chosen = isa.encode() if isa is not None else self.library.k3_best_isa()
        context = self.library.k3_open(chosen, threads)
        if not context:
            raise BackendError(f"this machine has no {isa}; it has {self.library.k3_best_isa().decode()}", isa=isa)
        weakref.finalize(self, self.library.k3_close, context)
        self.context = context
        self._programs = Programs(self.library, context)
        self._memory = LargePages()
        self.isa = chosen.decode()
        self.variant = f"float32 order {ABI_VERSION}"
        self.device = torch.device("cpu")
        self.activation_dtype = torch.float32
        self.draft = CpuDraft(self)

    def pack_linear(self, weight: Tensor) -> PackedWeight:
        """`Ops.pack_linear`."""
        return packing.pack_linear(weight, self._memory)

    def pack_quantized_linear(self, parts: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> PackedWeight:
        """`Ops.pack_quantized_linear`: as float weights."""
        return self.pack_linear(dequantized_rows(parts, dtype))

    def pack_experts(self, experts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> PackedExperts:
        """`Ops.pack_experts`."""
        return packing.pack_experts(experts, self._memory)

    def pack_quantized_experts(self, experts: Iterable[QuantizedExpert], dtype: torch.dtype) -> PackedExperts:
        """`Ops.pack_quantized_experts`."""
        return self.pack_experts(dequantized_experts(experts, dtype))

    def prepare(self, meta: StepMeta, mode: Mode, spec: CacheSpec) -> CpuStep:  # noqa: ARG002  the table's signature
        """`Ops.prepare`."""
        return steps.prepare(meta, mode)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """`Ops.run`: decode and verify steps are replayed (`programs`)."""
        result: Result = self._programs.run(function, args, self._recording)
        return result

    def when_done(self, call: Callable[[], None]) -> None:
        """`Ops.when_done`."""
        call()

    def expert_rows(self, meta: StepMeta, mode: Mode) -> int | None:  # noqa: ARG002 - the table's
        """`Ops.expert_rows`."""
        return None

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """`Ops.embed`; an id outside of the table gives NaN."""
        table, ids = _rows(table), ids.contiguous()
        num_rows, width = ids.shape[0], table.shape[1]
        y = torch.empty(num_rows, width)
        self.library.k3_take_rows(
            self.context,
            table.data_ptr(),
            table.stride(0),
            ids.data_ptr(),
            table.shape[0],
            num_rows,
            width,
            y.data_ptr(),
            width,
        )
        return y

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """`Ops.linear`."""
        x = _rows(x)
        num_rows = x.shape[0]
        y = torch.empty(num_rows, weight.out)
        self.library.k3_linear(self.context, weight.argument, x.data_ptr(), x.stride(0), num_rows, y.data_ptr())
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`Ops.rms_norm`."""
        x = _rows(x)
        num_rows, width = x.shape
        y = torch.empty(num_rows, width)
        self.library.k3_rms_norm(
            self.context, x.data_ptr(), x.stride(0), weight.data_ptr(), num_rows, width, eps, y.data_ptr()
        )
        return y

    def mix_residual(self, prefix: Tensor, bank: Sequence[Tensor], score: Tensor, eps: float) -> Tensor:
        """`Ops.mix_residual`; at most 15 rows in the bank."""
        rows = [_rows(row) for row in (*bank, prefix)]
        count = len(rows)
        assert count <= 16, f"{count} rows to mix, at most 16"
        y = torch.empty(prefix.shape)
        self.library.k3_mix_residual(
            self.context,
            (c_void_p * count)(*(row.data_ptr() for row in rows)),
            (c_int64 * count)(*(row.stride(0) for row in rows)),
            count,
            score.data_ptr(),
            *prefix.shape,
            eps,
            y.data_ptr(),
        )
        return y

    def glu(self, gate_up: Tensor, activation: Activation, beta: float, linear_beta: float | None) -> Tensor:
        """`Ops.glu`."""
        x = _rows(gate_up)
        num_rows, width = x.shape[0], x.shape[1] // 2
        y = torch.empty(num_rows, width)
        kind = _glu(activation, beta, linear_beta)
        self.library.k3_glu(self.context, byref(kind), x.data_ptr(), x.stride(0), num_rows, width, y.data_ptr())
        return y

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """`Ops.sigmoid_gate`."""
        x, gate = _rows(x), _rows(gate)
        y = torch.empty(x.shape)
        self.library.k3_sigmoid_gate(
            self.context, x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), *x.shape, y.data_ptr()
        )
        return y

    def route(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor,
        *,
        top_k: int,
        renormalize: bool,
        scale: float,
        num_groups: int,
        top_groups: int,
    ) -> tuple[Tensor, Tensor]:
        """`Ops.route`."""
        x = _rows(x)
        num_rows = x.shape[0]
        ids = torch.empty(num_rows, top_k, dtype=torch.int64)
        weights = torch.empty(num_rows, top_k)
        router = Router(bias.data_ptr(), top_k, num_groups, top_groups, scale, renormalize)
        self.library.k3_route(
            self.context,
            weight.argument,
            byref(router),
            x.data_ptr(),
            x.stride(0),
            num_rows,
            ids.data_ptr(),
            weights.data_ptr(),
        )
        return ids, weights

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
        x, ids, weights = _rows(x), ids.contiguous(), weights.contiguous()
        num_rows, top_k = ids.shape
        y = torch.empty(num_rows, packed.down.out)
        self.library.k3_experts(
            self.context,
            packed.gate_up.argument,
            packed.down.argument,
            packed.count,
            byref(_glu(activation, beta, linear_beta)),
            x.data_ptr(),
            x.stride(0),
            num_rows,
            ids.data_ptr(),
            weights.data_ptr(),
            top_k,
            y.data_ptr(),
        )
        return y

    def kda_conv_extend(self, u: Tensor, weight: Tensor, cache: KdaPool, step: CpuStep) -> Tensor:
        """`Ops.kda_conv_extend`."""
        y = step.new_rows(weight.shape[0])
        self._conv(_convolution(u, weight, cache), step, y)
        return y

    def kda_conv_decode(self, u: Tensor, weight: Tensor, cache: KdaPool, step: CpuStep) -> Tensor:
        """`Ops.kda_conv_decode`."""
        return self.kda_conv_extend(u, weight, cache, step)

    def kda_extend(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: CpuStep) -> Tensor:
        """`Ops.kda_extend`: decode's recurrence over blocks of value columns that stay in the first-level cache."""
        o = step.new_rows(*cache.state.shape[1:3])
        self._kda(self.library.k3_kda_extend, _recurrence(qkv, f, b, gate, cache), step, o)
        return o

    def kda_decode(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: CpuStep) -> Tensor:
        """`Ops.kda_decode`."""
        o = step.new_rows(*cache.state.shape[1:3])
        self._kda(self.library.k3_kda_decode, _recurrence(qkv, f, b, gate, cache), step, o)
        return o

    def kda_conv_verify(self, u: Tensor, weight: Tensor, cache: KdaPool, step: VerifyStep) -> Tensor:
        """`Ops.kda_conv_verify`."""
        y = step.new_rows(weight.shape[0])
        conv = _convolution(u, weight, cache)
        self._conv(conv, step.anchors, y)
        if step.drafts is not None:
            self._conv(conv, step.drafts, y)
        step.convolutions.append(conv)
        return y

    def kda_verify(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: VerifyStep) -> Tensor:
        """`Ops.kda_verify`: drafts run as a prompt would, on a copy of the state in the first-level cache."""
        o = step.new_rows(*cache.state.shape[1:3])
        kda = _recurrence(qkv, f, b, gate, cache)
        self._kda(self.library.k3_kda_decode, kda, step.anchors, o)
        if step.drafts is not None:
            self._kda(self.library.k3_kda_extend, kda, step.drafts, o)
        step.recurrences.append(kda)
        return o

    def commit(self, cache: Cache, step: VerifyStep, accepted: Sequence[int]) -> None:  # noqa: ARG002  the records know
        """`Ops.commit`: the accepted drafts as a prompt, from what the step keeps."""
        drafts = step.accepted_drafts(accepted)
        if drafts is not None:
            for conv in step.convolutions:
                self._conv(conv, drafts, None)
            for kda in step.recurrences:
                self._kda(self.library.k3_kda_extend, kda, drafts, None)
        step.convolutions.clear()
        step.recurrences.clear()

    def gated_norm(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`Ops.gated_norm`."""
        o, z = o.contiguous(), _rows(z)
        y = torch.empty(z.shape)
        self.library.k3_gated_norm(
            self.context,
            o.data_ptr(),
            z.data_ptr(),
            z.stride(0),
            weight.data_ptr(),
            *o.shape,
            eps,
            y.data_ptr(),
        )
        return y

    def mla_write(self, rows: Tensor, cache: MlaPool, step: CpuStep) -> None:
        """`Ops.mla_write`."""
        rows = _rows(rows)
        self.library.k3_mla_write(
            self.context, step.argument, rows.data_ptr(), rows.stride(0), rows.shape[1], cache.rows.data_ptr()
        )

    def mla_extend(self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: CpuStep, scale: float) -> Tensor:
        """`Ops.mla_extend`: keys and values of a block are expanded once a call."""
        return self._mla(self.library.k3_mla_extend, q, w_kc, w_vc, cache, step, scale)

    def mla_decode(self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: CpuStep, scale: float) -> Tensor:
        """`Ops.mla_decode`."""
        return self._mla(self.library.k3_mla_decode, q, w_kc, w_vc, cache, step, scale)

    def mla_verify(
        self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: VerifyStep, scale: float
    ) -> Tensor:
        """`Ops.mla_verify`: the keys of a sequence are loaded once for all of its rows."""
        return self._mla(self.library.k3_mla_decode, q, w_kc, w_vc, cache, step, scale)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """`Ops.log_softmax`."""
        return reference_sampling.log_softmax(logits)

    def probabilities(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """`Ops.probabilities`."""
        return reference_sampling.probabilities(logits, rows)

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """`Ops.sample`: one call for all rows; what a row wants is read from the tensors alone."""
        logits = _rows(logits)
        num_rows, count = logits.shape
        chosen = torch.empty(num_rows, dtype=torch.int64)
        self.library.k3_sample(
            self.context,
            byref(draws_of(rows)),
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            count,
            chosen.data_ptr(),
        )
        return chosen

    def free_memory(self) -> int | None:
        """`Ops.free_memory`."""
        return None

    def verify_bytes(self, spec: CacheSpec, sequences: int, width: int) -> int:  # noqa: ARG002 - nothing is kept
        """`Ops.verify_bytes`."""
        return 0

    def new_cache(self, spec: CacheSpec) -> ReferenceCache:
        """`Ops.new_cache`; float32 pools only."""
        if spec.state_dtype != torch.float32 or spec.kv_dtype != torch.float32:
            raise BackendError(
                f"the cpu backend keeps float32 caches; got {spec.state_dtype} states and {spec.kv_dtype} rows"
            )
        return ReferenceCache(spec)

    @contextmanager
    def _recording(self, recorder: Recorder) -> Iterator[None]:
        """Operations call the recorder meanwhile."""
        own, self.library = self.library, recorder
        try:
            yield
        finally:
            self.library = own

    def _conv(self, conv: LayerRows, step: CpuStep, y: Tensor | None) -> None:
        out = None if y is None else y.data_ptr()
        self.library.k3_conv(self.context, conv.argument, step.argument, *conv.rows, out)

    def _kda(self, kernel: Any, kda: LayerRows, step: CpuStep, o: Tensor | None) -> None:
        kernel(self.context, kda.argument, step.argument, *kda.rows, None if o is None else o.data_ptr())

    def _mla(
        self, kernel: Any, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: CpuStep, scale: float
    ) -> Tensor:
        assert q.stride()[1:] == (q.shape[2], 1), f"query rows of {list(q.shape)}, strides {q.stride()}"
        heads, nope, rank = w_kc.shape
        value_dim = w_vc.shape[1]
        o = step.new_rows(heads * value_dim)
        mla = Mla(
            w_kc.data_ptr(),
            w_vc.data_ptr(),
            cache.rows.data_ptr(),
            heads,
            nope,
            rank,
            q.shape[2] - nope,
            value_dim,
            scale,
        )
        kernel(self.context, byref(mla), step.argument, q.data_ptr(), q.stride(0), o.data_ptr())
        return o


def _convolution(u: Tensor, weight: Tensor, cache: KdaPool) -> LayerRows:
    u = _rows(u)
    conv = Conv(weight.data_ptr(), cache.conv.data_ptr(), *weight.shape)
    return LayerRows(argument=byref(conv), rows=(u.data_ptr(), u.stride(0)), owned=(u,))


def _recurrence(qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool) -> LayerRows:
    given = (_rows(qkv), _rows(f), _rows(b))
    _, heads, value_dim, key_dim = cache.state.shape
    kda = Kda(
        gate.a.data_ptr(),
        gate.dt_bias.data_ptr(),
        cache.state.data_ptr(),
        heads,
        key_dim,
        value_dim,
        gate.lower_bound or 0.0,
        gate.lower_bound is not None,
    )
    rows = tuple(number for x in given for number in (x.data_ptr(), x.stride(0)))
    return LayerRows(argument=byref(kda), rows=rows, owned=given)


def _rows(x: Tensor) -> Tensor:
    """x, or a copy of it when its rows are not float32 in one piece."""
    assert x.dtype == torch.float32, f"float32 expected, got {x.dtype}"
    return x if x.stride(-1) == 1 else x.contiguous()


def _glu(activation: Activation, beta: float, linear_beta: float | None) -> Glu:
    return Glu(activation == "situ", linear_beta is not None, beta, linear_beta or 0.0)
