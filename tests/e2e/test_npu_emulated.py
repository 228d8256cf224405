"""`k3svc up` on the emulated Ascend device: three processes, captured steps, streams side by side, drafts."""

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from k3svc.client import AsyncClient, Completion, RetryPolicy
from k3svc.errors import K3svcError
from tests.conformance.cpu_cases import needs_compiler

ROOT = Path(__file__).parents[2]
NANO = ROOT / "models" / "k3-nano"
PROMPTS = json.loads((NANO / "golden.json").read_text())["prompts"][:3]
K3SVC = ("-c", "from k3svc.cli.main import main; main()")
COUNT = 16
EMULATED = "npu-emulated:fp32,shape-relaxed"
START_S = 240.0
SETTINGS = ("decode.prefill_timeout_s=300", "prefill.lease_s=300", "draft.lease_s=300", "draft.ticket_lease_s=300")
"""An emulated step takes a second where other programs want the cores too."""


async def run(*arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    assert await process.wait() == 0


@contextlib.asynccontextmanager
async def up(*arguments: str) -> AsyncIterator[str]:
    """The address of decode. Ctrl-C at the end must drain the stack."""
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *K3SVC, "up", "--port", "0", *arguments, *settings, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
        assert line.startswith("ready "), (await process.communicate())[1].decode()
        yield dict(word.split("=") for word in line.split()[1:])["decode"]
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), START_S)
        assert process.returncode == 0, err.decode()
    finally:
        if process.returncode is None:
            process.kill()
            sys.stdout.write((await process.communicate())[1].decode())


@contextlib.asynccontextmanager
async def role(name: str, *settings: str) -> AsyncIterator[str]:
    """The address of a service that is started by hand."""
    pairs = ("model.path=models/k3-nano", "server.port=0", "cache.num_pages=64", *SETTINGS, *settings)
    words = [word for pair in pairs for word in ("--set", pair)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"services.{name}", *words, stdout=PIPE, stderr=PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
        assert line, (await process.communicate())[1].decode()
        yield json.loads(line)["address"]
        process.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(process.communicate(), START_S)
        assert process.returncode == 0, err.decode()
    finally:
        if process.returncode is None:
            process.kill()
            sys.stdout.write((await process.communicate())[1].decode())


async def answers(endpoint: str, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """Greedy continuations of the prompts, all at once."""
    async with AsyncClient(endpoint, retry=RetryPolicy(attempts=1)) as client:
        streams = [client.generate(tokens=list(ids), temperature=0.0, max_tokens=COUNT) for ids in prompts]
        return list(await asyncio.gather(*(stream.result() for stream in streams)))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_up_gives_the_golden_tokens_with_captured_steps_and_verified_drafts():
    arguments = ("--model", str(NANO), "--device", "npu-emulated:fp32,shape-relaxed,graphs=on", "--draft", "dspark")
    async with up(*arguments, "--set", "speculation.govern=false", "--set", "cache.num_pages=64") as endpoint:
        found = await answers(endpoint, [prompt["ids"] for prompt in PROMPTS])
    assert [list(each.token_ids) for each in found] == [prompt["continuation_ids"][:COUNT] for prompt in PROMPTS]
    proposed, accepted = (sum(getattr(each.speculation, name) for each in found) for name in ("proposed", "accepted"))
    assert 0 < accepted < proposed


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_up_serves_a_checkpoint_of_the_sizes_of_the_device_under_all_its_rules(tmp_path: Path):
    """The first tokens are those of one process without services, where no other row can have touched them."""
    model, logits, file = tmp_path / "tiny", tmp_path / "logits.npz", tmp_path / "prompts.json"
    prompts = [[11 + place, *range(100 * place, 100 * place + length)] for place, length in enumerate((3, 40, 130))]
    file.write_text(json.dumps(prompts))
    await run(str(ROOT / "scripts/make_npu_tiny.py"), str(model))
    device = ("--model", str(model), "--device", "npu-emulated:graphs=on")
    await run(*K3SVC, "logits", *device, "--dtype", "bfloat16", "--tokens-file", str(file), "--out", str(logits))
    with np.load(logits) as arrays:
        first = [int(arrays[name].argmax()) for name in arrays.files]
    async with up(*device, "--draft", "none", "--set", "model.dtype=bfloat16") as endpoint:
        found = await answers(endpoint, prompts)
    assert [each.token_ids[0] for each in found] == first
    assert [len(each.token_ids) for each in found] == [COUNT] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_compiler
@pytest.mark.parametrize(("prefill", "decode"), [("cpu", EMULATED), (EMULATED, "cpu")])
async def test_states_pass_between_the_cpu_backend_and_the_device_in_both_directions(prefill: str, decode: str):
    async with (
        role("prefill", f"model.device={prefill}") as address,
        role("decode", f"model.device={decode}", f'decode.prefill=["{address}"]') as endpoint,
    ):
        found = await answers(endpoint, [prompt["ids"] for prompt in PROMPTS])
    assert [list(each.token_ids) for each in found] == [prompt["continuation_ids"][:COUNT] for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_roles_of_other_dtypes_refuse_each_other_by_the_name_of_the_key():
    async with (
        role("prefill", f"model.device={EMULATED}") as address,
        role("decode", f"model.device={EMULATED}", "model.dtype=bfloat16", f'decode.prefill=["{address}"]') as endpoint,
    ):
        with pytest.raises(K3svcError) as caught:
            await answers(endpoint, [PROMPTS[0]["ids"]])
    expected = "model.dtype: prefill has 'float32', decode has 'bfloat16'; start both with the same model.dtype"
    assert expected in caught.value.message
