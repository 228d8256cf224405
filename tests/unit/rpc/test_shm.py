"""Records in shared memory: what was written is read, and what was overwritten or made up is not."""

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3svc.rpc import shm
from k3svc.rpc.shm import SEQUENCE_BYTES, TOKEN_BYTES, ShmReader, ShmRecord, ShmWriter

pytestmark = pytest.mark.skipif(not shm.FOLDER.is_dir(), reason="there is no shared memory file system here")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shm, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[ShmWriter, ShmReader]]:
    writer = ShmWriter(1000)
    reader = ShmReader(writer.name, writer.token)
    yield writer, reader
    writer.close()
    reader.close()


def test_the_real_file_system_keeps_an_object_that_has_lost_its_name():
    writer = ShmWriter(64)
    reader = ShmReader(writer.name, writer.token)
    writer.unlink()
    assert not (shm.FOLDER / writer.name).exists()
    record = writer.write([memoryview(b"abc"), memoryview(b"def")])
    assert record is not None
    assert bytes(reader.read(record) or b"") == b"abcdef"
    writer.close()
    reader.close()


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=60))
def test_unread_records_are_never_overwritten(steps: list[tuple[int, bool]]):
    writer = ShmWriter(1000)
    reader = ShmReader(writer.name, writer.token)
    unread: deque[tuple[ShmRecord, bytes]] = deque()
    for number, (size, reads) in enumerate(steps):
        data = bytes([number % 251]) * size
        record = writer.write([memoryview(data)])
        if record is not None:
            unread.append((record, data))
        else:
            assert sum(other.size + 2 * SEQUENCE_BYTES for other, _ in unread) + size + 2 * SEQUENCE_BYTES > 500
        if reads and unread:
            found, wanted = unread.popleft()
            assert bytes(reader.read(found) or b"") == wanted
            writer.release(found.sequence)
    for found, wanted in unread:
        assert bytes(reader.read(found) or b"") == wanted
    writer.close()
    reader.close()


def test_a_record_that_was_overwritten_or_made_up_is_not_read(pair: tuple[ShmWriter, ShmReader]):
    writer, reader = pair
    first = writer.write([memoryview(bytes(900))])
    assert first is not None
    assert writer.write([memoryview(bytes(900))]) is None
    writer.release(first.sequence)
    second = writer.write([memoryview(bytes(800))])
    assert second is not None
    assert reader.read(first) is None
    for lie in (
        ShmRecord(offset=0, size=10, sequence=2),
        ShmRecord(offset=second.offset, size=799, sequence=2),
        ShmRecord(offset=1 << 62, size=10, sequence=2),
        ShmRecord(offset=(1 << 64) - 1, size=10, sequence=2),
        ShmRecord(offset=second.offset, size=1 << 20, sequence=2),
        ShmRecord(offset=second.offset, size=800, sequence=3),
    ):
        assert reader.read(lie) is None
    assert reader.read(second) is not None


def test_an_object_that_is_cut_off_spoils_its_records_only(folder: Path, pair: tuple[ShmWriter, ShmReader]):
    writer, reader = pair
    record = writer.write([memoryview(bytes(500))])
    assert record is not None
    os.truncate(folder / writer.name, 100)
    assert reader.read(record) is None


def test_only_the_object_with_the_token_is_opened(folder: Path):
    writer = ShmWriter(100)
    (folder / "secret").write_bytes(b"s" * TOKEN_BYTES)
    link = f"k3svc-{'0' * 32}"
    (folder / link).symlink_to(folder / "secret")
    pipe = f"k3svc-{'1' * 32}"
    os.mkfifo(folder / pipe)
    for name, token in (
        (writer.name, bytes(TOKEN_BYTES)),
        (writer.name, b""),
        ("../secret", b"s" * TOKEN_BYTES),
        ("secret", b"s" * TOKEN_BYTES),
        (link, b"s" * TOKEN_BYTES),
        (pipe, writer.token),
        (f"k3svc-{'2' * 32}", writer.token),
        ("", writer.token),
    ):
        with pytest.raises(OSError):  # noqa: PT011  the words differ by system
            ShmReader(name, token)
    writer.close()
    writer.close()
    assert not (folder / writer.name).exists()
