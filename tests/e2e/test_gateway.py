"""The public gateway smg and the openai client in front of two prefill and two decode services, plain and PD.

One set of services serves both: decode services take requests that name a room and requests that do not. What comes
through the gateway is compared with what the native client gets.
"""

import asyncio
import json
import re
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from k3svc.cli.stack import Stack
from k3svc.client import AsyncClient, RetryPolicy
from k3svc.config import load_config
from k3svc.gateway.launch import GatewayOptions, Mode, is_ready, smg_command
from k3svc.rpc.process import hold_port
from k3svc.text.tokenizer import Tokenizer

NANO = Path(__file__).parents[2] / "models" / "k3-nano"
GOLDEN = json.loads((NANO / "golden.json").read_text())["prompts"]
SEED = 23
LEASE_S = 5
PATIENCE_S = 60.0
MODEL = "k3-nano"
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
NO_THINKING = {"chat_template_kwargs": {"thinking": False}}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(kw_only=True)
class World:
    stack: Stack
    native: AsyncClient
    urls: dict[Mode, str]
    """Base URL of each gateway, without /v1."""

    async def assert_idle(self, without: str = "") -> None:
        """Soon nothing is held on any role, what a killed decode service asked for included."""
        deadline = asyncio.get_running_loop().time() + LEASE_S + PATIENCE_S
        for endpoint in (*self.stack.decode_endpoints, *self.stack.prefill_endpoints):
            while endpoint != without:
                load = await self.native.load(endpoint)
                held = (load.running, load.waiting, load.in_transfer)
                if held == (0, 0, 0) and (load.free_pages, load.free_slots) == (load.total_pages, load.total_slots):
                    break
                assert asyncio.get_running_loop().time() < deadline, f"{endpoint} still holds {load}"
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    settings = [
        f"gateway.seed={SEED}",
        f"prefill.lease_s={LEASE_S}",
        "cache.num_pages=256",
        "cache.num_slots=32",
        "server.drain_s=2",
    ]
    config = load_config(None, [f"model.path={NANO}", "model.device=cpu", "log.level=warning", *settings])
    async with AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(Stack(config, prefill=2, decode=2, gateway=GatewayOptions(mode="pd")))
        plain = await cleanup.enter_async_context(plain_gateway(stack))
        native = await cleanup.enter_async_context(AsyncClient(stack.decode_endpoints, retry=RetryPolicy(attempts=12)))
        yield World(stack=stack, native=native, urls={"pd": f"http://{stack.gateway_endpoint}", "plain": plain})


@asynccontextmanager
async def plain_gateway(stack: Stack) -> AsyncIterator[str]:
    """A second gateway, of the other mode, in front of the same services."""
    with hold_port("127.0.0.1", 0) as held, hold_port("127.0.0.1", 0) as held_too:
        port, metrics_port = (each.getsockname()[1] for each in (held, held_too))
        command = smg_command(
            GatewayOptions(mode="plain"),
            port=port,
            metrics_port=metrics_port,
            decode=stack.decode_endpoints,
            prefill=(),
            model=NANO,
            drain_s=1,
        )
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=quiet, stderr=quiet)
        try:
            while not await is_ready("127.0.0.1", port):
                assert process.returncode is None, "the gateway ended"
                await asyncio.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            await process.wait()


@pytest.fixture(params=["plain", "pd"])
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest_asyncio.fixture(loop_scope="module")
async def client(world: World, mode: Mode) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(world, mode) as opened:
        yield opened


def client_of(world: World, mode: Mode, *, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.urls[mode]}/v1", api_key="none", max_retries=max_retries)


async def chat(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(
        **{"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 64, **options}
    )


async def token_ids(url: str, prompt: list[int], **sampling: Any) -> list[list[int]]:
    """Output ids by sample, from the one path of the gateway that shows them."""
    body = {"model": MODEL, "input_ids": prompt, "sampling_params": sampling}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
    return [sample["output_ids"] for sample in answer]


async def test_the_model_is_listed_under_its_name(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_greedy_tokens_are_the_golden_ones(world: World, mode: Mode) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    got = await asyncio.gather(*(token_ids(world.urls[mode], golden["ids"], **options) for golden in GOLDEN))
    assert got == [[golden["continuation_ids"]] for golden in GOLDEN]


async def test_sampled_tokens_are_those_of_the_native_client(world: World, mode: Mode) -> None:
    for golden in GOLDEN:
        native = await world.native.generate(
            tokens=golden["ids"], temperature=0.75, top_p=0.875, max_tokens=24, n=2, seed=SEED
        ).result()
        got = await token_ids(world.urls[mode], golden["ids"], temperature=0.75, top_p=0.875, max_new_tokens=24, n=2)
        assert got == [list(sample.token_ids) for sample in native.samples]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.75])
async def test_chat_is_that_of_the_native_client(
    world: World, client: openai.AsyncOpenAI, thinking: bool, temperature: float
) -> None:
    native = await world.native.generate(
        messages=QUESTION, max_tokens=64, temperature=temperature, seed=SEED, thinking=thinking
    ).result()
    options = {"chat_template_kwargs": {"thinking": thinking}}
    answer = await chat(client, temperature=temperature, extra_body=options)
    (choice,) = answer.choices
    assert choice.message.content == native.text
    assert getattr(choice.message, "reasoning_content", None) == (native.reasoning or None)
    assert answer.usage.completion_tokens == native.usage.completion_tokens
    assert choice.finish_reason == native.finish_reason.value


async def test_reasoning_is_apart_from_the_answer_in_a_stream_too(client: openai.AsyncOpenAI) -> None:
    whole = await chat(client)
    assert whole.choices[0].message.content and whole.choices[0].message.reasoning_content
    content, reasoning, usage = "", "", None
    async for chunk in await chat(client, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
    assert (content, reasoning) == (whole.choices[0].message.content, whole.choices[0].message.reasoning_content)
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens


async def test_completions_streamed_and_not(world: World, client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "import os\n", "max_tokens": 16, "temperature": 0}
    native = await world.native.generate("import os\n", max_tokens=16, temperature=0.0).result()
    answer = await client.completions.create(**options)
    assert answer.choices[0].text == native.text
    pieces = [c.choices[0].text async for c in await client.completions.create(stream=True, **options) if c.choices]
    assert len(pieces) > 4 and "".join(pieces) == native.text


async def test_usage_has_the_tokens_that_came_from_the_prefix_cache(mode: Mode, client: openai.AsyncOpenAI) -> None:
    text = "".join(f"import module_{mode}_{number}\n" for number in range(80))
    options: Any = {"model": MODEL, "prompt": text, "max_tokens": 8, "temperature": 0}
    answers = [await client.completions.create(**options) for _ in range(3)]
    assert len({answer.choices[0].text for answer in answers}) == 1
    cached = [getattr(answer.usage.prompt_tokens_details, "cached_tokens", None) or 0 for answer in answers]
    # There are two prefill services, so one of them has been asked twice by then.
    size = answers[0].usage.prompt_tokens
    assert size > 512
    assert (cached[0], max(cached)) == (0, (size - 1) // 128 * 128)


async def test_two_samples_differ_and_are_those_of_the_native_client(world: World, client: openai.AsyncOpenAI) -> None:
    native = await world.native.generate(messages=QUESTION, max_tokens=32, temperature=1.0, seed=SEED, n=2).result()
    answer = await chat(client, n=2, temperature=1.0, max_tokens=32, extra_body=NO_THINKING)
    texts = [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    assert texts == [sample.text for sample in native.samples]
    assert texts[0] != texts[1]


async def test_log_probabilities_are_those_of_the_native_client(world: World, client: openai.AsyncOpenAI) -> None:
    native = await world.native.generate(messages=QUESTION, max_tokens=8, temperature=0.0, logprobs=3).result()
    answer = await chat(client, max_tokens=8, logprobs=True, top_logprobs=3, extra_body=NO_THINKING)
    got = answer.choices[0].logprobs.content
    tokenizer = Tokenizer.load(NANO)
    assert [entry.token for entry in got] == [tokenizer.decode([token_id]) for token_id in native.token_ids]
    for entry, want in zip(got, native.logprobs, strict=True):
        assert entry.logprob == pytest.approx(want.logprob, abs=1e-5)
        assert [top.token for top in entry.top_logprobs] == [tokenizer.decode([t]) for t, _ in want.top]


async def test_a_stop_string_ends_the_text_and_the_request(world: World, client: openai.AsyncOpenAI) -> None:
    whole = (await chat(client, extra_body=NO_THINKING)).choices[0].message.content
    stop = whole[10:16]
    answer = await chat(client, stop=[stop, "never there"], extra_body=NO_THINKING)
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    await world.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_is_parsed_and_its_answer_understood(client: openai.AsyncOpenAI, stream: bool) -> None:
    question = [{"role": "user", "content": "Use the tool to add 12 and 30."}]
    answer = await chat(client, messages=question, tools=TOOLS, max_tokens=96, stream=stream)
    if stream:
        name, arguments, call_id = "", "", ""
        async for chunk in answer:
            for call in chunk.choices[0].delta.tool_calls or ():
                call_id = call.id or call_id
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        name, arguments, call_id = call.function.name, call.function.arguments, call.id
    assert (name, json.loads(arguments)) == ("add", {"a": 12, "b": 30})
    called = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    turns = [
        *question,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call_id, "content": "42"},
    ]
    final = await chat(client, messages=turns, tools=TOOLS)
    assert "42" in final.choices[0].message.content


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_tool_that_must_be_called_is_called(client: openai.AsyncOpenAI, tool_choice: Any) -> None:
    answer = await chat(client, tools=TOOLS, tool_choice=tool_choice, max_tokens=160)
    calls = answer.choices[0].message.tool_calls
    wanted: dict[str, dict[str, type]] = {"add": {"a": float, "b": float}, "get_weather": {"city": str}}
    if tool_choice != "required":
        del wanted["add"]
    for call in calls:
        arguments = json.loads(call.function.arguments)
        kinds = wanted[call.function.name]
        assert set(arguments) == set(kinds)
        assert all(isinstance(arguments[name], (kind, int)) for name, kind in kinds.items())
    assert calls


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("thinking", [False, True])
async def test_json_obeys_its_schema(client: openai.AsyncOpenAI, thinking: bool, temperature: float) -> None:
    """The model cannot write JSON by itself; a schema without numbers and strings of any length has an end."""
    schema = {
        "type": "object",
        "properties": {
            "color": {"enum": ["red", "green"]},
            "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        },
        "required": ["color", "flags"],
        "additionalProperties": False,
    }
    answer = await chat(
        client,
        temperature=temperature,
        max_tokens=256,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        extra_body={"chat_template_kwargs": {"thinking": thinking}},
    )
    value = json.loads(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert value["color"] in {"red", "green"} and list(value) == ["color", "flags"]
    assert [type(flag) for flag in value["flags"]] == [bool, bool]


async def test_a_regular_expression_binds_the_first_token_too(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "import os\n", "max_tokens": 32, "temperature": 0}
    answer = await client.completions.create(extra_body={"regex": "[0-9]{3}-[a-f]{2}"}, **options)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="unclosed character class"):
        await client.completions.create(extra_body={"regex": "[0-9"}, **options)


async def test_32_at_once_get_the_tokens_they_would_get_alone(world: World, client: openai.AsyncOpenAI) -> None:
    prompts = [f"def f{i}(x):\n    return x + {i}\n" for i in range(32)]

    async def complete(prompt: str) -> str:
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0.75)
        text: str = answer.choices[0].text
        return text

    async def alone(prompt: str) -> str:
        native = world.native.generate(prompt, max_tokens=12, temperature=0.75, seed=SEED, include_control_text=True)
        return (await native.result()).text

    texts = await asyncio.gather(*map(complete, prompts))
    assert texts == await asyncio.gather(*map(alone, prompts))
    await world.assert_idle()


async def test_a_client_that_leaves_frees_everything(world: World, client: openai.AsyncOpenAI) -> None:
    """Outputs of thousands of tokens, so that the requests cannot have ended by themselves."""

    async def leave(after: int) -> None:
        options: Any = {"model": MODEL, "prompt": "import os\n", "max_tokens": 8000, "temperature": 0}
        stream = await client.completions.create(stream=True, extra_body={"ignore_eos": True}, **options)
        async for _ in stream:
            after -= 1
            if after == 0:
                break
        await stream.close()

    await asyncio.gather(*(leave(1 + i % 3) for i in range(6)))
    await world.assert_idle()


async def test_what_cannot_be_served_is_a_bad_request(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_new_tokens: got 100000"):
        await chat(client, max_tokens=100_000)
    with pytest.raises(openai.NotFoundError):
        await chat(client, model="another")


async def test_a_decode_service_that_dies_under_load_costs_no_request(world: World) -> None:
    """SIGKILL in the middle of 32 requests over both gateways; afterwards the other one goes, so that what is served
    is served by the one that came back.
    """
    prompts = [f"class C{i}:\n    " for i in range(16)]
    # So many tokens that the service is seen at work before it has done all of it.
    count = 96
    async with client_of(world, "plain", max_retries=6) as plain, client_of(world, "pd", max_retries=6) as pd:

        async def complete(client: openai.AsyncOpenAI, prompt: str) -> str:
            answer = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=count, temperature=0, extra_body={"ignore_eos": True}
            )
            text: str = answer.choices[0].text
            return text

        alone = [
            world.native.generate(
                prompt, max_tokens=count, temperature=0.0, ignore_eos=True, include_control_text=True
            ).result()
            for prompt in prompts
        ]
        want = [completion.text for completion in await asyncio.gather(*alone)]
        tasks = [asyncio.ensure_future(complete(client, prompt)) for prompt in prompts for client in (plain, pd)]
        _, endpoint = world.stack.decode_endpoints
        while (await world.native.load(endpoint)).running < 2:
            assert not all(task.done() for task in tasks), "the requests were over before the service could be killed"
        await world.stack.restart("decode-1")
        texts = await asyncio.gather(*tasks)
        assert texts == [text for text in want for _ in range(2)]
        await world.stack.kill("decode-0")
        for client in (plain, pd):
            assert await complete(client, prompts[0]) == want[0]
        await world.assert_idle(without=world.stack.decode_endpoints[0])
