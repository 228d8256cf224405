"""Runs the draft role. There is no drafter in this version, so the role says so and does not start."""

import sys

from k3svc.config import Config
from k3svc.errors import BackendError
from k3svc.rpc.process import run_role


async def serve(_config: Config, _start: float) -> int:
    """Raises BackendError."""
    raise BackendError("this version of k3svc has no drafter; decode services run without one")


if __name__ == "__main__":
    sys.exit(run_role("draft", serve))
