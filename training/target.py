"""Train k3-nano and write it in the public layout.

    python -m training.target --corpus DIR --out DIR [--tokens 105e6] [--seconds S]

Windows of 1024 tokens from a zero state, drawn 77 : 19 : 4 from files, chat and recall; AdamW, cosine, balanced
routers. The whole step is one CUDA graph. OUT gets weights and configuration; tiktoken.model comes from
`training.corpus`, tokenizer_config.json and prompts.json from the checkpoint that ships.
"""

import argparse
import json
import logging
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training import target_export
from training.report import start_log
from training.target_net import TargetNet

log = logging.getLogger(__name__)

STREAMS = (("files", 0.77), ("chat", 0.19), ("recall", 0.04))
WARM_STEPS = 200


def window_starts(corpus: Path, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """All streams' ids in a row, and offsets of windows: files anywhere, 1 in 16 at a start; others at a start."""
    draw = np.random.default_rng(0)
    streams = [np.load(corpus / f"{name}_train.npz") for name, _ in STREAMS]
    which = draw.choice(len(STREAMS), count, p=[share for _, share in STREAMS])
    offsets, base = np.zeros(count, np.int64), 0
    for number, stream in enumerate(streams):
        mine = which == number
        size = len(stream["ids"])
        at = draw.integers(0, size - length - 2, int(mine.sum()))
        document = stream["starts"][np.searchsorted(stream["starts"], at, side="right") - 1].astype(np.int64)
        from_start = (draw.random(len(at)) < 1 / 16) | (number > 0)
        offsets[mine] = np.where(from_start, np.minimum(document, size - length - 2), at) + base
        base += size
    return np.concatenate([stream["ids"] for stream in streams]).astype(np.int32), offsets


@torch.no_grad()
def evaluate(model: TargetNet, corpus: Path, name: str, length: int, device: str) -> tuple[float, float]:
    """Nats a token and bits a byte over the held-out windows of a stream."""
    stream = np.load(corpus / f"{name}_val.npz")
    ids = torch.from_numpy(stream["ids"].astype(np.int64)).to(device)
    count = (len(ids) - 1) // length
    given, labels = ids[: count * length].view(count, length), ids[1 : count * length + 1].view(count, length)
    total = sum(
        model.losses(given[at : at + 8], labels[at : at + 8])[0].double().sum().item() for at in range(0, count, 8)
    )
    nats = total / (count * length)
    return nats, nats / math.log(2) * len(ids) / int(stream["raw_bytes"])


class Trainer:
    """The model, its optimizer, and one step that a GPU replays as a graph."""

    def __init__(self, model: TargetNet, ids: Tensor, batch: int, length: int, weight_decay: float) -> None:
        self.model, self.ids = model, ids
        device = ids.device
        self.starts = torch.zeros(batch, dtype=torch.int64, device=device)
        self.span = torch.arange(length + 1, device=device)
        self.rate, self.balance_rate = torch.zeros((), device=device), torch.full((), 1e-3, device=device)
        self.loss = torch.zeros((), device=device)
        named = list(model.named_parameters())
        decayed = [p for name, p in named if p.dim() == 2 and "conv" not in name and name not in ("embed", "head")]
        others = [p for _, p in named if not any(p is matrix for matrix in decayed)]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=self.rate,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def advance(self) -> None:
        """One step on the windows at `starts`."""
        window = self.ids[self.starts[:, None] + self.span].long()
        losses, loads = self.model.losses(window[:, :-1], window[:, 1:])
        loss = losses.mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.balance(loads, self.balance_rate)
        self.loss.copy_(loss.detach())

    def capture(self) -> None:
        """Compile, then record the step; both at rate 0."""
        self.model.compile_parts()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.advance()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.advance()

    def run(self, plan: Tensor, peak: float, seconds: float) -> int:
        """Train over the plan of windows [steps, batch], fewer steps where the time would not do; the steps taken."""
        began, total = time.monotonic(), len(plan)
        for step in range(len(plan)):
            if step == 60:
                float(self.loss)
                total = int(min(total, seconds / (time.monotonic() - began) * step))
            if step >= total:
                return step
            warm = min(1.0, (step + 1) / WARM_STEPS)
            self.rate.fill_(peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / total))))
            self.balance_rate.fill_(1e-3 if step < 0.8 * total else 1e-4)
            self.starts.copy_(plan[step])
            if self.graph is None:
                self.advance()
            else:
                self.graph.replay()
            if (step + 1) % 250 == 0 or step + 1 == total:
                loss = float(self.loss)
                log.info("step %d/%d loss %.4f %.0f s", step + 1, total, loss, time.monotonic() - began)
                if not math.isfinite(loss):
                    raise RuntimeError(f"loss is not finite at step {step + 1}")
        return len(plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=105e6)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=2.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    start_log()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    steps = int(given.tokens / (given.batch * given.length))
    ids, offsets = window_starts(given.corpus, given.length, steps * given.batch)
    model = TargetNet().to(given.device)
    log.info("%d parameters, %d steps", sum(parameter.numel() for parameter in model.parameters()), steps)
    trainer = Trainer(model, torch.from_numpy(ids).to(given.device), given.batch, given.length, given.weight_decay)
    if given.device == "cuda":
        trainer.capture()
    plan = torch.from_numpy(offsets).to(given.device).view(steps, given.batch)
    began = time.monotonic()
    taken = trainer.run(plan, given.rate, given.seconds)
    spent = time.monotonic() - began
    target_export.round_weights(model)
    target_export.write(model, given.out)
    fresh = TargetNet().to(given.device)
    fresh.load_state_dict(model.state_dict())
    held_out = {name: evaluate(fresh, given.corpus, name, given.length, given.device) for name, _ in STREAMS}
    for name, (nats, bits) in held_out.items():
        log.info("%s: %.4f nats/token, %.4f bits/byte", name, nats, bits)
    result = {"steps": taken, "tokens": taken * given.batch * given.length, "seconds": spent, "held_out": held_out}
    (given.out / "train.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
