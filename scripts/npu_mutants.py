#!/usr/bin/env python3
"""Breaks the adapters one way at a time and shows which test notices: scripts/npu_mutants.py [name ...]

A mutant (npu_mutations/) is a piece of adapter source and what stands in its place; no file is changed. The named tests
first run on the adapters as they are, and must pass; then each mutant runs its test, which must fail.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from npu_mutations import Mutant, attention, drafts, recurrence, weights

PRELOADED = (safetensors.torch, torch)
"""Loaded before the fork, so that a mutant costs its test alone."""
ROOT = Path(__file__).parents[1]


MUTANTS = (*recurrence.MUTANTS, *attention.MUTANTS, *drafts.MUTANTS, *weights.MUTANTS)


class _Patched(SourceFileLoader):
    """Loads a module with a piece of its source replaced."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:  # noqa: ARG002 - the signature is the import system's
        source = Path(self.path).read_text(encoding="utf-8")
        assert source.count(self._mutant.old) == 1, f"{self._mutant.name}: {source.count(self._mutant.old)} places"
        return compile(source.replace(self._mutant.old, self._mutant.new), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the signature is the import system's
        target: ModuleType | None = None,  # noqa: ARG002 - as above
    ) -> ModuleSpec | None:
        if name != f"k3svc.ops.npu.{self._mutant.file}":
            return None
        file = str(ROOT / "k3svc" / "ops" / "npu" / f"{self._mutant.file}.py")
        return importlib.util.spec_from_loader(name, _Patched(name, file, self._mutant))


class _Failures:
    """Names of tests that failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid.rpartition("/")[2])


def run(mutant: Mutant | None, tests: Sequence[str]) -> tuple[int, list[str]]:
    """pytest's exit code and the tests that failed, of a process of its own."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        if mutant is not None:
            sys.meta_path.insert(0, _Finder(mutant))
        failures = _Failures()
        stop = [] if mutant is None else ["-x"]
        code = pytest.main(
            ["-q", "-p", "no:cacheprovider", *stop, *(f"tests/npu/{test}" for test in tests)], [failures]
        )
        with os.fdopen(sender, "w") as stream:
            json.dump(failures.names, stream)
        os._exit(int(code))
    os.close(sender)
    with os.fdopen(receiver) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(text or "[]")


def main(names: Sequence[str]) -> int:
    """0 when the adapters pass and every mutant is noticed."""
    os.chdir(ROOT)
    torch.set_num_threads(1)
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    tests = sorted({mutant.test for mutant in chosen})
    code, failed = run(None, tests)
    print(f"as they are: {len(tests)} tests {'pass' if code == 0 else f'fail: {failed}'}", flush=True)
    survivors = 0
    started = time.monotonic()
    for mutant in chosen:
        code, failed = run(mutant, [mutant.test])
        is_noticed = code == pytest.ExitCode.TESTS_FAILED and bool(failed)
        survivors += not is_noticed
        print(
            f"{'noticed ' if is_noticed else 'SURVIVED'} {mutant.name}: {', '.join(failed) or f'exit {code}'}",
            flush=True,
        )
    elapsed = time.monotonic() - started
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants noticed in {elapsed:.0f} s")
    return int(survivors > 0 or run(None, tests[:1])[0] != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
