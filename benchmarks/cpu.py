"""Prompts and decode steps of the cpu backend beside its peers, and beside what the machine can do.

    python -m benchmarks.cpu [--json] [--reps N] [--threads N] [--llama-bench PATH] [--models nano,36m]
                             [--peers reference,compiled] [--parts prompts,batches,decode]
                             [--prompts 128,512,2048,4096] [--batches 1,4,16,64] [--contexts 128,4096]

Two models of the K3 architecture, k3-nano and one of 36.5 million random parameters, in rounds of which each measures
every peer: the cpu backend; the reference backend, which is plain eager torch; the same compiled by torch.compile
where that works; and llama.cpp on the same weights where `--llama-bench` names its program. Parts: one prompt of
several lengths, several prompts of 128 tokens at once, decode steps of 1 to 64 sequences behind 128 and 4,096 tokens.
Before all that the logits of the cpu backend are compared with those of the reference.

Figures are tokens per second of wall time. `cpu_over` divides those of the cpu backend by those of a peer in the same
round; `share_of_bound` divides the least time, at the rates that the machine showed in the same round, by the time.
All are medians of the rounds; the last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu_bounds import Bounds, Peaks
from benchmarks.cpu_kernels import HEADS, KDA_BATCH, KDA_TOKENS, MEMORY_FLOATS, kda_cases, machine_cases
from benchmarks.cpu_llama import LlamaCpp
from benchmarks.cpu_models import FOLDER, Session, check_logits, directory_of
from benchmarks.cpu_peers import PARTS, Peer, TorchPeer, compiled
from benchmarks.stack import cpu_name
from k3svc import ops
from k3svc.model.config import ModelConfig

MODELS = ("nano", "36m")
PEERS = ("reference", "compiled")
BATCHES = (1, 4, 16, 64)
CONTEXTS = (128, 4096)
PROMPTS = (128, 512, 2048, 4096)
BATCH_PROMPT = 128
KDA_WIDTHS = (64, 128)
SGEMM = 1024

Rates = dict[str, float]
Samples = dict[str, dict[str, list[float]]]
"""Peer → case → one figure a round."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Machine:
    """Rates of the machine, and of the KDA kernels alone."""

    def __init__(self, threads: int) -> None:
        backend = ops.load("cpu", dtype="float32", threads=threads)
        self._cases = machine_cases()
        for width in KDA_WIDTHS:
            self._cases |= kda_cases(backend, width)
        self.samples: dict[str, list[float]] = {}

    def measure(self) -> Peaks:
        """One round; every case runs twice, and the second run counts."""
        seconds = {}
        for name, case in self._cases.items():
            case()
            started = time.perf_counter()
            case()
            seconds[name] = time.perf_counter() - started
        peaks = Peaks(
            flops=2 * SGEMM**3 / seconds["sgemm"],
            read=4 * MEMORY_FLOATS / seconds["read"],
            in_place=8 * MEMORY_FLOATS / seconds["in_place"],
        )
        figures = {"sgemm_gflops": peaks.flops / 1e9, "read_gb_s": peaks.read / 1e9}
        figures["in_place_gb_s"] = peaks.in_place / 1e9
        for width in KDA_WIDTHS:
            cell = HEADS * width * width
            flops = 7 * cell * KDA_TOKENS / seconds[f"kda_prefill_{width}"]
            moved = 2 * 4 * cell * KDA_BATCH * 16 / seconds[f"kda_decode_{width}"]
            figures[f"kda_prefill_{width}_of_sgemm"] = flops / peaks.flops
            figures[f"kda_decode_{width}_of_in_place"] = moved / peaks.in_place
        for name, value in figures.items():
            self.samples.setdefault(name, []).append(value)
        return peaks


def measure_part(part: str, name: str, peer: Peer, arguments: argparse.Namespace) -> Rates:
    """Tokens/s of the cases of one part."""
    batches = shares(name, arguments.batches)
    if part == "prompts":
        return {f"prefill_{tokens}": rate for tokens, rate in peer.prompts(shares(name, arguments.prompts)).items()}
    if part == "batches":
        several = [batch for batch in batches if batch > 1]
        rates = peer.batch_prompts(BATCH_PROMPT, several) if several else {}
        return {f"prefill_{batch}x{BATCH_PROMPT}": rate for batch, rate in rates.items()}
    return {
        f"decode_{batch}_at_{context}": rate
        for context in arguments.contexts
        for batch, rate in peer.decode(context, batches).items()
    }


def shares(peer: str, sizes: list[int]) -> list[int]:
    """Which of the sizes a peer is measured at: compiling takes minutes a shape."""
    return [size for size in sizes if size in (1, 16, 512)] if peer == "compiled" else list(sizes)


def peers_of(model: str, arguments: argparse.Namespace) -> tuple[dict[str, Peer], dict[str, Any]]:
    """The peers that run here, and what is known of them before any round."""
    directory = directory_of(model)
    sizes = {"threads": arguments.threads, "batch": max(BATCHES), "context": max(CONTEXTS)}
    sessions = {name: Session(name, directory, **sizes) for name in ("cpu", "reference")}
    facts: dict[str, Any] = {"logits_differ": check_logits(sessions["cpu"], sessions["reference"])}
    say(f"{model}: logits of cpu and reference differ by {facts['logits_differ']:.1e} of the largest")
    for session in sessions.values():
        session.fill(max(BATCHES), max(CONTEXTS))
    peers: dict[str, Peer] = {"cpu": TorchPeer(sessions["cpu"])}
    if "reference" in arguments.peers:
        peers["reference"] = TorchPeer(sessions["reference"])
    if "compiled" in arguments.peers:
        say(f"{model}: compiles the reference, at most {arguments.compile_s:.0f} s for prompts and for decode steps")
        prompts, batches = shares("compiled", arguments.prompts), shares("compiled", arguments.batches)
        decodes = [(batch, context) for context in arguments.contexts for batch in batches]
        peers["compiled"], facts["not_compiled"] = compiled(
            sessions["reference"], arguments.compile_s, prompts, decodes
        )
        for part, reason in facts["not_compiled"].items():
            say(f"{model}: no compiled {part}: {reason}")
    if arguments.llama_bench is not None:
        say(f"{model}: looks for the best settings of llama.cpp")
        llama = LlamaCpp(arguments.llama_bench, directory, FOLDER, model, arguments.threads)
        facts["llama_settings"] = llama.settings()
        say(f"{model}: {llama.settings()}")
        peers["llama"] = llama
    return peers, facts


def measure_model(model: str, machine: Machine, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one model."""
    peers, facts = peers_of(model, arguments)
    bounds = Bounds(ModelConfig.from_directory(directory_of(model)))
    samples: Samples = {name: {} for name in peers}
    of_bound: dict[str, list[float]] = {}
    for round_ in range(arguments.reps):
        peaks = machine.measure()
        for part in arguments.parts:
            for name, peer in peers.items():
                if part not in peer.parts:
                    continue
                found = measure_part(part, name, peer, arguments)
                for case, rate in found.items():
                    samples[name].setdefault(case, []).append(rate)
                shown = ", ".join(f"{case} {rate:,.0f}" for case, rate in found.items())
                say(f"{model}, round {round_ + 1} of {arguments.reps}, {name}: {shown}")
        for case, rates in samples["cpu"].items():
            tokens, least = least_s(case, bounds, peaks)
            of_bound.setdefault(case, []).append(least * rates[-1] / tokens)
    over = {name: ratios(samples["cpu"], cases) for name, cases in samples.items() if name != "cpu"}
    return facts | {
        "tokens_s": {name: medians(cases, 1) for name, cases in samples.items()},
        "cpu_over": {name: medians(cases, 3) for name, cases in over.items()},
        "cpu_over_spread": {name: spread(cases) for name, cases in over.items()},
        "share_of_bound": medians(of_bound, 3),
    }


def least_s(case: str, bounds: Bounds, peaks: Peaks) -> tuple[int, float]:
    """Tokens of a case and the least seconds they take."""
    kind, size, *rest = case.split("_")
    if kind == "decode":
        return int(size), bounds.decode_s(int(size), int(rest[1]), peaks)
    batch, _, tokens = size.rpartition("x")
    count = int(batch or 1)
    return count * int(tokens), count * bounds.prompt_s(int(tokens), peaks)


def ratios(own: dict[str, list[float]], peer: dict[str, list[float]]) -> dict[str, list[float]]:
    """Own figures over a peer's, round by round, of the cases that both have."""
    return {case: [a / b for a, b in zip(own[case], values, strict=True)] for case, values in peer.items()}


def medians(samples: dict[str, list[float]], digits: int) -> Rates:
    return {name: round(statistics.median(values), digits) for name, values in samples.items()}


def spread(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    """Least and largest of each."""
    return {name: [round(min(values), 3), round(max(values), 3)] for name, values in samples.items()}


def print_table(figures: dict[str, Any]) -> None:
    """What the JSON object holds, to read."""
    for name, value in figures["machine"].items():
        print(f"{name:32}{value:12.3f}")
    for model, found in figures["models"].items():
        names = list(found["tokens_s"])
        print(f"\n{model}, tokens/s{'':16}" + "".join(f"{name:>12}{'cpu over':>10}" for name in names) + "  of bound")
        for case in found["tokens_s"]["cpu"]:
            cells = ""
            for name in names:
                rate, ratio = found["tokens_s"][name].get(case), found["cpu_over"].get(name, {}).get(case)
                cells += f"{'' if rate is None else f'{rate:,.0f}':>12}{'' if ratio is None else f'{ratio:.2f}':>10}"
            print(f"{case:24}{cells}{found['share_of_bound'][case]:10.2f}")
        for part, reason in found.get("not_compiled", {}).items():
            print(f"not compiled: {part}: {reason}")


def some_of(allowed: tuple[int, ...]) -> Callable[[str], list[int]]:
    """Reads some of the allowed numbers, separated by commas."""
    read = choice_of(tuple(map(str, allowed)))
    return lambda text: [int(name) for name in read(text)]


def choice_of(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Reads some of the allowed names, separated by commas."""

    def read(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; allowed: {', '.join(allowed)}")
        return names

    return read


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object on standard output")
    parser.add_argument("--reps", type=int, default=5, help="rounds; default 5")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every peer; default all cores")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's program, llama-batched-bench beside it")
    parser.add_argument("--models", type=choice_of(MODELS), default=list(MODELS), help=f"of {','.join(MODELS)}")
    parser.add_argument("--peers", type=choice_of(PEERS), default=list(PEERS), help=f"of {','.join(PEERS)}")
    parser.add_argument("--parts", type=choice_of(PARTS), default=list(PARTS), help=f"of {','.join(PARTS)}")
    for name, sizes in {"prompts": PROMPTS, "batches": BATCHES, "contexts": CONTEXTS}.items():
        shown = ",".join(map(str, sizes))
        parser.add_argument(f"--{name}", type=some_of(sizes), default=list(sizes), help=f"of {shown}")
    parser.add_argument("--compile-s", type=float, default=240.0, help="most seconds to compile for; default 240")
    arguments = parser.parse_args()
    machine = Machine(arguments.threads)
    machine.measure()
    machine.samples.clear()
    models = {model: measure_model(model, machine, arguments) for model in arguments.models}
    figures = {
        "benchmark": "cpu",
        "cpu": cpu_name(),
        "threads": arguments.threads,
        "reps": arguments.reps,
        "machine": medians(machine.samples, 3),
        "models": models,
    }
    if not arguments.json:
        print_table(figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
