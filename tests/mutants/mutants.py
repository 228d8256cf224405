"""The mutants: code that is right, what to put in its place, and who must notice.

`old` must be found exactly once in the file. A mutant is one mistake that somebody could make.
"""

from dataclasses import dataclass

SIM = "simulation"
_HANDOFFS = "tests/unit/engine/test_handoff_engines.py"
_BOUNDS = "tests/unit/engine/test_bounds.py"
_LANDING = "tests/unit/transfer/test_landing.py"
_DECODE_SCHEDULER = "k3svc/core/decode_scheduler.py"
_PREFILL_SCHEDULER = "k3svc/core/prefill_scheduler.py"
_DECODE = "k3svc/engine/decode.py"
_PREFILL = "k3svc/engine/prefill.py"
_TRANSFER = "k3svc/transfer/landing.py"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake. `found_by`: SIM, or a file of tests."""

    name: str
    path: str
    old: str
    new: str
    found_by: str = SIM


MUTANTS = (
    Mutant(
        name="page freed twice",
        path=_DECODE_SCHEDULER,
        old="            sample.slot, sample.pages = None, []\n",
        new="            pass\n",
    ),
    Mutant(
        name="slot not zeroed",
        path="k3svc/ops/reference_steps.py",
        old="np.flatnonzero(starts == 0)",
        new="np.flatnonzero(starts < 0)",
        found_by="tests/unit/engine/test_runner.py",
    ),
    Mutant(
        name="slot reused while a step of decode may write",
        path=_DECODE_SCHEDULER,
        old="        if not sample.in_step:\n            self._give_back(sample)\n",
        new="        self._give_back(sample)\n",
    ),
    Mutant(
        name="slot reused while a step of prefill may write",
        path=_PREFILL_SCHEDULER,
        old="        if not prompt.in_step:\n            self._give_back(prompt)\n",
        new="        self._give_back(prompt)\n",
    ),
    Mutant(
        name="frame written after its memory was given back",
        path=_TRANSFER,
        old="        self._closed = True\n",
        new="        pass\n",
        found_by=_LANDING,
    ),
    Mutant(
        name="frame accepted from an old attempt or another request",
        path=_TRANSFER,
        old="if (manifest.request_id, manifest.attempt) != (want.request_id, want.attempt):",
        new="if False:",
    ),
    Mutant(
        name="old attempt served",
        path=_PREFILL,
        old="if job is not None and call.attempt < job.call.attempt:",
        new="if False:",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="ended attempt served",
        path=_PREFILL,
        old="        if call.attempt <= self._forgotten.get(call.request_id, 0):",
        new="        if False:",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="release of an old attempt ends the new one",
        path=_PREFILL,
        old="if job is None or job.call.attempt > attempt:",
        new="if job is None:",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="token applied twice",
        path=_DECODE_SCHEDULER,
        old="                sample.num_cached += 1\n",
        new="                sample.num_cached += len(sample.output) != 3\n",
    ),
    Mutant(
        name="hand-off token skipped",
        path=_DECODE_SCHEDULER,
        old="            if isinstance(row, DecodeRow):\n",
        new="            if isinstance(row, DecodeRow) or not sample.request.generated:\n",
    ),
    Mutant(
        name="lease ignored",
        path=_PREFILL,
        old="        if idle_s < self._lease_s:\n",
        new="        if idle_s < 1e9:\n",
    ),
    Mutant(
        name="lease not renewed by reading",
        path=_PREFILL,
        old="        if job.handoff is handoff:\n            job.idle_since = None\n",
        new="        pass\n",
        found_by=_BOUNDS,
    ),
    Mutant(
        name="cancel lost during reserve",
        path=_DECODE,
        old="                transfer.puller.close()\n                transfer.task.cancel()\n",
        new="                pass\n",
    ),
    Mutant(
        name="CRC unchecked",
        path=_TRANSFER,
        old="if crc32c(frame.data) != frame.crc32c:",
        new="if False:",
    ),
    Mutant(
        name="frame out of sequence accepted",
        path=_TRANSFER,
        old="if frame.sequence != self.next_sequence:",
        new="if frame.sequence < self.next_sequence:",
        found_by=_LANDING,
    ),
    Mutant(
        name="missing layer accepted",
        path=_TRANSFER,
        old="        if self.missing:\n",
        new="        if False:\n",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="deadline ignored by decode",
        path=_DECODE,
        old="        if not live.stream.is_ended:\n            self._end(live, DeadlineExceeded(",
        new="        if False:\n            self._end(live, DeadlineExceeded(",
    ),
    Mutant(
        name="deadline ignored by prefill",
        path=_PREFILL,
        old="        if remaining_s is not None:\n",
        new="        if False:\n",
    ),
    Mutant(
        name="duplicate terminal message",
        path="k3svc/engine/stream.py",
        old="                self._taken = True\n",
        new="                self._taken = self._on_cancel is None\n",
    ),
    Mutant(
        name="fingerprint not compared",
        path=_PREFILL,
        old="        if field_name is not None:\n",
        new="        if False:\n",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="partial page shared by forked samples",
        path=_DECODE_SCHEDULER,
        old="        shared = len(lead.request.prompt) // self._page_size\n        slots",
        new="        shared = -(-len(lead.request.prompt) // self._page_size)\n        slots",
    ),
    Mutant(
        name="state of a preempted sample taken for present",
        path=_DECODE_SCHEDULER,
        old="            sample.num_cached = size\n",
        new="            sample.num_cached = max(size, sample.num_known - 1)\n",
    ),
    Mutant(
        name="stream unbounded",
        path=_DECODE,
        old="live.stream.num_unread >= self._max_unread_tokens",
        new="live.stream.num_unread < 0",
    ),
    Mutant(
        name="reader comes back unnoticed",
        path=_DECODE,
        old="            self.scheduler.pause(stream.request_id, paused=False)\n",
        new="            pass\n",
    ),
    Mutant(
        name="queue unbounded",
        path=_DECODE_SCHEDULER,
        old="        if len(self.waiting) >= self._max_waiting:\n",
        new="        if False:\n",
    ),
    Mutant(
        name="resumed stream starts over",
        path="k3svc/engine/handoff.py",
        old="            next_sequence=landing.next_sequence,\n",
        new="            next_sequence=0,\n",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="requests forgotten when the service stops",
        path=_DECODE,
        old='                self._end(live, Unavailable("this decode service stops", reason="STOPPED"), "failed")\n',
        new="                pass\n",
    ),
)
