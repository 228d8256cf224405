"""Shapes of the kernels by architecture: chosen once from measurements, never searched for at start (docs/performance.md)."""

from dataclasses import dataclass

import torch

from k3svc.errors import BackendError


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Block sizes, warps and pipeline stages. In the batch-invariant mode they must not depend on the size of a step."""

    step_block_v: int
    """Value rows of the state that a program of the recurrent KDA kernel holds."""
    step_warps: int
    intra_warps: int
    scan_block_v: int
    scan_warps: int
    scan_stages: int
    segment_chunks: int
    """Chunks of 16 tokens of a segment, where the scan of a long prompt is split (fast mode)."""
    few_programs: int
    """Prompts are cut where the scan would have fewer programs than this."""
    linear_tiles: tuple[int, int, int]
    """Rows, columns and depth of a tile of the batch-invariant product in bfloat16."""
    split_keys: int
    """Cached rows that one program of MLA decode attends to; every sequence is cut at multiples of it."""


HOPPER = Tuning(
    step_block_v=32,
    step_warps=4,
    intra_warps=2,
    scan_block_v=64,
    scan_warps=4,
    scan_stages=3,
    segment_chunks=128,
    few_programs=132,
    linear_tiles=(32, 64, 64),
    split_keys=128,
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
