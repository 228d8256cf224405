"""The block draft against plain formulas written out here, and what must not change a proposal."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from k3svc import ops as backends
from k3svc.errors import CheckpointError
from k3svc.model.draft import Blocks, DraftModel, Proposal
from k3svc.model.draft_config import DraftConfig, DraftSwitches, parse_draft_config
from k3svc.model.draft_context import ContextPool
from k3svc.model.draft_weights import expected_shapes
from k3svc.ops.table import SampleRows

from .draft_formulas import evaluate

HIDDEN, VOCAB, MASK = 16, 40, 37
OPS = backends.load("reference", dtype="float32", threads=1)
GQA = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "rope_theta": 100.0,
    "block_size": 4,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 2],
}
DSPARK = {"dspark_config": {}, "enable_confidence_head": True, "markov_rank": 6}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
}
SHORT = {"original_max_position_embeddings": 64}
YARN = {"type": "yarn", "factor": 16.0, "beta_fast": 8, **SHORT}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {**GQA, "dflash_config": {}},
    "vanilla": {**GQA, **DSPARK},
    "gated": {**GQA, **DSPARK, "markov_head_type": "gated"},
    "rnn": {**GQA, **DSPARK, "markov_head_type": "rnn", "confidence_head_with_markov": False},
    "mla": {**GQA, **LATENT, "dflash_config": {}},
    "linear": {**GQA, "dflash_config": {}, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {**GQA, **DSPARK, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **SHORT}},
    "yarn": {**GQA, "dflash_config": {}, "rope_scaling": YARN},
    "yarn, ramp not cut": {
        **GQA,
        **DSPARK,
        "rope_scaling": {**YARN, "truncate": False, "attention_factor": 0.8, "beta_slow": 1.5},
    },
    "mla yarn": {**GQA, **LATENT, **DSPARK, "rope_scaling": YARN},
    "mla yarn, all dims": {**GQA, **LATENT, "dflash_config": {}, "rope_scaling": {**YARN, "mscale_all_dim": 0.7}},
    "mla yarn, both scales": {
        **GQA,
        **LATENT,
        "dflash_config": {},
        "rope_scaling": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
    },
    "mla causal": {**GQA, **LATENT, **DSPARK, "q_lora_rank": None, "is_causal": True, "rope_interleave": False},
}


def random_weights(config: DraftConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 1 + 0.2 * torch.randn(shape, generator=generator)
        if "norm" in name
        else torch.randn(shape, generator=generator) * 0.35
        for name, shape in expected_shapes(config).items()
    }


def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)


def build(kind: str, switches: DraftSwitches | None = None, **more: Any) -> tuple[DraftModel, dict[str, Tensor]]:
    config = parse_draft_config({**KINDS[kind], **more})
    weights, (embedding, lm_head) = random_weights(config), tables()
    draft = DraftModel(config, weights, embedding=embedding, lm_head=lm_head, ops=OPS, switches=switches)
    return draft, weights


def taps_of(length: int, seed: int = 3) -> Tensor:
    return torch.randn(length, 2 * HIDDEN, generator=torch.Generator().manual_seed(seed))


def fill(draft: DraftModel, context: ContextPool, slot: int, taps: Tensor, first: int = 0) -> None:
    positions = torch.arange(first, len(taps))
    slots = torch.full_like(positions, slot)
    draft.inject(draft.projector.project(taps[first:]), positions, slots, context)


def blocks_of(*rows: tuple[int, int, int]) -> Blocks:
    """(anchor, base_len, slot) of each request."""
    anchors, lens, slots = (torch.tensor(column) for column in zip(*rows, strict=True))
    return Blocks(anchors=anchors, base_lens=lens, starts=torch.zeros_like(lens), slots=slots)


def propose(draft: DraftModel, anchor: int, taps: Tensor) -> Proposal:
    context = draft.new_context(num_slots=1, max_window=64, scratch_rows=8)
    fill(draft, context, 0, taps)
    return draft.propose(blocks_of((anchor, len(taps), 0)), context, with_probs=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 7, 23])
def test_proposals_equal_the_formulas(kind: str, length: int):
    draft, weights = build(kind)
    taps = taps_of(length)
    got = propose(draft, 5, taps)
    wanted = evaluate(draft.config, weights, tables(), 5, taps)
    assert got.tokens[0].tolist() == wanted.tokens
    if wanted.confidences is None:
        assert got.confidences is None
    else:
        assert got.confidences is not None
        torch.testing.assert_close(got.confidences[0].double(), torch.sigmoid(wanted.confidences), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 23])
def test_sampled_laws_equal_the_formulas(kind: str, length: int):
    draft, weights = build(kind)
    taps = taps_of(length)
    context = draft.new_context(num_slots=1, max_window=64, scratch_rows=8)
    fill(draft, context, 0, taps)
    got = draft.propose(blocks_of((5, length, 0)), context, sampling(0.7, seed=1), with_probs=True)
    assert got.probs is not None
    wanted = evaluate(draft.config, weights, tables(), 5, taps, chosen=got.tokens[0].tolist())
    torch.testing.assert_close(got.probs[0].double(), (wanted.logits / 0.7).softmax(-1), rtol=1e-4, atol=1e-6)


def sampling(temperature: float, seed: int) -> SampleRows:
    zero = torch.zeros(1, dtype=torch.int64)
    return SampleRows(
        temperature=torch.tensor([temperature]),
        top_k=zero,
        top_p=torch.ones(1),
        min_p=torch.zeros(1),
        seed=torch.tensor([seed]),
        sample_index=zero,
        position=zero,
        host_greedy=(temperature == 0,),
        host_filters=((0, 1.0, 0.0),),
    )


def test_sampled_drafts_use_the_noise_of_their_positions():
    draft, weights = build("dflash")
    taps = taps_of(11)
    context = draft.new_context(num_slots=1, max_window=64, scratch_rows=8)
    fill(draft, context, 0, taps)
    logits = evaluate(draft.config, weights, tables(), 5, taps).logits
    for seed in range(6):
        rows = sampling(1.3, seed)
        got = draft.propose(blocks_of((5, 11, 0)), context, rows).tokens[0]
        # What the target would draw at positions 12, 13, 14 if its logits were the draft's
        wanted = [
            int(OPS.sample(row[None].float(), replace(rows, position=torch.tensor([12 + at])))[0])
            for at, row in enumerate(logits)
        ]
        assert got.tolist() == wanted


@pytest.mark.parametrize("kind", ["dflash", "gated", "mla"])
def test_requests_of_a_batch_do_not_see_each_other(kind: str):
    draft, _ = build(kind)
    context = draft.new_context(num_slots=3, max_window=64, scratch_rows=8)
    lengths = (3, 19, 8)
    for slot, length in enumerate(lengths):
        fill(draft, context, slot, taps_of(length, seed=slot))
    together = draft.propose(blocks_of(*((slot + 1, length, slot) for slot, length in enumerate(lengths))), context)
    for slot, length in enumerate(lengths):
        alone = propose(draft, slot + 1, taps_of(length, seed=slot))
        assert together.tokens[slot].tolist() == alone.tokens[0].tolist()


@pytest.mark.parametrize("kind", ["dflash", "rnn", "mla"])
@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)))
def test_switches_change_no_proposal(kind: str, flags: tuple[bool, bool, bool]):
    folded, stacked, embedded = flags
    switches = DraftSwitches(folded_proposal=folded, stacked_context_kv=stacked, embed_in_graph=embedded)
    taps = taps_of(9)
    assert (
        propose(build(kind, switches)[0], 2, taps).tokens.tolist() == propose(build(kind)[0], 2, taps).tokens.tolist()
    )


@pytest.mark.parametrize(("folded", "embedded"), list(itertools.product([False, True], repeat=2)))
def test_switches_decide_what_is_captured(folded: bool, embedded: bool):
    seen: list[tuple[Any, Any]] = []

    def capture(function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(given: Tensor, *rest: Any) -> Any:
            seen.append((given, function(given, *rest)))
            return seen[-1][1]

        return recorded

    config = parse_draft_config(KINDS["vanilla"])
    embedding, lm_head = tables()
    draft = DraftModel(
        config,
        random_weights(config),
        embedding=embedding,
        lm_head=lm_head,
        ops=OPS,
        switches=DraftSwitches(folded_proposal=folded, embed_in_graph=embedded),
        capture=capture,
    )
    tokens = propose(draft, 2, taps_of(5)).tokens
    ((given, result),) = seen
    assert given.dtype == (torch.int64 if embedded else torch.float32)
    if folded:
        assert result[0] is not None
        assert result[0].tolist() == tokens.tolist()
    else:
        assert result.shape == (1, config.num_proposals, HIDDEN)


@pytest.mark.parametrize("kind", ["dflash", "vanilla", "mla", "mla causal", "mla yarn"])
@pytest.mark.parametrize("length", [3, 6, 7, 41])
def test_a_window_keeps_the_newest_rows_through_wraps(kind: str, length: int):
    draft, weights = build(kind, sliding_window=6, layer_types=["sliding_attention"] * 2)
    taps = taps_of(length)
    context = draft.new_context(num_slots=1, max_window=64, scratch_rows=4)
    assert (context.window, context.capacity) == (6, 10)
    for first in range(0, length, 7):
        fill(draft, context, 0, taps[: first + 7], first)
    got = draft.propose(blocks_of((4, length, 0)), context, sampling(1.0, seed=2), with_probs=True)
    assert got.probs is not None
    wanted = evaluate(draft.config, weights, tables(), 4, taps, chosen=got.tokens[0].tolist())
    torch.testing.assert_close(got.probs[0].double(), wanted.logits.softmax(-1), rtol=1e-4, atol=1e-6)


def test_rows_past_the_committed_length_and_unwritten_cells_do_not_count():
    draft, _ = build("gated")
    taps = taps_of(20)
    wanted = propose(draft, 4, taps[:13]).tokens.tolist()
    context = draft.new_context(num_slots=1, max_window=16, scratch_rows=8)
    context.keys.fill_(math.nan)
    context.values.fill_(math.nan)
    # Seven rows are written before it is known that only 13 stay
    fill(draft, context, 0, taps)
    assert draft.propose(blocks_of((4, 13, 0)), context).tokens.tolist() == wanted
    # They are replaced by what came instead
    fill(draft, context, 0, torch.cat([taps[:13], taps_of(4, seed=6)]), 13)
    other = torch.cat([taps[:13], taps_of(4, seed=6)])
    got = draft.propose(blocks_of((4, 17, 0)), context)
    alone = draft.new_context(num_slots=1, max_window=16, scratch_rows=8)
    fill(draft, alone, 0, other)
    assert got.tokens.tolist() == draft.propose(blocks_of((4, 17, 0)), alone).tokens.tolist()


def test_a_context_that_starts_late_hides_what_was_never_written():
    draft, _ = build("dflash")
    taps = taps_of(18)
    context = draft.new_context(num_slots=1, max_window=32, scratch_rows=8)
    context.keys.fill_(math.nan)
    fill(draft, context, 0, taps, 12)
    late = replace(blocks_of((3, 18, 0)), starts=torch.tensor([12]))
    got = draft.propose(late, context).tokens.tolist()
    full = draft.new_context(num_slots=1, max_window=6, scratch_rows=40)
    fill(draft, full, 0, taps)
    assert got == draft.propose(blocks_of((3, 18, 0)), full).tokens.tolist()
    assert got != propose(draft, 3, taps).tokens.tolist()


def test_an_empty_context_still_proposes():
    draft, _ = build("vanilla")
    context = draft.new_context(num_slots=1, max_window=8, scratch_rows=8)
    tokens = draft.propose(blocks_of((3, 0, 0)), context).tokens
    assert tokens.shape == (1, 4)


@pytest.mark.parametrize("kind", ["dflash", "vanilla"])
def test_the_mask_id_is_never_proposed_and_may_have_its_own_embedding(kind: str):
    config = parse_draft_config(KINDS[kind])
    embedding, lm_head = tables()
    weights, taps = random_weights(config), taps_of(9)
    lm_head[MASK] *= 100
    own = torch.linspace(-2.0, 2.0, HIDDEN)
    changed = embedding.clone()
    changed[MASK] = own
    tokens = []
    for mask, table in ((None, embedding), (own, changed)):
        draft = DraftModel(config, weights, embedding=embedding, lm_head=lm_head, ops=OPS, mask_embedding=mask)
        tokens.append(propose(draft, 1, taps).tokens[0].tolist())
        assert tokens[-1] == evaluate(config, weights, (table, lm_head), 1, taps).tokens
    assert MASK not in tokens[0] + tokens[1]
    assert tokens[0] != tokens[1]


def test_tables_of_the_checkpoint_take_the_place_of_the_targets(tmp_path: Path):
    config = parse_draft_config(KINDS["vanilla"])
    weights, taps, (embedding, lm_head) = random_weights(config), taps_of(9), tables()
    own = {"model.embed_tokens.weight": embedding.flip(0).contiguous(), "lm_head.weight": lm_head.flip(1).contiguous()}
    (tmp_path / "config.json").write_text(json.dumps(KINDS["vanilla"]))
    seen = []
    for names in ((), ("lm_head.weight",), ("model.embed_tokens.weight",), tuple(own)):
        save_file(weights | {name: own[name] for name in names}, tmp_path / "model.safetensors")
        draft = DraftModel.load(tmp_path, embedding=embedding, lm_head=lm_head, ops=OPS)
        used = (
            (own["model.embed_tokens.weight"] if "model.embed_tokens.weight" in names else embedding),
            (own["lm_head.weight"] if "lm_head.weight" in names else lm_head),
        )
        seen.append(propose(draft, 3, taps).tokens[0].tolist())
        assert seen[-1] == evaluate(config, weights, used, 3, taps).tokens
    assert len({tuple(tokens) for tokens in seen}) == 4


def test_confidences_are_scaled_by_position():
    config = parse_draft_config(KINDS["vanilla"])
    embedding, lm_head = tables()
    temperatures = torch.tensor([0.5, 1.0, 2.0, 4.0])
    plain, scaled = (
        DraftModel(config, random_weights(config), embedding=embedding, lm_head=lm_head, ops=OPS, temperatures=given)
        for given in (None, temperatures)
    )
    one, two = propose(plain, 3, taps_of(6)).confidences, propose(scaled, 3, taps_of(6)).confidences
    assert one is not None
    assert two is not None
    torch.testing.assert_close(torch.logit(one) / temperatures, torch.logit(two), rtol=1e-3, atol=1e-4)


def test_a_target_of_another_size_is_refused():
    config = parse_draft_config(KINDS["dflash"])
    embedding, lm_head = tables()
    with pytest.raises(CheckpointError, match="lm_head"):
        DraftModel(config, random_weights(config), embedding=embedding, lm_head=lm_head[:-1], ops=OPS)
