"""Runs a draft service: python -m services.draft --config draft.toml"""

import sys
from collections.abc import Coroutine
from typing import Any

from k3svc.config import Config
from k3svc.rpc.process import run_role


def serve(config: Config, start: float) -> Coroutine[Any, Any, int]:
    """The role at work."""
    from services.draft.role import serve_draft  # noqa: PLC0415  loads torch, which takes seconds

    return serve_draft(config, start)


if __name__ == "__main__":
    sys.exit(run_role("draft", serve))
