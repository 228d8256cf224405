"""Mutants of steps, MLA, rows and sampling."""

from npu_mutations import TRAPS, Mutant

MUTANTS = (
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
)
