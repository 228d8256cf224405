"""Decode steps for benchmarks: batches of samples that are all in the middle of their output."""

from k3svc.core.batch import DecodeBatch, DecodeRow, SampleSpec
from k3svc.core.request import SamplingParams


def greedy_batch(rows: int, *, context_tokens: int, page_size: int) -> DecodeBatch:
    """`rows` greedy samples with `context_tokens` tokens behind them, in slots and pages from 1 on."""
    num_pages = context_tokens // page_size + 1
    spec = SampleSpec(params=SamplingParams(temperature=0.0), sample_index=0, position=context_tokens + 1, counts=None)
    return DecodeBatch(
        rows=[
            DecodeRow(
                key=str(row),
                slot=row + 1,
                block_table=list(range(1 + row * num_pages, 1 + (row + 1) * num_pages)),
                token_id=11 + row,
                position=context_tokens,
                sample=spec,
            )
            for row in range(rows)
        ]
    )
