"""The cpu backend gives the same bits on every instruction set of this machine and with any number of threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k3svc.ops.cpu.backend import Cpu
from k3svc.ops.table import KdaGate, Ops
from tests.conformance.cpu_cases import (
    PAGE,
    cache_spec,
    expert,
    fill_rows,
    meta_of,
    needs_compiler,
    paths,
    pool_of,
    rand,
    sequences,
)
from tests.conformance.sampling_cases import sample_rows
from tests.oracles.blocks import block_meta
from tests.oracles.loop import poison_cache

pytestmark = needs_compiler


def row_results(cpu: Cpu) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    out: list[Tensor] = []
    for rows, width, features in ((1, 300, 200), (2, 64, 33), (3, 17, 150), (7, 513, 96), (60, 80, 70)):
        x, weight = rand(source, rows, width, scale=3), rand(source, features, width)
        out += [cpu.linear(x, cpu.pack_linear(weight)), cpu.linear(x, cpu.pack_linear(weight.bfloat16()))]
        norm = rand(source, width)
        out += [cpu.rms_norm(x, norm, 1e-5), cpu.gated_norm(x[:, None], x, norm, 1e-5), cpu.sigmoid_gate(x, x)]
        out.append(cpu.mix_residual(x, [x.cos(), x.sin() * 5], norm, 1e-5))
        out += [cpu.glu(x, "situ", 4.0, 25.0), cpu.glu(x, "silu", 1.0, None)]
        router, bias = cpu.pack_linear(rand(source, 12, width)), rand(source, 12)
        ids, weights = cpu.route(x, router, bias, top_k=3, renormalize=True, scale=2.0, num_groups=3, top_groups=2)
        experts = cpu.pack_experts(expert(source, 20, width) for _ in range(12))
        out += [ids, weights, cpu.experts(x, ids, weights, experts, "situ", 4.0, None)]
    spread = torch.linspace(-110, 110, 4001).view(1, -1)
    out.append(cpu.sigmoid_gate(torch.ones_like(spread), spread))
    sizes = torch.logspace(-45, 38.5, 4000, dtype=torch.float64).float()
    ends = torch.cat([sizes, -sizes, torch.tensor([torch.inf, -torch.inf])])
    for x in (spread[0], ends):
        out.append(cpu.glu(torch.cat([x, x.roll(1234)])[None], "situ", 4.0, 25.0))
    return out


def kda_results(cpu: Ops) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    out: list[Tensor] = []
    for heads, key, value in ((2, 64, 80), (3, 17, 40)):
        spec = cache_spec(kda_heads=heads, kda_key_dim=key, kda_value_dim=value)
        lengths = [70, 5]
        rows = sequences(lengths, [0, 64])
        count, channels = sum(lengths), spec.conv_channels
        conv = rand(source, channels, 4)
        u, f, b = rand(source, count, channels), rand(source, count, heads * key), rand(source, count, heads)
        for bound in (None, -5.0):
            gate = KdaGate(a=rand(source, heads).exp(), dt_bias=rand(source, heads, key), lower_bound=bound)
            cache = cpu.new_cache(spec)
            poison_cache(cache)
            pool = pool_of(cache, 0)
            for row in rows:
                cache.clear_slot(row.slot)
            step = cpu.prepare(meta_of(rows, lengths), "extend", spec)
            out.append(cpu.kda_extend(cpu.kda_conv_extend(u, conv, pool, step), f, b, gate, pool, step))
            step = cpu.prepare(meta_of(rows, [1, 1]), "decode", spec)
            out.append(cpu.kda_decode(cpu.kda_conv_decode(u[:2], conv, pool, step), f[:2], b[:2], gate, pool, step))
            step = cpu.prepare(meta_of(rows, [9, 3]), "verify", spec)
            own = slice(12)
            qkv = cpu.kda_conv_verify(u[own], conv, pool, step)
            out.append(cpu.kda_verify(qkv, f[own], b[own], gate, pool, step))
            cpu.commit(cache, step, [4, 2])
            out += [pool.state[[1, 2]], pool.conv[[1, 2]]]
    return out


def mla_results(cpu: Ops) -> list[Tensor]:
    source = torch.Generator().manual_seed(2)
    out: list[Tensor] = []
    for heads, nope, rope, rank, value in ((4, 32, 16, 64, 32), (13, 9, 5, 21, 37)):
        spec = cache_spec(kv_lora_rank=rank, rope_dim=rope)
        lengths = [90, 3]
        rows = sequences(lengths, [64, 128])
        cache = cpu.new_cache(spec)
        poison_cache(cache)
        fill_rows(cache, 1, rows, source)
        pool = pool_of(cache, 1)
        w_kc, w_vc = rand(source, heads, nope, rank), rand(source, heads, value, rank)
        q, new = rand(source, 93, heads, nope + rope), rand(source, 93, rank + rope)
        step = cpu.prepare(meta_of(rows, lengths), "extend", spec)
        cpu.mla_write(new, pool, step)
        out.append(cpu.mla_extend(q, w_kc, w_vc, pool, step, 0.2))
        step = cpu.prepare(meta_of(rows, [1, 1]), "decode", spec)
        out.append(cpu.mla_decode(q[:2], w_kc, w_vc, pool, step, 0.2))
        step = cpu.prepare(meta_of(rows, lengths), "verify", spec)
        out.append(cpu.mla_verify(q, w_kc, w_vc, pool, step, 0.2))
        assert spec.page_size == PAGE
    return out


def choice_results(cpu: Cpu) -> list[Tensor]:
    """Tokens of outputs and of drafts, and what drafts are chosen from."""
    source = torch.Generator().manual_seed(4)
    out: list[Tensor] = []
    for count, vocabulary, scale in ((1, 4096, 2.0), (40, 300, 0.5), (40, 1001, 6.0)):
        logits, bias = rand(source, count, vocabulary, scale=scale), rand(source, count, vocabulary)
        rows = sample_rows(count, vocabulary)
        out += [cpu.sample(logits, rows), *cpu.draft.choose(logits, bias, 7, rows, 3)]
        out += cpu.draft.choose(logits, None, 7, None, 0)
    # -inf says that an id is banned.
    return [torch.where(tensor == -torch.inf, -1e30, tensor) for tensor in out]


def draft_results(cpu: Cpu) -> list[Tensor]:
    source = torch.Generator().manual_seed(5)
    out: list[Tensor] = []
    for heads, key_heads, width, window, capacity in ((4, 2, 64, 57, 64), (3, 1, 6, 10, 19)):
        meta = block_meta(width, 4, slots=12, window=window, capacity=capacity)
        count = len(meta.slots)
        frequencies = torch.rand(width // 2, generator=source)
        cos, sin = cpu.draft.rotation(meta.base_lens, 4, frequencies, 1.25)
        qkv, norms = rand(source, count * 4, (heads + 2 * key_heads) * width), rand(source, 2, width)
        q, k, v = cpu.draft.norm_rope(qkv, heads, norms[0], norms[1], 1e-5, cos, sin)
        out += [cos, sin, q, k, *(cpu.draft.rotate(q, cos, sin, interleaved=turned) for turned in (False, True))]
        keys, values = (rand(source, 12, capacity, key_heads, width) for _ in range(2))
        q, k, v = (x.reshape(count, 4, *x.shape[1:]) for x in (q, k, v))
        step = cpu.draft.prepare(meta)
        out += [
            cpu.draft.block_attention(q, k, v, keys, values, step, scale=0.3, is_causal=is_causal)
            for is_causal in (False, True)
        ]
        states, embedded = rand(source, count, 4, width), rand(source, count, 4, 9)
        temperatures = torch.tensor([0.5, 1.0, 2.0, 4.0])
        out.append(cpu.draft.confidences(states, embedded, rand(source, width + 9), 0.25, temperatures))
        out += cpu.draft.recur(rand(source, 6, 3 * width, scale=3), rand(source, 6, width))
    return out


@pytest.mark.parametrize("results", [row_results, kda_results, mla_results, choice_results, draft_results])
def test_bits_do_not_depend_on_the_path(results: Callable[[Cpu], list[Tensor]]):
    expected = results(Cpu())
    assert all(tensor.isfinite().all() for tensor in expected)
    others = [Cpu(isa=isa, threads=threads) for isa in paths() for threads in (1, 3)]
    assert len(others) > 1
    for cpu in others:
        for index, (actual, tensor) in enumerate(zip(results(cpu), expected, strict=True)):
            assert torch.equal(actual, tensor), (cpu.isa, index)


def test_every_call_waits_for_the_threads_that_help():
    source = torch.Generator().manual_seed(3)
    x, weight = rand(source, 6, 300), rand(source, 400, 300)
    expected = Cpu().linear(x, Cpu().pack_linear(weight))
    for threads in (2, 3, 8):
        cpu = Cpu(threads=threads)
        packed = cpu.pack_linear(weight)
        for _ in range(300):
            assert torch.equal(cpu.linear(x, packed), expected)
