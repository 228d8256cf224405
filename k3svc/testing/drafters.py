"""Drafters without a model, one for each way in which a drafter can be good, bad or gone (speculation.md 9.6).

None of them may change a token. They answer within the call that asks, unless said otherwise, and they check what the
port promises them: attempts rise, bases add up, features belong to rows that may still be committed.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from k3svc.engine.ports import DraftCommit, Drafter, DraftOpen, DraftProposal, FeatureRows


@dataclass(kw_only=True, eq=False)
class _Sample:
    open: DraftOpen
    known: list[int]

    @property
    def base_len(self) -> int:
        return len(self.known) - 1


class StubDrafter:
    """A Drafter that asks `draft` for the tokens after a prefix. `feature_width`: bytes of a feature row; 0: it wants
    none.
    """

    name = "stub"

    def __init__(self, *, num_proposals: int = 4, feature_width: int = 0) -> None:
        self._num_proposals = num_proposals
        self._feature_width = feature_width
        self._samples: dict[str, _Sample] = {}
        self._attempts: dict[str, int] = {}
        self._proposals: dict[str, DraftProposal] = {}
        self.num_rows = 0
        """Feature rows that came."""
        self.num_opens = 0
        self.num_commits = 0

    @property
    def num_proposals(self) -> int:
        return self._num_proposals

    @property
    def wants_features(self) -> bool:
        return self._feature_width > 0

    @property
    def keys(self) -> frozenset[str]:
        """Samples that are open."""
        return frozenset(self._samples)

    def draft(self, opened: DraftOpen, known: Sequence[int], count: int) -> Sequence[int]:
        """Up to `count` tokens after `known`."""
        raise NotImplementedError

    def open(self, opens: Sequence[DraftOpen]) -> None:
        for opened in opens:
            assert opened.attempt > self._attempts.get(opened.key, -1), f"{opened.key}: attempt {opened.attempt} again"
            assert opened.known, f"{opened.key}: opened without an anchor"
            self.num_opens += 1
            self._attempts[opened.key] = opened.attempt
            sample = self._samples[opened.key] = _Sample(open=opened, known=list(opened.known))
            self._proposals.pop(opened.key, None)
            self._answer(sample, self._num_proposals)

    def push(self, rows: Sequence[FeatureRows]) -> None:
        assert self.wants_features, "features that nobody wants"
        for row in rows:
            assert row.num_rows > 0, f"{row.key}: no rows"
            assert row.data.nbytes == row.num_rows * self._feature_width, f"{row.key}: {row.data.nbytes} bytes"
            self.num_rows += row.num_rows
            sample = self._samples.get(row.key)
            if sample is not None and sample.open.attempt == row.attempt:
                assert row.start == sample.base_len, f"{row.key}: rows from {row.start}, base {sample.base_len}"

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        for commit in commits:
            sample = self._samples[commit.key]
            assert commit.attempt == sample.open.attempt, f"{commit.key}: attempt {commit.attempt}"
            assert commit.tokens, f"{commit.key}: a step without tokens"
            assert 0 <= commit.want <= self._num_proposals, f"{commit.key}: {commit.want} wanted"
            if commit.features is not None:
                size = len(commit.tokens) * self._feature_width
                assert commit.features.nbytes == size, f"{commit.key}: {commit.features.nbytes} bytes"
                self.num_rows += len(commit.tokens)
            sample.known += commit.tokens
            assert commit.base_len == sample.base_len, f"{commit.key}: base {commit.base_len}, is {sample.base_len}"
            self.num_commits += 1
            if commit.want:
                self._answer(sample, commit.want)

    def close(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._samples.pop(key, None)
            self._proposals.pop(key, None)

    def proposal(self, key: str) -> DraftProposal | None:
        return self._proposals.get(key)

    async def wait(self, timeout_s: float) -> bool:  # noqa: ARG002  the port's signature
        return True

    def _answer(self, sample: _Sample, want: int) -> None:
        tokens = tuple(self.draft(sample.open, tuple(sample.known), want))
        self._deliver(
            DraftProposal(key=sample.open.key, attempt=sample.open.attempt, base_len=sample.base_len, tokens=tokens)
        )

    def _deliver(self, proposal: DraftProposal) -> None:
        self._proposals[proposal.key] = proposal


class OracleDrafter(StubDrafter):
    """Knows the output of every sample; each token is replaced with chance `epsilon`.

    `truth` gives prompt and output of a sample. The same token of a sample is wrong whenever it is proposed, so the
    acceptance length over a long output tends to the sum over k = 0..γ of (1 - epsilon)^k.
    """

    name = "oracle"

    def __init__(
        self,
        truth: Callable[[DraftOpen], Sequence[int]],
        *,
        epsilon: float = 0.0,
        vocab_size: int,
        seed: int = 0,
        num_proposals: int = 4,
        feature_width: int = 0,
    ) -> None:
        super().__init__(num_proposals=num_proposals, feature_width=feature_width)
        self._truth, self._epsilon, self._vocab_size, self._seed = truth, epsilon, vocab_size, seed

    def draft(self, opened: DraftOpen, known: Sequence[int], count: int) -> Sequence[int]:
        start = len(known)
        tokens = self._truth(opened)[start : start + count]
        return [self._corrupted(opened.key, start + index, token) for index, token in enumerate(tokens)]

    def _corrupted(self, key: str, position: int, token: int) -> int:
        rng = random.Random(f"{self._seed}/{key}/{position}")
        return (
            (token + rng.randrange(1, self._vocab_size)) % self._vocab_size if rng.random() < self._epsilon else token
        )


class RandomDrafter(StubDrafter):
    """Draws tokens from the whole vocabulary."""

    name = "random"

    def __init__(self, *, vocab_size: int, seed: int = 0, num_proposals: int = 4, feature_width: int = 0) -> None:
        super().__init__(num_proposals=num_proposals, feature_width=feature_width)
        self._vocab_size, self._rng = vocab_size, random.Random(seed)

    def draft(self, opened: DraftOpen, known: Sequence[int], count: int) -> Sequence[int]:  # noqa: ARG002
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]


class RepeatLastDrafter(StubDrafter):
    """Proposes the anchor again and again."""

    name = "repeat-last"

    def draft(self, opened: DraftOpen, known: Sequence[int], count: int) -> Sequence[int]:  # noqa: ARG002
        return [known[-1]] * count


class _Wrapped:
    """A Drafter around another one, the same unless overridden."""

    name = "wrapped"

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner

    @property
    def num_proposals(self) -> int:
        return self._inner.num_proposals

    @property
    def wants_features(self) -> bool:
        return self._inner.wants_features

    def open(self, opens: Sequence[DraftOpen]) -> None:
        self._inner.open(opens)

    def push(self, rows: Sequence[FeatureRows]) -> None:
        self._inner.push(rows)

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        self._inner.commit(commits)

    def close(self, keys: Sequence[str]) -> None:
        self._inner.close(keys)

    def proposal(self, key: str) -> DraftProposal | None:
        return self._inner.proposal(key)

    async def wait(self, timeout_s: float) -> bool:
        return await self._inner.wait(timeout_s)


class SlowDrafter(_Wrapped):
    """Answers `delay_s` after it was asked; later answers overtake no earlier ones."""

    name = "slow"

    def __init__(self, inner: Drafter, *, delay_s: float) -> None:
        super().__init__(inner)
        self._delay_s = delay_s
        self._arrived: dict[str, DraftProposal] = {}
        self._outstanding = 0
        self._changed = asyncio.Event()

    def open(self, opens: Sequence[DraftOpen]) -> None:
        self._inner.open(opens)
        self._schedule([opened.key for opened in opens])

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        self._inner.commit(commits)
        self._schedule([commit.key for commit in commits if commit.want])

    def close(self, keys: Sequence[str]) -> None:
        self._inner.close(keys)
        for key in keys:
            self._arrived.pop(key, None)

    def proposal(self, key: str) -> DraftProposal | None:
        return self._arrived.get(key)

    async def wait(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self._outstanding and (left_s := end - loop.time()) > 0:
            self._changed.clear()
            timer = loop.call_later(left_s, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
        return self._outstanding == 0

    def _schedule(self, keys: Sequence[str]) -> None:
        made = [proposal for key in keys if (proposal := self._inner.proposal(key)) is not None]
        if made:
            self._outstanding += 1
            asyncio.get_running_loop().call_later(self._delay_s, self._arrive, made)

    def _arrive(self, proposals: Sequence[DraftProposal]) -> None:
        self._outstanding -= 1
        for proposal in proposals:
            if self._inner.proposal(proposal.key) is not None:
                self._arrived[proposal.key] = proposal
        self._changed.set()


class FlakyDrafter(_Wrapped):
    """Loses each answer with chance `loss`, and is DOWN at a step with chance `down`."""

    name = "flaky"

    def __init__(self, inner: Drafter, *, loss: float = 0.3, down: float = 0.1, seed: int = 0) -> None:
        super().__init__(inner)
        self._loss, self._down, self._rng = loss, down, random.Random(seed)
        self._lost: set[tuple[str, int, int]] = set()
        self._is_down = False

    @property
    def num_proposals(self) -> int:
        return 0 if self._is_down else self._inner.num_proposals

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        self._inner.commit(commits)
        self._is_down = self._rng.random() < self._down
        self._lost = {
            (commit.key, commit.attempt, commit.base_len) for commit in commits if self._rng.random() < self._loss
        }

    def proposal(self, key: str) -> DraftProposal | None:
        proposal = self._inner.proposal(key)
        if self._is_down or proposal is None or (key, proposal.attempt, proposal.base_len) in self._lost:
            return None
        return proposal


class LiarDrafter(_Wrapped):
    """Answers with what no drafter may: wrong bases and attempts, ids outside the vocabulary, masks, blocks too long,
    empty ones, confidences that are none. Each lie in turn.
    """

    name = "liar"

    def __init__(self, inner: Drafter, *, vocab_size: int, mask_token_id: int) -> None:
        super().__init__(inner)
        self._vocab_size, self._mask = vocab_size, mask_token_id
        self.num_lies = 0

    def proposal(self, key: str) -> DraftProposal | None:
        proposal = self._inner.proposal(key)
        if proposal is None:
            return None
        lies = self._lies(proposal)
        self.num_lies += 1
        return lies[self.num_lies % len(lies)]

    def _lies(self, honest: DraftProposal) -> list[DraftProposal]:
        tokens, base = tuple(honest.tokens), honest.base_len
        far = [replace(honest, base_len=length) for length in (base - 1, base + 1, base + 1000, 0, -5, 1 << 62)]
        spoilt = [(*tokens[:1], bad, *tokens[1:]) for bad in (self._vocab_size, -1, 1 << 40, self._mask)]
        return [
            *far,
            *(replace(honest, tokens=given) for given in (*spoilt, (self._vocab_size,), tokens * 500, ())),
            *(replace(honest, confidences=given) for given in ((float("nan"),) * len(tokens), (2.0,), (-1.0,) * 99)),
            replace(honest, attempt=honest.attempt - 1),
            replace(honest, attempt=honest.attempt + 1),
            replace(honest, probs=(b"",)),
            replace(honest, key=f"not {honest.key}"),
        ]


class StaleDrafter(_Wrapped):
    """Answers for the base of the step before."""

    name = "stale"

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self._before: dict[str, DraftProposal | None] = {}

    def open(self, opens: Sequence[DraftOpen]) -> None:
        for opened in opens:
            self._before[opened.key] = None
        self._inner.open(opens)

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        for commit in commits:
            self._before[commit.key] = self._inner.proposal(commit.key)
        self._inner.commit(commits)

    def close(self, keys: Sequence[str]) -> None:
        self._inner.close(keys)
        for key in keys:
            self._before.pop(key, None)

    def proposal(self, key: str) -> DraftProposal | None:
        return self._before.get(key)


class DeadDrafter(_Wrapped):
    """Dies after `commits` calls of `commit`. Known to be dead it is DOWN; else it never answers again, and everybody
    who waits for it waits in vain.
    """

    name = "dead"

    def __init__(self, inner: Drafter, *, commits: int = 0, is_known: bool = True) -> None:
        super().__init__(inner)
        self._left, self._is_known = commits, is_known

    @property
    def is_dead(self) -> bool:
        return self._left <= 0

    @property
    def num_proposals(self) -> int:
        return 0 if self.is_dead and self._is_known else self._inner.num_proposals

    def commit(self, commits: Sequence[DraftCommit]) -> None:
        self._left -= 1
        self._inner.commit(commits)

    def proposal(self, key: str) -> DraftProposal | None:
        return None if self.is_dead else self._inner.proposal(key)

    async def wait(self, timeout_s: float) -> bool:
        if not self.is_dead:
            return await self._inner.wait(timeout_s)
        if not self._is_known:
            await asyncio.sleep(timeout_s)
        return self._is_known
