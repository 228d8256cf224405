"""Runs all fuzz targets for a time: python -m tests.fuzz.run --seconds 600

Each target runs in a process of its own. With atheris installed (`pip install -e .[fuzz]`) inputs are guided by the
coverage of k3svc, otherwise they are random bytes; hypothesis turns either into values. The last line is a JSON
object. The exit code is 1 when a target crashed, hung for HANG_S on one input, or grew by more than GROWTH_MIB after
its first fifth.
"""

import argparse
import faulthandler
import importlib
import importlib.util
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = tuple(f"tests.fuzz.test_{name}" for name in ("text", "handoff", "http2", "service", "draft"))
HANG_S = 20.0
GROWTH_MIB = 48.0
WARM_SHARE = 0.2
MAX_INPUT_BYTES = 8192


class Watched:
    """One target with what is measured of it; writes its figures to a file, since a fuzzer ends its process."""

    def __init__(self, fuzz: Callable[[bytes], object], seconds: float, report: Path) -> None:
        self._fuzz = fuzz
        self._seconds = seconds
        self._report = report
        self._started = time.monotonic()
        self._last_report = 0.0
        self._warm_mib: float | None = None
        self._count = 0
        self._slowest_s = 0.0

    def __call__(self, data: bytes) -> None:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        begun = time.monotonic()
        try:
            self._fuzz(data)
        except BaseException:
            sys.stderr.write(f"input: {data.hex()}\n")
            raise
        ended = time.monotonic()
        faulthandler.cancel_dump_traceback_later()
        self._count += 1
        self._slowest_s = max(self._slowest_s, ended - begun)
        if self._warm_mib is None and ended - self._started > WARM_SHARE * self._seconds:
            self._warm_mib = resident_mib()
        if ended - self._last_report > 0.5 or self.is_over:
            self._last_report = ended
            self.report()

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._started > self._seconds

    def report(self) -> None:
        grown = 0.0 if self._warm_mib is None else resident_mib() - self._warm_mib
        figures = {
            "inputs": self._count,
            "seconds": round(time.monotonic() - self._started, 1),
            "slowest_ms": round(1e3 * self._slowest_s, 1),
            "grown_mib": round(grown, 1),
        }
        self._report.write_text(json.dumps(figures))


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20


def load_targets() -> dict[str, Any]:
    targets: dict[str, Any] = {}
    for module in MODULES:
        targets |= importlib.import_module(module).TARGETS
    return targets


def fuzz_one(name: str, seconds: float, report: Path, seed: int) -> None:
    """Runs in the child. Returns, or ends the process."""
    try:
        import atheris
    except ImportError:
        watched = Watched(load_targets()[name].hypothesis.fuzz_one_input, seconds, report)
        source = random.Random(seed)
        while not watched.is_over:
            watched(source.randbytes(source.randrange(MAX_INPUT_BYTES)))
        return
    with atheris.instrument_imports(include=["k3svc"]):
        targets = load_targets()
    watched = Watched(targets[name].hypothesis.fuzz_one_input, seconds, report)
    options = [f"-max_total_time={max(1, round(seconds))}", f"-max_len={MAX_INPUT_BYTES}", f"-seed={seed or 1}"]
    options += [
        f"-artifact_prefix={report.parent}/",
        "-rss_limit_mb=0",
        f"-timeout={10 * round(HANG_S)}",
        "-verbosity=0",
        "-len_control=0",
    ]
    atheris.Setup([sys.argv[0], *options], watched)
    atheris.Fuzz()


def run_target(name: str, seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Figures of one target, with what went wrong."""
    report, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, "-m", "tests.fuzz.run", "--target", name, "--seconds", str(seconds), "--seed", str(seed)]
    with log.open("wb") as output:
        process = subprocess.run(
            [*command, "--report", str(report)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"},
            check=False,
        )
    figures: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {"inputs": 0, "grown_mib": 0.0}
    text = log.read_text(errors="replace")
    figures["hung"] = "Timeout (" in text
    figures["crashed"] = process.returncode != 0 and not figures["hung"]
    figures["grew"] = figures["grown_mib"] > GROWTH_MIB
    if process.returncode != 0:
        sys.stdout.write(text[-6000:] + "\n")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1, 1 << 30))
    parser.add_argument("--target")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.report is not None:
        fuzz_one(options.target, options.seconds, options.report, options.seed)
        return 0
    names = [options.target] if options.target else list(load_targets())
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            results[name] = run_target(name, options.seconds / len(names), options.seed, Path(folder))
            sys.stdout.write(f"{name}: {json.dumps(results[name])}\n")
            sys.stdout.flush()
    totals = {
        "seconds": options.seconds,
        "seed": options.seed,
        "guided": importlib.util.find_spec("atheris") is not None,
        "inputs": sum(result["inputs"] for result in results.values()),
        **{kind: [n for n, result in results.items() if result[kind]] for kind in ("crashed", "hung", "grew")},
        "targets": results,
    }
    sys.stdout.write(json.dumps(totals) + "\n")
    return 1 if totals["crashed"] or totals["hung"] or totals["grew"] else 0


if __name__ == "__main__":
    sys.exit(main())
