"""Values that are made of files and follow them while the process runs: certificates, keys, tokens."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from k3svc.errors import ConfigError

MAX_FILE_BYTES = 1 << 20

Value = TypeVar("Value")

log = logging.getLogger(__name__)


class WatchedFiles(Generic[Value]):
    """`parse(contents)` of some files, made again when one of them changes. Threads may share one.

    While the files cannot be read or parsed, as in the middle of a change, the last good value stays.
    """

    def __init__(self, paths: Sequence[Path], parse: Callable[..., Value]) -> None:
        """Raises ConfigError when the files cannot be used now. `parse` raises ConfigError and quotes no secret."""
        self._paths = tuple(paths)
        self._parse = parse
        self._lock = threading.Lock()
        self._signature: object = None
        self._value = self._read()

    def get(self) -> Value:
        """The value of the files as they are now: the same object until they change."""
        with self._lock:
            try:
                if _signature(self._paths) != self._signature:
                    self._value = self._read()
                    log.info("files were read again", extra={"files": [str(path) for path in self._paths]})
            except ConfigError as error:
                log.warning("what was read before stays in use: %s", error)
            return self._value

    def _read(self) -> Value:
        # Before the contents: a change in between shows at the next look, and unusable files are told of once.
        self._signature = _signature(self._paths)
        try:
            return self._parse(*(_contents(path) for path in self._paths))
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error


def _contents(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return data


def _signature(paths: Sequence[Path]) -> object:
    return [_state(path) for path in paths]


def _state(path: Path) -> tuple[int, int, int] | None:
    """None: the file is not there, or not to be seen, which `_contents` tells of."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
