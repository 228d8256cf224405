"""Sampling parameters of rows, of every kind."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3svc.ops.table import SampleRows


def sample_rows(count: int, seed: int = 0, **given: Any) -> SampleRows:
    """Mixed parameters, or those that are given for all rows."""
    draw = random.Random(seed)

    def column(name: str, values: list[float], dtype: torch.dtype) -> Tensor:
        chosen = [given[name]] * count if name in given else [draw.choice(values) for _ in range(count)]
        return torch.tensor(chosen, dtype=dtype)

    temperature = column("temperature", [0.0, 0.3, 1.0, 2.5], torch.float32)
    top_k = column("top_k", [0, 0, 1, 3, 20, 40, 5000], torch.int64)
    top_p = column("top_p", [1.0, 1.0, 0.9, 0.4, 1e-4], torch.float32)
    min_p = column("min_p", [0.0, 0.0, 0.05, 0.6], torch.float32)
    return SampleRows(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=torch.tensor([draw.randint(-(2**62), 2**62) for _ in range(count)]),
        sample_index=torch.arange(count) % 3,
        position=torch.tensor([draw.randint(0, 5000) for _ in range(count)]),
        host_greedy=tuple((temperature == 0).tolist()),
        host_filters=tuple(zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)),
    )


def rows_at(rows: SampleRows, places: Sequence[int]) -> SampleRows:
    """The parameters of these rows."""

    def taken(column: Any) -> Any:
        return column[list(places)] if isinstance(column, Tensor) else tuple(column[place] for place in places)

    return SampleRows(**{name: taken(column) for name, column in vars(rows).items()})
