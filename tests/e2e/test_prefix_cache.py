"""The prefix cache through services: the same tokens with hits as without, never a hit on a prompt of somebody else."""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient
from k3svc.config import AuthSection, TlsSection, load_config
from k3svc.engine.prefill import PrefillEngine
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.credentials import CallerCredentials
from k3svc.testing.fakes import expected_tokens
from k3svc.text.tokenizer import Tokenizer
from tests.e2e.pki import new_pki
from tests.e2e.rpc_stack import MIB, NANO, PROMPT, Served, decode_role, prefill_role, served, until_idle
from tests.e2e.test_security import ALICE, BOB

GOLDEN = json.loads((NANO / "golden.json").read_text())["prompts"]


def conversation(turns: int) -> list[list[int]]:
    """Prompts of a chat: each has the one before it as its beginning."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3800) for _ in range(150)]]
    while len(prompts) < turns:
        prompts.append(prompts[-1] + [rng.randrange(3800) for _ in range(rng.choice((1, 40, 64, 90)))])
    return prompts


async def greedy(client: AsyncClient, prompt: list[int], count: int = 12) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt came from the cache."""
    result = await client.generate(tokens=prompt, max_tokens=count, temperature=0.0, ignore_eos=True).result()
    return list(result.token_ids), result.usage.cached_tokens


@pytest.mark.slow
async def test_tokens_through_services_are_the_same_with_hits_and_after_a_kill() -> None:
    base = [f"model.path={NANO}", "cache.num_pages=128", "cache.num_slots=16", "log.level=warning"]
    prompts = [*(golden["ids"] for golden in GOLDEN), *conversation(4)]
    async with Stack(load_config(None, [*base, "cache.prefix=off"])) as stack, AsyncClient(stack.decode_endpoints) as c:
        plain = [await greedy(c, prompt) for prompt in prompts]
    assert [cached for _, cached in plain] == [0] * len(prompts)
    assert all(tokens == golden["continuation_ids"][:12] for (tokens, _), golden in zip(plain, GOLDEN, strict=False))
    settings = [*base, "cache.prefix=on", "cache.prefix_interval=64", "cache.prefix_min_tokens=0"]
    async with (
        Stack(load_config(None, settings), prefill=2) as stack,
        AsyncClient(stack.decode_endpoints) as client,
    ):
        for prompt, (want, _) in zip(prompts, plain, strict=True):
            # Whichever of the two prefill services is chosen, one of them is asked twice.
            asked = [await greedy(client, prompt) for _ in range(3)]
            assert [tokens for tokens, _ in asked] == [want] * 3
            assert max(cached for _, cached in asked) == (len(prompt) - 1) // 64 * 64
        both = await asyncio.gather(*(greedy(client, prompt) for prompt in prompts * 2))
        assert [tokens for tokens, _ in both] == [want for want, _ in plain] * 2
        victim = next(process for process in stack.processes.values() if process.role == "prefill")
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        for prompt, (want, _) in zip(prompts, plain, strict=True):
            assert (await greedy(client, prompt))[0] == want


@asynccontextmanager
async def guarded(
    *, tls: TlsSection | None = None, auth: AuthSection | None = None, credentials: CallerCredentials
) -> AsyncIterator[tuple[Served, Served, PrefillEngine]]:
    """Prefill with a cache, and decode with keys or certificates in front of it."""
    async with AsyncExitStack() as cleanup:
        role, engine, _, _ = prefill_role(snapshots=8)
        prefill = await cleanup.enter_async_context(served(role))
        peer = GrpcPrefillPeer(prefill.address, timeout_s=20.0, max_message_bytes=MIB)
        cleanup.push_async_callback(peer.close)
        role, _, _ = decode_role([peer], Tokenizer.load(NANO))
        decode = await cleanup.enter_async_context(served(role, tls=tls, auth=auth, credentials=credentials))
        yield decode, prefill, engine


async def cached_of(address: str, credentials: CallerCredentials) -> int:
    async with AsyncClient(address, credentials=credentials) as client:
        result = await client.generate(tokens=PROMPT, max_tokens=8, seed=5, skip_text=True).result()
    assert list(result.token_ids) == expected_tokens(PROMPT, 8, seed=5)
    return result.usage.cached_tokens


async def test_callers_with_other_keys_do_not_share(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[alice]\ntoken = "{ALICE}"\n[bob]\ntoken = "{BOB}"\n')
    callers = []
    for name, token in (("alice", ALICE), ("bob", BOB)):
        (tmp_path / name).write_text(token)
        callers.append(CallerCredentials(token_file=tmp_path / name))
    alice, bob = callers
    async with guarded(auth=AuthSection(keys=str(keys)), credentials=alice) as (decode, prefill, engine):
        got = [await cached_of(decode.address, caller) for caller in (alice, bob, alice, bob)]
        assert got == [0, 0, 48, 48]
        assert engine.scheduler.cache is not None
        assert {stored.namespace for stored in engine.scheduler.cache.contents()} == {"key alice", "key bob"}
        await until_idle(prefill.channel)


async def test_callers_with_other_certificates_do_not_share(tmp_path: Path) -> None:
    pki = new_pki(tmp_path / "pki")
    callers = []
    for name in ("alice", "bob"):
        certificate, key = pki.issue(name, f"{name}.example")
        callers.append(CallerCredentials(ca=pki.ca_file, certificate=certificate, key=key))
    alice, bob = callers
    tls = pki.tls("role", "127.0.0.1", mutual=True)
    async with guarded(tls=tls, credentials=alice) as (decode, prefill, _):
        got = [await cached_of(decode.address, caller) for caller in (alice, bob, alice, bob)]
        assert got == [0, 0, 48, 48]
        await until_idle(prefill.channel)
