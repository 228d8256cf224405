"""Decode steps that are asked for while others run, on a GPU: tokens are those of one step at a time."""

import threading
from dataclasses import replace

import pytest
import torch

from k3svc.core.request import StopParams
from k3svc.ops.upload import HostCopy
from tests.conformance.cuda_cases import DEVICE, cuda_ops
from tests.unit.engine.nano_engines import Asked, draw_request, engine, golden, load_nano, plainly, run_all

pytestmark = [pytest.mark.slow, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")]

CYCLES = 200_000_000
"""About a tenth of a second."""


def test_a_copy_is_read_while_what_was_asked_for_later_runs() -> None:
    ops, is_done = cuda_ops(), threading.Event()
    values = torch.arange(8, device=DEVICE)
    # What is used for the first time is loaded to the device, which waits for it.
    HostCopy(values.clone().fill_(9)).read()
    copy = HostCopy(values)
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    values.fill_(9)
    ops.when_done(is_done.set)
    assert copy.read()[0].tolist() == list(range(8))
    assert not is_done.is_set()
    is_done.wait()
    assert copy.read()[0].tolist() == list(range(8))


async def test_golden_tokens() -> None:
    loaded, asked = load_nano("cuda"), Asked()
    requests, expected = golden(48)
    async with engine(loaded, None, wrap=asked.over) as decode:
        outputs = await run_all(decode, requests)
    assert {key: list(output.token_ids) for key, output in outputs.items()} == expected
    assert asked.num_ahead >= 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("are_preempted", [False, True])
async def test_outputs_are_those_of_one_step_at_a_time(dtype: str, *, are_preempted: bool) -> None:
    """Requests of every kind, a few of which hold steps up; or long ones that take each other's pages."""
    loaded, asked = load_nano("cuda", dtype), Asked()
    drawn = [draw_request(index, loaded.tokenizer) for index in range(48)]
    requests = [request if place % 12 == 11 else plainly(request) for place, request in enumerate(drawn)]
    if are_preempted:
        stop = StopParams(max_tokens=60, ignore_eos=True)
        requests = [replace(request, stop=stop) for request in requests[:8]]
    async with engine(loaded, None) as decode:
        expected = await run_all(decode, requests)
    async with engine(loaded, None, num_pages=16 if are_preempted else 160, wrap=asked.over) as decode:
        assert await run_all(decode, requests) == expected
        assert (decode.load().preemptions > 0) == are_preempted
    assert asked.num_ahead > 10
