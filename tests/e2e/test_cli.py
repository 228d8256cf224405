"""The commands and the client on the real stack: real services, the nano checkpoint, processes that die."""

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient, Delta, Generation, RetryPolicy
from k3svc.config import load_config
from k3svc.text.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

NANO = Path(__file__).parents[2] / "models" / "k3-nano"
GOLDEN = json.loads((NANO / "golden.json").read_text())["prompts"]
SMALL = ("cache.num_pages=256", "cache.num_slots=16", "log.level=warning")
K3SVC = (sys.executable, "-c", "from k3svc.cli.main import main; main()")
GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens", "48")


@dataclass(frozen=True, kw_only=True)
class Run:
    status: int
    out: str
    err: str


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *K3SVC, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **environment}
    )


async def run(*arguments: str, given: str = "") -> Run:
    process = await start(*arguments)
    out, err = await process.communicate(given.encode())
    assert process.returncode is not None
    return Run(status=process.returncode, out=out.decode(), err=err.decode())


def model_options() -> list[str]:
    return ["--model", str(NANO), *(word for setting in SMALL for word in ("--set", setting))]


@dataclass(frozen=True, kw_only=True)
class Up:
    process: asyncio.subprocess.Process
    decode: str
    prefill: str
    draft: str = ""
    drafts: str = ""

    @property
    def roles(self) -> list[int]:
        return children(self.process.pid)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def start_up(*arguments: str) -> Up:
    process = await start("up", "--port", "0", *model_options(), *arguments)
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.startswith("ready "), (await process.communicate())[1].decode()
    return Up(process=process, **dict(word.split("=") for word in line.split()[1:]))


def has_ended(pid: int, timeout_s: float) -> bool:
    """Whether the process ends in time; true for a zombie that nobody has waited for."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            return bool(select.select([pidfd], [], [], timeout_s)[0])
        finally:
            os.close(pidfd)
    return True


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    """`k3svc up`, which Ctrl-C must end with 0."""
    logs = tmp_path_factory.mktemp("logs")
    stack = await start_up("--log-dir", str(logs))
    roles = stack.roles
    yield stack
    stack.process.send_signal(signal.SIGINT)
    out, err = await stack.process.communicate()
    assert stack.process.returncode == 0, err.decode()
    assert out == b""
    assert err.decode().splitlines()[-2:] == ["draining", "stopped"]
    assert len(roles) == 3
    assert all(has_ended(pid, 0) for pid in roles)
    assert sorted(path.name for path in logs.iterdir()) == [
        "decode-0.log", "decode-0.toml", "draft-0.log", "draft-0.toml", "prefill-0.log", "prefill-0.toml",
    ]  # fmt: skip


async def test_generate_streams_the_golden_text(up: Up) -> None:
    golden = GOLDEN[0]
    result = await run("generate", "--endpoint", up.decode, *GREEDY, golden["text"])
    assert (result.status, result.out) == (0, golden["continuation_text"] + "\n")
    assert "9 + 48 tokens, length, first token after " in result.err
    assert up.drafts == "k3-nano-dspark"


async def test_a_file_of_prompts_gives_the_golden_tokens_in_order(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([golden["ids"] for golden in GOLDEN]))
    result = await run("generate", "--endpoint", up.decode, *GREEDY, "--tokens-file", str(path), "--json")
    values: list[dict[str, Any]] = json.loads(result.out)
    assert [value["token_ids"] for value in values] == [golden["continuation_ids"] for golden in GOLDEN]
    assert [value["usage"]["prompt_tokens"] for value in values] == [len(golden["ids"]) for golden in GOLDEN]
    for value in values:
        assert value["usage"]["completion_tokens"] == 48
        assert value["timing"]["ttft_ms"] > 0
        assert value["timing"]["tpot_ms"] > 0
        assert value["timing"]["handoff_bytes"] > 0
        assert 0 <= value["speculation"]["accepted"] <= value["speculation"]["proposed"]


async def test_chat_formats_the_conversation_and_stops_at_its_end(up: Up) -> None:
    golden = GOLDEN[3]
    question = "What is the signature of shutil.copyfile?"
    answer = golden["continuation_text"].partition("<|close|>")[0]
    once = await run("generate", "--endpoint", up.decode, "--chat", question, "--temperature", "0", "--json")
    value = json.loads(once.out)
    assert (value["text"], value["finish_reason"]) == (answer, "stop")
    assert value["usage"]["prompt_tokens"] == len(golden["ids"])
    talk = await run("chat", "--endpoint", up.decode, "--temperature", "0", given=f"{question}\n/exit\n")
    assert (talk.status, talk.out, talk.err) == (0, f"{answer}\n", "")


async def test_health_of_both_roles_and_errors_of_the_service(up: Up) -> None:
    decode, prefill, wrong, asked, other = await asyncio.gather(
        run("health", up.decode, "--service", "k3svc.v1.DecodeService"),
        run("health", up.prefill),
        run("generate", "--endpoint", up.decode, "--tokens", "4096"),
        run("generate", "--endpoint", up.prefill, "a"),
        run("health", up.prefill, "--service", "k3svc.v1.DecodeService"),
    )
    assert (decode.status, prefill.status) == (0, 0)
    assert wrong.status == 2
    assert wrong.err.startswith("error: prompt[0]: got 4096")
    assert (asked.status, asked.out) == (1, "")
    assert asked.err == f"error: {up.prefill} is a prefill service; requests go to a decode service (WRONG_ROLE)\n"
    assert (other.status, other.err) == (
        1,
        f"error: {up.prefill} has no service 'k3svc.v1.DecodeService' (UNKNOWN_SERVICE)\n",
    )


async def test_the_port_of_up_is_taken(up: Up) -> None:
    port = up.decode.rpartition(":")[2]
    second = await run("up", *model_options(), "--port", port)
    assert (second.status, second.out) == (2, "")
    assert second.err.splitlines()[-1].endswith(
        f"cannot bind {up.decode}: Address already in use; --port 0 takes a free one"
    )


async def test_generate_without_an_endpoint_starts_services_of_its_own() -> None:
    golden = GOLDEN[2]
    ids = ",".join(map(str, golden["ids"]))
    result = await run("generate", *model_options(), "--draft", "none", *GREEDY, "--tokens", ids, "--json")
    assert result.status == 0, result.err
    assert json.loads(result.out)["token_ids"] == golden["continuation_ids"]
    assert "decode-0 ready at 127.0.0.1:" in result.err


async def test_sigterm_ends_generate_with_the_services_it_started(tmp_path: Path) -> None:
    process = await start(
        "generate", *model_options(), "--max-tokens", "8000", "--ignore-eos", "a", TMPDIR=str(tmp_path)
    )
    assert process.stdout is not None
    assert await process.stdout.read(1)
    roles = children(process.pid)
    assert len(roles) == 2
    process.terminate()
    await process.communicate()
    assert process.returncode == 143
    assert not os.listdir(tmp_path)  # noqa: PTH208  no Path blocks a loop here
    assert all(has_ended(pid, 0) for pid in roles)


@pytest.mark.slow
async def test_services_that_are_killed_come_back_and_cost_no_request() -> None:
    """kill -9 of the decode service that a stream comes from, then of both prefill services between two requests."""
    stack = await start_up("--prefill", "2", "--decode", "2", "--set", "cache.max_context_tokens=4096")
    endpoints = [word for endpoint in stack.decode.split(",") for word in ("--endpoint", endpoint)]
    asked = ("generate", *endpoints, "--temperature", "0", "--ignore-eos", "--max-tokens", "300", GOLDEN[0]["text"])
    undisturbed = await run(*asked)
    assert undisturbed.status == 0, undisturbed.err
    stream = await start(*asked)
    assert stream.stdout is not None
    begun = await stream.stdout.read(1)
    async with AsyncClient(stack.decode.split(",")) as client:
        running = [endpoint for endpoint in client.endpoints if (await client.load(endpoint)).running]
        assert len(running) == 1
        os.kill(pid_that_listens(running[0], stack.roles), signal.SIGKILL)
        out, err = await stream.communicate()
        assert (stream.returncode, (begun + out).decode()) == (0, undisturbed.out), err.decode()
        await client.wait_ready(200)
        for endpoint in stack.prefill.split(","):
            os.kill(pid_that_listens(endpoint, stack.roles), signal.SIGKILL)
        async with AsyncClient(stack.prefill.split(",")) as prefill:
            await prefill.wait_ready(200)
        again = await run(*asked)
    assert again.out == undisturbed.out
    stack.process.send_signal(signal.SIGTERM)
    out, err = await stack.process.communicate()
    assert stack.process.returncode == 0
    assert err.decode().count("ended by signal SIGKILL") == 3


def pid_that_listens(endpoint: str, pids: Sequence[int]) -> int:
    """The process of the socket that listens there, from /proc."""
    port = f":{int(endpoint.rpartition(':')[2]):04X}"
    tables = [Path(name).read_text() for name in ("/proc/net/tcp", "/proc/net/tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "0A"}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(link.readlink()) in inodes:
                    return pid
    raise AssertionError(f"nobody listens at {endpoint}")


@pytest.mark.slow
async def test_demo_shows_the_main_job() -> None:
    result = await run("demo", *model_options())
    assert result.status == 0, result.err
    assert GOLDEN[0]["text"] + GOLDEN[0]["continuation_text"][:100] in result.out
    assert "def copyfile(src, dst, *, follow_symlinks=True):" in result.out
    shipped, handoff, decode = result.out.splitlines()[-3:]
    assert shipped.startswith("shipped   ")
    assert handoff.startswith("hand-off  ")
    assert decode.endswith(" tokens/s, one request at a time")


@pytest.mark.slow
async def test_roles_end_with_an_up_that_is_killed() -> None:
    stack = await start_up()
    roles = stack.roles
    assert len(roles) == 3
    stack.process.kill()
    await stack.process.communicate()
    assert all(has_ended(pid, 60) for pid in roles)


async def test_killing_decode_changes_neither_tokens_nor_text() -> None:
    """kill -9 of the decode service in the middle of a stream, against the same request undisturbed.

    First another service takes over, then one that starts only now. The biased bytes belong to one character, so most
    of the time some text is held back when the stream breaks. On the slowest backend, so that it breaks in time.
    """
    tokenizer = Tokenizer.load(NANO)
    parts = [i for i in range(3840) if tokenizer.token_bytes(i) in {b"\xe6", b"\x97", b"\xa5"}]
    assert len(parts) == 3
    options: dict[str, Any] = {"seed": 5, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
    greedy = {"temperature": 0.0, **options}
    biased = {"temperature": 1.0, "logit_bias": dict.fromkeys(parts, 40.0), **options}
    golden = GOLDEN[0]
    async with (
        Stack(
            load_config(None, [f"model.path={NANO}", "model.device=reference", *SMALL]), prefill=1, decode=2
        ) as stack,
        AsyncClient(stack.decode_endpoints, retry=RetryPolicy(attempts=100)) as client,
    ):
        undisturbed = await client.generate(golden["text"], **biased).result()
        assert "日" in undisturbed.text
        assert "\N{REPLACEMENT CHARACTER}" in undisturbed.text

        # A request that is over before its service is killed is made again.
        killed, attempts = "", 0
        while attempts < 2:
            if killed:
                await stack.restart(killed)
            generation = client.generate(golden["text"], **greedy)
            killed = await kill_after(13, generation, stack, client)
            result = await generation.result()
            attempts = result.attempts
        assert list(result.token_ids) == golden["continuation_ids"][:40]
        assert golden["continuation_text"].startswith(result.text)
        assert (result.attempts, result.usage.completion_tokens, len(result.logprobs)) == (2, 40, 40)

        attempts = 0
        while attempts < 2:
            generation = client.generate(golden["text"], **biased)
            dead, killed = killed, await kill_after(7, generation, stack, client)
            restarting = asyncio.create_task(stack.restart(dead))
            result = await generation.result()
            await restarting
            attempts = result.attempts
        assert result.token_ids == undisturbed.token_ids
        assert result.text == undisturbed.text
        assert result.usage == undisturbed.usage


async def kill_after(num_tokens: int, generation: Generation, stack: Stack, client: AsyncClient) -> str:
    """Reads so many tokens, then kills the role that makes them, or has made them; its name."""
    seen = 0
    while seen < num_tokens:
        event = await anext(generation)
        seen += len(event.token_ids) if isinstance(event, Delta) else 0
    serving = {state.endpoint for state in client.endpoint_states() if state.running}
    (process,) = (process for process in stack.processes.values() if process.address in serving)
    await stack.kill(process.name)
    return process.name
