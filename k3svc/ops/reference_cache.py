"""Pools of the reference backend: one tensor a layer and kind, in the wire layout, so that views are the wire bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3svc.ops.table import CacheSpec


@dataclass(frozen=True, kw_only=True)
class KdaPool:
    """Slots of one KDA layer."""

    state: Tensor
    """[slots + 1, HV, V, K]."""
    conv: Tensor
    """[slots + 1, W - 1, channels], oldest row first."""


@dataclass(frozen=True, kw_only=True)
class MlaPool:
    """Pages of one MLA layer."""

    rows: Tensor
    """[pages + 1, page_size, C]."""
    rank: int
    """R: columns of the latent; the rest is k_rope."""


class ReferenceCache:
    """`Cache` of the reference backend."""

    staging = None

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        slots, pages = spec.num_slots + 1, spec.num_pages + 1
        state_shape = (slots, spec.kda_heads, spec.kda_value_dim, spec.kda_key_dim)
        conv_shape = (slots, spec.conv_width - 1, spec.conv_channels)
        rows_shape = (pages, spec.page_size, spec.kv_lora_rank + spec.rope_dim)
        self._kda = {
            layer: KdaPool(
                state=torch.zeros(state_shape, dtype=spec.state_dtype),
                conv=torch.zeros(conv_shape, dtype=spec.kv_dtype),
            )
            for layer in spec.kda_layers
        }
        self._mla = {
            layer: MlaPool(rows=torch.zeros(rows_shape, dtype=spec.kv_dtype), rank=spec.kv_lora_rank)
            for layer in spec.mla_layers
        }
        self._logits = torch.zeros(slots, spec.vocab_size)
        self._states = {layer: _bytes(pool.state) for layer, pool in self._kda.items()}
        self._convs = {layer: _bytes(pool.conv) for layer, pool in self._kda.items()}
        self._rows = {layer: _bytes(pool.rows) for layer, pool in self._mla.items()}
        self._logit_rows = _bytes(self._logits)
        views = [*self._states.values(), *self._convs.values(), *self._rows.values(), self._logit_rows]
        self.nbytes = sum(view.nbytes for view in views)

    def layer(self, index: int) -> KdaPool | MlaPool:
        """Pool of a layer by its 0-based model index."""
        return self._kda[index] if index in self._kda else self._mla[index]

    def clear_slot(self, slot: int) -> None:
        """Zeroes state, conv state and logits row."""
        for pool in self._slot_pools():
            pool[slot].zero_()

    def copy_slot(self, source: int, target: int) -> None:
        """Copies state, conv state and logits row."""
        for pool in self._slot_pools():
            pool[target].copy_(pool[source])

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """`Cache.copy_states`."""
        for source, target in zip(sources, targets, strict=True):
            if target >= 0:
                for pool in self._kda.values():
                    pool.state[target].copy_(pool.state[source])
                    pool.conv[target].copy_(pool.conv[source])

    def copy_page(self, source: int, target: int) -> None:
        """Copies the rows of one page in all layers."""
        for pool in self._mla.values():
            pool.rows[target].copy_(pool.rows[source])

    def logits(self, slots: Sequence[int]) -> Tensor:
        """Copy of logits rows, float32 [len(slots), X]."""
        return self._logits[list(slots)]

    def set_logits(self, slot: int, row: Tensor) -> None:
        """Stores a logits row [X]."""
        self._logits[slot].copy_(row)

    def state_bytes(self, layer: int, slot: int) -> memoryview:
        """Writable bytes of a KDA state [HV, V, K]."""
        return _part(self._states[layer], slot, self.spec.num_slots + 1)

    def conv_bytes(self, layer: int, slot: int) -> memoryview:
        """Writable bytes of a conv state [W - 1, channels]."""
        return _part(self._convs[layer], slot, self.spec.num_slots + 1)

    def rows_bytes(self, layer: int, page: int, num_pages: int = 1) -> memoryview:
        """Writable bytes of the rows of consecutive pages."""
        return _part(self._rows[layer], page, self.spec.num_pages + 1, num_pages)

    def logits_bytes(self, slot: int) -> memoryview:
        """Writable bytes of a logits row [X]."""
        return _part(self._logit_rows, slot, self.spec.num_slots + 1)

    def is_finite(self, slot: int) -> bool:
        """Whether state, conv state and logits row hold finite numbers only."""
        return all(bool(torch.isfinite(pool[slot]).all()) for pool in self._slot_pools())

    def _slot_pools(self) -> list[Tensor]:
        pools = [tensor for pool in self._kda.values() for tensor in (pool.state, pool.conv)]
        return [*pools, self._logits]


def _bytes(pool: Tensor) -> memoryview:
    """Flat writable bytes of a pool's own memory."""
    array: npt.NDArray[np.uint8] = pool.view(-1).view(torch.uint8).numpy()
    return array.data


def _part(view: memoryview, index: int, num_parts: int, count: int = 1) -> memoryview:
    """`count` of num_parts equal parts of a view, from part `index`."""
    if not 0 <= index <= num_parts - count:
        raise IndexError(f"part {index} (of {count}) of a pool of {num_parts}")
    size = view.nbytes // num_parts
    return view[index * size : (index + count) * size]
