"""A prompt that goes on from the prefix cache hands over the bits of one computed whole: states, rows, logits."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from k3svc.config import CPU_KERNELS, load_config
from k3svc.engine.build import PrefillRole, build_prefill
from k3svc.engine.ports import PrefillCall
from k3svc.transfer.manifest import PrefillDone, StateManifest

NANO = Path(__file__).parents[2] / "models" / "k3-nano"
VOCAB = 3800
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not CPU_KERNELS.exists(), reason="no kernels for cpu")),
    "reference",
]


@asynccontextmanager
async def prefill(device: str, *settings: str) -> AsyncIterator[PrefillRole]:
    base = [f'model.path="{NANO}"', f"model.device={device}", "cache.num_pages=96", "cache.num_slots=4"]
    base.append("cache.prefix_min_tokens=0")
    role = build_prefill(load_config(None, [*base, "prefill.frame_bytes=65536", *settings]), lambda *_: None)
    loop = asyncio.create_task(role.engine.run())
    try:
        yield role
        role.engine.scheduler.check()
        role.engine.drain()
        await loop
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        role.loaded.runner.close()


async def hand_over(role: PrefillRole, name: str, prompt: Sequence[int]) -> tuple[dict[str, bytes], PrefillDone]:
    """The bytes of each tensor, put together as decode does, and the end of the hand-off."""
    call = PrefillCall(request_id=name, attempt=1, prompt=tuple(prompt), fingerprint=role.loaded.fingerprint)
    data: dict[str, bytearray] = {}
    names: list[str] = []
    landed = 0
    done: PrefillDone | None = None
    async for event in role.engine.open(call):
        if isinstance(event, StateManifest):
            names = [spec.name for spec in event.tensors]
            data = {spec.name: bytearray(spec.nbytes) for spec in event.tensors}
        elif isinstance(event, PrefillDone):
            done = event
        else:
            for frame in event:
                data[names[frame.tensor]][frame.offset : frame.offset + frame.nbytes] = frame.data
                landed += frame.nbytes
    role.engine.release(name, 1)
    assert done is not None
    assert landed == sum(len(tensor) for tensor in data.values())
    return {tensor: bytes(value) for tensor, value in data.items()}, done


def make_prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Prompts that begin with parts of earlier ones."""
    prompts: list[list[int]] = []
    for _ in range(count):
        size = rng.choice((1, 64, 127, 128, 129, 193, 256, 257, rng.randint(2, longest)))
        head = rng.choice(prompts)[: rng.choice((64, 128, 200, 256, longest))] if prompts else []
        rest = [rng.randrange(VOCAB) for _ in range(size)]
        prompts.append((head + rest)[:longest])
    return prompts


@pytest.mark.parametrize("device", DEVICES)
def test_a_hit_gives_the_bits_of_the_whole_prompt(device: str) -> None:
    prompts = make_prompts(random.Random(5), 14 if device == "cpu" else 8, 420)

    async def run() -> None:
        async with prefill(device, "cache.prefix=off", "prefill.chunk_tokens=256") as cold:
            assert cold.engine.scheduler.cache is None
            whole = [(await hand_over(cold, f"r{i}", prompt))[0] for i, prompt in enumerate(prompts)]
        small = ("prefill.chunk_tokens=192", "cache.prefix_interval=64", "cache.prefix_snapshots=12")
        async with prefill(device, *small) as warm:
            hits = 0
            for i, prompt in enumerate(prompts):
                got, done = await hand_over(warm, f"r{i}", prompt)
                assert got == whole[i], f"prompt {i} of {len(prompt)} tokens, {done.cached_tokens} from the cache"
                hits += done.cached_tokens > 0
            assert hits >= 3
            # Again, two at a time, each with what all of them left behind.
            for i in range(0, len(prompts), 2):
                pair = await asyncio.gather(*(hand_over(warm, f"s{j}", prompts[j]) for j in (i, i + 1)))
                assert [got for got, _ in pair] == whole[i : i + 2]
                for (_, done), prompt in zip(pair, prompts[i : i + 2], strict=True):
                    assert done.cached_tokens <= max(0, len(prompt) - 1)
            assert warm.engine.flush_cache() > 0
            assert warm.loaded.cache.spec.num_pages == warm.engine.scheduler.pages.num_free
            got, done = await hand_over(warm, "again", prompts[-1])
            assert (done.cached_tokens, got) == (0, whole[-1])

    asyncio.run(run())


def test_a_state_restored_wrongly_would_be_noticed() -> None:
    """The comparison above sees a snapshot that is one bit off."""
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(200)]

    async def run() -> None:
        async with prefill("reference") as role:
            whole, _ = await hand_over(role, "a", prompt)
            assert role.engine.scheduler.cache is not None
            node = role.engine.scheduler.cache.match("", prompt).node
            assert node.snapshot is not None
            state = role.loaded.cache.state_bytes(role.loaded.cache.spec.kda_layers[0], node.snapshot)
            # The sign of one element; the lowest bit of one would be lost in what follows.
            state[3:4] = bytes([bytes(state[3:4])[0] ^ 0x80])
            got, done = await hand_over(role, "b", prompt)
            assert done.cached_tokens == 128
            assert got != whole

    asyncio.run(run())
