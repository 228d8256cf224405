import asyncio
from typing import Any

import pytest

from k3svc.engine.peers import PrefillPeers
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.discovery import Address, Discovery
from k3svc.rpc.prefill_targets import PrefillTargets


class Broken(Discovery):
    """Fails at one look as nobody expects, and finds another address after it."""

    def __init__(self) -> None:
        super().__init__(["127.0.0.1:1"])
        self.looks = 0

    async def refresh(self) -> tuple[Address, ...]:
        self.looks += 1
        if self.looks == 2:
            raise RuntimeError("a name server of another world")
        return (Address(target="127.0.0.1:1" if self.looks == 1 else "127.0.0.1:2"),)


async def test_a_look_that_fails_is_told_of_and_not_the_last(caplog: pytest.LogCaptureFixture):
    def make_peer(address: Address) -> GrpcPrefillPeer:
        return GrpcPrefillPeer(address.target, timeout_s=1.0, max_message_bytes=1 << 20)

    targets = PrefillTargets(Broken(), make_peer, refresh_s=0.001)
    peers = PrefillPeers(await targets.discover(), asyncio.get_running_loop().time)
    taken = asyncio.Event()
    replace = peers.replace

    def note(found: Any) -> None:
        replace(found)
        taken.set()

    peers.replace = note  # type: ignore[assignment]
    targets.start(peers)
    await asyncio.wait_for(taken.wait(), 30.0)
    await targets.stop()
    assert list(peers.names) == ["127.0.0.1:2"]
    assert [record.message for record in caplog.records if record.exc_info] == [
        "the prefill services are not followed; tried again in 0.001 s"
    ]
