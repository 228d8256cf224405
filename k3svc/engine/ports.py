"""What an engine talks to, as small protocols: the runner of its steps, its peers, its clock.

Engines decide on the event loop and await these; tests and the simulator pass fakes.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from k3svc.core.batch import DecodeBatch, ExtendBatch, StepOutput
from k3svc.transfer.manifest import Frame, PrefillDone, StateManifest

HandoffEvent = StateManifest | Sequence[Frame] | PrefillDone


class Clock(Protocol):
    """Monotonic seconds; `asyncio.get_running_loop().time` in production."""

    def __call__(self) -> float: ...


class ExtendRunner(Protocol):
    """Runs prompt chunks on the engine thread."""

    async def extend(self, batch: ExtendBatch, on_layer: Callable[[int], None]) -> StepOutput:
        """Computes one step; `on_layer(i)` is called on the event loop once the caches of layer i are final for it.

        The logits row of each row with `is_last` lies in its slot afterwards. All calls of on_layer happen before the
        result is returned.
        """
        ...


class DecodeRunner(Protocol):
    """Runs decode steps on the engine thread."""

    async def decode(self, batch: DecodeBatch) -> StepOutput: ...


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What two services compare before any state byte is accepted (k3svc.v1.Fingerprint)."""

    protocol: int
    model: str
    tokenizer: str
    wire_layout: str
    variant: str

    def difference(self, other: "Fingerprint") -> str | None:
        """Name of the first field that forbids a hand-off, None when there is none. `variant` may differ."""
        for name in ("protocol", "model", "tokenizer", "wire_layout"):
            if getattr(self, name) != getattr(other, name):
                return name
        return None


@dataclass(frozen=True, kw_only=True)
class PrefillCall:
    """One call of PrefillService.Prefill."""

    request_id: str
    attempt: int
    prompt: tuple[int, ...]
    fingerprint: Fingerprint
    next_sequence: int = 0
    priority: int = 0
    """Smaller is computed first."""
    remaining_s: float | None = None
    """Time left to the request's deadline; None: it has none."""


class PrefillPeer(Protocol):
    """One prefill service as decode sees it."""

    name: str

    def prefill(self, call: PrefillCall) -> AsyncGenerator[HandoffEvent, None]:
        """Manifest, frames in batches (empty ones as a sign of life), done. Raises K3svcError: Unavailable and
        TransferError may be retried, ResourceExhausted after its delay, Incompatible at another peer; InvalidRequest
        and DeadlineExceeded may not.
        """
        ...

    async def release(self, request_id: str, attempt: int) -> None:
        """Gives the state back; never raises (the lease ends it otherwise)."""
        ...
