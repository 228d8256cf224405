"""The ring of a hand-off: what goes in comes out, room is made by reading alone, and nothing stays behind."""

import asyncio
import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k3svc.errors import TransferError
from k3svc.rpc import shm, shm_ring
from k3svc.rpc.shm import ShmObject, sweep
from k3svc.rpc.shm_ring import KeptRings, RememberedRings, RingReader, RingWriter
from k3svc.v1 import prefill_service_pb2 as pb

pytestmark = pytest.mark.skipif(not shm.FOLDER.is_dir(), reason="this system has no /dev/shm")

SIZE = 3 * 4096


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own in shared memory, so that objects of other processes neither come nor go in it."""
    with tempfile.TemporaryDirectory(dir=shm.FOLDER) as made:
        for module in (shm, shm_ring):
            monkeypatch.setattr(module, "FOLDER", Path(made))
        yield Path(made)


def ends(size: int = SIZE) -> tuple[RingReader, RingWriter]:
    reader = RingReader(size)
    writer = RingWriter(reader.name, reader.token, size)
    reader.is_shared = True
    return reader, writer


def names() -> set[str]:
    return {path.name for path in shm.FOLDER.iterdir()}


def pieces(count: int, size: int) -> list[bytes]:
    return [bytes((number * 31 + 7 * i) % 251 for i in range(size)) for number in range(count)]


def read(reader: RingReader, position: int, size: int) -> bytes:
    return bytes(reader.span(position, size))


def test_frames_go_round_the_ring_whole() -> None:
    reader, writer = ends()
    for data in pieces(11, 5000):
        placed = writer.put(memoryview(data))
        assert placed is not None
        assert placed.position % SIZE + placed.nbytes <= SIZE
        assert read(reader, placed.position, placed.nbytes) == data
        reader.make_room()
    reader.close()


def test_nothing_is_overwritten_before_it_was_read() -> None:
    reader, writer = ends()
    first, second, third = pieces(3, 5000)
    positions = [writer.put(memoryview(data)) for data in (first, second, third)]
    assert positions[0] is not None and positions[1] is not None
    assert positions[2] is None
    assert read(reader, positions[0].position, 5000) == first
    reader.make_room()
    placed = writer.put(memoryview(third))
    assert placed is not None
    assert read(reader, positions[1].position, 5000) == second
    assert read(reader, placed.position, 5000) == third
    reader.close()


def test_what_never_fits_travels_in_its_frame() -> None:
    reader, writer = ends()
    assert writer.put(memoryview(bytes(SIZE + 1))) is None
    assert writer.put(memoryview(bytes(SIZE))) is not None
    reader.close()


async def test_room_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_ring, "RING_BYTES", SIZE)
    reader, writer = ends()
    placed = writer.put(memoryview(bytes(SIZE)))
    assert placed is not None
    waiting = asyncio.ensure_future(writer.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    reader.span(placed.position, SIZE)
    reader.make_room()
    await waiting
    assert writer.put(memoryview(bytes(SIZE))) is not None
    reader.close()


async def test_there_is_room_wherever_reading_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_ring, "RING_BYTES", SIZE)
    for size in (1, SIZE // 2 - 1, SIZE // 2, SIZE // 2 + 1, SIZE - 1, SIZE):
        reader, writer = ends()
        placed = writer.put(memoryview(bytes(size)))
        assert placed is not None
        reader.span(placed.position, size)
        reader.make_room()
        waiting = writer.room()
        with pytest.raises(StopIteration):
            waiting.send(None)
        reader.close()


async def test_a_ring_that_was_made_for_all_is_not_waited_for() -> None:
    reader, writer = ends()
    assert writer.put(memoryview(bytes(SIZE))) is not None
    with pytest.raises(StopIteration):
        writer.room().send(None)
    reader.close()


@pytest.mark.parametrize(("position", "nbytes"), [(0, SIZE + 1), (SIZE - 1, 2), (1 << 63, 8), (0, 1 << 63)])
def test_positions_that_cannot_be_are_refused(position: int, nbytes: int) -> None:
    reader, _ = ends()
    with pytest.raises(TransferError, match="of a ring of"):
        reader.span(position, nbytes)
    reader.close()


def test_a_ring_that_the_other_side_does_not_see_is_not_read() -> None:
    reader = RingReader(SIZE)
    with pytest.raises(TransferError, match="of a ring of 0"):
        reader.span(0, 1)
    reader.close()


def test_a_lie_about_what_was_read_makes_no_room() -> None:
    reader, writer = ends()
    writer.put(memoryview(bytes(SIZE)))
    reader._read = 1 << 40
    reader.make_room()
    assert writer.put(memoryview(bytes(1))) is None
    reader.close()


def test_names_are_gone_once_both_have_the_ring() -> None:
    before = names()
    reader, writer = ends()
    assert names() == before
    assert writer.put(memoryview(b"abc")) is not None
    reader.close()
    lonely = RingReader(SIZE)
    assert len(names() - before) == 1
    lonely.close()
    assert names() == before


async def test_only_a_ring_that_is_seen_here_is_used() -> None:
    reader, rings = RingReader(SIZE), RememberedRings()
    offers: list[dict[str, Any]] = [
        {"name": reader.name, "token": bytes(16), "size": SIZE},
        {"name": reader.name, "token": reader.token, "size": SIZE + 4096},
        {"name": reader.name, "token": reader.token, "size": 0},
        {"name": "k3svc-" + "0" * 32, "token": reader.token, "size": SIZE},
        {"name": "../" + reader.name, "token": reader.token, "size": SIZE},
        {},
    ]
    for offer in offers:
        assert rings.open(pb.ShmObject(**offer)) is None, offer
    assert rings.open(None) is None
    assert rings.open(pb.ShmObject(name=reader.name, token=reader.token, size=SIZE)) is not None
    reader.close()


def offer(reader: RingReader) -> pb.ShmObject:
    return pb.ShmObject(name=reader.name, token=reader.token, size=reader.size)


async def test_a_ring_serves_one_hand_off_after_another_on_both_sides() -> None:
    kept, remembered = KeptRings(), RememberedRings()
    reader = await kept.take(SIZE)
    writer = remembered.open(offer(reader))
    assert writer is not None
    for data in pieces(7, 5000):
        reader.is_shared = True
        placed = writer.put(memoryview(data))
        assert placed is not None
        assert read(reader, placed.position, 5000) == data
        reader.make_room()
        kept.give_back(reader)
        assert await kept.take(5000) is reader
        assert not reader.is_shared, "the service may have forgotten it"
        assert remembered.open(offer(reader)) is writer
    kept.give_back(reader)
    larger = await kept.take(SIZE + 1)
    assert larger is not reader
    assert writer.is_forgotten, "a ring that is too small is given up"
    larger.close()


async def test_a_remembered_ring_is_not_given_to_who_does_not_know_it() -> None:
    reader, remembered = RingReader(SIZE), RememberedRings()
    assert remembered.open(offer(reader)) is not None
    assert remembered.open(pb.ShmObject(name=reader.name, token=bytes(16), size=SIZE)) is None
    reader.close()


async def test_unused_rings_are_few_and_end_with_their_keeper() -> None:
    kept, remembered = KeptRings(), RememberedRings()
    readers = [await kept.take(SIZE) for _ in range(shm_ring.KEPT_RINGS + 1)]
    writers = [remembered.open(offer(reader)) for reader in readers]
    for reader in readers:
        kept.give_back(reader)
    assert [writer is not None and writer.is_forgotten for writer in writers] == [False, False, True]
    kept.close()
    assert all(writer is not None and writer.is_forgotten for writer in writers)


async def test_rings_that_nobody_uses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_ring, "KEPT_S", 0.0)
    monkeypatch.setattr(shm_ring, "FORGET_PERIOD_S", 0.0)
    kept, remembered = KeptRings(), RememberedRings()
    reader = await kept.take(SIZE)
    used = await kept.take(SIZE)
    writer = remembered.open(offer(reader))
    assert writer is not None and remembered.open(offer(used)) is not None
    kept.give_back(reader)
    while remembered.names != {used.name}:
        await asyncio.sleep(0)
    assert writer.is_forgotten
    monkeypatch.setattr(shm_ring, "REMEMBERED_S", -1.0)
    while remembered.names:
        await asyncio.sleep(0)
    used.close()


async def test_memory_of_rings_ends_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_ring, "KEPT_RINGS", 1)
    monkeypatch.setattr(shm_ring, "KEPT_S", 0.0)
    monkeypatch.setattr(shm_ring, "FORGET_PERIOD_S", 0.0)
    monkeypatch.setattr(shm_ring, "REMEMBERED_RINGS", 1)
    kept, remembered = KeptRings(), RememberedRings()
    threads: list[int] = []
    watched = []
    for ring in [await kept.take(SIZE), await kept.take(SIZE)]:
        writer = remembered.open(offer(ring))
        assert writer is not None
        for end in (ring, writer):
            watched.append(weakref.ref(end._memory.obj, lambda _: threads.append(threading.get_ident())))
        del writer, end
        kept.give_back(ring)
    del ring
    while len(threads) < 4:
        await asyncio.sleep(0.001)
    assert threading.get_ident() not in threads
    kept.close()


async def test_prefill_remembers_no_more_rings_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_ring, "REMEMBERED_RINGS", 2)
    remembered = RememberedRings()
    readers = [RingReader(4096) for _ in range(3)]
    assert all(remembered.open(offer(reader)) is not None for reader in readers)
    assert remembered.names == {reader.name for reader in readers[1:]}
    for reader in readers:
        reader.close()


def test_a_full_file_system_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names()

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space"):
        RingReader(SIZE)
    assert names() == before


async def test_a_ring_is_no_larger_than_what_it_is_made_for() -> None:
    kept = KeptRings()
    ring = await kept.take(5000)
    assert ring.size == 8192
    ring.close()
    large = await kept.take(1 << 40)
    assert large.size == shm_ring.RING_BYTES
    large.close()


LOST = """
import os, signal, sys
from pathlib import Path
from k3svc.rpc import shm
shm.FOLDER = Path(sys.argv[1])
made = shm.ShmObject(8192)
print(made.name, made.token.hex(), flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_keeper_is_noticed(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOST, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        name, token = process.stdout.readline().decode().split()
        writer = RingWriter(name, bytes.fromhex(token), 4096)
        assert not writer.is_forgotten
        process.stdin.write(b"x")
        process.stdin.close()
        assert process.wait() == -9
    assert writer.is_forgotten
    assert name not in names()


KILLED = """
import os, signal, sys
from pathlib import Path
from k3svc.rpc import shm
shm.FOLDER = Path(sys.argv[2])
made = shm.ShmObject(8192)
if sys.argv[1] == "opened":
    made.unlink()
print(made.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["opened", "offered"])
def test_a_killed_process_leaves_nothing(when: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = subprocess.run(
        [sys.executable, "-c", KILLED, when, folder], stdout=subprocess.PIPE, text=True, check=False
    )
    assert result.returncode == -9
    name = result.stdout.strip()
    assert (name in names()) is (when == "offered")
    sweep()
    assert (name in names()) is (when == "offered")
    monkeypatch.setattr(shm, "SWEEP_AGE_S", -1.0)
    sweep()
    assert name not in names()


def test_sweeping_spares_objects_that_live(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    living = ShmObject(4096)
    old = time.time() - 3600
    os.utime(folder / living.name, (old, old))
    sweep()
    assert living.name in names()
    living.close()
    monkeypatch.setattr(shm, "FOLDER", Path("/nowhere"))
    sweep()
