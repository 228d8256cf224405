"""PrefillPeers: which prefill service gets the next prompt.

By prefix affinity within a bound of load (k3svc.core.targets), among those that serve, have not failed or refused
lately and have not been tried for this prompt. The peers may change at any time; hand-offs under way keep theirs.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from k3svc.core.events import PrefillTarget
from k3svc.core.targets import Affinity, Report
from k3svc.engine.observer import UNOBSERVED, Observer
from k3svc.engine.ports import Clock, PrefillPeer

BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 5.0


@dataclass(kw_only=True, eq=False)
class _Member:
    """What is known of a peer."""

    peer: PrefillPeer
    failures: int = 0
    retry_at: float = 0.0
    is_down: bool = False
    """It said that it does not serve, or did not answer."""
    work: int = 0
    """Tokens of the prompts that are asked of it from here."""
    foreign_work: int = 0
    """Tokens that it had to do for others when it reported last."""
    chosen: int = 0
    """Prompts that it was given."""

    def state(self, now: float) -> str:
        if self.is_down:
            return "down"
        return "serving" if self.retry_at <= now else "busy"


class PrefillPeers:
    """Peers with back-off: one that failed is asked again when its back-off has passed, or when it reports to serve."""

    def __init__(
        self,
        peers: Sequence[PrefillPeer],
        clock: Clock,
        affinity: Affinity | None = None,
        observer: Observer = UNOBSERVED,
    ) -> None:
        self._clock = clock
        self._affinity = affinity or Affinity()
        self._observer = observer
        self._members: dict[str, _Member] = {}
        self._held: Counter[PrefillPeer] = Counter()
        self._turn = 0
        self.replace(peers)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    def states(self) -> tuple[PrefillTarget, ...]:
        """How the peers are now."""
        now = self._clock()
        return tuple(
            PrefillTarget(
                address=name,
                state=member.state(now),
                chosen=member.chosen,
                queued_tokens=member.work + member.foreign_work,
            )
            for name, member in self._members.items()
        )

    def replace(self, peers: Sequence[PrefillPeer]) -> None:
        """From now on prompts go to these; what is known of those that stay is kept."""
        known = self._members
        self._members = {}
        for peer in peers:
            member = known.get(peer.name)
            self._members[peer.name] = member if member is not None and member.peer is peer else _Member(peer=peer)

    def only(self, name: str) -> "PrefillPeers":
        """The peer of this name alone, with a back-off of its own; nobody when there is none."""
        named = [member.peer for member in self._members.values() if member.peer.name == name]
        return PrefillPeers(named, self._clock, self._affinity, self._observer)

    def pick(
        self,
        excluded: Collection[PrefillPeer] = (),
        *,
        prompt: Sequence[int] = (),
        tried: Collection[PrefillPeer] = (),
    ) -> tuple[PrefillPeer, float] | None:
        """The next peer of a prompt, and how many seconds to wait before it is asked (0 unless all are in back-off).
        None: there is nobody. Those `tried` before come last.
        """
        now = self._clock()
        allowed = [member for member in self._members.values() if member.peer not in excluded]
        if not allowed:
            return None
        ready = [member for member in allowed if member.state(now) == "serving"]
        if not ready:
            # A report may be old, so even who is down is asked rather than nobody.
            soonest = min(allowed, key=lambda m: (m.is_down, m.peer in tried, m.retry_at))
            wait_s = max(0.0, soonest.retry_at - now)
            if wait_s == 0:
                self._observer.prefill_chosen(soonest.peer.name, "last resort")
            return soonest.peer, wait_s
        fresh = [member for member in ready if member.peer not in tried] or ready
        self._turn += 1
        start = self._turn % len(fresh)
        work = {m.peer.name: m.work + m.foreign_work for m in (*fresh[start:], *fresh[:start])}
        name, why = self._affinity.choose(self._affinity.key(prompt), work, len(prompt))
        self._observer.prefill_chosen(name, why)
        return self._members[name].peer, 0.0

    def begin(self, peer: PrefillPeer, tokens: int) -> None:
        """A prompt is asked of the peer; `end` follows."""
        self._held[peer] += 1
        if (member := self._member(peer)) is not None:
            member.work += tokens
            member.chosen += 1

    def end(self, peer: PrefillPeer, tokens: int) -> None:
        self._held[peer] -= 1
        self._held += Counter()
        if (member := self._member(peer)) is not None:
            member.work -= tokens

    def holds(self, peer: PrefillPeer) -> bool:
        """Whether a prompt is asked of the peer now, which may have left."""
        return self._held[peer] > 0

    def succeeded(self, peer: PrefillPeer) -> None:
        if (member := self._member(peer)) is not None:
            member.failures, member.retry_at = 0, 0.0

    def failed(self, peer: PrefillPeer, retry_after_s: float | None = None) -> None:
        """Backs the peer off: for its own hint, else twice as long at each failure in a row. Hand-offs that break
        together, as when a peer dies, are one failure.
        """
        member, now = self._member(peer), self._clock()
        if member is None:
            return
        if retry_after_s is not None:
            member.retry_at = max(member.retry_at, now + retry_after_s)
        elif member.retry_at <= now:
            member.failures += 1
            member.retry_at = now + min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** (member.failures - 1))

    def report(self, peer: PrefillPeer, report: Report | None) -> None:
        """What the peer says of itself; None: it did not answer."""
        member = self._member(peer)
        if member is None:
            return
        was_down, member.is_down = member.is_down, report is None or not report.serving
        member.foreign_work = 0 if report is None else max(0, report.queued_tokens - member.work)
        if was_down and not member.is_down:
            member.failures, member.retry_at = 0, 0.0

    def _member(self, peer: PrefillPeer) -> _Member | None:
        member = self._members.get(peer.name)
        return member if member is not None and member.peer is peer else None
