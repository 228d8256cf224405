"""Real role processes with the drafts that ship: nothing that happens to the draft service changes a token."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient, Completion
from k3svc.config import load_config

MODELS = Path(__file__).parents[2] / "models"
GOLDEN = json.loads((MODELS / "k3-nano" / "golden.json").read_text())["prompts"]
SETTINGS = (
    f"model.path={MODELS / 'k3-nano'}",
    "cache.num_pages=640",
    "cache.num_slots=64",
    "log.level=warning",
    "speculation.govern=false",
    "speculation.ngram_proposals=0",
    "speculation.max_wait_s=0.2",
)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def serving(draft: str, *settings: str) -> AsyncIterator[tuple[Stack, AsyncClient]]:
    path = (f"draft.path={MODELS / f'k3-nano-{draft}'}",) if draft else ()
    async with (
        Stack(load_config(None, [*SETTINGS, *path, *settings])) as stack,
        AsyncClient(stack.decode_endpoints) as client,
    ):
        yield stack, client


async def complete(client: AsyncClient, tokens: list[int], **options: Any) -> Completion:
    return await client.generate(tokens=tokens, **options).result()


async def tokens_made(stack: Stack, client: AsyncClient) -> int:
    return (await client.load(stack.decode_endpoints[0])).num_tokens


async def kill_at(stack: Stack, client: AsyncClient, counts: list[int]) -> None:
    """Kills the draft service each time so many tokens have been made, and starts it again."""
    for count in counts:
        while await tokens_made(stack, client) < count:
            await asyncio.sleep(0.005)
        await stack.kill("draft-0")
        await stack.restart("draft-0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[tuple[Stack, AsyncClient]]:
    async with serving("dspark", "prefill.chunk_tokens=64") as served:
        yield served


async def test_prompt_features_reach_the_draft_service_while_prefill_computes(shared: tuple[Stack, AsyncClient]):
    stack, client = shared
    endpoint = stack.draft_endpoint
    assert endpoint is not None
    rng = random.Random(1)
    # The first prompt makes prefill connect.
    await complete(client, [1, 2, 3], max_tokens=1)
    while (before := (await client.load(endpoint)).handoff_bytes) == 0:
        await asyncio.sleep(0.005)
    # The window of this draft holds the last 512 tokens; they are pushed chunk by chunk. Where the processes take turns
    # on few cores, a look may come too late; not for one prompt after another.
    during: set[int] = set()
    for _ in range(10):
        prompt = [rng.randrange(3800) for _ in range(1500)]
        computed = (await client.load(stack.prefill_endpoints[0])).num_tokens + len(prompt)
        request = asyncio.create_task(complete(client, prompt, max_tokens=8, temperature=0.0, ignore_eos=True))
        during = set()
        while not request.done():
            arrived = (await client.load(endpoint)).handoff_bytes - before
            if (await client.load(stack.prefill_endpoints[0])).num_tokens < computed:
                during.add(arrived)
        await request
        before = (await client.load(endpoint)).handoff_bytes
        if len(during - {0}) >= 2:
            break
    assert len(during - {0}) >= 2, f"features of a prompt arrived all at once, or after it: {during}"


async def test_a_killed_draft_service_changes_no_token_and_is_used_again(shared: tuple[Stack, AsyncClient]):
    stack, client = shared
    made = await tokens_made(stack, client)
    killer = asyncio.create_task(kill_at(stack, client, [made + random.Random(3).randrange(10, 60)]))
    accepted = 0
    # The first rounds are disturbed; the last one finds the service back.
    while not killer.done() or accepted == 0:
        was_done = killer.done()
        results = await asyncio.gather(
            *(complete(client, golden["ids"], max_tokens=48, temperature=0.0, ignore_eos=True) for golden in GOLDEN)
        )
        for result, golden in zip(results, GOLDEN, strict=True):
            assert list(result.token_ids) == golden["continuation_ids"]
        if was_done:
            accepted = sum(result.speculation.accepted for result in results)
    killer.result()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("draft", ["dspark", "dflash"])
async def test_200_requests_are_what_plain_decode_makes_of_them_while_the_draft_service_is_killed(draft: str):
    requests = mixed_requests(200)
    async with serving("") as (_, client):
        plain = await asyncio.gather(*(complete(client, prompt, **options) for prompt, options in requests))
    total = sum(len(result.token_ids) for result in plain)
    rng = random.Random(7)
    async with serving(draft) as (stack, client):
        kills = sorted(rng.randrange(1, total * 2 // 3) for _ in range(4))
        killer = asyncio.create_task(kill_at(stack, client, kills))
        drafted = await asyncio.gather(*(complete(client, prompt, **options) for prompt, options in requests))
        await killer
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert [result.text for result in drafted] == [result.text for result in plain]
    assert sum(result.speculation.accepted for result in drafted) > 0


def mixed_requests(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 0.7, "stop": ["import", "\n\n"]},
    ]
    prompts = [golden["ids"] for golden in GOLDEN]
    made = []
    for index in range(count):
        prompt = rng.choice(prompts)
        cut = rng.randrange(1, len(prompt) + 1)
        made.append((prompt[:cut], {"max_tokens": rng.randint(1, 48), "seed": index, **rng.choice(kinds)}))
    return made
