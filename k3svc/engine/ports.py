"""What an engine talks to, as small protocols: the runner of its steps, its peers, its clock.

Engines decide on the event loop and await these; tests and the simulator pass fakes.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from k3svc.core.batch import DecodeBatch, ExtendBatch, StepOutput
from k3svc.core.request import SamplingParams
from k3svc.transfer.manifest import Frame, PrefillDone, StateManifest

HandoffEvent = StateManifest | Sequence[Frame] | PrefillDone
StepReader = Callable[[], Awaitable[StepOutput]]
"""Awaits the result of a step that was asked for."""


class Clock(Protocol):
    """Monotonic seconds; `asyncio.get_running_loop().time` in production."""

    def __call__(self) -> float: ...


class ExtendRunner(Protocol):
    """Runs prompt chunks on the engine thread."""

    async def extend(
        self,
        batch: ExtendBatch,
        on_layer: Callable[[int], None],
        on_features: Callable[[memoryview], None] | None = None,
    ) -> StepOutput:
        """Computes one step; `on_layer(i)` is called on the event loop once the caches of layer i are final for it, and
        `on_features` with the projected features of all tokens in their order, where given.

        The logits row of each row with `is_last` lies in its slot afterwards. The result of a step in which a prompt
        ends, or whose states are kept for others, comes after all calls of `on_layer` for it and for those before it;
        that of another step may come earlier, while a device computes it.
        """
        ...


class DecodeRunner(Protocol):
    """Runs decode steps on the engine thread."""

    async def decode(
        self,
        batch: DecodeBatch,
        on_features: Callable[[memoryview], None] | None = None,
        *,
        features_may_wait: bool = False,
    ) -> StepOutput:
        """Computes one step. `on_features` is called on the event loop, before the result is returned and as early as
        the model allows, with the projected features of all rows in the order of `batch.rows`, the drafts after their
        anchor. Where `features_may_wait`, that may be during a later step, and for earlier steps first.
        """
        ...


class AheadRunner(Protocol):
    """Asks a device for decode steps that it computes by itself, one after the other."""

    def ask(self, batch: DecodeBatch) -> StepReader:
        """The step begins when those before it have ended, whoever awaits what. Rows without a token id take the token
        that the step asked for just before chooses for their key; where that fails, they are void. Results are awaited
        in the order of the asking, each once, after the step that builds on it has been asked for, if one does. The
        reader raises EngineFault.
        """
        ...


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
    draft_ticket: str = ""
    """Under which the features of the prompt go to the draft service; empty: they do not."""
    room: int | None = None
    """Number under which a gateway has told the prefill service of the prompt too; None: it has not."""
    tenant: str = ""
    """Whose prompt it is, for the prefix cache; empty: anybody's."""
    state_bytes: int = 0
    """Bytes that will come; not told to the service. 0: unknown, nothing is prepared for them."""


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


@dataclass(frozen=True, kw_only=True)
class DraftOpen:
    """A sample for which proposals are wanted, from its first step on a state that landed."""

    key: str
    attempt: int
    """Rises each time the sample is opened again; what belongs to a lower one is void."""
    known: Sequence[int]
    """Prompt and output tokens; the last is the anchor, at position len(known) - 1 = base_len."""
    params: SamplingParams
    sample_index: int
    ticket: str
    """Under which prefill pushes the features of the prompt; empty: it does not."""
    with_probs: bool = False
    """Whether proposals need `probs`, for chain rejection."""


@dataclass(frozen=True, kw_only=True)
class DraftCommit:
    """What a step settled for one sample."""

    key: str
    attempt: int
    base_len: int
    """Tokens in the caches after the step; the position of the anchor."""
    tokens: Sequence[int]
    """Tokens that the step added, at least one; the last is the anchor."""
    want: int
    """Proposals wanted for the next step; 0: keep the context only."""
    features: memoryview | None = None
    """Those of positions base_len - len(tokens) to base_len - 1, where they were not pushed before."""


@dataclass(frozen=True, kw_only=True)
class DraftProposal:
    """Proposals made for one sample; token k is meant for position base_len + 1 + k."""

    key: str
    attempt: int
    base_len: int
    tokens: Sequence[int]
    confidences: Sequence[float] = ()
    """Chance that a token is accepted if those before it are; empty without a confidence head."""
    probs: Sequence[bytes] = ()
    """float32 [X] a token, the law that it was drawn from; only where chain rejection asked for it."""
    truncated: bool = False
    """Made from a context that lacks rows which its window could hold."""
    compute_s: float = 0.0
    """Time that it took to make, with those that were made at once."""
    reply_s: float = 0.0
    """From the wish to its arrival; 0: nobody knows."""


@dataclass(frozen=True, kw_only=True)
class FeatureRows:
    """Features of consecutive tokens of one sample, projected (`fc`, `hidden_norm`), before it is known which stay."""

    key: str
    attempt: int
    start: int
    """Absolute position of the first row."""
    num_rows: int
    data: memoryview
    """num_rows · width elements of the agreed dtype, little-endian."""


class Drafter(Protocol):
    """Who proposes. Nothing here raises or blocks, and nothing it answers can change a token, only the number of steps:
    it may be late, wrong or dead. Called on the event loop.
    """

    name: str

    @property
    def num_proposals(self) -> int:
        """Most tokens of a proposal; 0 while there is nobody to propose (DOWN)."""
        ...

    @property
    def wants_features(self) -> bool:
        """Whether `push` is to be called."""
        ...

    def open(self, opens: Sequence[DraftOpen]) -> None:
        """Samples whose state has landed, and that have their first token. Asks for proposals, as `commit` does with
        want = num_proposals.
        """
        ...

    def push(self, rows: Sequence[FeatureRows]) -> None:
        """Features of a step that runs, before its `commit` if at all. The data is valid during the call only."""
        ...

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        """A step has ended; asks for the proposals of the next one."""
        ...

    def close(self, keys: Sequence[str]) -> None:
        """Samples that ended or were preempted; unknown keys are fine."""
        ...

    def proposal(self, key: str) -> DraftProposal | None:
        """The newest that arrived for a sample. Whether it can be used is the caller's to judge."""
        ...

    async def wait(self, timeout_s: float) -> bool:
        """Returns when the last `commit` has been answered as far as it ever will be, at the latest after timeout_s.
        False: something is still outstanding.
        """
        ...


class FeatureStream(Protocol):
    """Takes the features of one prompt to the draft service, in its own time. Nothing here raises or blocks."""

    def push(self, position: int, data: memoryview) -> None:
        """Rows from an absolute position on, in ascending order. The data is valid during the call only."""
        ...

    def close(self) -> None:
        """No more will come. Safe to repeat."""
        ...


class FeatureSink(Protocol):
    """Where the features of prompts go; they may be lost on the way."""

    window: int
    """How many of the newest rows of a prompt are of use."""

    def open(self, *, ticket: str, attempt: int, num_tokens: int) -> FeatureStream:
        """A prompt of which features are about to come."""
        ...
