"""What engines and runners tell of their work: the seam between them and metrics or traces.

Every call is made on the event loop and returns at once.
"""

import logging

from k3svc.core.batch import DecodeBatch, ExtendBatch
from k3svc.obs import trace
from k3svc.obs.metrics import Metrics

log = logging.getLogger(__name__)


class Observer:
    """Passes on what happens; without metrics it drops it."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics

    def step(self, batch: ExtendBatch | DecodeBatch, compute_s: float) -> None:
        """A step has ended that took `compute_s` seconds on the engine thread."""
        if isinstance(batch, ExtendBatch):
            kind, num_tokens, keys = (
                "extend",
                sum(len(row.token_ids) for row in batch.rows),
                (r.key for r in batch.rows),
            )
        else:
            kind, num_tokens, keys = "decode", len(batch.all_rows), (row.key for row in batch.all_rows)
        if self._metrics is not None:
            self._metrics.observe_step(kind, num_tokens, compute_s)
        trace.step(f"{kind} step", keys, compute_s, {"tokens": num_tokens})

    def handoff(self, *, num_bytes: int, landing_s: float, tail_s: float) -> None:
        """State has landed: its bytes, seconds from its first to its last byte, and from the end of the prompt's
        computation to its last byte.
        """
        if self._metrics is not None:
            self._metrics.observe_handoff(num_bytes=num_bytes, landing_s=landing_s, tail_s=tail_s)

    def handoff_failed(self, reason: str) -> None:
        """An attempt at a hand-off has failed, with the reason of its error."""
        if self._metrics is not None:
            self._metrics.handoff_failures.labels(reason).inc()

    def prefill_chosen(self, target: str, why: str) -> None:
        """A prompt goes to this prefill service, and what decided (k3svc.core.targets), or: last resort."""
        log.debug("prefill at %s by %s", target, why)
        if self._metrics is not None:
            self._metrics.prefill_choices.labels(target, why).inc()

    def draft_step(self, num_samples: int, compute_s: float) -> None:
        """A draft service proposed for so many samples."""
        if self._metrics is not None:
            self._metrics.observe_step("draft", num_samples, compute_s)

    def context_whole(self, num_steps: int) -> None:
        """A draft service proposes from the whole context of a sample for the first time, after so many steps."""
        if self._metrics is not None:
            self._metrics.context_steps.observe(num_steps)


UNOBSERVED = Observer()
