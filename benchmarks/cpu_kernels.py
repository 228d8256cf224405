"""The cpu backend against the reference backend and against what one core can do.

    python -m benchmarks.cpu_kernels [--json] [--reps N] [--model DIR]

One compute thread, in one process, rounds of all cases interleaved: decode steps at batch 1, 4, 16 and 64 behind a
prompt of 128 tokens, prompts of 512 and 2,048 tokens, both backends; verify steps of the cpu backend, STREAMSxROWS, of
which half of the drafts are committed; the KDA kernels of head sizes 64 and 128; and the measures of the machine:
sgemm, one pass over memory to read, one in place. Times are processor time of that thread, which other work on the
machine disturbs less than the clock. Medians and ratios; `share_of_bound` divides the time to read the active weights
once and the states twice, at the measured rate, by the time of the step; `over_decode` divides the time of a verify
step by that of a decode step of as many streams. The last line is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.stack import cpu_name
from k3svc import ops
from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow
from k3svc.engine.inputs import decode_inputs, extend_inputs, verify_inputs
from k3svc.model.config import ModelConfig
from k3svc.model.kimi import Model, cache_spec
from k3svc.model.weights import tensor_shapes
from k3svc.ops.table import CacheSpec, KdaGate, Ops

BATCHES = (1, 4, 16, 64)
PROMPTS = (512, 2048)
VERIFIES = ((1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (1, 64), (16, 2), (16, 4), (16, 8))
"""Streams and rows of each."""
CONTEXT = 128
PAGE = 64
HEADS = 4
KDA_TOKENS = 2048
KDA_BATCH = 16
MEMORY_FLOATS = 1 << 25

Case = Callable[[], object]


def model_cases(name: str, directory: Path) -> dict[str, Case]:
    """Decode steps and prompts of one backend. A step pads to as many rows as the backend profits from."""
    backend = ops.load(name, dtype="float32", threads=1)
    model = Model.load(directory, backend)
    longest = max(BATCHES) * (CONTEXT // PAGE + 1) + max(PROMPTS) // PAGE
    cache = backend.new_cache(
        cache_spec(model.config, num_slots=max(BATCHES) + 1, num_pages=longest + 1, page_size=PAGE)
    )
    tables = [[1 + row * 3 + page for page in range(3)] for row in range(max(BATCHES))]
    row_tile = 1 if name == "cpu" else 16

    def prompt(tokens: int, slot: int, table: list[int]) -> ExtendBatch:
        ids = [(7 * index + 31 * slot) % 3800 for index in range(tokens)]
        row = ExtendRow(key="a", slot=slot, block_table=table, token_ids=ids, start=0, is_last=True)
        return ExtendBatch(rows=[row])

    def extend(batch: ExtendBatch) -> None:
        ids, meta, _ = extend_inputs(batch, PAGE, backend.device, row_tile)
        with torch.inference_mode():
            model.forward(ids, meta, cache, "extend")

    def decode(batch: DecodeBatch) -> None:
        ids, meta, _ = decode_inputs(batch, PAGE, backend.device, row_tile)
        with torch.inference_mode():
            model.logits(model.forward(ids, meta, cache, "decode"))

    def verify(batch: DecodeBatch, accepted: list[int]) -> None:
        ids, meta, _ = verify_inputs(batch, PAGE, backend.device, row_tile)
        with torch.inference_mode():
            step = backend.prepare(meta, "verify", cache.spec)
            model.logits(model.forward(ids, meta, cache, "verify", step=step))
            backend.commit(cache, step, accepted)

    def decode_row(row: int, drafts: int = 0) -> DecodeRow:
        ids = [(11 * index + 37 * row) % 3800 for index in range(drafts + 1)]
        return DecodeRow(
            key=str(row), slot=row + 1, block_table=tables[row], token_id=ids[0], position=CONTEXT, sample=None,
            drafts=ids[1:],
        )  # fmt: skip

    for row, table in enumerate(tables):
        extend(prompt(CONTEXT, row + 1, table))
    cases: dict[str, Case] = {}
    for size in BATCHES:
        rows = [decode_row(row) for row in range(size)]
        cases[f"{name}_decode_{size}"] = partial(decode, DecodeBatch(rows=rows))
    for streams, count in VERIFIES if name == "cpu" else ():
        rows = [decode_row(row, count - 1) for row in range(streams)]
        cases[f"verify_{streams}x{count}"] = partial(verify, DecodeBatch(rows=rows), [count // 2] * streams)
    for tokens in PROMPTS:
        table = list(range(1 + 3 * len(tables), 1 + 3 * len(tables) + tokens // PAGE))
        cases[f"{name}_prefill_{tokens}"] = partial(extend, prompt(tokens, len(tables) + 1, table))
    return cases


def kda_cases(backend: Ops, width: int) -> dict[str, Case]:
    """A prompt, and decode steps whose states are cold, of one KDA layer."""
    spec = CacheSpec(
        kda_layers=tuple(range(16)), mla_layers=(), kda_heads=HEADS, kda_key_dim=width, kda_value_dim=width,
        conv_width=4, kv_lora_rank=1, rope_dim=1, vocab_size=1, num_slots=KDA_BATCH, num_pages=1, page_size=PAGE,
        state_dtype=torch.float32, kv_dtype=torch.float32,
    )  # fmt: skip
    cache = backend.new_cache(spec)
    gate = KdaGate(a=torch.ones(HEADS), dt_bias=torch.zeros(HEADS, width), lower_bound=-5.0)
    qkv, f = torch.randn(KDA_TOKENS, 3 * HEADS * width), torch.randn(KDA_TOKENS, HEADS * width)
    b = torch.randn(KDA_TOKENS, HEADS)
    row = ExtendRow(key="a", slot=1, block_table=[1] * 99, token_ids=[0] * KDA_TOKENS, start=0, is_last=True)
    _, meta, _ = extend_inputs(ExtendBatch(rows=[row]), PAGE, backend.device, 1)
    prompt = backend.prepare(meta, "extend", spec)
    rows = [
        DecodeRow(key=str(slot), slot=slot, block_table=[1], token_id=0, position=3, sample=None)
        for slot in range(1, KDA_BATCH + 1)
    ]
    _, meta, _ = decode_inputs(DecodeBatch(rows=rows, first=[]), PAGE, backend.device, 1)
    step = backend.prepare(meta, "decode", spec)

    def decode() -> None:
        for layer in spec.kda_layers:
            backend.kda_decode(qkv[:KDA_BATCH], f[:KDA_BATCH], b[:KDA_BATCH], gate, cache.layer(layer), step)

    return {
        f"kda_prefill_{width}": lambda: backend.kda_extend(qkv, f, b, gate, cache.layer(0), prompt),
        f"kda_decode_{width}": decode,
    }


def machine_cases() -> dict[str, Case]:
    """What the machine can do at best."""
    a, b, out = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.empty(1024, 1024)
    memory = torch.zeros(MEMORY_FLOATS)
    return {
        "sgemm": lambda: torch.mm(a, b, out=out),
        "read": memory.sum,
        "in_place": lambda: memory.mul_(1.5),
    }


def active_bytes(directory: Path) -> tuple[int, int]:
    """Bytes of the weights that one decoded token reads, in the cpu backend, and of its KDA and conv states."""
    config = ModelConfig.from_directory(directory)
    dense = sum(
        shape[0] * shape[1]
        for name, shape in tensor_shapes(config).items()
        if len(shape) == 2 and "embed_tokens" not in name
    )
    expert = 3 * config.moe_intermediate_size * config.expert_width
    routed = (config.num_layers - config.num_dense_layers) * config.experts_per_token * expert
    kda_layers = config.layer_kinds.count("kda")
    state = config.kda_heads * config.kda_head_dim**2 + (config.conv_width - 1) * 3 * config.kda_channels
    return 2 * (dense + routed), 4 * kda_layers * state


def measure(cases: dict[str, Case], reps: int) -> dict[str, float]:
    """Median seconds of each case over interleaved rounds, after one to warm up; in a round a case runs twice, and the
    second time, which finds its own data in the caches, counts.
    """
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(reps + 1):
        for name, case in cases.items():
            case()
            started = time.thread_time()
            case()
            if round_:
                samples[name].append(time.thread_time() - started)
    return {name: statistics.median(times) for name, times in samples.items()}


def report(seconds: dict[str, float], directory: Path) -> dict[str, float]:
    """Rates and ratios of the measured seconds."""
    gflops = 2 * 1024**3 / seconds["sgemm"] / 1e9
    read = 4 * MEMORY_FLOATS / seconds["read"] / 1e9
    in_place = 8 * MEMORY_FLOATS / seconds["in_place"] / 1e9
    out = {"sgemm_gflops": gflops, "read_gb_s": read, "in_place_gb_s": in_place}
    weights, state = active_bytes(directory)
    for size in BATCHES:
        own = seconds[f"cpu_decode_{size}"]
        out[f"decode_{size}_tokens_s"] = size / own
        out[f"decode_{size}_over_reference"] = seconds[f"reference_decode_{size}"] / own
        if size == 1:
            out["decode_1_share_of_bound"] = (weights / read + 2 * state / in_place) / 1e9 / own
    for streams, count in VERIFIES:
        own = seconds[f"verify_{streams}x{count}"]
        out[f"verify_{streams}x{count}_ms"] = own * 1e3
        out[f"verify_{streams}x{count}_over_decode"] = own / seconds[f"cpu_decode_{streams}"]
    for tokens in PROMPTS:
        own = seconds[f"cpu_prefill_{tokens}"]
        out[f"prefill_{tokens}_tokens_s"] = tokens / own
        out[f"prefill_{tokens}_over_reference"] = seconds[f"reference_prefill_{tokens}"] / own
    for width in (64, 128):
        cell = HEADS * width * width
        out[f"kda_prefill_{width}_of_sgemm"] = 7 * cell * KDA_TOKENS / seconds[f"kda_prefill_{width}"] / 1e9 / gflops
        moved = 2 * 4 * cell * KDA_BATCH * 16
        out[f"kda_decode_{width}_of_in_place"] = moved / seconds[f"kda_decode_{width}"] / 1e9 / in_place
    return out


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="The cpu backend against the reference backend and the machine.")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--reps", type=int, default=7, help="rounds")
    parser.add_argument("--model", type=Path, default=Path("models/k3-nano"), help="directory of a checkpoint")
    arguments = parser.parse_args()
    backend = ops.load("cpu", dtype="float32", threads=1)
    cases = machine_cases()
    for width in (64, 128):
        cases |= kda_cases(backend, width)
    for name in ("cpu", "reference"):
        cases |= model_cases(name, arguments.model)
    figures = report(measure(cases, arguments.reps), arguments.model)
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:32}{value:12.3f}")
    print(json.dumps({"machine": cpu_name(), **{name: round(value, 4) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
