"""The commands as processes, against a decode service that runs in the test's loop."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import k3svc
from k3svc.cli import session
from k3svc.cli import up as up_module
from k3svc.cli.demo import summary_lines
from k3svc.cli.generate import read_tokens_file
from k3svc.cli.main import main
from k3svc.cli.session import build_config, run_command
from k3svc.client import Completion, Sample
from k3svc.config import Config
from k3svc.core.events import SpeculationStats, Timings, Usage
from k3svc.core.request import FinishReason
from k3svc.errors import ConfigError, InvalidRequest
from k3svc.gateway.launch import GatewayOptions
from tests.unit.client.fake_decode import SEED, Step, running, text, tokens

K3SVC = (sys.executable, "-c", "from k3svc.cli.main import main; main()")
IDS = "1,2,3"
EIGHT = ("--max-tokens", "8")


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*K3SVC, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)


async def k3svc_run(*arguments: str, given: str = "") -> SimpleNamespace:
    process = await start(*arguments)
    out, err = await process.communicate(given.encode())
    return SimpleNamespace(status=process.returncode, out=out.decode(), err=err.decode())


def run_main(
    arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """In this process: for what ends before anything is sent."""
    monkeypatch.setattr(sys, "argv", ["k3svc", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capsys.readouterr()


async def test_generate_streams_text_to_standard_output_alone():
    async with running() as fake:
        result = await k3svc_run("generate", "--endpoint", fake.endpoint, "import os", "--max-tokens", "3")
    assert result.status == 0, result.err
    assert result.out == text(tokens(9, n=3)) + "\n"
    assert "9 (3 cached) + 3 tokens, length" in result.err
    request = fake.service.requests[0]
    assert request.text == "import os"
    assert not request.sampling.HasField("temperature")
    assert not request.HasField("logprobs")


async def test_generate_prints_one_json_object():
    async with running() as fake:
        result = await k3svc_run(
            *(
                "generate",
                "--endpoint",
                fake.endpoint,
                "--tokens",
                IDS,
                "--json",
                "--logprobs",
                "1",
                "--max-tokens",
                "2",
            )
        )
    value = json.loads(result.out)
    ids = list(tokens(3, n=2))
    assert value == {
        "text": text(ids),
        "token_ids": ids,
        "finish_reason": "length",
        "stopped_by": "",
        "logprobs": [{"token_id": i, "logprob": -0.5, "top": [{"token_id": i, "logprob": -0.5}]} for i in ids],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 3},
        "timing": {
            "queue_ms": 0.0,
            "prefill_ms": 0.0,
            "handoff_tail_ms": 0.0,
            "ttft_ms": 12.5,
            "tpot_ms": 2.5,
            "handoff_bytes": 1000,
            "preemptions": 0,
            "prefill_attempts": 1,
            "handoff_ms": 0.0,
        },
        "speculation": {
            "steps": 2,
            "steps_with_drafts": 2,
            "proposed": 5,
            "accepted": 3,
            "late": 1,
            "salvaged": 1,
            "gaps": 1,
            "wait_ms": 0.5,
            "draft_ms": 0.0,
            "verify_ms": 2.5,
            "commit_ms": 0.25,
            "steps_by_length": [0, 1, 1],
            "accepted_by_position": [2, 1, 0],
            "drafters": ["127.0.0.1:9", "ngram"],
            "rested": 7,
            "acceptance_length": 2.5,
        },
        "request_id": fake.service.requests[0].request_id,
        "seed": SEED,
    }


async def test_generate_passes_its_options_on():
    async with running() as fake:
        result = await k3svc_run(
            *("generate", "--endpoint", fake.endpoint, "--chat", "--thinking", "--system", "Be brief.", "Hi", "--json"),
            *("--temperature", "0", "--top-k", "5", "--top-p", "0.5", "--min-p", "0.25", "--seed", "7", "--n", "2"),
            *("--stop", "a", "--stop", "b", "--ignore-eos", "--max-tokens", "4"),
        )
    assert result.status == 0, result.err
    request = fake.service.requests[0]
    sampling, stop = request.sampling, request.stop
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "Be brief."), ("user", "Hi")]
    assert request.chat.thinking
    assert sampling.HasField("temperature")
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 5, 0.5, 0.25)
    assert (sampling.seed, sampling.n) == (7, 2)
    assert (list(stop.stop), stop.ignore_eos, stop.max_tokens) == (["a", "b"], True, 4)
    value = json.loads(result.out)
    assert [sample["token_ids"] for sample in value["samples"]] == [
        list(tokens(1, seed=7, sample=i, n=4)) for i in (0, 1)
    ]
    assert value["token_ids"] == value["samples"][0]["token_ids"]


async def test_generate_takes_text_from_standard_input():
    async with running() as fake:
        await k3svc_run("generate", "--endpoint", fake.endpoint, "-", given="from here\n")
    assert fake.service.requests[0].text == "from here\n"


async def test_a_file_of_prompts_runs_concurrently_and_comes_back_in_order(tmp_path: Path):
    prompts = [[1] * length for length in (5, 1, 3)]
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(prompts))
    limit = ("--max-tokens", "8")
    async with running(Step(hang_after=2)) as fake:
        process = await start("generate", "--endpoint", fake.endpoint, "--tokens-file", str(path))
        await fake.service.reached.wait()
        while len(fake.service.requests) < 3:
            await asyncio.sleep(0.001)
        process.send_signal(signal.SIGINT)
        await process.communicate()
        assert process.returncode == 130
        while fake.service.live:
            await asyncio.sleep(0.001)
        result = await k3svc_run("generate", "--endpoint", fake.endpoint, "--tokens-file", str(path), "--json", *limit)
    assert [value["token_ids"] for value in json.loads(result.out)] == [list(tokens(len(p))) for p in prompts]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "entry 0 is not a list of token ids"),
        ("[[1], [true]]", "entry 1 is not a list of token ids"),
        ("{}", "expected a JSON list of lists of token ids"),
        ("[]", "the list of prompts is empty"),
        ("[", "cannot read .* as JSON"),
    ],
)
def test_files_of_prompts_are_checked(tmp_path: Path, content: str, message: str):
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_tokens_file(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nope", "No such command 'nope'"),
        ("generate", "exactly one of PROMPT, --tokens and --tokens-file"),
        ("generate a --tokens 1", "exactly one of PROMPT, --tokens and --tokens-file"),
        ("generate --tokens 1,x", "--tokens: '1,x'"),
        ("generate --tokens 1 --chat", "--chat: needs PROMPT"),
        ("generate a --thinking", "--thinking: only with --chat"),
        ("generate a --draft medusa", "--draft: 'medusa'; allowed: dspark, dflash, ngram, none"),
        ("generate a --model no/such/folder", "no folder no/such/folder; name a checkpoint with --model DIR"),
        ("generate a --no-such-option", "--no-such-option"),
        ("generate a --logprobs 2", "--logprobs: only with --json"),
        ("generate a --model x --endpoint 127.0.0.1:1", "--model: is for services that are started here"),
        ("chat --device cpu --endpoint 127.0.0.1:1", "--device: is for services that are started here"),
        ("generate a --draft ngram --endpoint 127.0.0.1:1", "--draft: is for services that are started here"),
        ("up --set model.devise=cpu", "did you mean model.device?"),
        ("up --prefill 0", "--prefill"),
        ("health nowhere", "host:port"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, out, err = run_main(arguments.split(), monkeypatch, capsys)
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


async def test_what_the_service_refuses_is_usage_and_what_is_not_there_is_failure():
    wrong = Step(error=InvalidRequest("sampling.top_p", 2.0, "a number in (0, 1]"))
    async with running(wrong) as fake:
        refused, gone, asked, several, talked = await asyncio.gather(
            k3svc_run("generate", "--endpoint", fake.endpoint, "a", "--top-p", "2"),
            k3svc_run("health", "127.0.0.1:1"),
            k3svc_run("generate", "--endpoint", "127.0.0.1:1", "a"),
            k3svc_run("generate", "--endpoint", "127.0.0.1:1", "--endpoint", "127.0.0.1:2", "a"),
            k3svc_run("chat", "--endpoint", "127.0.0.1:1", given="Hi\n"),
        )
    assert (refused.status, refused.out) == (2, "")
    assert refused.err == "error: sampling.top_p: got 2.0; allowed: a number in (0, 1]\n"
    for result in (gone, asked, talked):
        assert (result.status, result.out, result.err) == (
            1,
            "",
            "error: nothing listens at 127.0.0.1:1 (UNREACHABLE)\n",
        )
    assert several.err == "error: nothing listens at 127.0.0.1:1; nothing listens at 127.0.0.1:2 (UNREACHABLE)\n"


async def test_of_several_endpoints_one_that_is_there_is_enough():
    async with running() as fake:
        result = await k3svc_run("generate", "--endpoint", "127.0.0.1:1", "--endpoint", fake.endpoint, "a", *EIGHT)
    assert (result.status, result.out) == (0, text(tokens(1)) + "\n")


async def test_a_prefill_service_is_told_from_a_decode_service():
    async with running(role="prefill") as fake:
        result = await k3svc_run("generate", "--endpoint", fake.endpoint, "a")
    assert (result.status, result.out) == (1, "")
    assert result.err == f"error: {fake.endpoint} is a prefill service; requests go to a decode service (WRONG_ROLE)\n"


async def test_input_that_is_no_utf_8_is_one_line():
    async with running() as fake:
        for command in (("generate", "-"), ("chat",)):
            process = await start(*command, "--endpoint", fake.endpoint)
            out, err = await process.communicate(b"caf\xe9\n")
            assert (process.returncode, out) == (2, b"")
            assert err == b"error: Invalid value for standard input: byte 3 is 0xe9; expected UTF-8\n"
        assert fake.service.requests == []


async def test_a_prompt_that_fails_ends_no_other(tmp_path: Path):
    path = tmp_path / "prompts.json"
    path.write_text("[[1], [2], [3]]")
    wrong = Step(error=InvalidRequest("prompt[0]", 4096, "0 to 3839"))
    async with running(wrong) as fake:
        result = await k3svc_run("generate", "--endpoint", fake.endpoint, "--tokens-file", str(path), *EIGHT)
    values = json.loads(result.out)
    message = "prompt[0]: got 4096; allowed: 0 to 3839"
    assert result.status == 1
    (failed,) = [index for index, value in enumerate(values) if "error" in value]
    assert values[failed] == {"error": {"type": "InvalidRequest", "reason": "INVALID_FIELD", "message": message}}
    assert [value.get("token_ids") for i, value in enumerate(values) if i != failed] == [list(tokens(1))] * 2
    assert result.err == f"error: 1 of 3 prompts failed; first, prompt {failed}: {message}\n"


async def test_reasoning_ends_with_a_line_of_its_own():
    """Both streams in one, as on a terminal."""
    think = Step(answer=["why", " not", "<|close|>think<|sep|>", "<|open|>response<|sep|>", "so"])
    pipe = asyncio.subprocess.PIPE
    async with running(think) as fake:
        asked = ("generate", "--endpoint", fake.endpoint, "--chat", "--thinking", "Hi", "--max-tokens", "5")
        process = await asyncio.create_subprocess_exec(*K3SVC, *asked, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode().startswith("why not\nso\n1 (3 cached) + 5 tokens, ")


async def test_the_local_stack_is_used_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    started: list[str] = []

    @contextlib.asynccontextmanager
    async def embedded(config: Config) -> AsyncIterator[SimpleNamespace]:
        started.append(config.model.path)
        yield SimpleNamespace(decode_endpoints=["127.0.0.1:2"])

    monkeypatch.setattr(session, "embedded_stack", embedded)
    monkeypatch.setattr(session, "LOCAL_TIMEOUT_S", 60.0)
    config = build_config()
    async with running() as fake:
        monkeypatch.setattr(session, "LOCAL_ENDPOINT", fake.endpoint)
        async with session.connect(None, config) as client:
            assert client.endpoints == (fake.endpoint,)
        assert capsys.readouterr().err == f"using the stack at {fake.endpoint}\n"
        assert started == []
        async with session.connect(None, config, own_stack=True) as client:
            assert client.endpoints == ("127.0.0.1:2",)
        await fake.set_serving(False)
        async with session.connect(None, config) as client:
            assert client.endpoints == ("127.0.0.1:2",)
    async with session.connect(None, config) as client:
        assert client.endpoints == ("127.0.0.1:2",)
    assert started == [config.model.path] * 3


def test_the_model_that_nobody_names_lies_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert build_config().model.path == str(Path(k3svc.__file__).parents[1] / "models" / "k3-nano")
    assert build_config(overrides=["model.path=elsewhere"]).model.path == "elsewhere"
    assert build_config(model=Path("here")).model.path == "here"


def test_sigterm_stops_what_a_command_started():
    stopped: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            stopped.append("stack")

    with pytest.raises(typer.Exit) as caught:
        run_command(work())
    assert (caught.value.exit_code, stopped) == (143, ["stack"])


async def test_ctrl_c_while_the_command_loads_is_quiet():
    code = (
        "import os, signal, sys\n"
        "from k3svc.cli.main import main\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'k3svc.client':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "main()\n"
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, "version", stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_device_that_is_not_here_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, out, err = run_main(["up", "--device", "npv"], monkeypatch, capsys)
    assert (status, out) == (1, "")
    assert "backend   npv: missing. model.device: this build has no backend 'npv'" in err
    assert err.splitlines()[-1] == "error: model.device: npv does not run here (BACKEND_MISSING)"
    assert "starting" not in err


def test_up_serves_where_the_other_commands_look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    ports: list[int] = []

    async def serve(stack: Any, *, restart: bool) -> None:
        ports.append(stack._config.server.port)

    monkeypatch.setattr(up_module, "_serve", serve)
    for arguments in ([], ["--port", "0"], ["--set", "server.port=7000"], ["--port", "7001"]):
        assert run_main(["up", *arguments], monkeypatch, capsys)[0] == 0
    assert ports == [50051, 0, 7000, 7001]
    assert session.LOCAL_ENDPOINT == "127.0.0.1:50051"


def test_up_starts_a_gateway_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    started: list[Any] = []

    async def serve(stack: Any, *, restart: bool) -> None:
        started.append((stack._gateway, stack._config.gateway.enabled))

    monkeypatch.setattr(up_module, "_serve", serve)
    pd = ["--gateway", "--gateway-mode", "pd", "--gateway-port", "0"]
    for arguments in ([], ["--gateway"], pd):
        assert run_main(["up", *arguments], monkeypatch, capsys)[0] == 0
    assert started == [
        (None, False),
        (GatewayOptions(mode="plain", port=30000), True),
        (GatewayOptions(mode="pd", port=0), True),
    ]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = run_main(["up", "--gateway"], monkeypatch, capsys)
    assert (status, "pip install 'k3svc[gateway]'" in err) == (2, True)


def test_a_taken_port_names_the_way_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = run_main(["up", "--port", str(port)], monkeypatch, capsys)
    assert status == 2
    assert f"cannot bind 127.0.0.1:{port}: Address already in use; --port 0 takes a free one" in err


async def test_health_exits_0_only_if_it_serves():
    async with running() as fake:
        good = await k3svc_run("health", fake.endpoint)
        await fake.set_serving(False)
        bad, unknown = await asyncio.gather(
            k3svc_run("health", fake.endpoint), k3svc_run("health", fake.endpoint, "--service", "k3svc.v1.Other")
        )
    assert (good.status, good.out, good.err) == (0, "SERVING\n", "")
    assert (bad.status, bad.out) == (1, "NOT_SERVING\n")
    assert unknown.status == 1


async def test_chat_keeps_the_conversation_and_ctrl_c_stops_an_answer_alone():
    async with running(Step(answer=["He", "llo"]), Step(hang_after=1), Step(answer=["Ye", "s"])) as fake:
        process = await start(
            *("chat", "--endpoint", fake.endpoint, "--max-tokens", "2", "--system", "Be brief.", "--temperature", "0")
        )
        assert process.stdin is not None
        process.stdin.write(b"Hi\nWait\n")
        await fake.service.reached.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate(b"Still there?\n/help\n/reset\nAgain\n/exit\n")
    assert process.returncode == 0, err
    histories = [[(m.role, m.content) for m in request.chat.messages] for request in fake.service.requests]
    system, first = ("system", "Be brief."), [("user", "Hi"), ("assistant", "Hello")]
    assert histories == [
        [system, ("user", "Hi")],
        [system, *first, ("user", "Wait")],
        [system, *first, ("user", "Still there?")],
        [system, ("user", "Again")],
    ]
    assert b"Hello\n" in out
    assert b"Yes\n" in out
    assert b"stopped" in err
    assert b"forgotten" in err
    assert all(request.sampling.HasField("temperature") for request in fake.service.requests)


async def test_chat_survives_a_failed_answer_and_ends_with_its_input():
    async with running(Step(error=InvalidRequest("messages", "x", "y"))) as fake:
        result = await k3svc_run("chat", "--endpoint", fake.endpoint, *EIGHT, given="Hi\nAgain\n")
    # The input is no terminal: what was not answered shows in the exit code, and nobody is prompted.
    assert result.status == 1
    assert result.out == text(tokens(1)) + "\n"
    assert result.err == "\nerror: messages: got 'x'; allowed: y\n"
    assert len(fake.service.requests[1].chat.messages) == 1


@pytest.mark.parametrize("name", ["up", "generate", "chat", "logits", "health", "doctor", "demo", "version"])
def test_every_command_has_help_with_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, out, _ = run_main([name, "--help"], monkeypatch, capsys)
    assert status == 0
    assert f"Example: k3svc {name}" in out
    assert f" {name} " in run_main(["--help"], monkeypatch, capsys)[1]


def test_bare_k3svc_shows_help_and_version_is_an_option_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, out, err = run_main([], monkeypatch, capsys)
    assert (status, err) == (0, "")
    assert " generate " in out
    assert run_main(["--version"], monkeypatch, capsys) == run_main(["version"], monkeypatch, capsys)


async def test_version_and_the_commands_that_talk_start_without_torch():
    result = await k3svc_run("version")
    assert result.out.startswith(f"k3svc {k3svc.__version__} (")
    code = "import sys, k3svc.cli.main; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


def test_the_summary_of_the_demo():
    def completion(n: int, tpot_ms: float, tail_ms: float) -> Completion:
        timings = Timings(
            queue_ms=0.0, prefill_ms=20.0, handoff_tail_ms=tail_ms, ttft_ms=30.0, tpot_ms=tpot_ms,
            handoff_bytes=600_000, preemptions=0, prefill_attempts=1,
        )  # fmt: skip
        sample = Sample(
            index=0, text="", reasoning="", tool_calls=(), token_ids=(1,) * n, logprobs=(),
            finish_reason=FinishReason.LENGTH, stopped_by="",
        )  # fmt: skip
        return Completion(
            request_id="r", seed=1, prompt_token_ids=(1,), samples=(sample,), timings=timings, attempts=1,
            variants=("v",),
            usage=Usage(prompt_tokens=1, completion_tokens=n, cached_tokens=0), speculation=SpeculationStats(),
        )  # fmt: skip

    assert summary_lines([completion(11, 10.0, 1.0), completion(31, 5.0, 4.0)]) == [
        "shipped   1,200,000 bytes of state from prefill to decode in 2 hand-offs",
        "hand-off  2.5 ms on average after 20.0 ms of prefill",
        "decode    160 tokens/s, one request at a time",
    ]
