"""Whole numbers on their way to the device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(parts: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """int64 tensors of these shapes on the device. A GPU gets them in one copy from pinned memory, for which nothing
    waits; each begins at a multiple of 16 bytes there, as kernels like it.
    """
    if device.type != "cuda":
        return [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)).to(device) for part in parts]
    sizes = [size for part in parts for size in (part.size, part.size % 2)]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    array, first = host.numpy(), 0
    for part in parts:
        array[first : first + part.size] = part.reshape(-1)
        first += part.size + part.size % 2
    whole = host.to(device, non_blocking=True)
    own = torch.split(whole, sizes)[::2]
    return [part if given.ndim == 1 else part.view(given.shape) for part, given in zip(own, parts, strict=True)]
