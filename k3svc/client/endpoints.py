"""Endpoints: the decode services that a client may use, how they are, and which gets the next request.

Requests go to them in proportion to their free room (k3svc.core.targets), by what they reported last and what was sent
since. While requests are sent, all are asked again every `Balance.refresh_s`. One that drains, does not answer or
refused lately is left out while there are others.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from k3svc.core.targets import Report, WeightedTurns, room
from k3svc.errors import ConfigError, InvalidRequest, K3svcError, ResourceExhausted, Unavailable
from k3svc.rpc.discovery import EXPECTED, Address, Discovery, is_name

IDLE_PERIODS = 5
"""Looks without a request after which a client stops looking."""
DOWN_S = 1.0
"""How long an endpoint whose call failed is left out, unless it says before that it serves."""

MAX_LEFT = 64
"""Endpoints that have left whose calls are still told of."""

log = logging.getLogger(__name__)

Ask = Callable[[Address], Awaitable[Report | None]]
"""The report of an endpoint; None: it does not answer."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How a client spreads its requests."""

    refresh_s: float = 1.0
    """Between two looks at the endpoints: which there are, and how much room they have. 0: only at the start, and every
    endpoint counts the same."""
    shuffle: bool = True
    """Begin anywhere, so that many short clients do not all begin with the first endpoint; false: with the first."""
    resolve_s: float = 5.0
    """Between two look-ups of a name of dns:///."""


@dataclass(frozen=True, kw_only=True)
class EndpointState:
    """What a client knows of an endpoint."""

    endpoint: str
    state: str
    """serving, full, draining, down, or unknown: it has not been asked yet."""
    chosen: int
    """Calls that went there."""
    running: int
    """Of them, those that have not ended."""


@dataclass(kw_only=True, eq=False)
class _Known:
    address: Address
    draw: float
    """Of those with the same room, the least comes first."""
    report: Report | None = None
    new: int = 0
    """Calls since the report."""
    chosen: int = 0
    running: int = 0
    down_until: float = 0.0
    full_until: float = 0.0
    asking: "asyncio.Task[None] | None" = None
    """A look at it that has not ended."""

    def state(self, now: float) -> str:
        if self.down_until > now:
            return "down"
        if self.report is not None and not self.report.serving:
            return "draining"
        if self.full_until > now:
            return "full"
        return "unknown" if self.report is None else "serving"


class Endpoints:
    """Belongs to the event loop of its client."""

    def __init__(
        self, names: Sequence[str], balance: Balance, ask: Ask, forget: Callable[[str], Awaitable[None]]
    ) -> None:
        """`forget` is called for one that has left, when its last call has ended. Raises InvalidRequest."""
        for name in names:
            if not is_name(name):
                raise InvalidRequest("endpoint", name, f"{EXPECTED}, such as 127.0.0.1:50051")
        try:
            self._discovery = Discovery(names, resolve_s=balance.resolve_s)
        except ConfigError as error:
            raise InvalidRequest("endpoint", list(names), error.message) from error
        self._names = tuple(names)
        self._balance = balance
        self._ask = ask
        self._forget = forget
        self._turns = WeightedTurns()
        self._known: dict[str, _Known] = {}
        self._leaving: dict[str, _Known] = {}
        self._calls_before: dict[str, int] = {}
        """To endpoints that are forgotten."""
        self._refreshing: asyncio.Task[None] | None = None
        self._num_chosen = 0
        self._take(self._discovery.addresses)

    @property
    def names(self) -> tuple[str, ...]:
        """host:port of all, in the order in which they were named or found."""
        return tuple(self._known)

    @property
    def in_use(self) -> tuple[str, ...]:
        """The names, and those that have left while calls run there."""
        return (*self._known, *self._leaving)

    def states(self) -> list[EndpointState]:
        now = time.monotonic()
        return [
            EndpointState(endpoint=name, state=known.state(now), chosen=known.chosen, running=known.running)
            for name, known in self._known.items()
        ]

    def calls(self) -> dict[str, int]:
        """How many went to each endpoint, and to the last MAX_LEFT ones that have left."""
        known = {**self._leaving, **self._known}
        return self._calls_before | {
            name: each.chosen + self._calls_before.get(name, 0) for name, each in known.items()
        }

    def address(self, name: str) -> Address:
        """How to reach an endpoint, which need not be one of these."""
        return self._any(name).address if name in self._known or name in self._leaving else Address(target=name)

    async def find(self) -> tuple[str, ...]:
        """The names as they are now. Raises Unavailable when there is none."""
        self._take(await self._discovery.refresh())
        if not self._known:
            raise Unavailable(f"there is no service at {', '.join(self._names)}", reason="NO_ENDPOINT")
        return self.names

    def choose(self, tried: Mapping[str, float]) -> tuple[str, float] | None:
        """The endpoint of a call, and the time.monotonic() before which it is not to be made. `tried`: endpoints that
        failed this request, and until when they are left alone. None: there is none.
        """
        self._keep_looking()
        now = time.monotonic()
        fresh = sorted((known for name, known in self._known.items() if name not in tried), key=lambda k: k.draw)
        for states in (("serving", "unknown"), ("full",), ("draining",), ("down",)):
            weights = {k.address.target: room(k.report, k.new) for k in fresh if k.state(now) in states}
            if weights:
                return self._turns.next(weights), 0.0
        return min(((name, tried[name]) for name in self._known), key=lambda item: item[1], default=None)

    def began(self, name: str) -> None:
        """A call goes to the endpoint."""
        self._num_chosen += 1
        known = self._any(name)
        known.chosen += 1
        known.running += 1
        known.new += 1

    def ended(self, name: str, error: K3svcError | None) -> None:
        """The call has ended. An error of the connection or of the service has the endpoint left out for a while."""
        known, now = self._any(name), time.monotonic()
        known.running -= 1
        if isinstance(error, ResourceExhausted):
            known.full_until = now + error.retry_after_s
        elif isinstance(error, Unavailable):
            log.info("%s is left out: %s", name, error.message)
            known.down_until = now + (error.retry_after_s or DOWN_S)
            known.report = None

    async def close(self) -> None:
        everyone = (*self._known.values(), *self._leaving.values())
        tasks = [task for task in (self._refreshing, *(known.asking for known in everyone)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep_looking(self) -> None:
        is_moot = self._discovery.is_static and len(self._known) < 2
        if is_moot or self._balance.refresh_s <= 0 or (self._refreshing is not None and not self._refreshing.done()):
            return
        self._refreshing = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        """Until nothing has been sent for some looks and nothing runs."""
        idle, before = 0, -1
        while idle < IDLE_PERIODS:
            self._take(await self._discovery.refresh())
            for known in self._known.values():
                # One that is slow to answer shall not keep the others waiting.
                if known.asking is None:
                    known.asking = asyncio.create_task(self._look_at(known))
            await self._forget_unused()
            is_busy = self._num_chosen != before or any(known.running for known in self._known.values())
            idle, before = 0 if is_busy else idle + 1, self._num_chosen
            await asyncio.sleep(self._balance.refresh_s)

    async def _look_at(self, known: _Known) -> None:
        was = known.state(time.monotonic())
        try:
            known.report = await self._ask(known.address)
        finally:
            known.asking = None
        now, known.new = time.monotonic(), 0
        known.down_until = now + DOWN_S + self._balance.refresh_s if known.report is None else 0.0
        if known.state(now) != was:
            log.info("%s is %s", known.address.target, known.state(now))

    def _take(self, addresses: Sequence[Address]) -> None:
        """From now on requests go to these; what is known of those that stay is kept."""
        before, self._known = self._known, {}
        for address in addresses:
            if address.target in self._known:
                # Named twice, such as plainly and by a name that leads to it: the first counts.
                continue
            known = before.pop(address.target, None) or self._leaving.pop(address.target, None)
            if known is None:
                known = _Known(address=address, draw=random.random() if self._balance.shuffle else 0.0)
                log.debug("%s has come", address.target)
            self._known[address.target] = known
        for name in before:
            log.info("%s has left", name)
        self._leaving |= before

    async def _forget_unused(self) -> None:
        for name in [name for name, known in self._leaving.items() if not (known.running or known.asking)]:
            # While one is forgotten, another may come back.
            if (left := self._leaving.pop(name, None)) is not None:
                self._calls_before[name] = self._calls_before.pop(name, 0) + left.chosen
                while len(self._calls_before) > MAX_LEFT:
                    del self._calls_before[next(iter(self._calls_before))]
                await self._forget(name)

    def _any(self, name: str) -> _Known:
        return self._known[name] if name in self._known else self._leaving[name]


class Route:
    """The endpoints of one request: another one for each call while there is another."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._tried: dict[str, float] = {}

    async def next(self) -> tuple[str, float]:
        """The endpoint to be called next, and the time.monotonic() from which it may be. Raises Unavailable when there
        is none.
        """
        found = self._endpoints.choose(self._tried)
        while found is None:
            await self._endpoints.find()
            found = self._endpoints.choose(self._tried)
        return found

    def began(self, endpoint: str) -> None:
        self._endpoints.began(endpoint)

    def ended(self, endpoint: str, error: K3svcError | None) -> None:
        self._endpoints.ended(endpoint, error)

    def put_off(self, endpoint: str, until: float) -> None:
        """The endpoint comes last for this request, and is left alone until then."""
        self._tried[endpoint] = until
