"""What captures of graphs need of Python, whatever the device."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_held = 0
_was_enabled = False


@contextmanager
def without_collection() -> Iterator[None]:
    """Leaves cyclic garbage where it is, until the last of the threads that ask for it is through. To free a graph that
    is among it ends a capture of the same thread with an error (cudaErrorStreamCaptureInvalidated).
    """
    global _num_held, _was_enabled  # noqa: PLW0603  collection is of the process
    with _lock:
        if _num_held == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_held += 1
    try:
        yield
    finally:
        with _lock:
            _num_held -= 1
            if _num_held == 0 and _was_enabled:
                gc.enable()
