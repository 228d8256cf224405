import asyncio

import pytest

from k3svc.rpc.waiting import within


async def test_a_result_in_time_is_returned_and_an_error_raised():
    async def fail() -> None:
        raise ValueError("broken")

    assert await within(60.0, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="broken"):
        await within(60.0, fail())


async def test_what_takes_too_long_is_cancelled_and_has_ended():
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    with pytest.raises(asyncio.TimeoutError):
        await within(0.001, work())
    assert ended == ["work"]
    waiting = asyncio.create_task(within(60.0, work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["work", "work"]


@pytest.mark.parametrize("turns", [None, 0, 1, 2, 3, 4])
async def test_a_cancellation_that_comes_with_the_result_is_not_lost(turns: int | None):
    """So many turns of the loop after it; None: just before."""
    come: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await within(60.0, come)
        await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if turns is None:
        waiting.cancel()
    if not come.done():
        come.set_result("result")
    for _ in range(turns or 0):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
