"""Sequential temperature scaling of a draft's confidences (DSpark, section STS).

    python -m training.sts --draft models/k3-nano-dspark --corpus DIR [--target models/k3-nano] [--device cuda]

Writes DRAFT/sts.json: `temperatures`, one a position. From left to right, T_k is the value of a grid that gives the
product of sigmoid(logit_j / T_j), j <= k, the smallest expected calibration error against "the first k drafts were
accepted", on continuations of held-out corpus prompts, half of them greedy, half sampled.
"""

import argparse
import json
import logging
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from k3svc.model.draft_config import load_draft_config
from training.acceptance_walk import NUM_TOKENS, matches_of
from training.draft_net import DraftNet
from training.recurrent import RecurrentTarget
from training.report import start_log
from training.rollouts import CLASSES, Rollouts, draw_prompts, roll_all

log = logging.getLogger(__name__)

GRID = torch.logspace(-2, 2, 65, base=2.0)
NUM_BINS = 20


def calibration_error(predicted: Tensor, happened: Tensor) -> float:
    """Expected calibration error over equal bins: predicted in 0..1 and happened 0 or 1, both [N]."""
    bins = (predicted * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    zeros = torch.zeros(NUM_BINS, dtype=torch.float64)
    gaps = zeros.index_add(0, bins, predicted.double()) - zeros.index_add(0, bins, happened.double())
    return float(gaps.abs().sum() / len(predicted))


def fit(logits: Tensor, matches: Tensor) -> tuple[list[float], list[tuple[float, float]]]:
    """Temperatures of logits [N, γ] given the accepted drafts [N], and the error of each prefix before and after."""
    plain, fitted = torch.ones(len(logits)), torch.ones(len(logits))
    temperatures, errors = [], []
    for row in range(logits.shape[1]):
        happened = (matches > row).float()
        options = [
            calibration_error(fitted * torch.sigmoid(logits[:, row] / temperature), happened) for temperature in GRID
        ]
        best = min(range(len(GRID)), key=options.__getitem__)
        plain = plain * torch.sigmoid(logits[:, row])
        fitted = fitted * torch.sigmoid(logits[:, row] / GRID[best])
        temperatures.append(round(float(GRID[best]), 4))
        errors.append((calibration_error(plain, happened), options[best]))
    return temperatures, errors


def calibrate(net: DraftNet, rollouts: Rollouts, taps: tuple[int, ...]) -> list[float]:
    """Fit over every generated position before a loop or the end of the message."""
    matches, logits = matches_of(net, rollouts, taps)
    assert logits is not None
    places = torch.arange(NUM_TOKENS, device=matches.device)
    counted = rollouts.lengths[:, None] + places < rollouts.ends[:, None] - 1
    temperatures, errors = fit(logits[counted].float().cpu(), matches[counted].cpu())
    shown = " ".join(f"{before:.3f}->{after:.3f}" for before, after in errors)
    log.info("calibration error by prefix: %s", shown)
    log.info("temperatures: %s", temperatures)
    return temperatures


def load_net(path: Path, target: RecurrentTarget) -> DraftNet:
    """A published draft as a net on the target's device."""
    weights = target.weights
    net = DraftNet(load_draft_config(path), weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    net.load_state_dict({name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()})
    return net.to(target.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=Path("models/k3-nano"))
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=256, help="held-out prompts a class")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    start_log()
    taps = load_draft_config(given.draft).target_layers
    target = RecurrentTarget(given.target, given.device, taps)
    prompts = draw_prompts(given.corpus, "val", dict.fromkeys(CLASSES, given.prompts), given.length, 17, None)
    temperature = (torch.arange(len(prompts)) % 2).float()
    rollouts = roll_all(target, prompts, temperature, given.length, len(prompts), keyed=True)
    temperatures = calibrate(load_net(given.draft, target), rollouts, taps)
    (given.draft / "sts.json").write_text(json.dumps({"temperatures": temperatures}) + "\n")


if __name__ == "__main__":
    main()
