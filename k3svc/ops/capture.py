"""What captures of graphs need of Python, whatever the device."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Leaves cyclic garbage where it is. To free a graph that is among it ends a capture of the same thread with an
    error (cudaErrorStreamCaptureInvalidated).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
