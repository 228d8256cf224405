"""Pools on the device. KDA and conv states lie in the wire layout; MLA rows are split into latent and k_rope.

The attention operator wants two contiguous caches, so the bytes of rows are packed on the way to the wire and split on
the way from it. All bytes pass through the host: a slice of `PoolBytes` is a copy, not a view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.ops.table import CacheSpec


@dataclass(frozen=True, kw_only=True)
class KdaPool:
    """Slots of one KDA layer."""

    index: int
    """Of the layer among the KDA layers."""
    state: Tensor
    """[slots + 1, HV, V, K], contiguous."""
    conv: Tensor
    """[slots + 1, W - 1, channels], oldest row first, contiguous."""


@dataclass(frozen=True, kw_only=True)
class MlaPool:
    """Pages of one MLA layer."""

    latent: Tensor
    """[pages + 1, page_size, R], contiguous."""
    rope: Tensor
    """[pages + 1, page_size, E], contiguous."""


class PoolBytes:
    """Bytes of rows that are spread over one or two tensors, in the wire layout. Slices read and write like memory.

    `parts` are [rows, width] tensors; a wire row is their rows side by side. A write may begin or end inside of a row.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = [part.view(torch.uint8) for part in parts]
        self._row_bytes = sum(part.shape[1] for part in self._parts)
        self.nbytes = self._parts[0].shape[0] * self._row_bytes

    def __getitem__(self, span: slice) -> memoryview:
        begin, end = self._bounds(span)
        first, last = self._rows(begin, end)
        return _host_bytes(self._read(first, last))[begin - first * self._row_bytes : end - first * self._row_bytes]

    def __setitem__(self, span: slice, data: memoryview | bytes) -> None:
        begin, end = self._bounds(span)
        if len(data) != end - begin:
            raise ValueError(f"{len(data)} bytes for {end - begin}")
        first, last = self._rows(begin, end)
        whole = self._read(first, last)
        _host_bytes(whole)[begin - first * self._row_bytes : end - first * self._row_bytes] = data
        columns = torch.split(whole.view(last - first, self._row_bytes), [part.shape[1] for part in self._parts], dim=1)
        for part, own in zip(self._parts, columns, strict=True):
            part[first:last].copy_(own)

    def __bytes__(self) -> bytes:
        return bytes(self[:])

    def _read(self, first: int, last: int) -> Tensor:
        """A copy of the bytes of rows on the host, uint8 [n]."""
        return torch.cat([part[first:last] for part in self._parts], dim=1).cpu().reshape(-1)

    def _rows(self, begin: int, end: int) -> tuple[int, int]:
        return begin // self._row_bytes, -(-end // self._row_bytes)

    def _bounds(self, span: slice) -> tuple[int, int]:
        begin, end, step = span.indices(self.nbytes)
        if step != 1:
            raise ValueError(f"a slice of bytes with step {step}")
        return begin, max(begin, end)


def _host_bytes(data: Tensor) -> memoryview:
    """Writable bytes of a uint8 tensor on the host."""
    array: Any = data.numpy()
    return memoryview(array)


class NpuCache:
    """`Cache` of the Ascend backend; `*_bytes` are PoolBytes."""

    staging = None

    def __init__(self, spec: CacheSpec, *, device: torch.device, activation_dtype: torch.dtype) -> None:
        """Raises BackendError when the convolution's states would have another dtype than its rows."""
        if spec.kv_dtype != activation_dtype:
            raise BackendError(
                f"cache: conv states and MLA rows are {spec.kv_dtype}; the Ascend kernels want the dtype of the "
                f"activations, {activation_dtype}"
            )
        self.spec = spec
        slots, pages = spec.num_slots + 1, spec.num_pages + 1
        state_shape = (slots, spec.kda_heads, spec.kda_value_dim, spec.kda_key_dim)
        conv_shape = (slots, spec.conv_width - 1, spec.conv_channels)
        layers = len(spec.kda_layers)
        self.states = torch.zeros(layers, *state_shape, dtype=spec.state_dtype, device=device)
        """[KDA layers, slots + 1, HV, V, K]: one tensor, so that one launch moves the states of all layers."""
        self.convs = torch.zeros(layers, *conv_shape, dtype=spec.kv_dtype, device=device)
        """[KDA layers, slots + 1, W - 1, channels]."""
        self._kda = {
            layer: KdaPool(index=index, state=self.states[index], conv=self.convs[index])
            for index, layer in enumerate(spec.kda_layers)
        }
        self._mla = {
            layer: MlaPool(
                latent=torch.zeros(pages, spec.page_size, spec.kv_lora_rank, dtype=spec.kv_dtype, device=device),
                rope=torch.zeros(pages, spec.page_size, spec.rope_dim, dtype=spec.kv_dtype, device=device),
            )
            for layer in spec.mla_layers
        }
        self._logits = torch.zeros(slots, spec.vocab_size, device=device)
        paged = [tensor for pool in self._mla.values() for tensor in (pool.latent, pool.rope)]
        self.nbytes = sum(tensor.nbytes for tensor in [*self._slot_pools(), *paged])

    def layer(self, index: int) -> KdaPool | MlaPool:
        """Pool of a layer by its 0-based model index."""
        return self._kda[index] if index in self._kda else self._mla[index]

    def clear_slot(self, slot: int) -> None:
        """`Cache.clear_slot`."""
        for pool in self._slot_pools():
            pool[slot].zero_()

    def copy_slot(self, source: int, target: int) -> None:
        """`Cache.copy_slot`."""
        for pool in self._slot_pools():
            pool[target].copy_(pool[source])

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """`Cache.copy_states`."""
        device = self.states.device
        track_states(
            self,
            torch.tensor(sources, dtype=torch.int64, device=device),
            torch.tensor(targets, dtype=torch.int64, device=device),
        )

    def copy_page(self, source: int, target: int) -> None:
        """`Cache.copy_page`."""
        for pool in self._mla.values():
            pool.latent[target].copy_(pool.latent[source])
            pool.rope[target].copy_(pool.rope[source])

    def logits(self, slots: Sequence[int]) -> Tensor:
        """`Cache.logits`."""
        return self._logits[list(slots)]

    def set_logits(self, slot: int, row: Tensor) -> None:
        """`Cache.set_logits`."""
        self._logits[slot].copy_(row)

    def state_bytes(self, layer: int, slot: int) -> PoolBytes:
        """Bytes of a KDA state [HV, V, K]."""
        return PoolBytes([self._kda[layer].state[self._checked_slot(slot)].flatten(0, 1)])

    def conv_bytes(self, layer: int, slot: int) -> PoolBytes:
        """Bytes of a conv state [W - 1, channels]."""
        return PoolBytes([self._kda[layer].conv[self._checked_slot(slot)]])

    def rows_bytes(self, layer: int, page: int, num_pages: int = 1) -> PoolBytes:
        """Bytes of the rows of consecutive pages, latent and k_rope side by side."""
        if not 0 <= page <= self.spec.num_pages + 1 - num_pages:
            raise IndexError(f"page {page} (of {num_pages}) of a pool of {self.spec.num_pages + 1}")
        pool = self._mla[layer]
        return PoolBytes([part[page : page + num_pages].flatten(0, 1) for part in (pool.latent, pool.rope)])

    def logits_bytes(self, slot: int) -> PoolBytes:
        """Bytes of a logits row [X]."""
        return PoolBytes([self._logits[self._checked_slot(slot)][None]])

    def is_finite(self, slot: int) -> bool:
        """`Cache.is_finite`."""
        return all(bool(torch.isfinite(pool[slot]).all()) for pool in self._slot_pools())

    def _checked_slot(self, slot: int) -> int:
        if not 0 <= slot <= self.spec.num_slots:
            raise IndexError(f"slot {slot} of a pool of {self.spec.num_slots + 1}")
        return slot

    def _slot_pools(self) -> list[Tensor]:
        pools = [tensor for pool in self._kda.values() for tensor in (pool.state, pool.conv)]
        return [*pools, self._logits]


def track_states(cache: NpuCache, sources: Tensor, targets: Tensor) -> None:
    """Copies the states of all layers from sources[b] to targets[b], int64 [B] slots on the device.

    Rows that are not tracked have a target of -1: they copy the dummy slot onto itself, so that shapes never depend on
    which rows are tracked and nothing waits for the host. The copy passes through B states of every layer.
    """
    is_tracked = targets >= 0
    sources = torch.where(is_tracked, sources, 0)
    targets = torch.where(is_tracked, targets, 0)
    for pool in (cache.states, cache.convs):
        pool.index_copy_(1, targets, pool.index_select(1, sources))
