"""Steps of draft blocks for tests of their attention."""

import random

import torch

from k3svc.ops.draft_table import BlockMeta


def block_meta(seed: int, num_rows: int, *, slots: int, window: int, capacity: int) -> BlockMeta:
    """Up to five requests: some with little context, some that wrapped around, some that start late."""
    draw = random.Random(seed)
    ends = [draw.choice([0, 1, 5, capacity, 3 * capacity + 2, draw.randint(0, 400)]) for _ in range(draw.randint(1, 5))]
    starts = [draw.choice([0, 0, max(0, end - 3), end]) for end in ends]
    return BlockMeta(
        slots=torch.tensor(draw.sample(range(slots), len(ends))),
        base_lens=torch.tensor(ends),
        starts=torch.tensor(starts),
        host_lengths=tuple(min(end - first, window) for end, first in zip(ends, starts, strict=True)),
        window=window,
        capacity=capacity,
        num_cells=min(capacity, max([1, *ends])),
        num_rows=num_rows,
    )
