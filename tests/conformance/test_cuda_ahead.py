"""Decode steps that are asked for while others run, on a GPU: tokens are those of one step at a time."""

import threading

import pytest
import torch

from k3svc.ops.upload import HostCopy
from tests.conformance.cuda_cases import DEVICE, cuda_ops
from tests.unit.engine.nano_engines import (
    Asked,
    draw_request,
    engine,
    golden,
    lasting,
    load_nano,
    most_begun,
    plainly,
    run_all,
)

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
    """Requests of every kind, a few of which hold steps up, beside four samples that outlast them; or long ones that
    take each other's pages.
    """
    loaded, asked = load_nano("cuda", dtype), Asked()
    drawn = [draw_request(index, loaded.tokenizer) for index in range(48)]
    requests = [request if place % 12 == 11 else plainly(request) for place, request in enumerate(drawn)]
    if are_preempted:
        requests = [lasting(request, 60, request.n) for request in requests[:8]]
        requests[0] = lasting(requests[0], 200)
    else:
        requests[7] = lasting(requests[7], 200, num_samples=4)
    async with engine(loaded, None) as decode:
        expected = await run_all(decode, requests)
    async with engine(loaded, None, num_pages=16 if are_preempted else 160, wrap=asked.over) as decode:
        assert await run_all(decode, requests) == expected
        num_preemptions = decode.load().preemptions
    assert (num_preemptions > 0) == are_preempted
    # So a host that is slow, or whose hand-offs land one by one, leaves a hundred steps to be asked for ahead at least.
    assert asked.num_begun <= most_begun(requests, num_preemptions=num_preemptions if are_preempted else None)
    assert asked.num_ahead >= 100
