"""The kernels that sglang lends, against its wheel, where make test-npu has installed it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from k3svc.ops.npu import vendor
from k3svc.ops.npu_emulated import registry


@pytest.fixture(scope="module")
def wheel() -> Any:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed here; make test-npu has it")
    done = subprocess.run(
        [sys.executable, "-m", "tests.npu.sglang_kernels"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_of_sglang_are_where_they_are_looked_for_and_take_what_the_file_says(
    wheel: Any, capsys: pytest.CaptureFixture[str]
):
    """What is installed is what the extra `npu` names and sglang without its dependencies. Later versions of a kernel
    have more arguments behind those of the file.
    """
    expected = {}
    for line in registry.lines(registry.FUNCTIONS):
        module, name, arguments = re.fullmatch(r"([\w.]+):(\w+)\((.*)\)", line).groups()  # type: ignore[union-attr]
        if module.startswith("sglang"):
            expected[name] = arguments.split(", ")
    assert expected.keys() == {name for name, module in vendor.MODULES.items() if module.startswith("sglang")}
    found = wheel["signatures"]
    assert {name: found[name][: len(arguments)] for name, arguments in expected.items()} == expected
    with capsys.disabled():
        sys.stdout.write(f"\n{len(found)} signatures of sglang's kernels equal to the wheel\n")


def test_packed_decode_is_what_the_kernel_of_sglang_computes(wheel: Any):
    """Run by Triton's interpreter: outputs, and states of written and of all other slots, with both gates."""
    assert len(wheel["differences"]) == 2
    assert max(wheel["differences"]) < 2e-6
