"""The prefix cache as a gateway sees it: hits in usage, SubscribeKvEvents, FlushCache, and who may call them."""

import asyncio
import hashlib
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb2

from k3svc.config import AuthSection
from k3svc.core.prefix_cache import Cleared
from k3svc.errors import TransferError
from k3svc.gateway import kv_events
from k3svc.gateway.kv_events import KvEvents
from k3svc.gateway.launch import GatewayOptions, smg_command
from k3svc.rpc.process import hold_port
from k3svc.testing.fakes import expected_tokens
from tests.e2e.rpc_stack import NANO, PROMPT, prefill_role
from tests.e2e.test_gateway_protocol import SEED, Pair, messages, pair, request_of, stub_of

BLOCKS = [list(PROMPT[i : i + 16]) for i in (0, 16, 32)]
"""The full pages of PROMPT, 57 tokens; the last state lies after them."""


async def generate(running: Pair, name: str, room: int) -> pb2.GenerateComplete:
    request = request_of(running, request_id=name, room=room)
    prefill = asyncio.ensure_future(messages(stub_of(running.prefill).Generate(request)))
    answer = await messages(stub_of(running.decode).Generate(request))
    leg = await prefill
    assert leg[-1].complete.cached_tokens == answer[-1].complete.cached_tokens, "a gateway may take it from either"
    assert answer[-1].HasField("complete")
    assert list(answer[-1].complete.output_ids) == expected_tokens(PROMPT, 12, seed=SEED)
    return answer[-1].complete


def subscribe(running: Pair, start: int = 0) -> Any:
    request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
    return stub_of(running.prefill).SubscribeKvEvents(request)


async def test_a_gateway_is_told_what_is_cached_and_usage_says_what_came_of_it() -> None:
    async with pair(snapshots=8) as running:
        early = subscribe(running)
        first = await early.read()
        assert (first.sequence_number, first.snapshot.count, first.snapshot.blocks) == (1, 1, 0)
        assert [event.WhichOneof("data") for event in first.events] == ["cleared"]

        complete = await generate(running, "a", 1)
        assert (complete.prompt_tokens, complete.cached_tokens) == (57, 0)
        second = await early.read()
        assert second.sequence_number == 2 and not second.HasField("snapshot")
        (event,) = second.events
        assert [list(block.token_ids) for block in event.stored.blocks] == BLOCKS
        assert all(block.block_size == 16 for block in event.stored.blocks)
        assert not event.stored.HasField("parent_block_hash") and not event.stored.HasField("cache_salt")
        hashes = [block.block_hash for block in event.stored.blocks]
        assert len(set(hashes)) == 3

        complete = await generate(running, "b", 2)
        assert (complete.prompt_tokens, complete.cached_tokens) == (57, 48)
        loads = await stub_of(running.prefill).GetLoads(pb2.GetLoadsRequest())
        assert loads.loads[0].cache_hit_rate == pytest.approx(48 / 114)

        late = subscribe(running)
        snapshot = await late.read()
        assert (snapshot.sequence_number, snapshot.snapshot.blocks) == (1, 3)
        assert snapshot.events[0].WhichOneof("data") == "cleared"
        stored = [event.stored for event in snapshot.events[1:]]
        assert [block.block_hash for each in stored for block in each.blocks] == hashes
        assert [each.parent_block_hash for each in stored[1:]] == hashes[:2]

        answer = await stub_of(running.prefill).FlushCache(common_pb2.FlushCacheRequest())
        assert answer.success and answer.message == "3 cached pages forgotten"
        for call, number in ((early, 3), (late, 2)):
            batch = await call.read()
            assert batch.sequence_number == number
            assert [event.WhichOneof("data") for event in batch.events] == ["cleared"]
            call.cancel()
        assert (await generate(running, "c", 3)).cached_tokens == 0
        await running.until_idle()


async def test_the_real_gateway_follows_the_events_when_it_routes_by_cache() -> None:
    with hold_port("127.0.0.1", 0) as held, hold_port("127.0.0.1", 0) as held_too:
        async with pair(snapshots=8) as running:
            assert running.prefill_engine.scheduler.cache is not None
            told = running.prefill_engine.scheduler.cache.on_event
            events = told.__self__  # type: ignore[attr-defined]
            assert isinstance(events, KvEvents)
            command = smg_command(
                GatewayOptions(mode="pd"),
                port=held.getsockname()[1],
                metrics_port=held_too.getsockname()[1],
                decode=[running.decode.address],
                prefill=[running.prefill.address],
                model=NANO,
                drain_s=1,
            )
            arguments = " ".join(command).replace("--policy round_robin", "--policy cache_aware").split(" ")
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            try:
                assert process.stdout is not None
                async for line in process.stdout:
                    if b"snapshot applied" in line:
                        break
                assert events.num_subscribers == 1
                await generate(running, "a", 1)
                assert running.prefill_engine.flush_cache() == 3
                await generate(running, "b", 2)
                # It would have subscribed again if it had not understood.
                assert events.num_subscribers == 1
            finally:
                process.kill()
                await process.communicate()


async def test_a_subscription_is_not_resumed_and_decode_has_none() -> None:
    async with pair(snapshots=2) as running:
        for call, code in (
            (subscribe(running, 7), grpc.StatusCode.DATA_LOSS),
            (
                stub_of(running.decode).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
                grpc.StatusCode.UNIMPLEMENTED,
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is code
    async with pair() as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await subscribe(running).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, "there is no cache"


async def test_a_subscription_ends_when_the_service_drains() -> None:
    async with pair(snapshots=2) as running:
        call = subscribe(running)
        await call.read()
        running.prefill.server.request_drain()
        assert await call.read() is grpc.aio.EOF


async def test_only_an_admin_may_see_or_drop_the_prompts_of_all_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digests = {name: hashlib.sha256(f"token-of-{name}-0123456789".encode()).hexdigest() for name in ("alice", "root")}
    keys.write_text(f'[alice]\nsha256 = "{digests["alice"]}"\n[root]\nsha256 = "{digests["root"]}"\nadmin = true\n')
    async with pair(snapshots=2, auth=AuthSection(keys=str(keys))) as running:
        stub = stub_of(running.prefill)
        shown = {name: (("authorization", f"Bearer token-of-{name}-0123456789"),) for name in digests}
        for call in (
            stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=shown["alice"]),
            stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=shown["alice"]).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=shown["root"])).success
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=shown["root"])
        assert (await call.read()).snapshot.count == 1
        call.cancel()


async def test_a_subscriber_that_falls_behind_is_told_to_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_BACKLOG", 3)
    _, engine, _, _ = prefill_role(snapshots=2)
    assert engine.scheduler.cache is not None
    events = KvEvents(engine.scheduler.cache, 16, lambda: True)
    stream = events.subscribe(0)
    await anext(stream)
    for _ in range(3):
        engine.scheduler.cache.on_event(Cleared())
    batch = await anext(stream)
    assert [event.event_id for event in batch.events] == [1, 2, 3]
    for _ in range(4):
        engine.scheduler.cache.on_event(Cleared())
    with pytest.raises(TransferError, match="subscribe again"):
        await anext(stream)
    assert events.num_subscribers == 0
