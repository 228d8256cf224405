"""A drafter that needs no model: what followed the last time that the same tokens stood there (prompt lookup).

Lossless as every drafter is; good where text repeats itself. It answers within the call that asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3svc.engine.ports import DraftCommit, DraftOpen, DraftProposal, FeatureRows

LONGEST = 4
SHORTEST = 2
"""Lengths of the endings that are looked for, the longest first."""
READ_AT_ONCE = 512
"""Tokens of prompts that a call reads, over all samples: a long prompt takes longer than the event loop may be kept."""


@dataclass(kw_only=True, eq=False)
class _Text:
    attempt: int
    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    """n tokens → where what followed them begins: the last time, and the time before."""
    unread: int = 0
    """Of so many first tokens the endings are not in `places` yet."""

    def extend(self, tokens: Sequence[int]) -> None:
        for token_id in tokens:
            self.tokens.append(token_id)
            end = len(self.tokens)
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                ending = tuple(self.tokens[end - size :])
                self.places[ending] = (end, self.places.get(ending, (0, 0))[0])

    def read_back(self, count: int) -> int:
        """Reads up to `count` of the unread tokens, the newest first; how many it were."""
        count = min(count, self.unread)
        for end in range(self.unread, self.unread - count, -1):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                ending = tuple(self.tokens[end - size : end])
                last, before = self.places.get(ending, (0, 0))
                if not before:
                    self.places[ending] = (last, end) if last else (end, 0)
        self.unread -= count
        return count

    def continuation(self, count: int) -> list[int]:
        """What followed the longest ending that stood here before."""
        for size in range(min(LONGEST, len(self.tokens)), SHORTEST - 1, -1):
            start = self.places.get(tuple(self.tokens[-size:]), (0, 0))[1]
            if start:
                found = self.tokens[start : start + count]
                # An ending that overlaps what followed it repeats with the distance as its period.
                period = len(self.tokens) - start
                return [found[place % period] for place in range(count)]
        return []


class NgramDrafter:
    """`Drafter` over the tokens of each sample alone."""

    name = "ngram"

    def __init__(self, *, num_proposals: int) -> None:
        self._num_proposals = num_proposals
        self._texts: dict[str, _Text] = {}
        self._unread: dict[str, _Text] = {}
        """Of which not all has been read, the oldest first."""
        self._proposals: dict[str, DraftProposal] = {}

    @property
    def num_proposals(self) -> int:
        return self._num_proposals

    @property
    def wants_features(self) -> bool:
        return False

    def open(self, opens: Sequence[DraftOpen]) -> None:
        for opened in opens:
            text = _Text(attempt=opened.attempt, tokens=list(opened.known), unread=len(opened.known))
            self._texts[opened.key] = self._unread[opened.key] = text
            # The newest ending is known before any other is compared with it.
            text.read_back(1)
        self._read()
        for opened in opens:
            self._propose(opened.key, self._texts[opened.key], self._num_proposals)

    def push(self, rows: Sequence[FeatureRows]) -> None:
        raise AssertionError(f"{len(rows)} feature rows that nobody wants")

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        self._read()
        for commit in commits:
            text = self._texts[commit.key]
            text.extend(commit.tokens)
            self._propose(commit.key, text, commit.want)

    def close(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._texts.pop(key, None)
            self._unread.pop(key, None)
            self._proposals.pop(key, None)

    def proposal(self, key: str) -> DraftProposal | None:
        return self._proposals.get(key)

    async def wait(self, timeout_s: float) -> bool:  # noqa: ARG002  the port's signature
        return True

    def _read(self) -> None:
        left = READ_AT_ONCE
        for key, text in list(self._unread.items()):
            left -= text.read_back(left)
            if not text.unread:
                del self._unread[key]
            if not left:
                break

    def _propose(self, key: str, text: _Text, want: int) -> None:
        tokens = text.continuation(want) if want else []
        self._proposals[key] = DraftProposal(
            key=key, attempt=text.attempt, base_len=len(text.tokens) - 1, tokens=tuple(tokens)
        )
