"""The commands as processes, against a decode service that runs in the test's loop."""

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import k3svc
from k3svc.cli.demo import summary_lines
from k3svc.cli.generate import read_tokens_file
from k3svc.cli.main import main
from k3svc.client import Completion, Sample
from k3svc.core.events import SpeculationStats, Timings, Usage
from k3svc.core.request import FinishReason
from k3svc.errors import ConfigError, InvalidRequest
from tests.unit.client.fake_decode import SEED, Step, running, text, tokens

K3SVC = (sys.executable, "-c", "from k3svc.cli.main import main; main()")
IDS = "1,2,3"


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*K3SVC, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)


async def k3svc_run(*arguments: str, given: str = "") -> SimpleNamespace:
    process = await start(*arguments)
    out, err = await asyncio.wait_for(process.communicate(given.encode()), 30)
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
    assert "9 + 3 tokens, length" in result.err
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
        },
        "speculation": {"steps": 2, "proposed": 0, "accepted": 0},
        "request_id": fake.service.requests[0].request_id,
        "seed": SEED,
    }


async def test_generate_passes_its_options_on():
    async with running() as fake:
        result = await k3svc_run(
            *("generate", "--endpoint", fake.endpoint, "--chat", "--thinking", "--system", "Be brief.", "Hi", "--json"),
            *("--temperature", "0", "--top-k", "5", "--top-p", "0.5", "--min-p", "0.25", "--seed", "7", "--n", "2"),
            *("--stop", "a", "--stop", "b", "--ignore-eos", "--max-tokens", "4", "--draft", "none"),
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
        await asyncio.wait_for(fake.service.reached.wait(), 20)
        while len(fake.service.requests) < 3:
            await asyncio.sleep(0.001)
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 20)
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
        ("", "Missing command"),
        ("generate", "exactly one of PROMPT, --tokens and --tokens-file"),
        ("generate a --tokens 1", "exactly one of PROMPT, --tokens and --tokens-file"),
        ("generate --tokens 1,x", "--tokens: '1,x'"),
        ("generate --tokens 1 --chat", "--chat: needs PROMPT"),
        ("generate a --thinking", "--thinking: only with --chat"),
        ("generate a --draft dflash", "--draft: 'dflash'; allowed: none"),
        ("generate a --model no/such/folder", "no folder no/such/folder; name a checkpoint with --model DIR"),
        ("generate a --no-such-option", "--no-such-option"),
        ("generate a --endpoint 127.0.0.1:1 --top-k -1", "top_k: got -1"),
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
        refused, gone = await asyncio.gather(
            k3svc_run("generate", "--endpoint", fake.endpoint, "a", "--top-p", "2"), k3svc_run("health", "127.0.0.1:1")
        )
    assert (refused.status, refused.out) == (2, "")
    assert refused.err == "error: sampling.top_p: got 2.0; allowed: a number in (0, 1]\n"
    assert (gone.status, gone.out) == (1, "")
    assert gone.err.startswith("error: ")
    assert gone.err.count("\n") == 1


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
        await asyncio.wait_for(fake.service.reached.wait(), 20)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(b"Still there?\n/help\n/reset\nAgain\n/exit\n"), 20)
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
        result = await k3svc_run("chat", "--endpoint", fake.endpoint, given="Hi\nAgain\n")
    assert result.status == 0
    assert "error: messages: got 'x'; allowed: y" in result.err
    assert len(fake.service.requests[1].chat.messages) == 1


@pytest.mark.parametrize("name", ["up", "generate", "chat", "logits", "health", "doctor", "demo", "version"])
def test_every_command_has_help_with_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, out, _ = run_main([name, "--help"], monkeypatch, capsys)
    assert status == 0
    assert f"Example: k3svc {name}" in out
    assert f" {name} " in run_main(["--help"], monkeypatch, capsys)[1]


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
            usage=Usage(prompt_tokens=1, completion_tokens=n, cached_tokens=0), speculation=SpeculationStats(),
        )  # fmt: skip

    assert summary_lines([completion(11, 10.0, 1.0), completion(31, 5.0, 4.0)]) == [
        "shipped   1,200,000 bytes of state from prefill to decode in 2 hand-offs",
        "hand-off  2.5 ms on average after 20.0 ms of prefill",
        "decode    160 tokens/s, one request at a time",
    ]
