"""`DraftOps` of the cpu backend: calls of the library, which read rings in place, and visible cells alone."""

from collections.abc import Sequence
from ctypes import byref, memmove, sizeof
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from k3svc.ops.cpu.library import BlockAttention, Blocks, Draws, NormRope
from k3svc.ops.cpu.packing import PackedWeight
from k3svc.ops.cpu.steps import CpuStep
from k3svc.ops.draft_table import BlockMeta
from k3svc.ops.table import SampleRows


@dataclass(frozen=True, kw_only=True)
class BlockStep(CpuStep):
    """A step of draft blocks: its rows are requests."""

    MOST: ClassVar[int] = 16

    def alike(self, num_rows: int) -> "BlockStep":
        """`CpuStep.alike`."""
        return BlockStep(num_rows=num_rows, num_live=num_rows, pads_at_end=True, owned=(), argument=byref(Blocks()))

    def take(self, given: Any) -> None:
        """`CpuStep.take`."""
        memmove(self.argument, given.argument, sizeof(Blocks))


class Backend(Protocol):
    """What drafts use of the backend."""

    library: Any
    """What operations call: the library, or a recorder in its place."""
    context: int

    def pack_linear(self, weight: Tensor) -> PackedWeight:
        """`Ops.pack_linear`."""
        ...

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """`Ops.linear`."""
        ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """`Ops.sigmoid_gate`."""
        ...


class CpuDraft:
    """`DraftOps`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def prepare(self, meta: BlockMeta) -> BlockStep:
        """`DraftOps.prepare`."""
        owned = tuple(column.contiguous() for column in (meta.slots, meta.base_lens, meta.starts))
        count = len(meta.host_lengths)
        structure = Blocks(*(column.data_ptr() for column in owned), count, meta.num_rows, meta.window, meta.capacity)
        return BlockStep(num_rows=count, num_live=count, pads_at_end=True, owned=owned, argument=byref(structure))

    def rotation(
        self, positions: Tensor, num_rows: int, frequencies: Tensor, amplitude: float
    ) -> tuple[Tensor, Tensor]:
        """`DraftOps.rotation`."""
        count, half = positions.shape[0], frequencies.shape[0]
        cos, sin = torch.empty(count * num_rows, half), torch.empty(count * num_rows, half)
        self._call(
            "k3_rotation",
            positions.data_ptr(),
            count,
            num_rows,
            frequencies.data_ptr(),
            half,
            amplitude,
            cos.data_ptr(),
            sin.data_ptr(),
        )
        return cos, sin

    def norm_rope(
        self, qkv: Tensor, heads: int, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`DraftOps.norm_rope`; the values are where they were."""
        num_rows, width = qkv.shape[0], q_weight.shape[0]
        key_heads = (qkv.shape[1] // width - heads) // 2
        q, k = torch.empty(num_rows, heads, width), torch.empty(num_rows, key_heads, width)
        own = NormRope(q_weight.data_ptr(), k_weight.data_ptr(), heads, key_heads, width, eps)
        self._call(
            "k3_norm_rope",
            byref(own),
            qkv.data_ptr(),
            _row_stride(qkv),
            num_rows,
            cos.data_ptr(),
            sin.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
        )
        return q, k, qkv[:, (heads + key_heads) * width :].unflatten(1, (key_heads, width))  # type: ignore[no-untyped-call]

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """`DraftOps.rotate`."""
        num_rows, heads, width = x.shape
        assert x.stride(2) == 1, f"heads with strides {x.stride()}"
        y = torch.empty(num_rows, heads, width)
        self._call(
            "k3_rotate",
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            num_rows,
            heads,
            width,
            cos.data_ptr(),
            sin.data_ptr(),
            interleaved,
            y.data_ptr(),
        )
        return y

    def pack_heads(self, weight: Tensor) -> list[PackedWeight]:
        """`DraftOps.pack_heads`."""
        return [self._backend.pack_linear(matrix) for matrix in weight]

    def project_heads(self, x: Tensor, weight: Sequence[PackedWeight]) -> Tensor:
        """`DraftOps.project_heads`."""
        parts = [self._backend.linear(x[:, head], matrix) for head, matrix in enumerate(weight)]
        return torch.cat(parts, dim=1).view(x.shape[0], len(parts), -1)

    def write_context(self, rows: Tensor, pool: Tensor, slots: Tensor, positions: Tensor) -> None:
        """`DraftOps.write_context`."""
        num_rows, heads, width = rows.shape
        assert _lies_whole(rows), f"rows of {list(rows.shape)}, strides {rows.stride()}"
        assert _lies_whole(pool[0]), f"cells of {list(pool.shape)}, strides {pool.stride()}"
        self._call(
            "k3_write_context",
            rows.data_ptr(),
            rows.stride(0),
            num_rows,
            heads * width,
            slots.data_ptr(),
            positions.data_ptr(),
            pool.data_ptr(),
            *pool.stride()[:2],
            pool.shape[1],
        )

    def block_attention(
        self,
        query: Tensor,
        block_keys: Tensor,
        block_values: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        step: BlockStep,
        *,
        scale: float,
        is_causal: bool,
    ) -> Tensor:
        """`DraftOps.block_attention`."""
        heads, key_width = query.shape[2:]
        key_heads, value_width = block_values.shape[2:]
        for x in (query, block_keys, block_values, context_keys, context_values):
            assert _lies_whole(x[0]), f"rows of {list(x.shape)}, strides {x.stride()}"
        out = torch.empty(*query.shape[:3], value_width)
        own = BlockAttention(
            context_keys.data_ptr(),
            context_values.data_ptr(),
            *context_keys.stride()[:2],
            *context_values.stride()[:2],
            heads,
            key_heads,
            key_width,
            value_width,
            scale,
            is_causal,
        )
        rows = [part for x in (query, block_keys, block_values) for part in (x.data_ptr(), x.stride(1))]
        self._call("k3_block_attention", byref(own), step.argument, *rows, out.data_ptr())
        return out

    def gate(self, x: Tensor, logits: Tensor) -> Tensor:
        """`DraftOps.gate`."""
        return self._backend.sigmoid_gate(x, logits)

    def recur(self, joint: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """`DraftOps.recur`."""
        mixed, after = torch.empty(memory.shape), torch.empty(memory.shape)
        self._call(
            "k3_recur",
            joint.data_ptr(),
            _row_stride(joint),
            memory.data_ptr(),
            _row_stride(memory),
            *memory.shape,
            mixed.data_ptr(),
            after.data_ptr(),
        )
        return mixed, after

    def choose(
        self, logits: Tensor, bias: Tensor | None, banned: int, rows: SampleRows | None, offset: int
    ) -> tuple[Tensor, Tensor]:
        """`DraftOps.choose`; what a row wants is read from the tensors alone."""
        num_rows, count = logits.shape
        scores, tokens = torch.empty(num_rows, count), torch.empty(num_rows, dtype=torch.int64)
        draws = None if rows is None else byref(draws_of(rows))
        self._call(
            "k3_choose",
            draws,
            logits.data_ptr(),
            _row_stride(logits),
            None if bias is None else bias.data_ptr(),
            banned,
            offset,
            num_rows,
            count,
            scores.data_ptr(),
            tokens.data_ptr(),
        )
        return tokens, scores

    def confidences(
        self, states: Tensor, embedded: Tensor | None, weight: Tensor, bias: float, temperatures: Tensor
    ) -> Tensor:
        """`DraftOps.confidences`."""
        count, num_rows, width = states.shape
        y = torch.empty(count, num_rows)
        self._call(
            "k3_confidences",
            states.data_ptr(),
            width,
            None if embedded is None else embedded.data_ptr(),
            0 if embedded is None else embedded.shape[2],
            weight.data_ptr(),
            bias,
            temperatures.data_ptr(),
            count,
            num_rows,
            y.data_ptr(),
        )
        return y

    def _call(self, name: str, *arguments: Any) -> None:
        getattr(self._backend.library, name)(self._backend.context, *arguments)


def _row_stride(x: Tensor) -> int:
    assert x.dtype == torch.float32, f"float32 expected, got {x.dtype}"
    assert x.stride(1) == 1, f"rows with strides {x.stride()}"
    return x.stride(0)


def _lies_whole(rows: Tensor) -> bool:
    """Whether the heads of rows [N, heads, D] lie side by side."""
    return rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[2])


def draws_of(rows: SampleRows) -> Draws:
    """The parameters of rows as the library reads them; they must outlive the call."""
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.sample_index, rows.position)
    assert all(column.is_contiguous() for column in columns), "parameters of rows lie apart"
    return Draws(*(column.data_ptr() for column in columns))
