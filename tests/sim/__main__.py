"""Runs seeds of the simulation: progress, each broken seed with the command that repeats it, one JSON object last.

python -m tests.sim --seeds 2000
"""

import argparse
import json
import logging
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from k3svc.testing.sim import run_seed
from k3svc.text.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "models" / "k3-nano"
PROGRESS_S = 5.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first broken seed")
    parser.add_argument("--verbose", action="store_true", help="show the log of the engines")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.CRITICAL)
    tokenizer = Tokenizer.load(NANO)
    broken: list[int] = []
    seen: Counter[str] = Counter()
    virtual_s = 0.0
    started = shown = time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        try:
            outcome = run_seed(seed, tokenizer)
        except Exception as error:  # noqa: BLE001  whatever an engine raises, the seed is broken
            broken.append(seed)
            where = "".join(traceback.format_exception(error, limit=-3))
            show(f"seed {seed} is broken; repeat it with: make sim SEEDS=1 FIRST={seed}\n{where}")
            if options.fail_fast:
                break
        else:
            seen += outcome.counts
            virtual_s += outcome.virtual_s
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            show(f"{seed + 1 - options.first} of {options.seeds} seeds, {len(broken)} broken, {shown - started:.0f} s")
    report = {
        "seeds": options.seeds,
        "broken": len(broken),
        "first": options.first,
        "broken_seeds": broken,
        "requests": sum(count for name, count in seen.items() if name.startswith("request ")),
        "virtual_s": round(virtual_s),
        "wall_s": round(time.monotonic() - started, 1),
        "seen": dict(sorted(seen.items())),
    }
    show(json.dumps(report))
    return 1 if broken else 0


def show(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
