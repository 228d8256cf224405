"""Whether to speculate: by what drafts gave and what they cost, in plain steps, without a clock."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class _Account:
    credit: float
    """What may be lost before speculation rests, in plain steps; below 0: what is to be earned back."""
    least: float = 0.0
    """With so much left it rests."""
    is_resting: bool = True
    listening: int = 0
    """Steps left of a rest at which drafters are heard."""
    to_probe: int = 0
    """Steps until plain steps are looked at."""
    probing: int = 0
    """Plain steps left of that."""


class Governor:
    """Whether to speculate at all, by what it gives: the time of each step with drafts, with all that speculation
    costs, against that of the plain steps that would give its tokens, of which a few are made now and then to know what
    they take. Every step earns a share of a plain step, which is what speculation may lose in the long run; when more
    was lost, it rests until that has been earned again.

    Among few samples it rests with an ear open: drafters are told of text that has just come, propose while plain steps
    go on, and their proposals are compared with what comes out, which costs little. Who is found to be worth it may
    lose TRUST beyond what was earned, which is earned later. Apart for each magnitude of the number of samples.
    """

    SHARE = 0.03
    MOST_CREDIT = 8.0
    MOST_GAINED = 24.0
    """Up to which drafts that save time add to it: even of text that they suit, some steps in a row come to nothing."""
    TRUST = 8.0
    LISTEN_STEPS = 256
    """After which text is listened to no longer."""
    LISTEN_LOSS = 0.3
    """That one step counts with at which drafters are heard: what plain steps take may not be known yet."""
    MOST_LOSS = 4.0
    """That one step counts with: some are slow for reasons of their own."""
    FEW_SAMPLES = 4
    PROBE_STEPS = 4
    PROBE_EVERY = 64

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = {}

    def pays(self, num_samples: int) -> bool:
        """Whether the next step of so many samples is to have drafts; called once a step."""
        account = self._account(num_samples)
        account.credit = max(account.credit, min(account.credit + self.SHARE, self.MOST_CREDIT))
        account.listening = max(0, account.listening - 1)
        if account.listening > 0 or (account.is_resting and account.credit < self.MOST_CREDIT):
            # The rest tells what plain steps take.
            account.to_probe = self.PROBE_EVERY
            return False
        if account.is_resting:
            self._wake(account, least=0.0)
        if account.probing == 0 and account.to_probe == 0:
            account.probing, account.to_probe = self.PROBE_STEPS, self.PROBE_EVERY
        if account.probing > 0:
            account.probing -= 1
            return False
        account.to_probe -= 1
        return True

    def observe(self, num_samples: int, num_tokens: int, seconds: float, plain_s: float) -> None:
        """A step that was to have drafts, or at which drafters were heard, gave tokens, `seconds` after the one before;
        plain ones would take plain_s.
        """
        account = self._account(num_samples)
        loss = seconds / plain_s - num_tokens / num_samples
        if account.listening > 0:
            # It uses up what was earned, and makes no debts, which only trust can.
            account.credit = max(account.credit - min(loss, self.LISTEN_LOSS), min(account.credit, 0.0))
            return
        account.credit = min(account.credit - min(loss, self.MOST_LOSS), self.MOST_GAINED)
        if account.credit <= account.least:
            self.distrust(num_samples)

    def rest(self, num_samples: int) -> None:
        """It is known that speculation does not pay now."""
        account = self._account(num_samples)
        account.credit = min(account.credit, 0.0)
        self._rest(account)

    def is_resting(self, num_samples: int) -> bool:
        """Whether drafters hear of nothing."""
        account = self._account(num_samples)
        return account.is_resting and account.listening == 0

    def is_listening(self, num_samples: int) -> bool:
        """Whether drafters are to propose, and nobody waits for it."""
        return self._account(num_samples).listening > 0

    def would_try(self, num_samples: int) -> bool:
        """Whether drafters are to know of text that comes now."""
        return not self._account(num_samples).is_resting or num_samples <= self.FEW_SAMPLES

    def renew(self, num_samples: int) -> None:
        """New text has come: among few samples it may be what makes speculation pay. It has no claim to what other
        text has gained, and may lose MOST_CREDIT at most.
        """
        account = self._account(num_samples)
        account.credit = min(account.credit, self.MOST_CREDIT)
        account.least = max(account.least, account.credit - self.MOST_CREDIT)
        if account.is_resting and self.would_try(num_samples):
            account.listening = self.LISTEN_STEPS

    def trust(self, num_samples: int) -> None:
        """What drafters proposed of the text that is listened to is worth its time."""
        account = self._account(num_samples)
        if account.credit > -self.TRUST:
            self._wake(account, least=max(account.credit - self.TRUST, -self.TRUST))

    def distrust(self, num_samples: int) -> None:
        """It is not so any more, or was not."""
        account = self._account(num_samples)
        self._rest(account)
        if num_samples <= self.FEW_SAMPLES:
            account.listening = self.LISTEN_STEPS

    def _rest(self, account: _Account) -> None:
        account.is_resting, account.listening, account.least = True, 0, 0.0

    def _wake(self, account: _Account, *, least: float) -> None:
        account.is_resting, account.listening, account.least = False, 0, least

    def _account(self, num_samples: int) -> _Account:
        magnitude = max(num_samples - 1, 0).bit_length()
        account = self._accounts.get(magnitude)
        if account is None:
            account = self._accounts[magnitude] = _Account(credit=self.MOST_CREDIT)
        return account
