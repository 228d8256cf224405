"""The context of drafts: keys and values of committed target tokens, a ring of rows for each request.

Everything a draft remembers of a request is here, and it is indexed by absolute position: a row written again replaces
the row of that position, so features of rows that are not committed after all need no rollback, only a smaller length.
"""

import torch
from torch import Tensor

from k3svc.model.draft_attention import DraftAttention
from k3svc.ops.draft_table import BlockMeta
from k3svc.ops.table import Ops


class ContextPool:
    """`num_slots` rings of `window + scratch_rows` cells for all layers, allocated once.

    window: newest context rows that a block sees. scratch_rows: rows past the committed length that may be written
    before it is known which of them stay; they never push a visible row out.
    """

    def __init__(
        self,
        layers: list[DraftAttention],
        *,
        num_slots: int,
        window: int,
        scratch_rows: int,
        ops: Ops,
    ) -> None:
        self._ops, dtype, device = ops, ops.activation_dtype, ops.device
        self.window, self.capacity = window, window + scratch_rows
        first = layers[0]
        shape = (len(layers), num_slots, self.capacity, first.key_heads)
        self.keys = torch.zeros(*shape, first.key_width, dtype=dtype, device=device)
        if first.values_in_keys:
            self.values = self.keys[..., : first.value_width]
        else:
            self.values = torch.zeros(*shape, first.value_width, dtype=dtype, device=device)
        self._stores_values = not first.values_in_keys

    @staticmethod
    def slot_bytes(layers: list[DraftAttention], *, capacity: int, dtype: torch.dtype) -> int:
        """Of a ring of `capacity` rows in all layers."""
        first = layers[0]
        width = first.key_width + (0 if first.values_in_keys else first.value_width)
        return len(layers) * capacity * first.key_heads * width * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes * self._stores_values

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows: slots and positions int64 [N], keys [N, KVH, D], values [N, KVH, V].

        Rows of a slot come in ascending positions; of two that share a cell the later one must be the newer, so a
        caller passes at most `capacity` rows of a slot at once.
        """
        self._ops.draft.write_context(keys, self.keys[layer], slots, positions)
        if self._stores_values:
            self._ops.draft.write_context(values, self.values[layer], slots, positions)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys [slots, capacity, KVH, D] and values [slots, capacity, KVH, V] of a layer."""
        return self.keys[index], self.values[index]

    def block_meta(self, slots: Tensor, base_lens: Tensor, starts: Tensor, num_rows: int) -> BlockMeta:
        """What blocks of `num_rows` rows at base_lens see: int64 [R], rows 0..base_len - 1 committed; starts int64 [R],
        the first of them that was written; slots int64 [R]. The cells are counted up to a power of two, so that few
        counts occur.
        """
        ends, firsts = base_lens.tolist(), starts.tolist()
        return BlockMeta(
            slots=slots,
            base_lens=base_lens,
            starts=starts,
            host_lengths=tuple(min(end - first, self.window) for end, first in zip(ends, firsts, strict=True)),
            window=self.window,
            capacity=self.capacity,
            num_cells=min(self.capacity, 1 << max(max(ends, default=1) - 1, 0).bit_length()),
            num_rows=num_rows,
        )
