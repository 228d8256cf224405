"""How late an event loop is: everything that decides runs on it, between the steps of the engine."""

import asyncio
from collections.abc import Callable

PERIOD_S = 0.1


async def watch_loop(observe: Callable[[float], None], period_s: float = PERIOD_S) -> None:
    """Sleeps again and again and tells by how many seconds each sleep was too long. Ends when it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + period_s
        await asyncio.sleep(period_s)
        observe(max(0.0, loop.time() - due))
