"""Listening: a sample that drafters propose for while nobody waits. They are told of it now and then only, with the
features of all steps since, and what they proposed is compared with what comes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3svc.core.speculation import Acceptance, survivals
from k3svc.engine.ports import DraftProposal

FEWEST_HEARD, MOST_HEARD = 3, 8
"""Proposals that a verdict takes."""
FIRST_PERIOD, LAST_PERIOD = 4, 32
"""Tokens from one wish to the next at first; twice as many after each verdict against the drafts."""


@dataclass(kw_only=True, eq=False)
class Listening:
    """Of one sample, from one opening at the drafter to its end."""

    acceptance: Acceptance
    period: int = FIRST_PERIOD
    """Tokens from one wish to the next."""
    num_heard: int = 0
    """Proposals that were compared since the last verdict."""
    rows: bytearray = field(default_factory=bytearray)
    """Features that the drafter has not been told of, from the base on."""
    num_rows: int = 0
    to_wish: int = 0
    """Tokens until the next wish."""
    _waiting: list[DraftProposal] = field(default_factory=list)
    """Those that are still to be compared with what comes out."""

    def hear(self, proposal: DraftProposal) -> None:
        """A proposal has come."""
        self._waiting.append(proposal)

    def compare(self, output: Sequence[int], prompt_len: int) -> bool:
        """What was heard with what came out; whether more is known by that."""
        num_heard = self.num_heard
        for proposal in self._waiting[:]:
            tokens, out = proposal.tokens, output[proposal.base_len + 1 - prompt_len :]
            pairs = list(zip(tokens, out, strict=False))
            num_right = next((place for place, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
            if num_right < len(pairs) or len(pairs) == len(tokens):
                self._waiting.remove(proposal)
                self.num_heard += 1
                self.acceptance.observe(len(tokens), num_right, sum(survivals(proposal.confidences)))
        return self.num_heard > num_heard

    def doubt(self) -> None:
        """The drafts were not worth it: what comes later is judged by itself, and less often."""
        self.num_heard = 0
        self.acceptance.forget()
        self.period = min(2 * self.period, LAST_PERIOD)

    def may_wish(self, num_tokens: int) -> bool:
        """Whether to ask for proposals; so many tokens have come since this was asked before."""
        self.to_wish -= num_tokens
        if self.to_wish > 0:
            return False
        self.to_wish = self.period
        return True

    def take(self, num_rows: int) -> memoryview | None:
        """The rows that were kept, if they are so many; none are kept any more."""
        rows = memoryview(self.rows) if num_rows and self.num_rows == num_rows else None
        self.rows, self.num_rows = bytearray(), 0
        return rows
