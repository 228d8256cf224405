"""What steps take, and what drafts promise by that; callers pass seconds in. R samples make R rows without drafts."""

from collections.abc import Mapping, Sequence

from k3svc.core.speculation import RATE, ReplyTimes, VerifyTimes, verify_lengths

STEP_RATE = 0.3
"""Weight of a step in the mean of the times of its kind: of each there are few while the other kind is made."""
LONGEST_OVERHEAD_S = 0.01
"""What goes by between two steps beyond that has reasons of its own."""
LIKELY = 0.2
"""Drafts with less of a chance are left out of what a wait may gain."""


class Prospects:
    """Of one decode engine."""

    def __init__(self, times: VerifyTimes, replies: ReplyTimes) -> None:
        self.times, self.replies = times, replies
        self._overhead_s = 0.0005
        """Of a plain step: from its end to the start of the next one."""
        self._num_overheads = 0
        """Plain steps that this is the mean of."""

    def plain_s(self, num_rows: int) -> float:
        """From the end of a plain step to the end of the next one."""
        return self.times.plain.seconds(num_rows) + self._overhead_s

    def lengths(self, chances: Mapping[str, Sequence[float]], num_rows: int, waited_s: float) -> dict[str, int]:
        """How many drafts of each sample to verify after so long a wait."""
        return self._lengths(chances, num_rows, self._overhead_s + waited_s)

    def is_worth(self, chances: Sequence[float], num_rows: int) -> bool:
        """Whether any of one sample's drafts would be verified."""
        return self._lengths({"": chances}, num_rows, 0.0)[""] > 0

    def promise(self, chances: Mapping[str, Sequence[float]], num_rows: int) -> float:
        """The speed of steps with drafts against plain ones, if replies took no longer than they did."""
        beside_s = self._overhead_s + self.replies.mean_s
        lengths = self._lengths(chances, num_rows, beside_s)
        expected = num_rows + sum(sum(chances[key][:length]) for key, length in lengths.items())
        step_s = self.times.verify.seconds(num_rows + sum(lengths.values())) + beside_s
        return expected * self.plain_s(num_rows) / (num_rows * step_s)

    def gain_s(self, chances: Sequence[Sequence[float]], num_rows: int) -> float:
        """What plain steps would take longer for the tokens of a step with drafts than that step."""
        likely = [chance for values in chances for chance in values if chance > LIKELY]
        expected = num_rows + sum(likely)
        verify_s = self.times.verify.seconds(num_rows + len(likely)) + self._overhead_s
        return expected / num_rows * self.plain_s(num_rows) - verify_s

    def observe_verify(self, num_rows: int, seconds: float) -> None:
        """A step with drafts took so long."""
        self.times.verify.observe(num_rows, seconds, STEP_RATE)

    def observe_plain(self, num_rows: int, seconds: float) -> None:
        """A step without took so long, and no drafter was at work beside it."""
        self.times.plain.observe(num_rows, seconds, STEP_RATE)

    def observe_overhead(self, seconds: float) -> None:
        """So much went by between two such steps."""
        self._num_overheads += 1
        rate = max(RATE, 1.0 / (self._num_overheads + 1))
        self._overhead_s += rate * (min(seconds, LONGEST_OVERHEAD_S) - self._overhead_s)

    def _lengths(self, chances: Mapping[str, Sequence[float]], num_rows: int, beside_s: float) -> dict[str, int]:
        return verify_lengths(
            chances,
            num_rows=num_rows,
            plain_s=self.times.plain.seconds(num_rows),
            verify_s=self.times.verify.seconds,
            beside_s=beside_s,
        )
