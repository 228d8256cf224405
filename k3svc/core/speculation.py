"""Arithmetic of speculation: which proposals can be used, how many of them are worth verifying, how long to wait.

Plain functions and small states; callers pass times in. Nothing here can change a token: a proposal decides how many
rows a step has, and the rule of verification what comes out of them. Letters: R samples of a step, M its rows, T(M)
seconds of a step of M rows.
"""

import bisect
import enum
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from k3svc.core.events import SpeculationStats

RATE = 0.1
"""Weight of a new value in the moving averages."""
FIRST_ACCEPTANCE = 0.8
"""Chance that a draft is accepted, of a sample that nothing is known of: high, or nobody would wait and find out."""
PRIOR_BLOCKS = 4
"""Blocks that this counts as."""


@dataclass(frozen=True, kw_only=True)
class Usable:
    """What of a proposal continues a sample."""

    first: int
    """Tokens of the proposal that have come out since it was made; more than 0: it was late and is salvaged."""
    tokens: Sequence[int]
    confidences: Sequence[float]
    """One a token, in [0, 1], or none."""


def usable_part(
    tokens: Sequence[int],
    confidences: Sequence[float],
    *,
    base_len: int,
    output: Sequence[int],
    prompt_len: int,
    vocab_size: int,
    longest: int,
    mask_token_id: int | None,
) -> Usable | None:
    """The part of a proposal for base `base_len` that continues prompt and output, None when there is none.

    A proposal is usable iff the sample has put out its first tokens since (speculation.md 5.5); it ends before the
    first id that no token may have, and one longer than any may be is no proposal.
    """
    anchor = base_len - prompt_len
    first = len(output) - 1 - anchor
    if anchor < 0 or not 0 <= first < len(tokens) or len(tokens) > longest:
        return None
    if tuple(output[anchor + 1 :]) != tuple(tokens[:first]):
        return None
    good = first
    while good < len(tokens) and 0 <= tokens[good] < vocab_size and tokens[good] != mask_token_id:
        good += 1
    if good == first:
        return None
    trusted = len(confidences) == len(tokens) and all(0.0 <= value <= 1.0 for value in confidences)
    return Usable(
        first=first, tokens=tuple(tokens[first:good]), confidences=tuple(confidences[first:good]) if trusted else ()
    )


def survivals(confidences: Sequence[float]) -> list[float]:
    """Chance that the first j drafts are accepted, j = 1.., of the chances that each is if those before it are."""
    out, product = [], 1.0
    for value in confidences:
        product *= value
        out.append(product)
    return out


def verify_lengths(
    chances: Mapping[str, Sequence[float]],
    *,
    num_rows: int,
    plain_s: float,
    verify_s: Callable[[int], float],
    beside_s: float = 0.0,
) -> dict[str, int]:
    """How many drafts of each sample to verify: the most tokens a second (DSpark Algorithm 1, speculation.md 2.4).

    chances: survivals by sample, not rising. A step of `num_rows` rows without drafts takes plain_s, one of M rows with
    drafts verify_s(M), and before either beside_s have gone by, which are to bring something too. Candidates are taken
    in the order of their chances, and the best number of them is looked for among all, since measured times are a
    staircase. That is lossless where chances do not come from the drafts that they cut (they lag a step), or where
    acceptance does not depend on the draft (exact match).
    """
    order = sorted((-chance, place, key) for key, values in chances.items() for place, chance in enumerate(values))
    expected, best, best_rate = float(num_rows), 0, num_rows / (plain_s + beside_s)
    for count, (negative, _, _) in enumerate(order, start=1):
        expected -= negative
        rate = expected / (verify_s(num_rows + count) + beside_s)
        if rate > best_rate:
            best, best_rate = count, rate
    lengths = dict.fromkeys(chances, 0)
    for _, _, key in order[:best]:
        lengths[key] += 1
    return lengths


class StepTimes:
    """T(M): seconds of a step by its rows, between measured points in proportion; refined by real steps."""

    def __init__(self, points: Mapping[int, float]) -> None:
        """At least one point. More rows take no less: what a measurement says else is noise, which only adds."""
        self._rows = sorted(points)
        falling = itertools.accumulate((points[rows] for rows in reversed(self._rows)), min)
        self._seconds = list(falling)[::-1]

    @property
    def points(self) -> dict[int, float]:
        return dict(zip(self._rows, self._seconds, strict=True))

    def seconds(self, rows: int) -> float:
        """Past the last point in proportion to the rows."""
        left, right, share = self._neighbours(rows)
        if rows > self._rows[-1]:
            return self._seconds[-1] * rows / self._rows[-1]
        return self._seconds[left] + share * (self._seconds[right] - self._seconds[left])

    def observe(self, rows: int, seconds: float, rate: float = RATE) -> None:
        """A step took so long, which counts by `rate`; at most three times what was expected, since steps hang."""
        expected = self.seconds(rows)
        error = min(seconds, 3.0 * expected) - expected
        left, right, share = self._neighbours(rows)
        self._seconds[left] += rate * error * (1.0 - share)
        self._seconds[right] += rate * error * share

    def _neighbours(self, rows: int) -> tuple[int, int, float]:
        right = min(bisect.bisect_left(self._rows, rows), len(self._rows) - 1)
        left = max(right - 1, 0) if self._rows[right] > rows else right
        span = self._rows[right] - self._rows[left]
        return left, right, min(1.0, (rows - self._rows[left]) / span) if span else 1.0


@dataclass(frozen=True, kw_only=True)
class VerifyTimes:
    """Of decode steps on this machine."""

    plain: StepTimes
    """By samples."""
    verify: StepTimes
    """Of steps with drafts, by rows."""


class ReplyTimes:
    """How long proposals take, and how long to wait for the next ones."""

    WORTH = 0.9

    def __init__(self, *, shortest_s: float = 0.0003, longest_s: float = 0.05, first_s: float = 0.002) -> None:
        self._shortest_s, self.longest_s = shortest_s, longest_s
        self.mean_s = first_s
        self.deviation_s = first_s / 2

    def observe(self, seconds: float) -> None:
        """A reply came after so long, or had not come yet."""
        seconds = min(seconds, self.longest_s)
        self.deviation_s += RATE * (abs(seconds - self.mean_s) - self.deviation_s)
        self.mean_s += RATE * (seconds - self.mean_s)

    def deadline_s(self, gain_s: float) -> float:
        """Longest wait that pays, 0 when none does. `gain_s` is what plain steps would take longer for the same tokens
        than a step with drafts: where the mean reply leaves some of it, waiting pays, up to all of it (speculation.md
        5.2; 5.5 spends half, but a reply that is missed costs the wait and brings nothing).
        """
        if self.mean_s > self.WORTH * gain_s:
            return 0.0
        return min(max(self.mean_s + 3.0 * self.deviation_s, self._shortest_s), self.longest_s, gain_s)


class Health(enum.Enum):
    """What is to be expected of a drafter."""

    HEALTHY = "healthy"
    SLOW = "slow"
    """Half of its last replies were late: nobody waits, but now and then."""
    DOWN = "down"
    """There is nobody to propose."""


class HealthWatch:
    """HEALTHY or SLOW by the replies of the last steps that waited (speculation.md 5.5)."""

    WINDOW = 32
    PROBE_STEPS = 16
    PROBES = 3

    def __init__(self) -> None:
        self._missed: deque[bool] = deque(maxlen=self.WINDOW)
        self._steps_to_probe = 0
        self._good_probes = 0
        self.is_slow = False

    def may_wait(self) -> bool:
        """Whether to wait at this step; called once a step."""
        if not self.is_slow:
            return True
        self._steps_to_probe -= 1
        return self._steps_to_probe <= 0

    def observe(self, *, in_time: bool) -> None:
        """A step waited, and the replies came in time or not."""
        if self.is_slow:
            self._good_probes = self._good_probes + 1 if in_time else 0
            self._steps_to_probe = 1 if in_time else self.PROBE_STEPS
            if self._good_probes >= self.PROBES:
                self._missed.clear()
                self.is_slow = False
            return
        self._missed.append(not in_time)
        if len(self._missed) == self.WINDOW and 2 * sum(self._missed) >= self.WINDOW:
            self.is_slow, self._steps_to_probe, self._good_probes = True, self.PROBE_STEPS, 0


@dataclass(kw_only=True)
class Acceptance:
    """How the drafts of one sample fare: by place, since a block that begins well often ends well."""

    scale: float = 1.0
    """Accepted drafts over what their confidences promised."""
    num_blocks: int = 0
    _chances: list[float] = field(default_factory=list)
    """That the first 1, 2, ... drafts are accepted: moving averages over blocks, which begin with powers of
    FIRST_ACCEPTANCE.
    """

    def observe(self, num_drafts: int, num_accepted: int, expected: float) -> None:
        """A block was judged; `expected` is the sum of its confidences' survivals, 0 without confidences."""
        chances = self._of(num_drafts)
        rate = max(RATE, 1.0 / (self.num_blocks + PRIOR_BLOCKS))
        self.num_blocks += 1
        whole = chances[num_accepted - 1] if num_accepted else 1.0
        for place, chance in enumerate(chances):
            if place < num_accepted:
                target = 1.0
            elif num_accepted < num_drafts:
                target = 0.0
            else:
                # What would have become of more drafts nobody knows; how they fared after such a block is known.
                target = min(1.0, chance / whole) if whole > 0.0 else 0.0
            chances[place] = chance + rate * (target - chance)
        if expected > 0.0:
            ratio = max(0.25, min(4.0, num_accepted / expected))
            self.scale = max(0.5, min(2.0, self.scale * (1.0 - RATE / 2) + ratio * RATE / 2))

    def hope(self, chance: float) -> None:
        """For another try: each draft is expected to be accepted with that chance at least."""
        self._chances = [max(known, chance**place) for place, known in enumerate(self._chances, start=1)]

    def forget(self) -> None:
        """Nothing is known any more."""
        self.scale, self.num_blocks, self._chances = 1.0, 0, []

    def survivals(self, count: int, confidences: Sequence[float]) -> list[float]:
        """Of `count` drafts, by their confidences where there are any."""
        if confidences:
            return [min(0.999, value * self.scale) for value in survivals(confidences)]
        return self._of(count)[:count]

    def _of(self, count: int) -> list[float]:
        """Chances of so many places at least."""
        while len(self._chances) < count:
            last = self._chances[-1] if self._chances else 1.0
            self._chances.append(last * FIRST_ACCEPTANCE)
        return self._chances


@dataclass(kw_only=True)
class Tally:
    """What speculation did for a request; becomes `SpeculationStats`."""

    steps: int = 0
    steps_with_drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    late: int = 0
    salvaged: int = 0
    gaps: int = 0
    wait_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    by_length: list[int] = field(default_factory=list)
    by_position: list[int] = field(default_factory=list)
    drafters: set[str] = field(default_factory=set)
    rested: int = 0

    def step(self, num_drafts: int, num_accepted: int) -> None:
        """A step gave a sample tokens."""
        self.steps += 1
        if num_drafts == 0:
            return
        self.steps_with_drafts += 1
        self.proposed += num_drafts
        self.accepted += num_accepted
        missing = num_drafts - len(self.by_length)
        self.by_length += [0] * missing
        self.by_position += [0] * missing
        self.by_length[num_drafts - 1] += 1
        for place in range(num_accepted):
            self.by_position[place] += 1

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            steps=self.steps,
            steps_with_drafts=self.steps_with_drafts,
            proposed=self.proposed,
            accepted=self.accepted,
            late=self.late,
            salvaged=self.salvaged,
            gaps=self.gaps,
            wait_ms=self.wait_s * 1e3,
            draft_ms=self.draft_s * 1e3,
            verify_ms=self.verify_s * 1e3,
            commit_ms=self.commit_s * 1e3,
            steps_by_length=tuple(self.by_length),
            accepted_by_position=tuple(self.by_position),
            drafters=tuple(sorted(self.drafters)),
            rested=self.rested,
        )
