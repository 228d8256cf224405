"""Shapes of the kernels by architecture, from measurements (docs/performance.md); never searched for at start."""

from dataclasses import dataclass

import torch
import triton.language as tl

from k3svc.errors import BackendError


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Block sizes, warps and stages. In the batch-invariant mode they must not depend on the size of a step."""

    step_block_v: int
    """Value rows of the state that a program of the recurrent KDA kernel holds."""
    step_warps: int
    intra_warps: int
    intra_part: int
    """Columns of q and k that the kernel of lone chunks holds at a time."""
    intra_product: tl.dtype
    """What the scores of a chunk are products of: tl.float32 (TF32) or tl.bfloat16."""
    scan_block_v: int
    scan_warps: int
    scan_stages: int
    segment_chunks: int
    """Chunks of 32 tokens of a segment, where the scan of a long prompt is split (fast mode)."""
    few_programs: int
    """Prompts are cut where the scan would have fewer programs than this."""
    linear_tiles: tuple[int, int, int]
    """Rows, columns and depth of a tile of the batch-invariant product in bfloat16."""
    skinny: tuple[int, int, int, int]
    """Columns, depth, warps and stages of a product of few rows."""
    splits: int
    """Parts that MLA decode cuts every sequence into, in the batch-invariant mode; a power of two."""
    attend_programs: int
    """How many programs are aimed at in the fast mode."""
    attend_keys: int
    """Cached rows that a program holds at a time."""
    attend_stages: int
    few_rows: int
    """Up to this many rows a decode step of the fast mode takes the kernels of `rows`."""
    few_product: tuple[int, int]
    """Weights that a program of these loads at a time, and its warps."""
    few_router: tuple[int, int]
    few_experts: tuple[int, int]


HOPPER = Tuning(
    step_block_v=16,
    step_warps=1,
    intra_warps=1,
    intra_part=32,
    intra_product=tl.bfloat16,
    scan_block_v=64,
    scan_warps=4,
    scan_stages=3,
    segment_chunks=64,
    few_programs=132,
    linear_tiles=(32, 64, 64),
    skinny=(16, 256, 2, 4),
    splits=32,
    attend_programs=132,
    attend_keys=64,
    attend_stages=2,
    few_rows=2,
    few_product=(1024, 2),
    few_router=(2048, 2),
    few_experts=(2048, 1),
)
TUNINGS = {9: HOPPER}
"""By major compute capability."""


def tuning_of(device: torch.device) -> Tuning:
    """The tuning of a GPU; off a GPU, where Triton interprets, that of Hopper. Raises BackendError."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    if major not in TUNINGS:
        known = ", ".join(f"{key}.x" for key in TUNINGS)
        raise BackendError(
            f"model.device: {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the cuda "
            f"backend is tuned for {known}"
        )
    return TUNINGS[major]
