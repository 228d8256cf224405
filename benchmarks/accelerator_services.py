"""k3-nano on the card through the real services: golden tokens in float32, and the seconds to the first of them."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NANO = Path("models/k3-nano")
TOKENS = 48


def golden(device: str, *options: str) -> dict[str, Any]:
    """Runs the prompts of the golden file through prefill and decode services of a device, all at once."""
    prompts = json.loads((NANO / "golden.json").read_text())["prompts"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([prompt["ids"] for prompt in prompts], file)
        file.flush()
        started = time.perf_counter()
        command = [sys.executable, "-m", "k3svc.cli", "generate", "--model", str(NANO), "--device", device]
        command += ["--tokens-file", file.name, "--max-tokens", str(TOKENS), "--temperature", "0", "--ignore-eos"]
        run = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
    if run.returncode:
        return {"device": device, "options": options, "failure": run.stderr[-3000:] or run.stdout[-3000:]}
    answers = json.loads(run.stdout)
    equal = [
        answer.get("token_ids") == prompt["continuation_ids"] for answer, prompt in zip(answers, prompts, strict=True)
    ]
    return {"device": device, "options": options, "equal": sum(equal), "of": len(equal), "whole_s": round(seconds, 1)}
