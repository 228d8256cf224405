"""What `benchmarks.transfer` measures the hand-off path against: raw TCP, a shared-memory copy, Mooncake's TCP engine.

A sender function runs in one process and tells its port through a pipe, then its CPU seconds after each transfer; a
receiver function in another one gives a function that makes one transfer.
"""

import importlib
import mmap
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.clock import cpu_s
from k3svc.rpc.shm import FOLDER

MIB = 1 << 20
PIECE_BYTES = MIB
RING_PIECES = 16
MOONCAKE = Path(__file__).parents[1] / "build" / "peers" / "mooncake"
MOONCAKE_LIBRARIES = ("libibverbs1", "librdmacm1", "libnl-route-3-200", "libnl-3-200")


def pattern(num_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Bytes to send, aligned as pools are."""
    return (torch.arange(num_bytes, dtype=torch.int64) % 256).to(torch.uint8).numpy()


def send_raw(pipe: Connection, mib: int) -> None:
    source = pattern(mib * MIB).data
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    connection, _ = listener.accept()
    while connection.recv(1):
        for offset in range(0, source.nbytes, PIECE_BYTES):
            connection.sendall(source[offset : offset + PIECE_BYTES])
        pipe.send(cpu_s())


def receive_raw(port: int, mib: int) -> Callable[[], None]:
    target = memoryview(bytearray(mib * MIB))
    connection = socket.create_connection(("127.0.0.1", port))

    def pull() -> None:
        connection.sendall(b"x")
        done = 0
        while done < target.nbytes:
            done += connection.recv_into(target[done : done + PIECE_BYTES])

    return pull


def send_memcpy(pipe: Connection, mib: int) -> None:
    """Copies into a ring in shared memory; a byte on a socket says that a piece is there, one back that it was read."""
    source = pattern(mib * MIB)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    path = FOLDER / f"k3svc-bench-{port}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.posix_fallocate(file, 0, RING_PIECES * PIECE_BYTES)
    ring = np.frombuffer(mmap.mmap(file, RING_PIECES * PIECE_BYTES), np.uint8)
    pipe.send(port)
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    path.unlink()
    while connection.recv(1):
        room = RING_PIECES
        for number, offset in enumerate(range(0, source.nbytes, PIECE_BYTES)):
            if room == 0:
                room += len(connection.recv(RING_PIECES))
            begin = number % RING_PIECES * PIECE_BYTES
            np.copyto(ring[begin : begin + PIECE_BYTES], source[offset : offset + PIECE_BYTES])
            room -= 1
            connection.sendall(b"x")
        while room < RING_PIECES:
            room += len(connection.recv(RING_PIECES))
        pipe.send(cpu_s())


def receive_memcpy(port: int, mib: int) -> Callable[[], None]:
    target = np.zeros_like(pattern(mib * MIB))
    file = os.open(FOLDER / f"k3svc-bench-{port}", os.O_RDWR)
    ring = np.frombuffer(mmap.mmap(file, RING_PIECES * PIECE_BYTES), np.uint8)
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pull() -> None:
        connection.sendall(b"g")
        number = 0
        while number * PIECE_BYTES < target.nbytes:
            for _ in connection.recv(RING_PIECES):
                begin, offset = number % RING_PIECES * PIECE_BYTES, number * PIECE_BYTES
                np.copyto(target[offset : offset + PIECE_BYTES], ring[begin : begin + PIECE_BYTES])
                connection.sendall(b"r")
                number += 1

    return pull


def install_mooncake() -> str | None:
    """Installs it below build/, once; what went wrong, None when it is there."""
    if (MOONCAKE / "ready").exists():
        return None
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(MOONCAKE / "python")]
    shutil.rmtree(MOONCAKE, ignore_errors=True)
    MOONCAKE.mkdir(parents=True)
    try:
        subprocess.run([*pip, "mooncake-transfer-engine-non-cuda"], check=True)
        subprocess.run(["apt-get", "download", "-q", *MOONCAKE_LIBRARIES], check=True, cwd=MOONCAKE)  # noqa: S607  Debian has them
        for package in MOONCAKE.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package.name, "system"], check=True, cwd=MOONCAKE)  # noqa: S607  Debian has them
    except (OSError, subprocess.CalledProcessError) as error:
        return f"Mooncake does not install here: {error}"
    (MOONCAKE / "ready").touch()
    return None


def mooncake_environment() -> dict[str, str]:
    """Variables with which its library is found."""
    folders = [str(path) for path in (MOONCAKE / "system").glob("**/x86_64-linux-gnu")]
    return {
        "LD_LIBRARY_PATH": ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")]).strip(":"),
        "MC_LOG_LEVEL": "ERROR",
        "GLOG_minloglevel": "3",
    }


def _engine() -> Any:
    sys.path.insert(0, str(MOONCAKE / "python"))
    module = importlib.import_module("mooncake.engine")
    engine = module.TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("Mooncake does not initialize")
    return engine


def send_mooncake(pipe: Connection, mib: int) -> None:
    """One write into the memory of the receiver, which is the better of its ways."""
    engine, source = _engine(), pattern(mib * MIB)
    engine.register_memory(source.ctypes.data, source.nbytes)
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    connection, _ = listener.accept()
    peer, address = connection.recv(1024).decode().split()
    while connection.recv(1):
        status = engine.transfer_sync_write(peer, source.ctypes.data, int(address), source.nbytes)
        connection.sendall(bytes([abs(status)]))
        pipe.send(cpu_s())


def receive_mooncake(port: int, mib: int) -> Callable[[], None]:
    engine, target = _engine(), np.zeros(mib * MIB, np.uint8)
    target[:] = 1
    engine.register_memory(target.ctypes.data, target.nbytes)
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(f"127.0.0.1:{engine.get_rpc_port()} {target.ctypes.data}".encode())

    def pull() -> None:
        connection.sendall(b"x")
        if connection.recv(1) != b"\0" or target[-1] != 255 or not engine:
            raise RuntimeError("Mooncake did not transfer")

    return pull
