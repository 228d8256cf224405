"""docs/configuration.md is what its script makes of k3svc/config.py."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from k3svc.config import Config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "configuration_reference.py"


def test_the_reference_is_current_and_lists_every_key():
    result = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    listed = []
    for line in (ROOT / "docs" / "configuration.md").read_text().splitlines():
        if heading := re.fullmatch(r"## `\[(\w+)\]`", line):
            section = heading[1]
        elif row := re.match(r"\| `(\w+)` \| .* \| `.*` \| .+ \|", line):
            listed.append(f"{section}.{row[1]}")
    known = Config()
    assert listed == [
        f"{section.name}.{key.name}"
        for section in dataclasses.fields(known)
        for key in dataclasses.fields(getattr(known, section.name))
    ]


def test_a_change_of_the_configuration_is_noticed(tmp_path: Path):
    for name in ("docs", "k3svc", "scripts"):
        (tmp_path / name).mkdir()
    for name in ("k3svc/config.py", "k3svc/errors.py", "k3svc/__init__.py", "docs/configuration.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    script = tmp_path / "scripts" / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    config = tmp_path / "k3svc" / "config.py"
    config.write_text(config.read_text().replace("drain_s: float = 30.0", "drain_s: float = 31.0"))
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "docs/configuration.md is not current: run scripts/configuration_reference.py\n"
