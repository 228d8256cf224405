"""The block draft against plain formulas written out here, and what must not change a proposal."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from k3svc import ops as backends
from k3svc.errors import CheckpointError
from k3svc.model.draft import Blocks, DraftModel, Proposal
from k3svc.model.draft_config import DraftConfig, DraftSwitches, parse_draft_config
from k3svc.model.draft_context import ContextPool
from k3svc.model.draft_weights import expected_shapes
from k3svc.ops.table import SampleRows

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
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {**GQA, "dflash_config": {}},
    "vanilla": {**GQA, **DSPARK},
    "gated": {**GQA, **DSPARK, "markov_head_type": "gated"},
    "rnn": {**GQA, **DSPARK, "markov_head_type": "rnn", "confidence_head_with_markov": False},
    "mla": {**GQA, **LATENT, "dflash_config": {}},
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


def split(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return x.reshape(*x.shape[:-1], *sizes)


# An independent draft: one sequence, no cache, no fusion, double precision


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def turn(x: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """RoPE by complex multiplication, x [n, heads, D]."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.tensor(positions, dtype=torch.float64), 100.0 ** (-torch.arange(half).double() / half))
    spin = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = split(x, half, 2) if interleaved else split(x, 2, half).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * spin)
    return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)


def oracle(config: DraftConfig, weights: dict[str, Tensor], anchor: int, taps: Tensor) -> tuple[list[int], Tensor, Any]:
    """Greedy tokens, logits [γ, X] and confidence logits of the formulas of speculation.md 1.1 and 2.1."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    embedding, lm_head = (table.double() for table in tables())
    context = norm(taps.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    base = len(taps)
    places = list(range(base)) + list(range(base, base + config.num_rows))
    x = embedding[[anchor] + [MASK] * (config.num_rows - 1)]
    for layer in range(config.num_layers):
        own = {k.removeprefix(f"layers.{layer}."): v for k, v in w.items() if k.startswith(f"layers.{layer}.")}
        normed = norm(x, own["input_layernorm.weight"])
        query, key, value, scale = heads(config, own, torch.cat([context, normed]), places)
        query = query[base:]
        scores = torch.einsum("gnd,snd->ngs", query, key) * scale
        if config.is_causal:
            late = torch.tensor([[place > places[base + row] for place in places] for row in range(config.num_rows)])
            scores = scores.masked_fill(late, -math.inf)
        mixed = torch.einsum("ngs,snv->gnv", scores.softmax(-1), value).flatten(1)
        x = x + mixed @ own["self_attn.o_proj.weight"].T
        normed = norm(x, own["post_attention_layernorm.weight"])
        gate = F.silu(normed @ own["mlp.gate_proj.weight"].T) * (normed @ own["mlp.up_proj.weight"].T)
        x = x + gate @ own["mlp.down_proj.weight"].T
    states = norm(x, w["norm.weight"])[config.first_predicting_row :]
    return read_out(config, w, states, states @ lm_head.T, anchor)


def heads(
    config: DraftConfig, w: dict[str, Tensor], x: Tensor, places: list[int]
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value [n, NH, ·] of all rows, expanded form, and the scale of scores."""

    def project(name: str, rows: Tensor) -> Tensor:
        return rows @ w[f"self_attn.{name}.weight"].T

    count, mla = config.num_heads, config.mla
    if mla is None:
        query = norm(split(project("q_proj", x), count, -1), w["self_attn.q_norm.weight"])
        key = norm(split(project("k_proj", x), config.num_kv_heads, -1), w["self_attn.k_norm.weight"])
        value = split(project("v_proj", x), config.num_kv_heads, -1)
        times = count // config.num_kv_heads
        query, key = turn(query, places, False), turn(key, places, False)
        return query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), config.head_dim**-0.5
    if mla.q_lora_rank is None:
        query = project("q_proj", x)
    else:
        query = project("q_b_proj", norm(project("q_a_proj", x), w["self_attn.q_a_layernorm.weight"]))
    query = split(query, count, -1)
    packed = project("kv_a_proj_with_mqa", x)
    latent = norm(packed[:, : mla.kv_lora_rank], w["self_attn.kv_a_layernorm.weight"])
    expanded = split(project("kv_b_proj", latent), count, -1)
    shared = turn(packed[:, None, mla.kv_lora_rank :], places, mla.interleaved_rope).expand(-1, count, -1)
    turned = turn(query[..., mla.nope_dim :], places, mla.interleaved_rope)
    query = torch.cat([query[..., : mla.nope_dim], turned], -1)
    key = torch.cat([expanded[..., : mla.nope_dim], shared], -1)
    return query, key, expanded[..., mla.nope_dim :], (mla.nope_dim + mla.rope_dim) ** -0.5


def read_out(
    config: DraftConfig, w: dict[str, Tensor], states: Tensor, logits: Tensor, anchor: int
) -> tuple[list[int], Tensor, Any]:
    tokens, rows, confidences = [], [], []
    previous, memory = anchor, torch.zeros(config.markov_rank, dtype=torch.float64)
    for state, base in zip(states, logits, strict=True):
        row = base.clone()
        row[MASK] = -math.inf
        embedded = state[:0]
        if config.markov_head is not None:
            embedded = mixed = w["markov_head.markov_w1.weight"][previous]
            if config.markov_head == "gated":
                joined = torch.cat([state, embedded])
                gate = w["markov_head.gate_proj.weight"] @ joined + w["markov_head.gate_proj.bias"]
                mixed = torch.sigmoid(gate) * embedded
            if config.markov_head == "rnn":
                joined = torch.cat([memory, embedded, state])
                joint = w["markov_head.joint_proj.weight"] @ joined + w["markov_head.joint_proj.bias"]
                gate, change, out = joint.chunk(3)
                memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(change)
                mixed = torch.tanh(out)
            row += w["markov_head.markov_w2.weight"] @ mixed
        if config.confidence_head:
            joined = torch.cat([state, embedded]) if config.confidence_with_markov else state
            confidences.append(w["confidence_head.proj.weight"][0] @ joined + w["confidence_head.proj.bias"][0])
        previous = int(row.argmax())
        tokens.append(previous)
        rows.append(row)
    return tokens, torch.stack(rows), torch.stack(confidences) if confidences else None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 7, 23])
def test_proposals_equal_the_formulas(kind: str, length: int):
    draft, weights = build(kind)
    taps = taps_of(length)
    got = propose(draft, 5, taps)
    tokens, _, confidences = oracle(draft.config, weights, 5, taps)
    assert got.tokens[0].tolist() == tokens
    if confidences is None:
        assert got.confidences is None
    else:
        assert got.confidences is not None
        torch.testing.assert_close(got.confidences[0].double(), torch.sigmoid(confidences), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dflash", "gated", "mla"])
def test_sampled_laws_equal_the_formulas(kind: str):
    draft, weights = build(kind)
    taps = taps_of(11)
    context = draft.new_context(num_slots=1, max_window=64, scratch_rows=8)
    fill(draft, context, 0, taps)
    got = draft.propose(blocks_of((5, 11, 0)), context, sampling(0.7, seed=1), with_probs=True)
    assert got.probs is not None
    _, logits, _ = oracle(draft.config, weights, 5, taps)
    # Only the first row is independent of what was drawn before it
    torch.testing.assert_close(got.probs[0, 0].double(), (logits[0] / 0.7).softmax(-1), rtol=1e-4, atol=1e-6)


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
        host_filtered=(False,),
    )


def test_sampled_drafts_use_the_noise_of_their_positions():
    draft, weights = build("dflash")
    taps = taps_of(11)
    context = draft.new_context(num_slots=1, max_window=64, scratch_rows=8)
    fill(draft, context, 0, taps)
    _, logits, _ = oracle(draft.config, weights, 5, taps)
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


@pytest.mark.parametrize("kind", ["dflash", "mla"])
def test_a_window_keeps_the_newest_rows_through_wraps(kind: str):
    draft, _ = build(kind, sliding_window=6, layer_types=["sliding_attention"] * 2)
    taps = taps_of(41)
    context = draft.new_context(num_slots=1, max_window=64, scratch_rows=4)
    assert (context.window, context.capacity) == (6, 10)
    for first in range(0, 41, 7):
        fill(draft, context, 0, taps[: first + 7], first)
    got = draft.propose(blocks_of((4, 41, 0)), context).tokens
    # The same rows at the same positions, with others before them
    wide = draft.new_context(num_slots=1, max_window=64, scratch_rows=60)
    fill(draft, wide, 0, torch.cat([taps_of(35, seed=8), taps[35:]]))
    assert got.tolist() == draft.propose(blocks_of((4, 41, 0)), wide).tokens.tolist()


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


def test_the_mask_id_is_never_proposed_and_may_have_its_own_embedding():
    config = parse_draft_config(KINDS["dflash"])
    embedding, lm_head = tables()
    weights = random_weights(config)
    lm_head[MASK] *= 100
    taps = taps_of(9)
    made = [
        DraftModel(config, weights, embedding=embedding, lm_head=lm_head, ops=OPS, mask_embedding=mask)
        for mask in (None, torch.full((HIDDEN,), 2.0))
    ]
    first, second = (propose(draft, anchor, taps).tokens.tolist() for draft in made for anchor in (1,))
    assert MASK not in first[0] + second[0]
    assert first != second


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
