"""Several prefill and decode services on real sockets that come, go and die under load. All run a model whose tokens
depend on every byte of state; each token is compared with one that is computed from the prompt alone.
"""

import asyncio
import contextlib
import json
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from k3svc.client import AsyncClient, Balance, RetryPolicy
from k3svc.core.targets import Affinity, ranked
from k3svc.engine.decode import DecodeEngine
from k3svc.engine.peers import PrefillPeers
from k3svc.engine.ports import PrefillCall
from k3svc.engine.prefill import PrefillEngine
from k3svc.engine.prefill_job import Handoff
from k3svc.errors import Unavailable
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.credentials import CallerCredentials
from k3svc.rpc.discovery import Address, Discovery
from k3svc.rpc.prefill_targets import PrefillTargets
from k3svc.testing.fakes import VOCAB, expected_tokens
from k3svc.text.tokenizer import Tokenizer
from tests.e2e.pki import new_pki
from tests.e2e.rpc_stack import MIB, NANO, Served, decode_role, prefill_role, served
from tests.e2e.test_rpc_lifecycle import start_python

AFFINITY = Affinity(num_blocks=2, block_tokens=16)
REFRESH_S = 0.02
RETRY = RetryPolicy(attempts=20, backoff_s=0.01, max_backoff_s=0.05)
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


@dataclass(kw_only=True)
class Prefill:
    served: Served
    engine: PrefillEngine
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    """Those that came, each attempt once."""


@dataclass(kw_only=True)
class Decode:
    served: Served
    engine: DecodeEngine


def prompt_of(prefix: int, index: int) -> tuple[int, ...]:
    """Two blocks that are those of the prefix, and a rest of its own."""
    return (
        *((prefix * 7 + i * i) % VOCAB for i in range(32)),
        *((index * 5 + i) % VOCAB for i in range(3 + index % 9)),
    )


def write(path: Path, addresses: Iterable[str]) -> None:
    """In one turn, as a reader must see it."""
    (path.parent / "next").write_text("\n".join(addresses))
    (path.parent / "next").replace(path)


@contextlib.asynccontextmanager
async def prefill_service() -> AsyncIterator[Prefill]:
    role, engine, _, _ = prefill_role()
    here: list[tuple[int, ...]] = []
    open_ = engine.open

    def note(call: PrefillCall) -> Handoff:
        here.append(call.prompt)
        return open_(call)

    engine.open = note  # type: ignore[method-assign]
    async with served(role) as service:
        yield Prefill(served=service, engine=engine, prompts=here)


@contextlib.asynccontextmanager
async def decode_service(
    prefill: Sequence[str], tokenizer: Tokenizer, *, refresh_s: float = REFRESH_S
) -> AsyncIterator[Decode]:
    targets = PrefillTargets(Discovery(prefill), make_peer, refresh_s=refresh_s)
    role, engine, _ = decode_role(await targets.discover(), tokenizer)
    engine._instance = secrets.token_hex(4)
    engine.peers = PrefillPeers(await targets.discover(), asyncio.get_running_loop().time, AFFINITY)
    targets.start(engine.peers)
    try:
        async with served(role) as service:
            yield Decode(served=service, engine=engine)
    finally:
        await targets.stop()


def make_peer(address: Address, credentials: CallerCredentials | None = None) -> GrpcPrefillPeer:
    return GrpcPrefillPeer(
        address.target,
        timeout_s=20.0,
        max_message_bytes=MIB,
        credentials=credentials,
        options=address.channel_options(),
    )


@contextlib.asynccontextmanager
async def client_of(*endpoints: str, refresh_s: float = REFRESH_S) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(endpoints, retry=RETRY, balance=Balance(refresh_s=refresh_s)) as client:
        yield client


async def ask(client: AsyncClient, prompt: Sequence[int], seed: int) -> None:
    """One request, every token of which must be right."""
    result = await client.generate(
        tokens=prompt, seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True, skip_text=True
    ).result()
    assert list(result.token_ids) == expected_tokens(prompt, MAX_TOKENS, seed=seed)


async def until(holds: Callable[[], bool]) -> None:
    """The test's timeout ends it otherwise."""
    while not holds():
        await asyncio.sleep(0.002)


class Load:
    """Requests one after another on each of some lanes, until it is stopped."""

    def __init__(self, client: AsyncClient, lanes: int) -> None:
        self.num_done = 0
        self._client = client
        self._stopping = False
        self._tasks = [asyncio.create_task(self._run(lane)) for lane in range(lanes)]

    async def _run(self, lane: int) -> None:
        serial = 0
        while not self._stopping:
            index = lane + serial * len(self._tasks)
            await ask(self._client, prompt_of(index % 40, index), seed=index)
            serial += 1
            self.num_done += 1

    async def more(self, count: int) -> None:
        """So many more have ended well."""
        goal = self.num_done + count
        await until(lambda: self.num_done >= goal or any(task.done() for task in self._tasks))
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


async def test_services_come_and_go_under_load_without_a_lost_request(tokenizer: Tokenizer, tmp_path: Path):
    prefill_file, decode_file = tmp_path / "prefill", tmp_path / "decode"
    async with contextlib.AsyncExitStack() as services:
        first_prefill = contextlib.AsyncExitStack()
        old_prefill = await first_prefill.enter_async_context(prefill_service())
        prefills = [old_prefill, *[await services.enter_async_context(prefill_service()) for _ in range(2)]]
        addresses = [prefill.served.address for prefill in prefills]
        write(prefill_file, addresses[:2])
        first_decode = contextlib.AsyncExitStack()
        enter = first_decode.enter_async_context
        decodes = []
        for _ in range(3):
            decodes.append(await enter(decode_service([f"file:{prefill_file}"], tokenizer)))
            enter = services.enter_async_context
        endpoints = [decode.served.address for decode in decodes]
        write(decode_file, endpoints[:2])
        client = await services.enter_async_context(client_of(f"file:{decode_file}"))

        load = Load(client, lanes=5)
        await load.more(10)
        assert not prefills[2].prompts
        write(prefill_file, addresses)
        write(decode_file, endpoints)
        await until(lambda: endpoints[2] in client.endpoints)
        await until(lambda: all(addresses[2] in decode.engine.peers.names for decode in decodes))
        await load.more(40)
        assert prefills[2].prompts, "a new prefill service gets its share of the prefixes"
        assert decodes[2].engine.load().outcomes["finished"] > 0

        write(prefill_file, addresses[1:])
        write(decode_file, endpoints[1:])
        await until(lambda: endpoints[0] not in client.endpoints)
        await until(lambda: all(addresses[0] not in decode.engine.peers.names for decode in decodes))
        await until(lambda: decodes[0].engine.load().running == decodes[0].engine.load().in_transfer == 0)
        await first_decode.aclose()
        await until(lambda: not old_prefill.engine.load().in_transfer and not old_prefill.engine.load().running)
        seen = len(old_prefill.prompts)
        await first_prefill.aclose()
        await load.more(20)
        assert len(old_prefill.prompts) == seen, "who has left is asked no more"
        await load.stop()
        assert [decode.engine.load().outcomes["failed"] for decode in decodes] == [0, 0, 0]


async def test_prompts_that_begin_alike_meet_at_one_prefill_service_from_wherever_they_come(tokenizer: Tokenizer):
    async with prefill_service() as a, prefill_service() as b:
        addresses = [a.served.address, b.served.address]
        # Nobody reports: one request after another leaves no load, but a report of the one before may be late.
        async with (
            decode_service(addresses, tokenizer, refresh_s=1000.0) as first,
            decode_service(addresses[::-1], tokenizer, refresh_s=1000.0) as second,
            client_of(first.served.address, second.served.address, refresh_s=0.0) as client,
        ):
            for index in range(32):
                await ask(client, prompt_of(index % 8, index), seed=index)
            assert {state.chosen for state in client.endpoint_states()} == {16}, "requests are shared evenly"
        prefixes = [Counter(prompt[:32] for prompt in prefill.prompts) for prefill in (a, b)]
        assert not set(prefixes[0]) & set(prefixes[1])
        assert set((prefixes[0] + prefixes[1]).values()) == {4}
        for prefix in prefixes[0] + prefixes[1]:
            favourite = ranked(AFFINITY.key(prefix), addresses)[0]
            assert prefix in prefixes[addresses.index(favourite)]


@pytest.mark.slow
async def test_a_killed_favourite_is_left_at_once_and_comes_back(tokenizer: Tokenizer):
    process = start_python("tests/e2e/rpc_stack.py")
    assert process.stdout is not None
    mortal = json.loads(await asyncio.to_thread(process.stdout.readline))["address"]
    async with contextlib.AsyncExitStack() as services:
        other = await services.enter_async_context(prefill_service())
        targets = [mortal, other.served.address]
        decode = await services.enter_async_context(decode_service(targets, tokenizer))
        client = await services.enter_async_context(client_of(decode.served.address))
        prefix = next(p for p in range(100) if ranked(AFFINITY.key(prompt_of(p, 0)), targets)[0] == mortal)
        try:
            await ask(client, prompt_of(prefix, 1), seed=1)
            assert not other.prompts
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.communicate)
            for index in range(2, 7):
                await ask(client, prompt_of(prefix, index), seed=index)
            assert len(other.prompts) == 5
            process = start_python("tests/e2e/rpc_stack.py", "--set", f"server.port={mortal.rpartition(':')[2]}")
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            await until(lambda: not decode.engine.peers._members[mortal].is_down)
            for index in range(7, 10):
                await ask(client, prompt_of(prefix, index), seed=index)
            assert len(other.prompts) == 5, "the prefix is back where it was"
        finally:
            process.kill()
            await asyncio.to_thread(process.communicate)


async def test_a_decode_service_that_drains_gets_nothing_new(tokenizer: Tokenizer):
    async with (
        prefill_service() as prefill,
        decode_service([prefill.served.address], tokenizer) as first,
        decode_service([prefill.served.address], tokenizer) as second,
        client_of(first.served.address, second.served.address) as client,
    ):
        load = Load(client, lanes=3)
        await load.more(6)
        first.served.server.request_drain()
        await load.more(20)
        await load.stop()
        before = second.engine.load().outcomes["finished"]
        for index in range(4):
            await ask(client, prompt_of(1, index), seed=index)
        assert second.engine.load().outcomes["finished"] == before + 4


async def test_addresses_of_a_name_are_reached_under_the_certificate_of_the_name(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By client and by decode; an address of a list is not, since the certificate has not got it."""

    async def look_up(host: str, port: int, **kind: Any) -> list[Any]:
        assert host in ("prefill.example", "decode.example")
        return [(None, None, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    pki = new_pki(tmp_path / "pki")
    role, prefill_engine, _, _ = prefill_role()
    async with served(role, tls=pki.tls("prefill", "prefill.example"), credentials=pki.caller()) as prefill:
        port = prefill.address.rpartition(":")[2]
        targets = PrefillTargets(
            Discovery([f"dns:///prefill.example:{port}"]),
            partial(make_peer, credentials=pki.caller()),
            refresh_s=REFRESH_S,
        )
        role, engine, _ = decode_role(await targets.discover(), tokenizer)
        targets.start(engine.peers)
        async with served(role, tls=pki.tls("decode", "decode.example"), credentials=pki.caller()) as decode:
            name = f"decode.example:{decode.address.rpartition(':')[2]}"
            async with AsyncClient(f"dns:///{name}", retry=RETRY, credentials=pki.caller()) as client:
                await ask(client, prompt_of(1, 1), seed=1)
                assert client.endpoints == (decode.address,)
            async with AsyncClient(
                decode.address, retry=RetryPolicy(attempts=1), credentials=pki.caller()
            ) as by_address:
                with pytest.raises(Unavailable):
                    await ask(by_address, prompt_of(1, 1), seed=1)
        await targets.stop()
    assert prefill_engine.load().num_tokens == len(prompt_of(1, 1))
