"""Speculator: what the decode engine knows of drafters. It opens and closes samples there, passes on features and
commits, waits for proposals as long as that pays, and says before each step which drafts to verify.

Everything but `wait` is synchronous and happens on the event loop. Drafters may be late, wrong or dead; the worst that
they can do is to cost the waits, which are bounded by `ReplyTimes.deadline_s`, and by `HealthWatch` and `Governor`,
which end the waiting and the speculation where they do not pay.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from k3svc.core.batch import DecodeBatch, StepOutput
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.events import SpeculationStats
from k3svc.core.sample import DraftBlock, Emission, Phase, Sample
from k3svc.core.speculation import (
    RATE,
    Acceptance,
    Governor,
    Health,
    HealthWatch,
    ReplyTimes,
    Tally,
    Usable,
    VerifyTimes,
    survivals,
    usable_part,
    verify_lengths,
)
from k3svc.engine.ports import Clock, DraftCommit, Drafter, DraftOpen, DraftProposal, FeatureRows
from k3svc.engine.settle import VerifyRule

SLEEP_STEPS = 32
"""Steps after which a sample whose drafts are not worth verifying is given another try."""
PATIENCE_STEPS = 16
"""Steps without an answer after which a sample asks again: a drafter that is late would only be later for more wishes.
"""
STEP_RATE = 0.3
"""Weight of a step in the mean of the times of its kind: of each there are few while the other kind is made."""
FEWEST_HEARD, MOST_HEARD = 3, 8
"""Proposals that text which is listened to is judged by."""
PATIENT_SHARE = 0.8
"""Speculation goes on while it promises that much of the speed of plain steps: what is known of a text varies."""
NEXT_TRY_ACCEPTANCE = 0.4
"""What is then expected of them."""


@dataclass(kw_only=True, eq=False)
class _Followed:
    """A sample that drafters know of."""

    sample: Sample
    attempt: int
    base_len: int
    """Of the last commit: position of the anchor."""
    acceptance: Acceptance
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
    heard: list[DraftProposal] = field(default_factory=list)
    """Those that are still to be compared with what comes out."""
    num_heard: int = 0
    """Those that have been."""


class Speculator:
    """Of one decode engine."""

    def __init__(
        self,
        *,
        drafter: Drafter,
        fallback: Drafter | None,
        scheduler: DecodeScheduler,
        times: VerifyTimes,
        vocab_size: int,
        mask_token_id: int | None,
        rule: VerifyRule,
        clock: Clock,
        governor: Governor | None = None,
        replies: ReplyTimes | None = None,
    ) -> None:
        """`fallback` proposes while `drafter` has nobody to ask. Without a governor every draft is waited for and
        verified, whatever it costs.
        """
        self._drafter = drafter
        self._fallback = fallback
        self._drafters = [drafter] if fallback is None else [drafter, fallback]
        self._scheduler = scheduler
        self._times = times
        self._vocab_size = vocab_size
        self._mask_token_id = mask_token_id
        self._rule: VerifyRule = rule
        self._clock = clock
        self._governor = governor
        self._replies = replies or ReplyTimes()
        self._watch = HealthWatch()
        self._followed: dict[str, _Followed] = {}
        self._tickets: dict[str, str] = {}
        self._acceptance: dict[str, Acceptance] = {}
        self._tallies: dict[str, Tally] = {}
        self._attempt = 0
        self._asked_at: float | None = None
        self._step_ended: float | None = None
        self._overhead_s = 0.0005
        """Of a plain step: from its end to the start of the next one."""
        self._num_overheads = 0
        """Plain steps that this is the mean of."""
        self._waited_s = 0.0
        self._is_on = True
        """Whether drafts are asked for, waited for and verified."""
        self._is_listening = False
        """Whether they are asked for, and nothing else."""
        self._is_silent = False
        """Whether drafters hear of nothing."""
        self._load = 0
        self.total = Tally()
        """Over all requests since start."""

    @property
    def health(self) -> Health:
        """Of the drafter itself, also while another one proposes in its place."""
        if self._drafter.num_proposals == 0:
            return Health.DOWN
        return Health.SLOW if self._watch.is_slow else Health.HEALTHY

    def wants_prompts(self) -> bool:
        """Whether prefill is to push the features of a prompt that is asked for now."""
        is_tried = self._governor is None or self._governor.would_try(self._expected_load())
        return self._drafter.wants_features and is_tried

    @property
    def drafter(self) -> str:
        """Name of who proposes now; empty: nobody."""
        active = self._active()
        return active.name if active.num_proposals else ""

    @property
    def rests(self) -> bool:
        """Whether drafters hear of nothing, because drafts cost more time than they save."""
        return self._governor is not None and self._governor.is_resting(self._load)

    @property
    def num_followed(self) -> int:
        """Samples that drafters know of."""
        return len(self._followed)

    @property
    def times(self) -> VerifyTimes:
        return self._times

    def landed(self, samples: Iterable[Sample], ticket: str) -> None:
        """The prompt's state is here; prefill pushes its features under `ticket`."""
        for sample in samples:
            self._tickets[sample.key] = ticket
        if self._governor is not None and (ticket or not self._drafter.wants_features):
            self._governor.renew(self._expected_load())

    def ended(self, request_id: str, samples: Iterable[Sample]) -> SpeculationStats:
        """A request has ended, and is forgotten; what speculation did for it."""
        keys = [sample.key for sample in samples]
        self._close([key for key in keys if key in self._followed])
        for key in keys:
            self._tickets.pop(key, None)
            self._acceptance.pop(key, None)
        return self._tallies.pop(request_id, Tally()).stats()

    async def wait(self) -> None:
        """Gives the proposals that were asked for their time, as far as it pays."""
        self._waited_s = 0.0
        asked, self._asked_at = self._asked_at, None
        if asked is None or not self._is_on:
            return
        if self._active() is not self._drafter or not self._watch.may_wait():
            return
        deadline_s = self._replies.longest_s if self._governor is None else self._replies.deadline_s(self._gain_s())
        left_s = deadline_s - (self._clock() - asked)
        if deadline_s <= 0.0:
            return
        started = self._clock()
        in_time = await self._drafter.wait(max(left_s, 0.0))
        now = self._clock()
        self._waited_s = now - started
        self._watch.observe(in_time=in_time)
        if in_time:
            self._replies.observe(now - asked)

    def plan(self) -> Mapping[str, DraftBlock]:
        """Drafts to verify in the next step, by key of sample."""
        self._sweep()
        if not self._is_silent:
            # Samples that come back with output: the features of their first step are to find them open.
            self._tell()
        usable = {key: found for key, one in self._followed.items() if (found := self._usable(one)) is not None}
        if not usable or self._is_listening:
            return {}
        chances = {key: self._chances(self._followed[key], found) for key, found in usable.items()}
        num_rows = len(self._runnable())
        lengths = {key: len(found.tokens) for key, found in usable.items()}
        if self._governor is not None:
            lengths = verify_lengths(
                chances,
                num_rows=num_rows,
                plain_s=self._times.plain.seconds(num_rows),
                verify_s=self._times.verify.seconds,
                beside_s=self._overhead_s + self._waited_s,
            )
        blocks = {}
        for key, found in usable.items():
            one, count = self._followed[key], lengths[key]
            one.expected = sum(survivals(found.confidences[:count]))
            if self._rule == "rejection":
                one.lagged = survivals(found.confidences)
            if count:
                laws = self._laws(one, found, count)
                blocks[key] = DraftBlock(tokens=found.tokens[:count], laws=laws)
                for tally in self._tallies_of(one.sample):
                    tally.drafters.add(self._active().name)
                if found.first:
                    self._count(one.sample, "salvaged")
        return blocks

    def features(self, batch: DecodeBatch) -> Callable[[memoryview], None] | None:
        """What to do with the features of a step; None: they are not wanted."""
        if not self._drafter.wants_features or not self._followed:
            return None

        def push(data: memoryview) -> None:
            width = data.nbytes // batch.num_tokens
            first, pushed = 0, []
            for row in batch.rows:
                count = 1 + len(row.drafts)
                one = self._followed.get(row.key)
                if one is not None and one.base_len == row.position:
                    own = data[first * width : (first + count) * width]
                    pushed.append(
                        FeatureRows(key=row.key, attempt=one.attempt, start=row.position, num_rows=count, data=own)
                    )
                first += count
            if pushed:
                self._drafter.push(pushed)

        return push

    def learn(self, batch: DecodeBatch, output: StepOutput, emissions: Sequence[Emission]) -> None:
        """A step was booked; before any of its requests has `ended`."""
        tallies = {id(self.total): self.total}
        for emission in emissions:
            sample = emission.sample
            tally = self._tallies.setdefault(sample.request.request_id, Tally())
            tallies[id(tally)] = tally
            for counted in (tally, self.total):
                counted.step(emission.num_drafts, emission.num_accepted)
                counted.rested += self.rests and not emission.num_drafts
            one = self._followed.get(sample.key)
            if one is not None and emission.num_drafts:
                one.acceptance.observe(emission.num_drafts, emission.num_accepted, one.expected)
        has_drafts = batch.num_tokens > len(batch.rows)
        for tally in tallies.values():
            tally.wait_s += self._waited_s
            if has_drafts:
                tally.verify_s += output.compute_s
                tally.commit_s += output.commit_s
        self._observe_times(batch, output, emissions, has_drafts=has_drafts)

    def settle(self) -> None:
        """A step was booked, and what it ended has ended: tells the drafters what came out, and asks for more."""
        self._load = self._expected_load()
        if self._governor is not None and self._is_listening:
            self._judge(self._governor)
        self._is_on = self._governor is None or self._pays(self._governor)
        self._is_listening = self._governor is not None and self._governor.is_listening(self._load)
        self._is_silent = self.rests
        if self._is_silent:
            self._close(list(self._followed))
        self._sweep()
        # Of a step that runs already drafters would have no features: `plan` tells them before the next one.
        if not self._is_silent and not self._scheduler.is_in_step:
            self._tell()

    def _expected_load(self) -> int:
        """Samples that run, or will when their state has landed."""
        return len(self._runnable()) + sum(len(job.samples) for job in self._scheduler.transfers)

    def _pays(self, governor: Governor) -> bool:
        if not governor.pays(self._load):
            return False
        runnable = self._runnable()
        if self._load > governor.FEW_SAMPLES:
            if not self._promises(runnable):
                governor.rest(self._load)
                return False
        elif self._is_silent:
            # A rest ends with a try, which starts from hope: one that starts from the record would never be made.
            for sample in runnable:
                self._acceptance.pop(sample.key, None)
        elif runnable and not self._promises(runnable, PATIENT_SHARE):
            governor.distrust(self._load)
            return False
        return True

    def _judge(self, governor: Governor) -> None:
        """Compares what was heard with what came out."""
        for one in self._followed.values():
            for proposal in one.heard[:]:
                tokens, out = (
                    proposal.tokens,
                    one.sample.output[proposal.base_len + 1 - len(one.sample.request.prompt) :],
                )
                pairs = list(zip(tokens, out, strict=False))
                num_right = next((place for place, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
                if num_right < len(pairs) or len(pairs) == len(tokens):
                    one.heard.remove(proposal)
                    one.num_heard += 1
                    one.acceptance.observe(len(tokens), num_right, sum(survivals(proposal.confidences)))
        num_heard = sum(one.num_heard for one in self._followed.values())
        if num_heard >= FEWEST_HEARD and self._promises([one.sample for one in self._followed.values()]):
            governor.trust(self._load)
        elif num_heard >= MOST_HEARD:
            governor.distrust(self._load)

    def _promises(self, samples: Sequence[Sample], share: float = 1.0) -> bool:
        """Whether steps with drafts of these would give that share of the tokens a second of plain ones, if replies
        took no longer than they did.
        """
        count, times = max(1, self._load), self._times
        known = {sample.key: self._acceptance.get(sample.key, Acceptance()) for sample in samples}
        chances = {key: one.survivals(self._num_proposals(), ()) for key, one in known.items()}
        beside_s = self._overhead_s + self._replies.mean_s
        lengths = verify_lengths(
            chances,
            num_rows=count,
            plain_s=times.plain.seconds(count),
            verify_s=times.verify.seconds,
            beside_s=beside_s,
        )
        expected = count + sum(sum(chances[key][:length]) for key, length in lengths.items())
        step_s = times.verify.seconds(count + sum(lengths.values())) + beside_s
        return expected * (times.plain.seconds(count) + self._overhead_s) > share * count * step_s

    def _tell(self) -> None:
        opens, commits = [], []
        for sample in self._scheduler.running:
            one = self._followed.get(sample.key)
            if one is None:
                if sample.output and (not self._is_listening or self._has_context(sample)):
                    opens.append(self._open(sample))
            elif sample.num_cached > one.base_len:
                commits.append(self._commit(one))
        for drafter in self._drafters:
            if opens:
                drafter.open(opens)
            if commits:
                most = drafter.num_proposals
                drafter.commit([_at_most(commit, most) for commit in commits])
        if opens or any(commit.want for commit in commits):
            self._asked_at = self._clock()

    def _open(self, sample: Sample) -> DraftOpen:
        self._attempt += 1
        request = sample.request
        known = (*request.prompt, *sample.output)[: max(sample.num_cached, len(request.prompt)) + 1]
        self._followed[sample.key] = _Followed(
            sample=sample,
            attempt=self._attempt,
            base_len=len(known) - 1,
            acceptance=self._acceptance.setdefault(sample.key, Acceptance()),
            wanted=self._num_proposals(),
            asked=len(known) - 1 if self._is_on or self._is_listening else None,
        )
        return DraftOpen(
            key=sample.key,
            attempt=self._attempt,
            known=known,
            params=request.sampling,
            sample_index=sample.sample_index,
            # Rows that are missing between the prompt and the base would keep its context out for ever.
            ticket=self._tickets.get(sample.key, "") if self._has_just_begun(sample) else "",
            with_probs=self._rule == "rejection",
        )

    def _has_context(self, sample: Sample) -> bool:
        """Whether a drafter that hears of the sample now knows all of it."""
        has_ticket = bool(self._tickets.get(sample.key)) and self._has_just_begun(sample)
        return has_ticket or not self._drafter.wants_features

    def _has_just_begun(self, sample: Sample) -> bool:
        return sample.num_cached <= len(sample.request.prompt)

    def _commit(self, one: _Followed) -> DraftCommit:
        sample = one.sample
        prompt_len = len(sample.request.prompt)
        tokens = tuple(sample.output[one.base_len + 1 - prompt_len : sample.num_cached + 1 - prompt_len])
        one.base_len = sample.num_cached
        replays = sample.num_cached + 1 < sample.num_known
        one.wanted = 0 if replays else max(0, min(self._num_proposals(), self._scheduler.num_left(sample) - 1))
        if not self._is_on and not self._is_listening:
            one.wanted, one.asked = 0, None
        elif self._is_unanswered(one):
            one.wanted = 0
        elif one.sleep > 0:
            one.sleep -= 1
            one.wanted = 0
        elif one.wanted and self._is_on and self._governor is not None and not self._is_worth(one):
            one.sleep = SLEEP_STEPS
            # The next try starts from hope: one that starts from the record would never be made.
            one.acceptance.hope(NEXT_TRY_ACCEPTANCE)
        if one.wanted:
            one.asked, one.patience = one.base_len, PATIENCE_STEPS
        return DraftCommit(key=sample.key, attempt=one.attempt, base_len=one.base_len, tokens=tokens, want=one.wanted)

    def _is_unanswered(self, one: _Followed) -> bool:
        """Whether a wish of the sample is still worked on, as far as is known."""
        proposal = self._active().proposal(one.sample.key)
        if one.asked is not None and proposal is not None and proposal.attempt == one.attempt:
            one.asked = one.asked if proposal.base_len < one.asked else None
        one.patience -= 1
        if one.patience <= 0:
            one.asked = None
        return one.asked is not None

    def _is_worth(self, one: _Followed) -> bool:
        """Whether the sample's drafts would be verified if they fared as the last ones did."""
        count = max(1, self._load)
        lengths = verify_lengths(
            {one.sample.key: one.acceptance.survivals(one.wanted, ())},
            num_rows=count,
            plain_s=self._times.plain.seconds(count),
            verify_s=self._times.verify.seconds,
        )
        return lengths[one.sample.key] > 0

    def _usable(self, one: _Followed) -> Usable | None:
        sample = one.sample
        if sample.paused or sample.num_cached + 1 != sample.num_known:
            return None
        active = self._active()
        proposal = active.proposal(sample.key)
        found = None
        if proposal is not None and (proposal.key, proposal.attempt) == (sample.key, one.attempt):
            if proposal is not one.seen:
                self._count(sample, "gaps", int(proposal.truncated))
                self._count(sample, "draft_s", proposal.compute_s)
                if proposal.base_len != one.base_len and proposal.reply_s > 0.0:
                    # Nobody waited for it, or not long enough: what it took counts all the same.
                    self._replies.observe(proposal.reply_s)
                is_about = 0 <= proposal.base_len - len(sample.request.prompt) < len(sample.output)
                if self._is_listening and is_about and proposal.tokens and not proposal.truncated:
                    one.heard.append(proposal)
            found = usable_part(
                proposal.tokens,
                proposal.confidences,
                base_len=proposal.base_len,
                output=sample.output,
                prompt_len=len(sample.request.prompt),
                vocab_size=self._vocab_size,
                longest=active.num_proposals,
                mask_token_id=self._mask_token_id,
            )
            one.seen = proposal
        is_answered = proposal is not None and (proposal.attempt, proposal.base_len) == (one.attempt, one.base_len)
        if self._is_on and found is None and one.asked is not None and not is_answered:
            self._count(sample, "late")
        return found

    def _chances(self, one: _Followed, found: Usable) -> list[float]:
        acceptance, count = one.acceptance, len(found.tokens)
        if self._rule == "exact":
            return acceptance.survivals(count, found.confidences)
        if len(one.lagged) >= count and found.first == 0:
            return [min(0.999, value * acceptance.scale) for value in one.lagged[:count]]
        return acceptance.survivals(count, ())

    def _laws(self, one: _Followed, found: Usable, count: int) -> tuple[bytes, ...]:
        """Those of the drafts, or none when they are not whole: then the drafts count as certain."""
        if self._rule != "rejection" or one.seen is None:
            return ()
        laws = tuple(one.seen.probs[found.first : found.first + count])
        return laws if len(laws) == count and all(len(law) == 4 * self._vocab_size for law in laws) else ()

    def _observe_times(
        self, batch: DecodeBatch, output: StepOutput, emissions: Sequence[Emission], *, has_drafts: bool
    ) -> None:
        now, count = self._clock(), len(batch.rows)
        before, self._step_ended = self._step_ended, now
        if batch.first or not count or output.failed:
            self._step_ended = None
            return
        if has_drafts:
            self._times.verify.observe(batch.num_tokens, output.compute_s, STEP_RATE)
        elif not self._is_on and not self._is_listening:
            # Beside a drafter at work a plain step takes longer than it would without.
            self._times.plain.observe(count, output.compute_s, STEP_RATE)
        if before is None or self._load != count:
            return
        wall_s = now - before
        if (self._is_on or self._is_listening) and self._governor is not None:
            num_tokens = sum(len(emission.tokens) for emission in emissions)
            plain_s = self._times.plain.seconds(count) + self._overhead_s
            self._governor.observe(count, num_tokens, wall_s, plain_s)
        elif not self._is_on:
            self._num_overheads += 1
            rate = max(RATE, 1.0 / (self._num_overheads + 1))
            self._overhead_s += rate * (min(wall_s - output.compute_s, 0.01) - self._overhead_s)

    def _gain_s(self) -> float:
        """What plain steps would take longer for the tokens of a step with drafts than that step."""
        runnable = self._runnable()
        count = max(1, len(runnable))
        rows, expected = count, float(count)
        for sample in runnable:
            one = self._followed.get(sample.key)
            if one is not None and one.wanted:
                chances = one.acceptance.survivals(one.wanted, ())
                worth = [chance for chance in chances if chance > 0.2]
                rows += len(worth)
                expected += sum(worth)
        plain_s = self._times.plain.seconds(count) + self._overhead_s
        return expected / count * plain_s - self._times.verify.seconds(rows) - self._overhead_s

    def _active(self) -> Drafter:
        if self._fallback is not None and self._drafter.num_proposals == 0:
            return self._fallback
        return self._drafter

    def _num_proposals(self) -> int:
        return self._active().num_proposals

    def _runnable(self) -> list[Sample]:
        return [sample for sample in self._scheduler.running if not sample.paused]

    def _sweep(self) -> None:
        """Closes what has ended or was preempted."""
        self._close([key for key, one in self._followed.items() if one.sample.phase is not Phase.RUNNING])

    def _close(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        for key in keys:
            del self._followed[key]
        for drafter in self._drafters:
            drafter.close(keys)

    def _count(self, sample: Sample, name: str, amount: float = 1) -> None:
        for tally in self._tallies_of(sample):
            setattr(tally, name, getattr(tally, name) + amount)

    def _tallies_of(self, sample: Sample) -> tuple[Tally, Tally]:
        return self._tallies.setdefault(sample.request.request_id, Tally()), self.total


def _at_most(commit: DraftCommit, most: int) -> DraftCommit:
    """A commit for a drafter that makes no more proposals than that."""
    if commit.want <= most:
        return commit
    return DraftCommit(
        key=commit.key, attempt=commit.attempt, base_len=commit.base_len, tokens=commit.tokens, want=most
    )
