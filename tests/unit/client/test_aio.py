import asyncio
import gc
import itertools
from pathlib import Path
from typing import Any

import grpc
import pytest

from k3svc.client import AsyncClient, Balance, Completion, Delta, Finished, RetryPolicy, Started
from k3svc.core.request import FinishReason
from k3svc.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    Incompatible,
    InvalidRequest,
    K3svcError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from k3svc.rpc.process import hold_port
from tests.unit.client.fake_decode import SEED, Step, running, text, tokens

IN_ORDER = Balance(shuffle=False)
FAST = RetryPolicy(attempts=4, backoff_s=0.01, max_backoff_s=0.02)
PROMPT = (1, 2, 3)


async def test_events_come_in_order_and_the_result_is_their_sum():
    async with running() as fake, AsyncClient(fake.endpoint) as client:
        events = [event async for event in client.generate(tokens=PROMPT, max_tokens=4, logprobs=2)]
        result = await client.generate(tokens=PROMPT, max_tokens=4, logprobs=2).result()
    assert events[0] == Started(
        request_id=fake.service.requests[0].request_id,
        seed=SEED,
        prompt_token_ids=PROMPT,
        fingerprint="fake-model",
        variant="fake/1",
    )
    deltas = [event for event in events[1:-1] if isinstance(event, Delta)]
    assert len(deltas) == len(events) - 2
    assert [delta.token_ids for delta in deltas] == [(i,) for i in tokens(3, n=4)]
    assert "".join(delta.text for delta in deltas) == text(tokens(3, n=4))
    assert [delta.finish_reason for delta in deltas] == [None, None, None, FinishReason.LENGTH]
    assert isinstance(events[-1], Finished)
    assert result.token_ids == tokens(3, n=4)
    assert result.text == text(tokens(3, n=4))
    assert result.finish_reason is FinishReason.LENGTH
    assert [entry.top for entry in result.logprobs] == [((i, -0.5), (i + 1, -1.5)) for i in tokens(3, n=4)]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.cached_tokens) == (3, 4, 3)
    assert result.timings is not None
    assert (result.timings.ttft_ms, result.timings.handoff_bytes, result.speculation.steps) == (12.5, 1000, 4)
    assert (result.seed, result.attempts) == (SEED, 1)


async def test_options_reach_the_service():
    async with running() as fake, AsyncClient(fake.endpoint) as client:
        await client.generate(
            "import os", request_id="r-1", temperature=0.0, top_k=5, top_p=0.5, min_p=0.25, seed=0, n=2,
            logit_bias={7: -1.5}, max_tokens=3, min_tokens=1, stop="end", stop_token_ids=[9], ignore_eos=True,
            priority=-3,
        ).result()  # fmt: skip
        await client.generate(
            messages=[{"role": "user", "content": "Hi"}], thinking=True, thinking_effort="low", tools=[{"type": "x"}]
        ).result()
    first, second = fake.service.requests
    assert (first.text, first.request_id, first.priority) == ("import os", "r-1", -3)
    sampling = first.sampling
    assert sampling.HasField("temperature")
    assert sampling.HasField("seed")
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 5, 0.5, 0.25)
    assert (sampling.seed, sampling.n, dict(sampling.logit_bias)) == (0, 2, {7: -1.5})
    assert not sampling.HasField("repetition_penalty")
    stop = first.stop
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos) == (3, 1, True)
    assert (list(stop.stop), list(stop.stop_token_ids)) == (["end"], [9])
    assert not first.HasField("logprobs")
    assert [(m.role, m.content) for m in second.chat.messages] == [("user", "Hi")]
    assert (second.chat.thinking, second.chat.thinking_effort) == (True, "low")
    assert second.chat.tools_json == '[{"type":"x"}]'
    assert second.include_control_text
    assert not first.include_control_text


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "tokens": [1]}, "prompt"),
        ({"tokens": [1, -1]}, r"tokens\[1\]"),
        ({"tokens": [1.5]}, r"tokens\[0\]"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "thinking": True}, "thinking"),
        ({"messages": [{"content": "Hi"}]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "contents": "Hi"}]}, r"messages\[0\]"),
    ],
)
async def test_what_no_message_can_carry_is_refused_with_its_field(arguments: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest, match=f"^{field}: got"):
        AsyncClient("127.0.0.1:1").generate(**arguments)


@pytest.mark.parametrize("endpoint", ["", "localhost", ":1", "host:", "host:0", "host:65536", "host:x"])
def test_endpoints_are_host_and_port(endpoint: str):
    with pytest.raises(InvalidRequest, match="host:port"):
        AsyncClient([endpoint])


async def test_unknown_options_are_named():
    with pytest.raises(TypeError, match=r"^unknown option temprature; did you mean temperature\?$"):
        AsyncClient("127.0.0.1:1").generate("a", temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^unknown option zzz; known: request_id, temperature, "):
        AsyncClient("127.0.0.1:1").generate("a", zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("break_after", [1, 2, 5, 7])
async def test_a_broken_stream_is_resumed_elsewhere_without_a_seam(break_after: int):
    async with (
        running(Step(break_after=break_after)) as first,
        running() as second,
        AsyncClient([first.endpoint, second.endpoint], balance=IN_ORDER, retry=FAST) as client,
    ):
        events = [event async for event in client.generate(tokens=PROMPT)]
    resumed = second.service.requests[0]
    assert list(resumed.generated_token_ids.ids) == list(tokens(3)[:break_after])
    assert list(resumed.tokens.ids) == list(PROMPT)
    assert resumed.sampling.seed == SEED
    assert resumed.request_id == first.service.requests[0].request_id
    assert sum(isinstance(event, Started) for event in events) == 1
    deltas = [event for event in events if isinstance(event, Delta)]
    assert tuple(i for delta in deltas for i in delta.token_ids) == tokens(3)
    assert "".join(delta.text for delta in deltas) == text(tokens(3))
    assert isinstance(events[-1], Finished)


async def test_a_resume_on_other_kernels_is_told(caplog: pytest.LogCaptureFixture):
    steps = (Step(break_after=3), Step(variant="fake/2"))
    async with running(*steps) as fake, AsyncClient(fake.endpoint, retry=FAST) as client:
        result = await client.generate(tokens=PROMPT).result()
    assert result.variants == ("fake/1", "fake/2")
    assert "began on fake/1 and goes on with fake/2" in caplog.text


async def test_a_resume_on_another_model_is_refused():
    steps = (Step(break_after=3), Step(model="other"))
    async with running(*steps) as fake, AsyncClient(fake.endpoint, retry=FAST) as client:
        with pytest.raises(Incompatible, match="cannot go on with other"):
            await client.generate(tokens=PROMPT).result()


async def test_a_stream_that_breaks_again_and_again_goes_on_while_there_are_new_tokens():
    steps = [Step(break_after=1) for _ in range(7)]
    async with running(*steps) as fake, AsyncClient(fake.endpoint, retry=FAST) as client:
        result = await client.generate(tokens=PROMPT).result()
    assert result.token_ids == tokens(3)
    assert result.text == text(tokens(3))
    assert result.attempts == 8 > FAST.attempts


async def test_tokens_that_the_caller_resumed_with_are_kept_in_front():
    given = tokens(3)[:2]
    async with running(Step(break_after=3)) as fake, AsyncClient(fake.endpoint, retry=FAST) as client:
        result = await client.generate(tokens=PROMPT, generated_token_ids=given).result()
    assert [list(r.generated_token_ids.ids) for r in fake.service.requests] == [list(given), list(tokens(3)[:5])]
    assert result.token_ids == tokens(3)[2:]


async def test_several_samples_are_repeated_and_continued_without_a_seam():
    async with (
        running(Step(break_after=3)) as first,
        running() as second,
        AsyncClient([first.endpoint, second.endpoint], balance=IN_ORDER, retry=FAST) as client,
    ):
        result = await client.generate(tokens=PROMPT, n=3, logprobs=0).result()
    assert not second.service.requests[0].generated_token_ids.ids
    assert second.service.requests[0].sampling.seed == SEED
    assert [sample.token_ids for sample in result.samples] == [tokens(3, sample=i) for i in range(3)]
    assert [sample.text for sample in result.samples] == [text(tokens(3, sample=i)) for i in range(3)]
    assert [len(sample.logprobs) for sample in result.samples] == [8, 8, 8]


async def test_a_repetition_that_differs_is_an_error():
    other = Step(seed_offset=1, hang_after=4)
    async with running(Step(break_after=3), other) as fake, AsyncClient(fake.endpoint) as client:
        with pytest.raises(EngineFault, match="other tokens than before") as caught:
            await client.generate(tokens=PROMPT, n=2).result()
        assert caught.value.reason == "RESUME_DIFFERS"
        while fake.service.live:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_break_after_the_last_token_ends_the_request(n: int):
    async with running(Step(break_before_end=True)) as fake, AsyncClient(fake.endpoint) as client:
        result = await client.generate(tokens=PROMPT, n=n).result()
    assert len(fake.service.requests) == 1
    assert result.token_ids == tokens(3)
    assert result.timings is None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 8 * n)


async def test_a_full_service_is_tried_again_no_sooner_than_it_asks():
    full = Step(error=ResourceExhausted("the queue is full", retry_after_s=0.2))
    async with running(full, full) as fake, AsyncClient(fake.endpoint, retry=FAST) as client:
        result = await client.generate(tokens=PROMPT).result()
    times = fake.service.times
    assert result.attempts == 3
    assert all(later - earlier >= 0.2 for earlier, later in itertools.pairwise(times))
    assert len({request.request_id for request in fake.service.requests}) == 1


async def test_another_endpoint_is_tried_at_once():
    full = Step(error=ResourceExhausted("the queue is full", retry_after_s=30.0))
    async with (
        running(full) as first,
        running() as second,
        AsyncClient([first.endpoint, second.endpoint], balance=IN_ORDER) as client,
    ):
        result = await asyncio.wait_for(client.generate(tokens=PROMPT).result(), 25.0)
    assert result.attempts == 2
    assert len(second.service.requests) == 1


async def test_requests_go_round_robin():
    async with running() as a, running() as b, AsyncClient([a.endpoint, b.endpoint], balance=IN_ORDER) as client:
        for _ in range(4):
            await client.generate(tokens=PROMPT, max_tokens=1).result()
    assert (len(a.service.requests), len(b.service.requests)) == (2, 2)


async def test_a_request_that_waits_for_a_full_endpoint_goes_to_one_that_comes(tmp_path: Path):
    full = Step(error=ResourceExhausted("the queue is full", retry_after_s=30.0))
    path = tmp_path / "decode"
    async with running(full) as first, running() as second:
        path.write_text(first.endpoint)
        async with AsyncClient(f"file:{path}", balance=Balance(refresh_s=0.02)) as client:
            waiting = asyncio.create_task(client.generate(tokens=PROMPT).result())
            while not first.service.requests:
                await asyncio.sleep(0.001)
            path.write_text(second.endpoint)
            result = await asyncio.wait_for(waiting, 25.0)
            assert (result.token_ids, result.attempts) == (tokens(3), 2)
            assert client.endpoints == (second.endpoint,)


async def test_attempts_are_bounded():
    gone = Step(error=Unavailable("draining"))
    async with running(*[gone] * 9) as fake, AsyncClient(fake.endpoint, retry=FAST) as client:
        with pytest.raises(Unavailable, match="draining"):
            await client.generate(tokens=PROMPT).result()
    assert len(fake.service.requests) == FAST.attempts


async def test_nobody_there_is_unavailable():
    async with AsyncClient("127.0.0.1:1", retry=RetryPolicy(attempts=2, backoff_s=0.01)) as client:
        for call in (client.generate("a").result(), client.health(), client.model_info(), client.load()):
            with pytest.raises(Unavailable, match=r"^nothing listens at 127\.0\.0\.1:1$") as caught:
                await call
            assert caught.value.reason == "UNREACHABLE"


async def test_a_service_that_has_come_since_the_last_look_is_found():
    with hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            while client._channel(f"127.0.0.1:{port}").get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                with pytest.raises(Unavailable):
                    await client.load()
            async with running(port=port):
                assert (await client.model_info()).role == "decode"


async def test_a_service_that_reaches_no_other_one_was_reached_itself():
    """Its words may be those of the transport."""
    words = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Connection refused"
    gone = Step(error=Unavailable(words, reason="PREFILL_UNREACHABLE"))
    async with running(gone) as fake, AsyncClient(fake.endpoint, retry=RetryPolicy(attempts=1)) as client:
        with pytest.raises(Unavailable) as caught:
            await client.generate(tokens=PROMPT).result()
    assert (caught.value.message, caught.value.reason) == (words, "PREFILL_UNREACHABLE")


async def test_a_request_to_another_role_is_told_what_serves_there():
    async with running(role="prefill") as fake, AsyncClient(fake.endpoint, retry=FAST) as client:
        with pytest.raises(Incompatible, match=f"^{fake.endpoint} is a prefill service; requests go to a decode"):
            await client.generate("a").result()
        with pytest.raises(NotFound, match=f"^{fake.endpoint} has no service 'k3svc.v1.Other'$"):
            await client.health(service="k3svc.v1.Other")


@pytest.mark.parametrize("value", ["hot", None, True, [1.0]])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
async def test_what_is_no_number_is_refused_with_its_field(name: str, value: Any):
    with pytest.raises(InvalidRequest, match=f"^{name}: got .*; allowed: a number$"):
        AsyncClient("127.0.0.1:1").generate("a", **{name: value})


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "a\udc80b"}, "prompt"),
        ({"prompt": "a", "stop": ["x", "\ud800"]}, r"stop\[1\]"),
        ({"prompt": "a", "request_id": "\udfff"}, "request_id"),
        ({"messages": [{"role": "user", "content": "\udc80"}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": "", "name": "\udc80"}]}, r"messages\[0\].name"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, r"messages\[0\].content"),
    ],
)
async def test_text_that_utf_8_cannot_hold_is_refused_with_its_field(arguments: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest, match=f"^{field}: got .*; allowed: text") as caught:
        AsyncClient("127.0.0.1:1").generate(**arguments)
    str(caught.value).encode()


async def test_a_wait_beyond_the_bound_is_refused():
    full = Step(error=ResourceExhausted("the queue is full", retry_after_s=31.0))
    async with running(full) as fake, AsyncClient(fake.endpoint) as client:
        with pytest.raises(ResourceExhausted):
            await client.generate(tokens=PROMPT).result()
    assert len(fake.service.requests) == 1


@pytest.mark.parametrize("error", [InvalidRequest("prompt", "x", "y"), EngineFault("a step failed")])
@pytest.mark.parametrize("after", [None, 2])
async def test_other_errors_are_final_as_they_are(error: K3svcError, after: int | None):
    steps = [Step(error=error)] if after is None else [Step(break_after=after), Step(error=error)]
    async with running(*steps) as fake, AsyncClient(fake.endpoint, retry=FAST) as client:
        with pytest.raises(type(error), match=error.message):
            await client.generate(tokens=PROMPT).result()
    assert len(fake.service.requests) == len(steps)


async def test_a_live_id_is_waited_out_only_if_it_may_be_our_own():
    taken = AlreadyExists("a live request has this id")
    async with running(Step(break_after=2), Step(error=taken)) as fake, AsyncClient(fake.endpoint) as client:
        assert (await client.generate(tokens=PROMPT, request_id="a").result()).token_ids == tokens(3)
        assert len(fake.service.requests) == 3
    async with running(Step(error=taken)) as fake, AsyncClient(fake.endpoint) as client:
        with pytest.raises(AlreadyExists):
            await client.generate(tokens=PROMPT, request_id="a").result()


async def test_the_deadline_bounds_the_whole_request(monkeypatch: pytest.MonkeyPatch):
    call, given = AsyncClient._call_generate, []

    def noting(client: AsyncClient, endpoint: str, request: Any, timeout_s: float) -> Any:
        given.append(timeout_s)
        return call(client, endpoint, request, timeout_s)

    monkeypatch.setattr(AsyncClient, "_call_generate", noting)
    async with running(Step(break_after=2)) as fake, AsyncClient(fake.endpoint) as client:
        await client.generate(tokens=PROMPT, timeout_s=100.0).result()
        first, second = given
        assert second < first <= 100.0
        assert all(left is not None and left < 101.0 for left in fake.service.deadlines), "on the wire it is rounded"
        fake.service.script = [Step(hang_after=2)]
        with pytest.raises(DeadlineExceeded):
            await client.generate(tokens=PROMPT, timeout_s=0.5).result()
        while fake.service.live:
            await asyncio.sleep(0.001)


async def test_no_attempt_starts_after_the_deadline():
    full = Step(error=ResourceExhausted("the queue is full", retry_after_s=30.0))
    async with running(full) as fake, AsyncClient(fake.endpoint) as client:
        with pytest.raises(DeadlineExceeded, match="the queue is full"):
            await client.generate(tokens=PROMPT, timeout_s=25.0).result()
    assert len(fake.service.requests) == 1


async def test_leaving_the_block_ends_the_request_on_the_service():
    async with running(Step(hang_after=2)) as fake, AsyncClient(fake.endpoint) as client:
        async with client.generate(tokens=PROMPT) as generation:
            async for event in generation:
                if isinstance(event, Delta):
                    break
        await fake.service.ended.wait()
        assert not fake.service.live


async def test_a_generation_that_is_dropped_ends_the_request_on_the_service():
    async with running(Step(hang_after=2)) as fake, AsyncClient(fake.endpoint) as client:
        async for event in client.generate(tokens=PROMPT):
            if isinstance(event, Delta):
                break
        gc.collect()
        await fake.service.ended.wait()


async def test_cancelling_the_reader_ends_the_request_on_the_service():
    async with running(Step(hang_after=2)) as fake, AsyncClient(fake.endpoint) as client:
        reader = asyncio.create_task(client.generate(tokens=PROMPT).result())
        await fake.service.reached.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await fake.service.ended.wait()


async def test_closing_the_client_ends_its_requests_with_an_error_of_ours():
    async with running(Step(hang_after=2)) as fake:
        client = AsyncClient(fake.endpoint)
        reader = asyncio.create_task(client.generate(tokens=PROMPT).result())
        await fake.service.reached.wait()
        await client.close()
        with pytest.raises(Cancelled, match="closed by the caller"):
            await reader
        with pytest.raises(Cancelled):
            await client.generate(tokens=PROMPT).result()
        with pytest.raises(Cancelled):
            await client.load()
        await client.close()


async def test_closing_ends_a_request_that_waits_for_its_next_attempt():
    full = Step(error=ResourceExhausted("the queue is full", retry_after_s=20.0))
    async with running(full) as fake:
        client = AsyncClient(fake.endpoint)
        reader = asyncio.create_task(client.generate(tokens=PROMPT).result())
        while not fake.service.requests:
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(reader, 15.0)


async def test_the_answer_to_messages_is_parsed_across_a_break():
    pieces = [
        "Let me",
        " see.",
        "<|close|>think<|sep|>",
        "<|open|>response<|se",
        "p|>Yes",
        ", it",
        " does.",
        "<|close|>",
    ]
    step = Step(answer=pieces)
    async with running(Step(answer=pieces, break_after=4), step) as fake, AsyncClient(fake.endpoint) as client:
        generation = client.generate(messages=[{"role": "user", "content": "Does it?"}], thinking=True, seed=3)
        result = await generation.result()
    assert result.attempts == 2
    assert (result.reasoning, result.text) == ("Let me see.", "Yes, it does.")


async def test_text_that_only_looks_like_a_mark_is_given_at_the_end():
    async with running(Step(answer=["if a", " <"])) as fake, AsyncClient(fake.endpoint) as client:
        result = await client.generate(messages=[{"role": "user", "content": "?"}], max_tokens=2).result()
    assert result.text == "if a <"


async def test_reasoning_that_was_the_answer_is_taken_back():
    step = Step(answer=["It", " does", ".", "<|close|>", "response", "<|sep|>", "<|close|>", "message<|sep|>"])
    async with running(step) as fake, AsyncClient(fake.endpoint) as client:
        messages = [{"role": "user", "content": "Does it?"}]
        events = [event async for event in client.generate(messages=messages, thinking=True)]
        fake.service.script.append(step)
        result = await client.generate(messages=messages, thinking=True).result()
        fake.service.script.append(step)
        raw = await client.generate(messages=messages, thinking=True, include_control_text=True).result()
    assert any(isinstance(event, Delta) and event.replaces_reasoning for event in events)
    assert (result.reasoning, result.text) == ("", "It does.")
    assert raw.text == "It does.<|close|>response<|sep|><|close|>message<|sep|>"


async def test_admin_calls():
    async with running(Step(hang_after=1)) as fake, AsyncClient(fake.endpoint) as client:
        info = await client.model_info()
        assert (info.role, info.model, info.variant, info.stop_token_ids) == ("decode", "abc", "v", (5, 6))
        reader = asyncio.create_task(client.generate(tokens=PROMPT, request_id="r").result())
        await fake.service.reached.wait()
        load = await client.load(fake.endpoint)
        assert (load.running, load.free_pages, load.total_pages, load.outcomes) == (1, 7, 9, {"finished": 4})
        assert await client.abort("r") is True
        assert await client.abort("other") is False
        reader.cancel()


async def test_a_request_is_aborted_although_another_endpoint_is_dead_or_its_own_has_left(tmp_path: Path):
    path = tmp_path / "decode"
    async with running(Step(hang_after=1)) as fake:
        path.write_text(fake.endpoint)
        async with AsyncClient(f"file:{path}", balance=Balance(refresh_s=0.02)) as client:
            reader = asyncio.create_task(client.generate(tokens=PROMPT, request_id="r").result())
            await fake.service.reached.wait()
            path.write_text("127.0.0.1:1")
            assert await client.abort("r") is True
            with pytest.raises(Unavailable):
                await client.abort("other")
            reader.cancel()


async def test_wait_ready_waits_for_every_endpoint():
    async with (
        running() as a,
        running(serving=False) as b,
        AsyncClient([a.endpoint, b.endpoint], balance=IN_ORDER) as client,
    ):
        assert await client.health(a.endpoint) == "SERVING"
        assert await client.health(b.endpoint) == "NOT_SERVING"
        with pytest.raises(Unavailable, match=b.endpoint):
            await client.wait_ready(0.1)
        waiting = asyncio.create_task(client.wait_ready(60.0))
        await b.set_serving(True)
        await waiting


async def test_wait_ready_waits_for_a_service_that_starts_later():
    with hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            waiting = asyncio.create_task(client.wait_ready(60.0))
            await asyncio.sleep(0)
            async with running(port=port):
                await waiting


async def test_a_restarted_service_is_found_again():
    async with AsyncClient("127.0.0.1:1", retry=RetryPolicy(attempts=1)) as client:
        with pytest.raises(Unavailable):
            await client.model_info()
    with hold_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        async with running(Step(hang_after=3), port=port) as fake:
            client = AsyncClient(fake.endpoint, retry=RetryPolicy(attempts=100))
            reader = asyncio.create_task(client.generate(tokens=PROMPT).result())
            await fake.service.reached.wait()
        async with running(port=port) as again:
            result: Completion = await reader
            assert result.token_ids == tokens(3)
            assert list(again.service.requests[0].generated_token_ids.ids) == list(tokens(3)[:3])
        await client.close()


async def test_a_code_that_is_not_ours_is_not_tried_again():
    step = Step(break_after=2, break_code=grpc.StatusCode.DATA_LOSS)
    async with running(step) as fake, AsyncClient(fake.endpoint) as client:
        with pytest.raises(Exception, match="the connection broke"):
            await client.generate(tokens=PROMPT).result()
    assert len(fake.service.requests) == 1
