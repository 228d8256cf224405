"""Pools that fill what the device has free."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3svc.config import Config, load_config
from k3svc.engine.build import POOL_SHARE, fitting_pages, load_model, most_proposals
from k3svc.engine.draft_build import build_draft, fitting_requests
from k3svc.errors import ConfigError
from k3svc.model.draft_context import ContextPool
from k3svc.ops import load
from k3svc.ops.npu.steps import Scratch
from k3svc.ops.table import CacheSpec

MODELS = Path("models")
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
    with pytest.raises(ConfigError, match=r"3 slots take \d+ each, .* and 0 pages are left.* needs 10"):
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


def test_a_verify_step_has_its_memory_beside_the_pools():
    """3 KDA layers, 2 heads of 8 x 4 in float32, windows of 3 rows and the step's of 2 * (8 + 8 + 4) channels."""
    states, windows = 3 * 5 * 4 * (2 * 8 * 4 * 4), 3 * 5 * (3 + 4) * 40 * 4
    assert SPEC.verify_bytes(5, 4) == states + windows
    free = 1_000_000
    without = fitting_pages(SPEC, free, 16)
    kept = 7 * SPEC.page_bytes
    assert fitting_pages(SPEC, free, 16, reserved=kept) == without - 7
    with pytest.raises(ConfigError, match=r"a verify step keeps \(decode\.max_batch, drafts\) 900000, and 0 pages"):
        fitting_pages(SPEC, free, 16, reserved=900_000)


def test_a_verify_step_keeps_what_was_counted():
    """Beside its sequences one of padding; where steps are captured as many as a power of two, and rows likewise."""
    assert load("reference", dtype="float32", threads=1).verify_bytes(SPEC, 4, 4) == 0
    scratch = Scratch(SPEC, 5, 4, torch.device("cpu"))
    kept = scratch.snapshots.nbytes + scratch.windows.nbytes
    assert SPEC.verify_bytes(5, 4) == kept
    eager, captured = (
        load(f"npu-emulated:fp32,shape-relaxed,graphs={mode}", dtype="float32", threads=1) for mode in ("off", "on")
    )
    assert eager.verify_bytes(SPEC, 4, 4) == kept
    assert eager.verify_bytes(SPEC, 4, 0) == captured.verify_bytes(SPEC, 4, 0) == 0
    assert captured.verify_bytes(SPEC, 4, 3) == SPEC.verify_bytes(8, 4)
    # 60 sequences of 5 rows are past the ladder, and run eagerly.
    assert captured.verify_bytes(SPEC, 60, 5) == SPEC.verify_bytes(64, 8) + SPEC.verify_bytes(61, 5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), 0),
        (("speculation.drafter=ngram", "speculation.ngram_proposals=3"), 3),
        (("draft.endpoint=127.0.0.1:1", "draft.path=models/k3-nano-dspark", "speculation.ngram_proposals=0"), None),
        (("draft.endpoint=127.0.0.1:1", "draft.path=models/k3-nano-dspark", "speculation.ngram_proposals=60"), 60),
        (("draft.endpoint=127.0.0.1:1", "draft.path=models/k3-nano-dspark", "speculation.drafter=none"), 0),
    ],
)
def test_the_widest_verify_step_is_that_of_who_drafts(settings: tuple[str, ...], expected: int | None):
    block = json.loads((MODELS / "k3-nano-dspark" / "config.json").read_text())["block_size"]
    assert most_proposals(load_config(None, settings)) == (block if expected is None else expected)


def test_contexts_of_drafts_fill_what_prompts_leave():
    assert fitting_requests(1000, 100_000, 10) == 79
    assert fitting_requests(1000, 13_400, 10) == 1
    with pytest.raises(ConfigError, match=r"takes 1000, and draft\.max_tickets = 10 leaves none"):
        fitting_requests(1000, 13_300, 10)
    with pytest.raises(ConfigError, match=r"draft\.max_requests: got 0"):
        fitting_requests(1000, None, 10)


@pytest.mark.parametrize(("in_keys", "width"), [(False, 12 + 10), (True, 12)])
def test_bytes_of_contexts_are_those_of_the_pool(in_keys: bool, width: int):
    """2 layers, 3 heads, rings of 6 + 5 rows, keys of 12 and values of 10 numbers, which may be part of the keys."""
    layer: Any = SimpleNamespace(key_heads=3, key_width=12, value_width=10, values_in_keys=in_keys)
    ops = load("reference", dtype="bfloat16", threads=1)
    pool = ContextPool([layer, layer], num_slots=7, window=6, scratch_rows=5, ops=ops)
    slot = ContextPool.slot_bytes([layer, layer], capacity=11, dtype=torch.bfloat16)
    assert slot == 2 * 11 * 3 * width * 2
    assert pool.nbytes == 7 * slot


@pytest.mark.parametrize("draft", ["dspark", "dflash"])
def test_a_draft_role_takes_what_the_device_has(draft: str):
    tree = json.loads((MODELS / f"k3-nano-{draft}" / "config.json").read_text())
    settings = ["model.device=npu-emulated:fp32,shape-relaxed", f"draft.path=models/k3-nano-{draft}"]
    role = build_draft(
        load_config(None, [*settings, "draft.max_requests=0", "draft.max_tickets=3", "draft.window=256"]),
        lambda _stage, _share: None,
    )
    role.runner.close()
    proposals = tree["block_size"] - (0 if tree.get("sample_from_anchor", draft == "dspark") else 1)
    window = min(tree.get("sliding_window") or 256, 256)
    width = 2 * tree["num_key_value_heads"] * tree.get("head_dim", tree["hidden_size"] // tree["num_attention_heads"])
    slot = tree["num_hidden_layers"] * (window + proposals + 1) * width * 4
    expected = int(0.9 * (256 << 20)) // slot
    assert role.engine.max_requests == expected - 3 - 1
    assert role.pool_bytes == expected * slot
