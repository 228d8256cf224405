"""TokenStream: what one request has to say to its reader.

The engine puts, the reader takes; deltas that wait are merged per sample, so a slow reader costs one entry a sample and
never holds the engine up. The engine looks at `num_unread` and pauses the request before that entry grows large. A
stream ends exactly once: with Finished, or by raising its error.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from k3svc.core.events import Delta, Finished
from k3svc.errors import K3svcError


class TokenStream:
    """Deltas of all samples of a request, then Finished. One reader."""

    def __init__(
        self,
        request_id: str,
        *,
        on_cancel: Callable[["TokenStream"], None],
        on_read: Callable[["TokenStream"], None],
    ) -> None:
        self.request_id = request_id
        self.num_unread = 0
        """Tokens that wait for the reader."""
        self._on_cancel = on_cancel
        self._on_read = on_read
        self._waiting: dict[int, Delta] = {}
        self._finished: Finished | None = None
        self._error: K3svcError | None = None
        self._taken = False
        self._changed = asyncio.Event()
        self._gathering: asyncio.Future[None] | None = None

    @property
    def is_ended(self) -> bool:
        """Whether the engine is done with the request."""
        return self._finished is not None or self._error is not None

    def put(self, delta: Delta) -> None:
        """Adds tokens or text of a sample; merged with what waits."""
        assert not self.is_ended, "a token after the end"
        earlier = self._waiting.get(delta.index)
        self._waiting[delta.index] = delta if earlier is None else _merge(earlier, delta)
        self.num_unread += len(delta.token_ids)
        self._changed.set()

    def finish(self, finished: Finished) -> None:
        assert not self.is_ended, "a request ends once"
        self._finished = finished
        self._end()

    def fail(self, error: K3svcError) -> None:
        assert not self.is_ended, "a request ends once"
        self._error = error
        self._end()

    def cancel(self) -> None:
        """The reader is gone: ends the request if it lives. Safe to repeat."""
        self._on_cancel(self)

    async def gather(self, seconds: float) -> None:
        """Lets tokens come together: returns when the first that waits has waited for `seconds`, and at once when the
        request has ended.
        """
        while not (self._waiting or self.is_ended):
            self._changed.clear()
            await self._changed.wait()
        if self.is_ended:
            return
        loop = asyncio.get_running_loop()
        gathering = self._gathering = loop.create_future()
        timer = loop.call_later(seconds, _resolve, gathering)
        try:
            await gathering
        finally:
            timer.cancel()
            self._gathering = None

    def __aiter__(self) -> AsyncIterator[Delta | Finished]:
        return self

    async def __anext__(self) -> Delta | Finished:
        while True:
            if self._waiting:
                return self._take()
            if self._error is not None:
                raise self._error
            if self._finished is not None:
                if self._taken:
                    raise StopAsyncIteration
                self._taken = True
                return self._finished
            self._changed.clear()
            await self._changed.wait()

    def _end(self) -> None:
        self._changed.set()
        if self._gathering is not None:
            _resolve(self._gathering)

    def _take(self) -> Delta:
        delta = self._waiting.pop(next(iter(self._waiting)))
        self.num_unread -= len(delta.token_ids)
        self._on_read(self)
        return delta


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _merge(first: Delta, second: Delta) -> Delta:
    return Delta(
        index=first.index,
        token_ids=(*first.token_ids, *second.token_ids),
        text=first.text + second.text,
        logprobs=(*first.logprobs, *second.logprobs),
        finish_reason=second.finish_reason,
        stopped_by=second.stopped_by,
    )
