"""Rooms on virtual time: which half waits for which, for how long, and what the other is told."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from k3svc.engine.ports import Fingerprint, PrefillCall
from k3svc.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    K3svcError,
    ResourceExhausted,
)
from k3svc.gateway import rooms as module
from k3svc.gateway.rooms import MAX_REMEMBERED, PULL_WAIT_S, Room, Rooms
from k3svc.testing.virtual import run_virtual

PROMPT = (1, 2, 3)
FINGERPRINT = Fingerprint(protocol=1, model="m", tokenizer="t", wire_layout="w", variant="v")


def call(number: int = 5, *, request_id: str = "d.1", prompt: tuple[int, ...] = PROMPT) -> PrefillCall:
    return PrefillCall(request_id=request_id, attempt=1, prompt=prompt, fingerprint=FINGERPRINT, room=number)


async def leg(rooms: Rooms, number: int = 5) -> None:
    with rooms.leg(number, PROMPT) as room:
        await room.wait()


def nothing() -> None:
    pass


async def failing_pull(room: Room, work: Awaitable[object], stop: Callable[[], object] = nothing) -> str:
    """What a pull raises whose hand-off breaks after some work."""
    try:
        with room.pull(stop):
            await work
            raise EngineFault("broken")
    except K3svcError as error:
        return error.message


def test_the_pull_may_come_first() -> None:
    async def main() -> None:
        rooms = Rooms(timeout_s=60.0)
        joining = asyncio.ensure_future(rooms.join(call()))
        await asyncio.sleep(PULL_WAIT_S - 1)
        waiting = asyncio.ensure_future(leg(rooms))
        room = await joining
        with room.pull(nothing):
            room.end()
        await waiting
        assert rooms.num_open == 0

    run_virtual(main())


def test_a_pull_waits_ten_seconds_and_a_leg_as_long_as_configured() -> None:
    async def main() -> None:
        loop, rooms = asyncio.get_running_loop(), Rooms(timeout_s=60.0)
        started = loop.time()
        with pytest.raises(DeadlineExceeded, match="no gateway has opened room 5"):
            await rooms.join(call())
        assert loop.time() - started == pytest.approx(PULL_WAIT_S)
        started = loop.time()
        with pytest.raises(DeadlineExceeded, match="no decode service has asked for room 5 within 60 s"):
            await leg(rooms)
        assert loop.time() - started == pytest.approx(60.0)
        assert rooms.num_open == 0
        with pytest.raises(DeadlineExceeded, match="within 60 s"):
            await rooms.join(call())

    run_virtual(main())


def test_a_leg_does_not_time_out_while_a_pull_reads_and_does_after_one_that_failed() -> None:
    async def main() -> None:
        loop, rooms = asyncio.get_running_loop(), Rooms(timeout_s=60.0)
        waiting = asyncio.ensure_future(leg(rooms))
        await asyncio.sleep(50)
        room = await rooms.join(call())
        assert await failing_pull(room, asyncio.sleep(100)) == "broken"
        assert loop.time() == pytest.approx(150.0)
        assert not waiting.done()
        with pytest.raises(DeadlineExceeded):
            await waiting
        assert loop.time() == pytest.approx(180.0)

    run_virtual(main())


def test_a_leg_that_goes_stops_the_pull_which_is_told_why() -> None:
    async def main() -> None:
        rooms = Rooms(timeout_s=60.0)
        stopped = asyncio.Event()
        waiting = asyncio.ensure_future(leg(rooms))
        room = await rooms.join(call())
        asyncio.get_running_loop().call_later(1.0, waiting.cancel)
        assert "the gateway's call" in await failing_pull(room, stopped.wait(), stopped.set)
        with pytest.raises(Cancelled), room.pull(nothing):
            pytest.fail("a pull of a room that has ended")
        with pytest.raises(Cancelled):
            await rooms.join(call())

    run_virtual(main())


def test_a_broken_stream_may_come_back_for_a_state_that_was_handed_out() -> None:
    async def main() -> None:
        rooms = Rooms(timeout_s=60.0)
        waiting = asyncio.ensure_future(leg(rooms))
        room = await rooms.join(call())
        with room.pull(nothing):
            room.end()
        await waiting
        assert await rooms.join(call()) is room
        with pytest.raises(AlreadyExists):
            await rooms.join(call(request_id="d.2"))

    run_virtual(main())


def test_what_does_not_fit_is_refused() -> None:
    async def main() -> None:
        rooms = Rooms(timeout_s=60.0)
        with rooms.leg(5, PROMPT):
            with pytest.raises(AlreadyExists), rooms.leg(5, PROMPT):
                pytest.fail("two legs in a room")
            with pytest.raises(InvalidRequest, match="room: got 5"):
                await rooms.join(call(prompt=(1, 2)))
            rooms.refuse(5, InvalidRequest("n", 0, "1"))
            await rooms.join(call())
            with pytest.raises(AlreadyExists):
                await rooms.join(call(request_id="d.2"))
        with rooms.leg(5, PROMPT):
            await rooms.join(call(request_id="d.2"))

    run_virtual(main())


def test_a_refused_leg_is_told_to_a_pull_that_waits_and_to_one_that_comes_later() -> None:
    async def main() -> None:
        rooms = Rooms(timeout_s=60.0)
        joining = asyncio.ensure_future(rooms.join(call()))
        await asyncio.sleep(1)
        rooms.refuse(5, InvalidRequest("lora_id", "x", "nothing"))
        for late in (joining, rooms.join(call())):
            with pytest.raises(InvalidRequest, match="lora_id"):
                await late

    run_virtual(main())


def test_memory_of_ended_rooms_and_waiting_pulls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        rooms = Rooms(timeout_s=60.0)
        for number in range(MAX_REMEMBERED + 1):
            rooms.refuse(number, Cancelled("gone"))
        with pytest.raises(Cancelled):
            await rooms.join(call(1))
        with pytest.raises(DeadlineExceeded):
            await rooms.join(call(0))
        monkeypatch.setattr(module, "MAX_WAITING_PULLS", 2)
        waiting = [asyncio.ensure_future(rooms.join(call(-1))), asyncio.ensure_future(rooms.join(call(-2)))]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted):
            await rooms.join(call(-3))
        for pull in waiting:
            pull.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(DeadlineExceeded):
            await rooms.join(call(-3))

    run_virtual(main())


def test_the_end_of_a_room_is_the_first_one() -> None:
    async def main() -> None:
        stops: list[int] = []
        room = Room(5, PROMPT)
        with room.pull(lambda: stops.append(1)):
            room.end()
            room.end(Cancelled("late"))
        assert (room.error, stops) == (None, [])

    run_virtual(main())
