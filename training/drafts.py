"""Train drafts on the target's own continuations.

    python -m training.drafts --kind dflash dspark --corpus DIR --out DIR [--target models/k3-nano] [--steps N]

Rolls out the target once, trains each kind over the same rollouts, and writes OUT/k3-nano-KIND in the published layout
(config.json, model.safetensors) with OUT/KIND.json: losses and validation figures on held-out prompts of the corpus.
The recipe is speculation.md 9; README.md says where it differs.
"""

import argparse
import copy
import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from k3svc.model.draft_config import parse_draft_config
from training.acceptance_walk import Figures, measure
from training.draft_net import DraftNet, published, taps_of
from training.recurrent import RecurrentTarget
from training.report import start_log
from training.rollouts import CLASSES, Rollouts, draw_prompts, load_prompts, roll_all

log = logging.getLogger(__name__)

TAPS = (1, 3, 5, 6)
MASK_TOKEN = 4080
"""<|reserved_token_4080|>, the slot of the public 163824; no text has it."""
SHARES = {"files": 0.62, "recall": 0.16, "chat": 0.22}
GREEDY_SHARE = 0.5
"""Of the rollouts; the others are sampled at temperature 1."""
SMOOTHING = 0.5
"""Of the success probabilities that weigh the rows."""


def draft_fields(
    kind: str, *, layers: int, intermediate: int, rank: int, head: str, taps: tuple[int, ...]
) -> dict[str, Any]:
    """The published config.json fields of a draft for k3-nano."""
    shared = {
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": intermediate,
        "hidden_act": "silu",
        "vocab_size": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 1048576,
        "attention_bias": False,
        "use_sliding_window": True,
        "sliding_window": 512,
        "layer_types": ["sliding_attention"] * layers,
        "num_target_layers": 8,
        "dtype": "bfloat16",
    }
    block = {"mask_token_id": MASK_TOKEN, "target_layer_ids": list(taps), "aux_hidden_stream": "attn_res"}
    if kind == "dflash":
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **shared,
            "block_size": 8,
            "dflash_config": block,
        }
    markov = {
        "markov_rank": rank,
        "markov_head_type": head,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }
    names = {"architectures": ["DSparkDraftModel"], "model_type": "qwen3"}
    return {**names, **shared, "block_size": 7, "dspark_config": {**block, **markov}}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Blocks to learn from: S sequences of T tokens, A anchors each, γ labels a block."""

    taps: Tensor
    block: Tensor
    anchors: Tensor
    first: Tensor
    labels: Tensor
    """int64 [S, A, γ]."""
    previous: Tensor
    """int64 [S, A, γ], the token before each label."""
    weights: Tensor
    """float32 [S, A, γ], 1 where there is something to learn."""
    hidden: Tensor
    """bfloat16 [S, A, γ, H]: the target's states that predict the labels."""
    greedy: Tensor
    """bool [S, 1, 1]: the rollout is greedy."""


class Trainer:
    """One draft, its optimizer, and a step that a GPU replays as one graph."""

    def __init__(
        self,
        net: DraftNet,
        rollouts: Rollouts,
        *,
        sequences: int,
        anchors: int,
        rate: float,
        ce_share: float,
        augment: bool,
    ) -> None:
        self.net, self.rollouts = net, rollouts
        self.sequences, self.anchors, self.peak, self.ce_share, self.augment = (
            sequences,
            anchors,
            rate,
            ce_share,
            augment,
        )
        self.usable = (rollouts.ends - rollouts.lengths >= 8).nonzero()[:, 0]
        device = rollouts.ids.device
        self.rate, self.losses = torch.zeros((), device=device), torch.zeros(4, device=device)
        matrices = [p for name, p in net.named_parameters() if p.dim() == 2 and "markov_w" not in name]
        others = [p for p in net.parameters() if not any(p is matrix for matrix in matrices)]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
            lr=self.rate,
            betas=(0.9, 0.95),
            fused=True,
            capturable=device.type == "cuda",
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def draw(self) -> Batch:
        """A random batch; every draw happens on the device, so it can be part of the graph."""
        rollouts, config = self.rollouts, self.net.config
        device, gamma = rollouts.ids.device, config.num_proposals
        shape = (self.sequences, self.anchors)
        chosen = self.usable[torch.randint(len(self.usable), (self.sequences,), device=device)]
        ids, lengths, ends = rollouts.ids[chosen], rollouts.lengths[chosen, None], rollouts.ends[chosen, None]
        span = ends - 1 - lengths
        anchors = lengths + (torch.rand(shape, device=device) * span).long().clamp(max=span - 1)
        steps = torch.arange(gamma + 1, device=device)
        places = anchors[..., None] + steps
        inside = places < ends[..., None]
        tokens = ids.gather(1, places.clamp(max=ids.shape[1] - 1).flatten(1)).view(*shape, gamma + 1)
        states = rollouts.hidden[chosen[:, None, None], places[..., :-1].clamp(max=ids.shape[1] - 1)]
        revealed, first = torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros_like(anchors)
        if self.augment:
            few = torch.randint(1, 4, shape, device=device)
            revealed = torch.where(torch.rand(shape, device=device) < 0.1, few, revealed)
            kept = torch.exp2(3 + 6 * torch.rand(shape, device=device)).long()
            first = torch.where(torch.rand(shape, device=device) < 0.15, (anchors - kept).clamp(min=0), first)
        rows = steps[: config.num_rows]
        known = (rows <= revealed[..., None]) & inside[..., : config.num_rows]
        block = torch.where(known, tokens[..., : config.num_rows], config.mask_token_id)
        weights = (inside[..., 1:] & (steps[:-1] >= revealed[..., None])).float()
        return Batch(
            taps=taps_of(TAPS, config.target_layers, rollouts.taps[chosen]),
            block=block,
            anchors=anchors,
            first=first,
            labels=tokens[..., 1:],
            previous=tokens[..., :-1],
            weights=weights,
            hidden=states,
            greedy=(rollouts.temperature[chosen] == 0)[:, None, None],
        )

    def loss(self, batch: Batch) -> Tensor:
        """Cross entropy with the text (greedy) or the target's law (sampled); DSpark adds distance and confidence."""
        net, config = self.net, self.net.config
        hidden = net.rows(batch.taps, batch.block, batch.anchors, batch.first)
        logits = net.base_logits(hidden)
        embedded = hidden
        if config.markov_head is not None:
            bias, embedded = self._teacher_forced(hidden, batch.previous)
            logits = logits + bias
        log_draft = logits.log_softmax(-1)
        law = net.base_logits(batch.hidden).softmax(-1)
        log_label = log_draft.gather(-1, batch.labels[..., None])[..., 0]
        ce = torch.where(batch.greedy, -log_label, -(law * log_draft).sum(-1))
        right = (log_draft.detach().argmax(-1) == batch.labels).float()
        weights = _row_weights(log_label.detach().exp(), batch.weights)
        total = weights.sum()
        if config.markov_head is None:
            loss = (ce * weights).sum() / total
            hits = (right * weights).sum() / total
            self._note(loss, loss, loss, hits)
            return loss
        distance = (log_draft.exp() - law).abs().sum(-1)
        # What the exact-match rule accepts: the same token (greedy), about the common mass (sampled, common noise)
        accepted = torch.where(batch.greedy, right, 1 - 0.5 * distance.detach())
        logit = net.confidence(hidden, embedded)
        confidence = F.binary_cross_entropy_with_logits(logit, accepted, reduction="none")
        text = self.ce_share * ce + (1 - self.ce_share) * distance
        means = [(part * weights).sum() / total for part in (text, confidence, distance, right)]
        self._note(*means)
        return means[0] + means[1]

    def _teacher_forced(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Markov bias [S, A, γ, X] and embeddings [S, A, γ, r] with the true token before each row."""
        head = self.net.markov_head
        memory = head.begin(hidden[..., 0, :])
        if self.net.config.markov_head != "rnn":
            bias, embedded, _ = head(hidden, previous, memory[..., None, :])
            return bias, embedded
        biases, embeddings = [], []
        for row in range(self.net.config.num_proposals):
            bias, embedded, memory = head(hidden[..., row, :], previous[..., row], memory)
            biases.append(bias)
            embeddings.append(embedded)
        return torch.stack(biases, dim=-2), torch.stack(embeddings, dim=-2)

    def _note(self, text: Tensor, confidence: Tensor, distance: Tensor, hits: Tensor) -> None:
        self.losses.copy_(torch.stack([part.detach() for part in (text, confidence, distance, hits)]))

    def advance(self) -> None:
        """One step at the present rate."""
        loss = self.loss(self.draw())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()

    def capture(self) -> None:
        """Record the step on a GPU. The warm-up runs at rate 0."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.advance()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.advance()

    def run(self, steps: int, seconds: float) -> list[tuple[int, list[float]]]:
        """Train with warm-up and a cosine down to 5 %, fewer steps where the time would not do."""
        if self.rollouts.ids.is_cuda:
            self.capture()
        began, history, total = time.monotonic(), [], steps
        for step in range(steps):
            if step == 200:
                float(self.losses[0])
                total = int(min(steps, seconds / (time.monotonic() - began) * step))
            if step >= total:
                break
            progress = step / total
            warm = min(1.0, (step + 1) / (0.04 * total))
            self.rate.fill_(self.peak * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))))
            if self.graph is None:
                self.advance()
            else:
                self.graph.replay()
            if (step + 1) % 250 == 0 or step + 1 == total:
                losses = self.losses.tolist()
                history.append((step + 1, losses))
                if (step + 1) % 1000 == 0 or step + 1 == total:
                    shown = " ".join(f"{loss:.4f}" for loss in losses)
                    log.info(
                        "step %d/%d loss confidence distance hits %s %.0f s",
                        step + 1,
                        total,
                        shown,
                        time.monotonic() - began,
                    )
                if not all(map(math.isfinite, losses)):
                    raise RuntimeError(f"loss is not finite at step {step + 1}")
        return history


def _row_weights(success: Tensor, valid: Tensor) -> Tensor:
    """Expected accepted tokens that hang on each row (D-PACE): success and valid [..., γ] → [..., γ].

    A row counts as much as the rows behind it are likely to be reached, by the draft's own smoothed success.
    """
    reached = ((1 - SMOOTHING) * success + SMOOTHING).cumprod(-1) * valid
    return reached.flip(-1).cumsum(-1).flip(-1) * valid


def make_rollouts(
    target: RecurrentTarget, corpus: Path, held_out: Path, count: int, length: int, batch: int
) -> Rollouts:
    """Rollouts of training prompts that share no document with the held-out ones."""
    counts = {name: round(count * share) for name, share in SHARES.items()}
    counts["files"] += count - sum(counts.values())
    prompts = draw_prompts(corpus, "train", counts, length, 11, load_prompts(held_out, length))
    sampled = torch.rand(count, generator=torch.Generator().manual_seed(12)) >= GREEDY_SHARE
    return roll_all(target, prompts, sampled.float(), length, batch, keyed=False)


def make_validation(target: RecurrentTarget, corpus: Path, count: int, length: int) -> Rollouts:
    """`count` held-out prompts of each class, greedy and at temperature 1."""
    prompts = draw_prompts(corpus, "val", dict.fromkeys(CLASSES, 2 * count), length, 13, None)
    temperature = (torch.arange(len(prompts)) % 2).float()
    return roll_all(target, prompts, temperature, length, len(prompts), keyed=True)


def train_one(
    kind: str, given: argparse.Namespace, target: RecurrentTarget, rollouts: Rollouts, check: Rollouts
) -> DraftNet:
    """Train, validate and write one draft; returns it as written, rounded to bfloat16."""
    torch.manual_seed(given.seed)
    fields = draft_fields(
        kind,
        layers=given.layers,
        intermediate=given.intermediate,
        rank=given.rank,
        head=given.head,
        taps=tuple(given.taps),
    )
    weights = target.weights
    net = DraftNet(parse_draft_config(fields), weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    net = net.to(target.device)
    size = sum(parameter.numel() for parameter in net.parameters())
    log.info("%s %s: %d parameters, %s", kind, given.name, size, target.device)
    trainer = Trainer(
        net,
        rollouts,
        sequences=given.sequences,
        anchors=given.anchors,
        rate=given.rate,
        ce_share=given.ce_share,
        augment=not given.plain,
    )
    began = time.monotonic()
    history = trainer.run(given.steps, given.seconds)
    spent = time.monotonic() - began
    folder = given.out / f"k3-nano-{kind}{given.name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    tensors = published(net)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rounded = copy.deepcopy(net)
    rounded.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    figures = measure(rounded, check, TAPS, stop_at_message_end=False)
    for name, row in figures.items():
        log.info("%s%s %-14s %s", kind, given.name, name, row)
    result = {
        "kind": kind,
        "arguments": {key: str(value) for key, value in vars(given).items()},
        "parameters": size,
        "train_seconds": round(spent, 1),
        "blocks": history[-1][0] * given.sequences * given.anchors,
        "history": history,
        "validation": {name: _row(row) for name, row in figures.items()},
    }
    (given.out / f"{kind}{given.name}.json").write_text(json.dumps(result))
    return rounded


def _row(figures: Figures) -> dict[str, float]:
    return {"acceptance_length": round(figures.acceptance_length, 4), "steps": figures.steps}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kind", nargs="+", choices=("dflash", "dspark"), default=["dflash", "dspark"])
    made.add_argument("--target", type=Path, default=Path("models/k3-nano"))
    made.add_argument("--corpus", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--name", default="", help="suffix of the folders written, to tell runs apart")
    made.add_argument("--rollouts", type=int, default=57_344, help="sequences, a multiple of --batch")
    made.add_argument("--batch", type=int, default=4096, help="sequences rolled out at once")
    made.add_argument("--length", type=int, default=512, help="tokens a sequence")
    made.add_argument("--validation", type=int, default=64, help="held-out prompts a class and temperature")
    made.add_argument("--steps", type=int, default=8000)
    made.add_argument("--seconds", type=float, default=math.inf, help="fewer steps where a draft would take longer")
    made.add_argument("--sequences", type=int, default=64, help="sequences a step")
    made.add_argument("--anchors", type=int, default=32, help="blocks a sequence and step")
    made.add_argument("--rate", type=float, default=1.5e-3)
    made.add_argument("--ce-share", type=float, default=0.5, help="of DSpark's loss; the rest is the distance")
    made.add_argument("--plain", action="store_true", help="no truncated contexts and revealed tokens")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--intermediate", type=int, default=1024)
    made.add_argument("--rank", type=int, default=128)
    made.add_argument("--head", choices=("vanilla", "gated", "rnn"), default="gated")
    made.add_argument("--taps", type=int, nargs="+", default=list(TAPS))
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return made


def main() -> None:
    given = parser().parse_args()
    start_log()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(1)
    began = time.monotonic()
    target = RecurrentTarget(given.target, given.device, TAPS)
    held_out = given.target / "prompts.json"
    rollouts = make_rollouts(target, given.corpus, held_out, given.rollouts, given.length, given.batch)
    check = make_validation(target, given.corpus, given.validation, given.length)
    greedy = rollouts.temperature == 0
    looping = (rollouts.ends[greedy] < given.length).float().mean().item()
    log.info(
        "%d tokens rolled out, %.2f of the greedy ones loop, %.0f s",
        rollouts.ids.numel(),
        looping,
        time.monotonic() - began,
    )
    for kind in given.kind:
        train_one(kind, given, target, rollouts, check)


if __name__ == "__main__":
    main()
