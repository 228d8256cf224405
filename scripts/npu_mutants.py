#!/usr/bin/env python3
"""Breaks the adapters one way at a time and shows which test notices: scripts/npu_mutants.py [name ...]

A mutant is a piece of adapter source and what stands in its place; no file is changed. The named tests first run on the
adapters as they are, and must pass; then each mutant runs its test, which must fail.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch

PRELOADED = (safetensors.torch, torch)
"""Loaded before the fork, so that a mutant costs its test alone."""
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs exactly once in k3svc/ops/npu/<file>.py, becomes `new`; tests/npu/<test> must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


AGREE = "test_adapters.py::test_extends_agree_on_ragged_batches[0]"
TRAPS, TRACKING = "test_traps.py::", "test_tracking.py::"
QUANTIZED, DRAFT, GRAPHS = "test_quantized.py::", "test_draft.py::", "test_graphs.py::"
VERIFY = "test_verify.py::test_verify_and_commit_equal_decode_steps[0]"

MUTANTS = (
    # KDA
    Mutant("scale of the fused op left out", "kda", "            scale=rows.q.shape[-1] ** -0.5,\n", "", AGREE),
    Mutant("q not normalised", "kda", "q=vendor.l2norm_fwd(q.contiguous())", "q=q.contiguous()", AGREE),
    Mutant("k not normalised", "kda", "k=vendor.l2norm_fwd(k.contiguous())", "k=k.contiguous()", AGREE),
    Mutant("beta sigmoided twice", "kda", ".float().sigmoid()[None]", ".float().sigmoid().sigmoid()[None]", AGREE),
    Mutant("beta not sigmoided", "kda", ".float().sigmoid()[None]", ".float()[None]", AGREE),
    Mutant(
        "cumulative gate for the fused op",
        "kda",
        "            rows.g,\n            rows.beta,\n            initial",
        "            rows.g.cumsum(1),\n            rows.beta,\n            initial",
        AGREE,
    ),
    Mutant("natural log for the decomposed kernels", "kda", "scale=math.log2(math.e)", "scale=1.0", AGREE),
    Mutant("gate op run inside of the fused op", "kda", "use_gate_in_kernel=False", "use_gate_in_kernel=True", AGREE),
    Mutant("states in [K, V] for the fused op", "kda", "            state_v_first=True,\n", "", AGREE),
    Mutant(
        "layout left to a default that moves",
        "kda",
        '            layout="BSND",\n',
        "",
        TRAPS + "test_fused_extend_is_one_call_with_explicit_arguments",
    ),
    Mutant(
        "cu_seqlens in int32",
        "kda",
        "            cu_seqlens=step.cu_seqlens,\n            layout",
        "            cu_seqlens=step.cu_seqlens.int(),\n            layout",
        AGREE,
    ),
    Mutant(
        "chunk states asked for and not used",
        "kda",
        "            output_final_state=True,\n",
        "            output_final_state=True,\n            output_h=True,\n",
        TRAPS + "test_fused_extend_is_one_call_with_explicit_arguments",
    ),
    Mutant(
        "final state read at the position of the chunk states",
        "kda",
        "outputs[0], outputs[1]",
        "outputs[0], outputs[10]",
        TRAPS + "test_chunk_outputs_are_read_by_name_and_only_those_asked_for",
    ),
    Mutant(
        "final state not written back",
        "kda",
        "    pool.state.index_copy_(0, step.slots, outputs.final_state.to(pool.state.dtype))\n",
        "",
        AGREE,
    ),
    Mutant(
        "whole pool instead of the live slots",
        "kda",
        "pool.state.index_select(0, step.slots).float().contiguous()",
        "pool.state.float().contiguous()",
        AGREE,
    ),
    Mutant(
        "states passed in the dtype of the pool",
        "kda",
        "index_select(0, step.slots).float().contiguous()",
        "index_select(0, step.slots).contiguous()",
        TRAPS + "test_pool_dtype_other_than_float32",
    ),
    Mutant(
        "used slot not zeroed for the fused op",
        "kda",
        "    initial.index_fill_(0, step.fresh, 0)\n",
        "",
        TRAPS + "test_a_new_request_starts_from_zero_in_a_used_slot[fused]",
    ),
    Mutant(
        "used slot zeroed by a product",
        "kda",
        "    initial.index_fill_(0, step.fresh, 0)\n",
        "    initial *= step.has_state[:, None, None, None]\n",
        TRAPS + "test_a_used_slot_of_nan_does_not_reach_a_new_request[fused]",
    ),
    Mutant(
        "used slot not zeroed for the decomposed kernels",
        "kda",
        "    pool.state.index_fill_(0, step.slots.index_select(0, step.fresh), 0)\n",
        "",
        TRAPS + "test_a_new_request_starts_from_zero_in_a_used_slot[decomposed]",
    ),
    Mutant(
        "output of the decomposed kernels over v",
        "kda",
        "torch.empty_like(rows.v)",
        "rows.v",
        TRAPS + "test_arguments_are_left_alone[decomposed]",
    ),
    Mutant("exp instead of exp2 in the h kernel", "kda", "        use_exp2=True,\n", "", AGREE),
    Mutant(
        "decode without the gate's bound",
        "kda",
        "        lower_bound=gate.lower_bound,\n    )\n    return step",
        "    )\n    return step",
        "test_adapters.py::test_kda_decode",
    ),
    Mutant(
        "decode without the norm",
        "kda",
        "        use_qk_l2norm_in_kernel=True,\n",
        "",
        "test_adapters.py::test_kda_decode",
    ),
    Mutant("GDN gate in decode", "kda", "        is_kda=True,\n", "", "test_adapters.py::test_kda_decode"),
    Mutant(
        "padding shown in decode",
        "kda",
        "return step.hide_padding(out[0].float())",
        "return out[0].float()",
        TRAPS + "test_padded_rows_are_finite_over_poisoned_dummies",
    ),
    # Convolution
    Mutant(
        "conv starts from the slot of an earlier request",
        "kda",
        "        has_initial_state=step.has_state,\n",
        "        has_initial_state=torch.ones_like(step.has_state),\n",
        TRAPS + "test_a_new_request_starts_from_zero_in_a_used_slot",
    ),
    Mutant(
        "conv forgets the state of a chunk before",
        "kda",
        "        has_initial_state=step.has_state,\n",
        "",
        "test_adapters.py::test_conv_extend",
    ),
    Mutant(
        "conv without SiLU",
        "kda",
        "        activation_mode=SILU,\n        run_mode=PREFILL,\n",
        "        run_mode=PREFILL,\n",
        "test_adapters.py::test_conv_extend",
    ),
    Mutant(
        "conv weight as stored",
        "kda",
        "weight.t().to(dtype).contiguous()",
        "weight.to(dtype).contiguous()",
        "test_adapters.py::test_conv_extend",
    ),
    Mutant(
        "conv weight in float32",
        "kda",
        "weight.t().to(dtype).contiguous()",
        "weight.t().contiguous()",
        TRAPS + "test_conv_weight_follows_the_dtype_of_each_call",
    ),
    Mutant(
        "conv on a copy of the whole pool",
        "kda",
        "        taps(weight, u.dtype),\n        pool.conv,\n        query_start_loc",
        "        taps(weight, u.dtype),\n        pool.conv.clone(),\n        query_start_loc",
        TRAPS + "test_conv_works_in_place_on_the_pool",
    ),
    Mutant(
        "prefill mode of the conv in decode",
        "kda",
        "        run_mode=UPDATE,\n",
        "",
        "test_adapters.py::test_kda_decode",
    ),
    # Steps
    Mutant(
        "-1 reaches the gather and the scatter",
        "steps",
        "if slot >= 0 and lengths[b] > 0",
        "if lengths[b] > 0",
        TRAPS + "test_padding_beside_the_last_slot_in_extend",
    ),
    Mutant(
        "empty sequences reach the operators",
        "steps",
        "if slot >= 0 and lengths[b] > 0",
        "if slot >= 0",
        TRAPS + "test_zero_length_sequence_in_the_middle_keeps_its_state",
    ),
    Mutant(
        "-1 reaches decode",
        "steps",
        "slots=meta.slots.clamp_min(0)",
        "slots=meta.slots",
        TRAPS + "test_decode_maps_padding_to_the_dummies",
    ),
    Mutant(
        "-1 reaches the cache write",
        "steps",
        "        places=meta.slot_mapping.clamp_min(0)[:, None],\n        padding=meta.slots < 0",
        "        places=meta.slot_mapping[:, None],\n        padding=meta.slots < 0",
        "test_adapters.py::test_mla_write",
    ),
    Mutant(
        "bool-mask assignment in decode",
        "steps",
        "return x.masked_fill(padding.view(-1, *(1,) * (x.dim() - 1)), 0)",
        "x[padding] = 0\n    return x",
        TRAPS + "test_decode_never_syncs_with_the_host",
    ),
    Mutant(
        "key lengths without the new row",
        "steps",
        "1 if padding else start + 1",
        "1 if padding else start",
        "test_adapters.py::test_mla_decode",
    ),
    Mutant(
        "padding without a key",
        "steps",
        "1 if padding else start + 1",
        "0 if padding else start + 1",
        TRAPS + "test_decode_maps_padding_to_the_dummies",
    ),
    Mutant(
        "block table in int64",
        "steps",
        "        block_tables=meta.block_tables.to(torch.int32),\n        key_lengths",
        "        block_tables=meta.block_tables,\n        key_lengths",
        "test_adapters.py::test_mla_decode",
    ),
    Mutant(
        "key lengths of each sequence in the packed form",
        "steps",
        "key_ends=list(accumulate(key_lengths))",
        "key_ends=key_lengths",
        "test_adapters.py::test_mla_extend",
    ),
    # MLA
    Mutant(
        "scale of packed attention left out",
        "mla",
        "        actual_seq_lengths_kv=step.key_ends,\n        scale=scale,\n",
        "        actual_seq_lengths_kv=step.key_ends,\n",
        "test_adapters.py::test_mla_extend",
    ),
    Mutant(
        "scale of paged attention left out",
        "mla",
        "        sparse_mode=0,\n        actual_seq_lengths_kv=step.key_lengths,\n        scale=scale,\n",
        "        sparse_mode=0,\n        actual_seq_lengths_kv=step.key_lengths,\n",
        "test_adapters.py::test_mla_decode",
    ),
    Mutant(
        "layout of packed attention left out",
        "mla",
        '        input_layout="TND",\n        atten_mask=mask,\n        sparse_mode=CAUSAL,\n'
        "        next_tokens=0,\n        actual",
        "        atten_mask=mask,\n        sparse_mode=CAUSAL,\n        next_tokens=0,\n        actual",
        "test_adapters.py::test_mla_extend",
    ),
    Mutant(
        "packed attention sees the future",
        "mla",
        "        atten_mask=mask,\n        sparse_mode=CAUSAL,\n        next_tokens=0,\n        actual",
        "        next_tokens=0,\n        actual",
        "test_adapters.py::test_mla_extend",
    ),
    Mutant(
        "rope keys shared by a view",
        "mla",
        "rope.expand(-1, heads, -1).contiguous()",
        "rope.expand(-1, heads, -1)",
        "test_adapters.py::test_mla_extend",
    ),
    Mutant(
        "heads not padded to a power of two",
        "mla",
        "padded = 1 << (heads - 1).bit_length()\n    queries",
        "padded = heads\n    queries",
        TRAPS + "test_contract_sizes_of_latent_attention",
    ),
    Mutant(
        "absorb product past its limit",
        "mla",
        "per_call = (ABSORB_LIMIT - 1) // w.shape[1]",
        "per_call = w.shape[0]",
        TRAPS + "test_absorb_splits_below_the_limit",
    ),
    Mutant(
        "cache written through a view of rank four",
        "mla",
        "cache.view(-1, 1, width), part.contiguous().view(-1, 1, width)",
        "cache.view(-1, 1, 1, width), part.contiguous().view(-1, 1, 1, width)",
        "test_adapters.py::test_mla_write",
    ),
    # Verify
    Mutant(
        "raw gates for target verify",
        "verify",
        "        gates_are_preactivated=True,\n        lower_bound=None,\n",
        "        gates_are_preactivated=False,\n        lower_bound=gate.lower_bound,\n",
        VERIFY,
    ),
    Mutant(
        "gates activated twice",
        "verify",
        "b=step.take(b).float().sigmoid()[None]",
        "b=step.take(b).float().sigmoid().sigmoid()[None]",
        VERIFY,
    ),
    Mutant(
        "lower_bound beside activated gates",
        "verify",
        "        lower_bound=None,\n",
        "        lower_bound=gate.lower_bound,\n",
        VERIFY,
    ),
    Mutant(
        "scale of target verify left to the kernel",
        "verify",
        "        scale=key_dim**-0.5,\n",
        "",
        "test_verify.py::test_target_verify_is_one_call_with_activated_gates",
    ),
    Mutant(
        "anchors not moved into the pool",
        "verify",
        "    vendor.speculative_state_scatter_npu(\n        pool.state[None], snapshots[None], step.slots.int(), "
        "step.scratch_rows, step.anchors\n    )\n",
        "",
        VERIFY,
    ),
    Mutant(
        "the last draft's state in the pool",
        "verify",
        "step.scratch_rows, step.anchors\n",
        "step.scratch_rows, step.anchors + step.width - 1\n",
        VERIFY,
    ),
    Mutant(
        "one draft too many committed",
        "verify",
        "[accepted[b] for b in moved]",
        "[accepted[b] + 1 for b in moved]",
        "test_verify.py::test_commit_moves_all_layers_in_one_launch",
    ),
    Mutant(
        "conv window of one row before",
        "verify",
        "+ counts + 1\n",
        "+ counts\n",
        VERIFY,
    ),
    Mutant(
        "conv state not rolled back",
        "verify",
        "    cache.convs.index_copy_(1, slots, windows.view(layers, -1, cached, channels))\n",
        "",
        VERIFY,
    ),
    Mutant(
        "conv of drafts on the pool itself",
        "verify",
        "rows, taps(weight, u.dtype), states, activation_mode",
        "rows, taps(weight, u.dtype), pool.conv, cache_indices=step.slots, activation_mode",
        "test_verify.py::test_conv_verify_works_on_a_copy",
    ),
    Mutant(
        "conv states without the anchor",
        "verify",
        "windows[:, 1 : 1 + cached]",
        "windows[:, :cached]",
        VERIFY,
    ),
    Mutant(
        "indices of the mover in int64",
        "verify",
        "step.slots.int(), step.scratch_rows",
        "step.slots, step.scratch_rows",
        VERIFY,
    ),
    Mutant(
        "-1 reaches verify",
        "steps",
        "slots=torch.tensor(slots, dtype=torch.int64).clamp_min(0).to(device)",
        "slots=torch.tensor(slots, dtype=torch.int64).to(device)",
        "test_verify.py::test_shorter_sequences_repeat_their_last_row",
    ),
    Mutant(
        "keys of a verify step end before its drafts",
        "steps",
        "key_lengths = [start + length for start, length in zip(starts",
        "key_lengths = [start + 1 for start, length in zip(starts",
        VERIFY,
    ),
    Mutant(
        "drafts added twice to the key lengths",
        "steps",
        "key_lengths = [start + length for start, length in zip(starts",
        "key_lengths = [start + 2 * length for start, length in zip(starts",
        VERIFY,
    ),
    Mutant(
        "queries counted for each sequence",
        "steps",
        "query_ends=ends",
        "query_ends=lengths",
        VERIFY,
    ),
    Mutant(
        "block table too narrow for padding",
        "steps",
        "_widened(tables, -(-max(key_lengths) // page_size))",
        "_widened(tables, 1)",
        "test_verify.py::test_block_tables_cover_padding_longer_than_a_page",
    ),
    Mutant(
        "drafts see the drafts after them",
        "mla",
        "        sparse_mode=CAUSAL,\n        next_tokens=0,\n        block_table",
        "        sparse_mode=0,\n        next_tokens=0,\n        block_table",
        VERIFY,
    ),
    Mutant(
        "scale of verify attention left out",
        "mla",
        "        actual_seq_lengths=step.query_ends,\n        actual_seq_lengths_kv=step.key_lengths,\n"
        "        scale=scale,\n",
        "        actual_seq_lengths=step.query_ends,\n        actual_seq_lengths_kv=step.key_lengths,\n",
        VERIFY,
    ),
    # Experts
    Mutant(
        "quant_mode left to its default",
        "moe",
        "        quant_mode=DYNAMIC if is_quantized else NO_QUANTISATION,\n",
        "",
        TRAPS + "test_routing_arguments_are_explicit",
    ),
    Mutant(
        "counts read as sums",
        "moe",
        '"group_type": BY_ROWS, "group_list_type": COUNTS',
        '"group_type": BY_ROWS',
        "test_adapters.py::test_experts_and_glu",
    ),
    Mutant(
        "row index read column by column",
        "moe",
        "        drop_pad_mode=ROW_MAJOR,\n",
        "",
        "test_adapters.py::test_experts_and_glu",
    ),
    Mutant(
        "SwiGLU in a SiTU model",
        "moe",
        'if activation == "silu":',
        'if activation in ("silu", "situ"):',
        TRAPS + "test_the_activation_alone_picks_the_kernel",
    ),
    Mutant(
        "SiTU by sums",
        "moe",
        "vendor.situ(gate_up, counts, COUNTS, need_quant=False",
        "vendor.situ(gate_up, counts.cumsum(0), 0, need_quant=False",
        "test_adapters.py::test_experts_and_glu",
    ),
    Mutant("softmax router", "moe", "        norm_type=SIGMOID,\n", "", "test_adapters.py::test_route"),
    Mutant(
        "weights always renormalised",
        "moe",
        "weights if renormalize else scores.gather(1, ids) * scale",
        "weights",
        "test_adapters.py::test_route",
    ),
    Mutant(
        "a group by its best expert", "moe", "        group_select_mode=BEST_TWO,\n", "", "test_adapters.py::test_route"
    ),
    Mutant(
        "router weights in float32 beside bf16 rows",
        "moe",
        "weights.to(x.dtype)",
        "weights.double()",
        "test_adapters.py::test_experts_and_glu",
    ),
    # Experts of whole numbers
    Mutant(
        "output dtype of quantised products left out",
        "moe",
        "            output_dtype=dtype,\n",
        "",
        QUANTIZED + "test_quantised_products_have_explicit_arguments",
    ),
    Mutant(
        "rows not quantised while they are sorted",
        "moe",
        "quant_mode=DYNAMIC if is_quantized else NO_QUANTISATION",
        "quant_mode=NO_QUANTISATION",
        QUANTIZED + "test_experts_of_whole_numbers",
    ),
    Mutant(
        "SwiGLU for quantised SiTU experts",
        "moe",
        'if is_quantized and activation == "situ" and linear_beta is not None:',
        "if False:",
        QUANTIZED + "test_activation_and_quantisation_pick_the_kernel",
    ),
    Mutant(
        "int4 nibbles swapped",
        "moe",
        "(values[..., 0::2] & 15) | (values[..., 1::2] << 4)",
        "(values[..., 1::2] & 15) | (values[..., 0::2] << 4)",
        QUANTIZED + "test_int4_is_packed_eight_to_an_int32",
    ),
    Mutant(
        "int4 scales as numbers instead of bits",
        "moe",
        "scale.view(torch.int32).long()",
        "scale.long()",
        QUANTIZED + "test_int4_is_packed_eight_to_an_int32",
    ),
    Mutant(
        "int4 without the bias of its nibbles",
        "moe",
        "bias=(8.0 * values",
        "bias=(0.0 * values",
        QUANTIZED + "test_experts_of_whole_numbers",
    ),
    Mutant(
        "quantised weights in ND format",
        "moe",
        "torch.ops.npu.npu_format_cast(values, NZ)",
        "values",
        QUANTIZED + "test_experts_of_whole_numbers",
    ),
    Mutant(
        "scales of int8 weights in float32 beside bf16 rows",
        "moe",
        "scale=scale.to(dtype).contiguous(), bias=None",
        "scale=scale.contiguous(), bias=None",
        QUANTIZED + "test_contract_mode_takes_experts_of_whole_numbers",
    ),
    # Drafts
    Mutant(
        "cos before sin",
        "draft",
        "            sines,\n            cosines,\n",
        "            cosines,\n            sines,\n",
        DRAFT + "test_fused_norm_and_rotation",
    ),
    Mutant(
        "half a rotation",
        "draft",
        "torch.cat([x, x], dim=-1).to(qkv.dtype)",
        "x.to(qkv.dtype)",
        DRAFT + "test_fused_norm_and_rotation",
    ),
    Mutant(
        "a block counted twice",
        "draft",
        "[length + meta.num_rows for length",
        "[length + 2 * meta.num_rows for length",
        DRAFT + "test_block_attention_has_no_mask_and_exact_lengths",
    ),
    Mutant(
        "a causal block where none is wanted",
        "draft",
        ' if is_causal else {"sparse_mode": 0}',
        ' if not is_causal else {"sparse_mode": 0}',
        DRAFT + "test_block_attention",
    ),
    Mutant(
        "the ring read from its first cell",
        "draft",
        "(meta.base_lens[:, None] - lengths + place) % meta.capacity",
        "place",
        DRAFT + "test_the_visible_rows_come_first_and_the_block_last",
    ),
    Mutant(
        "scale of block attention left out",
        "draft",
        "            actual_seq_lengths_kv=step.key_lengths,\n            scale=scale,\n",
        "            actual_seq_lengths_kv=step.key_lengths,\n",
        DRAFT + "test_block_attention_has_no_mask_and_exact_lengths",
    ),
    Mutant(
        "latent heads of a draft not padded",
        "draft",
        "padded = 1 << (heads - 1).bit_length()",
        "padded = heads",
        DRAFT + "test_latent_blocks_are_padded_to_a_power_of_two_of_heads",
    ),
    # Graphs
    Mutant(
        "lengths of the capture replayed",
        "graphs",
        "captured.graph.update(cpu_update_input=[lengths])",
        "pass",
        GRAPHS + "test_decode_and_verify_of_any_batch_equal_eager_steps",
    ),
    Mutant(
        "lengths under the names of the second version",
        "graphs",
        '"key_lengths": "actual_seq_lengths_kv"',
        '"key_lengths": "actual_seq_kvlen"',
        GRAPHS + "test_decode_and_verify_of_any_batch_equal_eager_steps",
    ),
    Mutant(
        "inputs of the capture replayed",
        "graphs",
        "        buffer.copy_(given)\n",
        "        pass\n",
        GRAPHS + "test_decode_and_verify_of_any_batch_equal_eager_steps",
    ),
    Mutant(
        "captured on the inputs of a request",
        "graphs",
        "_mapped(args, torch.zeros_like)",
        "_mapped(args, torch.clone)",
        GRAPHS + "test_a_capture_moves_nothing",
    ),
    Mutant(
        "the result of the capture instead of a replay",
        "graphs",
        "        captured.graph.replay()\n",
        "",
        GRAPHS + "test_decode_and_verify_of_any_batch_equal_eager_steps",
    ),
    Mutant(
        "lengths cannot be updated",
        "graphs",
        "auto_dispatch_capture=True):",
        "auto_dispatch_capture=False):",
        GRAPHS + "test_decode_and_verify_of_any_batch_equal_eager_steps",
    ),
    Mutant(
        "commit reads memory that no graph wrote",
        "graphs",
        "            scratch.adopt(own)\n",
        "            pass\n",
        GRAPHS + "test_decode_and_verify_of_any_batch_equal_eager_steps",
    ),
    Mutant(
        "sampled drafts captured",
        "graphs",
        "isinstance(arg, SampleRows) and not all(arg.host_greedy)",
        "isinstance(arg, SampleRows) and False",
        GRAPHS + "test_sampled_drafts_stay_outside_of_graphs",
    ),
    Mutant(
        "live rows baked into a graph",
        "backend",
        'if self._graphs is None or mode == "extend" else None',
        "if True else None",
        GRAPHS + "test_decode_and_verify_of_any_batch_equal_eager_steps",
    ),
    # Rows
    Mutant(
        "eps= for the norm",
        "backend",
        "npu_rms_norm(x, weight, epsilon=eps)",
        "npu_rms_norm(x, weight, eps=eps)",
        "test_adapters.py::test_row_wise_operations",
    ),
    Mutant(
        "eps of the norm left out",
        "backend",
        "npu_rms_norm(o, weight, epsilon=eps)",
        "npu_rms_norm(o, weight)",
        "test_adapters.py::test_row_wise_operations",
    ),
    # Sampling
    Mutant(
        "k before p",
        "sampling",
        "p if has_p else None, k if has_k else None",
        "k if has_k else None, p if has_p else None",
        "test_sampling.py::test_tokens_are_those_of_the_reference",
    ),
    Mutant(
        "k in int64",
        "sampling",
        "dtype=torch.int32",
        "dtype=torch.int64",
        "test_sampling.py::test_tokens_are_those_of_the_reference",
    ),
    Mutant(
        "no top-k clamped to one",
        "sampling",
        "has_k = 0 < top_k[index] < logits.shape[1]",
        "has_k = True",
        "test_sampling.py::test_no_filter_is_no_call",
    ),
    Mutant(
        "k past the operator's limit",
        "sampling",
        "MAX_TOP_K = 1024",
        "MAX_TOP_K = 1 << 20",
        "test_sampling.py::test_tokens_are_those_of_the_reference",
    ),
    Mutant(
        "a row without a finite logit reaches the filter",
        "sampling",
        "drawn = [index for index in drawn if finite[index]]",
        "pass",
        "test_sampling.py::test_a_row_without_a_finite_logit_disturbs_no_other",
    ),
    # Pools and start
    Mutant(
        "rope before latent on the wire",
        "cache",
        "for part in (pool.latent, pool.rope)])",
        "for part in (pool.rope, pool.latent)])",
        "test_handoff.py::test_wire_bytes_are_latent_and_rope_side_by_side",
    ),
    Mutant(
        "pages copied without their rope part",
        "cache",
        "            pool.rope[target].copy_(pool.rope[source])\n",
        "",
        "test_handoff.py::test_slots_and_pages_are_cleared_and_copied",
    ),
    Mutant(
        "a target of -1 is the last slot",
        "cache",
        "    targets = torch.where(is_tracked, targets, 0)\n",
        "    targets = targets % cache.states.shape[1]\n",
        TRACKING + "test_tracked_rows_are_copied_and_nothing_else_changes[0]",
    ),
    Mutant(
        "rows that are not tracked copy their own states to the dummy slot",
        "cache",
        "    sources = torch.where(is_tracked, sources, 0)\n",
        "",
        TRACKING + "test_tracked_rows_are_copied_and_nothing_else_changes[0]",
    ),
    Mutant(
        "snapshots without the windows of the convolution",
        "cache",
        "    for pool in (cache.states, cache.convs):\n        pool.index_copy_",
        "    for pool in (cache.states,):\n        pool.index_copy_",
        TRACKING + "test_copies_are_those_of_the_reference",
    ),
    Mutant(
        "tracked rows picked by a mask",
        "cache",
        "    sources = torch.where(is_tracked, sources, 0)\n    targets = torch.where(is_tracked, targets, 0)\n",
        "    sources, targets = sources[is_tracked], targets[is_tracked]\n",
        TRACKING + "test_tracking_never_syncs_with_the_host",
    ),
    Mutant(
        "any chunk_kda_fwd is taken",
        "vendor",
        "if num_returns != CHUNK_KDA_RETURNS:",
        "if num_returns < 2:",
        TRAPS + "test_a_sibling_of_chunk_kda_fwd_is_refused",
    ),
)


class _Patched(SourceFileLoader):
    """Loads a module with a piece of its source replaced."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:  # noqa: ARG002 - the signature is the import system's
        source = Path(self.path).read_text(encoding="utf-8")
        assert source.count(self._mutant.old) == 1, f"{self._mutant.name}: {source.count(self._mutant.old)} places"
        return compile(source.replace(self._mutant.old, self._mutant.new), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the signature is the import system's
        target: ModuleType | None = None,  # noqa: ARG002 - as above
    ) -> ModuleSpec | None:
        if name != f"k3svc.ops.npu.{self._mutant.file}":
            return None
        file = str(ROOT / "k3svc" / "ops" / "npu" / f"{self._mutant.file}.py")
        return importlib.util.spec_from_loader(name, _Patched(name, file, self._mutant))


class _Failures:
    """Names of tests that failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid.rpartition("/")[2])


def run(mutant: Mutant | None, tests: Sequence[str]) -> tuple[int, list[str]]:
    """pytest's exit code and the tests that failed, of a process of its own."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        if mutant is not None:
            sys.meta_path.insert(0, _Finder(mutant))
        failures = _Failures()
        stop = [] if mutant is None else ["-x"]
        code = pytest.main(
            ["-q", "-p", "no:cacheprovider", *stop, *(f"tests/npu/{test}" for test in tests)], [failures]
        )
        with os.fdopen(sender, "w") as stream:
            json.dump(failures.names, stream)
        os._exit(int(code))
    os.close(sender)
    with os.fdopen(receiver) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(text or "[]")


def main(names: Sequence[str]) -> int:
    """0 when the adapters pass and every mutant is noticed."""
    os.chdir(ROOT)
    torch.set_num_threads(1)
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    tests = sorted({mutant.test for mutant in chosen})
    code, failed = run(None, tests)
    print(f"as they are: {len(tests)} tests {'pass' if code == 0 else f'fail: {failed}'}", flush=True)
    survivors = 0
    started = time.monotonic()
    for mutant in chosen:
        code, failed = run(mutant, [mutant.test])
        is_noticed = code == pytest.ExitCode.TESTS_FAILED and bool(failed)
        survivors += not is_noticed
        print(
            f"{'noticed ' if is_noticed else 'SURVIVED'} {mutant.name}: {', '.join(failed) or f'exit {code}'}",
            flush=True,
        )
    elapsed = time.monotonic() - started
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants noticed in {elapsed:.0f} s")
    return int(survivors > 0 or run(None, tests[:1])[0] != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
