"""What transfer.state_dtype = "bfloat16" changes: the error of the states, and of the distributions that follow.

    python -m benchmarks.wire_state [--json] [--model DIR]

Each golden prompt of the checkpoint is prefilled once; its state goes on in two slots, as it is and with KDA states
rounded by the product's own conversion. Both are fed the golden continuation, token by token. The last line is one JSON
object: largest absolute error of a state element and largest one relative to the largest element of its tensor, KL
divergence of the next-token distributions in nats, and in how many places the most likely token differs.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.stack import cpu_name
from k3svc import ops
from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow, SampleSpec
from k3svc.core.request import SamplingParams
from k3svc.engine.inputs import decode_inputs, extend_inputs
from k3svc.model.kimi import Model, cache_spec
from k3svc.ops.table import Cache, Ops
from k3svc.transfer.narrow import NarrowState

PAGE_SIZE = 16
EXACT, ROUNDED = 1, 2


def copy_rounded(cache: Cache, pages: int) -> tuple[float, float]:
    """The state of slot EXACT in pages 1 to `pages` into slot ROUNDED and the pages after; (largest absolute error,
    largest one relative to the largest element of its tensor) of the KDA states.
    """
    absolute = relative = 0.0
    for layer in cache.spec.kda_layers:
        source, target = cache.state_bytes(layer, EXACT), cache.state_bytes(layer, ROUNDED)
        size = source.nbytes // 2
        NarrowState(target)[0:size] = NarrowState(source)[0:size]
        exact = torch.frombuffer(source[0 : source.nbytes], dtype=torch.float32)
        error = float((torch.frombuffer(target[0 : target.nbytes], dtype=torch.float32) - exact).abs().max())
        absolute = max(absolute, error)
        relative = max(relative, error / float(exact.abs().max()))
        conv = cache.conv_bytes(layer, EXACT)
        cache.conv_bytes(layer, ROUNDED)[0 : conv.nbytes] = conv[0 : conv.nbytes]
    for layer in cache.spec.mla_layers:
        rows = cache.rows_bytes(layer, 1, pages)
        cache.rows_bytes(layer, 1 + pages, pages)[0 : rows.nbytes] = rows[0 : rows.nbytes]
    return absolute, relative


def measure(model: Model, backend: Ops, prompt: Sequence[int], continuation: Sequence[int]) -> dict[str, Any]:
    """Figures of one prompt."""
    pages = -(-(len(prompt) + len(continuation)) // PAGE_SIZE)
    spec = cache_spec(
        model.config, num_slots=2, num_pages=2 * pages, page_size=PAGE_SIZE, kv_dtype=backend.activation_dtype
    )
    cache = backend.new_cache(spec)
    tables = {EXACT: list(range(1, 1 + pages)), ROUNDED: list(range(1 + pages, 1 + 2 * pages))}
    whole = ExtendRow(key="a", slot=EXACT, block_table=tables[EXACT], token_ids=list(prompt), start=0, is_last=True)
    ids, meta, _ = extend_inputs(ExtendBatch(rows=[whole]), PAGE_SIZE, backend.device, backend.row_tile)
    model.forward(ids, meta, cache, "extend", lambda _layer: None)
    absolute, relative = copy_rounded(cache, pages)
    divergences: list[float] = []
    other_tokens = 0
    for number, token in enumerate(continuation):
        position = len(prompt) + number
        sample = SampleSpec(params=SamplingParams(temperature=0.0), sample_index=0, position=position + 1, counts=None)
        batch = DecodeBatch(
            rows=[
                DecodeRow(key=str(slot), slot=slot, block_table=table, token_id=token, position=position, sample=sample)
                for slot, table in tables.items()
            ]
        )
        ids, meta, rows = decode_inputs(batch, PAGE_SIZE, backend.device, backend.row_tile)
        logits = model.logits(model.forward(ids, meta, cache, "decode")[rows]).double()
        exact, rounded = logits.log_softmax(dim=1)
        divergences.append(max(0.0, float((exact.exp() * (exact - rounded)).sum())))
        other_tokens += int(exact.argmax() != rounded.argmax())
    return {
        "prompt_tokens": len(prompt),
        "state_max_abs_error": absolute,
        "state_max_rel_error": relative,
        "kl_first": divergences[0],
        "kl_mean": statistics.mean(divergences),
        "kl_max": max(divergences),
        "other_tokens": other_tokens,
        "steps": len(divergences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on stdout")
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "models" / "k3-nano")
    options = parser.parse_args()
    backend = ops.load("reference", dtype="float32", threads=1)
    model = Model.load(options.model, backend, lambda _done, _total: None)
    golden = json.loads((options.model / "golden.json").read_text())["prompts"]
    with torch.inference_mode():
        table = [measure(model, backend, prompt["ids"], prompt["continuation_ids"]) for prompt in golden]
    if not options.json:
        for row in table:
            print(json.dumps(row), file=sys.stderr)
    print(
        json.dumps(
            {
                "benchmark": "wire_state",
                "cpu": cpu_name(),
                "state_max_abs_error": max(row["state_max_abs_error"] for row in table),
                "state_max_rel_error": max(row["state_max_rel_error"] for row in table),
                "kl_mean": statistics.mean(row["kl_mean"] for row in table),
                "kl_max": max(row["kl_max"] for row in table),
                "other_tokens": sum(row["other_tokens"] for row in table),
                "steps": sum(row["steps"] for row in table),
            }
        )
    )


if __name__ == "__main__":
    main()
