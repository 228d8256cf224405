"""`k3svc up` with fake roles, in a process of its own.

python fake_up.py MODEL LOG_DIR RESTART PREFILL_BEHAVIOUR DECODE_BEHAVIOUR
"""

import asyncio
import sys
from pathlib import Path

import typer

from k3svc.cli import app, up
from k3svc.cli.main import main
from k3svc.cli.session import show
from k3svc.cli.stack import Stack
from k3svc.config import Config, ModelSection

model, log_dir, restart, *behaviours = sys.argv[1:]
script = str(Path(__file__).with_name("fake_role.py"))
stack = Stack(
    Config(model=ModelSection(path=model)),
    log_dir=Path(log_dir),
    on_progress=show,
    command=lambda role, config: (
        script,
        role,
        str(config),
        dict(zip(("prefill", "decode"), behaviours, strict=True))[role],
    ),
)


def fake_app(**_: object) -> int:
    try:
        asyncio.run(up._serve(stack, restart=restart == "restart"))
    except typer.Exit as ended:
        return ended.exit_code
    return 0


app.app = fake_app  # type: ignore[assignment]
main()
