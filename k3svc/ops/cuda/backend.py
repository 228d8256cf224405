"""`Ops` on an NVIDIA GPU, in Triton and, in the fast mode, the vendor's matrix products.

The batch-invariant mode (`cuda`) fixes every tile and every order of summation. With float32 activations prompts walk
the recurrence row by row, as decode does; with bfloat16 they go in chunks. The fast mode (`cuda:fast`) takes the
vendor's products, whose bits depend on the number of rows, and cuts long prompts into segments.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.ops import reference_sampling
from k3svc.ops.cuda import conv, graphs, kda_extend, kda_step, mla, moe, products, rowwise, sampling, steps
from k3svc.ops.cuda import rows as row_products
from k3svc.ops.cuda.cache import CudaCache, KdaPool, MlaPool
from k3svc.ops.cuda.few import Few
from k3svc.ops.cuda.moe import PackedExperts
from k3svc.ops.cuda.proposals import CudaDraft
from k3svc.ops.cuda.rowwise import unit_stride
from k3svc.ops.cuda.steps import Step
from k3svc.ops.cuda.tuning import tuning_of
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

OPTIONS = ("", "fast")
FAST_TILE = 64
"""Rows of a tile of experts in a large step of the fast mode."""


def load_cuda(options: str, dtype: torch.dtype) -> "CudaOps":
    """The backend on the current GPU. Raises BackendError that says what is missing."""
    if options not in OPTIONS:
        raise BackendError(f"model.device: cuda has no option {options!r}; it has: fast", device=f"cuda:{options}")
    if not torch.cuda.is_available():
        raise BackendError(
            f"model.device: torch {torch.__version__} sees no NVIDIA GPU; install a torch built for CUDA "
            "(pip install 'k3svc[cuda]') and a driver that it supports",
            device="cuda",
        )
    return CudaOps(dtype, device=torch.device("cuda", torch.cuda.current_device()), is_fast=options == "fast")


class CudaOps:
    """`Ops` of the cuda backend. On a CPU device the kernels need Triton's interpreter."""

    name = "cuda"
    chunk = 64
    row_tile = 1
    split_norm = None

    def __init__(self, dtype: torch.dtype, *, device: torch.device, is_fast: bool = False) -> None:
        """Raises BackendError for a GPU of an architecture without a tuning."""
        self._tuning = tuning_of(device)
        self._is_fast = is_fast
        self.batch_invariant = not is_fast
        self.device = device
        self.is_asynchronous = device.type == "cuda"
        self.activation_dtype = dtype
        self._graphs = graphs.Graphs() if device.type == "cuda" else None
        self.few = Few(self._tuning, device) if is_fast and dtype == torch.bfloat16 else None
        self._waiting = ThreadPoolExecutor(1, "k3svc-cuda")
        self.draft = CudaDraft(self.rms_norm, self.sample)
        processor = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
        mode = "fast" if is_fast else "batch-invariant"
        self.variant = f"{mode} triton {triton.__version__} torch {torch.__version__} {processor}"

    def pack_linear(self, weight: Tensor) -> Tensor:
        """[out, in] on the device."""
        return weight.to(self.device).contiguous()

    def pack_quantized_linear(self, parts: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> Tensor:
        """`Ops.pack_quantized_linear`: as float weights."""
        return self.pack_linear(dequantized_rows(parts, dtype))

    def pack_experts(self, experts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> PackedExperts:
        """`Ops.pack_experts`."""
        gate_up, down = [], []
        for w1, w3, w2 in experts:
            gate_up.append(torch.cat([w1, w3]).to(self.device))
            down.append(w2.to(self.device))
        return PackedExperts(gate_up=torch.stack(gate_up), down=torch.stack(down))

    def pack_quantized_experts(self, experts: Iterable[QuantizedExpert], dtype: torch.dtype) -> PackedExperts:
        """`Ops.pack_quantized_experts`."""
        return self.pack_experts(dequantized_experts(experts, dtype))

    def prepare(self, meta: StepMeta, mode: Mode, spec: CacheSpec) -> Step:
        """`Ops.prepare`."""
        tuning = self._tuning
        live = sum(slot >= 0 for slot in meta.host_slots)
        programs = live * spec.kda_heads * spec.kda_value_dim // tuning.scan_block_v
        is_cut = self._is_fast and mode == "extend" and programs < tuning.few_programs
        return steps.prepare(meta, mode, tuning.segment_chunks if is_cut else None)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """`Ops.run`: decode and verify steps are captured as graphs and replayed."""
        return function(*args) if self._graphs is None else self._graphs.run(function, args)

    def when_done(self, call: Callable[[], None]) -> None:
        """`Ops.when_done`: an event on the stream of the steps, for which another thread waits."""
        if self.device.type != "cuda":
            call()
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        self._waiting.submit(_call_after, event, call)

    def expert_rows(self, meta: StepMeta, mode: Mode) -> int | None:
        """`Ops.expert_rows`."""
        return meta.num_live_rows if mode == "extend" or self._graphs is None else None

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """`Ops.embed`."""
        return table.index_select(0, ids)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`Ops.linear`."""
        if not self._is_fast:
            return products.linear(x, weight, self._tuning)
        return self._fast_linear(x, weight) if x.shape[0] <= products.SKINNY_ROWS else F.linear(x, weight)

    def _fast_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Of few rows, in the dtype of the weight; the tensor cores have no float32."""
        if weight.dtype == torch.float32 or x.shape[0] <= self._tuning.few_rows:
            return row_products.product(unit_stride(x), weight, self._tuning, dtype=weight.dtype)
        return products.skinny(x, weight, self._tuning)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`Ops.rms_norm`."""
        return rowwise.rms_norm(x, weight, eps)

    def mix_residual(self, prefix: Tensor, bank: Sequence[Tensor], score: Tensor, eps: float) -> Tensor:
        """`Ops.mix_residual`."""
        return rowwise.mix_residual(prefix, bank, score, eps)

    def glu(self, gate_up: Tensor, activation: Activation, beta: float, linear_beta: float | None) -> Tensor:
        """`Ops.glu`."""
        return rowwise.glu(gate_up, activation, beta, linear_beta)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """`Ops.sigmoid_gate`."""
        return rowwise.sigmoid_gate(x, gate)

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
        is_skinny = self._is_fast and x.shape[0] <= products.SKINNY_ROWS
        return rowwise.route(
            self._fast_linear(x, weight) if is_skinny else self.linear(x.float(), weight),
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
        tile = FAST_TILE if self._is_fast and ids.numel() > FAST_TILE * packed.down.shape[0] // 2 else moe.TILE
        return moe.run_experts(x, ids, weights, packed, activation, beta, linear_beta, tile=tile, is_fast=self._is_fast)

    def kda_conv_extend(self, u: Tensor, weight: Tensor, cache: KdaPool, step: Step) -> Tensor:
        """`Ops.kda_conv_extend`."""
        return conv.extend(u, weight, cache, step)

    def kda_conv_decode(self, u: Tensor, weight: Tensor, cache: KdaPool, step: Step) -> Tensor:
        """`Ops.kda_conv_decode`."""
        return conv.decode(u, weight, cache, step)

    def kda_conv_verify(self, u: Tensor, weight: Tensor, cache: KdaPool, step: Step) -> Tensor:
        """`Ops.kda_conv_verify`."""
        step.commits.append(partial(conv.commit, u, weight, cache, step))
        return conv.decode(u, weight, cache, step)

    def kda_extend(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: Step) -> Tensor:
        """`Ops.kda_extend`."""
        if qkv.dtype == torch.bfloat16 and kda_extend.takes(cache):
            return kda_extend.extend(qkv, f, b, gate, cache, step, self._tuning)
        return kda_step.extend(qkv, f, b, gate, cache, step, self._tuning, is_fast=self._is_fast)

    def kda_decode(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: Step) -> Tensor:
        """`Ops.kda_decode`."""
        return kda_step.decode(qkv, f, b, gate, cache, step, self._tuning, is_fast=self._is_fast)

    def kda_verify(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: KdaPool, step: Step) -> Tensor:
        """`Ops.kda_verify`."""
        is_fast = self._is_fast
        step.commits.append(partial(kda_step.commit, qkv, f, b, gate, cache, step, self._tuning, is_fast=is_fast))
        return kda_step.verify(qkv, f, b, gate, cache, step, self._tuning, is_fast=is_fast)

    def commit(self, cache: Cache, step: Step, accepted: Sequence[int]) -> None:  # noqa: ARG002 - the step knows it
        """`Ops.commit`: repeats the accepted rows of every state, from what the step has kept."""
        if any(accepted):
            # A replayed step has as many sequences as its rung.
            counts = torch.zeros(max(len(accepted), graphs.LADDER[-1]), dtype=torch.int64)
            counts[: len(accepted)] = torch.tensor(accepted)
            counts = counts.to(self.device)
            for advance in step.commits:
                advance(counts)
        step.commits.clear()

    def gated_norm(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`Ops.gated_norm`."""
        return rowwise.gated_norm(o, z, weight, eps)

    def mla_write(self, rows: Tensor, cache: MlaPool, step: Step) -> None:
        """`Ops.mla_write`."""
        mla.write(rows, cache, step)

    def mla_extend(self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: Step, scale: float) -> Tensor:
        """`Ops.mla_extend`."""
        return mla.extend(q, w_kc, w_vc, cache, step, scale, self._tuning)

    def mla_decode(self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: Step, scale: float) -> Tensor:
        """`Ops.mla_decode`."""
        return mla.decode(q, w_kc, w_vc, cache, step, scale, self._tuning, is_fast=self._is_fast)

    def mla_verify(self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: MlaPool, step: Step, scale: float) -> Tensor:
        """`Ops.mla_verify`."""
        return mla.decode(q, w_kc, w_vc, cache, step, scale, self._tuning, is_fast=self._is_fast)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """`Ops.log_softmax`."""
        return sampling.log_softmax(logits)

    def probabilities(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """`Ops.probabilities`."""
        return reference_sampling.probabilities(logits, rows)

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """`Ops.sample`."""
        return sampling.sample(logits, rows)

    def free_memory(self) -> int | None:
        """`Ops.free_memory`. None without a GPU."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else None

    def verify_bytes(self, spec: CacheSpec, sequences: int, width: int) -> int:  # noqa: ARG002 - nothing is kept
        """`Ops.verify_bytes`."""
        return 0

    def new_cache(self, spec: CacheSpec) -> Cache:
        """`Ops.new_cache`. Raises BackendError for a convolution of another width than the kernels'."""
        if spec.conv_width != conv.WIDTH:
            raise BackendError(f"the cuda backend convolves over {conv.WIDTH} tokens; the model over {spec.conv_width}")
        return CudaCache(spec, self.device)


def _call_after(event: Any, call: Callable[[], None]) -> None:
    try:
        event.synchronize()
    finally:
        # A device that failed fails whatever is asked of it next; nobody shall wait for it for ever.
        call()
