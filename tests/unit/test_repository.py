"""What the repository promises about itself: its checks find what they should, its files agree."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import k3svc
from tests.conformance.cpu_cases import has_compiler

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture
def source_copy(tmp_path: Path) -> Path:
    """The package sources and settings, free to be broken."""
    for folder in ("k3svc", "services"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=IGNORED)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(cwd), "COLUMNS": "200"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def plant(root: Path, module: str, line: str) -> None:
    path = root / module
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")


def test_make_help_lists_every_target():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    listed = [line.split()[0] for line in run("make", "--no-print-directory", "help").stdout.splitlines()]
    assert listed == phony[1].split()
    assert {"help", "setup", "demo", "test", "lint", "types", "proto", "bench"} <= set(listed)


def test_every_ignored_rule_carries_a_reason():
    text = (ROOT / "pyproject.toml").read_text()
    section = text[text.index("[tool.ruff.lint]") : text.index("[tool.ruff.lint.isort]")]
    ignored = section[section.index("ignore = [") :].splitlines()
    codes = [line for line in ignored if re.search(r'"[A-Z]+\d*"', line)]
    assert len(codes) > 10
    assert [line for line in codes if not re.search(r"#.{12}", line)] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("k3svc/core/planted.py", "import os; os.environ.get('X')"),
        ("services/decode/planted.py", "os.getenv('X')"),
        ("k3svc/model/planted.py", "torch.cuda.is_available()"),
        ("k3svc/engine/planted.py", "torch.npu.synchronize()"),
        ("k3svc/rpc/planted.py", "if is_npu: pass"),
        ("k3svc/engine/planted.py", "    import torch_npu"),
        ("services/decode/planted.py", "from sglang.kernels.ops import attention"),
        ("k3svc/model/planted.py", "importlib.import_module('torch_npu')"),
        ("k3svc/cli/planted.py", 'find_spec("sgl_kernel_npu")'),
    ],
)
def test_boundary_check_finds_a_planted_breach(source_copy: Path, module: str, line: str):
    check = ROOT / "scripts" / "check-boundaries"
    clean = run(check, source_copy)
    assert (clean.returncode, clean.stderr) == (0, "")
    plant(source_copy, module, line)
    broken = run(check, source_copy)
    assert broken.returncode == 1
    assert f"{module}:2:{line}" in broken.stderr


def test_boundary_check_lets_config_and_ops_be(source_copy: Path):
    plant(source_copy, "k3svc/config.py", "os.environ.get('X')")
    plant(source_copy, "k3svc/ops/planted.py", "torch.cuda.synchronize()")
    assert run(ROOT / "scripts" / "check-boundaries", source_copy).returncode == 0


def test_layer_contracts_find_planted_breaches(source_copy: Path):
    for module, line in {
        "k3svc/core/planted.py": "import torch",
        "k3svc/engine/planted.py": "import grpc",
        "k3svc/model/planted.py": "import k3svc.engine",
        "k3svc/cli/planted.py": "import services.decode, triton, torch_npu, sgl_kernel_npu",
        "k3svc/client/planted.py": "import k3svc.testing",
        "k3svc/rpc/planted.py": "import smg_grpc_proto",
    }.items():
        plant(source_copy, module, line)
    result = run(BIN / "lint-imports", "--no-cache", cwd=source_copy)
    assert result.returncode == 1
    verdicts = dict(re.findall(r"^(.+) (KEPT|BROKEN)$", result.stdout, re.MULTILINE))
    assert set(verdicts.values()) == {"BROKEN"}
    assert len(verdicts) == 6
    for breach in (
        "k3svc.core.planted -> torch",
        "k3svc.engine.planted -> grpc",
        "k3svc.model.planted -> k3svc.engine",
        "k3svc.cli.planted -> services.decode",
        "k3svc.cli.planted -> triton",
        "k3svc.cli.planted -> torch_npu",
        "k3svc.cli.planted -> sgl_kernel_npu",
        "k3svc.client.planted -> k3svc.testing",
        "k3svc.rpc.planted -> smg_grpc_proto",
    ):
        assert breach in result.stdout


def test_every_proto_has_its_generated_modules():
    protos = {path.stem for path in (ROOT / "protos/k3svc/v1").glob("*.proto")}
    assert protos >= {"types", "prefill_service", "decode_service", "admin_service"}
    for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
        assert {path.name for path in (ROOT / "k3svc/v1").glob(f"*{suffix}")} == {f"{p}{suffix}" for p in protos}


def test_installed_version_is_the_package_version():
    assert importlib.metadata.version("k3svc") == k3svc.__version__


def test_an_editable_install_is_found_beside_the_checkout(tmp_path: Path):
    """A program beside a checkout named k3svc sees that folder first, which has no __init__.py of its own."""
    checkout, site = tmp_path / "k3svc", tmp_path / "site"
    for folder in ("k3svc", "services"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, checkout)
    # Without the kernels, which are another matter and take a while.
    build = "import os, sys, setuptools.build_meta as m; os.environ['CXX'] = 'false'; m.build_editable(sys.argv[1])"
    built = run(sys.executable, "-c", build, tmp_path, cwd=checkout)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    program = tmp_path / "program.py"
    program.write_text("import site, sys; site.addsitedir(sys.argv[1]); import k3svc; print(k3svc.__file__)")
    # -S: without the installation that these tests run from.
    found = run(sys.executable, "-S", program, site, cwd=tmp_path)
    assert found.stdout.strip() == str(checkout / "k3svc" / "__init__.py"), found.stderr


def test_licence_files_cover_code_and_weights():
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
    notice = (ROOT / "NOTICE").read_text()
    assert "models/k3-nano" in notice
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in notice


@pytest.mark.slow
def test_wheel_and_sdist_hold_what_they_should(tmp_path: Path):
    tracked = run("git", "ls-files", "-z").stdout.split("\0")
    for name in filter(None, tracked):
        target = tmp_path / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, cwd=tmp_path / "source")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    sources = {n for n in tracked if re.match(r"(k3svc|services)/", n)}
    kernels = {"k3svc/ops/cpu/libk3cpu.so"} if has_compiler() else set()
    assert {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n} == sources | kernels
    assert {"k3svc/py.typed", "k3svc/v1/types_pb2.py", "k3svc/v1/types_pb2.pyi"} <= sources
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {n for n in tracked if n.startswith(("models/", "protos/", "tests/"))} <= names
