"""Progress lines of the training programs, on standard output."""

import logging
import sys


def start_log() -> None:
    """Log bare messages to standard output from now on."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
