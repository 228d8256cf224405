"""Continuations of corpus prompts by the target, with the features that drafts learn from.

Prompts are prefixes of files, chats (cut where the assistant's response begins) and recall lists. The target runs them
token by token and continues greedily or by sampling; every position keeps its id, its taps and the target's last
hidden state, so one pass makes both the text and the features.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k3svc.ops.reference_sampling import gumbel, noise_bits, noise_keys
from training.bpe import END_OF_MESSAGE, OPEN, SEPARATOR
from training.recurrent import RecurrentTarget

CLASSES = ("files", "recall", "chat")
RESPONSE = (OPEN, 389, SEPARATOR)
"""<|open|>response<|sep|>, after which the assistant speaks."""
MAX_PERIOD = 64
AFTER_MESSAGE = 48
"""Positions after the end of a message that are worth learning."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts at the left of rows of T ids."""

    ids: Tensor
    """int64 [B, T]; unspecified after the prompt."""
    lengths: Tensor
    """int64 [B]."""
    kinds: Tensor
    """int64 [B], index into CLASSES."""

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Prompts and their continuations; features in bfloat16 on the target's device."""

    ids: Tensor
    """int64 [B, T]."""
    taps: Tensor
    """bfloat16 [B, T, taps · H]."""
    hidden: Tensor
    """bfloat16 [B, T, H]."""
    lengths: Tensor
    """int64 [B] of the prompts."""
    ends: Tensor
    """int64 [B], one past the last position worth learning: a loop sets in, or the message is over."""
    kinds: Tensor
    temperature: Tensor
    """float32 [B]; 0 is greedy."""
    seeds: Tensor
    """int64 [B] of the position-keyed noise; of no meaning where the roller was not keyed."""


def load_prompts(path: Path, length: int) -> Prompts:
    """The held-out prompts of a prompts.json."""
    listed = json.loads(path.read_text())["prompts"]
    rows = [(CLASSES.index(kind), ids) for kind in CLASSES for ids in listed[kind]]
    table = torch.zeros(len(rows), length, dtype=torch.int64)
    for at, (_, ids) in enumerate(rows):
        table[at, : len(ids)] = torch.tensor(ids)
    return Prompts(
        ids=table,
        lengths=torch.tensor([len(ids) for _, ids in rows]),
        kinds=torch.tensor([kind for kind, _ in rows]),
    )


def draw_prompts(
    corpus: Path, part: str, counts: dict[str, int], length: int, seed: int, held_out: Prompts | None
) -> Prompts:
    """Random prompts of the classes; documents that contain a held-out prompt's text are left alone."""
    draw = np.random.default_rng(seed)
    rows, lengths, kinds = [], [], []
    for kind, name in enumerate(CLASSES):
        stream = np.load(corpus / f"{name}_{part}.npz")
        ids, starts = stream["ids"].astype(np.int64), stream["starts"].astype(np.int64)
        barred = _documents_with(ids, starts, held_out, kind) if held_out is not None else set()
        spans = _spans(name, ids, starts, counts[name], length, draw, barred)
        table = np.zeros((len(spans), length), np.int64)
        for at, (first, last) in enumerate(spans):
            table[at, : last - first] = ids[first:last]
        rows.append(table)
        lengths.append(np.array([last - first for first, last in spans], np.int64))
        kinds.append(np.full(len(spans), kind, np.int64))
    order = draw.permutation(sum(map(len, lengths)))
    merged = (np.concatenate(rows)[order], np.concatenate(lengths)[order], np.concatenate(kinds)[order])
    table_ids, all_lengths, all_kinds = (torch.from_numpy(array) for array in merged)
    return Prompts(ids=table_ids, lengths=all_lengths, kinds=all_kinds)


def _documents_with(ids: np.ndarray, starts: np.ndarray, held_out: Prompts, kind: int) -> set[int]:
    """Documents that contain a held-out prompt of this class, up to its last END_OF_MESSAGE."""
    raw, found = ids.astype(np.uint16).tobytes(), set()
    for row in (held_out.kinds == kind).nonzero()[:, 0].tolist():
        prompt = held_out.ids[row, : held_out.lengths[row]].tolist()
        if END_OF_MESSAGE in prompt:
            prompt = prompt[: len(prompt) - prompt[::-1].index(END_OF_MESSAGE)]
        needle = np.array(prompt, np.uint16).tobytes()
        at = raw.find(needle)
        while at >= 0:
            if at % 2 == 0:
                found.add(int(np.searchsorted(starts, at // 2, side="right")) - 1)
            at = raw.find(needle, at + 1)
    return found


def _spans(
    name: str,
    ids: np.ndarray,
    starts: np.ndarray,
    count: int,
    length: int,
    draw: np.random.Generator,
    barred: set[int],
) -> list[tuple[int, int]]:
    """`count` stretches of the stream that make good prompts of this class."""
    stops = np.append(starts[1:], len(ids))
    if name == "chat":
        opens = np.flatnonzero((ids[:-2] == RESPONSE[0]) & (ids[1:-1] == RESPONSE[1]) & (ids[2:] == RESPONSE[2])) + 3
    spans: list[tuple[int, int]] = []
    while len(spans) < count:
        if name == "chat":
            last = int(draw.choice(opens))
            document = int(np.searchsorted(starts, last, side="right")) - 1
            first = int(starts[document])
            if last - first > length - 160:
                continue
        elif name == "recall":
            document = int(draw.integers(len(starts)))
            first = int(starts[document])
            last = first + int(draw.integers(48, length - 160))
        else:
            at = int(draw.integers(len(ids)))
            document = int(np.searchsorted(starts, at, side="right")) - 1
            size = int(draw.integers(32, length - 192))
            first = max(min(at, int(stops[document]) - size), int(starts[document]))
            last = first + size
        if last <= stops[document] and document not in barred:
            spans.append((first, last))
    return spans


def loop_start(ids: Tensor, lengths: Tensor, *, repeats: int = 2, shortest: int = 24) -> Tensor:
    """First generated position that ends at least `repeats` repeats of a period of up to 64 tokens.

    ids int64 [B, T], lengths int64 [B] → int64 [B], T where none does. A repeat counts from `shortest` tokens on.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)
    looping = torch.zeros_like(ids, dtype=torch.bool)
    for period in range(1, MAX_PERIOD + 1):
        differs = torch.ones_like(looping)
        differs[:, period:] = ids[:, period:] != ids[:, :-period]
        last_difference = torch.where(differs, positions, -1).cummax(dim=1).values
        looping |= positions - last_difference >= max(repeats * period, shortest)
    looping &= positions >= lengths[:, None]
    return torch.where(looping.any(1), looping.int().argmax(1), ids.shape[1])


def message_end(ids: Tensor, lengths: Tensor) -> Tensor:
    """Position after the first END_OF_MESSAGE of the continuation: int64 [B], T where there is none."""
    positions = torch.arange(ids.shape[1], device=ids.device)
    ended = (ids == END_OF_MESSAGE) & (positions >= lengths[:, None])
    return torch.where(ended.any(1), ended.int().argmax(1) + 1, ids.shape[1])


def keyed_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise of the library's sampler for sample index 0: int64 [B] each → float64 [B, X]."""
    keys = noise_keys(seeds, torch.zeros_like(seeds), positions)
    return gumbel(noise_bits(keys[:, None], torch.arange(vocab_size, device=seeds.device)))


class Roller:
    """Runs batches of one size; on a GPU the step is captured once and replayed.

    keyed: sample with the library's position-keyed noise instead of the generator's, which is faster.
    """

    def __init__(self, target: RecurrentTarget, batch: int, length: int, *, keyed: bool) -> None:
        self.keyed = keyed
        self.target, self.batch, self.length = target, batch, length
        device, width = target.device, target.config["hidden_size"]
        is_gpu = device != "cpu"
        dtype = torch.bfloat16 if is_gpu else torch.float32
        self.state = target.new_state(batch, length, dtype)
        self.ids = torch.zeros(batch, length, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(batch, 1, device=device)
        self.seeds = torch.arange(batch, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.taps = torch.zeros(batch, length, width * len(target.taps), dtype=torch.bfloat16, device=device)
        self.hidden = torch.zeros(batch, length, width, dtype=torch.bfloat16, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if is_gpu:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._advance()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._advance()

    def _advance(self) -> None:
        position = self.position
        step = self.target.step(self.ids.index_select(1, position)[:, 0], position, self.state)
        self.taps.index_copy_(1, position, step.taps[:, None].bfloat16())
        self.hidden.index_copy_(1, position, step.hidden[:, None].bfloat16())
        following = (position + 1).clamp(max=self.length - 1)
        if self.keyed:
            noise = keyed_noise(self.seeds, following.expand(self.batch), step.logits.shape[1])
        else:
            noise = -torch.log(-torch.log(torch.rand_like(step.logits).clamp(1e-20, 1 - 1e-7)))
        scores = torch.where(self.temperature > 0, step.logits / self.temperature.clamp(min=1e-3) + noise, step.logits)
        given = self.ids.index_select(1, following)[:, 0]
        token = torch.where(following < self.lengths, given, scores.argmax(-1))
        self.ids.index_copy_(1, following, torch.where(position + 1 < self.length, token, given)[:, None])
        position.add_(1)

    @torch.no_grad()
    def run(self, prompts: Prompts, temperature: Tensor) -> Rollouts:
        """Continue `batch` prompts to `length` tokens; the results are the roller's own buffers."""
        for caches in (self.state.kda, self.state.conv, self.state.rows):
            for cache in caches.values():
                cache.zero_()
        self.position.zero_()
        self.ids.copy_(prompts.ids)
        self.lengths.copy_(prompts.lengths)
        self.temperature.copy_(temperature[:, None])
        for _ in range(self.length):
            if self.graph is None:
                self._advance()
            else:
                self.graph.replay()
        return Rollouts(
            ids=self.ids,
            taps=self.taps,
            hidden=self.hidden,
            lengths=self.lengths,
            ends=torch.minimum(
                loop_start(self.ids, self.lengths), message_end(self.ids, self.lengths) + AFTER_MESSAGE
            ).clamp(max=self.length),
            kinds=prompts.kinds.to(self.ids.device),
            temperature=self.temperature[:, 0],
            seeds=self.seeds,
        )


def roll_all(
    target: RecurrentTarget, prompts: Prompts, temperature: Tensor, length: int, batch: int, *, keyed: bool
) -> Rollouts:
    """Continue any number of prompts, a multiple of `batch`. Keyed rollouts have seeds 0, 1, 2, …"""
    roller, total = Roller(target, batch, length, keyed=keyed), len(prompts)
    seeds = torch.arange(total, device=target.device)
    assert total % batch == 0
    device = target.device
    ids = torch.empty(total, length, dtype=torch.int64, device=device)
    taps = torch.empty(total, length, roller.taps.shape[-1], dtype=torch.bfloat16, device=device)
    hidden = torch.empty(total, length, roller.hidden.shape[-1], dtype=torch.bfloat16, device=device)
    ends = torch.empty(total, dtype=torch.int64, device=device)
    for first in range(0, total, batch):
        part = slice(first, first + batch)
        roller.seeds.copy_(seeds[part])
        some = Prompts(ids=prompts.ids[part], lengths=prompts.lengths[part], kinds=prompts.kinds[part])
        made = roller.run(some, temperature[part].to(device))
        ids[part], taps[part], hidden[part], ends[part] = made.ids, made.taps, made.hidden, made.ends
    return Rollouts(
        ids=ids,
        taps=taps,
        hidden=hidden,
        lengths=prompts.lengths.to(device),
        ends=ends,
        kinds=prompts.kinds.to(device),
        temperature=temperature.to(device),
        seeds=seeds,
    )
