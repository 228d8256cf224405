"""Draft models on the emulated device: the adapters against plain torch, and proposals against the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.model.draft import Blocks, DraftModel
from k3svc.model.draft_config import DraftSwitches, parse_draft_config
from k3svc.ops.draft_table import BlockMeta
from k3svc.ops.npu.draft import BlockStep
from k3svc.ops.npu_emulated import rowwise
from k3svc.ops.npu_emulated.contract import ContractViolation, Session
from k3svc.ops.npu_emulated.device import on_device
from k3svc.ops.reference_draft import visible_cells
from k3svc.ops.table import Ops
from tests.npu.bench import CONTRACT, RELAXED, RawCalls, capturing, emulated, reference
from tests.oracles.blocks import block_meta
from tests.unit.model.test_draft import HIDDEN, KINDS, random_weights, tables

TIGHT: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}
ROWS, SLOTS = 4, 6


class Case:
    """Random rows of a step of blocks; cells that are not visible hold NaN."""

    def __init__(self, seed: int, heads: int, key_heads: int, width: int, values: int) -> None:
        self.meta = block_meta(seed, ROWS, slots=SLOTS, window=10, capacity=13)
        generator = torch.Generator().manual_seed(seed)
        count = len(self.meta.host_lengths)
        shapes = ((count, ROWS, heads), (count, ROWS, key_heads), (SLOTS, self.meta.capacity, key_heads))
        self.query, self.block, written = (torch.randn(*shape, width, generator=generator) for shape in shapes)
        self.context = torch.full_like(written, torch.nan)
        for slot, cells in zip(self.meta.slots, visible_cells(self.meta), strict=True):
            (seen,) = cells.nonzero(as_tuple=True)
            self.context[slot, seen] = written[slot, seen]
        self.values = values

    def values_of(self, keys: Tensor) -> Tensor:
        """Latent keys hold their values; else values are rows of their own."""
        return keys[..., : self.values] if self.values < keys.shape[-1] else keys * 2 + 1

    def run(self, ops: Ops, *, is_causal: bool = False, scale: float = 0.3) -> Tensor:
        return ops.draft.block_attention(
            self.query,
            self.block,
            self.values_of(self.block),
            self.context,
            self.values_of(self.context),
            ops.draft.prepare(self.meta),
            scale=scale,
            is_causal=is_causal,
        )


SHAPES = [(4, 2, 8, 8), (6, 1, 16, 16), (3, 1, 12, 8), (2, 2, 8, 8)]
"""Query heads, key heads, key width, value width."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_block_attention(shape: tuple[int, int, int, int], is_causal: bool):
    for seed in range(8):
        case = Case(seed, *shape)
        own, expected = case.run(emulated(), is_causal=is_causal), case.run(reference(), is_causal=is_causal)
        torch.testing.assert_close(own, expected, **TIGHT)


def test_the_visible_rows_come_first_and_the_block_last():
    step = emulated().draft.prepare(
        BlockMeta(
            slots=torch.tensor([0, 1]),
            base_lens=torch.tensor([12, 1]),
            starts=torch.tensor([0, 1]),
            host_lengths=(4, 0),
            window=4,
            capacity=5,
            num_cells=5,
            num_rows=2,
        )
    )
    assert isinstance(step, BlockStep)
    # Positions 8 to 11 lie in cells 3, 4, 0, 1; rows 5 and 6 are the block's.
    assert step.order.view(2, 7).tolist()[0][:6] == [3, 4, 0, 1, 5, 6]
    assert step.order.view(2, 7).tolist()[1][:2] == [12, 13]
    assert step.key_lengths == [6, 2]


def test_block_attention_has_no_mask_and_exact_lengths():
    """As of an encoder; the lengths hold the block once."""
    case = Case(3, 4, 2, 8, 8)
    with RawCalls() as raw:
        case.run(emulated(), scale=0.125)
    given = raw.keywords("npu_fused_infer_attention_score")
    assert (given["input_layout"], given["scale"], given["sparse_mode"]) == ("BSND", 0.125, 0)
    assert (given["num_heads"], given["num_key_value_heads"]) == (4, 2)
    assert given.get("atten_mask") is None
    assert given["actual_seq_lengths_kv"] == [length + ROWS for length in case.meta.host_lengths]


def test_latent_blocks_are_padded_to_a_power_of_two_of_heads():
    ops = emulated(rules=CONTRACT, dtype=torch.bfloat16)
    case = Case(0, 6, 1, 576, 512)
    case.query, case.block, case.context = (x.bfloat16() for x in (case.query, case.block, case.context))
    case.context = case.context.nan_to_num()
    with RawCalls() as raw:
        out = case.run(ops)
    assert out.shape[2:] == (6, 512)
    assert raw.keywords("npu_fused_infer_attention_score")["num_heads"] == 8
    assert raw.keywords("npu_fused_infer_attention_score")["query_rope"].shape[-1] == 64


def test_fused_norm_and_rotation():
    generator = torch.Generator().manual_seed(2)
    qkv, weights = torch.randn(5, 64, generator=generator), torch.randn(2, 8, generator=generator)
    angle = torch.randn(5, 4, generator=generator) * 3
    ops = emulated()
    own, expected = (
        each.draft.norm_rope(qkv, 4, weights[0], weights[1], 0.1, angle.cos(), angle.sin())
        for each in (ops, reference())
    )
    assert [call.name for call in ops.session.calls] == ["split_qkv_rmsnorm_rope"]
    for mine, theirs, shape in zip(own, expected, ((5, 4, 8), (5, 2, 8), (5, 2, 8)), strict=True):
        assert mine.shape == shape
        torch.testing.assert_close(mine, theirs, **TIGHT)


def test_block_steps_never_sync_with_the_host():
    ops, case = emulated(), Case(1, 4, 2, 8, 8)
    step = ops.draft.prepare(case.meta)
    angle = torch.zeros(5, 4)
    with capturing(ops):
        ops.draft.norm_rope(torch.ones(5, 64), 4, torch.ones(8), torch.ones(8), 1e-6, angle.cos(), angle.sin())
        ops.draft.block_attention(
            case.query, case.block, case.block, case.context, case.context, step, scale=0.3, is_causal=False
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("switches", [DraftSwitches(), DraftSwitches(folded_proposal=False, embed_in_graph=False)])
def test_proposals_are_those_of_the_reference(kind: str, switches: DraftSwitches):
    """Contexts of several lengths, through a ring that wraps around."""
    config = parse_draft_config({**KINDS[kind], "sliding_window": 12, "layer_types": ["sliding_attention"] * 2})
    embedding, lm_head = tables()
    lengths = (1, 7, 30)
    proposals = []
    for ops in (emulated(), reference()):
        draft = DraftModel(
            config, random_weights(config), embedding=embedding, lm_head=lm_head, ops=ops, switches=switches
        )
        context = draft.new_context(num_slots=4, max_window=12, scratch_rows=6)
        for slot, length in enumerate(lengths):
            taps = torch.randn(length, 2 * HIDDEN, generator=torch.Generator().manual_seed(slot))
            for first in range(0, length, 10):
                positions = torch.arange(first, min(first + 10, length))
                features = draft.projector.project(taps[positions])
                draft.inject(features, positions, torch.full_like(positions, slot), context)
        blocks = Blocks(
            anchors=torch.tensor([3, 4, 5]),
            base_lens=torch.tensor(lengths),
            starts=torch.tensor([0, 2, 0]),
            slots=torch.arange(3),
        )
        proposals.append(draft.propose(blocks, context))
    own, expected = proposals
    assert own.tokens.tolist() == expected.tokens.tolist()
    if expected.confidences is not None:
        assert own.confidences is not None
        torch.testing.assert_close(own.confidences, expected.confidences, **TIGHT)


def rope_arguments() -> dict[str, Any]:
    return {
        "input": torch.ones(3, 32, dtype=torch.bfloat16),
        "sin": torch.zeros(3, 8, dtype=torch.bfloat16),
        "cos": torch.ones(3, 8, dtype=torch.bfloat16),
        "q_hidden_size": 16,
        "kv_hidden_size": 8,
        "head_dim": 8,
        "eps": 1e-6,
        "q_weight": torch.ones(8),
        "k_weight": torch.ones(8),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.ones(3, 32)}, r"input is torch\.float32"),
        ({"sin": torch.zeros(3, 4, dtype=torch.bfloat16)}, "the whole head"),
        ({"cos": torch.ones(3, 8)}, r"sin torch\.bfloat16|cos"),
        ({"head_dim": 6, "q_hidden_size": 18}, "power of two"),
        ({"q_hidden_size": 12, "kv_hidden_size": 10}, "12 channels of q on 10"),
        ({"eps": None}, "come together"),
        ({"q_weight": None}, "come together"),
    ],
)
def test_breaches_of_the_fused_norm_and_rotation_raise(changes: dict[str, Any], message: str):
    with on_device(Session(rules=CONTRACT)):
        rowwise.split_qkv_rmsnorm_rope(**rope_arguments())
        with pytest.raises(ContractViolation, match=message):
            rowwise.split_qkv_rmsnorm_rope(**{**rope_arguments(), **changes})


def test_keys_side_by_side_are_checked():
    q, k = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)
    given = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND", "scale": 1.0}
    for lengths, message in (([5], "for 2 sequences"), ([5, 6], "of 5 keys"), ([5, 5, 5], "2 rows of keys")):
        with on_device(Session(rules=RELAXED)), pytest.raises(ContractViolation, match=message):
            torch.ops.npu.npu_fused_infer_attention_score(q, k, k, actual_seq_lengths_kv=lengths, **given)
