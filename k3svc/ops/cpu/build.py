"""Compiles the kernels of the cpu backend with the machine's C++ compiler; `python -m k3svc.ops.cpu` calls it too.

Standard library only, because the package build runs this file before anything else is installed.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = "libk3cpu.so"
SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")

# Contraction off: products and sums fuse only where the source says so, alike for every instruction set.
FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
SANITIZE = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
IS_X86 = platform.machine() in ("x86_64", "AMD64")
ISA_FLAGS = {
    # On x86 it serves machines without AVX2 and tests, and would take longer to compile than all the rest.
    "portable": ("-O1" if IS_X86 else "-O3",),
    "avx2": ("-O3", "-DK3_AVX2", "-mavx2", "-mfma"),
    "avx512": (
        "-O3", "-DK3_AVX512", "-mavx2", "-mfma", "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl",
    ),
}  # fmt: skip


class BuildError(Exception):
    """There is no compiler, or it fails; the message says which and why."""


def build(target: Path, *, compiler: str | None = None, extra_flags: Sequence[str] = ()) -> None:
    """Compiles and links the library to `target`. Raises BuildError."""
    compiler = find_compiler(compiler)
    isas = ISA_FLAGS if IS_X86 else {"portable": ISA_FLAGS["portable"]}
    units: dict[str, tuple[str, ...]] = {"library": ("library.cpp", "-O2")}
    units |= {isa: ("kernels.cpp", f"-DK3_ISA={isa}", *own) for isa, own in isas.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = {name: f"{folder}/{name}.o" for name in units}
        commands = [
            [compiler, *FLAGS, *own, *extra_flags, "-c", str(SOURCES / source), "-o", objects[name]]
            for name, (source, *own) in units.items()
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        # Written aside and renamed, since a process may have the old one mapped.
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        _run([compiler, *extra_flags, "-shared", "-pthread", *objects.values(), "-o", str(fresh), "-lm"])
        fresh.replace(target)


def find_compiler(name: str | None = None) -> str:
    """Path of this C++ compiler, or of the first of COMPILERS that is there. Raises BuildError."""
    names = (name,) if name else COMPILERS
    for candidate in names:
        path = shutil.which(candidate)
        if path is not None:
            return path
    raise BuildError(f"no C++ compiler: {', '.join(names)} not found; install g++ (apt-get install g++)")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
