"""Pools on the GPU, in the wire layout. Their bytes pass through host memory: a slice of `PoolBytes` is a copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.table import CacheSpec


@dataclass(frozen=True, kw_only=True)
class KdaPool:
    """Slots of one KDA layer."""

    state: Tensor
    """[slots + 1, HV, V, K], contiguous."""
    conv: Tensor
    """[slots + 1, W - 1, channels], oldest row first, contiguous."""


@dataclass(frozen=True, kw_only=True)
class MlaPool:
    """Pages of one MLA layer."""

    rows: Tensor
    """[pages + 1, page_size, C], contiguous."""
    rank: int
    """R: columns of the latent; the rest is k_rope."""


class PoolBytes:
    """Bytes of a contiguous tensor on the device. Slices read and write like memory, by way of pinned host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.view(-1).view(torch.uint8)
        self.nbytes = self._bytes.shape[0]

    def __getitem__(self, span: slice) -> memoryview:
        begin, end = self._bounds(span)
        host = _staging(end - begin, self._bytes.device)
        array: Any = host.copy_(self._bytes[begin:end]).numpy()
        return memoryview(array)

    def __setitem__(self, span: slice, data: memoryview | bytes) -> None:
        begin, end = self._bounds(span)
        if len(data) != end - begin:
            raise ValueError(f"{len(data)} bytes for {end - begin}")
        if end > begin:
            host = _staging(end - begin, self._bytes.device)
            array: Any = host.numpy()
            memoryview(array)[:] = data
            self._bytes[begin:end].copy_(host, non_blocking=True)

    def __bytes__(self) -> bytes:
        return bytes(self[:])

    def _bounds(self, span: slice) -> tuple[int, int]:
        begin, end, step = span.indices(self.nbytes)
        if step != 1:
            raise ValueError(f"a slice of bytes with step {step}")
        return begin, max(begin, end)


def _staging(size: int, device: torch.device) -> Tensor:
    """Host memory that the copy engines reach by themselves. torch keeps what is freed for the next of its size, once
    the copies that use it have ended."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class CudaCache:
    """`Cache` of the cuda backend; `*_bytes` are PoolBytes."""

    def __init__(self, spec: CacheSpec, device: torch.device) -> None:
        self.spec = spec
        slots, pages = spec.num_slots + 1, spec.num_pages + 1
        state_shape = (slots, spec.kda_heads, spec.kda_value_dim, spec.kda_key_dim)
        conv_shape = (slots, spec.conv_width - 1, spec.conv_channels)
        rows_shape = (pages, spec.page_size, spec.kv_lora_rank + spec.rope_dim)
        self._kda = {
            layer: KdaPool(
                state=torch.zeros(state_shape, dtype=spec.state_dtype, device=device),
                conv=torch.zeros(conv_shape, dtype=spec.kv_dtype, device=device),
            )
            for layer in spec.kda_layers
        }
        self._mla = {
            layer: MlaPool(
                rows=torch.zeros(rows_shape, dtype=spec.kv_dtype, device=device),
                rank=spec.kv_lora_rank,
            )
            for layer in spec.mla_layers
        }
        self._logits = torch.zeros(slots, spec.vocab_size, device=device)
        rows = [pool.rows for pool in self._mla.values()]
        self.nbytes = sum(tensor.nbytes for tensor in [*self._slot_pools(), *rows])

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
        for source, target in zip(sources, targets, strict=True):
            if target >= 0:
                for pool in self._kda.values():
                    pool.state[target].copy_(pool.state[source])
                    pool.conv[target].copy_(pool.conv[source])

    def copy_page(self, source: int, target: int) -> None:
        """`Cache.copy_page`."""
        for pool in self._mla.values():
            pool.rows[target].copy_(pool.rows[source])

    def logits(self, slots: Sequence[int]) -> Tensor:
        """`Cache.logits`."""
        return self._logits[list(slots)]

    def set_logits(self, slot: int, row: Tensor) -> None:
        """`Cache.set_logits`."""
        self._logits[slot].copy_(row)

    def state_bytes(self, layer: int, slot: int) -> PoolBytes:
        """Bytes of a KDA state [HV, V, K]."""
        return PoolBytes(self._kda[layer].state[self._checked_slot(slot)])

    def conv_bytes(self, layer: int, slot: int) -> PoolBytes:
        """Bytes of a conv state [W - 1, channels]."""
        return PoolBytes(self._kda[layer].conv[self._checked_slot(slot)])

    def rows_bytes(self, layer: int, page: int, num_pages: int = 1) -> PoolBytes:
        """Bytes of the rows of consecutive pages."""
        if not 0 <= page <= self.spec.num_pages + 1 - num_pages:
            raise IndexError(f"page {page} (of {num_pages}) of a pool of {self.spec.num_pages + 1}")
        return PoolBytes(self._mla[layer].rows[page : page + num_pages])

    def logits_bytes(self, slot: int) -> PoolBytes:
        """Bytes of a logits row [X]."""
        return PoolBytes(self._logits[self._checked_slot(slot)])

    def is_finite(self, slot: int) -> bool:
        """`Cache.is_finite`; waits for the device once."""
        return bool(torch.stack([torch.isfinite(pool[slot]).all() for pool in self._slot_pools()]).all())

    def _checked_slot(self, slot: int) -> int:
        if not 0 <= slot <= self.spec.num_slots:
            raise IndexError(f"slot {slot} of a pool of {self.spec.num_slots + 1}")
        return slot

    def _slot_pools(self) -> list[Tensor]:
        pools = [tensor for pool in self._kda.values() for tensor in (pool.state, pool.conv)]
        return [*pools, self._logits]
