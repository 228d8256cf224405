"""Entry point of the command `k3svc`.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 ended by Ctrl-C, 143 by SIGTERM. Errors are one line.
"""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Runs the command line and exits."""
    signal.signal(signal.SIGINT, _quit)
    from k3svc.cli.app import run  # noqa: PLC0415  Ctrl-C while it loads shall be as quiet as later

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run())


def _quit(_number: int, _frame: FrameType | None) -> None:
    # Nothing has been started yet, and an exception in the middle of an import may be swallowed or reported.
    os._exit(INTERRUPTED)
