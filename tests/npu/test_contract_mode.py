"""A model of the sizes that the device takes, in contract mode: bfloat16, no relaxation."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.model.kimi import Model, cache_spec
from k3svc.ops import load
from k3svc.ops.table import Cache
from tests.npu.rounding import RoundingOps
from tests.oracles.loop import Tracked, step_meta

PAGE = 128
LENGTHS = (66, 1, 20)
STEPS = 3
FUSED_NORM = "mla-split-norm=fused,mla-store=prefix"
DRAFTS, ACCEPTED = (4, 0, 2), (2, 0, 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import make_npu_tiny  # type: ignore[import-not-found]

    directory = tmp_path_factory.mktemp("npu-tiny")
    make_npu_tiny.write(directory, 0)
    return directory


def all_logits(ops: Any, directory: Path, dtype: torch.dtype) -> Tensor:
    """Logits of every row: prompts together in one step, the first one in two; decode steps with padding; a verify step
    of drafts, some of them accepted; a decode step after it.
    """
    model = Model.load(directory, ops)
    cache: Cache = ops.new_cache(
        cache_spec(model.config, num_slots=4, num_pages=6, page_size=PAGE, state_dtype=torch.float32, kv_dtype=dtype)
    )
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 3800, (length + STEPS,), generator=generator).tolist() for length in LENGTHS]
    rows = [Tracked(slot=slot, pages=[page]) for slot, page in ((4, 3), (1, 6), (2, 1))]
    parts = []

    def run(mode: Any, chosen: list[tuple[Tracked, list[int]]], num_rows: int) -> None:
        meta = step_meta([(row, len(tokens)) for row, tokens in chosen], PAGE, num_rows)
        step = ops.prepare(meta, mode, cache.spec)
        flat = [token for _, tokens in chosen for token in tokens]
        with torch.inference_mode():
            hidden = model.forward(torch.tensor(flat + [0] * (num_rows - len(flat))), meta, cache, mode, step=step)
            parts.append(model.logits(hidden)[: meta.num_live_rows])
            if mode == "verify":
                ops.commit(cache, step, (*ACCEPTED, 0))
        for n, (row, tokens) in enumerate(chosen):
            row.length += 1 + ACCEPTED[n] if mode == "verify" and row.slot >= 0 else len(tokens)

    first = [ids[0][:64], *(own[:length] for own, length in zip(ids[1:], LENGTHS[1:], strict=True))]
    run("extend", list(zip(rows, first, strict=True)), 112)
    run("extend", [(rows[0], ids[0][64:66])], 16)
    for step in range(STEPS):
        padding = (Tracked(slot=-1, pages=[0]), [0])
        run(
            "decode", [(row, [own[len(own) - STEPS + step]]) for row, own in zip(rows, ids, strict=True)] + [padding], 4
        )
    padding = (Tracked(slot=-1, pages=[0]), [0])
    drafted = [(row, own[: 1 + count]) for row, own, count in zip(rows, ids, DRAFTS, strict=True)]
    run("verify", [*drafted, padding], 16)
    run("decode", [*((row, [7]) for row in rows), (Tracked(slot=-1, pages=[0]), [0])], 4)
    return torch.cat(parts).clone()


@pytest.fixture(scope="module")
def exact(tiny: Path) -> Tensor:
    return all_logits(load("reference", dtype="float32", threads=1), tiny, torch.float32)


def divergence(exact: Tensor, own: Tensor) -> float:
    """Mean Kullback-Leibler divergence of a row."""
    log_exact, log_own = exact.double().log_softmax(-1), own.double().log_softmax(-1)
    return float((log_exact.exp() * (log_exact - log_own)).sum(-1).mean())


@pytest.mark.parametrize("options", ["kda-extend=fused", "kda-extend=decomposed", FUSED_NORM])
def test_contract_mode_against_its_oracles(options: str, tiny: Path, exact: Tensor):
    """The decomposed kernels round inside of the recurrence, where the first oracle does not."""
    assert exact.shape == (sum(LENGTHS) + (STEPS + 2) * len(LENGTHS) + sum(DRAFTS), 4096)
    assert 1.0 < float(exact.std()) < 4.0
    own = all_logits(load(f"npu-emulated:{options}", dtype="bfloat16", threads=1), tiny, torch.bfloat16)
    if options != "kda-extend=decomposed":
        expected = all_logits(RoundingOps(fused_norm=options == FUSED_NORM), tiny, torch.bfloat16)
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
    assert divergence(exact, own) < 5e-3
    best = exact.topk(2, dim=-1)
    is_clear = best.values[:, 0] - best.values[:, 1] > 0.5
    assert int(is_clear.sum()) > 10
    agreed = (own.argmax(-1) == best.indices[:, 0])[is_clear]
    assert float(agreed.double().mean()) >= 0.99


def test_the_fused_norm_rounds_otherwise(tiny: Path, exact: Tensor, capsys: pytest.CaptureFixture[str]):
    """By how much, of the oracles, which equal the adapters."""
    apart, fused = (all_logits(RoundingOps(fused_norm=is_fused), tiny, torch.bfloat16) for is_fused in (False, True))
    difference = float((fused - apart).square().mean().sqrt())
    with capsys.disabled():
        sys.stdout.write(
            f"\nfused split and norm: logits differ by {difference:.3f} rms of {float(apart.std()):.1f}, mean "
            f"divergence {divergence(apart, fused):.1e}; from float32 {divergence(exact, fused):.1e}, "
            f"apart {divergence(exact, apart):.1e}\n"
        )
    assert difference > 1e-3
    assert divergence(apart, fused) < 5e-3
