"""What decode, prefill and draft services tell each other, as values (protos/k3svc/v1/draft_service.proto)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3svc.core.request import SamplingParams
from k3svc.errors import Incompatible

FEATURE_BYTES = {"float32": 4, "bfloat16": 2}
"""Dtypes of features on the wire, and their bytes."""


_NOT_COMPARED = ("feature_dtype", "model_name", "draft_name")


@dataclass(frozen=True, kw_only=True)
class DraftProfile:
    """What target and draft side must have in common; field by field as in k3svc.v1.DraftProfile."""

    protocol: int
    model: str
    tokenizer: str
    draft: str
    target_layers: tuple[int, ...]
    feature_width: int
    feature_dtype: str
    num_proposals: int
    anchor_predicts: bool
    mask_token_id: int
    vocab_size: int
    window: int
    """Context rows that the draft was trained to see; 0: all."""
    model_name: str = ""
    """Directory name of the target, for messages; not compared."""
    draft_name: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one feature row."""
        return self.feature_width * FEATURE_BYTES[self.feature_dtype]

    def check(self, other: "DraftProfile") -> None:
        """Raises Incompatible that names the first field in which `other`, the peer's, differs. Its dtype is that of
        what it sends, which may be any that this side reads.
        """
        for name in (name for name in DraftProfile.__dataclass_fields__ if name not in _NOT_COMPARED):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise Incompatible(
                    f"{name}: got {_named(other, name)}; this draft service has {_named(self, name)}",
                    reason="DRAFT_MISMATCH",
                    field=name,
                )
        if other.feature_dtype not in FEATURE_BYTES:
            raise Incompatible(
                f"feature_dtype: got {_shown(other.feature_dtype)}; allowed: {', '.join(FEATURE_BYTES)}",
                reason="DRAFT_MISMATCH",
                field="feature_dtype",
            )


@dataclass(frozen=True, kw_only=True)
class SampleOpen:
    """A sample to follow, and a wish for its first proposals."""

    handle: int
    attempt: int
    base_len: int
    anchor: int
    want: int
    ticket: str
    params: SamplingParams
    sample_index: int
    with_probs: bool


@dataclass(frozen=True, kw_only=True)
class SampleFeatures:
    """Features of consecutive tokens of a sample, from position `start` on."""

    handle: int
    attempt: int
    start: int
    num_rows: int
    data: memoryview


@dataclass(frozen=True, kw_only=True)
class SampleCommit:
    """The new anchor of a sample, and how many proposals are wanted after it."""

    handle: int
    attempt: int
    base_len: int
    count: int
    """Tokens that the step added, the anchor among them: it began at base_len - count."""
    anchor: int
    want: int


@dataclass(frozen=True, kw_only=True)
class SessionStep:
    """One message of decode; what is in it applies in the order of these fields."""

    step: int = 0
    """Rises with each message that wishes for proposals; 0: this one does not."""
    closes: Sequence[int] = ()
    opens: Sequence[SampleOpen] = ()
    features: Sequence[SampleFeatures] = ()
    commits: Sequence[SampleCommit] = ()


@dataclass(frozen=True, kw_only=True)
class SampleProposal:
    """Token k is meant for position base_len + 1 + k."""

    handle: int
    attempt: int
    base_len: int
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    """One a token, or none at all."""
    truncated: bool
    probs: bytes = b""
    """float32 [tokens, X], or nothing."""


@dataclass(frozen=True, kw_only=True)
class SampleGap:
    """A sample whose context is wanted again from position `start` on."""

    handle: int
    attempt: int
    start: int


@dataclass(frozen=True, kw_only=True)
class SessionAnswer:
    """One message of the draft service."""

    step: int
    """The last step whose wishes have been answered as far as they will be."""
    credits: int
    """Samples that could be opened now."""
    draft_us: int = 0
    proposals: Sequence[SampleProposal] = ()
    gaps: Sequence[SampleGap] = ()
    refused: Sequence[int] = field(default=())
    """Handles that are not followed."""


@dataclass(frozen=True, kw_only=True)
class ContextStart:
    """A prompt whose features a prefill service is about to push."""

    profile: DraftProfile
    ticket: str
    attempt: int
    num_tokens: int


def _named(profile: DraftProfile, name: str) -> str:
    """A value as a message shows it; a hash beside the directory that it is of."""
    shown, directory = _shown(getattr(profile, name)), getattr(profile, f"{name}_name", "")
    return f"{_shown(directory)} with hash {shown}" if directory else shown


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
