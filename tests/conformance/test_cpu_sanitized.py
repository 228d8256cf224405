"""The other tests of the cpu backend with a library that AddressSanitizer and UBSan watch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3svc.ops.cpu.build import LIBRARY, SANITIZE, build, find_compiler
from tests.conformance.cpu_cases import needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.timeout(900)]

KERNELS = ("cpu_draft", "cpu_programs", "cpu_rows", "cpu_kda", "cpu_mla", "cpu_paths", "cpu_sampling", "verify")
SUITES = (*(f"tests/conformance/test_{suite}.py" for suite in KERNELS), "tests/unit/transfer/test_checked_copy.py")
RUN = """
import sys
from pathlib import Path
import pytest
from k3svc.ops.cpu import library
library.LIBRARY_PATH = Path(sys.argv[1])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
OVERFLOW = """
import sys
from pathlib import Path
import torch
from k3svc.ops.cpu import library
library.LIBRARY_PATH = Path(sys.argv[1])
from k3svc.ops.cpu.backend import Cpu
cpu = Cpu()
cpu.rms_norm(torch.ones(2, 64), torch.ones(8), 1e-5)
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sanitized") / LIBRARY
    build(target, extra_flags=SANITIZE)
    return target


def run(library: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The C++ library beside it, or the first exception that torch throws ends the process.
    runtimes = [
        subprocess.run(
            [find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {**os.environ, "LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [sys.executable, "-c", script, str(library), *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_suites_run_clean(sanitized: Path):
    done = run(sanitized, RUN, *SUITES)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_a_short_weight_is_caught(sanitized: Path):
    done = run(sanitized, OVERFLOW)
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr
