"""Speculator: what the decode engine knows of drafters. It opens and closes samples there, passes on features and
commits, waits for proposals as long as that pays, and says before each step which drafts to verify.

Everything but `wait` is synchronous and happens on the event loop. Drafters may be late, wrong or dead; the worst that
they can do is to cost the waits, which are bounded by `ReplyTimes.deadline_s`, and by `HealthWatch` and `Governor`,
which end the waiting and the speculation where they do not pay.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from k3svc.core.batch import DecodeBatch, StepOutput
from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.events import SpeculationStats
from k3svc.core.governor import Governor
from k3svc.core.prospects import Prospects
from k3svc.core.sample import DraftBlock, Emission, Phase, Sample
from k3svc.core.speculation import (
    Acceptance,
    Health,
    HealthWatch,
    ReplyTimes,
    Tally,
    Usable,
    VerifyTimes,
    survivals,
    usable_part,
)
from k3svc.engine.followed import PATIENCE_STEPS, Followed
from k3svc.engine.listening import FEWEST_HEARD, MOST_HEARD, Listening
from k3svc.engine.ports import Clock, DraftCommit, Drafter, DraftOpen, FeatureRows
from k3svc.engine.settle import VerifyRule

SLEEP_STEPS = 32
"""Steps after which a sample whose drafts are not worth verifying is given another try."""
PATIENT_SHARE = 0.8
"""Speculation goes on while it promises that much of the speed of plain steps: what is known of a text varies."""
NEXT_TRY_ACCEPTANCE = 0.4
"""What is then expected of them."""


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
        self._prospects = Prospects(times, replies or ReplyTimes())
        self._vocab_size = vocab_size
        self._mask_token_id = mask_token_id
        self._rule: VerifyRule = rule
        self._clock = clock
        self._governor = governor
        self._watch = HealthWatch()
        self._followed: dict[str, Followed] = {}
        self._tickets: dict[str, str] = {}
        self._acceptance: dict[str, Acceptance] = {}
        self._tallies: dict[str, Tally] = {}
        self._attempt = 0
        self._asked_at: float | None = None
        self._step_ended: float | None = None
        self._waited_s = 0.0
        self._is_on = True
        """Whether drafts are asked for, waited for and verified."""
        self._is_listening = False
        """Whether they are asked for, and nothing else."""
        self._is_silent = False
        """Whether drafters hear of nothing."""
        self.may_features_wait = False
        """Whether those of the step that `features` was last asked about may come with those of a later one."""
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
        return self._prospects.times

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
        replies = self._prospects.replies
        deadline_s = replies.longest_s if self._governor is None else replies.deadline_s(self._gain_s())
        left_s = deadline_s - (self._clock() - asked)
        if deadline_s <= 0.0:
            return
        started = self._clock()
        in_time = await self._drafter.wait(max(left_s, 0.0))
        now = self._clock()
        self._waited_s = now - started
        self._watch.observe(in_time=in_time)
        if in_time:
            replies.observe(now - asked)

    def plan(self) -> Mapping[str, DraftBlock]:
        """Drafts to verify in the next step, by key of sample."""
        self._sweep()
        if not self._is_silent:
            # Samples that come back with output: the features of their first step are to find them open.
            self._tell(at_once=not self._is_listening)
        usable = {key: found for key, one in self._followed.items() if (found := self._usable(one)) is not None}
        if not usable or self._is_listening or self.may_features_wait:
            return {}
        chances = {key: self._followed[key].chances(found, self._rule) for key, found in usable.items()}
        num_rows = len(self._runnable())
        lengths = {key: len(found.tokens) for key, found in usable.items()}
        if self._governor is not None:
            lengths = self._prospects.lengths(chances, num_rows, self._waited_s)
        blocks = {}
        for key, found in usable.items():
            one, count = self._followed[key], lengths[key]
            one.expected = sum(survivals(found.confidences[:count]))
            if self._rule == "rejection":
                one.lagged = survivals(found.confidences)
            if count:
                laws = one.laws(found, count, self._vocab_size) if self._rule == "rejection" else ()
                blocks[key] = DraftBlock(tokens=found.tokens[:count], laws=laws)
                for tally in self._tallies_of(one.sample):
                    tally.drafters.add(self._active().name)
                if found.first:
                    self._count(one.sample, "salvaged")
        return blocks

    def features(self, batch: DecodeBatch) -> Callable[[memoryview], None] | None:
        """What to do with the features of a step; None: they are not wanted."""
        if not batch.rows:
            return None
        is_behind, self.may_features_wait = self.may_features_wait, False
        if not self._drafter.wants_features or not self._followed:
            return None
        is_kept = self._is_listening or is_behind
        self.may_features_wait = self._is_listening and not any(
            self._is_due(one, ahead=1) for one in self._followed.values()
        )

        def push(data: memoryview) -> None:
            width = data.nbytes // batch.num_tokens
            first, pushed = 0, []
            for row in batch.rows:
                count = 1 + len(row.drafts)
                one = self._followed.get(row.key)
                own = data[first * width : (first + count) * width]
                first += count
                if one is None:
                    continue
                if is_kept and one.base_len + one.listening.num_rows == row.position:
                    one.listening.rows += own
                    one.listening.num_rows += count
                elif not is_kept and one.base_len == row.position:
                    pushed.append(
                        FeatureRows(key=row.key, attempt=one.attempt, start=row.position, num_rows=count, data=own)
                    )
            if pushed:
                self._drafter.push(pushed)

        return push

    def learn(self, batch: DecodeBatch, output: StepOutput, emissions: Sequence[Emission]) -> None:
        """A step was booked; before any of its requests has `ended`."""
        tallies, rests = {id(self.total): self.total}, self.rests
        for emission in emissions:
            sample = emission.sample
            tally = self._tallies.setdefault(sample.request.request_id, Tally())
            tallies[id(tally)] = tally
            for counted in (tally, self.total):
                counted.step(emission.num_drafts, emission.num_accepted)
                counted.rested += rests and not emission.num_drafts
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
            self._judge(self._governor, list(self._followed.values()))
        was_listening = self._is_listening
        self._is_on = self._governor is None or self._pays(self._governor)
        self._is_listening = self._governor is not None and self._governor.is_listening(self._load)
        begins = self._is_listening and not was_listening
        if begins:
            for one in self._followed.values():
                one.sleep = 0
                one.listening.doubt()
        self._is_silent = self.rests
        if self._is_silent:
            self._close(list(self._followed))
        self._sweep()
        # Of a step that runs already drafters would have no features: `plan` tells them before the next one.
        if not self._is_silent and not self._scheduler.is_in_step:
            # The features of the last step that was to have drafts have gone out.
            self._tell(at_once=not self._is_listening or begins)

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

    def _judge(self, governor: Governor, heard: Sequence[Followed]) -> None:
        """Whether what was heard is worth waiting for."""
        known = [one.listening.compare(one.sample.output, len(one.sample.request.prompt)) for one in heard]
        if not any(known):
            return
        num_heard = sum(one.listening.num_heard for one in heard)
        if num_heard >= FEWEST_HEARD and self._promises([one.sample for one in heard]):
            governor.trust(self._load)
        elif num_heard >= MOST_HEARD:
            for one in heard:
                one.listening.doubt()

    def _promises(self, samples: Sequence[Sample], share: float = 1.0) -> bool:
        """Whether steps with drafts of these would give that share of the tokens a second of plain ones."""
        known = {sample.key: self._acceptance.get(sample.key, Acceptance()) for sample in samples}
        chances = {key: one.survivals(self._num_proposals(), ()) for key, one in known.items()}
        return self._prospects.promise(chances, max(1, self._load)) > share

    def _tell(self, *, at_once: bool) -> None:
        opens, commits = [], []
        for sample in self._scheduler.running:
            one = self._followed.get(sample.key)
            if one is None:
                if sample.output and (not self._is_listening or self._has_context(sample)):
                    opens.append(self._open(sample))
            elif not self.may_features_wait and (at_once or self._is_due(one)) and sample.num_cached > one.base_len:
                commits.append(self._commit(one))
        for drafter in self._drafters:
            if opens:
                drafter.open(opens)
            if commits:
                most = drafter.num_proposals
                drafter.commit([_at_most(commit, most) for commit in commits])
        if opens or any(commit.want for commit in commits):
            self._asked_at = self._clock()

    def _is_due(self, one: Followed, ahead: int = 0) -> bool:
        """Whether drafters that are listened to are told of the sample when so many tokens more have come: they take no
        more features at once than those of a block.
        """
        return one.sample.num_cached + ahead - one.base_len >= min(one.listening.period, self._num_proposals() + 1)

    def _open(self, sample: Sample) -> DraftOpen:
        self._attempt += 1
        request = sample.request
        known = (*request.prompt, *sample.output)[: max(sample.num_cached, len(request.prompt)) + 1]
        acceptance = self._acceptance.setdefault(sample.key, Acceptance())
        self._followed[sample.key] = Followed(
            sample=sample,
            attempt=self._attempt,
            base_len=len(known) - 1,
            acceptance=acceptance,
            listening=Listening(acceptance=acceptance),
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

    def _commit(self, one: Followed) -> DraftCommit:
        sample = one.sample
        prompt_len = len(sample.request.prompt)
        tokens = tuple(sample.output[one.base_len + 1 - prompt_len : sample.num_cached + 1 - prompt_len])
        one.base_len = sample.num_cached
        replays = sample.num_cached + 1 < sample.num_known
        one.wanted = 0 if replays else max(0, min(self._num_proposals(), self._scheduler.num_left(sample) - 1))
        if not self._is_on and not self._is_listening:
            one.wanted, one.asked = 0, None
        elif one.is_unanswered(self._active().proposal(sample.key)) or (
            self._is_listening and not one.listening.may_wish(len(tokens))
        ):
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
        return DraftCommit(
            key=sample.key,
            attempt=one.attempt,
            base_len=one.base_len,
            tokens=tokens,
            want=one.wanted,
            features=one.listening.take(len(tokens)),
        )

    def _is_worth(self, one: Followed) -> bool:
        """Whether the sample's drafts would be verified if they fared as the last ones did."""
        return self._prospects.is_worth(one.acceptance.survivals(one.wanted, ()), max(1, self._load))

    def _usable(self, one: Followed) -> Usable | None:
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
                if (self._is_listening or proposal.base_len != one.base_len) and proposal.reply_s > 0.0:
                    # Nobody waited for it, or not long enough: what it took counts all the same.
                    self._prospects.replies.observe(proposal.reply_s)
                is_about = 0 <= proposal.base_len - len(sample.request.prompt) < len(sample.output)
                if self._is_listening and is_about and proposal.tokens and not proposal.truncated:
                    one.listening.hear(proposal)
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
        if is_answered:
            one.asked = None
        if self._is_on and found is None and one.asked is not None and not is_answered:
            self._count(sample, "late")
        return found

    def _observe_times(
        self, batch: DecodeBatch, output: StepOutput, emissions: Sequence[Emission], *, has_drafts: bool
    ) -> None:
        now, count = self._clock(), len(batch.rows)
        # Beside a drafter at work a plain step takes longer than it would without.
        is_undisturbed = not self._is_on and all(one.asked is None for one in self._followed.values())
        before, self._step_ended = self._step_ended, now
        if batch.first or not count or output.failed:
            self._step_ended = None
            return
        if has_drafts:
            self._prospects.observe_verify(batch.num_tokens, output.compute_s)
        elif is_undisturbed:
            self._prospects.observe_plain(count, output.compute_s)
        if before is None or self._load != count:
            return
        wall_s = now - before
        if (self._is_on or self._is_listening) and self._governor is not None:
            num_tokens = sum(len(emission.tokens) for emission in emissions)
            self._governor.observe(count, num_tokens, wall_s, self._prospects.plain_s(count))
        if is_undisturbed:
            self._prospects.observe_overhead(wall_s - output.compute_s)

    def _gain_s(self) -> float:
        """What the proposals that were asked for may gain."""
        runnable = self._runnable()
        asked = [one for sample in runnable if (one := self._followed.get(sample.key)) is not None and one.wanted]
        chances = [one.acceptance.survivals(one.wanted, ()) for one in asked]
        return self._prospects.gain_s(chances, max(1, len(runnable)))

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
    return replace(commit, want=most)
