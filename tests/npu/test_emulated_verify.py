"""The kernels of verification, emulated: against plain loops, and refusing what lies outside of their contracts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from k3svc.ops.npu_emulated import kda_verify, registry
from k3svc.ops.npu_emulated.contract import ContractViolation, Rules, Session
from k3svc.ops.npu_emulated.device import on_device
from tests.npu.bench import CONTRACT, RELAXED

registry.install()
npu = torch.ops.npu
BF16 = torch.bfloat16


def run(function: Callable[..., Any], arguments: dict[str, Any], rules: Rules = RELAXED) -> Any:
    with on_device(Session(rules=rules)):
        return function(**arguments)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def verify_arguments(*, width: int = 8, values: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Three rows of two steps; two key heads, as many value heads."""
    return {
        "A_log": draw(2),
        "dt_bias": draw(2 * width),
        "q": draw(1, 6, 2, width).to(dtype),
        "k": draw(1, 6, 2, width, seed=1).to(dtype),
        "v": draw(1, 6, 2, values).to(dtype),
        "a": -draw(1, 6, 2, width).abs(),
        "b": draw(1, 6, 2).sigmoid(),
        "initial_state_source": draw(5, 2, values, width),
        "initial_state_indices": torch.tensor([4, -1, 2]),
        "intermediate_states_buffer": torch.full((4, 2, 2, values, width), torch.nan),
        "intermediate_state_indices": torch.tensor([3, 0, -1]),
        "cache_steps": 2,
        "gates_are_preactivated": True,
    }


@pytest.mark.parametrize("activated", [True, False])
def test_kda_target_verify(activated: bool):
    given = verify_arguments()
    decay, beta = given["a"][0], given["b"][0]
    if not activated:
        given |= {"gates_are_preactivated": False, "lower_bound": -5.0, "a": draw(1, 6, 2, 8), "b": draw(1, 6, 2)}
        sharpness = given["A_log"].exp()[:, None]
        decay = -5.0 * torch.sigmoid(sharpness * (given["a"][0] + given["dt_bias"].view(2, 8)))
        beta = given["b"][0].sigmoid()
    pool = given["initial_state_source"].clone()
    out = run(kda_verify.kda_target_verify_npu, given)
    assert torch.equal(given["initial_state_source"], pool)
    buffer = given["intermediate_states_buffer"]
    for row, (slot, kept) in enumerate(((4, 3), (-1, 0), (2, -1))):
        for head in range(2):
            state = pool[slot, head] if slot >= 0 else torch.zeros(4, 8)
            for step in range(2):
                t = 2 * row + step
                q, k = (F.normalize(given[name][0, t, head], dim=0) for name in "qk")
                state = state * decay[t, head].exp()
                state = state + beta[t, head] * torch.outer(given["v"][0, t, head] - state @ k, k)
                torch.testing.assert_close(out[0, t, head], state @ q * 8**-0.5, rtol=1e-4, atol=1e-5)
                if kept >= 0:
                    torch.testing.assert_close(buffer[kept, step, head], state, rtol=1e-4, atol=1e-5)
    assert buffer[[1, 2]].isnan().all()


VERIFY_BREACHES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("q", lambda x: x.float(), r"q is torch\.float32"),
    ("q", lambda x: x.repeat(1, 1, 1, 2)[..., :128], "q must be contiguous"),
    ("v", lambda x: x[:, :5].contiguous(), "v has shape"),
    ("a", lambda x: x[0], "both with the leading 1"),
    ("b", lambda x: x[:, :3].contiguous(), "b has shape"),
    ("gates_are_preactivated", lambda _: None, "is not said"),
    ("lower_bound", lambda _: -5.0, "have no lower_bound"),
    ("cache_steps", lambda _: 4, "6 tokens in steps of 4"),
    ("initial_state_indices", lambda x: x + 1, "past 5"),
    ("initial_state_indices", lambda x: x.float(), r"index torch\.float32"),
    ("intermediate_state_indices", lambda x: x + 1, "past 4"),
    ("intermediate_states_buffer", lambda x: x.to(BF16), r"buffer torch\.bfloat16"),
    ("intermediate_states_buffer", lambda x: x[:, :1].contiguous(), "the buffer has"),
    ("initial_state_source", lambda x: x[:, :1].contiguous(), r"must be \[HV, V, K\]"),
    ("initial_state_source", lambda x: x.transpose(-1, -2), "pool must be contiguous"),
]


@pytest.mark.parametrize(("argument", "change", "message"), VERIFY_BREACHES)
def test_breaches_of_target_verify_raise(argument: str, change: Callable[[Any], Any], message: str):
    given = verify_arguments(width=128, values=128, dtype=BF16)
    run(kda_verify.kda_target_verify_npu, given, CONTRACT)
    given[argument] = change(given.get(argument))
    with pytest.raises(ContractViolation, match=message):
        run(kda_verify.kda_target_verify_npu, given, CONTRACT)


def mover_arguments() -> dict[str, Any]:
    return {
        "dst": draw(2, 5, 3, 4),
        "src": draw(2, 4, 2, 3, 4, seed=1),
        "dst_idx": torch.tensor([4, 1, -1, 0], dtype=torch.int32),
        "src_idx": torch.tensor([3, 0, 1, -1], dtype=torch.int32),
        "step_idx": torch.tensor([1, -1, 0, 0], dtype=torch.int32),
    }


def test_speculative_state_scatter_moves_all_layers_and_guards_negatives():
    given = mover_arguments()
    before = given["dst"].clone()
    run(kda_verify.speculative_state_scatter_npu, given)
    before[:, 4] = given["src"][:, 3, 1]
    assert torch.equal(given["dst"], before)


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("dst", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), "dst must be contiguous"),
        ("dst", lambda x: x[:1], r"dst \(1"),
        ("src", lambda x: x.to(BF16), r"src torch\.bfloat16"),
        ("dst_idx", lambda x: x.long(), "must be int32"),
        ("dst_idx", lambda x: x + 1, "past 5"),
        ("src_idx", lambda x: x + 1, "past 4"),
        ("step_idx", lambda x: x + 1, "past 2"),
        ("step_idx", lambda x: x[:2], "different lengths"),
    ],
)
def test_breaches_of_the_mover_raise(argument: str, change: Callable[[Tensor], Tensor], message: str):
    given = mover_arguments()
    given[argument] = change(given[argument])
    with pytest.raises(ContractViolation, match=message):
        run(kda_verify.speculative_state_scatter_npu, given)


def test_packed_queries_over_pages():
    """Two sequences of three and one queries, which sit at the ends of their keys."""
    q, qr, latent, rope = draw(4, 2, 8), draw(4, 2, 4), draw(5, 1, 4, 8), draw(5, 1, 4, 4)
    given = {
        "query": q, "key": latent, "value": latent, "query_rope": qr, "key_rope": rope, "num_heads": 2,
        "num_key_value_heads": 1, "input_layout": "TND", "sparse_mode": 3, "next_tokens": 0, "scale": 0.7,
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1), "block_size": 4,
        "block_table": torch.tensor([[2, 4], [1, 0]], dtype=torch.int32),
        "actual_seq_lengths": [3, 4], "actual_seq_lengths_kv": [6, 2],
    }  # fmt: skip
    out, _ = run(npu.npu_fused_infer_attention_score, given)
    rows = [(2, n) for n in range(4)] + [(4, 0), (4, 1)]
    for t, places in enumerate([rows[:4], rows[:5], rows, [(1, 0), (1, 1)]]):
        keys = torch.stack([torch.cat([latent[p, 0, n], rope[p, 0, n]]) for p, n in places])
        values = torch.stack([latent[p, 0, n] for p, n in places])
        for head in range(2):
            weights = (0.7 * keys @ torch.cat([q[t, head], qr[t, head]])).softmax(0)
            torch.testing.assert_close(out[t, head], weights @ values)
    for broken, message in (
        ({"key": latent[:, 0], "value": latent[:, 0]}, "pages of 4"),
        ({"actual_seq_lengths": [3, 3]}, "of 4"),
        ({"atten_mask": None}, "needs the compressed mask"),
    ):
        with pytest.raises(ContractViolation, match=message):
            run(npu.npu_fused_infer_attention_score, {**given, **broken})


def test_memory_that_nobody_wrote_is_poison():
    with on_device(Session()):
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.zeros(3)).isnan().all()
        assert torch.zeros(2).new_empty(2, dtype=torch.int32).eq(torch.iinfo(torch.int32).min).all()
