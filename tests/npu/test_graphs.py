"""Captured steps on the emulated device: they compute what eager steps compute, whatever came before them."""

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.model.draft import Blocks, DraftModel
from k3svc.model.draft_config import DraftSwitches, parse_draft_config
from k3svc.model.kimi import Model, Taps
from k3svc.ops.npu import graphs as ladder
from k3svc.ops.npu.graphs import LADDER, WARM_UPS, Graphs
from k3svc.ops.npu.steps import VerifyStep, prepare_decode, prepare_verify
from k3svc.ops.npu_emulated import graphs, registry
from k3svc.ops.npu_emulated.contract import ContractViolation, Session
from k3svc.ops.npu_emulated.device import on_device
from k3svc.ops.table import SampleRows
from tests.npu.bench import RELAXED, emulated, small_spec, steps
from tests.oracles.loop import Loop
from tests.unit.model.test_draft import HIDDEN, KINDS, random_weights, tables

registry.install()
NANO = Path("models/k3-nano")
LENGTHS = (20, 3, 70, 1, 33)


@pytest.fixture(scope="module")
def loops() -> tuple[Loop, Loop]:
    """k3-nano captured, and eager; the same prompts in both."""
    made = []
    for mode in ("on", "off"):
        ops = emulated(graphs=mode)
        loop = Loop(Model.load(NANO, ops), ops, num_slots=6, poison=True)
        made.append(loop)
    return made[0], made[1]


def prompts(loop: Loop) -> list[Any]:
    sequences = [loop.new(length + 60) for length in LENGTHS]
    for sequence, length in zip(sequences, LENGTHS, strict=True):
        loop.prefill(sequence, list(range(5, 5 + length)), 64)
    return sequences


def pools(loop: Loop) -> list[Tensor]:
    """Of live slots."""
    kda = [loop.cache.layer(layer) for layer in loop.cache.spec.kda_layers]
    return [part[1:].clone() for pool in kda for part in (pool.state, pool.conv)]


def equal(a: list[Tensor], b: list[Tensor]) -> None:
    for mine, theirs in zip(a, b, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_decode_and_verify_of_any_batch_equal_eager_steps(loops: tuple[Loop, Loop]):
    """Batches shrink and grow, lengths and pages change; a graph is captured once a rung."""
    own, eager = loops
    both = [prompts(loop) for loop in loops]
    captures: list[Any] = []
    capture = Graphs._capture
    draw = random.Random(3)
    with pytest.MonkeyPatch.context() as patch:

        def counted(self: Graphs, function: Any, args: tuple[Any, ...]) -> Any:
            captures.append(args)
            return capture(self, function, args)

        patch.setattr(Graphs, "_capture", counted)
        for round_ in range(8):
            chosen = draw.sample(range(len(LENGTHS)), draw.randint(1, 5))
            drafts = [[draw.randint(0, 99) for _ in range(draw.choice([1, 2, 4]))] for _ in chosen]
            accepted = [draw.randint(0, len(tokens) - 1) for tokens in drafts]
            results = []
            for loop, sequences in zip(loops, both, strict=True):
                if round_ % 2:
                    rows = [(sequences[n], tokens[:1]) for n, tokens in zip(chosen, drafts, strict=True)]
                    results.append(loop.step("decode", rows))
                else:
                    rows = [(sequences[n], tokens) for n, tokens in zip(chosen, drafts, strict=True)]
                    count = sum(map(len, drafts))
                    results.append(loop.verify(rows, accepted, -(-count // 16) * 16))
            equal(results[0], results[1])
            equal(pools(own), pools(eager))
    kinds = {tuple(tuple(x.shape) for x in ladder._tensors(args)) for args in captures}
    assert len(kinds) == len(captures) < 8


def test_captured_verify_steps_share_memory_that_was_counted():
    """Kinds of steps come in any order; a larger one replaces the memory and what was captured on it."""
    spec = small_spec(num_slots=24, num_pages=80)
    ops = emulated(graphs="on")
    store = ops._graphs
    assert store is not None

    def fill(step: VerifyStep) -> Tensor:
        step.scratch.snapshots[0, :, :, 0, 0, 0] = step.places[0].float()
        step.scratch.windows[0, :, :, 0] = step.places[0].float()
        return step.padding.clone()

    seen: list[int] = []
    with torch.inference_mode():
        for count, rows in ((2, 3), (1, 1), (20, 5), (3, 2), (2, 3), (20, 5), (1, 1)):
            meta = steps([(slot, 20, rows) for slot in range(1, count + 1)], num_rows=-(-count * rows // 16) * 16)
            step = ops.prepare(meta, "verify", spec)
            ops.run(fill, step)
            assert step.scratch.snapshots.shape[1] >= count
            assert float(step.scratch.snapshots[0, 0, 0, 0, 0, 0]) == float(step.places[0])
            memory = store._memory
            assert memory is not None
            seen.append(memory.snapshots.nbytes + memory.windows.nbytes)
            assert seen[-1] <= ops.verify_bytes(spec, 20, 5)
            storages = {
                each.snapshots.untyped_storage().data_ptr() for c in store._captured.values() for each in c.scratch
            }
            assert storages == {memory.snapshots.untyped_storage().data_ptr()}
    assert seen == sorted(seen)
    assert seen[2] == seen[-1] > seen[0]


def test_a_capture_moves_nothing():
    ops = emulated(graphs="on")
    loop = Loop(Model.load(NANO, ops), ops)
    sequence = loop.new(40)
    loop.prefill(sequence, list(range(9)), 64)
    before = pools(loop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.NPUGraph, "replay", lambda self: None)
        (hidden,) = loop.step("decode", [(sequence, [5])])
    assert hidden.isnan().all()
    assert all(torch.equal(old, new) for old, new in zip(before, pools(loop), strict=True))


@pytest.mark.slow
def test_taps_come_out_of_a_captured_step():
    results = []
    for mode in ("on", "off"):
        ops = emulated(graphs=mode)
        model = Model.load(NANO, ops)
        loop = Loop(model, ops)
        sequence = loop.new(40)
        loop.prefill(sequence, list(range(9)), 64)
        meta = steps([(sequence.slot, 9, 1)])
        found: list[Tensor] = []
        with torch.inference_mode():
            for token in (5, 6):
                model.forward(
                    torch.tensor([token]), meta, loop.cache, "decode", taps=Taps(layers=(1, 3), sink=found.append)
                )
        assert [tuple(taps.shape) for taps in found] == [(1, 2 * model.config.hidden_size)] * 2
        assert not torch.equal(found[0], found[1])
        results.append(found)
    equal(results[0], results[1])


def test_steps_grow_to_a_rung():
    step = prepare_decode(steps([(3, 40, 1), (-1, 0, 1)])).grown(16)
    assert step is not None
    assert step.slots.tolist() == [3] + [0] * 15
    assert (step.key_lengths, step.padding.tolist()) == ([41] + [1] * 15, [False] + [True] * 15)
    assert step.block_tables.shape == (16, 4)
    assert prepare_decode(steps([(1, 0, 1)] * 17)).grown(16) is None


def test_verify_steps_grow_to_powers_of_two():
    step = prepare_verify(steps([(2, 70, 3), (1, 5, 2), (4, 9, 3)], num_rows=10), small_spec()).grown(16)
    assert step is not None
    # Four sequences and the six rows more: as many sequences as hold them.
    assert step.slots.tolist() == [2, 1, 4] + [0] * 5
    assert step.query_ends == [3, 5, 8, 10, 11, 12, 13, 16]
    assert step.key_lengths == [73, 7, 12, 2, 1, 1, 1, 3]
    assert (step.width, step.dense.shape, step.packed.shape) == (4, (32,), (16,))
    assert step.dense[step.packed].tolist() == list(range(16))
    full = prepare_verify(steps([(slot, 4, 4) for slot in (1, 2, 3, 4)]), small_spec())
    grown = full.grown(16)
    assert grown is not None
    assert grown.slots.tolist() == [1, 2, 3, 4]
    # A sequence of padding has a row, so 5 sequences of 15 rows in all do not become 8 of 16.
    assert prepare_verify(steps([(slot, 4, 3) for slot in (1, 2, 3, 4, 5)]), small_spec()).grown(16) is None


def test_larger_steps_than_the_ladder_run_eagerly():
    ops = emulated(graphs="on")
    seen: list[int] = []

    def function(ids: Tensor, step: Any) -> Tensor:
        seen.append(len(ids))
        return ids.float()[:, None]

    for count in (LADDER[-1], LADDER[-1] + 1):
        meta = steps([(1 + n % 6, 0, 1) for n in range(count)])
        out = ops.run(function, torch.arange(count), ops.prepare(meta, "decode", small_spec()))
        assert out[:, 0].tolist() == list(range(count))
    # Warm-ups and the capture, then once eagerly.
    assert seen == [256] * 3 + [257]


def captured(function: Any, *, update: bool = True) -> graphs.NPUGraph:
    """Inside of a running session."""
    graph = graphs.NPUGraph()
    with graphs.graph(graph, pool=graphs.graph_pool_handle(), auto_dispatch_capture=update):
        function()
    return graph


def attention(q: Tensor, k: Tensor, lengths: list[int]) -> Tensor:
    out: Tensor = torch.ops.npu.npu_fused_infer_attention_score(
        q, k, k, num_heads=1, input_layout="BSND", actual_seq_lengths_kv=lengths
    )[0]
    return out


def test_a_graph_bakes_addresses_and_reads_them_again():
    x, total = torch.ones(3), torch.zeros(3)
    with on_device(Session(rules=RELAXED)):
        made: list[Tensor] = []
        graph = captured(lambda: made.append(total.add_(x * 2)))
        assert total.tolist() == [0.0] * 3
        for value, expected in ((1.0, 2.0), (3.0, 8.0)):
            x.fill_(value)
            graph.replay()
            assert total.tolist() == [expected] * 3
        assert made[0].data_ptr() == total.data_ptr()


def test_lengths_are_baked_until_they_are_updated():
    q, k = torch.ones(1, 1, 1, 4), torch.arange(12.0).view(1, 3, 1, 4)
    with on_device(Session(rules=RELAXED)):
        made: list[Tensor] = []
        graph = captured(lambda: made.append(attention(q, k, [1])))
        assert made[0].isnan().all()
        graph.replay()
        assert made[0].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
        graph.update(cpu_update_input=[{"actual_seq_kvlen": [3]}])
        graph.replay()
        assert made[0].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [2]}])
        graph.replay()
        torch.testing.assert_close(made[0], attention(q, k, [2]))
        with pytest.raises(ContractViolation, match="captured with 1"):
            graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [2, 3]}])
        with pytest.raises(ContractViolation, match="Python integers"):
            graph.update(cpu_update_input=[{"actual_seq_lengths_kv": torch.tensor([2])}])
        with pytest.raises(RuntimeError, match="1 operators to update and 2"):
            graph.update(cpu_update_input=[{}, {}])
        with pytest.raises(RuntimeError, match="without auto_dispatch_capture"):
            captured(lambda: attention(q, k, [1]), update=False).update(cpu_update_input=[{}])


def test_host_syncs_end_a_capture():
    x = torch.ones(2)
    for sync in (lambda: x.sum().item(), lambda: x[x > 0], x.nonzero, x.tolist):
        session = Session(rules=RELAXED)
        with on_device(session):
            with pytest.raises(ContractViolation, match="captured graph"):
                captured(sync)
            assert not session.is_capturing
            assert session.recorder is None


def test_nothing_to_replay():
    with pytest.raises(ContractViolation, match="nothing was captured"):
        graphs.NPUGraph().replay()


def greedy(count: int) -> SampleRows:
    zeros = torch.zeros(count)
    whole = torch.zeros(count, dtype=torch.int64)
    return SampleRows(
        temperature=zeros,
        top_k=whole,
        top_p=zeros + 1,
        min_p=zeros,
        seed=whole,
        sample_index=whole,
        position=whole,
        host_greedy=(True,) * count,
        host_filters=((0, 1.0, 0.0),) * count,
    )


@pytest.mark.parametrize("kind", ["dflash", "vanilla", "mla causal"])
@pytest.mark.parametrize(("folded", "embedded"), [(True, True), (True, False), (False, True), (False, False)])
def test_captured_drafts_propose_what_eager_ones_do(kind: str, folded: bool, embedded: bool):
    """Anchors, contexts and requests change between replays; what is not folded or embedded stays outside."""
    config = parse_draft_config(KINDS[kind])
    embedding, lm_head = tables()
    switches = DraftSwitches(folded_proposal=folded, embed_in_graph=embedded)
    found = []
    for mode in ("on", "off"):
        ops = emulated(graphs=mode)
        draft = DraftModel(
            config, random_weights(config), embedding=embedding, lm_head=lm_head, ops=ops, switches=switches
        )
        context = draft.new_context(num_slots=3, max_window=32, scratch_rows=8)
        for slot in range(3):
            taps = torch.randn(20, 2 * HIDDEN, generator=torch.Generator().manual_seed(slot))
            positions = torch.arange(20)
            draft.inject(draft.projector.project(taps), positions, torch.full_like(positions, slot), context)
        for anchors, lens, slots in (
            ((3, 4), (17, 18), (0, 2)),
            ((9, 1), (20, 19), (1, 0)),
            ((7, 7), (18, 20), (2, 1)),
        ):
            blocks = Blocks(
                anchors=torch.tensor(anchors),
                base_lens=torch.tensor(lens),
                starts=torch.tensor([0, 1]),
                slots=torch.tensor(slots),
            )
            ops.session.calls.clear()
            found.append(draft.propose(blocks, context).tokens.tolist())
            found.append(draft.propose(blocks, context, greedy(2)).tokens.tolist())
    half = len(found) // 2
    assert found[:half] == found[half:]
    assert len({str(tokens) for tokens in found}) > 1


def test_sampled_drafts_stay_outside_of_graphs():
    """The choice of a sampled token syncs with the host."""
    config = parse_draft_config(KINDS["vanilla"])
    embedding, lm_head = tables()
    ops = emulated(graphs="on")
    draft = DraftModel(config, random_weights(config), embedding=embedding, lm_head=lm_head, ops=ops)
    context = draft.new_context(num_slots=1, max_window=32, scratch_rows=8)
    blocks = Blocks(
        anchors=torch.tensor([3]), base_lens=torch.tensor([0]), starts=torch.tensor([0]), slots=torch.tensor([0])
    )
    rows = greedy(1)
    sampled = SampleRows(**{**vars(rows), "temperature": torch.ones(1), "host_greedy": (False,)})
    assert draft.propose(blocks, context, sampled).tokens.shape == (1, config.num_proposals)


def test_nothing_is_collected_during_a_capture():
    """A graph that is freed then ends it."""
    store, seen = emulated(graphs="on")._graphs, list[bool]()
    assert store is not None

    def copy(x: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        return x.clone()

    with torch.inference_mode():
        store.run(copy, (torch.zeros(16, 4),))
    # Not while it is captured, which a replay on the emulated device repeats.
    assert seen[: WARM_UPS + 1] == [True] * WARM_UPS + [False]
