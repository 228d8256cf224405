"""Payloads through POSIX shared memory: one writer and one reader on a host, and offsets in the messages between them.

The object is a file in the host's shared memory file system: 16 bytes that only its maker knows, by which the reader
sees that both look at the same one, then a ring of records, each (sequence, payload, sequence) with the sequence as 8
little-endian bytes. Both sides read and write it as a file, so that nothing the other one does to it, truncation
included, can do more than spoil a payload; a record without its sequence at both ends was overwritten.

The name goes as soon as both sides have the object open, so that the memory ends with the last of them, however they
end. The maker holds a lock on it until then: `sweep` takes names away whose maker was killed before.
"""

import fcntl
import os
import re
import secrets
import stat
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108  the objects have names that cannot be guessed
TOKEN_BYTES = 16
SEQUENCE_BYTES = 8
SWEEP_AGE_S = 60.0
"""An object of this age that nobody has locked was left by a process that was killed."""
_NAME = re.compile(r"k3svc-[0-9a-f]{32}")


class ShmObject:
    """An object of `size` bytes that this process made, and its token in front. Raises OSError where there is no shared
    memory.
    """

    def __init__(self, size: int) -> None:
        self.name = f"k3svc-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._path = FOLDER / self.name
        self.file = -1
        self.file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self.file, size)
            os.pwrite(self.file, self.token, 0)
        except OSError:
            self.close()
            raise

    def unlink(self) -> None:
        """Takes the name away; who has opened the object keeps it. Safe to repeat."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Safe to repeat."""
        self.unlink()
        if self.file >= 0:
            # A mapping holds the file open, and so the lock.
            fcntl.flock(self.file, fcntl.LOCK_UN)
            os.close(self.file)
            self.file = -1

    def __del__(self) -> None:
        # Made in a thread for a call that was cancelled meanwhile.
        self.close()


def open_object(name: str, token: bytes, flags: int) -> int:
    """File descriptor of somebody else's object. Raises OSError when it cannot be opened, or is another one."""
    if not _NAME.fullmatch(name) or len(token) != TOKEN_BYTES:
        raise OSError("no name of a shared memory object")
    file = os.open(FOLDER / name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    is_file = stat.S_ISREG(os.fstat(file).st_mode)
    if not is_file or os.pread(file, TOKEN_BYTES, 0) != token:
        os.close(file)
        raise OSError("another object of the same name")
    return file


def sweep() -> None:
    """Takes the names of objects away whose maker was killed before the other side had them open."""
    if not FOLDER.is_dir():
        return
    for path in FOLDER.iterdir():
        if not _NAME.fullmatch(path.name):
            continue
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(file).st_mtime > SWEEP_AGE_S:
                    path.unlink()
            finally:
                os.close(file)


@dataclass(frozen=True, kw_only=True)
class ShmRecord:
    """Where a payload lies (k3svc.v1.ShmPayload)."""

    offset: int
    size: int
    sequence: int


class ShmWriter:
    """Owns an object of `size` bytes. Raises OSError where there is no shared memory."""

    def __init__(self, size: int) -> None:
        self._object = ShmObject(TOKEN_BYTES + size)
        self.name, self.token = self._object.name, self._object.token
        self._end = TOKEN_BYTES + size
        self._next = TOKEN_BYTES
        self._sequence = 0
        self._unread: deque[ShmRecord] = deque()

    def write(self, parts: Sequence[memoryview]) -> ShmRecord | None:
        """A record of all parts; None when unread records leave no room."""
        size = sum(part.nbytes for part in parts)
        offset = self._find(size + 2 * SEQUENCE_BYTES)
        if offset is None:
            return None
        self._sequence += 1
        mark = self._sequence.to_bytes(SEQUENCE_BYTES, "little")
        try:
            written = os.pwritev(self._object.file, [b"".join((mark, *parts, mark))], offset)
        except OSError:
            return None
        if written != size + 2 * SEQUENCE_BYTES:
            return None
        record = ShmRecord(offset=offset, size=size, sequence=self._sequence)
        self._unread.append(record)
        self._next = offset + size + 2 * SEQUENCE_BYTES
        return record

    def release(self, sequence: int) -> None:
        """Records up to this one have been read."""
        while self._unread and self._unread[0].sequence <= sequence:
            self._unread.popleft()

    def unlink(self) -> None:
        """Takes the name away; who has opened the object keeps it. Safe to repeat."""
        self._object.unlink()

    def close(self) -> None:
        """Safe to repeat."""
        self._object.close()

    def _find(self, size: int) -> int | None:
        """The first byte of free room, after the newest record or, past the end, at the beginning."""
        if not self._unread:
            return TOKEN_BYTES if TOKEN_BYTES + size <= self._end else None
        oldest = self._unread[0].offset
        if self._next > oldest:
            if self._next + size <= self._end:
                return self._next
            return TOKEN_BYTES if TOKEN_BYTES + size <= oldest else None
        return self._next if self._next + size <= oldest else None


class ShmReader:
    """Somebody else's object, read only."""

    def __init__(self, name: str, token: bytes) -> None:
        """Raises OSError when it cannot be opened, or is another one."""
        self._file = open_object(name, token, os.O_RDONLY)

    def read(self, record: ShmRecord) -> memoryview | None:
        """A copy of the payload; None when it is not there."""
        mark = record.sequence.to_bytes(SEQUENCE_BYTES, "little")
        try:
            data = os.pread(self._file, record.size + 2 * SEQUENCE_BYTES, record.offset)
        except (OSError, OverflowError):
            return None
        if len(data) != record.size + 2 * SEQUENCE_BYTES or not (data.startswith(mark) and data.endswith(mark)):
            return None
        return memoryview(data)[SEQUENCE_BYTES:-SEQUENCE_BYTES]

    def close(self) -> None:
        """Safe to repeat."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
