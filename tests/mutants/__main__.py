"""Breaks production code on purpose, one place at a time, in a copy, and runs what must notice.

First everything runs on the clean copy and must pass; then each mutant must fail, by the named test or seed. Progress,
one JSON object last. python -m tests.mutants --only lease
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.mutants import MUTANTS, SIM, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("k3svc", "services", "tests", "pyproject.toml")
SIM_COMMAND = ("-m", "tests.sim", "--fail-fast", "--seeds")
TIMEOUT_S = 900.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--seeds", type=int, default=150, help="most seeds that a mutant may take")
    options = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        (copy / "models").symlink_to(ROOT / "models")
        clean = {
            found_by: run(copy, found_by, options.seeds) for found_by in {mutant.found_by: None for mutant in chosen}
        }
        for found_by, noticed in clean.items():
            show(f"{'passes' if noticed is None else 'FAILS: ' + noticed}: {found_by}, unchanged")
        survivors = [mutant.name for mutant in chosen if not is_killed(copy, mutant, options.seeds)]
    is_clean = not any(clean.values())
    report = {
        "mutants": len(chosen),
        "killed": len(chosen) - len(survivors),
        "survivors": survivors,
        "clean_passes": is_clean,
        "wall_s": round(time.monotonic() - started, 1),
    }
    show(json.dumps(report))
    return 0 if is_clean and not survivors else 1


def is_killed(copy: Path, mutant: Mutant, seeds: int) -> bool:
    path = copy / mutant.path
    original = path.read_text()
    found = original.count(mutant.old)
    if found != 1:
        raise SystemExit(f"mutant {mutant.name!r}: its code is {found} times in {mutant.path}; bring it up to date")
    path.write_text(original.replace(mutant.old, mutant.new))
    noticed = run(copy, mutant.found_by, seeds)
    path.write_text(original)
    show(f"{'SURVIVES' if noticed is None else 'killed'}: {mutant.name}: {noticed or mutant.found_by}")
    return noticed is not None


def run(copy: Path, found_by: str, seeds: int) -> str | None:
    """What fails first, None when all passes."""
    if found_by == SIM:
        command = [sys.executable, *SIM_COMMAND, str(seeds)]
    else:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", found_by]
    result = subprocess.run(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if result.returncode == 0:
        return None
    output = result.stdout + result.stderr
    first = re.search(r"^seed \d+ is broken|^(?:FAILED|ERROR) \S+", output, re.MULTILINE)
    last = [line for line in output.splitlines() if line and not line.startswith("{")][-1:]
    return f"{first.group() if first else 'no test ran'} ({last[0].strip()[:100] if last else ''})"


def show(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
