"""How the cpu backend is built and loaded, and what it says when it cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3svc import config
from k3svc.errors import BackendError
from k3svc.ops import load
from k3svc.ops.cpu import __main__ as command
from k3svc.ops.cpu import library
from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.cpu.build import LIBRARY, BuildError, build, find_compiler
from tests.conformance.cpu_cases import cache_spec, needs_compiler


def test_a_missing_library_names_package_and_command(tmp_path: Path):
    with pytest.raises(BackendError, match=r"not built.*install g\+\+.*python -m k3svc\.ops\.cpu`") as caught:
        Cpu(library=tmp_path / LIBRARY)
    assert caught.value.reason == "BACKEND_MISSING"


def test_a_broken_library_is_refused(tmp_path: Path):
    (tmp_path / LIBRARY).write_bytes(b"no library")
    with pytest.raises(BackendError, match=r"cannot load .*python -m k3svc\.ops\.cpu`"):
        Cpu(library=tmp_path / LIBRARY)


def test_a_missing_compiler_names_the_package(tmp_path: Path):
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: no-such-compiler not found; install g\+\+"):
        build(tmp_path / LIBRARY, compiler="no-such-compiler")
    command = [sys.executable, "-m", "k3svc.ops.cpu", "no-such-compiler"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "install g++" in done.stderr


def test_the_default_backend_is_what_set_up_could_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert config.CPU_KERNELS == library.LIBRARY_PATH
    kernels = tmp_path / LIBRARY
    monkeypatch.setattr(config, "CPU_KERNELS", kernels)
    monkeypatch.setattr(command, "LIBRARY_PATH", kernels)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert config.Config().model.device == "reference"
    command.main(["--default"])
    assert "default backend: reference (no C++ compiler" in capsys.readouterr().out
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    command.main(["--default"])
    assert "could not be built, `python -m k3svc.ops.cpu` says why" in capsys.readouterr().out
    kernels.touch()
    assert config.Config().model.device == "cpu"
    command.main(["--default"])
    assert capsys.readouterr().out == "default backend: cpu (its kernels are built)\n"


@needs_compiler
def test_a_failing_compiler_is_quoted(tmp_path: Path):
    with pytest.raises(BuildError, match="no-such-flag"):
        build(tmp_path / LIBRARY, extra_flags=["-no-such-flag"])
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_another_abi_version_is_refused(tmp_path: Path):
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int k3_abi_version() { return -7; }')
    target = tmp_path / LIBRARY
    subprocess.run([find_compiler(), "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    with pytest.raises(BackendError, match=f"ABI version -7, {library.ABI_VERSION} is needed"):
        Cpu(library=target)


@needs_compiler
def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(BackendError, match="has no avx1024"):
        Cpu(isa="avx1024")


@needs_compiler
@pytest.mark.parametrize("field", ["state_dtype", "kv_dtype"])
def test_caches_are_float32(field: str):
    with pytest.raises(BackendError, match="float32 caches"):
        Cpu().new_cache(cache_spec(**{field: torch.bfloat16}))


@needs_compiler
def test_load_knows_the_backend():
    ops = load("cpu", dtype="float32", threads=2)
    assert (ops.name, ops.chunk, ops.activation_dtype, ops.batch_invariant) == ("cpu", 64, torch.float32, True)
    with pytest.raises(BackendError, match=r"model\.dtype: got 'bfloat16'"):
        load("cpu", dtype="bfloat16", threads=1)


@needs_compiler
def test_the_variant_names_no_vector_width():
    variants = {Cpu(isa=isa).variant for isa in ("portable", Cpu().isa)}
    assert len(variants) == 1
