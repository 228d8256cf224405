"""The cuda backend on one GPU: correctness first, then times beside their floors and beside fla-core in the same run.

    python -m benchmarks.accelerator [--json PATH] [--only SECTION,...] [--without-fla]

Sections: start, check, services, divergence, gap, ahead, ahead-services, ahead-model, decode, verify, mla, staging,
overlap, model, k3, extend. Inputs are random and fresh; kernels are timed by replays of CUDA graphs over rotated
memory, medians. Floors are bytes over the measured copy bandwidth, and for decode a copy of as many bytes too. What
fla-core tries for prompts is compiled beside the first sections, which takes minutes. The last line is one JSON object.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import (
    accelerator_ahead,
    accelerator_gap,
    accelerator_kda,
    accelerator_mla,
    accelerator_model,
    accelerator_overlap,
    accelerator_services,
    accelerator_staging,
)
from benchmarks.accelerator_timing import Ceilings, measure_ceilings
from k3svc import ops

BATCHES = (1, 16, 64, 256)
HEADS = (96, 32, 12)
SEGMENT = 64
BESIDE_PEERS = ("check", "services", "divergence")
"""Sections whose times are not compared with those of others."""

Rows = list[dict[str, Any]]


def decode(ceilings: Ceilings, *, with_fla: bool) -> Rows:
    rows = [
        accelerator_kda.decode_case(heads, batch, ceilings, with_fla=with_fla and batch in (16, 64))
        for heads in HEADS
        for batch in BATCHES
    ]
    half = [(96, 16), (96, 64), (96, 256), (32, 64), (32, 256), (12, 256)]
    for heads, batch in half:
        case = accelerator_kda.decode_case(heads, batch, ceilings, state_dtype=torch.bfloat16)
        full = next(row for row in rows if (row["heads"], row["batch"]) == (heads, batch))
        rows.append(case | {"share_of_float32": case["us"] / full["us"]})
    return rows


def extend(ceilings: Ceilings, *, with_fla: bool) -> Rows:
    bound, tokens = accelerator_kda.LOWER_BOUND, accelerator_kda.PROMPT_TOKENS
    rows: Rows = []
    for heads, gate in accelerator_kda.PEER_CASES:
        segment = SEGMENT if heads == 32 else None
        rows.append(accelerator_kda.extend_case(heads, [tokens], gate, ceilings, segment=segment, with_fla=with_fla))
    for heads, lengths, segment in (
        (96, [1024], None),
        (32, [1024], None),
        (32, [tokens], None),
        (32, [1000, 37, 3000, 1, 4154], None),
    ):
        rows.append(accelerator_kda.extend_case(heads, lengths, bound, ceilings, segment=segment, with_fla=False))
    rows.append(
        accelerator_kda.extend_case(96, [tokens], bound, ceilings, with_fla=False, dtype=torch.float32)
        | {"out": "float32"}
    )
    return rows


def model(ceilings: Ceilings, tree: dict[str, Any]) -> Rows:
    backend = ops.load("cuda:fast", dtype="bfloat16", threads=4)
    built, cache = accelerator_model.build(tree, backend, slots=17, pages=16 * 65 + 130)
    rows: Rows = [accelerator_model.decode_case(built, cache, backend, batch, 4096, ceilings) for batch in (1, 16)]
    return [*rows, accelerator_model.prefill_case(built, cache, backend, 8192, ceilings)]


def compiling_peers() -> list[subprocess.Popen[bytes]]:
    """Processes that compile what fla-core tries for prompts."""
    cases = range(len(accelerator_kda.PEER_CASES))
    return [subprocess.Popen([sys.executable, "-m", "benchmarks.accelerator_kda", str(case)]) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the results, written after every section")
    parser.add_argument("--only", default="", help="sections, comma-separated")
    parser.add_argument("--without-fla", action="store_true", help="do not measure fla-core, whose start takes minutes")
    options = parser.parse_args()
    with_fla = not options.without_fla
    ceilings = measure_ceilings()
    sections: dict[str, Callable[[], Any]] = {
        "start": accelerator_services.first_token,
        "check": accelerator_kda.check,
        "services": accelerator_services.measure,
        "divergence": accelerator_services.divergence,
        "gap": accelerator_gap.measure,
        "ahead": accelerator_ahead.nano,
        "ahead-services": accelerator_ahead.services,
        "ahead-model": lambda: accelerator_ahead.kimi_linear(ceilings),
        "decode": lambda: decode(ceilings, with_fla=with_fla),
        "verify": lambda: [accelerator_kda.verify_case(heads, 16, 4) for heads in HEADS],
        "mla": lambda: [accelerator_mla.case(batch, 4096, ceilings) for batch in (1, 16, 64)],
        "staging": accelerator_staging.measure,
        "overlap": lambda: accelerator_overlap.measure(ops.load("cuda:fast", dtype="bfloat16", threads=4)),
        "model": lambda: model(ceilings, accelerator_model.KIMI_LINEAR_48B),
        "k3": lambda: model(ceilings, accelerator_model.KIMI_K3_LAYERS),
        "extend": lambda: extend(ceilings, with_fla=with_fla),
    }
    wanted = options.only.split(",") if options.only else list(sections)
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_per_s": ceilings.copy_bytes_per_s / 1e12,
        "matrix_tflops": ceilings.matrix_flops / 1e12,
        "seconds": {},
    }
    started = time.perf_counter()
    peers: list[subprocess.Popen[bytes]] = []
    for name in wanted:
        begun = time.perf_counter()
        if with_fla and "extend" in wanted and name != "start" and not peers:
            peers = compiling_peers()
        if name not in BESIDE_PEERS:
            for peer in peers:
                peer.wait()
        found = sections[name]()
        results[name] = rows = []
        for row in [found] if isinstance(found, dict) else found:
            rows.append(row)
            shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            print(f"[{time.perf_counter() - started:.0f} s] {name}: {shown}", file=sys.stderr, flush=True)
        # A model and the graphs that hold it.
        del found
        gc.collect()
        torch.cuda.empty_cache()
        results["seconds"][name] = round(time.perf_counter() - begun, 1)
        if options.json:
            with open(options.json, "w") as file:  # noqa: PTH123 - one line
                json.dump(results, file)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
