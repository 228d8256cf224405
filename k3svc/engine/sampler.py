"""From raw logits to tokens: penalties, bias and bans on the touched entries, the choice, log-probabilities.

A row that has nothing to choose from fails alone, with a reason; the other rows of the step go on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3svc.core.batch import Sampled, SampleSpec
from k3svc.ops.table import Ops, SampleRows
from k3svc.ops.upload import HostCopy, to_device

MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy, so that no backend divides by next to nothing (speculation.md 3.3)."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What came of the rows of a step."""

    adjusted: Tensor
    """float32 [R, X] logits after penalties, bias and bans."""
    token_ids: list[int]
    """By row; -1 where the row failed."""
    failed: Mapping[int, str]
    """Row → reason."""


class AskedTokens:
    """A token for each row of logits, asked of the device."""

    def __init__(self, ops: Ops, logits: Tensor, specs: Sequence[SampleSpec]) -> None:
        """logits float32 [R, X], R > 0."""
        peaks = logits.amax(dim=1)
        self._adjusted = adjust_logits(logits, specs)
        self.chosen = ops.sample(self._adjusted, sample_rows(specs, logits.device))
        """int64 [R] on the device; any id where a row fails."""
        left = () if self._adjusted is logits else (self._adjusted.amax(dim=1),)
        self._copy = HostCopy(self.chosen, peaks, *left)

    def read(self) -> Choices:
        """What came of it, once it is there."""
        chosen, peaks, *left = self._copy.read()
        token_ids: list[int] = chosen.tolist()
        failed = {
            row: f"the largest logit of the model is {peak}"
            for row, peak in enumerate(peaks.tolist())
            if not math.isfinite(peak)
        }
        for row, peak in enumerate(left[0].tolist() if left else ()):
            if peak == -math.inf:
                failed.setdefault(row, "bans and grammar leave no token to choose")
        for row in failed:
            token_ids[row] = -1
        return Choices(adjusted=self._adjusted, token_ids=token_ids, failed=failed)


def describe_tokens(
    ops: Ops, logits: Tensor, specs: Sequence[SampleSpec], rows: Sequence[int], token_ids: Sequence[int]
) -> list[Sampled]:
    """Chosen tokens with the log-probabilities that were asked for; token i came of row rows[i].

    Log-probabilities are those of the logits as given, float32 [R, X]: before penalties, temperature and filters.
    """
    sampled = [Sampled(token_id=token_id) for token_id in token_ids]
    wanted = [index for index, row in enumerate(rows) if specs[row].logprobs is not None]
    if wanted:
        own = logits[[rows[index] for index in wanted]]
        counts = [specs[rows[index]].logprobs or 0 for index in wanted]
        tops = most_likely(own, max(counts))
        asked = torch.tensor([[token_ids[index], *top] for index, top in zip(wanted, tops, strict=True)])
        found = ops.log_softmax(own).gather(1, asked.to(logits.device)).tolist()
        for index, count, top, (logprob, *rest) in zip(wanted, counts, tops, found, strict=True):
            pairs = tuple(zip(top, rest, strict=True))[:count]
            sampled[index] = Sampled(token_id=token_ids[index], logprob=logprob, top=pairs)
    return sampled


def adjust_logits(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Logits after penalties, bias, bans and grammar, float32 [R, X]: a copy, or logits itself when no row asks for
    any.
    """
    rows = [
        row
        for row, spec in enumerate(specs)
        if spec.counts is not None or spec.params.logit_bias or spec.banned or spec.guide is not None
    ]
    if not rows:
        return logits
    out = logits.clone()
    for row in rows:
        _adjust(out[row], specs[row])
    return out


def sample_rows(specs: Sequence[SampleSpec], device: torch.device) -> SampleRows:
    """The parameters of rows as `Ops.sample` takes them."""
    params = [spec.params for spec in specs]
    # The one most likely id wins either way; argmax settles a tie for it by the lowest id.
    greedy = tuple(p.temperature < MIN_TEMPERATURE or p.top_k == 1 for p in params)
    temperatures = [0.0 if is_greedy else p.temperature for is_greedy, p in zip(greedy, params, strict=True)]
    integers = (
        [p.top_k for p in params],
        [_signed(p.seed) for p in params],
        [spec.sample_index for spec in specs],
        [spec.position for spec in specs],
    )
    parts = [np.array(values, dtype=np.int64) for values in integers]
    limits = [p.top_p for p in params], [p.min_p for p in params]
    parts += [_float_bits(values) for values in (temperatures, *limits)]
    top_k, seed, sample_index, position, *floats = to_device(parts, device)
    temperature, top_p, min_p = (bits.view(torch.float32)[: len(specs)] for bits in floats)
    return SampleRows(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        sample_index=sample_index,
        position=position,
        host_greedy=greedy,
        host_filters=tuple(zip(integers[0], *(_rounded(values) for values in limits), strict=True)),
    )


def most_likely(rows: Tensor, count: int) -> list[list[int]]:
    """Ids of the `count` largest values of each row of [R, X], largest first, the lowest id first among equals."""
    size = rows.shape[1]
    if count == 0:
        return [[] for _ in rows]
    values, ids = rows.topk(min(count + 1, size), dim=1)
    best: list[list[int]] = ids[:, :count].tolist()
    # topk promises no order among equals.
    for index, has_equals in enumerate((values[:, 1:] == values[:, :-1]).any(dim=1).tolist()):
        if has_equals:
            row = rows[index]
            seen = (row >= values[index, min(count, size) - 1]).nonzero()[:, 0]
            best[index] = seen[row[seen].argsort(descending=True, stable=True)[:count]].tolist()
    return best


def _adjust(row: Tensor, spec: SampleSpec) -> None:
    """Applies one row's changes to row [X] in place.

    Repetition divides positive and multiplies negative logits of ids in the prompt or the output; then frequency
    times the count, and presence, are taken from ids in the output; then come bias, bans and what a grammar forbids.
    """
    params, counts = spec.params, spec.counts
    if counts is not None and params.repetition_penalty != 1.0:
        seen = _ids(counts.prompt.union(counts.output), row)
        old = row[seen]
        new = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        # A penalty near zero must not make an infinity of a large logit.
        row[seen] = new.clamp(max=torch.finfo(row.dtype).max)
    if counts is not None and counts.output and (params.presence_penalty or params.frequency_penalty):
        times = torch.tensor(list(counts.output.values()), dtype=row.dtype, device=row.device)
        row[_ids(counts.output, row)] -= times * params.frequency_penalty + params.presence_penalty
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
        row[_ids(params.logit_bias, row)] += bias
    if spec.banned:
        row[_ids(spec.banned, row)] = -math.inf
    if spec.guide is not None:
        allowed = torch.frombuffer(bytearray(spec.guide.allowed()), dtype=torch.uint8).to(row.device)
        row.masked_fill_(allowed == 0, -math.inf)


def _ids(ids: Iterable[int], row: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=row.device)


def _float_bits(values: Sequence[float]) -> npt.NDArray[np.int64]:
    """float32 values two by two, 0 after the last if need be."""
    floats = np.zeros(len(values) + len(values) % 2, dtype=np.float32)
    floats[: len(values)] = values
    return floats.view(np.int64)


def _rounded(values: Sequence[float]) -> list[float]:
    """The values as float32 has them."""
    rounded: list[float] = np.array(values, dtype=np.float32).tolist()
    return rounded


def _signed(seed: int) -> int:
    """The int64 with the bits of an unsigned seed."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
