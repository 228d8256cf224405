"""Verification of drafts on the emulated device: decode row by row, and states that follow what was accepted."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.ops.npu.cache import NpuCache
from k3svc.ops.npu.steps import VerifyStep, prepare_verify
from k3svc.ops.npu_emulated.backend import NpuEmulated
from k3svc.ops.table import StepMeta
from tests.npu.bench import (
    CONTRACT,
    RawCalls,
    capturing,
    emulated,
    fill,
    random_gate,
    real_spec,
    reference,
    small_spec,
    steps,
)

LAST = 6
TIGHT: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}
Rows = list[tuple[int, int, int]]
MIXED: Rows = [(2, 70, 3), (LAST, 5, 1), (-1, 0, 2), (4, 0, 5), (1, 31, 2)]


class Layers:
    """A KDA and an MLA layer of one backend, with pools and inputs that depend on a seed alone."""

    def __init__(self, ops: Any, seed: int = 0, *, bound: float | None = -5.0, **changes: Any) -> None:
        self.ops = ops
        self.spec = small_spec(**changes)
        self.random = torch.Generator().manual_seed(seed)
        self.cache = ops.new_cache(self.spec)
        self.kda, self.mla = self.cache.layer(0), self.cache.layer(1)
        for pool, shape in ((self.kda.state, self.kda.state.shape), (self.kda.conv, self.kda.conv.shape)):
            pool.copy_(torch.randn(shape, generator=self.random) * 0.5)
        rows = torch.randn(self.spec.num_pages + 1, self.spec.page_size, 48, generator=self.random)
        if isinstance(self.cache, NpuCache):
            self.mla.latent.copy_(rows[..., :32])
            self.mla.rope.copy_(rows[..., 32:])
        else:
            self.mla.rows.copy_(rows)
        self.gate = random_gate(self.spec, self.random, lower_bound=bound)
        self.taps = self.draw(self.spec.conv_channels, 4)
        self.w_kc, self.w_vc = self.draw(3, 32, 32) * 0.2, self.draw(3, 16, 32) * 0.2

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def inputs(self, count: int) -> list[Tensor]:
        """u, f, b, q and cache rows of `count` rows."""
        spec = self.spec
        widths = (spec.conv_channels, spec.kda_heads * spec.kda_key_dim, spec.kda_heads, 3 * 48, 48)
        return [self.draw(count, width) for width in widths]

    def run(self, meta: StepMeta, mode: Any, given: list[Tensor]) -> tuple[Tensor, Any]:
        """Both layers' outputs side by side, and the step."""
        ops, (u, f, b, q, rows) = self.ops, given
        step = ops.prepare(meta, mode, self.spec)
        kinds = {"conv": "kda_conv", "kda": "kda", "mla": "mla"}
        conv, kda, mla = (getattr(ops, f"{kind}_{mode}") for kind in kinds.values())
        qkv = conv(u, self.taps, self.kda, step)
        o = kda(qkv, f, b, self.gate, self.kda, step)
        ops.mla_write(rows, self.mla, step)
        attended = mla(q.view(-1, 3, 48), self.w_kc, self.w_vc, self.mla, step, 0.3)
        return torch.cat([qkv, o.flatten(1), attended], dim=1), step

    def states(self) -> list[Tensor]:
        """Copies of the live slots' states."""
        return [self.kda.state[1:].clone(), self.kda.conv[1:].clone()]


def live_rows(rows: Rows) -> list[int]:
    bounds = [0]
    for _, _, count in rows:
        bounds.append(bounds[-1] + count)
    return [row for b, (slot, _, _) in enumerate(rows) for row in range(bounds[b], bounds[b + 1]) if slot >= 0]


def decoded(layers: Layers, rows: Rows, given: list[Tensor], counts: list[int]) -> list[Tensor]:
    """The first counts[b] rows of each sequence through decode steps of that sequence alone."""
    pages = steps(rows).block_tables
    out, begin = [], 0
    for b, (slot, start, length) in enumerate(rows):
        for place in range(counts[b] if slot >= 0 else 0):
            position = start + place
            page = int(pages[b, position // layers.spec.page_size])
            meta = steps([(slot, position, 1)])
            meta.block_tables.copy_(pages[b, : meta.block_tables.shape[1]])
            meta.slot_mapping.fill_(page * layers.spec.page_size + position % layers.spec.page_size)
            row = begin + place
            out.append(layers.run(meta, "decode", [x[row : row + 1] for x in given])[0])
        begin += length
    return out


def ragged(seed: int) -> tuple[Rows, list[int], int]:
    """Sequences with an anchor and up to 7 drafts, what is accepted of each, and rows of the step."""
    draw = random.Random(seed)
    slots = draw.sample(range(1, 7), draw.randint(1, 5))
    rows = [(draw.choice([slot, slot, slot, -1]), draw.randint(0, 40), draw.choice([1, 2, 3, 8])) for slot in slots]
    accepted = [draw.randint(0, count - 1) if slot >= 0 else 0 for slot, _, count in rows]
    return rows, accepted, sum(count for _, _, count in rows) + draw.choice([0, 0, 5, 16])


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_verify_and_commit_equal_decode_steps(part: int):
    """Outputs, the states behind the anchors and those after the commit: decode steps here, and the reference."""
    for seed in range(part * 10, part * 10 + 10):
        rows, accepted, num_rows = ragged(seed)
        bound = None if seed % 3 == 0 else -5.0
        own, plain, oracle = (Layers(ops, seed, bound=bound) for ops in (emulated(), emulated(), reference()))
        given = own.inputs(num_rows)
        meta = steps(rows, num_rows=num_rows)
        out, step = own.run(meta, "verify", given)
        expected, oracle_step = oracle.run(meta, "verify", given)
        live = live_rows(rows)
        torch.testing.assert_close(out[live], expected[live], **TIGHT)
        assert out.isfinite().all()
        every = [count for _, _, count in rows]
        alone = decoded(Layers(plain.ops, seed, bound=bound), rows, given, every)
        if alone:
            torch.testing.assert_close(out[live], torch.cat(alone), **TIGHT)
        decoded(plain, rows, given, [1] * len(rows))
        for mine, theirs in zip(own.states(), plain.states(), strict=True):
            torch.testing.assert_close(mine, theirs, **TIGHT)
        own.ops.commit(own.cache, step, accepted)
        oracle.ops.commit(oracle.cache, oracle_step, accepted)
        again = Layers(plain.ops, seed, bound=bound)
        decoded(again, rows, given, [count + 1 for count in accepted])
        for mine, theirs, third in zip(own.states(), again.states(), oracle.states(), strict=True):
            torch.testing.assert_close(mine, theirs, **TIGHT)
            torch.testing.assert_close(mine, third, **TIGHT)


def test_rejected_drafts_and_other_slots_leave_no_trace():
    """Slots without a sequence keep their bits, the last one among them; so does a slot whose drafts are rejected."""
    rows: Rows = [(5, 64, 4), (-1, 0, 4), (2, 9, 4)]
    layers = Layers(emulated())
    before = layers.states()
    given = layers.inputs(16)
    _, step = layers.run(steps(rows, num_rows=16), "verify", given)
    anchored = layers.states()
    layers.ops.commit(layers.cache, step, [0, 0, 3])
    untouched, rejected, moved = [0, 2, 3, LAST - 1], [4], [1]
    for old, middle, new in zip(before, anchored, layers.states(), strict=True):
        assert torch.equal(old[untouched], new[untouched])
        assert torch.equal(middle[rejected], new[rejected])
        assert not torch.equal(old[rejected], new[rejected])
        assert not torch.equal(middle[moved], new[moved])


def test_live_sequence_in_the_last_slot_does_not_see_padding():
    alone, beside = Layers(emulated()), Layers(emulated())
    given = alone.inputs(8)
    out, step = alone.run(steps([(LAST, 20, 3)]), "verify", [x[:3] for x in given])
    with_padding, other = beside.run(steps([(LAST, 20, 3), (-1, 0, 3)], num_rows=8), "verify", given)
    assert torch.equal(with_padding[:3], out)
    alone.ops.commit(alone.cache, step, [2])
    beside.ops.commit(beside.cache, other, [2, 0])
    for mine, theirs in zip(alone.states(), beside.states(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_verify_step_of_padding_alone_does_nothing():
    layers = Layers(emulated())
    pools = [*layers.states(), layers.mla.latent[1:].clone(), layers.mla.rope[1:].clone()]
    out, step = layers.run(steps([(-1, 0, 3), (-1, 0, 1)], num_rows=16), "verify", layers.inputs(16))
    assert not out.any()
    layers.ops.session.calls.clear()
    layers.ops.commit(layers.cache, step, [0, 0])
    assert not layers.ops.session.calls
    after = [*layers.states(), layers.mla.latent[1:], layers.mla.rope[1:]]
    assert all(torch.equal(old, new) for old, new in zip(pools, after, strict=True))


def test_padding_is_finite_over_poisoned_dummies():
    layers = Layers(emulated())
    for pool in (layers.kda.state, layers.kda.conv, layers.mla.latent, layers.mla.rope):
        pool[0].fill_(torch.nan)
    out, _ = layers.run(steps(MIXED, num_rows=16), "verify", layers.inputs(16))
    assert out.isfinite().all()


def test_rows_past_a_sequence_are_never_read():
    """Cache rows of drafts that an earlier step rejected, or of nobody, hold NaN; the kernel sees exact lengths."""
    layers, clean = Layers(emulated()), Layers(emulated())
    given = layers.inputs(13)
    meta = steps(MIXED)
    written = set(meta.slot_mapping.tolist())
    tables, flat = meta.block_tables.tolist(), layers.mla.latent.view(-1, 32)
    for b, (slot, start, count) in enumerate(MIXED):
        written |= {tables[b][n // 16] * 16 + n % 16 for n in range(start + count) if slot >= 0}
    others = [row for row in range(16, flat.shape[0]) if row not in written]
    flat[others] = torch.nan
    layers.mla.rope.view(-1, 16)[others] = torch.nan
    assert torch.equal(layers.run(meta, "verify", given)[0], clean.run(meta, "verify", given)[0])


def test_a_second_step_starts_where_the_commit_ended():
    """Steps in a row with partial accepts: states and outputs of one sequence follow plain decode."""
    own, plain = Layers(emulated()), Layers(emulated())
    given = own.inputs(40)
    position = 0
    for round_, (length, accepted) in enumerate([(8, 3), (8, 0), (8, 7), (1, 0), (4, 2)]):
        rows = slice(position, position + length)
        out, step = own.run(steps([(3, position, length)]), "verify", [x[rows] for x in given])
        own.ops.commit(own.cache, step, [accepted])
        for n in range(accepted + 1):
            one = slice(position + n, position + n + 1)
            alone, _ = plain.run(steps([(3, position + n, 1)]), "decode", [x[one] for x in given])
            # The attention's pages differ between the two kinds of steps' tables, KDA does not look at them.
            torch.testing.assert_close(out[n, :96], alone[0, :96], msg=f"round {round_}", **TIGHT)
        position += accepted + 1
        for mine, theirs in zip(own.states(), plain.states(), strict=True):
            torch.testing.assert_close(mine, theirs, **TIGHT)


def test_shorter_sequences_repeat_their_last_row():
    step = prepare_verify(steps([(2, 70, 3), (-1, 0, 1), (1, 5, 2)], num_rows=8), small_spec())
    assert step.slots.tolist() == [2, 0, 1, 0]
    assert step.dense.view(4, 3).tolist() == [[0, 1, 2], [3, 3, 3], [4, 5, 5], [6, 7, 7]]
    assert step.dense[step.packed].tolist() == list(range(8))
    assert step.padding.tolist() == [False] * 3 + [True] + [False] * 2 + [True] * 2
    assert (step.query_ends, step.key_lengths) == ([3, 4, 6, 8], [73, 1, 7, 2])
    assert step.block_tables.dtype == torch.int32
    assert step.places.min() == 0


def test_block_tables_cover_padding_longer_than_a_page():
    """A table with too few columns makes the kernel read past its row."""
    layers = Layers(emulated())
    out, _ = layers.run(steps([(1, 0, 2)], num_rows=40), "verify", layers.inputs(40))
    assert out.isfinite().all()


def verify_call() -> tuple[Layers, VerifyStep, RawCalls, dict[str, Any]]:
    """A step of MIXED, the calls of operators, and the arguments of the recurrence."""
    layers = Layers(emulated())
    given: dict[str, Any] = {}
    kernel = layers.ops._vendor.kda_target_verify_npu

    def spy(**arguments: Any) -> Any:
        given.update(arguments)
        return kernel(**arguments)

    object.__setattr__(layers.ops._vendor, "kda_target_verify_npu", spy)
    with RawCalls() as raw:
        _, step = layers.run(steps(MIXED), "verify", layers.inputs(13))
    return layers, step, raw, given


def test_target_verify_is_one_call_with_activated_gates():
    layers, _, _, given = verify_call()
    assert (given["gates_are_preactivated"], given["lower_bound"], given["cache_steps"]) == (True, None, 5)
    assert given["scale"] == layers.spec.kda_key_dim**-0.5
    assert (given["a"] <= 0).all()
    assert (given["b"] > 0).all()
    assert (given["b"] < 1).all()
    assert given["initial_state_indices"].tolist() == [2, LAST, 0, 4, 1]
    names = [call.name for call in layers.ops.session.calls]
    assert names.count("kda_target_verify_npu") == 1
    assert names.count("speculative_state_scatter_npu") == 1


def test_conv_verify_works_on_a_copy():
    """The kernel's update would leave the window of the last draft in the pool."""
    layers, _, raw, _ = verify_call()
    ((_, positional, keywords),) = [call for call in raw.calls if call[0] == "causal_conv1d"]
    assert positional[2].data_ptr() != layers.kda.conv.data_ptr()
    assert positional[2].shape == (5, 3, layers.spec.conv_channels)
    assert keywords["run_mode"] == 1


def test_verify_attention_has_cumulative_queries_and_keys_of_each_sequence():
    _, _, raw, _ = verify_call()
    given = raw.keywords("npu_fused_infer_attention_score")
    assert (given["input_layout"], given["scale"], given["sparse_mode"]) == ("TND", 0.3, 3)
    assert given["actual_seq_lengths"] == [3, 4, 6, 11, 13]
    assert given["actual_seq_lengths_kv"] == [73, 6, 2, 5, 33]
    assert (given["num_heads"], given["num_key_value_heads"], given["block_size"]) == (4, 1, 16)
    assert given["block_table"].shape[0] == 5


def test_commit_moves_all_layers_in_one_launch():
    ops = emulated()
    spec = small_spec(kda_layers=(0, 2, 3))
    cache = ops.new_cache(spec)
    step = ops.prepare(steps([(2, 70, 3), (4, 5, 3), (1, 0, 1)], num_rows=16), "verify", spec)
    random_ = torch.Generator().manual_seed(3)
    for tensor in (step.scratch.snapshots, step.scratch.windows):
        tensor.copy_(torch.randn(tensor.shape, generator=random_))
    ops.session.calls.clear()
    ops.commit(cache, step, [2, 1, 0])
    assert [call.name for call in ops.session.calls] == ["speculative_state_scatter_npu"]
    for index, layer in enumerate(spec.kda_layers):
        pool = cache.layer(layer)
        assert torch.equal(pool.state[2], step.scratch.snapshots[index, 0, 2])
        assert torch.equal(pool.state[4], step.scratch.snapshots[index, 1, 1])
        assert torch.equal(pool.conv[2], step.scratch.windows[index, 0, 3:6])
        assert torch.equal(pool.conv[4], step.scratch.windows[index, 1, 2:5])
        assert not pool.state[[0, 1, 3, 5, 6]].any()
        assert not pool.conv[[0, 1, 3, 5, 6]].any()


def test_commit_wants_a_number_of_every_sequence():
    layers = Layers(emulated())
    _, step = layers.run(steps([(1, 0, 2), (2, 0, 2)]), "verify", layers.inputs(4))
    with pytest.raises(AssertionError, match="1 numbers for 2 sequences"):
        layers.ops.commit(layers.cache, step, [1])


def test_verify_never_syncs_with_the_host():
    layers = Layers(emulated())
    (u, f, b, q, rows), ops = layers.inputs(16), layers.ops
    step = ops.prepare(steps(MIXED, num_rows=16), "verify", layers.spec)
    with capturing(ops):
        qkv = ops.kda_conv_verify(u, layers.taps, layers.kda, step)
        ops.kda_verify(qkv, f, b, layers.gate, layers.kda, step)
        ops.mla_write(rows, layers.mla, step)
        ops.mla_verify(q.view(-1, 3, 48), layers.w_kc, layers.w_vc, layers.mla, step, 0.3)


def test_pool_dtype_other_than_float32():
    layers = Layers(emulated(), state_dtype=torch.bfloat16)
    out, step = layers.run(steps(MIXED), "verify", layers.inputs(13))
    layers.ops.commit(layers.cache, step, [2, 0, 0, 3, 1])
    assert step.scratch.snapshots.dtype == torch.bfloat16
    assert out.isfinite().all()


def test_contract_sizes():
    """96 heads, as K3 has, over pages of 128 rows in bfloat16."""
    ops: NpuEmulated = emulated(rules=CONTRACT, dtype=torch.bfloat16)
    spec = real_spec()
    cache = ops.new_cache(spec)
    random_ = torch.Generator().manual_seed(1)
    for layer in (0, 1):
        fill(cache.layer(layer), random_)
    meta = steps([(1, 130, 8), (-1, 0, 8), (2, 3, 2)], page=128, num_rows=32)
    step = ops.prepare(meta, "verify", spec)
    q, w = (torch.randn(size, generator=random_).to(torch.bfloat16) for size in ((32, 96, 192), (96, 128, 512)))
    assert ops.mla_verify(q, w * 0.05, w * 0.05, cache.layer(1), step, 192**-0.5).isfinite().all()
    u, f, b = (
        torch.randn(32, width, generator=random_).to(torch.bfloat16)
        for width in (spec.conv_channels, spec.kda_heads * spec.kda_key_dim, spec.kda_heads)
    )
    qkv = ops.kda_conv_verify(u, torch.randn(spec.conv_channels, 4, generator=random_), cache.layer(0), step)
    assert ops.kda_verify(qkv, f, b, random_gate(spec, random_), cache.layer(0), step).isfinite().all()
