"""Snapshots of states for the prefix cache: copied from slot to slot in all layers, one launch a pool, no host sync."""

import random

import pytest
import torch
from torch import Tensor

from k3svc.ops.npu.cache import NpuCache, track_states
from k3svc.ops.npu_emulated.device import on_device
from k3svc.ops.table import CacheSpec
from tests.npu.bench import capturing, emulated, reference, small_spec

LAYERS = (0, 2, 3)


def spec_of_many_layers() -> CacheSpec:
    return small_spec(kda_layers=LAYERS)


def filled(seed: int) -> NpuCache:
    """States that differ in every slot and layer, NaN in the dummy slot, as an undefined one may have."""
    cache = emulated().new_cache(spec_of_many_layers())
    assert isinstance(cache, NpuCache)
    generator = torch.Generator().manual_seed(seed)
    for pool in (cache.states, cache.convs):
        pool.copy_(torch.randn(pool.shape, generator=generator))
        pool[:, 0] = torch.nan
    return cache


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("seed", range(4))
def test_tracked_rows_are_copied_and_nothing_else_changes(seed: int):
    """The last slot beside rows that are not tracked is where an index of -1 would read and write."""
    draw = random.Random(seed)
    cache = filled(seed)
    before = [cache.states.clone(), cache.convs.clone()]
    slots = draw.sample(range(1, 7), 6)
    sources, targets = slots[:3], slots[3:]
    untracked = draw.randrange(3)
    pairs = [(s, -1 if i == untracked else t) for i, (s, t) in enumerate(zip(sources, targets, strict=True))]
    cache.copy_states([s for s, _ in pairs], [t for _, t in pairs])
    copied = {t: s for s, t in pairs if t >= 0}
    assert len(copied) == 2
    for pool, old in zip((cache.states, cache.convs), before, strict=True):
        for slot in range(1, 7):
            assert same(pool[:, slot], old[:, copied.get(slot, slot)]), slot
        assert same(pool[:, 0], old[:, 0])


def test_rows_that_are_all_untracked_change_nothing():
    cache = filled(9)
    before = [cache.states.clone(), cache.convs.clone()]
    cache.copy_states([6, 1, -1], [-1, -1, -1])
    assert all(same(pool, old) for pool, old in zip((cache.states, cache.convs), before, strict=True))


def test_copies_are_those_of_the_reference():
    own, oracle = filled(3), reference().new_cache(spec_of_many_layers())
    for layer in LAYERS:
        for slot in range(7):
            oracle.state_bytes(layer, slot)[:] = bytes(own.state_bytes(layer, slot)[:])
            oracle.conv_bytes(layer, slot)[:] = bytes(own.conv_bytes(layer, slot)[:])
    for cache in (own, oracle):
        cache.copy_states([2, 5, 3], [6, -1, 1])
    for layer in LAYERS:
        for slot in range(7):
            assert bytes(own.state_bytes(layer, slot)[:]) == bytes(oracle.state_bytes(layer, slot)[:])
            assert bytes(own.conv_bytes(layer, slot)[:]) == bytes(oracle.conv_bytes(layer, slot)[:])


def test_tracking_never_syncs_with_the_host():
    ops = emulated()
    cache = ops.new_cache(spec_of_many_layers())
    assert isinstance(cache, NpuCache)
    sources, targets = torch.tensor([1, 2, 6]), torch.tensor([4, -1, -1])
    with capturing(ops), on_device(ops.session):
        track_states(cache, sources, targets)
