"""The two values of a step: what to run (ExtendBatch, DecodeBatch) and what came out (StepOutput).

Built by a scheduler, consumed by the runner on the engine thread. Page and slot numbers are indices into pools.
Slot 0 is a dummy that no request owns; a row of padding carries slot -1 and is added by the runner, never here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from k3svc.core.request import Matcher, SamplingParams


@dataclass(frozen=True, kw_only=True)
class ExtendRow:
    """One chunk of one prompt."""

    key: str
    slot: int
    block_table: Sequence[int]
    """Page ids of the request in order; covers start + len(token_ids) tokens."""
    token_ids: Sequence[int]
    start: int
    """Prompt tokens already in the caches: 0 or a multiple of the chunk grid."""
    is_last: bool
    """Whether the prompt ends here, so that its logits row is wanted."""
    restore_from: int | None = None
    """Slot whose states the row goes on from, copied into its own before the step; None: its own."""
    snapshot_to: int | None = None
    """Slot that gets a copy of the states after the step; None: none does."""


@dataclass(frozen=True, kw_only=True)
class ExtendBatch:
    """Chunks of several prompts, packed into one step."""

    rows: Sequence[ExtendRow]

    @property
    def num_tokens(self) -> int:
        """Rows that the model computes."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Which ids a penalty sees. The mapping is live: the scheduler updates it between steps."""

    prompt: frozenset[int]
    output: Mapping[int, int]
    """Output token id → number of occurrences."""


@dataclass(frozen=True, kw_only=True)
class Guide:
    """Which ids a grammar allows next. `output` is live: the scheduler appends to it between steps."""

    matcher: Matcher
    output: Sequence[int]
    drafts: Sequence[int] = ()

    def allowed(self) -> bytes:
        """`Matcher.allowed`."""
        return self.matcher.allowed(self.output, self.drafts)


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """How one row's logits become a token."""

    params: SamplingParams
    sample_index: int
    position: int
    """Absolute position of the token to choose: prompt length + number of output tokens so far."""
    counts: TokenCounts | None
    """None when no penalty applies."""
    banned: frozenset[int] = frozenset()
    """Ids that may not be chosen now (stop tokens before min_tokens)."""
    num_banned: int = 1
    """For how many tokens from this one on `banned` holds."""
    logprobs: int | None = None
    guide: Guide | None = None
    """None: no grammar."""

    def after(self, drafts: Sequence[int]) -> "SampleSpec":
        """How the token after some drafts is chosen: as plain steps would once they had come out."""
        if not drafts:
            return self
        counts = self.counts
        if counts is not None:
            output = dict(counts.output)
            for token_id in drafts:
                output[token_id] = output.get(token_id, 0) + 1
            counts = TokenCounts(prompt=counts.prompt, output=output)
        left = self.num_banned - len(drafts)
        return replace(
            self,
            position=self.position + len(drafts),
            counts=counts,
            banned=self.banned if left > 0 else frozenset(),
            num_banned=left,
            guide=None if self.guide is None else replace(self.guide, drafts=tuple(drafts)),
        )


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """One token of one sample: fed to the model, and the next one chosen."""

    key: str
    slot: int
    block_table: Sequence[int]
    token_id: int | None
    """None: what the step before chooses for this key, which is still in flight."""
    position: int
    """Absolute position of token_id = number of tokens in the caches before this step."""
    sample: SampleSpec | None
    """None: the token is replayed and its successor already known."""
    drafts: Sequence[int] = ()
    """Proposals for the tokens after token_id, verified in this step; the pages cover them. Never of a replayed row."""
    draft_laws: Sequence[bytes] = ()
    """float32 [X] a draft, the law that it was drawn from, for chain rejection; empty: each was certain."""


@dataclass(frozen=True, kw_only=True)
class FirstRow:
    """A sample whose first token comes from the logits row of its hand-off."""

    key: str
    slot: int
    """Slot whose handed-over logits row is read."""
    sample: SampleSpec


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Copy the state that landed for one sample to another: a slot, and the prompt's last page if it is partial."""

    source_slot: int
    target_slot: int
    source_page: int | None
    target_page: int | None


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """One step of continuous batching. Rows are packed; no order is implied between the two kinds."""

    rows: Sequence[DecodeRow]
    first: Sequence[FirstRow] = ()
    forks: Sequence[Fork] = ()
    """Copies to make before the step."""

    @property
    def num_tokens(self) -> int:
        """Rows that the model computes, the drafts too."""
        return sum(1 + len(row.drafts) for row in self.rows)

    @property
    def all_rows(self) -> "list[DecodeRow | FirstRow]":
        return [*self.rows, *self.first]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A chosen token. Log-probabilities are of the raw model distribution, natural logarithm."""

    token_id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """Result of a step."""

    sampled: Mapping[str, Sequence[Sampled]] = field(default_factory=dict)
    """Key that asked for a token → the drafts that were accepted, then one token more."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Key → why this row alone cannot go on (non-finite state or logits, no token left to choose), after the tokens
    that it has in `sampled`.
    """
    compute_s: float = 0.0
    commit_s: float = 0.0
    """Part of compute_s in which the states advanced by accepted drafts."""
