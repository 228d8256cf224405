"""Rooms: where the two halves of a request meet on a prefill service.

A gateway sends one request to a prefill and to a decode service at the same time. Its call here opens the room (the
leg); the pull of the decode service, an ordinary PrefillService.Prefill, names the same room, and computes the prompt.
Whichever half comes first waits for the other; a leg that ends with an error ends the pull. Ended rooms are remembered
for a while, so that a pull that comes late is told why.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from k3svc.engine.ports import PrefillCall
from k3svc.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    K3svcError,
    ResourceExhausted,
)
from k3svc.rpc.waiting import within

PULL_WAIT_S = 10.0
"""A gateway sends both halves at once, so a pull waits no longer for its leg."""
MAX_REMEMBERED = 4096
MAX_WAITING_PULLS = 256
"""Pulls that wait for a room that nobody has opened."""
RETRY_AFTER_S = 1.0


class Room:
    """One prompt, from the call of its leg until its state has been handed out or the call has gone."""

    def __init__(self, number: int, prompt: tuple[int, ...]) -> None:
        self.number = number
        self.prompt = prompt
        self.puller = ""
        """Id of the hand-off that asked for the prompt; empty: none yet."""
        self.num_pulls = 0
        self.cached_tokens = 0
        """Tokens of the prompt that came from the prefix cache; known when its state has been handed out."""
        self.error: K3svcError | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Ends the room when nobody pulls."""
        self._ended = asyncio.Event()
        self._stop_pull: Callable[[], object] | None = None

    @property
    def is_ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self) -> None:
        """Returns when the whole state has been handed out. Raises the error that ended the room."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    def end(self, error: K3svcError | None = None) -> None:
        """The state has been handed out, or nobody wants it any more. Safe to repeat."""
        if self.is_ended:
            return
        self.error = error
        self._ended.set()
        if self.timer is not None:
            self.timer.cancel()
        if error is not None and self._stop_pull is not None:
            self._stop_pull()

    @contextmanager
    def pull(self, stop: Callable[[], object]) -> Iterator[None]:
        """While a pull reads the state; `stop` ends its hand-off. The error of the room goes before the one of a
        hand-off that was ended so.
        """
        if self.error is not None:
            raise self.error
        self.num_pulls += 1
        self._stop_pull = stop
        try:
            yield
        except K3svcError:
            if self.error is not None:
                raise self.error from None
            raise
        finally:
            self.num_pulls -= 1
            if self._stop_pull is stop:
                self._stop_pull = None


class Rooms:
    """The rooms of one prefill service. Belongs to its event loop."""

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s`: how long a leg waits without a pull."""
        self._timeout_s = timeout_s
        self._open: dict[int, Room] = {}
        self._ended: OrderedDict[int, Room] = OrderedDict()
        self._waiting: dict[int, list[asyncio.Future[Room]]] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    @contextmanager
    def leg(self, number: int, prompt: tuple[int, ...]) -> Iterator[Room]:
        """Opens a room; leaving the block ends it. Raises AlreadyExists while the number is in use."""
        if number in self._open:
            raise AlreadyExists(f"room {number} is in use", reason="ROOM_TAKEN")
        room = self._open[number] = Room(number, prompt)
        self._ended.pop(number, None)
        self._tell(room)
        self._arm(room)
        try:
            yield room
        except K3svcError as error:
            room.end(error)
            raise
        finally:
            room.end(Cancelled("the gateway's call to the prefill service ended", reason="ROOM_CLOSED"))
            del self._open[number]
            self._remember(room)

    def refuse(self, number: int, error: K3svcError) -> None:
        """A leg that was not let in: its pull need not wait."""
        if number not in self._open:
            room = Room(number, ())
            room.end(error)
            self._remember(room)
            self._tell(room)

    async def join(self, call: PrefillCall) -> Room:
        """The room of a pull, which waits for its leg. Raises the error with which the room ended, DeadlineExceeded
        when it is not opened in time, InvalidRequest or AlreadyExists when it belongs to something else.
        """
        assert call.room is not None, "an ordinary call"
        room = self._open.get(call.room) or self._ended.get(call.room) or await self._wait_for(call.room)
        if room.error is not None:
            raise room.error
        if room.puller not in {"", call.request_id}:
            raise AlreadyExists(f"room {room.number} belongs to another hand-off", reason="ROOM_TAKEN")
        if not room.is_ended and room.prompt != call.prompt:
            raise InvalidRequest("room", room.number, "the room of the same prompt")
        room.puller = call.request_id
        return room

    def _remember(self, room: Room) -> None:
        room.prompt = ()
        self._ended[room.number] = room
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _tell(self, room: Room) -> None:
        for waiting in self._waiting.pop(room.number, ()):
            if not waiting.done():
                waiting.set_result(room)

    async def _wait_for(self, number: int) -> Room:
        if sum(map(len, self._waiting.values())) >= MAX_WAITING_PULLS:
            raise ResourceExhausted(f"{MAX_WAITING_PULLS} pulls wait for their rooms", retry_after_s=RETRY_AFTER_S)
        opened: asyncio.Future[Room] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(number, []).append(opened)
        try:
            return await within(min(PULL_WAIT_S, self._timeout_s), opened)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"no gateway has opened room {number}", reason="ROOM_TIMEOUT") from None
        finally:
            if opened in (others := self._waiting.get(number, [])):
                others.remove(opened)
                if not others:
                    del self._waiting[number]

    def _arm(self, room: Room) -> None:
        room.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire, room)

    def _expire(self, room: Room) -> None:
        if room.num_pulls:
            self._arm(room)
            return
        message = f"no decode service has asked for room {room.number} within {self._timeout_s:g} s"
        room.end(DeadlineExceeded(message, reason="ROOM_TIMEOUT"))
