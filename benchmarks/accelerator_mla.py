"""MLA decode of the cuda backend at 32 heads: against float64, then timed beside the bytes of the cached rows."""

from dataclasses import replace
from typing import Any

import torch

from benchmarks.accelerator_kda import step_of
from benchmarks.accelerator_timing import L2_BYTES, Ceilings, error, graph_seconds
from k3svc.ops.cuda import mla
from k3svc.ops.cuda.cache import MlaPool
from k3svc.ops.cuda.few import Few
from k3svc.ops.cuda.steps import Step
from k3svc.ops.cuda.tuning import HOPPER

HEADS, NOPE, ROPE, RANK, VALUE, PAGE = 32, 128, 64, 512, 128, 64
SCALE = (NOPE + ROPE) ** -0.5


def case(batch: int, context: int, ceilings: Ceilings) -> dict[str, Any]:
    """One layer, `context` cached rows a sequence, their pages in random order."""
    pages = context // PAGE
    cached_bytes = batch * context * (RANK + ROPE) * 2
    sets = max(2, -(-L2_BYTES // cached_bytes))
    pool = MlaPool(rows=torch.randn(1 + sets * batch * pages, PAGE, RANK + ROPE, device="cuda").bfloat16(), rank=RANK)
    q = torch.randn(batch, HEADS, NOPE + ROPE, device="cuda").bfloat16()
    w_kc, w_vc = ((torch.randn(HEADS, 128, RANK, device="cuda") / 20).bfloat16() for _ in range(2))
    order = (1 + torch.randperm(sets * batch * pages, device="cuda")).view(sets, batch, pages)
    steps = [_with_tables(step_of([1] * batch, list(range(1, batch + 1)), "decode", starts=context - 1), tables)
             for tables in order]  # fmt: skip
    few = Few(HOPPER, q.device)
    rows_kc, rows_vc = few.pack_groups(w_kc.transpose(1, 2)), few.pack_groups(w_vc)

    def attend(step: Step) -> torch.Tensor:
        """As a model's decode step in the fast mode."""
        if not few.takes(step):
            return mla.decode(q, w_kc, w_vc, pool, step, SCALE, HOPPER, is_fast=True)
        latent = few.product(q.flatten(1), rows_kc, group_step=NOPE + ROPE).view(batch, HEADS, RANK)
        mixed = few.mla_attend(latent, q, pool, step, SCALE)
        return few.product(mixed.flatten(1), rows_vc, group_step=RANK)

    mine = attend(steps[0])
    rows = pool.rows[order[0, 0]].flatten(0, 1).double()
    latent = torch.einsum("hd,hdr->hr", q[0, :, :NOPE].double(), w_kc.double())
    scores = (latent @ rows[:, :RANK].T + q[0, :, NOPE:].double() @ rows[:, RANK:].T) * SCALE
    exact = torch.einsum("hr,hvr->hv", scores.softmax(-1) @ rows[:, :RANK], w_vc.double()).flatten()
    difference = error(mine[0], exact)
    assert difference < 2e-2, difference
    seconds = graph_seconds([lambda step=step: attend(step) for step in steps])  # type: ignore[misc]
    floor_s = (cached_bytes + w_kc.nbytes + w_vc.nbytes) / ceilings.copy_bytes_per_s
    return {"batch": batch, "context": context, "error": difference, "us": seconds * 1e6, "floor_us": floor_s * 1e6,
            "ratio": seconds / floor_s}  # fmt: skip


def _with_tables(step: Step, tables: torch.Tensor) -> Step:
    return replace(step, block_tables=tables.contiguous())
