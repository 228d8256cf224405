"""Pools that fill what the device has free."""

from dataclasses import replace

import pytest
import torch

from k3svc.config import Config, load_config
from k3svc.engine.build import POOL_SHARE, fitting_pages, load_model
from k3svc.errors import ConfigError
from k3svc.ops import load
from k3svc.ops.table import CacheSpec

SPEC = CacheSpec(
    kda_layers=(0, 1, 3),
    mla_layers=(2,),
    kda_heads=2,
    kda_key_dim=8,
    kda_value_dim=4,
    conv_width=4,
    kv_lora_rank=16,
    rope_dim=8,
    vocab_size=50,
    num_slots=3,
    num_pages=7,
    page_size=16,
    state_dtype=torch.float32,
    kv_dtype=torch.float32,
)


@pytest.mark.parametrize("device", ["reference", "npu-emulated:fp32,shape-relaxed"])
def test_bytes_of_slots_and_pages_are_those_of_the_pools(device: str):
    cache = load(device, dtype="float32", threads=1).new_cache(SPEC)
    assert cache.nbytes == 4 * SPEC.slot_bytes + 8 * SPEC.page_bytes


def test_pages_fill_what_slots_leave():
    slots = 4 * SPEC.slot_bytes
    for pages in (10, 11):  # 9 hold the context of 144 tokens
        free = -(-(slots + (pages + 1) * SPEC.page_bytes) * 10 // 9)
        assert int(free * POOL_SHARE) >= slots + (pages + 1) * SPEC.page_bytes
        assert fitting_pages(SPEC, free, 144) == pages
        assert fitting_pages(SPEC, free - 9, 144) in (pages - 1, pages)


def test_less_than_one_context_is_refused():
    with pytest.raises(ConfigError, match=r"3 slots take \d+ each, and 0 pages are left.* needs 10"):
        fitting_pages(SPEC, 1000, 160)


def test_a_backend_in_host_memory_wants_a_number():
    with pytest.raises(ConfigError, match=r"cache\.num_pages: got 0"):
        fitting_pages(SPEC, load("reference", dtype="float32", threads=1).free_memory(), 16)


def test_a_role_takes_what_the_device_has():
    config: Config = load_config(
        None, ["model.device=npu-emulated:fp32,shape-relaxed", "cache.num_pages=0", "cache.max_context_tokens=512"]
    )
    config = replace(config, cache=replace(config.cache, num_slots=2))
    loaded = load_model(config, lambda _stage, _share: None)
    spec = loaded.cache.spec
    loaded.runner.close()
    assert spec.num_pages > 8
    assert loaded.cache.nbytes <= 0.9 * (256 << 20) < loaded.cache.nbytes + 2 * spec.page_bytes
