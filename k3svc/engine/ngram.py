"""A drafter that needs no model: what followed the last time that the same tokens stood there (prompt lookup).

Lossless as every drafter is; good where text repeats itself. It answers within the call that asks.
"""

from collections.abc import Sequence

from k3svc.engine.ports import DraftCommit, DraftOpen, DraftProposal, FeatureRows

READ_AT_ONCE = 256
"""Tokens of prompts that are read in one turn, over all samples: a long prompt takes longer than the event loop may be
kept.
"""
LONGEST = 4
NOTHING = -1
"""Stands before the first token as often as an ending may reach there."""


def _endings(tokens: Sequence[int], end: int) -> tuple[int, int, int]:
    """Keys of the last 2, 3 and LONGEST tokens before `end`. They are numbers: tuples would be seen to by the garbage
    collector, which stops the event loop.
    """
    fourth, third, second, first = tokens[end - LONGEST : end]
    pair = (first + 1) << 32 | second + 1
    triple = pair << 32 | third + 1
    return pair, triple, triple << 32 | fourth + 1


class _Text:
    """Places are indices of `tokens`."""

    def __init__(self, attempt: int, known: Sequence[int]) -> None:
        self.attempt = attempt
        self.tokens = [NOTHING] * (LONGEST - 1)
        self._begin = len(self.tokens)
        self.tokens += known
        self._last: dict[int, int] = {}
        """Ending → where what followed it the last time begins."""
        self._before: dict[int, int] = {}
        """The same of the time before."""
        self.unread = len(known)
        """Of so many first tokens the endings are not known yet."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) - self._begin

    def extend(self, tokens: Sequence[int]) -> None:
        for token_id in tokens:
            self.tokens.append(token_id)
            end = len(self.tokens)
            for ending in _endings(self.tokens, end):
                if ending in self._last:
                    self._before[ending] = self._last[ending]
                self._last[ending] = end

    def read_back(self, count: int) -> int:
        """Reads up to `count` of the unread tokens, the newest first; how many it were."""
        count = min(count, self.unread)
        newest = self._begin + self.unread
        for end in range(newest, newest - count, -1):
            for ending in _endings(self.tokens, end):
                if ending not in self._last:
                    self._last[ending] = end
                elif ending not in self._before:
                    self._before[ending] = end
        self.unread -= count
        return count

    def continuation(self, count: int) -> list[int]:
        """What followed the longest ending that stood here before."""
        for ending in reversed(_endings(self.tokens, len(self.tokens))):
            start = self._before.get(ending)
            if start is not None:
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
        self._has_read = False
        """In this turn: commits follow opens."""

    @property
    def num_proposals(self) -> int:
        return self._num_proposals

    @property
    def wants_features(self) -> bool:
        return False

    def open(self, opens: Sequence[DraftOpen]) -> None:
        for opened in opens:
            text = _Text(opened.attempt, opened.known)
            self._texts[opened.key] = self._unread[opened.key] = text
            # The newest ending is known before any other is compared with it.
            text.read_back(1)
        self._read()
        self._has_read = True
        for opened in opens:
            self._propose(opened.key, self._texts[opened.key], self._num_proposals)

    def push(self, rows: Sequence[FeatureRows]) -> None:
        raise AssertionError(f"{len(rows)} feature rows that nobody wants")

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        if not self._has_read:
            self._read()
        self._has_read = False
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
            key=key, attempt=text.attempt, base_len=text.num_tokens - 1, tokens=tuple(tokens)
        )
