"""Tensors on their way to the device and from it, through pinned memory where there is a GPU."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(parts: Sequence[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """int64 tensors of these shapes on the device. A GPU gets them in one copy from pinned memory, for which nothing
    waits; each begins at a multiple of 16 bytes there, as kernels like it.
    """
    if device.type == "cpu":
        return [torch.from_numpy(part) for part in parts]
    if device.type != "cuda":
        return [torch.from_numpy(part).to(device) for part in parts]
    sizes = [size for part in parts for size in (part.size, part.size % 2)]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    array, first = host.numpy(), 0
    for part in parts:
        array[first : first + part.size] = part.reshape(-1)
        first += part.size + part.size % 2
    whole = host.to(device, non_blocking=True)
    own = whole.split_with_sizes(sizes)[::2]
    return [part if given.ndim == 1 else part.view(given.shape) for part, given in zip(own, parts, strict=True)]


class HostCopy:
    """Tensors on their way to the host. A GPU copies to pinned memory in the order of what it is asked for, so that
    what is asked for later neither changes nor delays them.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self._host = [tensor.cpu() for tensor in tensors]
            return
        self._host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.current_stream().record_event()

    def read(self) -> list[Tensor]:
        """They, once they have arrived. The thread waits for an event: to read a tensor of a GPU as it is keeps other
        threads from asking for copies until all that was asked for before has been computed.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._host


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The same on the host, waited for."""
    return HostCopy(*tensors).read()
