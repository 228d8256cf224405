"""Token ids to text, a few at a time, with stop strings.

What `push` returns is final: it never ends inside a UTF-8 character, nor inside what may become a stop
string. Joined, the deltas equal the text of all ids decoded at once, however the ids were split. The work per
push is proportional to the new bytes.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from k3svc.errors import InvalidRequest
from k3svc.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """What one push added.

    `stopped_by` is the stop string that ended the text, `num_tokens_consumed` how many of the pushed ids belong
    to the output, with the one that completed the stop string.
    """

    text: str
    stopped_by: str | None
    num_tokens_consumed: int


class IncrementalDetokenizer:
    """The text of one sample. After a stop string it takes no more tokens."""

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_control: bool = True, min_tokens: int = 0
    ) -> None:
        """`skip_control` leaves control tokens out of the text; otherwise their names appear, which the parser of chat
        output needs. Of several stop strings the one that ends first wins, of those that end together the longest.
        They are looked for from output token number `min_tokens` on, counted from 1.

        Errors: InvalidRequest for an empty stop string.
        """
        for i, text in enumerate(stop):
            if not text:
                raise InvalidRequest(f"stop[{i}]", text, "a string of at least one character")
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = _StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._stopped_by: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next ids. Errors: InvalidRequest for an id outside the vocabulary."""
        parts: list[str] = []
        consumed = 0
        for token_id in token_ids:
            if self._stopped_by is not None:
                break
            consumed += 1
            self._num_tokens += 1
            data = self._tokenizer.token_bytes(token_id)
            if self._skip_control and self._tokenizer.is_control(token_id):
                continue
            text = self._utf8.decode(data)
            parts.append(text if self._num_tokens < self._min_tokens else self._release(text))
        return TextDelta(text="".join(parts), stopped_by=self._stopped_by, num_tokens_consumed=consumed)

    def finish(self) -> str:
        """The text held back, with U+FFFD for an unfinished character; empty after a stop string."""
        if self._stopped_by is not None:
            return ""
        text = self._release(self._utf8.decode(b"", final=True))
        if self._stopped_by is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        """The part of held and new text that no stop string can reach any more."""
        if self._matcher is None:
            return text
        end = self._matcher.scan(text)
        if self._matcher.matched is not None:
            self._stopped_by = self._matcher.matched
            text, keep = text[:end], len(self._stopped_by)
        else:
            keep = self._matcher.pending
        text = self._held + text
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


class _StopMatcher:
    """All stop strings at once in one pass over the text (Aho and Corasick, 1975)."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for pattern in patterns:
            state = 0
            for char in pattern:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self._depth.append(self._depth[state] + 1)
                    self._match.append(None)
                state = self._next[state][char]
            self._match[state] = pattern
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self._match[state] is None:
                self._match[state] = self._match[self._fail[state]]
            for char, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], char)
                queue.append(child)
        self._state = 0

    def scan(self, text: str) -> int:
        """Read `text` up to the end of the first match; how many characters that were."""
        for i, char in enumerate(text):
            self._state = self._step(self._state, char)
            if self.matched is not None:
                return i + 1
        return len(text)

    @property
    def matched(self) -> str | None:
        return self._match[self._state]

    @property
    def pending(self) -> int:
        """Length of the longest end of the text that begins some stop string."""
        return self._depth[self._state]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)
