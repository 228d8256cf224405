import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from k3svc.errors import ConfigError
from k3svc.rpc.discovery import Address, Discovery


def targets(addresses: tuple[Address, ...]) -> list[str]:
    return [address.target for address in addresses]


async def test_a_list_never_changes():
    discovery = Discovery(["a:1", "[::1]:2", "a:1"])
    assert discovery.is_static
    assert targets(discovery.addresses) == targets(await discovery.refresh()) == ["a:1", "[::1]:2"]
    assert discovery.addresses[0].channel_options() == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "host",
        ":1",
        "host:0",
        "host:65536",
        "host:x",
        "dns:host:1",
        "dns:///host",
        "xds:///prefill",
        "ipv4:1.2.3.4:5",
    ],
)
def test_other_forms_are_refused(name: str):
    with pytest.raises(ConfigError, match=r"host:port, dns:///HOST:PORT or file:PATH"):
        Discovery([name])


async def test_a_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "targets"
    path.write_text("# prefill\na:1\n\nb:2  # the new one\n")
    discovery = Discovery([f"file:{path}", "c:3"])
    assert not discovery.is_static
    assert targets(discovery.addresses) == ["a:1", "b:2", "c:3"]
    path.write_text("b:2\nd:4\n")
    assert targets(await discovery.refresh()) == ["b:2", "d:4", "c:3"]
    path.write_text("b:2\nnonsense\n")
    with caplog.at_level(logging.WARNING):
        assert targets(await discovery.refresh()) == ["b:2", "d:4", "c:3"]
    assert "line 2: got 'nonsense'" in caplog.text
    replaced = tmp_path / "next"
    replaced.write_text("")
    replaced.replace(path)
    assert targets(await discovery.refresh()) == ["c:3"], "an empty file is an answer"
    path.unlink()
    assert targets(await discovery.refresh()) == ["c:3"]


def test_a_file_that_is_not_there_is_told_at_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read"):
        Discovery([f"file:{tmp_path / 'none'}"])
    (tmp_path / "slashes").write_text("a:1")
    assert targets(Discovery([f"file://{tmp_path / 'slashes'}"]).addresses) == ["a:1"]


class Resolver:
    """Stands for the loop's look-up of names."""

    def __init__(self) -> None:
        self.ips: list[str] | None = []
        self.asked = 0
        self.answers = asyncio.Event()
        """Not set: it does not answer."""
        self.answers.set()

    async def __call__(self, host: str, port: int, **kind: Any) -> list[Any]:
        assert (host, port) == ("prefill", 50061)
        self.asked += 1
        await self.answers.wait()
        if self.ips is None:
            raise socket.gaierror("Name or service not known")
        return [(None, None, 6, "", (ip, port, 0, 0) if ":" in ip else (ip, port)) for ip in self.ips for _ in range(2)]


async def test_all_addresses_of_a_name_are_followed(monkeypatch: pytest.MonkeyPatch):
    resolver = Resolver()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolver)
    discovery = Discovery(["dns:///prefill:50061"], resolve_s=0.0)
    assert not discovery.is_static
    assert discovery.addresses == ()
    resolver.ips = None
    assert await discovery.refresh() == ()
    resolver.ips = ["10.0.0.1", "fd00::2"]
    found = await discovery.refresh()
    assert sorted(targets(found)) == ["10.0.0.1:50061", "[fd00::2]:50061"]
    assert found[0].channel_options() == [("grpc.ssl_target_name_override", "prefill")]
    assert await discovery.refresh() == found, "the order stays while nothing changes"
    resolver.ips = None
    assert await discovery.refresh() == found, "what was found last stays"
    resolver.ips = ["10.0.0.3"]
    assert targets(await discovery.refresh()) == ["10.0.0.3:50061"]


async def test_a_name_is_looked_up_no_more_often_than_asked_for(monkeypatch: pytest.MonkeyPatch):
    resolver = Resolver()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolver)
    discovery = Discovery(["dns:///prefill:50061"], resolve_s=1000.0)
    for _ in range(5):
        await discovery.refresh()
    assert resolver.asked == 1


async def test_a_name_server_that_hangs_stops_nobody(monkeypatch: pytest.MonkeyPatch):
    resolver = Resolver()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolver)
    discovery = Discovery(["dns:///prefill:50061"], resolve_s=0.0)
    resolver.ips = ["10.0.0.1"]
    found = await discovery.refresh()
    resolver.ips = ["10.0.0.2"]
    resolver.answers.clear()
    assert await discovery.refresh() == found
    assert await discovery.refresh() == found
    assert resolver.asked == 2, "one look-up at a time"
    resolver.answers.set()
    assert targets(await discovery.refresh()) == ["10.0.0.2:50061"]


async def test_a_real_look_up():
    found = await Discovery(["dns:///localhost:50061"]).refresh()
    assert set(targets(found)) <= {"127.0.0.1:50061", "[::1]:50061"}
    assert found


async def test_a_name_that_no_resolver_takes_is_told_of(caplog: pytest.LogCaptureFixture):
    assert await Discovery(["dns:///a..b:50061"]).refresh() == ()
    assert "a..b cannot be resolved" in caplog.text
