"""The emulated device raises where a call leaves the contract, and does silently what the device does silently."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.errors import BackendError
from k3svc.ops.npu_emulated import kda, kda_decomposed, registry, rowwise
from k3svc.ops.npu_emulated.contract import ContractViolation, Rules, Session
from k3svc.ops.npu_emulated.device import on_device
from tests.npu.bench import CONTRACT, RELAXED

registry.install()
npu = torch.ops.npu
BF16 = torch.bfloat16


def call(
    function: Callable[..., Any], arguments: dict[str, Any], *, rules: Rules = CONTRACT, capturing: bool = False
) -> Any:
    with on_device(Session(rules=rules, is_capturing=capturing)):
        return function(**arguments)


def kda_arguments() -> dict[str, Any]:
    q = torch.zeros(1, 3, 1, 64, dtype=BF16)
    return {
        "q": q,
        "k": q.clone(),
        "v": torch.zeros(1, 3, 2, 64, dtype=BF16),
        "g": torch.zeros(1, 3, 2, 64),
        "beta": torch.zeros(1, 3, 2),
        "initial_state": torch.zeros(2, 2, 64, 64),
        "cu_seqlens": torch.tensor([0, 1, 3]),
        "state_v_first": True,
    }


def conv_arguments() -> dict[str, Any]:
    return {
        "x": torch.zeros(3, 8, dtype=BF16),
        "weight": torch.zeros(4, 8, dtype=BF16),
        "conv_states": torch.zeros(4, 3, 8, dtype=BF16),
        "query_start_loc": torch.tensor([0, 1, 3]),
        "cache_indices": torch.tensor([3, -1]),
    }


def packed_arguments() -> dict[str, Any]:
    return {
        "query": torch.zeros(3, 2, 128, dtype=BF16),
        "key": torch.zeros(5, 2, 128, dtype=BF16),
        "value": torch.zeros(5, 2, 128, dtype=BF16),
        "query_rope": torch.zeros(3, 2, 64, dtype=BF16),
        "key_rope": torch.zeros(5, 2, 64, dtype=BF16),
        "num_heads": 2,
        "input_layout": "TND",
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        "sparse_mode": 3,
        "actual_seq_lengths": [1, 3],
        "actual_seq_lengths_kv": [2, 5],
    }


def paged_arguments() -> dict[str, Any]:
    return {
        "query": torch.zeros(2, 1, 4, 512, dtype=BF16),
        "key": torch.zeros(3, 128, 512, dtype=BF16),
        "value": torch.zeros(3, 128, 512, dtype=BF16),
        "query_rope": torch.zeros(2, 1, 4, 64, dtype=BF16),
        "key_rope": torch.zeros(3, 128, 64, dtype=BF16),
        "num_heads": 4,
        "num_key_value_heads": 1,
        "input_layout": "BSND",
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "block_size": 128,
        "actual_seq_lengths_kv": [1, 200],
    }


def grouped_arguments() -> dict[str, Any]:
    return {
        "x": [torch.zeros(5, 16, dtype=BF16)],
        "weight": [torch.zeros(3, 16, 32, dtype=BF16)],
        "group_list": torch.tensor([2, 0, 3]),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
    }


def routing_arguments() -> dict[str, Any]:
    return {
        "x": torch.zeros(2, 16, dtype=BF16),
        "expert_idx": torch.tensor([[0, 1], [2, 1]], dtype=torch.int32),
        "active_num": 4,
        "expert_num": 3,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 3],
    }


def finalize_arguments() -> dict[str, Any]:
    return {
        "expanded_permuted_rows": torch.zeros(4, 16, dtype=BF16),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": torch.zeros(2, 2, dtype=BF16),
        "expanded_src_to_dst_row": torch.arange(4, dtype=torch.int32),
        "export_for_source_row": None,
        "drop_pad_mode": 2,
    }


def scatter_arguments() -> dict[str, Any]:
    return {"input": torch.zeros(4, 1, 8), "indices": torch.tensor([[1], [3]]), "updates": torch.zeros(2, 1, 8)}


def product_arguments() -> dict[str, Any]:
    return {
        "input": torch.zeros(2, 4, 16, dtype=BF16),
        "weight": torch.zeros(4, 16, 32, dtype=BF16),
        "perm_x1": [1, 0, 2],
        "perm_y": [1, 0, 2],
    }


def filter_arguments() -> dict[str, Any]:
    return {"logits": torch.zeros(2, 2000), "p": torch.ones(2), "k": torch.tensor([1, 1024], dtype=torch.int32)}


def gating_arguments() -> dict[str, Any]:
    return {"x": torch.zeros(2, 8), "k": 2, "bias": torch.zeros(8), "norm_type": 1}


def norm_arguments() -> dict[str, Any]:
    return {"input": torch.ones(2, 8, dtype=BF16), "gamma": torch.ones(8, dtype=BF16)}


LEGAL: dict[str, Callable[[], dict[str, Any]]] = {
    "chunk_kda_fwd": kda_arguments,
    "causal_conv1d": conv_arguments,
    "npu_grouped_matmul": grouped_arguments,
    "npu_moe_init_routing_v2": routing_arguments,
    "npu_moe_finalize_routing": finalize_arguments,
    "npu_scatter_nd_update_": scatter_arguments,
    "npu_transpose_batchmatmul": product_arguments,
    "npu_top_k_top_p": filter_arguments,
    "npu_moe_gating_top_k": gating_arguments,
    "npu_rms_norm": norm_arguments,
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_calls_pass(name: str):
    call(getattr(npu, name), LEGAL[name]())


@pytest.mark.parametrize("arguments", [packed_arguments, paged_arguments])
def test_legal_attention_passes(arguments: Callable[[], dict[str, Any]]):
    call(npu.npu_fused_infer_attention_score, arguments())


def other_half(x: Tensor) -> Tensor:
    """A view of the same shape that is not contiguous."""
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]]


BREACHES: list[tuple[str, str, Callable[[dict[str, Any]], Any], str]] = [
    ("chunk_kda_fwd", "q", lambda a: a["q"].float(), "q is torch.float32"),
    ("chunk_kda_fwd", "g", lambda a: a["g"].half(), "g is torch.float16"),
    ("chunk_kda_fwd", "initial_state", lambda a: a["initial_state"].to(BF16), "must be float32"),
    ("chunk_kda_fwd", "initial_state", lambda _: torch.zeros(7, 2, 64, 64), "one a sequence"),
    ("chunk_kda_fwd", "cu_seqlens", lambda a: a["cu_seqlens"].int(), "must be int64"),
    ("chunk_kda_fwd", "cu_seqlens", lambda _: torch.tensor([0, 2]), "cu_seqlens"),
    ("chunk_kda_fwd", "cu_seqlens", lambda _: torch.tensor([0, 3, 2, 3]), "cu_seqlens"),
    ("chunk_kda_fwd", "cu_seqlens", lambda _: torch.cat([torch.zeros(1100), torch.tensor([3])]).long(), "at most 1024"),
    ("chunk_kda_fwd", "chunk_size", lambda _: 32, "64 or 128"),
    ("chunk_kda_fwd", "layout", lambda _: "TND", "not emulated"),
    ("chunk_kda_fwd", "use_gate_in_kernel", lambda _: True, "needs a_log"),
    ("causal_conv1d", "weight", lambda a: a["weight"].float(), "weight torch.float32"),
    ("causal_conv1d", "weight", lambda a: a["weight"].t().contiguous(), r"must be \[width, 8\]"),
    ("causal_conv1d", "x", lambda a: other_half(a["x"]), "x must be contiguous"),
    ("causal_conv1d", "conv_states", lambda a: other_half(a["conv_states"]), "conv_states must be contiguous"),
    ("causal_conv1d", "cache_indices", lambda _: torch.tensor([3, -2]), r"holds \[-2\]"),
    ("causal_conv1d", "cache_indices", lambda _: torch.tensor([3, 4]), r"holds \[4\]"),
    ("causal_conv1d", "query_start_loc", lambda _: None, "needs query_start_loc"),
    ("npu_grouped_matmul", "group_list", lambda a: a["group_list"].int(), "must be int64"),
    ("npu_grouped_matmul", "group_list", lambda _: torch.tensor([2, 0, 2]), "for 5 rows"),
    ("npu_grouped_matmul", "group_list_type", lambda _: 0, "groups of"),
    ("npu_grouped_matmul", "split_item", lambda _: 0, "split_item 0"),
    ("npu_moe_init_routing_v2", "quant_mode", lambda _: 0, "quant_mode 0"),
    ("npu_moe_init_routing_v2", "expert_idx", lambda a: a["expert_idx"].long(), "expert_idx torch.int64"),
    ("npu_moe_init_routing_v2", "expert_idx", lambda a: a["expert_idx"] - 1, r"holds \[-1\]"),
    ("npu_moe_finalize_routing", "scales", lambda a: a["scales"].float(), "dtype of the rows"),
    ("npu_scatter_nd_update_", "indices", lambda _: torch.tensor([[-1], [3]]), r"holds \[-1\]"),
    ("npu_scatter_nd_update_", "indices", lambda _: torch.tensor([[4], [3]]), r"holds \[4\]"),
    ("npu_scatter_nd_update_", "updates", lambda a: a["updates"].to(BF16), "updates torch.bfloat16"),
    ("npu_transpose_batchmatmul", "perm_y", lambda _: None, "perm_y None"),
    ("npu_transpose_batchmatmul", "input", lambda _: torch.zeros(2, 4, 8, dtype=BF16), "weight"),
    ("npu_top_k_top_p", "k", lambda _: torch.tensor([0, 5], dtype=torch.int32), r"k \[0\]"),
    ("npu_top_k_top_p", "k", lambda _: torch.tensor([1, 1025], dtype=torch.int32), r"k \[1025\]"),
    ("npu_top_k_top_p", "k", lambda a: a["k"].long(), "k torch.int64"),
    ("npu_top_k_top_p", "p", lambda a: a["p"].to(BF16), "p torch.bfloat16"),
    ("npu_moe_gating_top_k", "bias", lambda a: a["bias"].to(BF16), "bias and x differ"),
    ("npu_moe_gating_top_k", "renorm", lambda _: 1, "renorm 1"),
    ("npu_rms_norm", "input", lambda a: a["input"][:0], "empty input"),
    ("npu_rms_norm", "gamma", lambda a: a["gamma"].half(), "gamma is torch.float16"),
]


@pytest.mark.parametrize(("name", "argument", "change", "message"), BREACHES)
def test_breaches_raise(name: str, argument: str, change: Callable[[dict[str, Any]], Any], message: str):
    arguments = LEGAL[name]()
    arguments[argument] = change(arguments)
    with pytest.raises(ContractViolation, match=message):
        call(getattr(npu, name), arguments)


ATTENTION_BREACHES: list[tuple[Callable[[], dict[str, Any]], str, Callable[[dict[str, Any]], Any], str]] = [
    (packed_arguments, "input_layout", lambda _: "BSH", "layout 'BSH'"),
    (packed_arguments, "actual_seq_lengths", lambda _: None, "TND needs actual_seq_lengths"),
    (packed_arguments, "actual_seq_lengths", lambda _: [1, 2], "of 3"),
    (packed_arguments, "actual_seq_lengths_kv", lambda _: [2, 3], "of 5 keys"),
    (packed_arguments, "actual_seq_lengths_kv", lambda _: [5], "for 2 sequences"),
    (packed_arguments, "atten_mask", lambda _: None, "needs the compressed mask"),
    (packed_arguments, "atten_mask", lambda a: ~a["atten_mask"], "not causal"),
    (packed_arguments, "atten_mask", lambda a: a["atten_mask"][:512, :512], "2048 x 2048"),
    (packed_arguments, "query", lambda a: other_half(a["query"]), "query must be contiguous"),
    (packed_arguments, "key_rope", lambda _: torch.zeros(5, 1, 64, dtype=BF16).expand(-1, 2, -1), "key_rope must be"),
    (packed_arguments, "query", lambda _: torch.zeros(3, 2, 96, dtype=BF16), "width 96 beside rope"),
    (packed_arguments, "query", lambda a: a["query"].float(), "query is torch.float32"),
    (paged_arguments, "block_table", lambda a: a["block_table"].long(), "block_table torch.int64"),
    (paged_arguments, "block_table", lambda a: a["block_table"] + 3, r"holds \[3"),
    (paged_arguments, "block_table", lambda a: a["block_table"][:, :1].contiguous(), "2 blocks needed"),
    (paged_arguments, "actual_seq_lengths_kv", lambda _: [1], "for 2 sequences"),
    (paged_arguments, "num_heads", lambda _: 3, "num_heads is 3"),
    (paged_arguments, "block_size", lambda _: 64, "pages of 64"),
    (paged_arguments, "num_key_value_heads", lambda _: 0, "key heads of 512"),
    (paged_arguments, "key", lambda a: a["key"].float(), "differ in dtype"),
]


@pytest.mark.parametrize(("arguments", "argument", "change", "message"), ATTENTION_BREACHES)
def test_attention_breaches_raise(
    arguments: Callable[[], dict[str, Any]], argument: str, change: Callable[[dict[str, Any]], Any], message: str
):
    given = arguments()
    given[argument] = change(given)
    with pytest.raises(ContractViolation, match=message):
        call(npu.npu_fused_infer_attention_score, given)


def test_three_latent_heads_are_no_power_of_two():
    given = paged_arguments()
    given |= {
        "query": torch.zeros(2, 1, 3, 512, dtype=BF16),
        "query_rope": torch.zeros(2, 1, 3, 64, dtype=BF16),
        "num_heads": 3,
    }
    with pytest.raises(ContractViolation, match="power of two"):
        call(npu.npu_fused_infer_attention_score, given)
    call(npu.npu_fused_infer_attention_score, given, rules=RELAXED)


def test_absorb_product_limit_is_no_matter_of_relaxation():
    arguments = product_arguments()
    arguments |= {"input": torch.zeros(1, 128, 512), "weight": torch.zeros(128, 512, 16)}
    with pytest.raises(ContractViolation, match="below 65536"):
        call(npu.npu_transpose_batchmatmul, arguments, rules=RELAXED)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("npu_rms_norm", {"eps": 1e-6}), ("npu_top_k_top_p", {"top_k": None}), ("chunk_kda_fwd", {"A_log": None})],
)
def test_a_wrong_keyword_is_refused_by_the_schema(name: str, wrong: dict[str, Any]):
    with pytest.raises(RuntimeError, match=r"Unknown keyword argument|received 4 argument"):
        call(getattr(npu, name), {**LEGAL[name](), **wrong})


def test_an_argument_that_is_not_emulated_is_refused():
    with pytest.raises(ContractViolation, match="another bias than the default"):
        call(npu.npu_grouped_matmul, {**grouped_arguments(), "bias": [torch.zeros(3, 32)]})


def test_fp32_lifts_dtypes_and_nothing_else():
    arguments = kda_arguments() | {name: kda_arguments()[name].float() for name in "qkv"}
    call(npu.chunk_kda_fwd, arguments, rules=Rules(fp32=True))
    for sizes in (32, 96):
        small = {
            **arguments,
            "q": torch.zeros(1, 3, 1, sizes),
            "k": torch.zeros(1, 3, 1, sizes),
            "g": torch.zeros(1, 3, 2, sizes),
        }
        with pytest.raises(ContractViolation, match="both 64 or both 128"):
            call(npu.chunk_kda_fwd, small, rules=Rules(fp32=True))
    with pytest.raises(ContractViolation, match="must be int64"):
        call(npu.chunk_kda_fwd, {**arguments, "cu_seqlens": torch.tensor([0, 3]).int()}, rules=RELAXED)


def test_shape_relaxed_lifts_sizes_and_nothing_else():
    arguments = kda_arguments()
    arguments |= {
        "q": torch.zeros(1, 3, 1, 8, dtype=BF16),
        "k": torch.zeros(1, 3, 1, 8, dtype=BF16),
        "g": torch.zeros(1, 3, 2, 8),
        "v": torch.zeros(1, 3, 2, 4, dtype=BF16),
        "initial_state": torch.zeros(2, 2, 4, 8),
    }
    call(npu.chunk_kda_fwd, arguments, rules=Rules(shape_relaxed=True))
    with pytest.raises(ContractViolation, match=r"q is torch\.float32"):
        call(npu.chunk_kda_fwd, {**arguments, "q": torch.zeros(1, 3, 1, 8)}, rules=Rules(shape_relaxed=True))
    # A state in [K, V] has the same number of elements.
    with pytest.raises(ContractViolation, match="one a sequence"):
        call(npu.chunk_kda_fwd, {**arguments, "initial_state": torch.zeros(2, 2, 8, 4)}, rules=RELAXED)


def test_relaxations_are_named():
    assert Rules.parse(["fp32", "shape-relaxed"]) == RELAXED
    assert Rules.parse([]) == CONTRACT
    with pytest.raises(BackendError, match="no relaxation 'fp16'"):
        Rules.parse(["fp16"])


def test_python_kernels_check_their_arguments():
    x = torch.zeros(1, 4, 2, 64, dtype=BF16)
    bounds = torch.tensor([0, 4])
    cases: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
        (kda_decomposed.l2norm_fwd, {"x": other_half(x)}, "must be contiguous"),
        (
            rowwise.situ,
            {"hidden_states": x[0, :, 0], "group_list": torch.tensor([4]), "group_list_type": 0, "need_quant": False},
            "pass counts",
        ),
        (
            rowwise.situ,
            {"hidden_states": x[0, :, 0], "group_list": torch.tensor([5.0]), "group_list_type": 1, "need_quant": False},
            "group_list is",
        ),
        (
            rowwise.mix_fused,
            {
                "prefix_sum": x[0, :, 0],
                "bank": x[0, :, :0],
                "num_valid_blocks": 0,
                "combined_weight": x[0, 0, 0],
                "variance_epsilon": 1e-5,
            },
            "bank",
        ),
        (kda_decomposed.chunk_local_cumsum, {"g": x, "chunk_size": 48, "cu_seqlens": bounds}, "no power of two"),
        (kda_decomposed.solve_tril_npu, {"A": x[..., :48].contiguous(), "cu_seqlens": bounds}, "tiles of 48"),
        (
            kda_decomposed.chunk_gated_delta_rule_fwd_h_npu,
            {
                "k": x,
                "w": x,
                "u": x,
                "gk": x.float(),
                "initial_state": torch.zeros(3, 2, 64, 32),
                "initial_state_indices": torch.tensor([0]),
                "cu_seqlens": bounds,
                "use_exp2": True,
            },
            r"must be \[H, V, K\]",
        ),
        (
            kda_decomposed.recompute_w_u_fwd_npu,
            {
                "k": x,
                "v": x,
                "beta": x[..., 0].contiguous(),
                "A": x,
                "gk": x.float(),
                "cu_seqlens": bounds,
                "chunk_indices": torch.tensor([[0, 0], [0, 1]]),
            },
            "empty sequence",
        ),
    ]
    for function, arguments, message in cases:
        with pytest.raises(ContractViolation, match=message):
            call(function, arguments)
    with pytest.raises(ValueError, match="at most 128"):
        call(
            kda_decomposed.chunk_gated_delta_rule_fwd_h_npu,
            {"k": torch.zeros(1, 1, 1, 256), "w": torch.zeros(1), "u": torch.zeros(1)},
        )
    with pytest.raises(ValueError, match="A_log of 3 heads"):
        call(kda.fused_kda_gate_npu, {"gate": torch.zeros(2, 8), "A_log": torch.zeros(3), "head_dim": 4})


def test_minus_one_aliases_the_last_slot():
    pool = torch.arange(8.0).view(4, 2)
    with on_device(Session()):
        assert pool.index_select(0, torch.tensor([-1])).tolist() == [[6.0, 7.0]]
        pool.index_copy_(0, torch.tensor([-1]), torch.zeros(1, 2))
        pool.index_fill_(0, torch.tensor([-2]), 9.0)
    assert pool.tolist() == [[0.0, 1.0], [2.0, 3.0], [9.0, 9.0], [0.0, 0.0]]
    with pytest.raises(IndexError):
        pool.index_select(0, torch.tensor([-1]))


@pytest.mark.parametrize(
    "sync",
    [
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        bool,
        int,
        float,
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.view(1).__setitem__(x.view(1) > 0, 1.0),
    ],
)
def test_host_syncs_raise_while_capturing(sync: Callable[[Tensor], Any]):
    x = torch.tensor(1.0)
    with on_device(Session()):
        sync(x)
    with on_device(Session(is_capturing=True)), pytest.raises(ContractViolation, match="captured graph"):
        sync(x)


def test_operators_that_sync_raise_while_capturing():
    with pytest.raises(ContractViolation, match="captured graph"):
        call(npu.chunk_kda_fwd, kda_arguments(), capturing=True)
    with pytest.raises(ContractViolation, match="captured graph"):
        call(
            kda_decomposed.prepare_chunk_indices, {"cu_seqlens": torch.tensor([0, 3]), "chunk_size": 64}, capturing=True
        )
    call(npu.npu_rms_norm, norm_arguments(), capturing=True)


def test_calls_are_recorded():
    session = Session()
    with on_device(session):
        npu.npu_rms_norm(**norm_arguments())
        kda_decomposed.l2norm_fwd(torch.zeros(2, 8))
    assert [(c.name, c.shapes) for c in session.calls] == [
        ("npu::npu_rms_norm", ((2, 8), (8,))),
        ("l2norm_fwd", ((2, 8),)),
    ]


def test_bfloat16_products_round_once():
    a, b = (torch.randn(4, 4096, generator=torch.Generator().manual_seed(n)).to(BF16) for n in (0, 1))
    with on_device(Session()):
        product = torch.mm(a, b.t())
    assert torch.equal(product, (a.double() @ b.double().t()).to(BF16))
