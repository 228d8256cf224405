"""llama.cpp as the peer of `benchmarks.cpu`: its own bench programs on a GGUF file of the same checkpoint.

`llama-bench` measures prompts, `llama-batched-bench`, which lies beside it, decode steps of several sequences. The
settings that do best here are found first, apart for prompts, for one sequence and for several: float32 or bfloat16
weights, flash attention on or off, rows of a step. Everything else is llama.cpp's default; its MLA rows are float16.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_gguf import write_gguf

BATCHED = "llama-batched-bench"
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
ROWS = (128, 512, 2048)
"""Rows of a step (-ub) that are tried for prompts."""
STEPS = 16
"""Decode steps of a measurement."""
SHARED_FROM = 512
"""Sequences behind more tokens share one prompt and its rows, which saves llama.cpp both the prompts and reading them
once a sequence: it copies no prompt of a model with states.
"""
SPARE = 256
"""Tokens that llama.cpp rounds the room of a context to."""
TRIED_PROMPT = 512
TRIED_CONTEXT = 128
TRIED_BATCH = 16
LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What may be chosen of a run."""

    dtype: str
    flash: bool
    rows: int = 512

    def __str__(self) -> str:
        return f"{self.dtype}, flash attention {'on' if self.flash else 'off'}, {self.rows} rows"


class LlamaCpp:
    """The bench programs, and the files of one model: a `Peer`."""

    parts = ("prompts", "batches", "decode")

    def __init__(self, bench: Path, checkpoint: Path, folder: Path, name: str, threads: int) -> None:
        """Writes the files that are not there yet. Raises SystemExit naming a program that is missing."""
        for program in (bench, bench.with_name(BATCHED)):
            if not program.is_file():
                raise SystemExit(f"--llama-bench: no {program}; docs/performance.md says how to build it")
        self._bench = bench
        self._threads = threads
        self._files = {dtype: folder / f"{name}-{dtype}.gguf" for dtype in DTYPES}
        for dtype, path in self._files.items():
            if not path.exists():
                write_gguf(checkpoint, path, DTYPES[dtype])
        plain = [Settings(dtype=dtype, flash=flash) for dtype in DTYPES for flash in (False, True)]
        best = max(plain, key=self._try_prompt)
        rows = [best, *(replace(best, rows=count) for count in ROWS if count != best.rows)]
        self.of_prompts = max(rows, key=self._try_prompt)
        rates = {tried: self.decode(TRIED_CONTEXT, [1, TRIED_BATCH], tried) for tried in plain}
        self.of_one = max(plain, key=lambda tried: rates[tried][1])
        self.of_several = max(plain, key=lambda tried: rates[tried][TRIED_BATCH])

    def settings(self) -> dict[str, str]:
        """Those that were chosen."""
        return {
            "prompts": str(self.of_prompts),
            "decode_1": str(self.of_one),
            "decode_several": str(self.of_several),
        }

    def prompts(self, lengths: list[int], settings: Settings | None = None) -> dict[int, float]:
        """Tokens/s of one prompt of each length, after one to warm up."""
        chosen = settings or self.of_prompts
        found = json.loads(
            self._run(
                self._bench,
                chosen,
                ["-p", ",".join(map(str, lengths)), "-n", "0", "-r", "1", "-o", "json", "-fa", str(int(chosen.flash))],
            )
        )
        return {int(case["n_prompt"]): float(case["avg_ts"]) for case in found}

    def decode(self, context: int, batches: list[int], settings: Settings | None = None) -> dict[int, float]:
        """Tokens/s of decode steps of each number of sequences behind `context` tokens, their own up to SHARED_FROM."""
        groups = {settings: batches} if settings else {}
        if settings is None:
            for batch in batches:
                groups.setdefault(self.of_one if batch == 1 else self.of_several, []).append(batch)
        return {
            int(case["pl"]): float(case["speed_tg"])
            for chosen, sizes in groups.items()
            for case in self._batched(chosen, context, sizes, shared=context > SHARED_FROM)
        }

    def batch_prompts(self, tokens: int, batches: list[int]) -> dict[int, float]:
        """Tokens/s of as many prompts of this length at once."""
        cases = self._batched(self.of_prompts, tokens, batches, shared=False)
        return {int(case["pl"]): float(case["speed_pp"]) for case in cases}

    def _try_prompt(self, settings: Settings) -> float:
        return self.prompts([TRIED_PROMPT], settings)[TRIED_PROMPT]

    def _batched(self, settings: Settings, context: int, batches: list[int], *, shared: bool) -> list[Any]:
        """One JSON object a number of sequences, with a prompt each, or a shared one."""
        prompts = 1 if shared else max(batches)
        room = prompts * context + max(batches) * STEPS + SPARE
        lengths = ["-c", str(room), "-npp", str(context), "-ntg", str(STEPS), "-npl", ",".join(map(str, batches))]
        more = ["-pps", "-kvu"] if shared else []
        flash = ["-fa", "on" if settings.flash else "off", "--output-format", "jsonl"]
        output = self._run(self._bench.with_name(BATCHED), settings, [*lengths, *flash, *more])
        found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if [case["pl"] for case in found] != batches:
            raise SystemExit(f"{BATCHED} measured {[case['pl'] for case in found]} sequences, not {batches}")
        return found

    def _run(self, program: Path, settings: Settings, arguments: list[str]) -> str:
        """What a program prints."""
        common = ["-m", str(self._files[settings.dtype]), "-t", str(self._threads), "-b", "2048"]
        command = [str(program), *common, "-ub", str(settings.rows), *arguments]
        try:
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(str(error.stderr)[-2000:], file=sys.stderr)
            raise SystemExit(f"{program.name} failed: {error}") from error
        return done.stdout
