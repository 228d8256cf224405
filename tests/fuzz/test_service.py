"""Hostile calls on real sockets: request fields, metadata and keys, races of cancel, abort and deadline.

Whatever comes in, the answer is an error with a code of ours, nothing stays held, and the service goes on serving.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3svc.config import AuthSection, ServerSection
from k3svc.errors import Unauthenticated
from k3svc.rpc.access import Access
from k3svc.rpc.status import error_from_rpc
from k3svc.text.tokenizer import Tokenizer
from k3svc.v1 import decode_service_pb2 as pb
from k3svc.v1 import types_pb2 as types
from tests.e2e.rpc_stack import NANO, Stack, prefill_role, served, stack

SHORT = settings(max_examples=40, suppress_health_check=list(HealthCheck))
GENERATE = "/k3svc.v1.DecodeService/Generate"
TOKEN = "token-of-the-fuzzed-service"
CODES = {"INVALID_ARGUMENT", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED", "CANCELLED", "DEADLINE_EXCEEDED"}

UINT32 = st.one_of(st.integers(0, 100), st.integers(0, 2**32 - 1), st.sampled_from([0, 2**31, 2**32 - 1]))
FLOAT32 = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, 0.5, 2.0]))
TOKEN_IDS = st.one_of(st.lists(st.integers(0, 63), max_size=30), st.lists(UINT32, max_size=5))
WIRE_TEXT = st.text(max_size=30).map(lambda text: text.encode("utf-8", "replace").decode())


class Service:
    """A stack, and a prefill service with keys, on an event loop of their own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory()
        keys = Path(self._folder.name) / "keys.toml"
        keys.write_text(f'[known]\ntoken = "{TOKEN}"\n')
        self.access = Access(ServerSection(), keys)
        self._keys = AuthSection(keys=str(keys))
        self._resources = contextlib.AsyncExitStack()
        self.stack: Stack = self.run(self._start())
        self.num_files = num_files()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def _start(self) -> Stack:
        self.guarded = await self._resources.enter_async_context(served(prefill_role()[0], auth=self._keys))
        return await self._resources.enter_async_context(stack(Tokenizer.load(NANO)))

    def close(self) -> None:
        self.run(self._resources.aclose())
        self.loop.close()
        self._folder.cleanup()


@cache
def service() -> Service:
    return Service()


def num_files() -> int:
    """Open files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    yield
    service().close()
    service.cache_clear()


def raw(channel: Any, method: str) -> Any:
    return channel.unary_stream(method)


async def settle(here: Stack) -> None:
    """Until nothing is held on either side."""
    while any(
        (load.free_pages, load.free_slots, load.running, load.waiting) != (load.total_pages, load.total_slots, 0, 0)
        for load in (here.decode_engine.load(), here.prefill_engine.load())
    ):
        await asyncio.sleep(0)


async def answer_to(call: Any) -> str:
    """The code of a stream's end. Errors of ours name their reason; gRPC's own come without."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        if error_from_rpc(error).reason in {"UNEXPECTED", "STEP_FAILED"}:
            raise
        return error.code().name
    except asyncio.CancelledError:
        return "CANCELLED"
    return "OK"


requests = st.builds(
    pb.GenerateRequest,
    request_id=st.one_of(st.just(""), st.sampled_from(["a", "b"]), WIRE_TEXT, st.just("x" * 200)),
    tokens=st.one_of(st.none(), st.builds(types.TokenIds, ids=TOKEN_IDS)),
    text=st.one_of(st.none(), WIRE_TEXT),
    sampling=st.builds(
        types.SamplingParams,
        temperature=FLOAT32,
        top_k=UINT32,
        top_p=FLOAT32,
        min_p=st.one_of(st.just(0.0), FLOAT32),
        repetition_penalty=st.one_of(st.just(1.0), FLOAT32),
        presence_penalty=st.one_of(st.just(0.0), FLOAT32),
        frequency_penalty=st.one_of(st.just(0.0), FLOAT32),
        logit_bias=st.one_of(st.just({}), st.dictionaries(UINT32, FLOAT32, max_size=3)),
        seed=st.integers(0, 2**64 - 1),
        n=st.one_of(st.just(1), UINT32),
    ),
    stop=st.builds(
        types.StopParams,
        max_tokens=st.one_of(st.integers(0, 20), UINT32),
        min_tokens=st.one_of(st.just(0), UINT32),
        stop=st.one_of(st.just([]), st.lists(WIRE_TEXT, max_size=20)),
        stop_token_ids=st.one_of(st.just([]), TOKEN_IDS),
        ignore_eos=st.booleans(),
    ),
    generated_token_ids=st.one_of(st.none(), st.builds(types.TokenIds, ids=TOKEN_IDS)),
    logprobs=st.one_of(st.none(), UINT32),
    skip_text=st.booleans(),
    include_control_text=st.booleans(),
)


@SHORT
@given(st.one_of(requests.map(pb.GenerateRequest.SerializeToString), st.binary(max_size=80)))
def test_any_request_gets_an_answer(message: bytes):
    here = service().stack

    async def ask() -> None:
        code = await answer_to(raw(here.decode.channel, GENERATE)(message))
        assert code in {"OK", *CODES}
        await settle(here)

    service().run(ask())


@SHORT
@given(
    st.binary(max_size=120),
    st.sampled_from(["PrefillService/Prefill", "PrefillService/Release", "AdminService/GetLoad"]),
)
def test_any_message_to_prefill_gets_an_answer(message: bytes, method: str):
    here = service().stack

    async def ask() -> None:
        code = await answer_to(raw(here.prefill.channel, f"/k3svc.v1.{method}")(message))
        assert code in {"OK", "FAILED_PRECONDITION", "ABORTED", *CODES}
        await settle(here)

    service().run(ask())


HEADER = st.one_of(
    st.sampled_from(["authorization", "Authorization", "authorization-bin", "x", "grpc-timeout", "te"]),
    st.text("abc-_.0", min_size=1, max_size=8),
)
VALUE = st.one_of(
    st.sampled_from([TOKEN, f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN}", f"Bearer {TOKEN} ", "Bearer"]),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.integers(0, 20_000).map(lambda size: "y" * size),
)


@SHORT
@given(st.lists(st.tuples(HEADER, VALUE), max_size=4))
def test_only_the_token_opens_the_service(metadata: list[tuple[str, Any]]):
    shown = [value for name, value in metadata if name == "authorization"]
    is_known = shown == [f"Bearer {TOKEN}"]
    if is_known:
        assert service().access.caller_of(GENERATE, metadata).key.name == "known"
    else:
        with pytest.raises(Unauthenticated):
            service().access.caller_of(GENERATE, metadata)

    async def ask() -> str:
        try:
            return await answer_to(
                raw(service().guarded.channel, "/k3svc.v1.AdminService/GetLoad")(b"", metadata=metadata)
            )
        except (TypeError, ValueError):
            return "not sent"

    # gRPC takes blanks off the ends of a value, refuses names that HTTP/2 does not allow and sizes above the bound.
    code = service().run(ask())
    stripped = [value.strip() if isinstance(value, str) else value for value in shown]
    assert (code != "OK") or stripped == [f"Bearer {TOKEN}"]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from("abc"), st.sampled_from([None, 0.0, 0.001, 0.01, 5.0])),
        st.tuples(st.just("cancel"), st.integers(0, 5), st.none()),
        st.tuples(st.just("abort"), st.sampled_from("abc"), st.none()),
        st.tuples(st.sampled_from(["close prefill", "close decode", "open", "wait"]), st.integers(0, 3), st.none()),
    ),
    min_size=1,
    max_size=14,
)


@SHORT
@given(STEPS, st.integers(1, 40))
def test_races_leave_nothing_behind(steps: list[tuple[str, Any, Any]], num_tokens: int):
    here = service().stack

    async def race() -> None:
        calls: list[Any] = []
        answers: list[asyncio.Task[str]] = []
        for kind, value, timeout_s in steps:
            if kind == "submit":
                request = pb.GenerateRequest(
                    request_id=value, tokens=types.TokenIds(ids=[5] * num_tokens), stop=types.StopParams(max_tokens=9)
                )
                calls.append(raw(here.decode.channel, GENERATE)(request.SerializeToString(), timeout=timeout_s))
                answers.append(asyncio.ensure_future(answer_to(calls[-1])))
            elif kind == "cancel" and calls:
                calls[value % len(calls)].cancel()
            elif kind == "abort":
                abort: Any = here.decode.channel.unary_unary("/k3svc.v1.DecodeService/Abort")
                await abort(pb.AbortRequest(request_id=value).SerializeToString())
            elif kind == "close prefill":
                here.prefill_runner.gate.clear()
            elif kind == "close decode":
                here.decode_runner.gate.clear()
            elif kind == "open":
                here.prefill_runner.gate.set()
                here.decode_runner.gate.set()
            for _ in range(value if kind == "wait" else 0):
                await asyncio.sleep(0.001)
        here.prefill_runner.gate.set()
        here.decode_runner.gate.set()
        for answer in await asyncio.gather(*answers):
            assert answer in {"OK", *CODES}
        await settle(here)

    service().run(race())
    assert num_files() < service().num_files + 100


TARGETS = {
    "requests": test_any_request_gets_an_answer,
    "prefill_messages": test_any_message_to_prefill_gets_an_answer,
    "metadata": test_only_the_token_opens_the_service,
    "races": test_races_leave_nothing_behind,
}
