#!/usr/bin/env python3
"""Writes docs/configuration.md from the dataclasses of k3svc/config.py and the docstrings in there:
scripts/configuration_reference.py

With --check it writes nothing and exits 1 when the file is not what it would write.
"""

import argparse
import ast
import dataclasses
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from k3svc import config  # noqa: E402 - needs the path above

DEVICES = '`"cpu"`, `"reference"`'
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

Written by `scripts/configuration_reference.py` from `k3svc/config.py`; do not edit.

Every role reads one TOML file, `--config FILE`, else the one that `K3SVC_CONFIG` names, else none; then
`--set section.key=value`, as often as wanted. Keys that are not in this list, and values out of range, are refused with
exit code 2 before anything is loaded; `python -m services.ROLE --check-config` prints what would be used and exits.
`k3svc up` and the other commands that start services give one configuration to all roles, and choose ports and
`decode.prefill` themselves.

```toml
[server]
port = 50051

[decode]
prefill = ["127.0.0.1:50052"]
```
"""


def page() -> str:
    """The text of docs/configuration.md."""
    tree = ast.parse(inspect.getsource(config))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    parts = [HEAD]
    defaults = config.Config()
    for section in dataclasses.fields(config.Config):
        values = getattr(defaults, section.name)
        node = classes[type(values).__name__]
        derived = {key.name for key in dataclasses.fields(values) if key.default_factory is config.default_device}
        rows = [
            f"| `{name}` | {kind} | {DEVICES if name in derived else shown(getattr(values, name))} | {text} |"
            for name, kind, text in described(node)
        ]
        parts.append(
            f"\n## `[{section.name}]`\n\n{ast.get_docstring(node)}\n\n"
            "| key | type | default | |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
        )
    return "".join(parts)


def described(node: ast.ClassDef) -> list[tuple[str, str, str]]:
    """(name, type, docstring) of each field, whose docstring follows it."""
    found = []
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            name = field.target.id
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                raise SystemExit(f"k3svc/config.py: {node.name}.{name} has no docstring")
            text = " ".join(str(after.value.value).split()).replace("|", "\\|")
            kind = ast.unparse(field.annotation)
            found.append((name, "list of str" if kind.startswith("tuple[str") else kind, text))
    return found


def shown(value: object) -> str:
    """A default as TOML writes it."""
    text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    if isinstance(value, str):
        text = f'"{value}"'
    if isinstance(value, tuple):
        text = "[]" if not value else str(list(value))
    return f"`{value if text is None else text}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is not current")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE.relative_to(ROOT)} is not current: run scripts/configuration_reference.py")


if __name__ == "__main__":
    main()
