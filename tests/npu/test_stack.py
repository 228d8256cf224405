"""The whole stack on the emulated device: two processes, a hand-off over gRPC, streams."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="the environment of make test-npu has no services")


def demo(*arguments: str) -> str:
    """What `k3svc demo` writes before its figures, without the lines about processes."""
    program = [sys.executable, "-c", "from k3svc.cli.main import main; main()", "demo", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    text, _, figures = done.stdout.partition("--- what it took")
    assert "bytes of state from prefill to decode in 2 hand-offs" in figures
    return text[text.index("---") :]


@pytest.mark.slow
def test_demo_writes_what_the_reference_backend_writes():
    assert demo("--device", "npu-emulated:fp32,shape-relaxed") == demo("--device", "reference")


@pytest.mark.slow
def test_demo_in_contract_mode(tmp_path: Path):
    import make_npu_tiny  # type: ignore[import-not-found]

    make_npu_tiny.write(tmp_path, 0)
    first = demo("--model", str(tmp_path), "--device", "npu-emulated", "--set", "model.dtype=bfloat16")
    assert len(first) > 200
