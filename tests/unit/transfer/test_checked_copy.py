"""Copies with a checksum, in one pass and in two, against the package crc32c and plain slices."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from k3svc.errors import BackendError
from k3svc.ops.cpu import library
from k3svc.transfer import checked_copy
from k3svc.transfer.checked_copy import FEW_BYTES, PIECE_BYTES, copy_in, copy_out

LANES = 768
SIZES = [*range(18), LANES - 1, LANES, LANES + 1, 2 * LANES + 23, 4096, FEW_BYTES - 1, FEW_BYTES, PIECE_BYTES + 5]


@pytest.fixture(params=["one pass", "two passes"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    checked_copy._native.cache_clear()
    if request.param == "two passes":

        def missing() -> None:
            raise BackendError("it is not built")

        monkeypatch.setattr(checked_copy, "load_checked_copy", missing)
    elif checked_copy._native() is None:
        pytest.skip("the library of the cpu backend is not built here")
    yield request.param
    checked_copy._native.cache_clear()


def random_bytes(count: int) -> bytes:
    return np.random.default_rng(count).bytes(count)


def test_the_checksum_is_that_of_the_standard(passes: str) -> None:
    del passes
    # RFC 3720 B.4
    vectors = {bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E, b"123456789": 0xE3069283}
    for data, checksum in vectors.items():
        target = memoryview(bytearray(len(data)))
        assert copy_in(memoryview(data), target) == checksum
        assert copy_out(memoryview(data), target) == checksum


@pytest.mark.parametrize("size", SIZES)
def test_bytes_and_checksum_are_right_and_nothing_beside_is_touched(passes: str, size: int) -> None:
    del passes
    data = random_bytes(size + 8)
    for source_skip in (0, 1, 7):
        for target_skip in (0, 3, 8, 32):
            source = memoryview(data)[source_skip : source_skip + size]
            for copy in (copy_in, copy_out):
                memory = bytearray(b"\xa5" * (size + 64))
                assert copy(source, memoryview(memory)[target_skip : target_skip + size]) == crc32c(bytes(source))
                assert memory[target_skip : target_skip + size] == source
                assert set(memory[:target_skip] + memory[target_skip + size :]) == {0xA5}


def test_a_checksum_goes_on_over_pieces(passes: str) -> None:
    del passes
    data = random_bytes(5000)
    target = memoryview(bytearray(5000))
    checksum = 0
    for begin, end in ((0, 1), (1, 777), (777, 3333), (3333, 5000)):
        checksum = copy_in(memoryview(data)[begin:end], target[begin:end], checksum)
    assert checksum == crc32c(data)
    assert target == data


def test_sizes_must_agree(passes: str) -> None:
    del passes
    for copy in (copy_in, copy_out):
        with pytest.raises(ValueError, match="9 bytes to copy to 8"):
            copy(memoryview(bytes(9)), memoryview(bytearray(8)))


def test_what_is_checked_is_what_has_landed(passes: str) -> None:
    """While another thread writes into the source, as another process may."""
    del passes
    source, target = bytearray(1 << 20), memoryview(bytearray(1 << 20))
    stops = threading.Event()

    def disturb() -> None:
        view, value = np.frombuffer(source, np.uint8), 0
        while not stops.is_set():
            value = (value + 1) % 256
            view[:] = value

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(20):
            assert copy_in(memoryview(source), target) == crc32c(target)
    finally:
        stops.set()
        thread.join()


@pytest.mark.parametrize(("content", "reason"), [(None, "is not built"), (b"no library", "cannot load")])
def test_two_passes_are_told_of_once(
    content: bytes | None,
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "lib.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(library, "LIBRARY_PATH", path)
    checked_copy._native.cache_clear()
    checked_copy.announce()
    checked_copy.announce()
    checked_copy._native.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith("hand-offs copy and check state in two passes: ")
    assert reason in record.getMessage() and "python -m k3svc.ops.cpu" in record.getMessage()
