"""KDA of the reference backend against the recurrence in float64, with K != V so that a transposition shows."""

import pytest
import torch
from torch import Tensor

from k3svc.ops import load
from k3svc.ops.reference_cache import KdaPool
from k3svc.ops.reference_kda import log_decay
from k3svc.ops.table import CacheSpec, KdaGate, Ops
from tests.oracles import naive
from tests.oracles.loop import Tracked, poison_cache, step_meta

H, K, V, W = 2, 24, 40, 4
CHANNELS = H * (2 * K + V)
SLOTS = 6
SPEC = CacheSpec(
    kda_layers=(0,),
    mla_layers=(),
    kda_heads=H,
    kda_key_dim=K,
    kda_value_dim=V,
    conv_width=W,
    kv_lora_rank=1,
    rope_dim=1,
    vocab_size=1,
    num_slots=SLOTS,
    num_pages=1,
    page_size=64,
    state_dtype=torch.float32,
    kv_dtype=torch.float32,
)


@pytest.fixture
def ops() -> Ops:
    return load("reference", dtype="float32", threads=1)


@pytest.fixture
def pool(ops: Ops) -> KdaPool:
    cache = ops.new_cache(SPEC)
    poison_cache(cache)
    found: KdaPool = cache.layer(0)
    return found


class Inputs:
    """Random rows of a sequence: q|k|v, decay logits and beta logits, and what the recurrence makes of them."""

    def __init__(self, length: int, seed: int, *, lower_bound: float | None = -5.0, kind: str = "random") -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        # The gate comes first, so that inputs of one seed share it whatever their length.
        a_log, dt_bias = 0.5 * normal(H), normal(H, K)
        q, k, v = normal(length, H * K), normal(length, H * K), normal(length, H * V)
        f, b = 2 * normal(length, H * K), normal(length, H)
        if kind == "correlated":
            # Cosine of about 0.9 between any two keys, slow decay, large beta
            k = (normal(1, H, K) + 0.33 * normal(length, H, K)).view(length, -1)
            f, b = f - 12, b + 3
        if kind == "fastest":
            f = f + 1000
        if kind == "thousand":
            # Softplus gates of -1000 on half of the tokens, about 0 on the others
            f = torch.where(normal(length, 1) > 0, 1000.0, -30.0).expand(length, H * K).clone()
            a_log, dt_bias = torch.zeros(H), torch.zeros(H, K)
        self.qkv = torch.cat([q, k, v], 1)
        self.f, self.b = f, b
        self.gate = KdaGate(a=a_log.exp(), dt_bias=dt_bias, lower_bound=lower_bound)
        self._a_log = a_log

    def expected(self, state: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Outputs [T, H, V] and state [H, V, K] in float32 after `count` rows, from state [H, V, K]."""
        rows = slice(count)
        q, k, v = (x.double() for x in torch.split(self.qkv[rows], [H * K, H * K, H * V], 1))
        g = naive.log_decay(
            self.f[rows].double().view(-1, H, K),
            self._a_log.double(),
            self.gate.dt_bias.double(),
            self.gate.lower_bound,
        )
        out, after = naive.delta_rule(
            q.view(-1, H, K),
            k.view(-1, H, K),
            v.view(-1, H, V),
            g,
            torch.sigmoid(self.b[rows].double()),
            state.double().mT,
        )
        return out.float(), after.mT.float()


CASES = [
    pytest.param({"lower_bound": -5.0}, id="safe"),
    pytest.param({"lower_bound": None}, id="softplus"),
    pytest.param({"lower_bound": -5.0, "kind": "fastest"}, id="all-minimum"),
    pytest.param({"lower_bound": None, "kind": "thousand"}, id="softplus-1000"),
    pytest.param({"lower_bound": None, "kind": "correlated"}, id="correlated-softplus"),
    pytest.param({"lower_bound": -5.0, "kind": "correlated"}, id="correlated-safe"),
]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=3e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [1, 64, 200])
def test_chunk_form_equals_the_recurrence(ops: Ops, pool: KdaPool, length: int, case: dict[str, object]) -> None:
    inputs = Inputs(length, 1, **case)  # type: ignore[arg-type]
    meta = step_meta([(Tracked(slot=3, pages=[1]), length)], 1 << 20)
    out = ops.kda_extend(inputs.qkv, inputs.f, inputs.b, inputs.gate, pool, ops.prepare(meta, "extend", SPEC))
    expected, state = inputs.expected(torch.zeros(H, V, K))
    close(out, expected)
    close(pool.state[3], state)


@pytest.mark.parametrize("case", CASES)
def test_chunk_form_continues_from_a_state(ops: Ops, pool: KdaPool, case: dict[str, object]) -> None:
    inputs = Inputs(90, 2, **case)  # type: ignore[arg-type]
    start = torch.randn(H, V, K, generator=torch.Generator().manual_seed(3))
    pool.state[2] = start
    meta = step_meta([(Tracked(slot=2, pages=[1], length=128), 90)], 1 << 20)
    out = ops.kda_extend(inputs.qkv, inputs.f, inputs.b, inputs.gate, pool, ops.prepare(meta, "extend", SPEC))
    expected, state = inputs.expected(start)
    close(out, expected)
    close(pool.state[2], state)


def test_packed_sequences_with_padding_and_empty_ones(ops: Ops, pool: KdaPool) -> None:
    """A padded and an empty sequence between live ones, the last slot next to padding, rows past the end."""
    lengths = [70, 5, 0, 1, 130]
    slots = [SLOTS, -1, 4, 2, 1]
    parts = [Inputs(length, 10) for length in lengths]
    rows = [(Tracked(slot=slot, pages=[1]), length) for slot, length in zip(slots, lengths, strict=True)]
    total = sum(lengths) + 3
    step = ops.prepare(step_meta(rows, 1 << 20, total), "extend", SPEC)
    before = pool.state.clone()
    qkv, f, b = (
        torch.cat([*(getattr(part, name) for part in parts), torch.full((3, width), 7.0)])
        for name, width in (("qkv", CHANNELS), ("f", H * K), ("b", H))
    )
    out = ops.kda_extend(qkv, f, b, parts[0].gate, pool, step)
    assert out.shape == (total, H, V)
    assert bool(out.isfinite().all())
    first = 0
    for part, slot, length in zip(parts, slots, lengths, strict=True):
        if slot >= 0 and length:
            expected, state = part.expected(torch.zeros(H, V, K))
            close(out[first : first + length], expected)
            close(pool.state[slot], state)
        first += length
    untouched = [0, 3, 4, 5]
    assert torch.equal(pool.state[untouched].view(torch.int32), before[untouched].view(torch.int32))


@pytest.mark.parametrize("case", CASES)
def test_decode_equals_the_recurrence(ops: Ops, pool: KdaPool, case: dict[str, object]) -> None:
    """Three rows: the last slot, padding beside it, another slot; 20 steps."""
    inputs = Inputs(20, 4, **case)  # type: ignore[arg-type]
    start = torch.randn(2, H, V, K, generator=torch.Generator().manual_seed(5))
    pool.state[SLOTS], pool.state[1] = start
    dummy = pool.state[0].clone()
    rows = [(Tracked(slot=slot, pages=[1]), 1) for slot in (SLOTS, -1, 1)]
    step = ops.prepare(step_meta(rows, 1 << 20), "decode", SPEC)
    outs = []
    for t in range(20):
        own = slice(t, t + 1)
        qkv, f, b = (x[own].expand(3, -1) for x in (inputs.qkv, inputs.f, inputs.b))
        outs.append(ops.kda_decode(qkv, f, b, inputs.gate, pool, step))
        assert bool(outs[-1].isfinite().all())
    out = torch.stack(outs)
    for row, slot, state in ((0, SLOTS, start[0]), (2, 1, start[1])):
        expected, after = inputs.expected(state)
        close(out[:, row], expected)
        close(pool.state[slot], after)
    assert torch.equal(pool.state[0].view(torch.int32), dummy.view(torch.int32))


def test_log_decay_of_both_gates() -> None:
    """Hand-computed: softplus(0) = ln 2; identity above 20; -5 · sigmoid."""
    f = torch.tensor([0.0, 30.0, -1000.0]).view(3, 1, 1)
    softplus = KdaGate(a=torch.tensor([2.0]), dt_bias=torch.zeros(1, 1), lower_bound=None)
    safe = KdaGate(a=torch.tensor([2.0]), dt_bias=torch.ones(1, 1), lower_bound=-5.0)
    torch.testing.assert_close(log_decay(f, softplus).view(-1), torch.tensor([-1.3862944, -60.0, 0.0]))
    torch.testing.assert_close(
        log_decay(f, safe).view(-1), torch.tensor([-5 * 0.8807971, -5.0, 0.0]), rtol=1e-6, atol=1e-30
    )


def convolved(u: Tensor, history: Tensor, weight: Tensor) -> Tensor:
    """[T, channels] by the formula, float64; history [W - 1, channels] before the first row."""
    rows = torch.cat([history, u]).double()
    y = torch.stack([(rows[t : t + W] * weight.double().T).sum(0) for t in range(len(u))])
    return (y / (1 + torch.exp(-y))).float()


def test_convolution_over_packed_prompts_and_decode(ops: Ops, pool: KdaPool) -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(CHANNELS, W, generator=generator)
    lengths, slots, starts = [2, 3, 70, 1], [SLOTS, -1, 2, 5], [0, 0, 64, 0]
    history = torch.randn(W - 1, CHANNELS, generator=generator)
    pool.conv[2] = history
    u = torch.randn(sum(lengths) + 2, CHANNELS, generator=generator)
    rows = [
        (Tracked(slot=slot, pages=[1], length=start), length)
        for slot, start, length in zip(slots, starts, lengths, strict=True)
    ]
    before = pool.conv.clone()
    step = ops.prepare(step_meta(rows, 1 << 20, len(u)), "extend", SPEC)
    out = ops.kda_conv_extend(u, weight, pool, step)
    assert bool(out.isfinite().all())
    zeros = torch.zeros_like(history)
    for slot, first, length, past in ((SLOTS, 0, 2, zeros), (2, 5, 70, history), (5, 75, 1, zeros)):
        own = u[first : first + length]
        close(out[first : first + length], convolved(own, past, weight))
        assert torch.equal(pool.conv[slot], torch.cat([past, own])[-(W - 1) :])
    untouched = [0, 1, 3, 4]
    assert torch.equal(pool.conv[untouched].view(torch.int32), before[untouched].view(torch.int32))

    past = pool.conv[[2, SLOTS]].clone()
    decoded = torch.randn(3, CHANNELS, generator=generator)
    rows = [(Tracked(slot=slot, pages=[1]), 1) for slot in (2, -1, SLOTS)]
    out = ops.kda_conv_decode(decoded, weight, pool, ops.prepare(step_meta(rows, 1 << 20), "decode", SPEC))
    assert bool(out.isfinite().all())
    for row, slot, window in ((0, 2, past[0]), (2, SLOTS, past[1])):
        close(out[row], convolved(decoded[row : row + 1], window, weight)[0])
        assert torch.equal(pool.conv[slot], torch.cat([window[1:], decoded[row : row + 1]]))
