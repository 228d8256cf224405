"""Each emulated operator against an independent value: a plain formula, a loop, or another function of torch."""

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from k3svc.ops.npu_emulated import kda, kda_decomposed, registry, rowwise
from k3svc.ops.npu_emulated.contract import Session
from k3svc.ops.npu_emulated.device import on_device
from tests.npu.bench import RELAXED

npu = torch.ops.npu


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    registry.install()
    with on_device(Session(rules=RELAXED)):
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def test_npu_rms_norm():
    x, gamma = draw(3, 5, 8), draw(8)
    y, rstd = npu.npu_rms_norm(x, gamma, epsilon=1e-3)
    torch.testing.assert_close(y, F.rms_norm(x, (8,), gamma, 1e-3))
    assert rstd.shape == (3, 5, 1)
    assert rstd[1, 2, 0].item() == pytest.approx(1 / math.sqrt(sum(v * v for v in x[1, 2].tolist()) / 8 + 1e-3))


def test_npu_swiglu():
    x = draw(4, 12)
    torch.testing.assert_close(npu.npu_swiglu(x), F.silu(x[:, :6]) * x[:, 6:])


def test_situ_in_float_and_quantised():
    x, counts = draw(6, 4) * 40, torch.tensor([1, 0, 3])
    out, none = rowwise.situ(x, counts, 1, need_quant=False, beta=4.0, linear_beta=25.0)
    assert none is None
    rows = []
    for row in x[:4].tolist():
        pairs = zip(row[:2], row[2:], strict=True)
        rows.append([4 * math.tanh(a / 4) / (1 + math.exp(-a)) * 25 * math.tanh(u / 25) for a, u in pairs])
    torch.testing.assert_close(out[:4], torch.tensor(rows))
    assert out[4:].isnan().all()
    quantised, scale = rowwise.situ(x, counts, 1, need_quant=True)
    for row, q, s in zip(rows, quantised[:4].tolist(), scale[:4].tolist(), strict=True):
        assert s == pytest.approx(max(abs(v) for v in row) / 127)
        assert q == [math.floor(v / s + 0.5) for v in row]
    assert quantised[4:].eq(-128).all()


def test_mix_fused():
    bank, prefix, weight = draw(2, 3, 4), draw(2, 4), draw(4)
    out = rowwise.mix_fused(prefix, bank, 2, weight, 1e-5)
    for n in range(2):
        rows = [bank[n, 0], bank[n, 1], prefix[n]]
        scores = [float((r * weight).sum() / torch.sqrt((r * r).mean() + 1e-5)) for r in rows]
        parts = [math.exp(s) for s in scores]
        expected = sum(p / sum(parts) * r for p, r in zip(parts, rows, strict=True))
        torch.testing.assert_close(out[n], expected)


def test_npu_top_k_top_p():
    logits = torch.tensor([[0.0, 1.0, 2.0, 2.0, -1.0]] * 4 + [[-torch.inf] * 5])
    k = torch.tensor([1, 3, 5, 5, 2], dtype=torch.int32)
    p = torch.tensor([1.0, 0.5, 0.7, 0.01, 0.5])
    kept = [[i for i, v in enumerate(row) if v > -math.inf] for row in npu.npu_top_k_top_p(logits, p, k)[:4].tolist()]
    # Row 0: a tie with the first stays. Row 1: the rest after k is 1, 2, 2, of masses .155, .422, .422.
    assert kept == [[2, 3], [2, 3], [2, 3], [3]]
    assert npu.npu_top_k_top_p(logits, p, k)[4].isnan().all()
    assert npu.npu_top_k_top_p(logits[:1], None, k[1:2]).tolist() == [[-math.inf, 1.0, 2.0, 2.0, -math.inf]]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Tensor:
    """[Tq, N, D] over [Tk, N, D]; the last query sees the last key."""
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0]) if causal else None
    by_head = [x.transpose(0, 1).double() for x in (q, k, v)]
    return (
        F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], attn_mask=mask, scale=scale)
        .transpose(0, 1)
        .float()
    )


@pytest.mark.parametrize("causal", [True, False])
def test_packed_attention(causal: bool):
    q, qr, k, kr, v = draw(7, 2, 8), draw(7, 2, 4), draw(12, 2, 8), draw(12, 2, 4, seed=1), draw(12, 2, 6)
    masked = {"atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1), "sparse_mode": 3} if causal else {}
    out, lse = npu.npu_fused_infer_attention_score(
        q,
        k,
        v,
        query_rope=qr,
        key_rope=kr,
        num_heads=2,
        input_layout="TND",
        scale=0.4,
        actual_seq_lengths=[5, 7],
        actual_seq_lengths_kv=[8, 12],
        **masked,
    )
    assert lse.numel() == 0
    for (a, b), (c, d) in (((0, 5), (0, 8)), ((5, 7), (8, 12))):
        whole_q, whole_k = torch.cat([q, qr], -1)[a:b], torch.cat([k, kr], -1)[c:d]
        torch.testing.assert_close(out[a:b], dense_attention(whole_q, whole_k, v[c:d], 0.4, causal=causal))


def test_paged_attention():
    q, qr, latent, rope = draw(3, 1, 2, 8), draw(3, 1, 2, 4), draw(5, 4, 8), draw(5, 4, 4)
    table = torch.tensor([[2, 4], [1, 0], [0, 0]], dtype=torch.int32)
    out, _ = npu.npu_fused_infer_attention_score(
        q,
        latent,
        latent,
        query_rope=qr,
        key_rope=rope,
        num_heads=2,
        num_key_value_heads=1,
        input_layout="BSND",
        block_table=table,
        block_size=4,
        scale=0.7,
        actual_seq_lengths_kv=[6, 3, 0],
    )
    rows = [[(2, 0), (2, 1), (2, 2), (2, 3), (4, 0), (4, 1)], [(1, 0), (1, 1), (1, 2)]]
    for n, places in enumerate(rows):
        keys = torch.stack([torch.cat([latent[p], rope[p]]) for p in places])[:, None].expand(-1, 2, -1)
        values = torch.stack([latent[p] for p in places])[:, None].expand(-1, 2, -1)
        expected = dense_attention(torch.cat([q, qr], -1)[n], keys, values, 0.7, causal=False)
        torch.testing.assert_close(out[n], expected)
    assert out[2].isnan().all()


def test_npu_scatter_nd_update_():
    cache, updates = draw(5, 1, 3), draw(2, 1, 3)
    before = cache.clone()
    returned = npu.npu_scatter_nd_update_(cache, torch.tensor([[4], [1]]), updates)
    assert returned.data_ptr() == cache.data_ptr()
    assert torch.equal(cache, torch.stack([before[0], updates[1], before[2], before[3], updates[0]]))


def test_npu_transpose_batchmatmul():
    x, weight = draw(3, 4, 16), draw(4, 32, 16).transpose(1, 2)
    out = npu.npu_transpose_batchmatmul(x, weight, perm_x1=[1, 0, 2], perm_y=[1, 0, 2])
    torch.testing.assert_close(out, torch.stack([x[:, b] @ weight[b] for b in range(4)], dim=1))


def test_npu_moe_gating_top_k():
    x, bias = torch.tensor([[0.0, 2.0, -1.0, 1.0, 0.5, -2.0]]), torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    y, ids, scores = npu.npu_moe_gating_top_k(
        x, 2, bias=bias, k_group=1, group_count=1, norm_type=1, out_flag=True, routed_scaling_factor=3.0
    )
    sigmoid = [1 / (1 + math.exp(-v)) for v in x[0].tolist()]
    # 0: .5 + 3, 5: .12 + 1, 1: .88
    assert ids.tolist() == [[0, 5]]
    assert ids.dtype == torch.int32
    total = sigmoid[0] + sigmoid[5]
    assert y[0].tolist() == pytest.approx([3 * sigmoid[0] / total, 3 * sigmoid[5] / total])
    assert scores[0].tolist() == pytest.approx(sigmoid)
    # Two groups of three: {3.5, .88, .27} and {.73, .62, 1.12}; the sum of the two best picks the first.
    _, ids, _ = npu.npu_moe_gating_top_k(x, 2, bias=bias, k_group=1, group_count=2, group_select_mode=1, norm_type=1)
    assert ids.tolist() == [[0, 1]]


def test_expert_routing_there_and_back():
    x = draw(3, 4)
    ids = torch.tensor([[2, 0], [0, 1], [2, 1]], dtype=torch.int32)
    rows, place, counts, scale = npu.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=6,
        expert_num=4,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, 4],
    )
    assert (counts.dtype, counts.tolist()) == (torch.int64, [2, 2, 2, 0])
    # Expert 0: tokens 0, 1; expert 1: tokens 1, 2; expert 2: tokens 0, 2.
    assert torch.equal(rows, x[[0, 1, 1, 2, 0, 2]])
    assert (place.dtype, place.tolist()) == (torch.int32, [4, 0, 1, 2, 5, 3])
    assert scale.numel() == 0
    weights = draw(3, 2)
    back = npu.npu_moe_finalize_routing(rows, None, None, None, weights, place, None, drop_pad_mode=2)
    torch.testing.assert_close(back, x * weights.sum(1, keepdim=True))
    # The other mode reads the same numbers as [k, T].
    crossed = npu.npu_moe_finalize_routing(rows, None, None, None, weights, place, None, drop_pad_mode=0)
    torch.testing.assert_close(crossed[0], rows[4] * weights[0, 0] + rows[2] * weights[0, 1])


def test_init_routing_quantises_by_row():
    x = torch.tensor([[1.0, -2.0], [0.0, 0.5]])
    ids = torch.tensor([[1], [0]], dtype=torch.int32)
    rows, _, counts, scale = npu.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=2,
        expert_num=2,
        expert_tokens_num_flag=True,
        expert_tokens_num_type=0,
        active_expert_range=[0, 2],
        quant_mode=1,
    )
    assert rows.tolist() == [[0, 127], [64, -127]]
    assert counts.tolist() == [1, 2]
    torch.testing.assert_close(scale, torch.tensor([0.5 / 127, 2 / 127]))


@pytest.mark.parametrize(("kind", "groups"), [(1, [2, 0, 3]), (0, [2, 2, 5])])
def test_npu_grouped_matmul(kind: int, groups: list[int]):
    x, weight = draw(5, 4), draw(3, 4, 6)
    (out,) = npu.npu_grouped_matmul(
        [x], [weight], group_list=torch.tensor(groups), split_item=2, group_type=0, group_list_type=kind
    )
    owners = [0, 0, 2, 2, 2]
    torch.testing.assert_close(out, torch.stack([x[n] @ weight[e] for n, e in enumerate(owners)]))


@pytest.mark.parametrize("width", [2, 3, 4])
def test_causal_conv1d_prefill_then_update(width: int):
    x, weight = draw(9, 6), draw(width, 6)
    pool = draw(4, width - 1, 6)
    before = pool.clone()
    bounds = torch.tensor([0, 1, 7, 9])
    out = npu.causal_conv1d(
        x,
        weight,
        pool,
        query_start_loc=bounds,
        cache_indices=torch.tensor([3, 1, -1]),
        has_initial_state=torch.tensor([True, False, True]),
        activation_mode=1,
    )
    streams = {3: torch.cat([before[3], x[:1]]), 1: torch.cat([torch.zeros(width - 1, 6), x[1:7]])}
    for slot, rows in ((3, out[:1]), (1, out[1:7])):
        full = F.conv1d(streams[slot].t()[None], weight.t()[:, None], groups=6)[0].t()
        torch.testing.assert_close(rows, F.silu(full))
        torch.testing.assert_close(pool[slot], streams[slot][-(width - 1) :])
    assert out[7:].isnan().all()
    assert torch.equal(pool[[0, 2]], before[[0, 2]])
    step = draw(1, 1, 6)
    again = npu.causal_conv1d(step, weight, pool, cache_indices=torch.tensor([1]), run_mode=1)
    window = torch.cat([streams[1][-(width - 1) :], step[0]])
    torch.testing.assert_close(again[0, 0], (window * weight).sum(0))
    torch.testing.assert_close(pool[1], window[1:])


def matrix_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[list[Tensor], Tensor]:
    """S ← (I − β k kᵀ) diag(α) S + β k vᵀ and o = Sᵀ q, one head, S [K, V]."""
    out = []
    for t in range(q.shape[0]):
        keep = torch.eye(k.shape[1], dtype=k.dtype) - beta[t] * torch.outer(k[t], k[t])
        state = keep @ torch.diag(g[t].exp()) @ state + beta[t] * torch.outer(k[t], v[t])
        out.append(state.t() @ q[t])
    return out, state


@pytest.mark.parametrize("v_first", [True, False])
def test_chunk_kda_fwd(v_first: bool):
    tokens, heads, width, values, bounds = 70, 2, 8, 4, [0, 66, 66, 70]
    q, k, v = (
        F.normalize(draw(1, tokens, 1, width), dim=-1),
        F.normalize(draw(1, tokens, 1, width, seed=9), dim=-1),
        draw(1, tokens, heads, values),
    )
    g, beta = -draw(1, tokens, heads, width).abs(), draw(1, tokens, heads).sigmoid()
    states = draw(3, heads, values, width)
    result = npu.chunk_kda_fwd(
        q,
        k,
        v,
        g,
        beta,
        initial_state=states if v_first else states.transpose(-1, -2).contiguous(),
        cu_seqlens=torch.tensor(bounds),
        scale=0.5,
        state_v_first=v_first,
        output_gk=True,
        output_w=True,
        output_u=True,
        output_qg=True,
        output_kg=True,
        output_v_new=True,
        output_h=True,
    )
    assert len(result) == 11
    out, final, gk, aqk, akk, w, u, qg, kg, v_new, h = (x.double() for x in result)
    if not v_first:
        final, h = final.transpose(-1, -2), h.transpose(-1, -2)
    for head in range(heads):
        for n, (a, b) in enumerate(pairwise(bounds)):
            rows, state = matrix_recurrence(
                q[0, a:b, 0].double() * 0.5,
                k[0, a:b, 0].double(),
                v[0, a:b, head].double(),
                g[0, a:b, head].double(),
                beta[0, a:b, head].double(),
                states[n, head].double().t(),
            )
            if rows:
                torch.testing.assert_close(out[0, a:b, head], torch.stack(rows), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(final[n, head].t(), state, rtol=1e-4, atol=1e-6)
        # Chunks are rows 0 to 64, 64 to 66 and 66 to 70. The parts must give outputs and states back.
        for index, (a, b) in enumerate([(0, 64), (64, 66), (66, 70)]):
            size = b - a
            entering = h[0, index, head].t()
            tril = aqk[0, head, a:b, :size].tril()
            torch.testing.assert_close(
                out[0, a:b, head], 0.5 * qg[0, head, a:b] @ entering + tril @ v_new[0, head, a:b], rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(
                v_new[0, head, a:b], u[0, head, a:b] - w[0, head, a:b] @ entering, rtol=1e-4, atol=1e-5
            )
            leaving = gk[0, head, b - 1].exp2()[:, None] * entering + kg[0, head, a:b].t() @ v_new[0, head, a:b]
            following = h[0, 1, head].t() if index == 0 else final[0 if index == 1 else 2, head].t()
            torch.testing.assert_close(leaving, following, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                gk[0, head, a:b], g[0, a:b, head].double().cumsum(0) / math.log(2), rtol=1e-5, atol=1e-6
            )
            torch.testing.assert_close(
                u[0, head, a:b],
                akk[0, head, a:b, :size] @ (beta[0, a:b, head, None].double() * v[0, a:b, head]),
                rtol=1e-4,
                atol=1e-5,
            )
    assert aqk[0, :, 64:66, 2:].isnan().all()


def test_chunk_kda_fwd_leaves_out_what_nobody_asked_for():
    x, g, beta = draw(1, 3, 2, 8), -draw(1, 3, 2, 8).abs(), draw(1, 3, 2)
    result = npu.chunk_kda_fwd(x, x, x, g, beta, cu_seqlens=torch.tensor([0, 3]), output_final_state=False)
    assert [part is None for part in result] == [False, True, True, False, False] + [True] * 6


def test_chunk_kda_fwd_gate_in_kernel_equals_the_gate_kernel():
    raw, bias, a_log = draw(5, 16), draw(16), draw(2)
    x, beta = F.normalize(draw(1, 5, 2, 8), dim=-1), draw(1, 5, 2).sigmoid()
    bounds = torch.tensor([0, 5])
    for bound in (-4.0, None):
        g = kda.fused_kda_gate_npu(raw, a_log, 8, gate_bias=bias, lower_bound=bound)
        one = npu.chunk_kda_fwd(x, x, x, g[None], beta, cu_seqlens=bounds)
        other = npu.chunk_kda_fwd(
            x,
            x,
            x,
            raw.view(1, 5, 2, 8),
            beta,
            a_log=a_log,
            dt_bias=bias,
            cu_seqlens=bounds,
            use_gate_in_kernel=True,
            safe_gate=bound is not None,
            lower_bound=bound or -5.0,
        )
        torch.testing.assert_close(one[1], other[1])


def test_fused_kda_gate_npu():
    gate, a_log, bias = draw(4, 6) * 30, torch.tensor([0.3, -1.0]), draw(6)
    safe = kda.fused_kda_gate_npu(gate, a_log, 3, gate_bias=bias, lower_bound=-5.0)
    soft = kda.fused_kda_gate_npu(gate, a_log, 3, gate_bias=bias)
    for t in range(4):
        for c in range(6):
            x, a = float(gate[t, c] + bias[c]), math.exp(a_log[c // 3])
            assert float(safe[t, c // 3, c % 3]) == pytest.approx(-5 / (1 + math.exp(-a * x)), rel=1e-5)
            softplus = x if x > 20 else math.log1p(math.exp(x))
            assert float(soft[t, c // 3, c % 3]) == pytest.approx(-a * softplus, rel=1e-5, abs=1e-20)


def test_fused_sigmoid_gating_delta_rule_update():
    q, k, v = draw(1, 3, 2, 8), draw(1, 3, 2, 8, seed=1), draw(1, 3, 2, 4)
    a, b, a_log, bias, pool = draw(3, 16), draw(3, 2), draw(2), draw(16), draw(5, 2, 4, 8)
    before = pool.clone()
    out = kda.fused_sigmoid_gating_delta_rule_update(
        a_log,
        a,
        bias,
        1.0,
        20.0,
        q,
        k,
        v,
        b,
        pool,
        torch.tensor([4, -1, 2]),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(4),
        is_kda=True,
        lower_bound=-5.0,
    )
    g = kda.fused_kda_gate_npu(a, a_log, 8, gate_bias=bias, lower_bound=-5.0)
    for n, slot in enumerate([4, -1, 2]):
        for head in range(2):
            state = before[slot, head].t() if slot >= 0 else torch.zeros(8, 4)
            rows, final = matrix_recurrence(
                F.normalize(q[0, n : n + 1, head], dim=-1) * 8**-0.5,
                F.normalize(k[0, n : n + 1, head], dim=-1),
                v[0, n : n + 1, head],
                g[n : n + 1, head],
                b[n : n + 1, head].sigmoid(),
                state,
            )
            torch.testing.assert_close(out[0, n, head], rows[0], rtol=1e-4, atol=1e-5)
            if slot >= 0:
                torch.testing.assert_close(pool[slot, head].t(), final, rtol=1e-4, atol=1e-5)
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])


def test_prepare_chunk_indices_and_its_flaw():
    assert kda_decomposed.prepare_chunk_indices(torch.tensor([0, 70, 73]), 64).tolist() == [[0, 0], [0, 1], [1, 0]]
    # The sequence after an empty one gets the empty one's number.
    assert kda_decomposed.prepare_chunk_indices(torch.tensor([0, 3, 3, 5]), 64).tolist() == [[0, 0], [1, 0]]


def test_decomposed_kernels_one_by_one():
    bounds = torch.tensor([0, 66, 69])
    k, q, v = F.normalize(draw(1, 69, 1, 8), dim=-1), F.normalize(draw(1, 69, 1, 8, seed=3), dim=-1), draw(1, 69, 1, 4)
    beta, g = draw(1, 69, 1).sigmoid(), -draw(1, 69, 1, 8).abs()
    torch.testing.assert_close(kda_decomposed.l2norm_fwd(v * 7), F.normalize(v, dim=-1), rtol=1e-5, atol=1e-6)
    total = kda_decomposed.chunk_local_cumsum(g, 64, scale=2.0, cu_seqlens=bounds)
    torch.testing.assert_close(total[:, 64:66], 2 * g[:, 64:66].cumsum(1))
    gk = total / (2 * math.log(2))
    a, aqk = kda_decomposed.chunk_kda_scaled_dot_kkt_fwd(q, k, gk=gk, beta=beta, scale=0.3, cu_seqlens=bounds)
    i, j = 40, 11
    decay = g[0, j + 1 : i + 1, 0].sum(0).exp()
    assert float(a[0, i, 0, j]) == pytest.approx(
        float(beta[0, i, 0] * (k[0, i, 0] * decay * k[0, j, 0]).sum()), rel=1e-4
    )
    assert float(aqk[0, i, 0, j]) == pytest.approx(float(0.3 * (q[0, i, 0] * decay * k[0, j, 0]).sum()), rel=1e-4)
    assert a[0, :64, 0].triu(0).eq(0).all()
    assert float(aqk[0, 5, 0, 5]) == pytest.approx(float(0.3 * (q[0, 5, 0] * k[0, 5, 0]).sum()), rel=1e-5)
    inverse = kda_decomposed.solve_tril_npu(a, cu_seqlens=bounds)
    torch.testing.assert_close((torch.eye(64) + a[0, :64, 0]) @ inverse[0, :64, 0], torch.eye(64), rtol=1e-4, atol=1e-5)
    w, u, kg = kda_decomposed.recompute_w_u_fwd_npu(k, v, beta, inverse, gk, cu_seqlens=bounds)
    scaled = beta[0, :64] * k[0, :64, 0] * gk[0, :64, 0].exp2()
    torch.testing.assert_close(w[0, :64, 0], inverse[0, :64, 0] @ scaled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(u[0, :64, 0], inverse[0, :64, 0] @ (beta[0, :64] * v[0, :64, 0]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kg[0, 65, 0], k[0, 65, 0])
    pool = draw(4, 1, 4, 8)
    before = pool.clone()
    h, v_new = kda_decomposed.chunk_gated_delta_rule_fwd_h_npu(
        kg,
        w,
        u,
        gk=gk,
        initial_state=pool,
        initial_state_indices=torch.tensor([2, -1]),
        cu_seqlens=bounds,
        use_exp2=True,
    )
    torch.testing.assert_close(h[0, 0, 0], before[2, 0].t())
    # -1 is the last slot, for reading and for writing.
    torch.testing.assert_close(h[0, 2, 0], before[3, 0].t())
    out = torch.empty_like(v)
    kda_decomposed.chunk_gla_fwd_o_gk_npu(q, v_new, gk, aqk, h, out, 0.3, cu_seqlens=bounds)
    for (begin, end), slot in (((0, 66), 2), ((66, 69), 3)):
        rows, final = matrix_recurrence(
            q[0, begin:end, 0] * 0.3,
            k[0, begin:end, 0],
            v[0, begin:end, 0],
            g[0, begin:end, 0],
            beta[0, begin:end, 0],
            before[slot, 0].t(),
        )
        torch.testing.assert_close(out[0, begin:end, 0], torch.stack(rows), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(pool[slot, 0].t(), final, rtol=1e-3, atol=1e-4)
    assert torch.equal(pool[:2], before[:2])
