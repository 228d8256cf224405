"""The state that decode holds after a hand-off over real gRPC, against what prefill holds and against golden tokens.

Each test of damage shows that the comparison above it would notice the damage.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from k3svc.config import Config, load_config
from k3svc.core.batch import DecodeBatch, DecodeRow, SampleSpec, StepOutput
from k3svc.core.request import SamplingParams
from k3svc.engine.build import PrefillRole, build_prefill, load_model
from k3svc.engine.handoff import HandoffPuller
from k3svc.engine.peers import PrefillPeers
from k3svc.ops.table import Cache
from k3svc.rpc.clients import GrpcPrefillPeer
from k3svc.transfer.manifest import StateManifest, TensorKind, build_manifest
from k3svc.transfer.outbox import tensor_bytes
from services.prefill.service import PrefillServicer

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "models" / "k3-nano" / "golden.json").read_text())["prompts"]
PROMPT, CONTINUATION = GOLDEN[4]["ids"], GOLDEN[4]["continuation_ids"]
SLOT, PAGES = 3, [9, 4, 5, 2, 11, 12, 7, 14, 15]


def config(chunk_tokens: int = 64, *settings: str) -> Config:
    return load_config(
        None,
        [
            f'model.path="{ROOT / "models" / "k3-nano"}"',
            "cache.num_pages=16",
            "cache.num_slots=4",
            "cache.page_size=16",
            f"prefill.chunk_tokens={chunk_tokens}",
            "prefill.frame_bytes=16384",
            *settings,
        ],
    )


@pytest.fixture(scope="module")
def decode_side() -> "DecodeSide":
    return DecodeSide()


class DecodeSide:
    """A model with pools, as a decode service holds it."""

    def __init__(self, *settings: str) -> None:
        self.loaded = load_model(config(64, *settings), lambda stage, share: None)
        self.cache: Cache = self.loaded.cache

    async def step(self, token_id: int, position: int) -> torch.Tensor:
        """Feeds one token; returns the logits through the log-probabilities that the runner reports (all 20 best)."""
        spec = SampleSpec(
            params=SamplingParams(temperature=0.0), sample_index=0, position=position + 1, counts=None, logprobs=20
        )
        row = DecodeRow(key="a", slot=SLOT, block_table=PAGES, token_id=token_id, position=position, sample=spec)
        output: StepOutput = await self.loaded.runner.decode(DecodeBatch(rows=[row]))
        assert not output.failed
        dense = torch.full((self.cache.spec.vocab_size,), -60.0)
        for top_id, logprob in output.sampled["a"][0].top:
            dense[top_id] = logprob
        return dense

    async def continuation(self, count: int) -> list[int]:
        """Greedy tokens after the prompt, the first from the landed logits row."""
        tokens = [int(self.cache.logits([SLOT])[0].argmax())]
        while len(tokens) < count:
            tokens.append(int((await self.step(tokens[-1], len(PROMPT) + len(tokens) - 1)).argmax()))
        return tokens


@asynccontextmanager
async def prefill_service(chunk_tokens: int, *settings: str) -> AsyncIterator[tuple[PrefillRole, GrpcPrefillPeer]]:
    role = build_prefill(config(chunk_tokens, *settings), lambda stage, share: None)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    PrefillServicer(role.engine, max_context_tokens=1 << 15).register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    loop = asyncio.create_task(role.engine.run())
    peer = GrpcPrefillPeer(f"127.0.0.1:{port}", timeout_s=20.0, max_message_bytes=1 << 24)
    try:
        yield role, peer
    finally:
        await peer.close()
        role.engine.drain()
        await loop
        await server.stop(None)
        role.loaded.runner.close()
        load = role.engine.load()
        assert (load.free_pages, load.free_slots) == (load.total_pages, load.total_slots)


async def hand_off(peer: GrpcPrefillPeer, side: DecodeSide) -> None:
    """Pulls the state of PROMPT into SLOT and PAGES of the decode side."""
    releases: list[asyncio.Task[None]] = []

    def release(from_peer: object, prefill_id: str, attempt: int) -> None:
        releases.append(asyncio.get_running_loop().create_task(peer.release(prefill_id, attempt)))

    puller = HandoffPuller(
        prefill_id="t",
        prompt=tuple(PROMPT),
        priority=0,
        deadline=None,
        slot=SLOT,
        block_table=PAGES,
        cache=side.cache,
        peers=PrefillPeers([peer], asyncio.get_running_loop().time),
        fingerprint=side.loaded.fingerprint,
        clock=asyncio.get_running_loop().time,
        max_attempts=1,
        release=release,
    )
    await puller.run()
    await asyncio.gather(*releases)


def tensors(cache: Cache, manifest: StateManifest, slot: int, pages: list[int]) -> dict[str, bytes]:
    """Every tensor of a hand-off, read from the pools row by row."""
    found = {}
    for spec in manifest.tensors:
        if spec.kind is TensorKind.MLA_ROWS:
            whole = b"".join(bytes(cache.rows_bytes(spec.layer, page)[:]) for page in pages)
            found[spec.name] = whole[: spec.nbytes]
        else:
            found[spec.name] = bytes(tensor_bytes(cache, spec.kind, spec.layer, slot)[:])
    return found


def poison(cache: Cache) -> None:
    """NaN in every byte that a hand-off must fill and in all pages and slots beside it."""
    spec = cache.spec
    for slot in range(spec.num_slots + 1):
        for layer in spec.kda_layers:
            np.frombuffer(cache.state_bytes(layer, slot)[:], np.uint8)[:] = 0xFF
            np.frombuffer(cache.conv_bytes(layer, slot)[:], np.uint8)[:] = 0xFF
        np.frombuffer(cache.logits_bytes(slot)[:], np.uint8)[:] = 0xFF
    for layer in spec.mla_layers:
        np.frombuffer(cache.rows_bytes(layer, 0, spec.num_pages + 1)[:], np.uint8)[:] = 0xFF


@pytest.mark.parametrize("chunk_tokens", [64, 128])
async def test_what_arrives_is_what_prefill_holds(decode_side: DecodeSide, chunk_tokens: int) -> None:
    poison(decode_side.cache)
    async with prefill_service(chunk_tokens) as (role, peer):
        await hand_off(peer, decode_side)
        manifest = build_manifest(decode_side.cache.spec, request_id="", attempt=0, num_tokens=len(PROMPT))
        # The first prompt of a fresh service takes its first slot and pages; nothing has overwritten them since.
        pages = list(range(1, -(-len(PROMPT) // 16) + 1))
        sent = tensors(role.loaded.cache, manifest, 1, pages)
        landed = tensors(decode_side.cache, manifest, SLOT, PAGES)
        assert sent.keys() == landed.keys()
        for name, data in sent.items():
            assert landed[name] == data, name
            assert np.isfinite(np.frombuffer(data, np.float32)).all(), name
            assert np.abs(np.frombuffer(data, np.float32)).max() > 0, name
    assert await decode_side.continuation(len(CONTINUATION)) == CONTINUATION


async def test_states_travel_rounded_where_both_ends_say_so(decode_side: DecodeSide) -> None:
    narrow = 'transfer.state_dtype="bfloat16"'
    side = DecodeSide(narrow)
    poison(side.cache)
    async with prefill_service(64, narrow) as (role, peer):
        await hand_off(peer, side)
        assert role.loaded.fingerprint.difference(side.loaded.fingerprint) is None
        assert role.loaded.fingerprint.difference(decode_side.loaded.fingerprint) == "wire_layout"
        manifest = build_manifest(decode_side.cache.spec, request_id="", attempt=0, num_tokens=len(PROMPT))
        for spec in manifest.tensors:
            if spec.kind is TensorKind.KDA_STATE:
                sent, landed = (
                    torch.frombuffer(cache.state_bytes(spec.layer, slot)[:], dtype=torch.float32)
                    for cache, slot in ((role.loaded.cache, 1), (side.cache, SLOT))
                )
                assert torch.equal(landed, sent.bfloat16().float())
                assert not torch.equal(landed, sent)
    assert await side.continuation(len(CONTINUATION)) == CONTINUATION
    side.loaded.runner.close()


def zero(kind: TensorKind, layer: int) -> Callable[[Cache], None]:
    def damage(cache: Cache) -> None:
        views = (
            [cache.rows_bytes(layer, page) for page in PAGES]
            if kind is TensorKind.MLA_ROWS
            else [tensor_bytes(cache, kind, layer, SLOT)]
        )
        for view in views:
            view[:] = bytes(view.nbytes)

    return damage


def transpose(layer: int) -> Callable[[Cache], None]:
    """K and V of a KDA state exchanged; the shape is the same since K = V."""

    def damage(cache: Cache) -> None:
        spec = cache.spec
        state = np.frombuffer(cache.state_bytes(layer, SLOT)[:], np.float32).reshape(
            spec.kda_heads, spec.kda_value_dim, spec.kda_key_dim
        )
        state[:] = state.transpose(0, 2, 1).copy()

    return damage


KDA, MLA = (0, 1, 2, 4, 5), (3, 6, 7)
DAMAGES = {
    **{f"zero state {layer}": zero(TensorKind.KDA_STATE, layer) for layer in KDA},
    **{f"zero conv {layer}": zero(TensorKind.CONV_STATE, layer) for layer in KDA},
    **{f"zero rows {layer}": zero(TensorKind.MLA_ROWS, layer) for layer in MLA},
    **{f"transpose state {layer}": transpose(layer) for layer in KDA},
}


async def test_damage_shows(decode_side: DecodeSide) -> None:
    """One tensor zeroed, K and V swapped, or the last token applied twice moves the next logits beyond tolerance."""
    async with prefill_service(64) as (_, peer):
        await hand_off(peer, decode_side)
    cache = decode_side.cache
    manifest = build_manifest(cache.spec, request_id="", attempt=0, num_tokens=len(PROMPT))
    landed = tensors(cache, manifest, SLOT, PAGES)

    def restore() -> None:
        for spec in manifest.tensors:
            if spec.kind is TensorKind.MLA_ROWS:
                data = landed[spec.name]
                size = cache.rows_bytes(spec.layer, PAGES[0]).nbytes
                for index, page in enumerate(PAGES):
                    part = data[index * size : (index + 1) * size]
                    cache.rows_bytes(spec.layer, page)[: len(part)] = part
            else:
                tensor_bytes(cache, spec.kind, spec.layer, SLOT)[:] = landed[spec.name]

    async def next_logprobs() -> torch.Tensor:
        return await decode_side.step(CONTINUATION[0], len(PROMPT))

    right = await next_logprobs()
    restore()
    assert torch.equal(await next_logprobs(), right), "restoring the landed state gives the same bits"
    for name, damage in DAMAGES.items():
        restore()
        damage(cache)
        moved = (await next_logprobs() - right).abs().max().item()
        assert moved > 1e-2, f"{name}: {moved}"
    restore()
    await decode_side.step(PROMPT[-1], len(PROMPT) - 1)
    moved = (await next_logprobs() - right).abs().max().item()
    assert moved > 1e-2, f"last token twice: {moved}"
