"""Pools on the GPU, in the wire layout. Their bytes pass through host memory (`staging`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3svc.ops.cuda.staging import PoolBytes, Staging, cuda_staging
from k3svc.ops.table import CacheSpec
from k3svc.ops.upload import to_host


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
        self._states = {layer: _flat(pool.state) for layer, pool in self._kda.items()}
        self._convs = {layer: _flat(pool.conv) for layer, pool in self._kda.items()}
        self._rows = {layer: _flat(pool.rows) for layer, pool in self._mla.items()}
        self._logit_rows = _flat(self._logits)
        pools = [*self._states.values(), *self._convs.values(), *self._rows.values(), self._logit_rows]
        self.nbytes = sum(pool.nbytes for pool in pools)
        self.staging: Staging | None = cuda_staging(device) if device.type == "cuda" else None

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
        return _part(self._states[layer], slot, self.spec.num_slots + 1)

    def conv_bytes(self, layer: int, slot: int) -> PoolBytes:
        """Bytes of a conv state [W - 1, channels]."""
        return _part(self._convs[layer], slot, self.spec.num_slots + 1)

    def rows_bytes(self, layer: int, page: int, num_pages: int = 1) -> PoolBytes:
        """Bytes of the rows of consecutive pages."""
        return _part(self._rows[layer], page, self.spec.num_pages + 1, num_pages)

    def logits_bytes(self, slot: int) -> PoolBytes:
        """Bytes of a logits row [X]."""
        return _part(self._logit_rows, slot, self.spec.num_slots + 1)

    def is_finite(self, slot: int) -> bool:
        """`Cache.is_finite`; waits for the device once."""
        return bool(to_host(torch.stack([torch.isfinite(pool[slot]).all() for pool in self._slot_pools()]).all())[0])

    def _slot_pools(self) -> list[Tensor]:
        pools = [tensor for pool in self._kda.values() for tensor in (pool.state, pool.conv)]
        return [*pools, self._logits]


def _flat(pool: Tensor) -> Tensor:
    return pool.view(-1).view(torch.uint8)


def _part(pool: Tensor, index: int, num_parts: int, count: int = 1) -> PoolBytes:
    """`count` of num_parts equal parts of a pool's bytes, from part `index`."""
    if not 0 <= index <= num_parts - count:
        raise IndexError(f"part {index} (of {count}) of a pool of {num_parts}")
    size = pool.nbytes // num_parts
    return PoolBytes(pool, index * size, count * size)
