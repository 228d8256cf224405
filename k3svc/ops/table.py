"""The table of operations that a backend provides. Models and the runner see nothing else of the hardware.

Letters in shapes: N packed rows of a step (padding included), B sequences, H hidden size, HV KDA heads, K and V their
key and value widths, P = HV·K (K = V in every public model, so q, k and v have P channels each), NH attention heads,
R kv_lora_rank, E qk_rope_head_dim, C = R + E cache width, X vocabulary, S slots, W convolution width.

Rules for every backend
- Activations come and go in `activation_dtype`; fp32 inside where model.md 2.10 (fp32 checklist) says so.
- A slot of -1 marks padding: the row reads nothing, writes nothing, and its output is unspecified but finite.
- Operations named as updating a cache do so in place. Everything else leaves its arguments alone.
- Where `batch_invariant` is true, the bits of a row or a sequence depend on its own inputs alone: not on the other
  rows, their number, padding, or on how a prompt was cut at multiples of `chunk` tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from k3svc.ops.few_table import FewOps

if TYPE_CHECKING:
    from k3svc.ops.draft_table import DraftOps

Activation = Literal["silu", "situ"]
Mode = Literal["extend", "decode", "verify"]

Result = TypeVar("Result")

LayerCache: TypeAlias = Any
"""Pool memory of one layer in the backend's own layout; opaque outside the backend."""

SplitNorm: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""kv [N, C] = latent | k_rope, q [N, D], weights [R] and [D], eps → kv with its latent normed, and q normed."""

Step: TypeAlias = Any
"""What the operations of one step share (`Ops.prepare`), in the backend's own form; opaque outside the backend."""


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Geometry and size of the pools of one process. Slot 0 and page 0 are dummies beside the counted ones."""

    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    kda_heads: int
    kda_key_dim: int
    kda_value_dim: int
    conv_width: int
    kv_lora_rank: int
    rope_dim: int
    vocab_size: int
    num_slots: int
    num_pages: int
    page_size: int
    state_dtype: torch.dtype
    kv_dtype: torch.dtype
    wire_state_dtype: torch.dtype | None = None
    """What KDA states are rounded to on their way from prefill to decode; None: nothing."""

    @property
    def conv_channels(self) -> int:
        return self.kda_heads * (2 * self.kda_key_dim + self.kda_value_dim)

    @property
    def slot_bytes(self) -> int:
        """Of a slot in all layers, its logits row with it."""
        state = self.kda_heads * self.kda_value_dim * self.kda_key_dim * self.state_dtype.itemsize
        conv = (self.conv_width - 1) * self.conv_channels * self.kv_dtype.itemsize
        return len(self.kda_layers) * (state + conv) + self.vocab_size * torch.float32.itemsize

    @property
    def page_bytes(self) -> int:
        """Of a page in all layers."""
        width = (self.kv_lora_rank + self.rope_dim) * self.kv_dtype.itemsize
        return len(self.mla_layers) * self.page_size * width

    def verify_bytes(self, sequences: int, width: int) -> int:
        """Of what a verify step keeps of `sequences` of `width` rows, padding included, where it keeps states: those
        after each row, and the conv windows with the rows after them.
        """
        state = self.kda_heads * self.kda_value_dim * self.kda_key_dim * self.state_dtype.itemsize
        window = (self.conv_width - 1 + width) * self.conv_channels * self.kv_dtype.itemsize
        return len(self.kda_layers) * sequences * (width * state + window)


@dataclass(frozen=True, kw_only=True)
class StepMeta:
    """Where the rows of a step live. Tensors on the device; the tuples are their host copies.

    Extend: sequence b owns rows cu_seqlens[b] : cu_seqlens[b + 1] and starts at token starts[b] (a multiple of the
    chunk grid). Decode: row b is sequence b, at position starts[b]. Verify: sequence b owns the same range of rows as
    in extend, at least one: an anchor at position starts[b], which is any number, and drafts at the positions after it.
    Rows past the last sequence are padding; in a verify step they may also be sequences of slot -1.
    """

    slots: Tensor
    """int64 [B], -1 for padding."""
    starts: Tensor
    """int64 [B], tokens of the sequence in the caches before this step."""
    cu_seqlens: Tensor
    """int64 [B + 1]."""
    slot_mapping: Tensor
    """int64 [N], page · page_size + offset of each row, -1 for padding."""
    block_tables: Tensor
    """int64 [B, pages], filled with 0 (the dummy page) past the end."""
    host_slots: tuple[int, ...]
    host_starts: tuple[int, ...]
    host_cu_seqlens: tuple[int, ...]
    page_size: int

    @property
    def num_live_rows(self) -> int:
        """Rows before the padding at the end."""
        ends = zip(self.host_slots, self.host_cu_seqlens[1:], strict=True)
        return max((end for slot, end in ends if slot >= 0), default=0)


@dataclass(frozen=True, kw_only=True)
class KdaGate:
    """Parameters of the decay gate (model.md 2.3 step 5). lower_bound None: softplus form."""

    a: Tensor
    """exp(A_log), float32 [HV]."""
    dt_bias: Tensor
    """float32 [HV, K]."""
    lower_bound: float | None


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """Sampling parameters of R rows. Tensors on the device; host copies decide which filters run, so that no device is
    asked for what it was told.
    """

    temperature: Tensor
    """float32 [R]; 0 is greedy."""
    top_k: Tensor
    """int64 [R]; 0 is off."""
    top_p: Tensor
    """float32 [R]."""
    min_p: Tensor
    """float32 [R]."""
    seed: Tensor
    """int64 [R], the bits of the unsigned seed."""
    sample_index: Tensor
    """int64 [R]."""
    position: Tensor
    """int64 [R], absolute position of the token to choose."""
    host_greedy: tuple[bool, ...]
    host_filters: tuple[tuple[int, float, float], ...]
    """(top_k, top_p, min_p) of each row, the numbers of the tensors."""

    @property
    def host_filtered(self) -> tuple[bool, ...]:
        """Row uses any of top-k, top-p, min-p."""
        return tuple(top_k > 0 or top_p < 1.0 or min_p > 0.0 for top_k, top_p, min_p in self.host_filters)


@dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A weight of whole numbers with one scale a row, or a scale for each group of columns of a row."""

    values: Tensor
    """int8 [out, in], symmetric."""
    scale: Tensor
    """float32 [out], or [out, groups] of as many columns each."""
    bits: Literal[4, 8]
    """4: values lie in -8..7."""

    def dequantized(self) -> Tensor:
        """float32 [out, in]."""
        rows, columns = self.values.shape
        groups = self.scale.view(rows, -1, 1)
        return self.values.float().view(rows, groups.shape[1], -1).mul_(groups).view(rows, columns)


QuantizedExpert: TypeAlias = tuple[QuantizedMatrix, QuantizedMatrix, QuantizedMatrix]
"""w1, w3, w2 of `Ops.pack_experts`."""


def dequantized_rows(parts: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> Tensor:
    """Rows of weights one below the other, those of whole numbers as what they stand for."""
    return torch.cat([part.to(dtype) if isinstance(part, Tensor) else part.dequantized().to(dtype) for part in parts])


def dequantized_experts(
    experts: Iterable[QuantizedExpert], dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What weights of whole numbers stand for, one expert at a time."""
    for w1, w3, w2 in experts:
        yield w1.dequantized().to(dtype), w3.dequantized().to(dtype), w2.dequantized().to(dtype)


class Ops(Protocol):
    """One backend. `name` and `variant` are part of the fingerprint and of `doctor`."""

    name: str
    variant: str
    batch_invariant: bool
    device: torch.device
    activation_dtype: torch.dtype
    chunk: int
    """Grid of prompt chunks in tokens (64)."""
    row_tile: int
    """The rows of a step are padded to a multiple of this."""
    is_asynchronous: bool
    """Operations return before the device has computed them, so that a step can be asked for while one runs."""

    @property
    def draft(self) -> "DraftOps":
        """What draft models need of this backend beyond the rest of the table."""
        ...

    @property
    def few(self) -> "FewOps | None":
        """Operations for steps of few rows; None where the rest of the table is all there is."""
        ...

    # Weights

    def pack_linear(self, weight: Tensor) -> Any:
        """Re-lay a weight [out, in] for `linear`, once at load."""
        ...

    def pack_quantized_linear(self, parts: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> Any:
        """The same for the rows of several weights one below the other, among them int8 ones of one scale a row. A
        backend without kernels for them computes with what they stand for, rounded to dtype (`dequantized_rows`)."""
        ...

    def pack_experts(self, experts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Any:
        """Re-lay expert weights for `experts`, one expert at a time: w1 (gate) and w3 (up) [inner, width], w2 (down)
        [width, inner]."""
        ...

    def pack_quantized_experts(self, experts: Iterable[QuantizedExpert], dtype: torch.dtype) -> Any:
        """The same for weights of whole numbers. A backend without kernels for them computes with the weights that
        they stand for, rounded to dtype (`dequantized_experts`)."""
        ...

    # Steps

    def prepare(self, meta: StepMeta, mode: Mode, spec: CacheSpec) -> Step:
        """Derive once a step what its operations share, such as tiles, masks and the rows that are not padding."""
        ...

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """function(*args), which a backend with graphs captures once for each kind of arguments and then replays.

        Tensors, and those inside of steps and other dataclasses, are inputs and may differ from call to call; all else
        belongs to the kind. Tensors beside a step have its rows. The result is a tensor of as many rows, or a tuple of
        such and of None.
        """
        ...

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls `call` when all that this thread has asked for has been computed: at once where operations return with
        their results, else later and on another thread, in the order of the asking. `call` must not raise.
        """
        ...

    def expert_rows(self, meta: StepMeta, mode: Mode) -> int | None:
        """How many of a step's first rows go to routed experts: those before the padding at the end, since no others
        count; None for all, where steps are captured in fixed shapes."""
        ...

    # Row-wise operations

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """table [X, H], ids int64 [N] → [N, H]."""
        ...

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """x [N, in] → [N, out], no bias; any N >= 0."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [N, D] → x · rsqrt(mean(x²) + eps) · weight (model.md 2.1)."""
        ...

    def mix_residual(self, prefix: Tensor, bank: Sequence[Tensor], score: Tensor, eps: float) -> Tensor:
        """Block attention residual (model.md 2.8): softmax over rows of [*bank, prefix], each [N, H].

        score float32 [H] = res_norm.weight · res_proj.weight[0].
        """
        ...

    def glu(self, gate_up: Tensor, activation: Activation, beta: float, linear_beta: float | None) -> Tensor:
        """gate_up [N, 2·D] = [gate | up] → [N, D]; SiTU or SwiGLU in float32 (model.md 2.7)."""
        ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x · sigmoid(gate), both [N, D] (K3's MLA output gate)."""
        ...

    def route(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor,
        *,
        top_k: int,
        renormalize: bool,
        scale: float,
        num_groups: int,
        top_groups: int,
    ) -> tuple[Tensor, Tensor]:
        """Sigmoid router in float32 (model.md 2.7): x [N, H] → expert ids int64 [N, top_k], weights float32."""
        ...

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        packed: Any,
        activation: Activation,
        beta: float,
        linear_beta: float | None,
    ) -> Tensor:
        """Weighted sum of the chosen experts: x [N, D] → [N, D], summed in the order of ids, float32."""
        ...

    # KDA

    def kda_conv_extend(self, u: Tensor, weight: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Causal depthwise convolution and SiLU over packed prompts; reads and updates the conv state.

        u [N, channels] raw q|k|v projections, weight float32 [channels, W] → [N, channels]. starts == 0 begins with
        zeros.
        """
        ...

    def kda_conv_decode(self, u: Tensor, weight: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """The same for one row per sequence."""
        ...

    def kda_extend(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: LayerCache, step: Step) -> Tensor:
        """Gated delta rule over packed prompts (model.md 2.3, 2.4); reads and updates the recurrent state.

        qkv [N, q|k|v] after the convolution, f [N, HV·K] decay logits, b [N, HV] beta logits → float32 [N, HV, V].
        l2 norm, scale K^-1/2, gate, sigmoid of b happen here. starts == 0 begins with a zero state.
        """
        ...

    def kda_decode(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: LayerCache, step: Step) -> Tensor:
        """The same for one row per sequence (model.md 2.5)."""
        ...

    def kda_conv_verify(self, u: Tensor, weight: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """`kda_conv_decode` of each sequence's anchor, whose row enters the conv state, and of its drafts after it,
        whose rows do not: the step keeps them for `commit`. u [N, channels] → [N, channels].
        """
        ...

    def kda_verify(self, qkv: Tensor, f: Tensor, b: Tensor, gate: KdaGate, cache: LayerCache, step: Step) -> Tensor:
        """`kda_decode` of each sequence's anchor, which updates the recurrent state, and of its drafts after it, which
        do not: the step keeps what `commit` needs to repeat them. Shapes of `kda_decode`, bits of decode row by row.
        """
        ...

    def commit(self, cache: "Cache", step: Step, accepted: Sequence[int]) -> None:
        """Advances conv and KDA states of all layers by the first accepted[b] drafts of each sequence b of a verify
        step, in decode's order of operations, so that they equal those after as many decode steps bit by bit. Once a
        step, before the next one; accepted[b] = 0 leaves a sequence as its anchor left it.
        """
        ...

    def gated_norm(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm per head, then · sigmoid(z): o float32 [N, HV, V], z [N, HV·V], weight [V] → [N, HV·V]."""
        ...

    # MLA

    @property
    def split_norm(self) -> SplitNorm | None:
        """Split and norm of both latents in one operation, where the backend has one and it was chosen: it may round
        elsewhere than `rms_norm`. None: the model splits them and norms each by `rms_norm`.
        """
        ...

    def mla_write(self, rows: Tensor, cache: LayerCache, step: Step) -> None:
        """Store normed latent | k_rope rows [N, C] at slot_mapping."""
        ...

    def mla_extend(self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: LayerCache, step: Step, scale: float) -> Tensor:
        """Causal attention of prompt rows over all cached rows of their sequence (expanded form, model.md 2.6).

        q [N, NH, nope + E], w_kc [NH, nope, R], w_vc [NH, V, R] → [N, NH·V]. The step's rows are already written.
        """
        ...

    def mla_decode(self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: LayerCache, step: Step, scale: float) -> Tensor:
        """The same for one row per sequence at position starts[b] (absorbed form)."""
        ...

    def mla_verify(self, q: Tensor, w_kc: Tensor, w_vc: Tensor, cache: LayerCache, step: Step, scale: float) -> Tensor:
        """`mla_decode` of each row of a verify step at its own position, with the bits of decode."""
        ...

    # Sampling

    def log_softmax(self, logits: Tensor) -> Tensor:
        """float32 [R, X] → float32 [R, X]."""
        ...

    def probabilities(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """The law that `sample` draws from: float32 [R, X] (penalties applied) → float32 [R, X], rows sum to 1; one-hot
        at the argmax for greedy rows.
        """
        ...

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Choose a token per row: float32 [R, X] (penalties applied) → int64 [R].

        Greedy: argmax, lowest id on ties. Else temperature → top-k (ties at the border stay) → renormalise → top-p →
        min-p, then argmax of logit/temperature + Gumbel noise of (seed, sample index, position, id) over what is left.
        A row whose largest logit is not finite gets any id of the vocabulary and disturbs no other row.
        """
        ...

    # Caches

    def free_memory(self) -> int | None:
        """Bytes that the device has left for pools; None where they lie in the host's memory, which is nobody's own."""
        ...

    def verify_bytes(self, spec: CacheSpec, sequences: int, width: int) -> int:
        """Bytes that verify steps of up to `sequences` of `width` rows take beside the pools for the KDA states after
        each row; 0 where no step keeps them."""
        ...

    def new_cache(self, spec: CacheSpec) -> "Cache":
        """Allocate the pools of all layers, once at start."""
        ...


class WireBytes(Protocol):
    """Bytes of pool memory in the wire layout, read and written by slices. Memory of the host is a memoryview, so that
    bytes go to and come from the wire without a copy; a slice of other memory is a copy.
    """

    @property
    def nbytes(self) -> int:
        """Their number."""
        ...

    def __getitem__(self, span: slice) -> memoryview: ...

    def __setitem__(self, span: slice, data: memoryview | bytes) -> None: ...


class Fetch(Protocol):
    """Bytes that are under way from a pool to the host."""

    def data(self) -> memoryview:
        """The bytes, once they are there. Valid until others are fetched; asking again later copies again."""
        ...


class PoolWriter(Protocol):
    """Where the bytes of one hand-off go on their way into a pool: memory that was free when the writer was made."""

    def takes(self, view: WireBytes, count: int) -> bool:
        """Whether `place` takes so many bytes of this view; else it is written by slices."""
        ...

    def place(self, view: Any, begin: int, count: int) -> AbstractContextManager[memoryview]:
        """Memory to fill with bytes [begin, begin + count) of a view; they are under way when the block ends."""
        ...

    def settle(self) -> None:
        """Returns when all of them are in the pool, where every later step sees them."""
        ...


class Staging(Protocol):
    """Copies between pools of a device and the host that go on beside its steps, many at a time. The event loop's."""

    def fetch(self, view: WireBytes, begin: int, count: int) -> Fetch | None:
        """Begins to copy bytes that are final, as `Ops.when_done` tells. None: this view is read by slices."""
        ...

    def writer(self) -> PoolWriter:
        """For memory that is free now: what is written waits for the steps that may still touch it."""
        ...


class Cache(Protocol):
    """The pools of all layers, and their memory in the wire layout (design.md 3: one wire layout).

    Wire layouts: state [HV, V, K], conv [W-1, channels] oldest row first, MLA rows [tokens, C], logits float32 [X].
    """

    spec: CacheSpec
    nbytes: int

    @property
    def staging(self) -> Staging | None:
        """None: views are memory of the host, or are read and written by slices alone."""
        ...

    def layer(self, index: int) -> LayerCache:
        """Cache of a layer by its 0-based model index."""
        ...

    def clear_slot(self, slot: int) -> None:
        """Zero the KDA and conv state and the logits row of a slot."""
        ...

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the KDA and conv state of all layers and the logits row."""
        ...

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the KDA and conv states of all layers from slot sources[i] to slot targets[i], bit by bit; a pair with a
        target of -1 does nothing. Targets differ from each other and from all sources.
        """
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of MLA rows of all layers."""
        ...

    def logits(self, slots: Sequence[int]) -> Tensor:
        """Copy of the logits rows of slots, float32 [len(slots), X]."""
        ...

    def set_logits(self, slot: int, row: Tensor) -> None:
        """Store the logits row [X] of a slot."""
        ...

    def state_bytes(self, layer: int, slot: int) -> WireBytes:
        """Writable bytes of the KDA state."""
        ...

    def conv_bytes(self, layer: int, slot: int) -> WireBytes:
        """Writable bytes of the conv state."""
        ...

    def rows_bytes(self, layer: int, page: int, num_pages: int = 1) -> WireBytes:
        """Writable bytes of the rows of consecutive pages, num_pages · page_size · C elements."""
        ...

    def logits_bytes(self, slot: int) -> WireBytes:
        """Writable bytes of the logits row."""
        ...

    def is_finite(self, slot: int) -> bool:
        """Whether every element of a slot's KDA and conv state and logits row is finite."""
        ...
