"""PrefillPeers: which prefill service gets the next prompt. Round robin over those that answered lately."""

from collections.abc import Collection, Sequence

from k3svc.engine.ports import Clock, PrefillPeer

BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 5.0


class PrefillPeers:
    """A fixed list of peers with back-off; a peer that failed is asked again when its back-off has passed."""

    def __init__(self, peers: Sequence[PrefillPeer], clock: Clock) -> None:
        assert peers, "a decode service needs a prefill service"
        self._peers = list(peers)
        self._clock = clock
        self._next = 0
        self._failures = dict.fromkeys(range(len(peers)), 0)
        self._retry_at = dict.fromkeys(range(len(peers)), 0.0)

    def only(self, name: str) -> "PrefillPeers":
        """The peer of this name alone, with a back-off of its own. Raises KeyError when there is none."""
        named = [peer for peer in self._peers if peer.name == name]
        if not named:
            raise KeyError(name)
        return PrefillPeers(named, self._clock)

    def pick(self, excluded: Collection[PrefillPeer] = ()) -> tuple[PrefillPeer, float] | None:
        """The next peer, and how many seconds to wait before it is asked (0 unless all are in back-off). None: all are
        excluded.
        """
        now = self._clock()
        order = [(self._next + i) % len(self._peers) for i in range(len(self._peers))]
        order = [index for index in order if self._peers[index] not in excluded]
        if not order:
            return None
        ready = [index for index in order if self._retry_at[index] <= now]
        index = ready[0] if ready else min(order, key=lambda i: self._retry_at[i])
        self._next = (index + 1) % len(self._peers)
        return self._peers[index], max(0.0, self._retry_at[index] - now)

    def succeeded(self, peer: PrefillPeer) -> None:
        index = self._peers.index(peer)
        self._failures[index], self._retry_at[index] = 0, 0.0

    def failed(self, peer: PrefillPeer, retry_after_s: float | None = None) -> None:
        """Backs the peer off: for its own hint, else twice as long at each failure in a row. Hand-offs that break
        together, as when a peer dies, are one failure.
        """
        index, now = self._peers.index(peer), self._clock()
        if retry_after_s is not None:
            self._retry_at[index] = max(self._retry_at[index], now + retry_after_s)
        elif self._retry_at[index] <= now:
            self._failures[index] += 1
            self._retry_at[index] = now + min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** (self._failures[index] - 1))
