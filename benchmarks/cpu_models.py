"""The models of `benchmarks.cpu` and the work that is measured on them: prompts and decode steps of one backend.

`nano` is models/k3-nano. `36m` has the same architecture with 36.6 million parameters; its weights are random
bfloat16 numbers of a fixed seed, written below build/ once.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from k3svc import ops
from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow
from k3svc.engine.inputs import decode_inputs, extend_inputs
from k3svc.model.config import ModelConfig
from k3svc.model.kimi import Model, cache_spec
from k3svc.model.weights import tensor_shapes

ROOT = Path(__file__).parents[1]
NANO = ROOT / "models" / "k3-nano"
FOLDER = ROOT / "build" / "bench-cpu"
SEED = 6
PAGE = 64
CHUNK = 1024
"""Prompt tokens of a step, as a prefill service takes them by default."""
CHECKED = 8
CHECKED_TOKENS = 100
TOLERANCE = 1e-4
"""Largest difference of logits from those of the reference backend, as a share of the largest logit."""

SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "routed_expert_hidden_size": 256,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
"""What the config.json of `36m` has otherwise than that of nano."""
SMALL_LINEAR: dict[str, Any] = {
    "full_attn_layers": [4, 8, 12],
    "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11],
    "head_dim": 128,
}


def directory_of(name: str) -> Path:
    """Directory of the checkpoint `nano` or `36m`, which is written when it is not there."""
    if name == "nano":
        return NANO
    path = FOLDER / name
    if not (path / "config.json").exists():
        write_checkpoint(path, small_tree())
    return path


def small_tree() -> dict[str, Any]:
    """config.json of `36m`."""
    tree: dict[str, Any] = json.loads((NANO / "config.json").read_text())
    tree["text_config"] |= SMALL
    tree["text_config"]["linear_attn_config"] |= SMALL_LINEAR
    return tree


def write_checkpoint(path: Path, tree: dict[str, Any]) -> None:
    """A checkpoint of random weights: matrices as training starts with them, norms 1, decays as KDA's are."""
    generator = torch.Generator().manual_seed(SEED)
    config = ModelConfig.from_tree(tree)

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.ones(shape)
        if name.endswith("A_log"):
            return torch.rand(shape, generator=generator) * 2.0
        if name.endswith(("dt_bias", "e_score_correction_bias")):
            return torch.randn(shape, generator=generator) * 0.1
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    tensors = {name: value(name, shape) for name, shape in all_shapes(config)}
    small = ("A_log", "dt_bias", "e_score_correction_bias")
    tensors = {name: tensor if name.endswith(small) else tensor.bfloat16() for name, tensor in tensors.items()}
    unfinished = path.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(tensors, unfinished / "model.safetensors")
    (unfinished / "config.json").write_text(json.dumps(tree, indent=1))
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)


def all_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, plain experts with them."""
    yield from tensor_shapes(config).items()
    width, inner = config.expert_width, config.moe_intermediate_size
    for layer in range(config.num_dense_layers, config.num_layers):
        for expert in range(config.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            yield from ((f"{prefix}{name}.weight", (inner, width)) for name in ("w1", "w3"))
            yield f"{prefix}w2.weight", (width, inner)


def token_ids(count: int, salt: int) -> list[int]:
    """Ids that look like nothing in particular."""
    return [(7 * index + 31 * salt + index * index) % 3800 for index in range(count)]


class Session:
    """A model on a backend, with pools that hold `batch` sequences of `context` tokens and a few more."""

    def __init__(self, backend: str, directory: Path, *, threads: int, batch: int, context: int) -> None:
        self._ops = ops.load(backend, dtype="float32", threads=threads)
        self._row_tile = 1 if backend == "cpu" else 16
        self.model = Model.load(directory, self._ops)
        self.forward: Callable[..., Tensor] = self.model.forward
        self.guard: Callable[[], AbstractContextManager[None]] = torch.inference_mode
        self._pages = context // PAGE + 1
        self.cache = self._ops.new_cache(
            cache_spec(self.model.config, num_slots=batch, num_pages=batch * self._pages, page_size=PAGE)
        )

    def prompt(self, sequences: int, tokens: int) -> Tensor:
        """Computes prompts in steps of at most CHUNK tokens; logits float32 [L, X] of those that the last step ended.

        Sequence i takes slot i + 1 and the i-th run of pages.
        """
        logits = torch.empty(0)
        for batch in self._steps(sequences, tokens):
            ids, meta, last = extend_inputs(batch, PAGE, self._ops.device, self._row_tile)
            with self.guard():
                hidden = self.forward(ids, meta, self.cache, "extend")
                if last.shape[0]:
                    logits = self.model.logits(hidden.index_select(0, last))
        return logits

    def _steps(self, sequences: int, tokens: int) -> Iterator[ExtendBatch]:
        room = max(CHUNK // tokens, 1)
        for first in range(0, sequences, room):
            for start in range(0, tokens, CHUNK):
                end = min(start + CHUNK, tokens)
                yield ExtendBatch(
                    rows=[
                        ExtendRow(
                            key=str(index),
                            slot=index + 1,
                            block_table=self._table(index),
                            token_ids=token_ids(tokens, index)[start:end],
                            start=start,
                            is_last=end == tokens,
                        )
                        for index in range(first, min(first + room, sequences))
                    ]
                )

    def fill(self, batch: int, context: int) -> None:
        """Gives `batch` sequences the states and rows of a prompt of `context` tokens."""
        self.prompt(1, context)
        for index in range(1, batch):
            self.cache.copy_slot(1, index + 1)
            for source, target in zip(self._table(0), self._table(index), strict=True):
                self.cache.copy_page(source, target)

    def decode(self, batch: int, position: int) -> Tensor:
        """One decode step of the first `batch` sequences at this position; logits float32 [batch, X]."""
        rows = [
            DecodeRow(
                key=str(index),
                slot=index + 1,
                block_table=self._table(index),
                token_id=(11 * position + 37 * index) % 3800,
                position=position,
                sample=None,
            )
            for index in range(batch)
        ]
        ids, meta, _ = decode_inputs(DecodeBatch(rows=rows), PAGE, self._ops.device, self._row_tile)
        with self.guard():
            return self.model.logits(self.forward(ids, meta, self.cache, "decode"))[:batch]

    def _table(self, index: int) -> list[int]:
        return list(range(1 + index * self._pages, 1 + (index + 1) * self._pages))


def check_logits(cpu: Session, reference: Session) -> float:
    """Largest difference of the cpu backend's logits from the reference's, as a share of the largest logit: after
    CHECKED prompts, and in the decode steps behind them, that of the worst prompt aside. Raises SystemExit when it is
    over TOLERANCE.

    Where two experts score alike within rounding, backends may choose differently, and all that follows differs.
    """
    worst = torch.zeros(CHECKED)
    cases: list[Callable[[Session], Tensor]] = [partial(Session.prompt, sequences=CHECKED, tokens=CHECKED_TOKENS)]
    cases += [partial(Session.decode, batch=CHECKED, position=CHECKED_TOKENS + step) for step in range(2)]
    for case in cases:
        own, right = case(cpu), case(reference)
        worst = torch.maximum(worst, (own - right).abs().amax(1) / right.abs().max())
    second = float(worst.sort().values[-2])
    if not second <= TOLERANCE:
        raise SystemExit(f"logits of the cpu backend differ by {second:.2e} of the largest from the reference's")
    return second
