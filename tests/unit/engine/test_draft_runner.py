"""The draft engine with the drafts that ship: prompts in chunks, switches, noise and laws, on the reference backend."""

import asyncio
import dataclasses
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from k3svc.config import CacheSection, Config, DraftSection, ModelSection
from k3svc.core.batch import ExtendBatch, ExtendRow
from k3svc.core.request import SamplingParams
from k3svc.engine.build import LoadedModel, load_model
from k3svc.engine.draft_build import DraftRole, build_draft, profile_of
from k3svc.engine.draft_peers import DraftSession
from k3svc.engine.draft_protocol import (
    ContextStart,
    SampleCommit,
    SampleFeatures,
    SampleOpen,
    SampleProposal,
    SessionStep,
)
from k3svc.engine.draft_runner import Ask, CopyRows, DraftWork, WriteRows

MODELS = Path(__file__).parents[3] / "models"
PROMPT = [(17 * i * i + 5 * i) % 3800 for i in range(700)]
WIDTH = 256


def config(draft: str = "dspark", switches: dict[str, Any] | None = None) -> Config:
    return Config(
        model=ModelSection(path=str(MODELS / "k3-nano"), device="reference"),
        cache=CacheSection(num_pages=16, num_slots=2, max_context_tokens=1024),
        draft=DraftSection(path=str(MODELS / f"k3-nano-{draft}"), max_requests=3, max_tickets=2, **(switches or {})),
    )


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(config(), lambda _stage, _share: None)


async def prompt_features(target: LoadedModel, chunk: int) -> list[memoryview]:
    """Of the prompt, computed in chunks."""
    chunks: list[memoryview] = []
    for start in range(0, len(PROMPT), chunk):
        tokens = PROMPT[start : start + chunk]
        row = ExtendRow(
            key="a",
            slot=1,
            block_table=list(range(1, 13)),
            token_ids=tokens,
            start=start,
            is_last=start + len(tokens) == len(PROMPT),
        )
        await target.runner.extend(ExtendBatch(rows=[row]), lambda _layer: None, chunks.append)
    return chunks


@asynccontextmanager
async def serving(built: DraftRole) -> AsyncIterator[DraftSession]:
    task = asyncio.create_task(built.engine.run())
    session = built.engine.connect(built.profile)
    yield session
    session.close()
    built.engine.drain()
    await task
    built.engine.check()
    built.runner.close()


def opening(handle: int, *, ticket: str) -> SampleOpen:
    return SampleOpen(
        handle=handle,
        attempt=1,
        base_len=len(PROMPT),
        anchor=7,
        want=7,
        ticket=ticket,
        params=SamplingParams(temperature=1.2, seed=9),
        sample_index=0,
        with_probs=False,
    )


async def answers(session: DraftSession, step: SessionStep) -> dict[int, SampleProposal]:
    session.apply(step)
    made: dict[int, SampleProposal] = {}
    async for answer in session:
        made |= {proposal.handle: proposal for proposal in answer.proposals}
        if answer.step == step.step:
            break
    return made


@pytest.mark.parametrize("draft", ["dspark", "dflash"])
async def test_chunked_prompts_and_split_steps_propose_as_an_undivided_run_does(draft: str, target: LoadedModel):
    if draft != "dspark":
        target = load_model(config(draft), lambda _stage, _share: None)
    built = build_draft(config(draft), lambda _stage, _share: None)
    profile = profile_of(config(draft), target)
    assert profile == built.profile
    whole = await prompt_features(target, 1024)
    split = await prompt_features(target, 64)
    assert len(split) == 11
    assert b"".join(split) == bytes(whole[0]), "features depend on the chunks"
    generator = torch.Generator().manual_seed(3)
    later = torch.randn(12, WIDTH, generator=generator).numpy().tobytes()

    async with serving(built) as session:
        for name, chunks in (("whole", whole), ("split", split)):
            push = built.engine.push_context(
                ContextStart(profile=profile, ticket=name, attempt=1, num_tokens=len(PROMPT))
            )
            position = 0
            for data in chunks:
                await push.add(position, data)
                position += data.nbytes // profile.row_bytes
            push.finish()
        opens = [opening(1, ticket="whole"), opening(2, ticket="split")]
        first = await answers(session, SessionStep(step=1, opens=opens))
        assert not first[1].truncated
        assert first[1].tokens == first[2].tokens
        assert first[1].confidences == first[2].confidences
        # The one gets four tokens at once, the other one by one with drafts that do not stay.
        base = len(PROMPT)
        session.apply(SessionStep(features=[piece(1, base, later, 0, 4)]))
        for index in range(4):
            session.apply(SessionStep(features=[piece(2, base + index, later, index, 6)]))
            session.apply(SessionStep(commits=[commit(2, base + index + 1, 1)]))
        both = [commit(1, base + 4, 4), commit(2, base + 4, 1)]
        second = await answers(session, SessionStep(step=2, commits=both))
        assert second[1].tokens == second[2].tokens
        assert len(set(first[1].tokens) | set(second[1].tokens)) > 3
    if draft != "dspark":
        target.runner.close()


def piece(handle: int, start: int, data: bytes, first: int, count: int) -> SampleFeatures:
    rows = memoryview(data)[first * WIDTH * 4 : (first + count) * WIDTH * 4]
    return SampleFeatures(handle=handle, attempt=1, start=start, num_rows=count, data=rows)


def commit(handle: int, base_len: int, count: int) -> SampleCommit:
    return SampleCommit(handle=handle, attempt=1, base_len=base_len, count=count, anchor=11, want=7)


def ask(slot: int, params: SamplingParams, *, with_probs: bool = False, sample_index: int = 0) -> Ask:
    return Ask(
        slot=slot,
        start=0,
        base_len=40,
        anchor=9,
        params=params,
        sample_index=sample_index,
        with_probs=with_probs,
    )


def write(slot: int, *, dtype: str = "float32") -> WriteRows:
    rows = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
    data = bytearray(rows.numpy().tobytes()) if dtype == "float32" else bytearray(2 * 40 * WIDTH)
    if dtype == "bfloat16":
        torch.frombuffer(data, dtype=torch.bfloat16).copy_(rows.flatten())
    return WriteRows(slot=slot, start=0, num_rows=40, data=memoryview(data), dtype=dtype)


async def test_switches_change_no_proposal_and_a_copied_context_is_as_good_as_a_written_one():
    tokens: list[Sequence[int]] = []
    warm = SamplingParams(temperature=0.9, top_k=50, seed=4)
    for number in range(8):
        switches = {
            name: bool(number >> bit & 1)
            for bit, name in enumerate(("folded_proposal", "stacked_context_kv", "embed_in_graph"))
        }
        built = build_draft(config(switches=switches), lambda _stage, _share: None)
        copy = CopyRows(source=1, target=2, start=0, end=40)
        work = DraftWork(
            rows=[write(1), copy],
            asks=[ask(slot, params) for slot in (1, 2) for params in (SamplingParams(temperature=0.0), warm)],
        )
        result = await built.runner.run(work)
        tokens += [answer.tokens for answer in result.answers]
        built.runner.close()
    assert tokens == tokens[:2] * 16
    assert tokens[0] != tokens[1]


async def test_laws_are_without_filters_and_drafts_are_drawn_from_them_with_noise_of_their_own():
    built = build_draft(config(), lambda _stage, _share: None)
    warm = SamplingParams(temperature=0.9, top_k=1, seed=4)
    free = dataclasses.replace(warm, top_k=0)
    work = DraftWork(rows=[write(1)], asks=[ask(1, warm, with_probs=True), ask(1, free), ask(1, free, with_probs=True)])
    chained, plain, also_chained = (await built.runner.run(work)).answers
    assert (len(chained.probs), plain.probs) == (7, ())
    law = struct.unpack("<4096f", chained.probs[0])
    assert sum(law) == pytest.approx(1.0, abs=1e-4)
    assert sum(value > 0 for value in law) > 1000
    assert law[built.profile.mask_token_id] == 0
    assert chained.tokens == also_chained.tokens
    drawn = [
        (await built.runner.run(DraftWork(rows=[], asks=[ask(1, dataclasses.replace(free, seed=s), with_probs=c)])))
        .answers[0]
        .tokens
        for s in range(8)
        for c in (False, True)
    ]
    assert any(first != second for first, second in zip(drawn[::2], drawn[1::2], strict=True))
    built.runner.close()


async def test_features_of_half_the_width_are_read_and_spoilt_ones_harm_nobody_else():
    built = build_draft(config(), lambda _stage, _share: None)
    greedy = SamplingParams(temperature=0.0)
    spoilt = dataclasses.replace(write(2), data=memoryview(struct.pack("<f", float("nan")) * (40 * WIDTH)))
    work = DraftWork(
        rows=[write(1), spoilt, write(3, dtype="bfloat16")], asks=[ask(slot, greedy) for slot in (1, 2, 3)]
    )
    fine, broken, half = (await built.runner.run(work)).answers
    alone = (await built.runner.run(DraftWork(rows=[], asks=[ask(1, greedy)]))).answers[0]
    assert fine == alone
    assert all(0 <= token < built.profile.vocab_size for token in broken.tokens)
    assert all(0.0 <= chance <= 1.0 for chance in (*fine.confidences, *broken.confidences, *half.confidences))
    assert half.confidences[0] == pytest.approx(fine.confidences[0], abs=0.1)
    built.runner.close()
