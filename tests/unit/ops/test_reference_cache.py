"""Pools of the reference backend: layouts, views of their own memory, copies, checks."""

import struct
from collections.abc import Callable

import pytest
import torch

from k3svc.ops import load
from k3svc.ops.cuda.cache import CudaCache
from k3svc.ops.reference_cache import ReferenceCache
from k3svc.ops.table import Cache, CacheSpec

SPEC = CacheSpec(
    kda_layers=(0, 2),
    mla_layers=(1,),
    kda_heads=2,
    kda_key_dim=3,
    kda_value_dim=5,
    conv_width=4,
    kv_lora_rank=6,
    rope_dim=2,
    vocab_size=7,
    num_slots=3,
    num_pages=4,
    page_size=16,
    state_dtype=torch.float32,
    kv_dtype=torch.bfloat16,
)


@pytest.fixture
def cache() -> Cache:
    return load("reference", dtype="float32", threads=1).new_cache(SPEC)


def test_shapes_and_sizes(cache: Cache) -> None:
    assert cache.layer(2).state.shape == (4, 2, 5, 3)
    assert cache.layer(2).conv.shape == (4, 3, 2 * (3 + 3 + 5))
    assert cache.layer(1).rows.shape == (5, 16, 8)
    assert cache.state_bytes(0, 3).nbytes == 2 * 5 * 3 * 4
    assert cache.conv_bytes(0, 3).nbytes == 3 * 22 * 2
    assert cache.rows_bytes(1, 1, 4).nbytes == 4 * 16 * 8 * 2
    assert cache.logits_bytes(1).nbytes == 7 * 4
    assert cache.nbytes == 2 * 4 * (120 + 132) + 5 * 256 + 4 * 28


def test_bytes_are_the_pool_itself(cache: Cache) -> None:
    cache.state_bytes(0, 2)[4 * (1 * 15 + 4 * 3 + 2) :][:4] = struct.pack("<f", 1.5)
    assert cache.layer(0).state[2].nonzero().tolist() == [[1, 4, 2]]
    assert float(cache.layer(0).state[2, 1, 4, 2]) == 1.5
    cache.layer(2).conv[1, 2, 21] = -2.0
    assert bytes(cache.conv_bytes(2, 1)[-2:]) == b"\x00\xc0"
    cache.rows_bytes(1, 2, 2)[-2:] = b"\x80\x3f"
    assert float(cache.layer(1).rows[3, 15, 7]) == 1.0
    cache.set_logits(3, torch.arange(7.0))
    assert bytes(cache.logits_bytes(3)[:]) == struct.pack("<7f", *range(7))
    assert cache.logits([3, 0]).tolist() == [list(range(7)), [0.0] * 7]


def test_logits_are_a_copy(cache: Cache) -> None:
    cache.logits([1])[0] += 1
    assert not cache.logits([1]).any()


def test_views_outside_the_pool_are_refused(cache: Cache) -> None:
    with pytest.raises(IndexError, match=r"part 4 .* of a pool of 4"):
        cache.state_bytes(0, 4)
    with pytest.raises(IndexError, match="part -1"):
        cache.logits_bytes(-1)
    with pytest.raises(IndexError, match=r"of 2.* of a pool of 5"):
        cache.rows_bytes(1, 4, 2)


def test_copy_and_clear(cache: Cache) -> None:
    for layer in SPEC.kda_layers:
        cache.layer(layer).state[1] = layer + 1
        cache.layer(layer).conv[1] = layer + 2
    cache.layer(1).rows[4] = 3
    cache.set_logits(1, torch.ones(7))
    cache.copy_slot(1, 3)
    cache.copy_page(4, 2)
    assert bytes(cache.rows_bytes(1, 2)[:]) == bytes(cache.rows_bytes(1, 4)[:])
    assert not cache.layer(1).rows[[0, 1, 3]].any()
    cache.clear_slot(1)
    for layer in SPEC.kda_layers:
        assert cache.layer(layer).state.flatten(1).amax(1).tolist() == [0, 0, 0, layer + 1]
        assert cache.layer(layer).conv.flatten(1).amax(1).tolist() == [0, 0, 0, layer + 2]
    assert cache.logits([1, 3]).sum(1).tolist() == [0, 7]


@pytest.mark.parametrize("make", [ReferenceCache, lambda spec: CudaCache(spec, torch.device("cpu"))])
def test_states_are_copied_in_all_layers_and_nothing_else(make: Callable[[CacheSpec], Cache]) -> None:
    cache = make(SPEC)
    for layer in SPEC.kda_layers:
        for slot in range(4):
            for view in (cache.state_bytes(layer, slot), cache.conv_bytes(layer, slot)):
                view[:] = bytes([16 * layer + slot + 1]) * view.nbytes
    cache.set_logits(1, torch.ones(7))
    cache.copy_states([1, 2], [3, -1])
    for layer in SPEC.kda_layers:
        for bytes_of in (cache.state_bytes, cache.conv_bytes):
            values = [bytes(bytes_of(layer, slot)[:]) for slot in range(4)]
            assert [set(value) for value in values] == [{16 * layer + slot + 1} for slot in (0, 1, 2, 1)]
    assert cache.logits([1, 3]).sum(1).tolist() == [7, 0]


@pytest.mark.parametrize("kind", ["state", "conv", "logits"])
def test_one_value_that_is_not_finite_is_found(cache: Cache, kind: str) -> None:
    assert cache.is_finite(2)
    if kind == "logits":
        cache.set_logits(2, torch.tensor([0.0] * 6 + [torch.inf]))
    else:
        getattr(cache.layer(2), kind)[2].view(-1)[-1] = torch.nan
    assert not cache.is_finite(2)
    assert cache.is_finite(1)
