#!/usr/bin/env python3
"""Ten minutes on a machine with an NPU: scripts/npu_acceptance.py [--device npu] [--seconds-per-op 1]

Each operation of the table on the device in bfloat16 against the reference backend in float32 on the CPU, at sizes of
Kimi-K3; then a whole model (make_npu_tiny.py), prompt, decode and verify, against the reference; with times of both;
then the greedy tokens of a batch, against golden ones of the reference. Once with either form of extend, once with the
fused norm and the prefix store of MLA; the model and the tokens once more with captured steps. On the emulated device
with fp32 and shape-relaxed the tokens are those of k3-nano, in float32, against its golden file. Prints tables and
exits with 1 when anything is out of bounds.
docs/ascend.md says how to read it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import make_npu_tiny  # noqa: E402 - needs the path above

from k3svc import ops  # noqa: E402 - needs the path above
from k3svc.errors import BackendError  # noqa: E402 - needs the path above
from k3svc.model.kimi import Model, cache_spec  # noqa: E402 - needs the path above
from k3svc.ops.draft_table import BlockMeta  # noqa: E402 - needs the path above
from k3svc.ops.table import (  # noqa: E402 - needs the path above
    Cache,
    CacheSpec,
    KdaGate,
    Mode,
    Ops,
    QuantizedMatrix,
    StepMeta,
)
from tests.oracles.loop import Tracked, step_meta  # noqa: E402 - needs the path above

BF16 = torch.bfloat16
PAGE = 128
MAX_ERROR, MAX_OUTLIER = 0.01, 0.1
"""Of an operation: root mean square and largest difference, over the root mean square of the reference."""
WIDER = {"linear_int8": 3.0, "experts_int8": 3.0, "commit": 3.0}
"""Factors of the bounds: rows are quantised on the device alone, and the largest elements of states stick out."""
MAX_DIVERGENCE = 5e-3
MIN_AGREEMENT = 0.99
CLEAR = 0.5
"""A first choice is clear where its logit leads by more than this."""
RELAXATIONS = ("fp32", "shape-relaxed")
NUM_TOKENS = 16
PROMPT_LENGTHS = (1, 64, 66, 130)
SPEC = CacheSpec(
    kda_layers=(0,),
    mla_layers=(1,),
    kda_heads=8,
    kda_key_dim=128,
    kda_value_dim=128,
    conv_width=4,
    kv_lora_rank=512,
    rope_dim=64,
    vocab_size=4096,
    num_slots=6,
    num_pages=16,
    page_size=PAGE,
    state_dtype=torch.float32,
    kv_dtype=BF16,
)
HEADS = 12
LAST = 6


@dataclass(frozen=True, kw_only=True)
class Side:
    """A backend, its pools, and the dtype that activations have there."""

    backend: Ops
    cache: Cache

    def to(self, x: Any) -> Any:
        """Tensors on the device of this side; bfloat16 becomes its dtype."""
        if isinstance(x, Tensor):
            return x.to(self.backend.device, self.backend.activation_dtype if x.dtype == BF16 else x.dtype)
        if isinstance(x, KdaGate | StepMeta):
            tensors = {
                name: value.to(self.backend.device) for name, value in vars(x).items() if isinstance(value, Tensor)
            }
            return replace(x, **tensors)
        return [self.to(item) for item in x] if isinstance(x, list) else x


def main() -> int:
    """Runs all parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="npu")
    parser.add_argument("--seconds-per-op", type=float, default=1.0)
    arguments = parser.parse_args()
    failures = 0
    name, _, given = arguments.device.partition(":")
    own = [word for word in given.split(",") if word]
    for option in ("kda-extend=fused", "kda-extend=decomposed", "mla-split-norm=fused,mla-store=prefix", "graphs=on"):
        device = f"{name}:{','.join([*own, option])}"
        print(f"\n{device}")
        try:
            if option != "graphs=on":
                failures += check_operations(device, arguments.seconds_per_op)
            failures += check_model(device)
            failures += check_tokens(device, is_relaxed=set(RELAXATIONS) <= set(own))
        except BackendError as error:
            print(error)
            failures += 1
    print("accepted" if not failures else f"{failures} checks failed")
    return int(failures > 0)


def check_operations(device: str, seconds: float) -> int:
    """One line an operation: error, time of a call."""
    own = Side(backend=(npu := ops.load(device, dtype="bfloat16", threads=1)), cache=npu.new_cache(SPEC))
    oracle_backend = ops.load("reference", dtype="float32", threads=1)
    oracle = Side(backend=oracle_backend, cache=oracle_backend.new_cache(replace(SPEC, kv_dtype=torch.float32)))
    print(f"{'operation':<18}{'error':>10}{'largest':>10}{'ms':>10}")
    failures = 0
    for name, call in operations():
        with torch.inference_mode():
            results = [call(side).float().cpu() for side in (own, oracle)]
            difference = results[0] - results[1]
            size = results[1].square().mean().sqrt()
            error, outlier = float(difference.square().mean().sqrt() / size), float(difference.abs().max() / size)
            started, calls = time.perf_counter(), 0
            while calls == 0 or time.perf_counter() - started < seconds:
                call(own).cpu()
                calls += 1
        factor = WIDER.get(name, 1.0)
        is_wrong = not (error <= MAX_ERROR * factor and outlier <= MAX_OUTLIER * factor)
        failures += is_wrong
        duration = (time.perf_counter() - started) / calls * 1000
        print(f"{name:<18}{error:>10.4f}{outlier:>10.4f}{duration:>10.2f}{'  OUT OF BOUNDS' * is_wrong}", flush=True)
    before = bytes(own.cache.state_bytes(0, LAST)[:])
    for name, call in operations():
        if name in ("kda_extend", "kda_decode", "kda_verify", "commit"):
            call(own)
    is_touched = bytes(own.cache.state_bytes(0, LAST)[:]) != before
    print(f"the last slot beside padding: {'CHANGED' if is_touched else 'bit-identical'}")
    return failures + is_touched


def operations() -> Iterator[tuple[str, Callable[[Side], Tensor]]]:
    """Name and call of each operation, on inputs that both sides share. Padding stands beside slots 1 and 2."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * gain).to(BF16)

    rows = [(1, 0, 130), (-1, 0, 3), (2, 0, 7)]
    prompt = _meta([(slot, start, count) for slot, start, count in rows], 144)
    decode = _meta([(1, 130, 1), (2, 7, 1), (-1, 0, 1)], 3)
    verify = _meta([(1, 131, 8), (2, 8, 3), (-1, 0, 2)], 16)
    live = {144: [*range(130), *range(133, 140)], 3: [0, 1], 16: [*range(11)]}
    x, bank, weight = draw(64, 7168), [draw(64, 7168) for _ in range(3)], draw(7168)
    yield "linear", lambda side: side.backend.linear(side.to(x), side.backend.pack_linear(side.to(draw_once)))
    yield "linear_int8", lambda side: side.backend.linear(side.to(x), _quantized_linear(side))
    yield "rms_norm", lambda side: side.backend.rms_norm(side.to(x), side.to(weight), 1e-5)
    yield (
        "mix_residual",
        lambda side: side.backend.mix_residual(side.to(x), side.to(bank), side.to(weight.float()), 1e-5),
    )
    yield "glu", lambda side: side.backend.glu(side.to(x), "situ", 4.0, 25.0)
    yield "sigmoid_gate", lambda side: side.backend.sigmoid_gate(side.to(x), side.to(bank[0]))
    experts = [(draw(256, 512, gain=0.05), draw(256, 512, gain=0.05), draw(512, 256, gain=0.05)) for _ in range(16)]
    ids = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(64)])
    shares, narrow = torch.rand(64, 4, generator=generator), draw(64, 512)
    yield (
        "experts",
        lambda side: side.backend.experts(
            side.to(narrow), side.to(ids), side.to(shares), _packed(side, experts), "situ", 4.0, 25.0
        ),
    )
    yield (
        "experts_int8",
        lambda side: side.backend.experts(
            side.to(narrow), side.to(ids), side.to(shares), _quantized(side, experts), "situ", 4.0, 25.0
        ),
    )
    yield "draft_blocks", _draft_blocks(generator)
    latents = [draw(64, 576), draw(64, 1536), draw(512), draw(1536)]
    yield "split_norm", lambda side: _split_norm(side, *side.to(latents))
    gate = KdaGate(a=torch.rand(8, generator=generator) * 4 + 0.5, dt_bias=draw(8, 128).float(), lower_bound=-5.0)
    taps = draw(SPEC.conv_channels, 4).float()
    modes: list[tuple[str, Mode, StepMeta]] = [
        ("extend", "extend", prompt),
        ("decode", "decode", decode),
        ("verify", "verify", verify),
    ]
    for suffix, mode, meta in modes:
        count = meta.slot_mapping.shape[0]
        u, f, b = draw(count, SPEC.conv_channels), draw(count, 1024), draw(count, 8)
        cached, q = draw(count, 576), draw(count, HEADS, 192)
        w_kc, w_vc = draw(HEADS, 128, 512, gain=0.05), draw(HEADS, 128, 512, gain=0.05)
        picked = torch.tensor(live[count])

        def conv(
            side: Side, mode: Mode = mode, meta: StepMeta = meta, u: Tensor = u, picked: Tensor = picked
        ) -> Tensor:
            step = side.backend.prepare(side.to(meta), mode, SPEC)
            run = getattr(side.backend, f"kda_conv_{mode}")
            return run(side.to(u), side.to(taps), side.cache.layer(0), step).cpu()[picked]

        def kda(
            side: Side,
            mode: Mode = mode,
            meta: StepMeta = meta,
            inputs: tuple[Tensor, Tensor, Tensor] = (u, f, b),
            picked: Tensor = picked,
        ) -> Tensor:
            side.cache.clear_slot(1)
            side.cache.clear_slot(2)
            step = side.backend.prepare(side.to(meta), mode, SPEC)
            run = getattr(side.backend, f"kda_{mode}")
            return run(*side.to(list(inputs)), side.to(gate), side.cache.layer(0), step).cpu()[picked]

        def commit(side: Side, meta: StepMeta = meta, inputs: tuple[Tensor, Tensor, Tensor] = (u, f, b)) -> Tensor:
            """The states of slots 1 and 2 after 5 drafts and none."""
            side.cache.clear_slot(1)
            side.cache.clear_slot(2)
            step = side.backend.prepare(side.to(meta), "verify", SPEC)
            qkv = side.backend.kda_conv_verify(side.to(inputs[0]), side.to(taps), side.cache.layer(0), step)
            side.backend.kda_verify(qkv, *side.to(list(inputs[1:])), side.to(gate), side.cache.layer(0), step)
            side.backend.commit(side.cache, step, [5, 0, 0])
            states = [bytearray(side.cache.state_bytes(0, slot)[:]) for slot in (1, 2)]
            return torch.cat([torch.frombuffer(state, dtype=torch.float32) for state in states])

        def attention(
            side: Side, mode: Mode = mode, meta: StepMeta = meta, cached: Tensor = cached, q: Tensor = q,
            weights: tuple[Tensor, Tensor] = (w_kc, w_vc), picked: Tensor = picked,
        ) -> Tensor:  # fmt: skip
            step = side.backend.prepare(side.to(meta), mode, SPEC)
            side.backend.mla_write(side.to(cached), side.cache.layer(1), step)
            run = getattr(side.backend, f"mla_{mode}")
            return run(side.to(q), *side.to(list(weights)), side.cache.layer(1), step, 192**-0.5).cpu()[picked]

        yield f"kda_conv_{suffix}", conv
        yield f"kda_{suffix}", kda
        yield f"mla_{suffix}", attention
        if mode == "verify":
            yield "commit", commit


draw_once = (torch.randn(256, 7168, generator=torch.Generator().manual_seed(5)) * 7168**-0.5).to(BF16)


def _packed(side: Side, experts: list[tuple[Tensor, Tensor, Tensor]]) -> Any:
    return side.backend.pack_experts((side.to(w1), side.to(w3), side.to(w2)) for w1, w3, w2 in experts)


def _quantized(side: Side, experts: list[tuple[Tensor, Tensor, Tensor]]) -> Any:
    packed = [(_whole(w1), _whole(w3), _whole(w2)) for w1, w3, w2 in experts]
    return side.backend.pack_quantized_experts(packed, side.backend.activation_dtype)


def _whole(weight: Tensor) -> QuantizedMatrix:
    """The nearest int8 weights."""
    scale = weight.float().abs().amax(1) / 127
    return QuantizedMatrix(values=(weight.float() / scale[:, None]).round().to(torch.int8), scale=scale, bits=8)


def _quantized_linear(side: Side) -> Any:
    return side.backend.pack_quantized_linear([_whole(draw_once)], side.backend.activation_dtype)


def _split_norm(side: Side, kv: Tensor, q: Tensor, kv_weight: Tensor, q_weight: Tensor) -> Tensor:
    """Both latents of MLA normed, apart where the backend has nothing else."""
    backend = side.backend
    if backend.split_norm is not None:
        return torch.cat(backend.split_norm(kv, q, kv_weight, q_weight, 1e-6), dim=1)
    latent = backend.rms_norm(kv[:, :512].contiguous(), kv_weight, 1e-6)
    return torch.cat([latent, kv[:, 512:], backend.rms_norm(q, q_weight, 1e-6)], dim=1)


def _draft_blocks(generator: torch.Generator) -> Callable[[Side], Tensor]:
    """Norm, rotation and attention of blocks of 8 rows over rings of 128 cells, 16 heads on 4."""
    qkv = torch.randn(24, 24 * 128, generator=generator).to(BF16)
    keys, values = (torch.randn(3, 128, 4, 128, generator=generator).to(BF16) for _ in range(2))
    angle, weight = torch.randn(24, 64, generator=generator), torch.ones(128).to(BF16)
    lens, starts = torch.tensor([100, 300, 1]), torch.tensor([0, 250, 0])

    def run(side: Side) -> Tensor:
        draft = side.backend.draft
        meta = BlockMeta(
            slots=side.to(torch.arange(3)), base_lens=side.to(lens), starts=side.to(starts), host_lengths=(100, 50, 1),
            window=100, capacity=128, num_cells=128, num_rows=8,
        )  # fmt: skip
        q, k, v = draft.norm_rope(
            side.to(qkv), 16, side.to(weight), side.to(weight), 1e-6, side.to(angle.cos()), side.to(angle.sin())
        )
        q, k, v = (torch.unflatten(x, 0, (3, 8)) for x in (q, k, v))
        step = draft.prepare(meta)
        return draft.block_attention(q, k, v, side.to(keys), side.to(values), step, scale=128**-0.5, is_causal=False)

    return run


def _meta(rows: list[tuple[int, int, int]], num_rows: int) -> StepMeta:
    pages = {1: [5, 3], 2: [9, 8], -1: [0, 0]}
    return step_meta(
        [(Tracked(slot=slot, pages=pages[slot], length=start), n) for slot, start, n in rows], PAGE, num_rows
    )


def check_model(device: str) -> int:
    """A model of random weights: divergence and agreement with the reference, and the speed of both kinds of step."""
    with tempfile.TemporaryDirectory() as directory:
        make_npu_tiny.write(Path(directory), 0)
        exact, _ = _run_model(ops.load("reference", dtype="float32", threads=1), Path(directory), torch.float32)
        own, times = _run_model(ops.load(device, dtype="bfloat16", threads=1), Path(directory), BF16)
    log_exact, log_own = exact.double().log_softmax(-1), own.double().log_softmax(-1)
    divergence = float((log_exact.exp() * (log_exact - log_own)).sum(-1).mean())
    best = exact.topk(2, dim=-1)
    is_clear = best.values[:, 0] - best.values[:, 1] > CLEAR
    agreement = float((own.argmax(-1) == best.indices[:, 0])[is_clear].double().mean())
    print(f"model: divergence {divergence:.2e}, agreement {agreement:.3f} of {int(is_clear.sum())} clear rows")
    in_ms = ", ".join(f"{mode} {seconds * 1000:.2f}" for mode, seconds in times.items())
    print(f"model: ms a step: {in_ms} (prompt of 100; 1 token; 6 tokens)")
    return int(not divergence < MAX_DIVERGENCE) + int(not agreement >= MIN_AGREEMENT)


def check_tokens(device: str, *, is_relaxed: bool) -> int:
    """Greedy tokens of several prompts in one decode batch beside padding. Each step is fed the golden token, so that
    every one of them counts. In float32 all must be golden; in bfloat16 those whose lead over the second is clear.
    """
    if is_relaxed:
        prompts = json.loads((make_npu_tiny.NANO / "golden.json").read_text())["prompts"]
        golden = torch.tensor([prompt["continuation_ids"][:NUM_TOKENS] for prompt in prompts])
        backend = ops.load(device, dtype="float32", threads=1)
        own = _continuations(backend, make_npu_tiny.NANO, [prompt["ids"] for prompt in prompts], golden)
        is_clear = torch.ones_like(golden, dtype=torch.bool)
    else:
        generator = torch.Generator().manual_seed(4)
        ids = [torch.randint(0, 3800, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
        with tempfile.TemporaryDirectory() as directory:
            make_npu_tiny.write(Path(directory), 0)
            exact = _continuations(ops.load("reference", dtype="float32", threads=1), Path(directory), ids, None)
            golden = exact.argmax(-1)
            own = _continuations(ops.load(device, dtype="bfloat16", threads=1), Path(directory), ids, golden)
        best = exact.topk(2, dim=-1).values
        is_clear = best[..., 0] - best[..., 1] > CLEAR
    is_golden = own.argmax(-1) == golden
    agreement = float(is_golden[is_clear].double().mean())
    print(
        f"tokens: {int(is_golden.sum())} of {golden.numel()} golden; of those that must be "
        f"{int(is_golden[is_clear].sum())} of {int(is_clear.sum())}"
    )
    return int(not agreement >= (1.0 if is_relaxed else MIN_AGREEMENT))


def _continuations(backend: Ops, directory: Path, prompts: list[list[int]], fed: Tensor | None) -> Tensor:
    """Logits float32 [prompts, NUM_TOKENS, X] that choose the tokens after each prompt. `fed` [prompts, NUM_TOKENS] is
    what is fed of them; None: the choices.
    """
    model = Model.load(directory, backend)
    pages = 1 + (max(map(len, prompts)) + NUM_TOKENS) // PAGE
    cache = backend.new_cache(
        cache_spec(
            model.config,
            num_slots=len(prompts),
            num_pages=len(prompts) * pages,
            page_size=PAGE,
            kv_dtype=backend.activation_dtype,
        )
    )
    rows = [
        Tracked(slot=n + 1, pages=list(range(1 + n * pages, 1 + (n + 1) * pages))[::-1]) for n in range(len(prompts))
    ]

    def step(mode: Mode, fed_rows: list[tuple[Tracked, list[int]]]) -> Tensor:
        meta = Side(backend=backend, cache=cache).to(step_meta([(row, len(ids)) for row, ids in fed_rows], PAGE))
        flat = torch.tensor([token for _, ids in fed_rows for token in ids]).to(backend.device)
        with torch.inference_mode():
            hidden = model.forward(flat, meta, cache, mode)
            logits = model.logits(hidden).cpu()
        for row, ids in fed_rows:
            row.length += len(ids) * (row.slot > 0)
        return logits

    logits = torch.stack([step("extend", [(row, ids)])[-1] for row, ids in zip(rows, prompts, strict=True)])
    parts = [logits]
    padding = Tracked(slot=-1, pages=[0])
    for n in range(NUM_TOKENS - 1):
        chosen = (logits.argmax(-1) if fed is None else fed[:, n]).tolist()
        logits = step("decode", [*((row, [token]) for row, token in zip(rows, chosen, strict=True)), (padding, [0])])
        logits = logits[: len(rows)]
        parts.append(logits)
    return torch.stack(parts, dim=1)


def _run_model(backend: Ops, directory: Path, dtype: torch.dtype) -> tuple[Tensor, dict[Mode, float]]:
    model = Model.load(directory, backend)
    cache = backend.new_cache(cache_spec(model.config, num_slots=2, num_pages=2, page_size=PAGE, kv_dtype=dtype))
    ids = torch.randint(0, 3800, (130,), generator=torch.Generator().manual_seed(2))
    row = Tracked(slot=2, pages=[2])
    parts: list[Tensor] = []
    times: dict[Mode, list[float]] = {"extend": [], "decode": [], "verify": []}
    # The last draft but one of each verify step is rejected, and what it stood for is fed next.
    spans: list[tuple[Mode, int, int, int]] = [("extend", 0, 100, 100)]
    spans += [("decode", n, n + 1, 1) for n in range(100, 106)]
    spans += [("verify", n, n + 6, 4) for n in range(106, 122, 4)]
    spans += [("decode", n, n + 1, 1) for n in range(122, 125)]
    for mode, first, last, kept in spans:
        meta = Side(backend=backend, cache=cache).to(step_meta([(row, last - first)], PAGE))
        started = time.perf_counter()
        with torch.inference_mode():
            step = backend.prepare(meta, mode, cache.spec)
            hidden = model.forward(ids[first:last].to(backend.device), meta, cache, mode, step=step)
            parts.append(model.logits(hidden).cpu())
            if mode == "verify":
                backend.commit(cache, step, [kept - 1])
        times[mode].append(time.perf_counter() - started)
        row.length = first + kept
    # The first step of a kind compiles or captures.
    steady = {mode: sum(own[1:] or own) / len(own[1:] or own) for mode, own in times.items()}
    return torch.cat(parts), steady


if __name__ == "__main__":
    sys.exit(main())
