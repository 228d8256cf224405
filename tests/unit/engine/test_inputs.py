from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow, SampleSpec
from k3svc.core.request import SamplingParams
from k3svc.engine.inputs import Chosen, decode_inputs, extend_inputs, verify_inputs

CPU = torch.device("cpu")
SPEC = SampleSpec(params=SamplingParams(), sample_index=0, position=0, counts=None)


def extend_row(slot: int, start: int, token_ids: list[int], table: list[int], is_last: bool = False) -> ExtendRow:
    return ExtendRow(key=f"p{slot}", slot=slot, block_table=table, token_ids=token_ids, start=start, is_last=is_last)


def decode_row(
    slot: int, position: int, table: Sequence[int], token_id: int | None = 1, sample: SampleSpec | None = SPEC
) -> DecodeRow:
    return DecodeRow(key=f"d{slot}", slot=slot, block_table=table, token_id=token_id, position=position, sample=sample)


def test_extend_packs_sequences_and_pads_the_tail():
    batch = ExtendBatch(
        rows=[
            extend_row(3, 0, [10, 11, 12], [7, 8, 9], is_last=True),
            extend_row(5, 4, [20, 21, 22, 23, 24, 25], [4, 2, 6]),
            extend_row(1, 8, [30], [1, 3, 5], is_last=True),
        ]
    )
    ids, meta, logit_rows = extend_inputs(batch, 4, CPU, 16)
    assert ids.tolist() == [10, 11, 12, 20, 21, 22, 23, 24, 25, 30] + [0] * 6
    assert meta.slots.tolist() == [3, 5, 1]
    assert meta.starts.tolist() == [0, 4, 8]
    assert meta.cu_seqlens.tolist() == [0, 3, 9, 10]
    # Pages of 4 tokens: the second sequence starts in its second page (2) and goes on in its third (6).
    assert meta.slot_mapping.tolist() == [28, 29, 30, 8, 9, 10, 11, 24, 25, 20] + [-1] * 6
    assert meta.block_tables.tolist() == [[7, 0, 0], [4, 2, 6], [1, 3, 5]]
    assert logit_rows.tolist() == [2, 9]
    assert meta.page_size == 4


def test_decode_has_one_sequence_a_row_and_pads_with_slot_minus_one():
    batch = DecodeBatch(
        rows=[
            decode_row(2, 7, [5, 6, 9], token_id=41),
            decode_row(4, 8, (3, 1, 8), token_id=42, sample=None),
            decode_row(9, 0, array("q", [2]), token_id=43),
        ]
    )
    ids, meta, logit_rows = decode_inputs(batch, 4, CPU, 16)
    assert ids.tolist() == [41, 42, 43] + [0] * 13
    assert meta.slots.tolist() == [2, 4, 9] + [-1] * 13
    assert meta.starts.tolist() == [7, 8, 0] + [0] * 13
    assert meta.cu_seqlens.tolist() == list(range(17))
    assert meta.slot_mapping.tolist() == [27, 32, 8] + [-1] * 13
    # Pages that hold no token yet, such as the third of the first row, are left out.
    assert meta.block_tables.tolist() == [[5, 6, 0], [3, 1, 8], [2, 0, 0]] + [[0, 0, 0]] * 13
    assert logit_rows.tolist() == [0, 2]


@pytest.mark.parametrize("row_tile", [1, 4])
def test_ids_that_the_step_before_chose_are_taken_by_key(row_tile: int):
    """One sample has ended, one is replayed, one failed in the step before, and the order is another."""
    rows = [
        decode_row(slot, 6, [5, 6], token_id=token_id) for slot, token_id in ((3, None), (1, None), (7, 41), (9, None))
    ]
    rows = [replace(row, key=f"k{row.slot}") for row in rows]
    before = Chosen(token_ids=torch.tensor([11, 12, 13]), places={"k1": 0, "k2": 1, "k3": 2})
    ids, _, _ = decode_inputs(DecodeBatch(rows=rows), 4, CPU, row_tile, before)
    assert ids.tolist() == [13, 11, 41, 0]
    ids, _, _ = decode_inputs(DecodeBatch(rows=rows[:2]), 4, CPU, row_tile, before)
    assert ids.tolist() == [13, 11] + [0] * (2 if row_tile == 4 else 0)


@pytest.mark.parametrize("slots", [(1, 2, 3), (1, 2), (2, 1, 3), (1, 2, 3, 4)])
def test_ids_of_samples_that_all_go_on_stay_where_they_are(slots: tuple[int, ...]):
    rows = [replace(decode_row(slot, 6, [5, 6]), token_id=None, key=f"k{slot}") for slot in slots]
    before = Chosen(token_ids=torch.tensor([11, 12, 13]), places={"k1": 0, "k2": 1, "k3": 2})
    ids, _, _ = decode_inputs(DecodeBatch(rows=rows), 4, CPU, 1, before)
    assert ids.tolist() == [10 + slot if slot < 4 else 0 for slot in slots]
    assert (ids.data_ptr() == before.token_ids.data_ptr()) == (slots == (1, 2, 3))


def test_verify_packs_drafts_behind_their_anchor():
    batch = DecodeBatch(
        rows=[
            replace(decode_row(2, 6, [5, 6, 9], token_id=41), drafts=(51, 52, 53)),
            decode_row(4, 8, (3, 1, 8), token_id=42, sample=None),
            replace(decode_row(9, 3, array("q", [2, 7]), token_id=43), drafts=(61,)),
        ]
    )
    ids, meta, logit_rows = verify_inputs(batch, 4, CPU, 8)
    assert ids.tolist() == [41, 51, 52, 53, 42, 43, 61, 0]
    assert meta.slots.tolist() == [2, 4, 9]
    assert meta.starts.tolist() == [6, 8, 3]
    assert meta.cu_seqlens.tolist() == [0, 4, 5, 7]
    # Pages of 4 tokens: the first block goes from its second page (6) into its third (9).
    assert meta.slot_mapping.tolist() == [26, 27, 36, 37, 32, 11, 28, -1]
    assert meta.block_tables.tolist() == [[5, 6, 9], [3, 1, 8], [2, 7, 0]]
    assert logit_rows.tolist() == [0, 1, 2, 3, 5, 6]
    assert meta.num_live_rows == 7
    assert meta.host_cu_seqlens == (0, 4, 5, 7) and ids.dtype == logit_rows.dtype == torch.int64


def test_drafts_past_the_block_table_are_refused():
    row = replace(decode_row(2, 6, [5, 6]), drafts=(1, 2))
    with pytest.raises(AssertionError, match="block table of 2 pages, 3 needed"):
        verify_inputs(DecodeBatch(rows=[row]), 4, CPU, 1)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 32, 64])
def test_steps_are_whole_tiles(count: int):
    rows = [decode_row(i + 1, i, [1] * 5) for i in range(count)]
    ids, meta, _ = decode_inputs(DecodeBatch(rows=rows), 16, CPU, 16)
    padded = -(-count // 16) * 16
    assert ids.shape == meta.slots.shape == meta.starts.shape == meta.slot_mapping.shape == (padded,)
    assert (meta.slots[count:] == -1).all() and (meta.slot_mapping[count:] == -1).all()
    batch = ExtendBatch(rows=[extend_row(1, 0, [3] * count, [1] * 5, is_last=True)])
    ids, meta, last = extend_inputs(batch, 16, CPU, 16)
    assert ids.shape == meta.slot_mapping.shape == (padded,)
    assert meta.slots.tolist() == [1]
    assert last.tolist() == [count - 1]


def test_the_tile_can_be_chosen():
    ids, meta, _ = decode_inputs(DecodeBatch(rows=[decode_row(1, 0, [1])]), 4, CPU, row_tile=64)
    assert ids.shape == meta.slots.shape == (64,)
    assert extend_inputs(ExtendBatch(rows=[extend_row(1, 0, [1], [1])]), 4, CPU, row_tile=1)[0].shape == (1,)


def test_host_copies_equal_the_tensors_and_dtypes_are_int64():
    extend = extend_inputs(ExtendBatch(rows=[extend_row(3, 64, [1] * 70, [4, 5, 6])]), 64, CPU, 16)
    decode = decode_inputs(DecodeBatch(rows=[decode_row(3, 64, [4, 5, 6])]), 64, CPU, 16)
    for ids, meta, logit_rows in (extend, decode):
        assert meta.host_slots == tuple(meta.slots.tolist())
        assert meta.host_starts == tuple(meta.starts.tolist())
        assert meta.host_cu_seqlens == tuple(meta.cu_seqlens.tolist())
        tensors = (ids, logit_rows, meta.slots, meta.starts, meta.cu_seqlens, meta.slot_mapping, meta.block_tables)
        assert {t.dtype for t in tensors} == {torch.int64}
        assert all(type(v) is int for v in (*meta.host_slots, *meta.host_starts, *meta.host_cu_seqlens))


def test_no_logits_are_asked_for_without_reason():
    assert extend_inputs(ExtendBatch(rows=[extend_row(1, 0, [1], [1])]), 4, CPU, 16)[2].shape == (0,)
    assert decode_inputs(DecodeBatch(rows=[decode_row(1, 0, [1], sample=None)]), 4, CPU, 16)[2].shape == (0,)


def test_inputs_do_not_alias_the_batch():
    table = array("q", [3, 4])
    _, meta, _ = decode_inputs(DecodeBatch(rows=[decode_row(1, 5, table)]), 4, CPU, 16)
    table[0] = 99
    assert meta.block_tables[0].tolist() == [3, 4]


@pytest.mark.parametrize("position", [4, 11])
def test_a_block_table_that_is_too_short_is_refused(position: int):
    with pytest.raises(AssertionError, match="block table of 1 pages"):
        decode_inputs(DecodeBatch(rows=[decode_row(1, position, [3])]), 4, CPU, 16)
    with pytest.raises(AssertionError, match="block table of 1 pages"):
        extend_inputs(ExtendBatch(rows=[extend_row(1, 0, [1] * (position + 1), [3])]), 4, CPU, 16)


def test_empty_steps_are_refused():
    with pytest.raises(AssertionError, match="without tokens"):
        decode_inputs(DecodeBatch(rows=[]), 4, CPU, 16)
    with pytest.raises(AssertionError, match="without tokens"):
        extend_inputs(ExtendBatch(rows=[extend_row(1, 0, [5], [1]), extend_row(2, 0, [], [2])]), 4, CPU, 16)
