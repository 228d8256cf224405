"""The logits at the end of prompts, computed in this process by the steps that a prefill service runs.

Loads torch: imported by the one command that needs it.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from k3svc.config import Config
from k3svc.core.batch import ExtendBatch, ExtendRow
from k3svc.core.request import validate_tokens
from k3svc.engine.build import LoadedModel, load_model
from k3svc.errors import ConfigError, EngineFault, InvalidRequest

SLOT = 1
"""One prompt at a time, so the first slot will do."""


def write_logits(
    config: Config, prompts: Sequence[Sequence[int]], out: Path, on_progress: Callable[[str, float], None]
) -> None:
    """Writes logits_i, float32 [vocab], of the last position of prompt i. Raises ConfigError when it cannot write, and
    what compute_logits raises.
    """
    rows = compute_logits(config, prompts, on_progress)
    try:
        with out.open("wb") as file:
            np.savez(file, allow_pickle=False, **{f"logits_{index}": row for index, row in enumerate(rows)})
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error


def compute_logits(
    config: Config, prompts: Sequence[Sequence[int]], on_progress: Callable[[str, float], None]
) -> list[NDArray[np.float32]]:
    """float32 [vocab] for the last position of each prompt, in chunks of prefill.chunk_tokens.

    `on_progress` gets a stage and the share of it that is done. Raises InvalidRequest naming the prompt, ConfigError,
    CheckpointError, BackendError, and EngineFault for logits that are not finite.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequest(f"prompt {index}", "0 tokens", "at least 1 token")
    page_size = config.cache.page_size
    num_pages = max(-(-len(prompt) // page_size) for prompt in prompts)
    loaded = load_model(
        dataclasses.replace(config, cache=dataclasses.replace(config.cache, num_slots=1, num_pages=num_pages)),
        on_progress,
    )
    chunk_tokens = config.prefill.chunk_tokens
    if chunk_tokens % loaded.grid:
        raise ConfigError(f"prefill.chunk_tokens: got {chunk_tokens}; allowed: a multiple of {loaded.grid}")
    for index, prompt in enumerate(prompts):
        validate_tokens(f"prompt {index}", prompt, loaded.model_config.vocab_size)

    async def run() -> list[NDArray[np.float32]]:
        rows = []
        for index, prompt in enumerate(prompts):
            on_progress("prompts", index / len(prompts))
            rows.append(await _last_logits(loaded, prompt, chunk_tokens, page_size))
        return rows

    try:
        return asyncio.run(run())
    finally:
        loaded.runner.close()


async def _last_logits(
    loaded: LoadedModel, prompt: Sequence[int], chunk_tokens: int, page_size: int
) -> NDArray[np.float32]:
    for row in _chunks(prompt, chunk_tokens, page_size):
        output = await loaded.runner.extend(ExtendBatch(rows=[row]), lambda _layer: None)
        if output.failed:
            raise EngineFault(", ".join(output.failed.values()))
    logits: NDArray[np.float32] = loaded.cache.logits([SLOT])[0].cpu().numpy()
    return logits


def _chunks(prompt: Sequence[int], chunk_tokens: int, page_size: int) -> Iterator[ExtendRow]:
    for start in range(0, len(prompt), chunk_tokens):
        end = min(start + chunk_tokens, len(prompt))
        yield ExtendRow(
            key="prompt",
            slot=SLOT,
            block_table=range(1, 1 + -(-end // page_size)),
            token_ids=prompt[start:end],
            start=start,
            is_last=end == len(prompt),
        )
