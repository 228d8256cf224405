"""What the tests of the cpu backend share: the backend on every path, poisoned memory, and steps over random caches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.ops.cpu.backend import ISAS, Cpu
from k3svc.ops.cpu.build import BuildError, find_compiler
from k3svc.ops.reference import Reference
from k3svc.ops.table import Cache, CacheSpec, StepMeta
from tests.oracles.loop import Tracked, step_meta

PAGE = 16


def has_compiler() -> bool:
    try:
        find_compiler()
    except BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="the cpu backend needs a C++ compiler")


def reference() -> Reference:
    return Reference(torch.float32, threads=1)


def paths() -> list[str]:
    """Instruction sets of this machine, the fastest first."""
    best = Cpu().isa
    return list(ISAS[ISAS.index(best) :])


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty hands out NaN, large negative integers, or the byte 85, so that what no kernel writes shows."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        out = empty(*args, **kwargs)
        if out.dtype == torch.uint8:
            return out.fill_(85)
        return out.fill_(torch.nan if out.dtype.is_floating_point else -(2**60))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield


def rand(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


def expert(generator: torch.Generator, inner: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """w1, w3 and w2."""
    return rand(generator, inner, width), rand(generator, inner, width), rand(generator, width, inner)


def cache_spec(**changes: Any) -> CacheSpec:
    fields: dict[str, Any] = {
        "kda_layers": (0,),
        "mla_layers": (1,),
        "kda_heads": 2,
        "kda_key_dim": 24,
        "kda_value_dim": 40,
        "conv_width": 4,
        "kv_lora_rank": 24,
        "rope_dim": 8,
        "vocab_size": 8,
        "num_slots": 70,
        "num_pages": 80,
        "page_size": PAGE,
        "state_dtype": torch.float32,
        "kv_dtype": torch.float32,
    }
    return CacheSpec(**(fields | changes))


def sequences(lengths: Sequence[int], cached: Sequence[int]) -> list[Tracked]:
    """Sequences with `cached` tokens behind them and room for `lengths` more; slots and pages in descending order."""
    out: list[Tracked] = []
    page = 1
    for index, (length, start) in enumerate(zip(lengths, cached, strict=True)):
        count = -(-(start + length) // PAGE)
        out.append(Tracked(slot=len(lengths) - index, pages=list(range(page, page + count))[::-1], length=start))
        page += count
    return out


def meta_of(rows: Sequence[Tracked], lengths: Sequence[int], padding: int = 0) -> StepMeta:
    """Meta of a step of these sequences, with rows of padding at its end."""
    return step_meta(list(zip(rows, lengths, strict=True)), PAGE, sum(lengths) + padding)


def pool_of(cache: Cache, layer: int) -> Any:
    """Pools of a layer, whose tensors both backends name alike."""
    return cache.layer(layer)


def fill_rows(cache: Cache, layer: int, rows: Sequence[Tracked], generator: torch.Generator) -> None:
    """Random cache rows for the tokens behind each sequence; all other memory stays as it is."""
    pool = pool_of(cache, layer).rows
    for row in rows:
        for position in range(row.length):
            pool[row.pages[position // PAGE], position % PAGE] = rand(generator, pool.shape[-1])
