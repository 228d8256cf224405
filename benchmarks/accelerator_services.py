"""k3-nano on the card through the real services: golden tokens, drafts that change none, a hand-off from the backend
cpu, the seconds to the first token, and how far bfloat16 is from float32.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3svc import ops
from k3svc.cli.session import build_config
from k3svc.cli.stack import RoleEnded, Stack, role_command
from k3svc.client import AsyncClient, Completion, Options
from k3svc.core.batch import DecodeBatch, DecodeRow, ExtendBatch, ExtendRow, SampleSpec
from k3svc.core.request import SamplingParams
from k3svc.engine.inputs import decode_inputs, extend_inputs
from k3svc.model.kimi import Model, cache_spec
from k3svc.ops.table import Ops

NANO = Path("models/k3-nano")
TOKENS = 48
PAGE = 16
SAMPLED: Options = {"temperature": 1.0, "top_p": 0.95, "seed": 7}
GREEDY: Options = {"temperature": 0.0}
STACK_S = 60.0

Rows = list[dict[str, Any]]


def measure() -> Iterator[dict[str, Any]]:
    """Every stack answers the golden prompts, all at once, greedily and by sampling; steps wait for all drafts. One
    stack after the other, each with STACK_S seconds.
    """
    for dtype in ("float32", "bfloat16"):
        plain = asyncio.run(_answers(dtype, "none"))
        yield _row("cuda", dtype, "none", plain, plain)
        others = [("cuda", "dspark"), ("cuda", "dflash"), *([("cpu", "none")] if dtype == "float32" else [])]
        for prefill, draft in others:
            yield _compared(dtype, draft, prefill, plain)


def _compared(dtype: str, draft: str, prefill: str, plain: dict[str, Any]) -> dict[str, Any]:
    case = {"what": f"prefill {prefill}, decode cuda", "dtype": dtype, "draft": draft}
    try:
        own = asyncio.run(asyncio.wait_for(_answers(dtype, draft, prefill=prefill), STACK_S))
    except RoleEnded as error:
        return case | {"failure": error.log_tail[-2000:]}
    except TimeoutError:
        return case | {"failure": f"no end within {STACK_S} s"}
    return _row(case["what"], dtype, draft, own, plain)


def first_token() -> dict[str, Any]:
    """From the command to the first text, without kernels that were compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "k3svc.cli", "generate", "--model", str(NANO), "--device", "cuda"]
        command += ["--max-tokens", "8", "--temperature", "0", "--ignore-eos", "import os"]
        started = time.perf_counter()
        environment = os.environ | {"TRITON_CACHE_DIR": folder, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as run:
            assert run.stdout is not None and run.stderr is not None
            first = run.stdout.read(1)
            seconds = time.perf_counter() - started
            run.stdout.read()
            progress = run.stderr.read().decode(errors="replace").strip().splitlines()
    case = {"what": "cold start", "progress": progress[-8:]}
    if run.returncode != 0:
        return case | {"failure": f"the command ended with {run.returncode}"}
    return case | {"has_text": bool(first), "first_token_s": seconds}


async def _answers(dtype: str, draft: str, *, prefill: str = "cuda") -> dict[str, Any]:
    overrides = [f"model.dtype={dtype}", "speculation.govern=false", "speculation.max_wait_s=0.25"]
    config = build_config(model=NANO, device="cuda", draft=draft, overrides=overrides)
    prompts = _golden()

    def command(role: str, path: Path) -> Sequence[str]:
        own = ("--set", f"model.device={prefill}") if role == "prefill" else ()
        return (*role_command(role, path), *own)

    started = time.perf_counter()
    async with Stack(config, command=command) as stack, AsyncClient(stack.decode_endpoints) as client:
        start_s = time.perf_counter() - started

        async def all_of(options: Options) -> list[Completion]:
            own: Options = {"max_tokens": TOKENS, "ignore_eos": True, **options}
            return await asyncio.gather(*(client.generate(tokens=prompt["ids"], **own).result() for prompt in prompts))

        # Captures what steps and proposals of so many rows need.
        await all_of(GREEDY)
        return {"start_s": start_s, "greedy": await all_of(GREEDY), "sampled": await all_of(SAMPLED)}


def _row(devices: str, dtype: str, draft: str, own: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    tokens = {kind: _tokens(own[kind]) for kind in ("greedy", "sampled")}
    row = {
        "what": devices,
        "dtype": dtype,
        "draft": draft,
        "golden": sum(
            ids == prompt["continuation_ids"] for ids, prompt in zip(tokens["greedy"], _golden(), strict=True)
        ),
        "of": len(_golden()),
        "like_plain": {kind: sum(map(list.__eq__, ids, _tokens(plain[kind]))) for kind, ids in tokens.items()},
        "tpot_ms": [done.timings and round(done.timings.tpot_ms, 2) for done in own["greedy"]],
        "start_s": own["start_s"],
    }
    return row if draft == "none" else row | {"drafts": {kind: _drafts(own[kind]) for kind in tokens}}


def _drafts(completions: Sequence[Completion]) -> dict[str, float]:
    """What drafts did for some requests together; milliseconds are those of a step with drafts."""
    all_of = [done.speculation for done in completions]
    steps, drafted = sum(stats.steps for stats in all_of), sum(stats.steps_with_drafts for stats in all_of)
    times = {name: sum(getattr(stats, name) for stats in all_of) for name in ("draft_ms", "wait_ms", "verify_ms")}
    return {
        "steps": steps,
        "with_drafts": drafted,
        "late": sum(stats.late for stats in all_of),
        "acceptance_length": 1 + sum(stats.accepted for stats in all_of) / max(1, drafted),
        **{name: round(total / max(1, drafted), 2) for name, total in times.items()},
    }


def _tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(completion.samples[0].token_ids) for completion in completions]


def _golden() -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads((NANO / "golden.json").read_text())["prompts"]
    return prompts


def divergence(device: str = "cuda") -> Rows:
    """Next-token distributions at every position of the golden prompts and their continuations, fed token by token:
    KL divergence in nats from those of `reference` in float32, and how often the most likely token is the same.
    """
    exact = _all_logits("reference", "float32")
    rows: Rows = []
    for dtype in ("float32", "bfloat16"):
        own = _all_logits(device, dtype)
        p, q = exact.log_softmax(1), own.log_softmax(1)
        kl = (p.exp() * (p - q)).sum(1).clamp(min=0)
        rows.append(
            {
                "what": f"{device} {dtype} from reference float32",
                "positions": kl.shape[0],
                "kl_mean": float(kl.mean()),
                "kl_max": float(kl.max()),
                "same_top": float((exact.argmax(1) == own.argmax(1)).double().mean()),
            }
        )
    return rows


def _all_logits(device: str, dtype: str) -> Tensor:
    """float64 [positions, X] on the host."""
    backend = ops.load(device, dtype=dtype, threads=1)
    model = Model.load(NANO, backend, lambda _done, _total: None)
    with torch.inference_mode():
        parts = [_logits(model, backend, prompt["ids"], prompt["continuation_ids"]) for prompt in _golden()]
    return torch.cat(parts)


def _logits(model: Model, backend: Ops, prompt: list[int], continuation: list[int]) -> Tensor:
    pages = list(range(1, 2 + (len(prompt) + len(continuation)) // PAGE))
    spec = cache_spec(
        model.config, num_slots=1, num_pages=len(pages), page_size=PAGE, kv_dtype=backend.activation_dtype
    )
    cache = backend.new_cache(spec)
    row = ExtendRow(key="", slot=1, block_table=pages, token_ids=prompt, start=0, is_last=True)
    ids, meta, _ = extend_inputs(ExtendBatch(rows=[row]), PAGE, backend.device, backend.row_tile)
    parts = [model.logits(model.forward(ids, meta, cache, "extend")[: len(prompt)])]
    for number, token in enumerate(continuation):
        position = len(prompt) + number
        sample = SampleSpec(params=SamplingParams(temperature=0.0), sample_index=0, position=position + 1, counts=None)
        step = DecodeRow(key="", slot=1, block_table=pages, token_id=token, position=position, sample=sample)
        ids, meta, rows = decode_inputs(DecodeBatch(rows=[step]), PAGE, backend.device, backend.row_tile)
        parts.append(model.logits(model.forward(ids, meta, cache, "decode")[rows]))
    return torch.cat([part.cpu().double() for part in parts])
