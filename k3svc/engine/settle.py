"""From the logits of a step to what comes out of it: one token for a plain row, several for a row with drafts.

Every row of logits is adjusted and sampled by the same code (k3svc.engine.sampler); the rows of a block differ in what
stands before them (`SampleSpec.after`), and the rule of k3svc.engine.verify says how far a block counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k3svc.core.batch import Sampled, SampleSpec
from k3svc.engine.sampler import AskedTokens, Choices, describe_tokens, sample_rows
from k3svc.engine.verify import Verdict, chain_coins, chain_draw, match_exactly, reject_in_chain
from k3svc.ops.table import Ops

VerifyRule = Literal["exact", "rejection"]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One sample's rows of logits: the one after its last token, and one after each draft."""

    key: str
    spec: SampleSpec
    """Of the first row."""
    drafts: Sequence[int] = ()
    laws: Sequence[bytes] = ()
    """float32 [X] a draft; empty: each was certain."""

    @property
    def specs(self) -> list[SampleSpec]:
        return [self.spec.after(self.drafts[:count]) for count in range(len(self.drafts) + 1)]


class AskedBlocks:
    """The logits of a step, and what was asked of the device for them."""

    def __init__(self, ops: Ops, logits: Tensor, blocks: Sequence[Block]) -> None:
        """logits float32 [R, X], the rows of each block together, in the order of `blocks`, of which there is at least
        one.
        """
        self.logits = logits
        self.blocks = blocks
        self.specs = [spec for block in blocks for spec in block.specs]
        self.tokens = AskedTokens(ops, logits, self.specs)


def settle(ops: Ops, asked: AskedBlocks, rule: VerifyRule) -> tuple[dict[str, Sequence[Sampled]], dict[str, str]]:
    """Tokens and reasons of failure by key (`StepOutput`), once the device has them."""
    logits, blocks, specs = asked.logits, asked.blocks, asked.specs
    choices = asked.tokens.read()
    rows: list[int] = []
    token_ids: list[int] = []
    counts: list[int] = []
    failed: dict[str, str] = {}
    first = 0
    for block in blocks:
        verdict = _judge(ops, block, specs, choices, first, rule)
        last = first + verdict.num_accepted
        if last in choices.failed:
            failed[block.key] = choices.failed[last]
        chosen = [*block.drafts[: verdict.num_accepted], *([] if last in choices.failed else [verdict.token_id])]
        rows += range(first, first + len(chosen))
        token_ids += chosen
        counts.append(len(chosen))
        first += len(block.drafts) + 1
    described = iter(describe_tokens(ops, logits, specs, rows, token_ids))
    sampled: dict[str, Sequence[Sampled]] = {
        block.key: [next(described) for _ in range(count)] for block, count in zip(blocks, counts, strict=True) if count
    }
    return sampled, failed


def _judge(
    ops: Ops, block: Block, specs: Sequence[SampleSpec], choices: Choices, first: int, rule: VerifyRule
) -> Verdict:
    count = len(block.drafts)
    # Rows before the first that failed. One after a draft that a grammar forbids is never asked: the draft is rejected.
    whole = next((place for place in range(count + 1) if first + place in choices.failed), count + 1)
    if rule == "exact" or count == 0 or whole == 0:
        return match_exactly(block.drafts, choices.token_ids[first : first + count + 1])
    parameters = sample_rows(specs[first : first + 1], choices.adjusted.device)
    if parameters.host_greedy[0]:
        return match_exactly(block.drafts, choices.token_ids[first : first + count + 1])
    rows = range(first, first + whole)
    # On the host: the walk along a block reads numbers one by one, and not every device has float64.
    target = (
        ops.probabilities(
            choices.adjusted[first : rows.stop], sample_rows([specs[row] for row in rows], choices.adjusted.device)
        )
        .cpu()
        .double()
    )
    laws = None
    if block.laws:
        read = [torch.frombuffer(bytearray(law), dtype=torch.float32) for law in block.laws[:whole]]
        laws = torch.stack(read).double()
    seed, index, position = int(parameters.seed[0]), block.spec.sample_index, block.spec.position

    def draw(row: int, law: Tensor) -> int:
        return -1 if row == whole else chain_draw(law, seed, index, position + row)

    return reject_in_chain(
        block.drafts[:whole],
        target if whole > count else torch.cat([target, target[-1:]]),
        laws,
        chain_coins(seed, index, range(position, position + min(whole, count))),
        draw,
    )
