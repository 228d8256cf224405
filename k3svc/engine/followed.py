"""What decode knows of a sample that drafters follow."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3svc.core.sample import Sample
from k3svc.core.speculation import Acceptance, Usable
from k3svc.engine.listening import Listening
from k3svc.engine.ports import DraftProposal
from k3svc.engine.settle import VerifyRule

PATIENCE_STEPS = 16
"""Steps without an answer after which a sample asks again: a drafter that is late would only be later for more wishes.
"""


@dataclass(kw_only=True, eq=False)
class Followed:
    """A sample that drafters know of."""

    sample: Sample
    attempt: int
    base_len: int
    """Of the last commit: position of the anchor."""
    acceptance: Acceptance
    listening: Listening
    wanted: int
    """Proposals that the last commit asked for, 0: none."""
    asked: int | None
    """Base of the last wish while it is not answered."""
    patience: int = PATIENCE_STEPS
    """Steps until an answer is given up."""
    sleep: int = 0
    """Steps until it is asked for drafts again."""
    lagged: list[float] = field(default_factory=list)
    """Survivals of the proposal before, for a rule whose lengths must not depend on the drafts."""
    expected: float = 0.0
    """Accepted drafts that the confidences of the drafts under verification promise, unscaled."""
    seen: DraftProposal | None = None
    """The newest proposal."""

    def is_unanswered(self, proposal: DraftProposal | None) -> bool:
        """Whether a wish of the sample is still worked on, as far as the newest proposal tells; asked once a commit."""
        if self.asked is not None and proposal is not None and proposal.attempt == self.attempt:
            self.asked = self.asked if proposal.base_len < self.asked else None
        self.patience -= 1
        if self.patience <= 0:
            self.asked = None
        return self.asked is not None

    def chances(self, found: Usable, rule: VerifyRule) -> list[float]:
        """Survivals of the drafts of a proposal."""
        acceptance, count = self.acceptance, len(found.tokens)
        if rule == "exact":
            return acceptance.survivals(count, found.confidences)
        if len(self.lagged) >= count and found.first == 0:
            return [min(0.999, value * acceptance.scale) for value in self.lagged[:count]]
        return acceptance.survivals(count, ())

    def laws(self, found: Usable, count: int, vocab_size: int) -> Sequence[bytes]:
        """Those of the first drafts, or none when they are not whole: then the drafts count as certain."""
        if self.seen is None:
            return ()
        laws = tuple(self.seen.probs[found.first : found.first + count])
        return laws if len(laws) == count and all(len(law) == 4 * vocab_size for law in laws) else ()
