"""The verify-time table of this machine: how long decode steps take by their rows, plain and with drafts.

    python -m training.verify_times [--draft models/k3-nano-dspark] [--set section.key=value]

A decode service with drafts measures the same at its start, and refines it with every step; the scheduler of drafts
asks it how many of them are worth their rows. Prints a table and, as its last line, one JSON object.
"""

import argparse
import asyncio
import json
import logging
from pathlib import Path

from k3svc.config import Config, load_config
from k3svc.core.speculation import VerifyTimes
from k3svc.engine.build import load_model
from k3svc.engine.verify_times import measure_verify_times
from k3svc.model.draft_config import load_draft_config
from training.report import start_log

log = logging.getLogger(__name__)


async def measure(config: Config, num_proposals: int) -> VerifyTimes:
    loaded = load_model(config, lambda *_: None)
    try:
        await loaded.runner.warm_up()
        return await measure_verify_times(
            loaded.runner,
            page_size=config.cache.page_size,
            num_proposals=num_proposals,
            max_batch=config.decode.max_batch,
        )
    finally:
        loaded.runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, default=Path("models/k3-nano-dspark"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    start_log()
    config = load_config(None, ["cache.num_slots=4", "model.device=cpu", *given.set])
    times = asyncio.run(measure(config, load_draft_config(given.draft).num_proposals))
    plain, verify = times.plain.points, times.verify.points
    log.info("%5s %10s %10s", "rows", "plain ms", "verify ms")
    for rows in sorted(plain | verify):
        cells = [f"{points[rows] * 1e3:.2f}" if rows in points else "" for points in (plain, verify)]
        log.info("%5d %10s %10s", rows, *cells)
    table = {
        name: {rows: round(seconds * 1e3, 3) for rows, seconds in points.items()}
        for name, points in (("plain_ms", plain), ("verify_ms", verify))
    }
    log.info("%s", json.dumps({"device": config.model.device, **table}))


if __name__ == "__main__":
    main()
