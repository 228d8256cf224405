"""TLS, keys and bounds on real sockets."""

import asyncio
import json
import logging
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from k3svc.client import AsyncClient, Options, RetryPolicy
from k3svc.config import AuthSection, ServerSection, TlsSection
from k3svc.errors import (
    InvalidRequest,
    K3svcError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from k3svc.obs.log import JsonFormatter
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.rpc.credentials import CallerCredentials, peer_credentials, server_credentials
from k3svc.rpc.server import LIVENESS
from k3svc.rpc.status import error_from_rpc
from k3svc.text.tokenizer import Tokenizer
from k3svc.transfer.manifest import PrefillDone, StateManifest
from k3svc.v1 import admin_service_pb2, admin_service_pb2_grpc, decode_service_pb2, prefill_service_pb2, types_pb2
from tests.e2e.pki import Pki, new_pki
from tests.e2e.rpc_stack import (
    MIB,
    NANO,
    PROMPT,
    Stack,
    call_of,
    decode_role,
    health_watch,
    prefill_role,
    served,
    until_idle,
)

ALICE = "token-of-alice-000000000000"
BOB = "token-of-bob-00000000000000"
DECODE = "token-of-decode-00000000000"
SECRETS = (ALICE, BOB, DECODE)
ONCE = RetryPolicy(attempts=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return new_pki(tmp_path / "pki")


@pytest.fixture
def keys(tmp_path: Path) -> AuthSection:
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[alice]\ntoken = "{ALICE}"\nmax_requests = 1\nmax_tokens = 300\n'
        f'[bob]\ntoken = "{BOB}"\nadmin = true\n[decode]\ntoken = "{DECODE}"\n'
    )
    (tmp_path / "alice").write_text(ALICE)
    (tmp_path / "bob").write_text(BOB)
    (tmp_path / "decode").write_text(DECODE)
    return AuthSection(keys=str(path), token=str(tmp_path / "decode"))


def shows(keys: AuthSection, name: str) -> CallerCredentials:
    return CallerCredentials(token_file=Path(keys.keys).with_name(name))


def write(path: Path | str, text: str) -> None:
    Path(path).write_text(text)


def read(path: Path | str) -> str:
    return Path(path).read_text()


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@asynccontextmanager
async def secured_stack(
    tokenizer: Tokenizer, *, tls: TlsSection | None = None, auth: AuthSection | None = None, **section: Any
) -> AsyncIterator[Stack]:
    tls, auth, server = tls or TlsSection(), auth or AuthSection(), ServerSection(**section)
    own = peer_credentials(tls, auth)
    role, prefill_engine, prefill_runner, _ = prefill_role()
    async with served(role, section=server, tls=tls, auth=auth, credentials=own) as prefill:
        peer = GrpcPrefillPeer(prefill.address, timeout_s=20.0, max_message_bytes=MIB, credentials=own)
        role, decode_engine, decode_runner = decode_role([peer], tokenizer)
        async with served(role, section=server, tls=tls, auth=auth, credentials=own) as decode:
            yield Stack(
                prefill=prefill,
                prefill_engine=prefill_engine,
                prefill_runner=prefill_runner,
                decode=decode,
                decode_engine=decode_engine,
                decode_role=role,
                decode_runner=decode_runner,
            )
        await peer.close()


async def generate(address: str, credentials: CallerCredentials | None, **options: Any) -> tuple[int, ...]:
    async with AsyncClient(address, credentials=credentials, retry=ONCE) as client:
        options = {"tokens": PROMPT, "max_tokens": 4, "skip_text": True, **options}
        return (await client.generate(**options).result()).token_ids


async def test_a_stack_over_mutual_tls(pki: Pki, tokenizer: Tokenizer):
    async with secured_stack(tokenizer) as here:
        expected = await generate(here.decode.address, None, seed=1)
    tls = pki.tls("role", "127.0.0.1", mutual=True)
    async with secured_stack(tokenizer, tls=tls) as here:
        address = here.decode.address
        assert await generate(address, pki.caller("client"), seed=1) == expected
        stranger = new_pki(pki.folder / "other")
        for credentials in (
            None,
            pki.caller(),
            stranger.caller("x"),
            CallerCredentials(ca=pki.ca_file, certificate=stranger.issue("x", "y")[0], key=stranger.folder / "x.key"),
        ):
            with pytest.raises(Unavailable):
                await generate(address, credentials, seed=1)
        await until_idle(here.decode.channel, here.prefill.channel)


async def test_a_caller_checks_the_name_of_the_service(pki: Pki):
    role, *_ = prefill_role()
    async with served(role, tls=pki.tls("role", "prefill.example"), credentials=pki.caller()) as here:
        peer = GrpcPrefillPeer(here.address, timeout_s=20.0, max_message_bytes=MIB, credentials=pki.caller())
        with pytest.raises(Unavailable, match="Hostname Verification"):
            await anext(peer.prefill(call_of("r")))
        await peer.close()
        options = (("grpc.ssl_target_name_override", "prefill.example"),)
        async with pki.caller().open_channel(here.address, options) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_certificates_are_taken_up_without_a_restart(pki: Pki, tokenizer: Tokenizer, tmp_path: Path):
    tls = pki.tls("role", "127.0.0.1", mutual=True)
    async with secured_stack(tokenizer, tls=tls) as here:
        address = here.decode.address
        before = await generate(address, pki.caller("client"), seed=1)
        # Another authority takes over; what speaks for the old one is refused from then on.
        old = pki.caller("client")
        successor = new_pki(tmp_path / "successor")
        write(pki.ca_file, successor.ca.cert_pem.bytes().decode())
        Pki(ca=successor.ca, folder=pki.folder).issue("role", "127.0.0.1")
        assert await generate(address, successor.caller("client"), seed=1) == before
        with pytest.raises(Unavailable):
            await generate(address, old, seed=1)
        # Half of a change: certificate and key do not belong together, so the former ones stay.
        successor.issue("late", "127.0.0.1")
        key = read(tls.key)
        write(tls.key, read(successor.folder / "late.key"))
        assert await generate(address, successor.caller("client"), seed=1) == before
        write(tls.key, key)
        assert await generate(address, successor.caller("client"), seed=1) == before


async def test_a_hand_off_under_way_survives_new_certificates(pki: Pki):
    tls = pki.tls("role", "127.0.0.1", mutual=True)
    role, _, runner, _ = prefill_role()
    async with served(role, tls=tls, credentials=pki.caller("reader")) as here:
        peer = GrpcPrefillPeer(
            here.address, timeout_s=20.0, max_message_bytes=MIB, credentials=peer_credentials(tls, AuthSection())
        )
        runner.gate.clear()
        first = peer.prefill(call_of("a"))
        await anext(first)
        opened = peer._opened
        pki.issue("role", "127.0.0.1")
        second = peer.prefill(call_of("b"))
        manifest = asyncio.ensure_future(anext(second))
        while peer._opened is opened:
            await asyncio.sleep(0)
        runner.gate.set()
        assert isinstance(await manifest, StateManifest)
        for events in (first, second):
            assert isinstance([event async for event in events][-1], PrefillDone)
        await peer.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="scripts/make-certificates needs openssl")
async def test_the_script_makes_and_renews_certificates_that_fit(tmp_path: Path):
    script, folder = NANO.parents[1] / "scripts" / "make-certificates", tmp_path / "certificates"
    make = (str(script), str(folder), "decode.example", "10.0.0.5")
    await asyncio.to_thread(subprocess.run, make, check=True)
    ca, first = str(folder / "ca.pem"), read(folder / "decode.pem")
    tls = TlsSection(certificate=str(folder / "decode.pem"), key=str(folder / "decode.key"), client_ca=ca)
    client = CallerCredentials(ca=folder / "ca.pem", certificate=folder / "client.pem", key=folder / "client.key")
    role, *_ = prefill_role()
    async with served(role, tls=tls, credentials=client) as here:
        for _ in range(2):
            for name in ("127.0.0.1", "decode", "decode.example", "10.0.0.5"):
                options = (("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1))
                async with client.open_channel(here.address, options) as channel:
                    stub: Any = health_pb2_grpc.HealthStub(channel)
                    await stub.Check(health_pb2.HealthCheckRequest())
            await asyncio.to_thread(subprocess.run, make, check=True)
    assert read(folder / "decode.pem") != first
    assert {mode_of(path) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("broken", ["certificate", "key", "client_ca"])
def test_files_that_cannot_be_used_end_the_start(pki: Pki, broken: str):
    tls = pki.tls("role", "127.0.0.1", mutual=True)
    path = Path(getattr(tls, broken))
    for contents in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", None):
        if contents is None:
            path.unlink()
        else:
            path.write_bytes(contents)
        with pytest.raises(K3svcError, match=path.name):
            server_credentials(tls)


async def test_every_method_but_health_wants_a_key(keys: AuthSection, tokenizer: Tokenizer):
    async with secured_stack(tokenizer, auth=keys) as here:
        async with grpc.aio.insecure_channel(here.decode.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            for name in ("", "k3svc.v1.DecodeService", LIVENESS):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            admin: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
            reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            untyped: Any = channel
            for call in (
                admin.GetLoad(admin_service_pb2.GetLoadRequest()),
                # Nothing is sent: gRPC calls it INTERNAL when a message comes after the refusal.
                reflection.ServerReflectionInfo().read(),
                untyped.unary_unary("/grpc.channelz.v1.Channelz/GetServers")(b""),
                untyped.unary_unary("/no.such/Method")(b"x" * 100_000),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                error = error_from_rpc(caught.value)
                assert (type(error), error.reason) == (Unauthenticated, "NO_TOKEN")
        with pytest.raises(Unauthenticated):
            await generate(here.decode.address, None)
        with pytest.raises(Unauthenticated):
            async with AsyncClient(here.prefill.address) as client:
                await client.load()
        assert len(await generate(here.decode.address, shows(keys, "bob"))) == 4


async def test_the_roles_know_each_other_by_a_token(keys: AuthSection, tokenizer: Tokenizer, tmp_path: Path):
    async with secured_stack(tokenizer, auth=keys) as here:
        bob = shows(keys, "bob")
        await generate(here.decode.address, bob)
        # The token of decode changes: the prefill service knows it no longer, and the client is not to blame.
        write(keys.token, "another-token-of-decode-0000")
        with pytest.raises(Unavailable, match="refuses this service"):
            await generate(here.decode.address, bob)
        write(keys.keys, read(keys.keys).replace(DECODE, "another-token-of-decode-0000"))
        await generate(here.decode.address, bob)


async def test_drain_is_for_admins(keys: AuthSection, tokenizer: Tokenizer):
    async with secured_stack(tokenizer, auth=keys) as here:
        admin: Any = admin_service_pb2_grpc.AdminServiceStub(here.decode.channel)
        for name, error in (("alice", PermissionDenied), ("bob", None)):
            call = admin.Drain(admin_service_pb2.DrainRequest(), metadata=shows(keys, name).metadata())
            if error is None:
                await call
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert type(error_from_rpc(caught.value)) is error
            assert not here.decode_engine.load().draining


async def test_the_bounds_of_a_key(keys: AuthSection, tokenizer: Tokenizer):
    async with secured_stack(tokenizer, auth=keys) as here:
        here.prefill_runner.gate.clear()
        alice, bob = shows(keys, "alice"), shows(keys, "bob")
        async with AsyncClient(here.decode.address, credentials=alice, retry=ONCE) as client:
            first = client.generate(tokens=PROMPT, max_tokens=100, skip_text=True)
            await anext(first)
            with pytest.raises(ResourceExhausted) as caught:
                await generate(here.decode.address, alice)
            assert (caught.value.reason, caught.value.retry_after_s) == ("KEY_REQUESTS", 1.0)
            # Another key's request can neither be ended nor be seen.
            async with AsyncClient(here.decode.address, credentials=bob) as other:
                assert await other.abort(first.request_id) is False
            assert await client.abort(first.request_id) is True
            await first.result()
            unfit: list[Options] = [{"max_tokens": 300}, {"max_tokens": 70, "n": 4}, {"min_tokens": 1}]
            for options in unfit:
                with pytest.raises(InvalidRequest, match="for key alice"):
                    await client.generate(tokens=PROMPT, **options).result()
        here.prefill_runner.gate.set()
        assert len(await generate(here.decode.address, alice)) == 4
        await until_idle_of(here, bob)


async def until_idle_of(here: Stack, credentials: CallerCredentials) -> None:
    """`until_idle` with a key."""
    async with AsyncClient(here.decode.address, credentials=credentials) as client:
        while (load := await client.load()).free_pages != load.total_pages or load.running:
            pass


async def test_open_streams_are_bounded_over_all_callers(tokenizer: Tokenizer):
    async with secured_stack(tokenizer, max_streams=2, max_watches=2) as here:
        here.prefill_runner.gate.clear()
        async with AsyncClient(here.decode.address, retry=ONCE) as client:
            open_ones = [client.generate(tokens=PROMPT, max_tokens=4) for _ in range(2)]
            for generation in open_ones:
                await anext(generation)
            with pytest.raises(ResourceExhausted, match=r"server\.max_streams: 2") as caught:
                await client.generate(tokens=PROMPT, max_tokens=4).result()
            assert caught.value.retry_after_s == 1.0
            assert await client.health() == "SERVING"
            watches = [health_watch(here.decode.channel, "") for _ in range(2)]
            for watch in watches:
                await watch.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health_watch(here.decode.channel, "").read()
            assert error_from_rpc(refused.value).reason == "TOO_MANY_STREAMS"
            for watch in watches:
                watch.cancel()
            here.prefill_runner.gate.set()
            for generation in open_ones:
                await generation.result()
        # Everything that was counted is given back, soon after the caller has seen the end.
        async with AsyncClient(here.decode.address) as client:
            for _ in range(4):
                await client.generate(tokens=PROMPT, max_tokens=4).result()


async def test_calls_without_a_request_are_bounded(tokenizer: Tokenizer):
    async with secured_stack(tokenizer, max_streams=1, max_watches=1) as here:
        untyped: Any = here.decode.channel
        silent: list[Any] = []
        async with AsyncClient(here.decode.address, retry=ONCE) as client:
            # Silent calls are ended by the server after a while, so a slow machine needs more than the bound of them.
            while not isinstance(answer := await health_or_refusal(client), ResourceExhausted):
                silent.append(untyped.stream_stream("/k3svc.v1.DecodeService/Generate")())
            assert (answer.reason, answer.retry_after_s) == ("TOO_MANY_CALLS", 1.0)
            for call in silent:
                call.cancel()
            while await health_or_refusal(client) != "SERVING":
                pass


async def health_or_refusal(client: AsyncClient) -> str | ResourceExhausted:
    try:
        return await client.health()
    except ResourceExhausted as error:
        return error


async def test_connections_are_bounded(tokenizer: Tokenizer):
    async with secured_stack(tokenizer, max_connections=2) as here:
        clients = [AsyncClient(here.decode.address, retry=ONCE) for _ in range(4)]
        answers = await asyncio.gather(*(client.health(timeout_s=20.0) for client in clients), return_exceptions=True)
        for client in clients:
            await client.close()
        # The stack's own channel to decode has not been used, so it has no connection.
        assert sum(answer == "SERVING" for answer in answers) == 2
        assert sum(isinstance(answer, Unavailable) for answer in answers) == 2
        while True:
            async with AsyncClient(here.decode.address) as client:
                try:
                    assert await client.health(timeout_s=2.0) == "SERVING"
                    break
                except Unavailable:
                    continue


HOSTILE = {
    "text": decode_service_pb2.GenerateRequest(text="x" * (16 * 400 + 1)),
    "chat": decode_service_pb2.GenerateRequest(
        chat=decode_service_pb2.Chat(messages=[decode_service_pb2.ChatMessage(role="user", content="x" * 6400)])
    ),
    "chat.messages": decode_service_pb2.GenerateRequest(
        chat=decode_service_pb2.Chat(messages=[decode_service_pb2.ChatMessage()] * 4097)
    ),
    "tokens": decode_service_pb2.GenerateRequest(tokens=types_pb2.TokenIds(ids=[5] * 100_000)),
    "generated_token_ids": decode_service_pb2.GenerateRequest(
        text="x", generated_token_ids=types_pb2.TokenIds(ids=[5] * 100_000)
    ),
    "sampling.logit_bias": decode_service_pb2.GenerateRequest(
        text="x", sampling=types_pb2.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    ),
    "stop.stop_token_ids": decode_service_pb2.GenerateRequest(
        text="x", stop=types_pb2.StopParams(stop_token_ids=[5] * 257)
    ),
    "stop.stop": decode_service_pb2.GenerateRequest(text="x", stop=types_pb2.StopParams(stop=["a"] * 100_000)),
    "chat.tools_json": decode_service_pb2.GenerateRequest(
        chat=decode_service_pb2.Chat(
            messages=[decode_service_pb2.ChatMessage(role="user", content="x")], tools_json="[" * 3000
        )
    ),
}


@pytest.mark.parametrize("field", list(HOSTILE))
async def test_a_request_of_huge_fields_names_the_field(field: str, tokenizer: Tokenizer):
    async with secured_stack(tokenizer) as here:
        method: Any = here.decode.channel.unary_stream(
            "/k3svc.v1.DecodeService/Generate",
            request_serializer=decode_service_pb2.GenerateRequest.SerializeToString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(HOSTILE[field]).read()
        error = error_from_rpc(caught.value)
        assert type(error) is InvalidRequest
        assert error.metadata["field"] == field
        assert "at most" in error.message or "JSON" in error.message


@pytest.mark.parametrize("method", ["DecodeService/Generate", "DecodeService/Abort", "AdminService/GetLoad"])
@pytest.mark.parametrize("data", [b"\x00", b"\xff" * 20, b"\x0a\x01\xff", b"\x0a\x7f"])
async def test_bytes_that_are_no_request_are_a_callers_mistake(
    method: str, data: bytes, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    async with secured_stack(tokenizer) as here:
        untyped: Any = here.decode.channel
        call = untyped.unary_stream(f"/k3svc.v1.{method}")(data)
        if method.endswith("GetLoad") and data.startswith(b"\x0a\x01"):
            assert await call.read() is not grpc.aio.EOF  # an unknown field, which may hold anything
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert error_from_rpc(caught.value).metadata["field"] == "request"
    assert not any(record.exc_info for record in caplog.records)


async def test_messages_and_metadata_are_bounded(tokenizer: Tokenizer):
    method: Any
    async with secured_stack(tokenizer) as here:
        for stub, request in (
            ("/k3svc.v1.DecodeService/Generate", decode_service_pb2.GenerateRequest(text="x" * (4 << 20))),
            (
                "/k3svc.v1.PrefillService/Prefill",
                prefill_service_pb2.PrefillRequest(prompt=types_pb2.TokenIds(ids=[5] * (4 << 20))),
            ),
        ):
            method = (here.decode if "Decode" in stub else here.prefill).channel.unary_stream(stub)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(request.SerializeToString()).read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        method = here.decode.channel.unary_unary("/k3svc.v1.AdminService/GetLoad")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"", metadata=(("x", "y" * 9000),))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_watch(here.decode.channel, "x" * 257).read()
        assert error_from_rpc(caught.value).metadata["field"] == "service"


async def test_no_secret_reaches_the_log(
    keys: AuthSection, pki: Pki, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    tls = pki.tls("role", "127.0.0.1", mutual=True)
    async with secured_stack(tokenizer, tls=tls, auth=keys) as here:
        caller = pki.caller("client")
        bob = CallerCredentials(
            ca=caller.ca, certificate=caller.certificate, key=caller.key, token_file=Path(keys.keys).with_name("bob")
        )
        await generate(here.decode.address, bob)
        write(keys.token, "another-token-of-decode-0000")
        with pytest.raises(Unavailable):
            await generate(here.decode.address, bob)
        write(keys.keys, read(keys.keys) + f'[carol]\ntoken = "{ALICE}"\n')
        write(tls.key, read(tls.key)[:100])
        async with caller.open_channel(here.decode.address, ()) as channel:
            method: Any = channel.unary_unary("/k3svc.v1.AdminService/GetLoad")
            await method(b"", metadata=shows(keys, "alice").metadata())
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert any("what was read before stays" in json.loads(line)["message"] for line in lines)
    private = read(tls.key).splitlines()[1]
    for line in lines:
        assert not any(secret in line for secret in (*SECRETS, "another-token", private))
