"""Discovery: names of services become addresses, which may change while the process runs.

    10.0.0.7:50061           this address, for ever (a host name: gRPC resolves it, and connects to one address)
    dns:///prefill:50061     all addresses of the name, looked up again every few seconds
    file:///etc/prefill      the addresses in a file, one host:port a line, `#` begins a comment; read again on change

What was found last stays while a name cannot be resolved or a file cannot be read.
"""

import asyncio
import logging
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3svc.errors import ConfigError
from k3svc.rpc.files import WatchedFiles

DNS = "dns:///"
FILE = "file:"
RESOLVE_S = 5.0
"""Between two look-ups of a name."""
PATIENCE_S = 0.1
"""Longest wait for a look-up while there are addresses of an earlier one."""
EXPECTED = "host:port, dns:///HOST:PORT or file:PATH"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a service is."""

    target: str
    """host:port."""
    server_name: str = ""
    """Host that its certificate must have; empty: the one of `target`."""

    def channel_options(self) -> list[tuple[str, Any]]:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


class Discovery:
    """The addresses behind some names. Belongs to an event loop."""

    def __init__(self, names: Sequence[str], *, resolve_s: float = RESOLVE_S) -> None:
        """Raises ConfigError for a name of another form, or a file that cannot be used."""
        self._sources = [_source(name, resolve_s) for name in names]

    @property
    def is_static(self) -> bool:
        """Whether the addresses never change."""
        return all(type(source) is _Static for source in self._sources)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """As found last, each once."""
        return tuple(dict.fromkeys(address for source in self._sources for address in source.addresses))

    async def refresh(self) -> tuple[Address, ...]:
        """Looks again where it is time; the addresses."""
        await asyncio.gather(*(source.refresh() for source in self._sources))
        return self.addresses


class _Static:
    def __init__(self, target: str) -> None:
        self.addresses: tuple[Address, ...] = (Address(target=target),)

    async def refresh(self) -> None:
        pass


class _File(_Static):
    def __init__(self, path: Path) -> None:
        self._file = WatchedFiles([path], lambda data: _parse_lines(path, data))
        self.addresses = self._file.get()

    async def refresh(self) -> None:
        self.addresses = self._file.get()


class _Dns(_Static):
    def __init__(self, target: str, resolve_s: float) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._resolve_s = resolve_s
        self._next = 0.0
        self._looking: asyncio.Task[None] | None = None
        self.addresses = ()

    async def refresh(self) -> None:
        loop = asyncio.get_running_loop()
        if self._looking is None or self._looking.done():
            if loop.time() < self._next:
                return
            self._next = loop.time() + self._resolve_s
            self._looking = loop.create_task(self._look_up())
        # A name server that does not answer shall not stop those who have addresses to go on with.
        await asyncio.wait({self._looking}, timeout=PATIENCE_S if self.addresses else None)

    async def _look_up(self) -> None:
        host = self._host.strip("[]")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, int(self._port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label that no name may have
            log.warning("%s cannot be resolved: %s", host, error)
            return
        ips = {str(place[0]) for *_, place in found}
        targets = {f"[{ip}]:{self._port}" if ":" in ip else f"{ip}:{self._port}" for ip in ips}
        if targets != {address.target for address in self.addresses}:
            # Callers start with the first one, and not all of them shall start with the same.
            ordered = random.sample(sorted(targets), len(targets))
            self.addresses = tuple(Address(target=target, server_name=host) for target in ordered)


def is_target(text: str) -> bool:
    """Whether it reads host:port, with an IPv6 address in brackets."""
    host, _, port = text.rpartition(":")
    # A scheme of gRPC would pass through to a channel, which then stands for several services at once.
    is_host = bool(host) and "/" not in host and (":" not in host or (host[0], host[-1]) == ("[", "]"))
    return is_host and port.isascii() and port.isdigit() and 0 < int(port) < 65536


def is_name(text: str) -> bool:
    """Whether it is of one of the forms that `Discovery` takes."""
    return text.startswith(FILE) or is_target(text.removeprefix(DNS))


def _source(name: str, resolve_s: float) -> _Static:
    if not is_name(name):
        raise ConfigError(f"address: got {name!r}; allowed: {EXPECTED}")
    if name.startswith(FILE):
        return _File(Path(name.removeprefix("file://").removeprefix(FILE)))
    return _Dns(name.removeprefix(DNS), resolve_s) if name.startswith(DNS) else _Static(name)


def _parse_lines(path: Path, data: bytes) -> tuple[Address, ...]:
    lines = [line.partition("#")[0].strip() for line in data.decode(errors="replace").splitlines()]
    for number, line in enumerate(lines, start=1):
        if line and not is_target(line):
            raise ConfigError(f"{path}, line {number}: got {line!r}; expected host:port")
    return tuple(Address(target=line) for line in lines if line)
