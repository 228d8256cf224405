"""KDA kernels of the cuda backend: correctness first, then times beside the byte floor and fla-core."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.accelerator_timing import L2_BYTES, Ceilings, copy_seconds, error, graph_seconds
from k3svc.ops.cuda import kda_extend, kda_step, steps
from k3svc.ops.cuda.cache import KdaPool
from k3svc.ops.cuda.steps import Step
from k3svc.ops.cuda.tuning import HOPPER, Tuning
from k3svc.ops.table import KdaGate, Mode, StepMeta

K = V = 128
LOWER_BOUND = -5.0
PROMPT_TOKENS = 8192
PEER_CASES = ((96, LOWER_BOUND), (32, LOWER_BOUND), (32, None))
"""Heads and gate of the prompts that fla-core computes too."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One layer's rows. qkv, f and b are bfloat16, as a model's are."""

    qkv: Tensor
    f: Tensor
    b: Tensor
    gate: KdaGate
    pool: KdaPool


def inputs(rows: int, heads: int, slots: int, bound: float | None, state_dtype: torch.dtype = torch.float32) -> Inputs:
    channels = heads * K

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    return Inputs(
        qkv=normal(rows, 3 * channels).bfloat16(),
        f=normal(rows, channels).bfloat16(),
        b=normal(rows, heads).bfloat16(),
        gate=KdaGate(a=normal(heads).exp(), dt_bias=normal(heads, K), lower_bound=bound),
        pool=KdaPool(
            state=normal(slots + 1, heads, V, K).to(state_dtype),
            conv=torch.zeros(1, device="cuda"),
        ),
    )


def step_of(
    lengths: Sequence[int], slots: Sequence[int], mode: Mode, *, starts: int = 64, segment: int | None = None
) -> Step:
    """A step of sequences that have `starts` tokens behind them."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    pages = max(lengths) // 64 + 2

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device="cuda")

    meta = StepMeta(
        slots=tensor(slots),
        starts=tensor([starts] * len(lengths)),
        cu_seqlens=tensor(bounds),
        slot_mapping=torch.zeros(bounds[-1], dtype=torch.int64, device="cuda"),
        block_tables=torch.zeros(len(lengths), pages, dtype=torch.int64, device="cuda"),
        host_slots=tuple(slots),
        host_starts=(starts,) * len(lengths),
        host_cu_seqlens=tuple(bounds),
        page_size=64,
    )
    return steps.prepare(meta, mode, segment)


def exact(given: Inputs, row_lists: Sequence[Sequence[int]], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
    """model.md 2.3 in float64, token after token: outputs [N, HV, V] and new states [B, HV, V, K]."""
    heads = given.gate.a.shape[0]
    q, k, v = (part.double().view(-1, heads, K) for part in torch.split(given.qkv, heads * K, dim=1))
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * K**-0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    x = given.f.double().view(-1, heads, K) + given.gate.dt_bias.double()
    a = given.gate.a.double()[:, None]
    bound = given.gate.lower_bound
    g = -a * torch.nn.functional.softplus(x) if bound is None else bound * torch.sigmoid(a * x)
    decay, beta = g.exp(), torch.sigmoid(given.b.double())
    out = torch.zeros(v.shape, dtype=torch.float64, device="cuda")
    states = given.pool.state[list(slots)].double()
    # All sequences of one length advance together.
    rows = torch.tensor(row_lists, device="cuda")
    for t in range(rows.shape[1]):
        own = rows[:, t]
        states = states * decay[own][:, :, None, :]
        read = torch.einsum("bhvk,bhk->bhv", states, k[own])
        r = beta[own][..., None] * (v[own] - read)
        states = states + r[..., None] * k[own][:, :, None, :]
        out[own] = torch.einsum("bhvk,bhk->bhv", states, q[own])
    return out, states


def check(tuning: Tuning = HOPPER) -> dict[str, float]:
    """Errors of every KDA path against float64, over outputs and states that held NaN; raises when one is too large."""
    errors: dict[str, float] = {}
    for bound in (None, LOWER_BOUND):
        for state_dtype in (torch.float32, torch.bfloat16):
            name = f"{'softplus' if bound is None else 'safe'} {str(state_dtype)[6:]}"
            given = inputs(3, 4, 6, bound, state_dtype)
            expected, states = exact(given, [[0], [1], [2]], [5, 2, 3])
            out = kda_step.decode(
                given.qkv, given.f, given.b, given.gate, given.pool, step_of([1] * 3, [5, 2, 3], "decode"), tuning
            )
            errors[f"decode {name}"] = max(error(out, expected), error(given.pool.state[[5, 2, 3]], states))
        for segment in (None, 8):
            given = inputs(600, 4, 3, bound)
            expected, states = exact(given, [list(range(300)), list(range(300, 600))], [3, 1])
            step = step_of([300, 300], [3, 1], "extend", segment=segment)
            out = kda_extend.extend(given.qkv, given.f, given.b, given.gate, given.pool, step, tuning)
            name = f"extend {'softplus' if bound is None else 'safe'}{'' if segment is None else ' cut'}"
            errors[name] = max(error(out, expected), error(given.pool.state[[3, 1]], states))
        given = inputs(200, 4, 3, bound)
        expected, states = exact(given, [list(range(200))], [2])
        out = kda_step.extend(
            given.qkv, given.f, given.b, given.gate, given.pool, step_of([200], [2], "extend"), tuning
        )
        errors[f"rows {'softplus' if bound is None else 'safe'}"] = max(
            error(out, expected), error(given.pool.state[[2]], states)
        )
    for name, value in errors.items():
        allowed = 1e-2 if "extend" in name or "bfloat16" in name else 1e-5
        assert value < allowed, f"{name}: error {value}"
    return errors


def decode_case(
    heads: int,
    batch: int,
    ceilings: Ceilings,
    *,
    state_dtype: torch.dtype = torch.float32,
    tuning: Tuning = HOPPER,
    with_fla: bool = True,
) -> dict[str, Any]:
    """One decode step of a layer in the fast mode, states cold: the slots of several steps are rotated over."""
    item = 4 if state_dtype == torch.float32 else 2
    state_bytes = batch * heads * K * V * item
    sets = max(2, min(64, -(-L2_BYTES // state_bytes)))
    given = inputs(batch, heads, sets * batch, LOWER_BOUND, state_dtype)
    order = torch.randperm(sets * batch).add(1).tolist()
    all_steps = [step_of([1] * batch, order[i * batch : (i + 1) * batch], "decode") for i in range(sets)]
    own_s = graph_seconds(
        [
            partial(kda_step.decode, given.qkv, given.f, given.b, given.gate, given.pool, step, tuning, is_fast=True)
            for step in all_steps
        ]
    )
    row_bytes = batch * heads * ((3 * K + K) * 2 + V * 4)
    floor_s = (2 * state_bytes + row_bytes) / ceilings.copy_bytes_per_s
    result = {
        "heads": heads, "batch": batch, "state": str(state_dtype)[6:], "us": own_s * 1e6, "floor_us": floor_s * 1e6,
        "ratio": own_s / floor_s, "copy_us": copy_seconds(2 * state_bytes) * 1e6, "state_mb": state_bytes / 1e6,
    }  # fmt: skip
    if with_fla and state_dtype == torch.float32:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        q, k, v = (part.reshape(1, batch, heads, K).contiguous() for part in torch.split(given.qkv, heads * K, dim=1))
        g, beta = given.f.view(1, batch, heads, K), given.b.view(1, batch, heads)
        cu = torch.arange(batch + 1, device="cuda")
        a_log, bias = given.gate.a.log(), given.gate.dt_bias.reshape(-1).contiguous()

        def peer(step: Step) -> Any:
            return fused_recurrent_kda_fwd(
                q, k, v, g, beta, A_log=a_log, dt_bias=bias, initial_state=given.pool.state, output_final_state=True,
                inplace_final_state=True, state_v_first=True, cu_seqlens=cu, ssm_state_indices=step.slots,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                lower_bound=LOWER_BOUND,
            )  # fmt: skip

        before = given.pool.state.clone()
        out, _ = peer(all_steps[0])
        peer_state = given.pool.state.clone()
        given.pool.state.copy_(before)
        mine = kda_step.decode(given.qkv, given.f, given.b, given.gate, given.pool, all_steps[0], tuning)
        result["fla_error"] = max(error(out[0], mine), error(peer_state, given.pool.state))
        fla_s = graph_seconds([lambda step=step: peer(step) for step in all_steps])  # type: ignore[misc]
        result |= {"fla_us": fla_s * 1e6, "fla_ratio": fla_s / floor_s}
    return result


def fla_extend(given: Inputs, heads: int, tokens: int) -> Callable[[], Any]:
    """fla-core's chunk_kda of the same inputs, one sequence, float32 state in and out."""
    from fla.ops.kda import chunk_kda

    q, k, v = (part.reshape(1, tokens, heads, K).contiguous() for part in torch.split(given.qkv, heads * K, dim=1))
    g, beta = given.f.view(1, tokens, heads, K), given.b.view(1, tokens, heads)
    bound = given.gate.lower_bound
    options: dict[str, Any] = {} if bound is None else {"safe_gate": True, "lower_bound": bound}
    a_log, bias = given.gate.a.log(), given.gate.dt_bias.reshape(-1).contiguous()
    initial = given.pool.state[1:2].clone()

    def run() -> Any:
        with torch.inference_mode():
            return chunk_kda(
                q, k, v, g, beta, A_log=a_log, dt_bias=bias, initial_state=initial, output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                state_v_first=True, **options,
            )  # fmt: skip

    return run


def compile_peer(case: int) -> None:
    """Lets fla-core compile what it tries for one of PEER_CASES, so that another process finds it compiled."""
    heads, bound = PEER_CASES[case]
    fla_extend(inputs(PROMPT_TOKENS, heads, 1, bound), heads, PROMPT_TOKENS)()
    torch.cuda.synchronize()


def extend_case(
    heads: int,
    lengths: Sequence[int],
    bound: float | None,
    ceilings: Ceilings,
    *,
    segment: int | None = None,
    tuning: Tuning = HOPPER,
    with_fla: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """One layer's prompts; the two kernels also by themselves."""
    tokens = sum(lengths)
    given = inputs(tokens, heads, len(lengths), bound)
    step = step_of(lengths, list(range(1, len(lengths) + 1)), "extend", segment=segment)
    assert step.prompts is not None
    prompts = step.prompts
    start = given.pool.state.clone()

    def run() -> Tensor:
        return kda_extend.extend(given.qkv, given.f, given.b, given.gate, given.pool, step, tuning, dtype=dtype)

    result: dict[str, Any] = {"heads": heads, "tokens": tokens, "sequences": len(lengths), "segment": segment,
                              "gate": "softplus" if bound is None else "safe"}  # fmt: skip
    if with_fla and len(lengths) == 1:
        peer = fla_extend(given, heads, tokens)
        out, final = peer()
        mine = run()
        result["fla_error"] = max(error(mine, out[0]), error(given.pool.state[1:2], final))
        result["fla_us"] = graph_seconds([peer]) * 1e6
    given.pool.state.copy_(start)
    result["us"] = graph_seconds([run]) * 1e6
    chunks = kda_extend.intra(given.qkv, given.f, given.b, given.gate, given.pool, prompts, tuning)
    result["intra_us"] = (
        graph_seconds([lambda: kda_extend.intra(given.qkv, given.f, given.b, given.gate, given.pool, prompts, tuning)])
        * 1e6
    )
    out = torch.empty(tokens, heads, V, dtype=dtype, device="cuda")
    result["scan_us"] = graph_seconds([lambda: kda_extend.scan(given.qkv, chunks, given.pool, step, tuning, out)]) * 1e6
    # q, k, v, gate logits and outputs once, states in and out.
    floor = tokens * heads * (4 * K * 2 + V * out.element_size()) + 2 * len(lengths) * heads * K * V * 4
    result["floor_us"] = floor / ceilings.copy_bytes_per_s * 1e6
    if "fla_us" in result:
        result["speedup"] = result["fla_us"] / result["us"]
    return result


def verify_case(heads: int, batch: int, drafts: int) -> dict[str, Any]:
    """A verify step of `drafts` drafts a sequence and its commit of half of them, beside plain decode of the anchors;
    the state after commit has the bits of as many decode steps.
    """
    rows, accepted = drafts + 1, drafts // 2
    given = inputs(batch * rows, heads, batch, LOWER_BOUND)
    slots = list(range(1, batch + 1))
    step = step_of([rows] * batch, slots, "verify")
    counts = torch.full((batch,), accepted, dtype=torch.int64, device="cuda")
    gate, pool = given.gate, given.pool
    start = pool.state.clone()
    out = kda_step.verify(given.qkv, given.f, given.b, gate, pool, step, HOPPER)
    kda_step.commit(given.qkv, given.f, given.b, gate, pool, step, HOPPER, counts)
    committed = pool.state.clone()
    pool.state.copy_(start)
    anchors = torch.arange(0, batch * rows, rows, device="cuda")
    plain = step_of([1] * batch, slots, "decode")

    def decode_rows(index: int) -> Tensor:
        own = anchors + index
        return kda_step.decode(given.qkv[own], given.f[own], given.b[own], gate, pool, plain, HOPPER)

    for index in range(accepted + 1):
        assert torch.equal(decode_rows(index), out[anchors + index]), index
    assert torch.equal(pool.state, committed)
    qkv, f, b = given.qkv[anchors], given.f[anchors], given.b[anchors]
    decode_s = graph_seconds([lambda: kda_step.decode(qkv, f, b, gate, pool, plain, HOPPER)])
    verify_s = graph_seconds([lambda: kda_step.verify(given.qkv, given.f, given.b, gate, pool, step, HOPPER)])
    commit_s = graph_seconds([lambda: kda_step.commit(given.qkv, given.f, given.b, gate, pool, step, HOPPER, counts)])
    return {"heads": heads, "batch": batch, "drafts": drafts, "accepted": accepted, "bitwise": True,
            "decode_us": decode_s * 1e6, "verify_us": verify_s * 1e6, "commit_us": commit_s * 1e6}  # fmt: skip


if __name__ == "__main__":
    compile_peer(int(sys.argv[1]))
