"""Acceptance of drafts on the held-out prompts, with the library's own draft model, as it would be served.

    python -m training.acceptance --draft models/k3-nano-dflash models/k3-nano-dspark [--target models/k3-nano]

The target continues every prompt by 128 tokens in float32 (greedy, and sampled at temperature 1 with position-keyed
noise); then each draft walks over the continuation: context rows are injected as they are committed, the draft
proposes, the matching prefix is accepted. Prints a table and, as its last line, one JSON object. Acceptance length is
1 + accepted / steps; looping tails are cut and counted apart. `message` rows end at the end of the message.
"""

import argparse
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from k3svc import ops as backends
from k3svc.model.draft import Blocks, DraftModel
from k3svc.model.draft_config import load_draft_config
from k3svc.ops.table import Ops, SampleRows
from training.acceptance_walk import NUM_TOKENS, Figures, usable_length
from training.recurrent import RecurrentTarget
from training.report import start_log
from training.rollouts import CLASSES, Prompts, Rollouts, load_prompts, roll_all

log = logging.getLogger(__name__)

AHEAD = 8
WINDOW = 1024


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One continuation and the features of its tokens."""

    kind: str
    ids: list[int]
    prompt_len: int
    taps: Tensor
    """[T, taps · H]."""
    temperature: float
    seed: int

    @property
    def generated(self) -> list[int]:
        return self.ids[self.prompt_len : self.prompt_len + NUM_TOKENS]


def recordings(rollouts: Rollouts) -> list[Recording]:
    """Rollouts one by one."""
    return [
        Recording(
            kind=CLASSES[int(rollouts.kinds[row])],
            ids=rollouts.ids[row].tolist(),
            prompt_len=int(rollouts.lengths[row]),
            taps=rollouts.taps[row].float(),
            temperature=float(rollouts.temperature[row]),
            seed=int(rollouts.seeds[row]),
        )
        for row in range(len(rollouts.ids))
    ]


def record(target: RecurrentTarget, prompts: Prompts, temperatures: tuple[float, ...]) -> list[Recording]:
    """Continue every prompt at every temperature; the seed of a continuation is its number."""
    times = len(temperatures)
    repeated = Prompts(
        ids=prompts.ids.repeat(times, 1), lengths=prompts.lengths.repeat(times), kinds=prompts.kinds.repeat(times)
    )
    heat = torch.tensor(temperatures).repeat_interleave(len(prompts))
    length = prompts.ids.shape[1]
    return recordings(roll_all(target, repeated, heat, length, len(repeated), keyed=True))


def sampling_rows(temperature: float, seed: int) -> SampleRows | None:
    """Parameters of one sampled request; None is greedy."""
    if temperature == 0:
        return None
    zero = torch.zeros(1, dtype=torch.int64)
    return SampleRows(
        temperature=torch.tensor([temperature]),
        top_k=zero,
        top_p=torch.ones(1),
        min_p=torch.zeros(1),
        seed=torch.tensor([seed]),
        sample_index=zero,
        position=zero,
        host_greedy=(False,),
        host_filters=((0, 1.0, 0.0),),
    )


def serve(draft: DraftModel, recording: Recording, num_tokens: int, figures: Figures) -> None:
    """Walk over the first `num_tokens` generated tokens of one recording; the last block is clipped."""
    context = draft.new_context(num_slots=1, max_window=WINDOW, scratch_rows=AHEAD)
    slot, prompt_len = torch.zeros(1, dtype=torch.int64), recording.prompt_len
    features = draft.projector.project(recording.taps)
    sampling = sampling_rows(recording.temperature, recording.seed)
    written, anchor = 0, 0
    while anchor < num_tokens - 1:
        base = prompt_len + anchor
        positions = torch.arange(max(written, base - context.window), base)
        draft.inject(features[positions], positions, slot.expand(len(positions)), context)
        written = base
        blocks = Blocks(
            anchors=torch.tensor([recording.ids[base]]),
            base_lens=torch.tensor([base]),
            starts=torch.zeros(1, dtype=torch.int64),
            slots=slot,
        )
        tokens = draft.propose(blocks, context, sampling).tokens[0].tolist()
        wanted = recording.ids[base + 1 : prompt_len + num_tokens]
        matched = 0
        for token, true in zip(tokens, wanted, strict=False):
            if token != true:
                break
            matched += 1
        figures.count(matched, draft.config.num_proposals)
        anchor += matched + 1


def measure(draft: DraftModel, recorded: list[Recording], *, stop_at_message_end: bool) -> dict[str, Figures]:
    """Figures by class and temperature."""
    table: dict[str, Figures] = {}
    for recording in recorded:
        count, looping = usable_length(recording.generated, stop_at_message_end=stop_at_message_end)
        entry = table.setdefault(f"{recording.kind} T={recording.temperature:g}", Figures())
        entry.tokens += count
        entry.looping_tokens += looping
        serve(draft, recording, count, entry)
    return dict(sorted(table.items()))


def load_draft(path: Path, target: RecurrentTarget, ops: Ops) -> DraftModel:
    """A draft with the target's embedding and lm_head."""
    weights = target.weights
    embedding, lm_head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    return DraftModel.load(path, embedding=embedding, lm_head=lm_head, ops=ops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, nargs="+", required=True)
    parser.add_argument("--target", type=Path, default=Path("models/k3-nano"))
    parser.add_argument("--prompts", type=int, default=1000, help="at most so many prompts of each class")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    given = parser.parse_args()
    start_log()
    ops = backends.load("reference", dtype="float32", threads=torch.get_num_threads())
    everything = load_prompts(given.target / "prompts.json", 256 + NUM_TOKENS)
    rank = torch.stack([(everything.kinds[:at] == kind).sum() for at, kind in enumerate(everything.kinds.tolist())])
    chosen = rank < given.prompts
    prompts = Prompts(ids=everything.ids[chosen], lengths=everything.lengths[chosen], kinds=everything.kinds[chosen])
    results: dict[str, dict[str, float]] = {}
    recorded: dict[tuple[int, ...], list[Recording]] = {}
    for path in given.draft:
        target_taps = load_draft_config(path).target_layers
        target = RecurrentTarget(given.target, "cpu", target_taps)
        if target_taps not in recorded:
            recorded[target_taps] = record(target, prompts, tuple(given.temperature))
        draft = load_draft(path, target, ops)
        for stop in (False, True):
            for name, figures in measure(draft, recorded[target_taps], stop_at_message_end=stop).items():
                row = f"{path.name} {name}{' message' if stop else ''}"
                log.info("%-38s %s", row, figures)
                results[row] = {"acceptance_length": round(figures.acceptance_length, 4), "steps": figures.steps}
    log.info("%s", json.dumps(results))


if __name__ == "__main__":
    main()
