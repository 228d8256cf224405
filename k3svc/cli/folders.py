"""Temporary folders for configuration and output of a stack, which outlive one that ended badly, but not for ever."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "k3svc-"
KEEP_S = 86400.0
"""How long the output of a stack that ended badly is kept."""


def new_folder(resources: contextlib.ExitStack) -> Path:
    """A temporary folder, locked as long as `resources` are held. Removes old ones of this user that nobody holds."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), locked(old):
            status = old.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > KEEP_S:
                shutil.rmtree(old)
    made = Path(tempfile.mkdtemp(prefix=PREFIX))
    resources.enter_context(locked(made))
    return made


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The kernel gives the lock back when this process ends. Raises OSError when another one has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
