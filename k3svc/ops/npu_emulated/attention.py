"""npu_fused_infer_attention_score, the cache write and the absorb product of torch_npu, and sgl-kernel-npu's store."""

import math

import torch
from torch import Tensor

from k3svc.ops.npu_emulated.contract import (
    poisoned,
    require,
    require_contiguous,
    require_dtype,
    require_indices,
    require_size,
)
from k3svc.ops.npu_emulated.device import kernel
from k3svc.ops.npu_emulated.registry import operator

_INDEX = (torch.int32, torch.int64)
_MASK_SIZE = 2048
_RIGHT_DOWN = 3
_LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


@operator("npu_fused_infer_attention_score")
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    block_table: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    num_heads: int,
    scale: float,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    block_size: int,
    softmax_lse_flag: bool,
) -> tuple[Tensor, Tensor]:
    """Layouts TND (packed queries; packed keys or pages of [1, page, D]) and BSND (keys [B, S] or pages of [page, D]),
    with the rope parts of MLA or without.

    Lengths of queries are cumulative in TND; so are lengths of keys there without a block table, else they are those of
    each sequence. Rows without keys are left unwritten.
    """
    name = "npu_fused_infer_attention_score"
    require_dtype(name, "query", query, torch.bfloat16, torch.float16)
    require(key.dtype == value.dtype == query.dtype, name, "query, key and value differ in dtype")
    require_contiguous(name, query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    require((query_rope is None) == (key_rope is None), name, "query_rope and key_rope come together")
    require(input_layout in ("TND", "BSND"), name, f"layout {input_layout!r} is not emulated")
    require(not softmax_lse_flag, name, "softmax_lse_flag is not emulated")
    kv_heads = num_key_value_heads or num_heads
    require(query.shape[-2] == num_heads, name, f"query has {query.shape[-2]} heads, num_heads is {num_heads}")
    require(num_heads % kv_heads == 0, name, f"{num_heads} heads on {kv_heads}")
    _check_sizes(name, query.shape[-1], query_rope, num_heads, kv_heads)
    _check_mask(name, atten_mask, sparse_mode, next_tokens)
    q = query if query_rope is None else torch.cat([query, query_rope], dim=-1)
    begins, rows = _queries(name, q, input_layout, actual_seq_lengths)
    keys, values = _keys(
        name,
        input_layout,
        key,
        value,
        key_rope,
        kv_heads,
        len(begins) - 1,
        actual_seq_lengths_kv,
        block_table,
        block_size,
    )
    out = poisoned((rows.shape[0], num_heads, value.shape[-1]), query.dtype)
    for n, (k, v) in enumerate(zip(keys, values, strict=True)):
        own = slice(begins[n], begins[n + 1])
        if k.shape[0] == 0 or begins[n] == begins[n + 1]:
            continue
        k, v = (x.repeat_interleave(num_heads // kv_heads, dim=1) for x in (k, v))  # noqa: PLW2901 - widened to all heads
        scores = scale * torch.einsum("ihc,jhc->hij", rows[own].double(), k)
        if sparse_mode == _RIGHT_DOWN:
            i, j = torch.arange(scores.shape[1])[:, None], torch.arange(scores.shape[2])
            scores = scores.masked_fill(j > i + scores.shape[2] - scores.shape[1], -math.inf)
        out[own] = torch.einsum("hij,jhc->ihc", scores.softmax(-1), v).to(query.dtype)
    return out.view(*query.shape[:-1], value.shape[-1]), torch.empty(0)


def _check_sizes(name: str, width: int, rope: Tensor | None, heads: int, kv_heads: int) -> None:
    require_size(heads <= 256, name, f"{heads} heads, at most 256")
    if rope is None:
        require_size(width <= 512, name, f"width {width}, at most 512")
        return
    require_size(rope.shape[-1] == 64, name, f"rope width {rope.shape[-1]}, must be 64")
    require_size(width in (128, 512), name, f"width {width} beside rope, must be 128 or 512")
    if width == 512:
        require_size(kv_heads == 1, name, f"{kv_heads} key heads of 512, must be 1")
        require_size(heads in _LATENT_HEADS, name, f"{heads} heads of 512, must be a power of two up to 128")


def _check_mask(name: str, mask: Tensor | None, sparse_mode: int, next_tokens: int) -> None:
    require(sparse_mode in (0, _RIGHT_DOWN), name, f"sparse_mode {sparse_mode} is not emulated")
    if sparse_mode == 0:
        require(mask is None, name, "a full mask is not emulated")
        return
    require(mask is not None, name, f"sparse_mode {sparse_mode} needs the compressed mask")
    assert mask is not None
    require(mask.shape == (_MASK_SIZE, _MASK_SIZE), name, f"the mask is {tuple(mask.shape)}, must be 2048 x 2048")
    require(mask.dtype in (torch.bool, torch.int8, torch.uint8), name, f"the mask is {mask.dtype}")
    require(
        bool((mask.bool() == torch.ones_like(mask, dtype=torch.bool).triu(1)).all()), name, "the mask is not causal"
    )
    require(next_tokens in (0, 2147483647), name, f"next_tokens {next_tokens}")


def _queries(name: str, q: Tensor, layout: str, lengths: list[int] | None) -> tuple[list[int], Tensor]:
    """Where each sequence's rows begin (and the end), and the rows [T, N, D]."""
    if layout == "BSND":
        require(q.dim() == 4 and lengths is None, name, "BSND wants [B, S, N, D] and no actual_seq_lengths")
        batch, per_row = q.shape[:2]
        return list(range(0, batch * per_row + 1, per_row)), q.flatten(0, 1)
    require(q.dim() == 3, name, "TND wants [T, N, D]")
    require(lengths is not None, name, "TND needs actual_seq_lengths")
    assert lengths is not None
    require(
        lengths == sorted(lengths) and lengths[-1] == q.shape[0], name, f"actual_seq_lengths {lengths} of {q.shape[0]}"
    )
    return [0, *lengths], q


def _keys(
    name: str,
    layout: str,
    key: Tensor,
    value: Tensor,
    key_rope: Tensor | None,
    kv_heads: int,
    sequences: int,
    lengths: list[int] | None,
    table: Tensor | None,
    block_size: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """float64 keys and values [S, kv heads, D] of each sequence."""
    require(lengths is not None and len(lengths) >= sequences, name, f"lengths {lengths} for {sequences} sequences")
    assert lengths is not None
    parts = [key, value] if key_rope is None else [key, value, key_rope]
    if table is None and layout == "BSND":
        batch = key.shape[0]
        require(key.dim() == 4 and key.shape[2] == kv_heads, name, f"key {tuple(key.shape)}, [B, S, {kv_heads}, D]")
        require(batch == sequences == len(lengths), name, f"{batch} rows of keys, lengths {lengths}")
        require(max(lengths) <= key.shape[1], name, f"lengths {lengths} of {key.shape[1]} keys")
        chosen = [[part[n, :length] for part in parts] for n, length in enumerate(lengths)]
    elif table is None:
        require(
            key.dim() == 3 and key.shape[1] == kv_heads, name, f"key {tuple(key.shape)}, must be [S, {kv_heads}, D]"
        )
        require(
            lengths == sorted(lengths) and lengths[-1] == key.shape[0],
            name,
            f"lengths {lengths} of {key.shape[0]} keys",
        )
        begins = [0, *lengths[:-1]]
        chosen = [[part[a:b] for part in parts] for a, b in zip(begins, lengths, strict=True)]
    else:
        require(
            table.dtype == torch.int32 and table.dim() == 2, name, f"block_table {table.dtype} of rank {table.dim()}"
        )
        require_contiguous(name, block_table=table)
        require(table.shape[0] >= sequences, name, f"{table.shape[0]} rows of block_table for {sequences} sequences")
        require_size(block_size % 16 == 0 and 0 < block_size <= 1024, name, f"block_size {block_size}")
        wanted = (1, block_size) if layout == "TND" else (block_size,)
        require(key.shape[1:-1] == wanted, name, f"cache {tuple(key.shape)}, pages of {block_size}")
        require(kv_heads == 1, name, "paged keys of one head are emulated")
        require_indices(name, "block_table", table, key.shape[0])
        needed = max(-(-length // block_size) for length in lengths)
        require(needed <= table.shape[1], name, f"{needed} blocks needed, block_table has {table.shape[1]}")
        flat = [part.reshape(-1, 1, part.shape[-1]) for part in parts]
        chosen = []
        for n, length in enumerate(lengths[:sequences]):
            positions = torch.arange(length)
            rows = table[n].long()[positions // block_size] * block_size + positions % block_size
            chosen.append([part[rows] for part in flat])
    keys = [torch.cat([own[0], *own[2:]], dim=-1).double() for own in chosen]
    return keys, [own[1].double() for own in chosen]


@operator("npu_scatter_nd_update_")
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:  # noqa: A002 - the schema's name
    """input[indices[i]] = updates[i] for index rows of one axis, in place."""
    name = "npu_scatter_nd_update_"
    require(indices.dtype in (torch.int32, torch.int64) and indices.dim() == 2, name, f"indices {tuple(indices.shape)}")
    require(indices.shape[1] == 1, name, "indices of one leading axis are emulated")
    require(updates.shape == (indices.shape[0], *input.shape[1:]), name, f"updates {tuple(updates.shape)}")
    require(updates.dtype == input.dtype, name, f"updates {updates.dtype}, input {input.dtype}")
    require(input.dim() <= 3, name, f"the tiling rejects rank {input.dim()}; view the cache as rank 3")
    require_contiguous(name, input=input, updates=updates)
    require_indices(name, "indices", indices, input.shape[0])
    input[indices[:, 0].long()] = updates
    return input


@kernel
def store_kv_cache_prefix_valid_npu_triton(
    dst_k: Tensor, dst_v: Tensor, src_k: Tensor, src_v: Tensor, loc_2d: Tensor, commit_lens: Tensor
) -> None:
    """dst[loc_2d[b, w]] = src[b · W + w] where w < commit_lens[b], of keys and of values, whose widths may differ.

    dst [slots, heads, D], src [B · W, heads, D], loc_2d [B, W], commit_lens [B]. Neither places nor rows past a block's
    valid prefix are read.
    """
    name = "store_kv_cache_prefix_valid_npu_triton"
    require(loc_2d.dim() == 2 and loc_2d.dtype in _INDEX, name, f"loc_2d {loc_2d.dtype} {tuple(loc_2d.shape)}, [B, W]")
    blocks, width = loc_2d.shape
    require(
        commit_lens.dtype in _INDEX and commit_lens.shape == (blocks,),
        name,
        f"commit_lens {commit_lens.dtype} {tuple(commit_lens.shape)} for {blocks} blocks",
    )
    is_wrong = (commit_lens < 0) | (commit_lens > width)
    require(not bool(is_wrong.any()), name, f"commit_lens {commit_lens.tolist()} of blocks of {width}")
    require_contiguous(name, loc_2d=loc_2d, commit_lens=commit_lens)
    is_valid = (torch.arange(width) < commit_lens[:, None]).flatten()
    places = loc_2d.flatten()[is_valid].long()
    for letter, dst, src in (("k", dst_k, src_k), ("v", dst_v, src_v)):
        require(dst.dim() == src.dim() == 3, name, f"dst_{letter} of rank {dst.dim()}, src_{letter} of {src.dim()}")
        require(src.shape == (blocks * width, *dst.shape[1:]), name, f"src_{letter} {tuple(src.shape)}")
        require(dst.dtype == src.dtype == dst_k.dtype, name, f"dst_{letter} {dst.dtype}, src_{letter} {src.dtype}")
        require(dst.device == src.device == loc_2d.device == commit_lens.device, name, "tensors on several devices")
        for x in (dst, src):
            require(x.stride()[1:] == (x.shape[2], 1), name, f"the last two axes of {letter} must be contiguous")
        require_indices(name, "loc_2d", places, dst.shape[0])
        dst[places] = src[is_valid]


@operator("npu_transpose_batchmatmul")
def npu_transpose_batchmatmul(
    input: Tensor,  # noqa: A002 - the schema's name
    weight: Tensor,
    perm_x1: list[int] | None,
    perm_x2: list[int] | None,
    perm_y: list[int] | None,
) -> Tensor:
    """input [M, B, K] (perm_x1 [1, 0, 2]) times weight [B, K, N] → [M, B, N]."""
    name = "npu_transpose_batchmatmul"
    require(input.dtype == weight.dtype, name, f"input {input.dtype}, weight {weight.dtype}")
    require(input.dtype in (torch.float16, torch.bfloat16, torch.float32), name, f"input is {input.dtype}")
    require(perm_x1 == [1, 0, 2], name, f"perm_x1 {perm_x1} is not emulated")
    require(perm_x2 in (None, [0, 1, 2]) and perm_y == [1, 0, 2], name, f"perm_x2 {perm_x2}, perm_y {perm_y}")
    rows, batch, inner = input.shape
    require(weight.shape[:2] == (batch, inner), name, f"weight {tuple(weight.shape)} for input {tuple(input.shape)}")
    require(rows > 0, name, "no rows")
    require_size(
        inner % 16 == 0 and weight.shape[2] % 16 == 0, name, f"K {inner} and N {weight.shape[2]}, multiples of 16"
    )
    require(inner * batch < 65536, name, f"K·B {inner * batch}, below 65536")
    return torch.einsum("mbk,bkn->mbn", input.double(), weight.double()).to(input.dtype)
