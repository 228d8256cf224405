"""PrefillTargets: the prefill services of a decode service, as they come, go and report."""

import asyncio
import logging
from collections.abc import Callable

from k3svc.engine.peers import PrefillPeers
from k3svc.rpc.clients import RELEASE_TIMEOUT_S, GrpcPrefillPeer
from k3svc.rpc.discovery import Address, Discovery

PROBE_TIMEOUT_S = 5.0
"""Longer than a busy event loop takes: a peer that is called dead in error costs its prefixes."""

log = logging.getLogger(__name__)


class PrefillTargets:
    """Keeps the peers of an engine in step with discovery and with what they report. Belongs to an event loop."""

    def __init__(
        self, discovery: Discovery, make_peer: Callable[[Address], GrpcPrefillPeer], *, refresh_s: float
    ) -> None:
        """`refresh_s`: between two looks."""
        self._discovery = discovery
        self._make_peer = make_peer
        self._refresh_s = refresh_s
        self._peers: dict[Address, GrpcPrefillPeer] = {}
        self._leaving: dict[GrpcPrefillPeer, float] = {}
        """Peers that are no longer chosen, and when a hand-off last used them."""
        self._following: asyncio.Task[None] | None = None
        self._asking: dict[GrpcPrefillPeer, asyncio.Task[None]] = {}

    async def discover(self) -> list[GrpcPrefillPeer]:
        """Looks which there are; may be none yet."""
        addresses = await self._discovery.refresh()
        now = asyncio.get_running_loop().time()
        for address in [address for address in self._peers if address not in addresses]:
            log.info("prefill service %s has left", address.target)
            self._leaving[self._peers.pop(address)] = now
        for address in addresses:
            if address not in self._peers:
                log.info("prefill service %s has come", address.target)
                self._peers[address] = self._make_peer(address)
        return [self._peers[address] for address in addresses]

    def start(self, chosen: PrefillPeers) -> None:
        """Keeps `chosen`, which was made of what `discover` found, up to date from now on."""
        self._following = asyncio.create_task(self._follow(chosen))

    async def stop(self) -> None:
        """Closes all peers."""
        tasks = [task for task in (self._following, *self._asking.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in (*self._peers.values(), *self._leaving)))

    async def _follow(self, chosen: PrefillPeers) -> None:
        while True:
            try:
                await self._look(chosen)
            except Exception:
                # A service that no longer follows its targets would go on with those of today and never say so.
                log.exception("the prefill services are not followed; tried again in %g s", self._refresh_s)
            await asyncio.sleep(self._refresh_s)

    async def _look(self, chosen: PrefillPeers) -> None:
        peers = await self.discover()
        chosen.replace(peers)
        for peer in peers:
            # One that is slow to answer shall not keep the others waiting.
            if peer not in self._asking:
                self._asking[peer] = asyncio.create_task(self._ask(chosen, peer))
        await self._close_unused(chosen)

    async def _ask(self, chosen: PrefillPeers, peer: GrpcPrefillPeer) -> None:
        try:
            chosen.report(peer, await peer.report(PROBE_TIMEOUT_S))
        finally:
            del self._asking[peer]

    async def _close_unused(self, chosen: PrefillPeers) -> None:
        now = asyncio.get_running_loop().time()
        for peer, used in list(self._leaving.items()):
            if chosen.holds(peer):
                self._leaving[peer] = now
            # A hand-off that has ended releases its state yet.
            elif now - used > 2 * RELEASE_TIMEOUT_S:
                del self._leaving[peer]
                await peer.close()
