"""Memory of a device that does not suffice, told so that somebody can act on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from k3svc.errors import BackendError, EngineFault


def shortage(error: BaseException) -> str | None:
    """What was asked for and what is free, in a line; None for an error of another kind."""
    first = str(error).partition("\n")[0]
    if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in first:
        return None
    # After it come the processes on the device, and advice on the allocator.
    said, end, _ = first.partition(" is free.")
    return (said + end).rstrip(".")


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Raises BackendError where the device has no memory for what is loaded in the block."""
    try:
        yield
    except RuntimeError as error:
        lack = shortage(error)
        if lack is None:
            raise
        raise BackendError(
            f"model.device: the device has no room for {what}: {lack}; end what else runs on it, let cache.num_pages "
            "and cache.num_slots of other services leave more of it, or take another device"
        ) from error


def step_fault(step: str, error: Exception) -> EngineFault:
    """What a step failed of."""
    lack = shortage(error)
    if lack is None:
        return EngineFault(f"{step} failed: {type(error).__name__}: {error}")
    return EngineFault(
        f"{step} found no memory on the device: {lack}; smaller cache.num_pages and cache.num_slots leave more for "
        "steps, smaller prefill.chunk_tokens and decode.max_batch need less, and other processes take from it too"
    )
