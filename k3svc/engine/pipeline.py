"""StepPipeline: runs the decode steps that a scheduler packs, one at a time, or two on a device that runs by itself.

Step i + 1 is asked for while step i runs, from what is known before the tokens of i are; then i is awaited and booked,
and so on, until the scheduler has to know more first or has nothing to run. Which samples end is known one step late
then: their rows of that step are void, and their memory goes back after it (k3svc.core.decode_scheduler).
"""

import logging
from collections.abc import Callable
from functools import partial

from k3svc.core.batch import DecodeBatch, StepOutput
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.engine.ports import AheadRunner, Clock, DecodeRunner, StepReader
from k3svc.engine.speculator import Speculator
from k3svc.errors import EngineFault

log = logging.getLogger(__name__)

STALL_S = 60.0
"""A step that runs longer counts as no progress."""


class StepPipeline:
    """Of one decode engine."""

    def __init__(
        self, *, scheduler: DecodeScheduler, runner: DecodeRunner, ahead: AheadRunner | None, clock: Clock
    ) -> None:
        """`ahead` is asked for steps while others run; None: each step is awaited."""
        self._scheduler = scheduler
        self._runner = runner
        self._ahead = ahead
        self._clock = clock
        self._awaited_since: float | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether a step hangs."""
        return self._awaited_since is not None and self._clock() - self._awaited_since >= STALL_S

    async def run(
        self, first: DecodeBatch, speculator: Speculator | None, book: Callable[[DecodeBatch, StepOutput], None]
    ) -> None:
        """Runs a step, and those that can be asked for while the one before runs; none is in flight at the end. `book`
        commits a step and decides what else follows from it, synchronously.
        """
        batch: DecodeBatch | None = first
        reader: StepReader | None = None
        while batch is not None:
            following, its_reader = None, None
            # Drafts of a step come of the tokens of the one before.
            if self._ahead is not None and (speculator is None or speculator.rests):
                reader = reader or self._ahead.ask(batch)
                following = self._scheduler.schedule_ahead(batch)
                its_reader = None if following is None else self._ahead.ask(following)
            elif reader is None:
                on_features = None if speculator is None else speculator.features(batch)
                may_wait = speculator is not None and speculator.may_features_wait
                reader = partial(self._runner.decode, batch, on_features, features_may_wait=may_wait)
            book(batch, await self._result(batch, reader))
            batch, reader = following, its_reader

    async def _result(self, batch: DecodeBatch, reader: StepReader) -> StepOutput:
        self._awaited_since = self._clock()
        try:
            return await reader()
        except EngineFault as error:
            log.exception("a decode step failed")
            return StepOutput(failed={row.key: error.message for row in batch.all_rows})
        finally:
            self._awaited_since = None
