"""Messages over a Unix socket, on both event loops: whole, in order, bounded, and only from who knows the token."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress

import pytest
import uvloop

from k3svc.errors import InvalidRequest, Unavailable
from k3svc.rpc import local_stream
from k3svc.rpc.local_stream import LocalListener, LocalStream, connect

MOST = 1 << 20

Test = Callable[[], Awaitable[None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Test], None]:
    """Runs a coroutine function on a loop of its own; exceptions that the loop caught fail it."""

    def on_loop(test: Test) -> None:
        caught: list[object] = []
        with closing(request.param()) as loop:
            loop.set_exception_handler(lambda _loop, context: caught.append(context))
            loop.run_until_complete(test())
        assert not caught

    return on_loop


async def pair() -> tuple[LocalStream, LocalStream]:
    listener = LocalListener(MOST)
    connected = await connect(listener.name, listener.token, MOST)
    assert connected is not None
    accepted = await listener.accept()
    listener.close()
    return accepted, connected


def test_messages_arrive_whole_and_in_order_both_ways(run: Callable[[Test], None]):
    messages = [b"", b"a", bytes(range(256)) * 4000, b"b" * MOST]

    async def test() -> None:
        one, other = await pair()
        for sender, receiver in ((one, other), (other, one)):
            for message in messages:
                sender.send(message)
            assert [await anext(receiver) for _ in messages] == messages
        one.close()
        assert [message async for message in other] == []
        other.send(b"to nobody")
        await other.drain()
        other.close()

    run(test)


def test_what_was_sent_before_the_end_is_read(run: Callable[[Test], None]):
    async def test() -> None:
        one, other = await pair()
        one.send(b"last")
        assert await anext(other) == b"last"
        one.send(b"more")
        while one.num_unsent:
            await asyncio.sleep(0)
        one.close()
        assert [message async for message in other] == [b"more"]
        other.close()

    run(test)


def test_a_message_that_is_too_long_is_refused_before_it_is_there(run: Callable[[Test], None]):
    async def test() -> None:
        one, other = await pair()
        one.send(b"good")
        one.send(bytes(MOST + 1))
        assert await anext(other) == b"good"
        with pytest.raises(InvalidRequest, match=f"got '{MOST + 1} bytes'"):
            await anext(other)
        one.close()
        other.close()

    run(test)


def test_a_reader_that_takes_nothing_holds_the_writer(run: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_stream, "MOST_WAITING_BYTES", MOST // 2)
    count = 64

    async def test() -> None:
        one, other = await pair()
        for number in range(count):
            one.send(number.to_bytes(4, "little") * (MOST // 16))
        drained = asyncio.ensure_future(one.drain())
        await asyncio.sleep(0)
        assert not drained.done()
        assert one.num_unsent > MOST
        for number in range(count):
            assert (await anext(other))[:4] == number.to_bytes(4, "little")
        await drained
        one.close()
        other.close()

    run(test)


@pytest.mark.parametrize("shown", [b"", b"\x10\0", b"\x10\0\0\0" + bytes(16), b"\xff" * 4000])
@pytest.mark.parametrize("stays", [False, True])
def test_who_does_not_know_the_token_is_turned_away(run: Callable[[Test], None], shown: bytes, stays: bool):
    """Whether it hangs, goes, or says something else; nobody waits for it."""

    async def test() -> None:
        listener = LocalListener(MOST)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as stranger:
            stranger.connect(f"\0{listener.name}")
            stranger.send(shown)
            if not stays:
                stranger.close()
            known = await connect(listener.name, listener.token, MOST)
            assert known is not None
            accepted = await listener.accept()
            accepted.send(b"welcome")
            assert await anext(known) == b"welcome"
            with suppress(ConnectionResetError):
                assert not stays or stranger.recv(1) == b""
        listener.close()
        assert await connect(listener.name, listener.token, MOST) is None
        for stream in (known, accepted):
            stream.close()

    run(test)


async def test_where_strangers_take_all_room_who_connects_is_told_at_once():
    listener = LocalListener(MOST)
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2)]
    for stranger in strangers:
        stranger.connect(f"\0{listener.name}")
    assert await connect(listener.name, listener.token, MOST) is None
    with pytest.raises(Unavailable, match="nobody has connected"):
        await listener.accept()
    listener.close()
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("name", ["", "k3svc", "../k3svc-" + "0" * 32, "k3svc-" + "0" * 32 + "\n"])
async def test_other_sockets_cannot_be_named(name: str):
    with pytest.raises(InvalidRequest, match="socket_name"):
        await connect(name, bytes(16), MOST)


async def test_where_there_are_no_such_sockets_the_maker_is_told(monkeypatch: pytest.MonkeyPatch):
    def refuse(_self: socket.socket, _address: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(OSError, match="no"):
        LocalListener(MOST)
