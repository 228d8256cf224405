"""Traps of the Ascend operators: what goes wrong without an error. docs/ascend.md lists each with its test."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from k3svc.errors import BackendError, EngineFault
from k3svc.ops import load
from k3svc.ops.npu import mla, vendor
from k3svc.ops.npu.kda import ChunkKdaOutputs
from k3svc.ops.npu.options import NpuOptions
from k3svc.ops.npu.steps import MAX_SEQUENCES, prepare_decode, prepare_extend
from k3svc.ops.npu_emulated.backend import NpuEmulated
from k3svc.ops.npu_emulated.contract import ContractViolation
from k3svc.ops.table import CacheSpec, Mode, StepMeta
from tests.npu.bench import (
    CONTRACT,
    EXTENDS,
    NoKernels,
    RawCalls,
    capturing,
    emulated,
    fill,
    random_gate,
    real_spec,
    small_spec,
    steps,
)

BF16 = torch.bfloat16
LAST = 6
"""The last slot of the small pools."""


class Device:
    """A backend with filled pools and random inputs."""

    def __init__(self, ops: NpuEmulated, spec: CacheSpec | None = None) -> None:
        self.ops = ops
        self.spec = spec or small_spec()
        self.random = torch.Generator().manual_seed(7)
        cache = ops.new_cache(self.spec)
        self.kda, self.mla = cache.layer(0), cache.layer(1)
        fill(self.kda, self.random)
        fill(self.mla, self.random)
        self.gate = random_gate(self.spec, self.random)
        self.conv_weight = self.draw(self.spec.conv_channels, 4).float()

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.ops.activation_dtype)

    def inputs(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.spec.kda_heads
        return (
            self.draw(count, self.spec.conv_channels),
            self.draw(count, heads * self.spec.kda_key_dim),
            self.draw(count, heads),
        )

    def extend(self, meta: StepMeta, u: Tensor, f: Tensor, b: Tensor) -> Tensor:
        step = self.ops.prepare(meta, "extend", self.spec)
        qkv = self.ops.kda_conv_extend(u, self.conv_weight, self.kda, step)
        return self.ops.kda_extend(qkv, f, b, self.gate, self.kda, step)

    def decode(self, meta: StepMeta, u: Tensor, f: Tensor, b: Tensor) -> Tensor:
        step = self.ops.prepare(meta, "decode", self.spec)
        qkv = self.ops.kda_conv_decode(u, self.conv_weight, self.kda, step)
        return self.ops.kda_decode(qkv, f, b, self.gate, self.kda, step)


@pytest.fixture(params=EXTENDS)
def device(request: pytest.FixtureRequest) -> Device:
    return Device(emulated(request.param))


# Slots and padding


def test_padding_beside_the_last_slot_in_extend(device: Device):
    before = device.kda.state.clone(), device.kda.conv.clone()
    device.extend(steps([(5, 64, 9), (-1, 0, 7), (-1, 64, 0)], num_rows=32), *device.inputs(32))
    for pool, old in zip((device.kda.state, device.kda.conv), before, strict=True):
        assert torch.equal(pool[[1, 2, 3, 4, LAST]], old[[1, 2, 3, 4, LAST]])
        assert not torch.equal(pool[5], old[5])


def test_live_row_in_the_last_slot_does_not_see_padding(device: Device):
    alone, beside = Device(device.ops), Device(device.ops)
    u, f, b = device.inputs(12)
    out = alone.extend(steps([(LAST, 64, 5)]), u[:5], f[:5], b[:5])
    with_padding = beside.extend(steps([(LAST, 64, 5), (-1, 0, 7)]), u, f, b)
    assert torch.equal(with_padding[:5], out)
    assert torch.equal(beside.kda.state[LAST], alone.kda.state[LAST])
    assert torch.equal(beside.kda.conv[LAST], alone.kda.conv[LAST])


def test_padding_beside_the_last_slot_in_decode(device: Device):
    u, f, b = device.inputs(3)
    before = device.kda.state.clone(), device.kda.conv.clone()
    device.decode(steps([(2, 70, 1), (-1, 0, 1), (-1, 0, 1)]), u, f, b)
    for pool, old in zip((device.kda.state, device.kda.conv), before, strict=True):
        assert torch.equal(pool[[1, 3, 4, 5, LAST]], old[[1, 3, 4, 5, LAST]])
    alone, beside = Device(device.ops), Device(device.ops)
    out = alone.decode(steps([(LAST, 70, 1)]), u[:1], f[:1], b[:1])
    with_padding = beside.decode(steps([(LAST, 70, 1), (-1, 0, 1)]), u[:2], f[:2], b[:2])
    assert torch.equal(with_padding[:1], out)
    assert torch.equal(beside.kda.state[LAST], alone.kda.state[LAST])


def test_a_step_of_padding_alone_does_nothing(device: Device):
    before = [device.kda.state.clone(), device.kda.conv.clone(), device.mla.latent.clone(), device.mla.rope.clone()]
    pools = [device.kda.state, device.kda.conv, device.mla.latent, device.mla.rope]
    extend, decode = steps([(-1, 0, 5), (-1, 64, 0)], num_rows=16), steps([(-1, 0, 1), (-1, 0, 1)])
    assert device.extend(extend, *device.inputs(16)).isfinite().all()
    assert not [call for call in device.ops.session.calls if "kda" in call.name or "conv" in call.name]
    assert device.decode(decode, *device.inputs(2)).isfinite().all()
    modes: list[tuple[StepMeta, Mode]] = [(extend, "extend"), (decode, "decode")]
    for meta, mode in modes:
        step = device.ops.prepare(meta, mode, device.spec)
        device.ops.mla_write(device.draw(meta.slot_mapping.shape[0], 48), device.mla, step)
    # Slot 0 and row 0 of page 0 are dummies.
    assert all(torch.equal(pool[1:], old[1:]) for pool, old in zip(pools, before, strict=True))


def test_decode_maps_padding_to_the_dummies():
    step = prepare_decode(steps([(3, 17, 1), (-1, 0, 1)]))
    assert step.slots.tolist() == [3, 0]
    assert step.places.tolist()[1] == [0]
    assert step.key_lengths == [18, 1]
    assert step.block_tables.dtype == torch.int32


def test_padded_rows_are_finite_over_poisoned_dummies(device: Device):
    for pool in (device.kda.state, device.kda.conv, device.mla.latent, device.mla.rope):
        pool[0].fill_(torch.nan)
    meta = steps([(2, 70, 1), (-1, 0, 1)])
    assert device.decode(meta, *device.inputs(2)).isfinite().all()
    step = device.ops.prepare(meta, "decode", device.spec)
    q, w = device.draw(2, 3, 48), device.draw(3, 32, 32)
    assert device.ops.mla_decode(q, w, w, device.mla, step, 0.2).isfinite().all()


def test_zero_length_sequence_in_the_middle_keeps_its_state(device: Device):
    before = device.kda.state.clone(), device.kda.conv.clone()
    beside, apart = Device(device.ops), Device(device.ops)
    u, f, b = device.inputs(80)
    out = beside.extend(steps([(1, 64, 70), (2, 64, 0), (3, 0, 10)]), u, f, b)
    parts = [
        apart.extend(steps([(1, 64, 70)]), u[:70], f[:70], b[:70]),
        apart.extend(steps([(3, 0, 10)]), u[70:], f[70:], b[70:]),
    ]
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-6, atol=1e-7)
    assert torch.equal(beside.kda.state[2], before[0][2])
    assert torch.equal(beside.kda.conv[2], before[1][2])


def test_length_one_sequences_beside_long_ones(device: Device):
    mixed, alone = Device(device.ops), Device(device.ops)
    u, f, b = device.inputs(66)
    out = mixed.extend(steps([(1, 0, 1), (2, 64, 64), (3, 64, 1)]), u, f, b)
    assert out.isfinite().all()
    torch.testing.assert_close(
        out[65:], alone.extend(steps([(3, 64, 1)]), u[65:], f[65:], b[65:]), rtol=1e-6, atol=1e-7
    )


def test_a_new_request_starts_from_zero_in_a_used_slot(device: Device):
    clean = Device(device.ops)
    clean.kda.state.zero_()
    clean.kda.conv.zero_()
    inputs = device.inputs(9)
    assert torch.equal(device.extend(steps([(4, 0, 9)]), *inputs), clean.extend(steps([(4, 0, 9)]), *inputs))
    assert torch.equal(device.kda.state[4], clean.kda.state[4])


def test_a_used_slot_of_nan_does_not_reach_a_new_request(device: Device):
    device.kda.state[4].fill_(torch.nan)
    device.kda.conv[4].fill_(torch.nan)
    assert device.extend(steps([(4, 0, 9)]), *device.inputs(9)).isfinite().all()
    assert device.kda.state[4].isfinite().all()


def test_arguments_are_left_alone(device: Device):
    for count in (1, 9):
        inputs = device.inputs(count)
        before = [x.clone() for x in inputs]
        device.extend(steps([(1, 64, count)]), *inputs)
        step = device.ops.prepare(steps([(1, 64, count)]), "extend", device.spec)
        qkv = inputs[0].clone()
        device.ops.kda_extend(qkv, *inputs[1:], device.gate, device.kda, step)
        assert torch.equal(qkv, before[0])
        assert all(torch.equal(x, old) for x, old in zip(inputs, before, strict=True))


def test_too_many_prompts_are_refused():
    with pytest.raises(EngineFault, match="at most 1024"):
        prepare_extend(steps([(slot, 0, 1) for slot in range(1, MAX_SEQUENCES + 2)]))


# KDA


def test_fused_extend_is_one_call_with_explicit_arguments():
    device = Device(emulated())
    with RawCalls() as raw:
        device.extend(steps([(1, 0, 3), (2, 64, 2)]), *device.inputs(5))
    given = raw.keywords("chunk_kda_fwd")
    assert given["scale"] == device.spec.kda_key_dim**-0.5
    assert (given["layout"], given["state_v_first"], given["use_gate_in_kernel"]) == ("BSND", True, False)
    assert given["cu_seqlens"].dtype == torch.int64
    assert given["initial_state"].shape == (2, 2, 8, 16)
    assert given["initial_state"].dtype == torch.float32
    assert given["initial_state"].is_contiguous()
    assert not any(given.get(name) for name in ("output_h", "output_gk", "output_w", "output_v_new"))


def test_chunk_outputs_are_read_by_name_and_only_those_asked_for():
    out, final = torch.zeros(1), torch.ones(1)
    outputs = ChunkKdaOutputs.of((out, final, *[None] * 9))
    assert outputs.out is out
    assert outputs.final_state is final


def test_pool_dtype_other_than_float32(device: Device):
    device = Device(device.ops, small_spec(state_dtype=BF16))
    reference = Device(device.ops, small_spec(state_dtype=BF16))
    reference.kda.state[3] = device.kda.state[3]
    inputs = device.inputs(5)
    out = device.extend(steps([(3, 64, 5)]), *inputs)
    assert device.kda.state.dtype == BF16
    torch.testing.assert_close(out, reference.extend(steps([(3, 64, 5)]), *inputs))


def test_conv_works_in_place_on_the_pool():
    """A copy of the pool, written back, would undo a hand-off that lands meanwhile."""
    device = Device(emulated())
    meta = steps([(1, 64, 3)])
    with RawCalls() as raw:
        device.ops.kda_conv_extend(
            device.inputs(3)[0], device.conv_weight, device.kda, device.ops.prepare(meta, "extend", device.spec)
        )
    (arguments,) = [positional for name, positional, _ in raw.calls if name == "causal_conv1d"]
    assert arguments[2] is device.kda.conv


def test_conv_weight_follows_the_dtype_of_each_call():
    weight, spec = torch.randn(32, 4), small_spec(kda_key_dim=4, kda_value_dim=8)
    for dtype in (torch.float32, BF16, torch.float32):
        device = Device(emulated(dtype=dtype), small_spec(kda_key_dim=4, kda_value_dim=8, kv_dtype=dtype))
        step = device.ops.prepare(steps([(1, 0, 2)]), "extend", spec)
        assert device.ops.kda_conv_extend(device.draw(2, 32), weight, device.kda, step).dtype == dtype


def test_an_extended_window_is_refused_without_accepted_counts():
    device = Device(emulated(), small_spec(conv_width=8))
    step = device.ops.prepare(steps([(1, 5, 1)]), "decode", device.spec)
    with pytest.raises(AssertionError, match="num_accepted_tokens"):
        device.ops.kda_conv_decode(device.inputs(1)[0], device.conv_weight, device.kda, step)


def test_decode_passes_the_gate_bound_and_the_whole_batch():
    device = Device(emulated())
    device.decode(steps([(1, 5, 1), (2, 6, 1)]), *device.inputs(2))
    names = [call.name for call in device.ops.session.calls]
    assert names.count("fused_sigmoid_gating_delta_rule_update") == 1
    assert names.count("npu::causal_conv1d") == 1


# Graphs


def test_decode_never_syncs_with_the_host():
    device = Device(emulated())
    ops, meta = device.ops, steps([(1, 5, 1), (LAST, 20, 1), (-1, 0, 1)])
    step = ops.prepare(meta, "decode", device.spec)
    x, wide = device.draw(3, 32), device.draw(3, 64)
    u, f, b = device.inputs(3)
    q, w_kc, w_vc = device.draw(3, 3, 48), device.draw(3, 32, 32), device.draw(3, 16, 32)
    packed = ops.pack_experts((device.draw(16, 32), device.draw(16, 32), device.draw(32, 16)) for _ in range(4))
    router, bias, rows = ops.pack_linear(device.draw(4, 32)), device.draw(4), device.draw(3, 48)
    with capturing(ops):
        ops.embed(x, torch.tensor([2, 0, 2]))
        ops.linear(x, router)
        ops.rms_norm(x, x[0], 1e-5)
        ops.mix_residual(x, [x, x], x[0], 1e-5)
        ops.glu(wide, "situ", 4.0, 25.0)
        ops.glu(wide, "silu", 1.0, None)
        ops.sigmoid_gate(x, x)
        ids, weights = ops.route(x, router, bias, top_k=2, renormalize=True, scale=1.0, num_groups=1, top_groups=1)
        ops.experts(x, ids, weights, packed, "situ", 4.0, 25.0)
        qkv = ops.kda_conv_decode(u, device.conv_weight, device.kda, step)
        o = ops.kda_decode(qkv, f, b, device.gate, device.kda, step)
        ops.gated_norm(o, device.draw(3, 16), device.draw(8), 1e-5)
        ops.mla_write(rows, device.mla, step)
        ops.mla_decode(q, w_kc, w_vc, device.mla, step, 0.2)


def test_extend_cannot_be_captured():
    device = Device(emulated())
    step = device.ops.prepare(steps([(1, 0, 3)]), "extend", device.spec)
    inputs = device.inputs(3)
    with capturing(device.ops), pytest.raises(ContractViolation, match="captured graph"):
        device.ops.kda_extend(*inputs, device.gate, device.kda, step)


# MLA


def attention_call(mode: Mode, heads: int = 3) -> tuple[dict[str, Any], Device]:
    device = Device(emulated())
    rows = [(1, 64, 3), (2, 0, 2)] if mode == "extend" else [(1, 66, 1), (2, 1, 1), (-1, 0, 1)]
    step = device.ops.prepare(steps(rows), mode, device.spec)
    q = device.draw(sum(count for _, _, count in rows), heads, 48)
    with RawCalls() as raw:
        run = device.ops.mla_extend if mode == "extend" else device.ops.mla_decode
        run(q, device.draw(heads, 32, 32), device.draw(heads, 16, 32), device.mla, step, 0.125)
    return raw.keywords("npu_fused_infer_attention_score"), device


def test_packed_attention_has_cumulative_lengths_and_a_causal_mask():
    given, _ = attention_call("extend")
    assert (given["input_layout"], given["scale"], given["sparse_mode"], given["num_heads"]) == ("TND", 0.125, 3, 3)
    assert given["actual_seq_lengths"] == [3, 5]
    assert given["actual_seq_lengths_kv"] == [67, 69]
    assert given.get("block_table") is None
    assert given["atten_mask"].shape == (2048, 2048)


def test_paged_attention_has_lengths_of_each_sequence_and_no_mask():
    given, device = attention_call("decode")
    assert (given["input_layout"], given["scale"], given["sparse_mode"]) == ("BSND", 0.125, 0)
    assert given["actual_seq_lengths_kv"] == [67, 2, 1]
    assert all(type(length) is int for length in given["actual_seq_lengths_kv"])
    assert (given["num_heads"], given["num_key_value_heads"], given["block_size"]) == (4, 1, device.spec.page_size)
    assert given.get("atten_mask") is None


def test_contract_sizes_of_latent_attention():
    """96 heads, as K3 has, are padded to 128 and the products stay below the operator's limit."""
    device = Device(emulated(rules=CONTRACT, dtype=BF16), real_spec())
    step = device.ops.prepare(steps([(1, 130, 1), (-1, 0, 1)], page=128), "decode", device.spec)
    q, w = device.draw(2, 96, 192), device.draw(96, 128, 512) * 0.05
    out = device.ops.mla_decode(q, w, w, device.mla, step, 192**-0.5)
    assert out.shape == (2, 96 * 128)
    assert out.isfinite().all()


def test_absorb_splits_below_the_limit():
    x, w = torch.randn(2, 128, 512), torch.randn(128, 512, 16)
    ops = emulated()
    ops.session.calls.clear()
    device = Device(ops)
    step = device.ops.prepare(steps([(1, 5, 1)]), "decode", device.spec)
    assert step is not None
    with on(ops):
        out = mla.absorb(x, w)
    torch.testing.assert_close(out, torch.einsum("bhi,hio->bho", x, w), rtol=1e-4, atol=1e-3)
    assert len([call for call in ops.session.calls if call.name.endswith("transpose_batchmatmul")]) == 2


@contextmanager
def on(ops: NpuEmulated) -> Iterator[None]:
    """The emulated device of a backend, for a function that is no operation of the table."""
    from k3svc.ops.npu_emulated.device import on_device

    with on_device(ops.session):
        yield


def test_cache_write_is_seen_as_rank_three():
    device = Device(emulated())
    step = device.ops.prepare(steps([(1, 5, 1), (-1, 0, 1)]), "decode", device.spec)
    with RawCalls() as raw:
        device.ops.mla_write(device.draw(2, 48), device.mla, step)
    caches = [positional[0] for name, positional, _ in raw.calls if name == "npu_scatter_nd_update_"]
    assert [tuple(cache.shape) for cache in caches] == [(41 * 16, 1, 32), (41 * 16, 1, 16)]
    assert [cache.data_ptr() for cache in caches] == [device.mla.latent.data_ptr(), device.mla.rope.data_ptr()]


# Experts


def experts_call(activation: str) -> tuple[RawCalls, NpuEmulated]:
    device = Device(emulated())
    packed = device.ops.pack_experts((device.draw(16, 32), device.draw(16, 32), device.draw(32, 16)) for _ in range(4))
    ids = torch.tensor([[0, 3], [3, 1], [2, 0]])
    with RawCalls() as raw:
        device.ops.experts(device.draw(3, 32), ids, torch.rand(3, 2), packed, activation, 4.0, 25.0)  # type: ignore[arg-type]
    return raw, device.ops


def test_routing_arguments_are_explicit():
    """The default of quant_mode changed between versions, and that of group_list_type reads counts as sums."""
    raw, _ = experts_call("situ")
    routing = raw.keywords("npu_moe_init_routing_v2")
    assert routing["quant_mode"] == -1
    assert (routing["expert_tokens_num_type"], routing["expert_tokens_num_flag"]) == (1, True)
    grouped = [keywords for name, _, keywords in raw.calls if name == "npu_grouped_matmul"]
    assert [(g["group_list_type"], g["split_item"], g["group_type"]) for g in grouped] == [(1, 2, 0)] * 2
    assert raw.keywords("npu_moe_finalize_routing")["drop_pad_mode"] == 2


@pytest.mark.parametrize(("activation", "kernel"), [("situ", "situ"), ("silu", "npu::npu_swiglu")])
def test_the_activation_alone_picks_the_kernel(activation: str, kernel: str):
    _, ops = experts_call(activation)
    names = {call.name for call in ops.session.calls}
    assert names & {"situ", "npu::npu_swiglu"} == {kernel}


# Start


def test_missing_packages_are_named_with_their_cure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "meta_path", [NoKernels(), *sys.meta_path])
    with pytest.raises(BackendError) as caught:
        load("npu", dtype="bfloat16", threads=1)
    text = str(caught.value)
    lacking = [need for need in vendor.probe(NpuOptions()) if need.problem is not None]
    assert {"chunk_kda_fwd", "situ", "l2norm_fwd"} <= {need.name for need in lacking}
    assert all(need.name in text for need in lacking)
    assert {package for package, cure in vendor.INSTALL.items() if cure in text} == {need.package for need in lacking}


def test_torch_npu_goes_with_the_minor_version_of_torch():
    assert vendor.check_torch_npu_version("2.13.0", "2.13.0+cpu") is None
    assert vendor.check_torch_npu_version("2.13.0.post1", "2.13.1") is None
    assert "another minor version" in str(vendor.check_torch_npu_version("2.12.0", "2.13.0"))


def installed(
    monkeypatch: pytest.MonkeyPatch, version: str, registered: Callable[[str], bool]
) -> dict[str, str | None]:
    """Problem by operator where all packages import, torch_npu of a version, with these operators registered."""
    schemas = torch._C._jit_get_schemas_for_operator
    monkeypatch.setattr(vendor, "_import", lambda _: None)
    monkeypatch.setattr(vendor, "_version", lambda package: version if package == "torch_npu" else "2026.9")
    monkeypatch.setattr(vendor, "_jit_get_schemas_for_operator", lambda name: schemas(name) if registered(name) else [])
    monkeypatch.setattr(vendor, "_kernel", lambda name, _: vendor.Need(name=name, package="", version="", problem=None))
    return {need.name: need.problem for need in vendor.probe(NpuOptions()) if need.name in vendor.OPERATORS}


def test_an_operator_that_a_package_does_not_register_is_refused(monkeypatch: pytest.MonkeyPatch):
    emulated()
    problems = installed(
        monkeypatch, torch.__version__, lambda name: name not in ("npu::causal_conv1d", "npu::npu_swiglu")
    )
    assert {name for name, problem in problems.items() if problem} == {"causal_conv1d", "npu_swiglu"}
    assert set(problems.values()) == {None, "the installed version does not register it"}


def test_no_operator_of_a_torch_npu_of_another_version_is_usable(monkeypatch: pytest.MonkeyPatch):
    emulated()
    problems = installed(monkeypatch, "1.2.3", lambda _: True)
    assert {name for name, problem in problems.items() if problem} == {
        name for name, package in vendor.OPERATORS.items() if package == "torch_npu" and name in problems
    }
    assert "another minor version" in str(problems["npu_rms_norm"])


def test_a_sibling_of_chunk_kda_fwd_is_refused():
    names = vendor.CHUNK_KDA_ARGUMENTS.split()
    assert vendor.check_chunk_kda_schema(names, 11) is None
    assert vendor.check_chunk_kda_schema(names, 12) == "returns 12 values, not 11"
    assert "has arguments" in str(vendor.check_chunk_kda_schema([*names[:5], "scale", *names[5:]], 11))


@pytest.mark.parametrize(
    "name",
    ["npu:fp32", "npu:kda-extend=slow", "npu-emulated:bf16", "npu-emulated:kda-extend=fused,kda-extend=decomposed"],
)
def test_unknown_options_are_refused(name: str):
    with pytest.raises(BackendError, match=r"model\.device"):
        load(name, dtype="bfloat16", threads=1)


def test_float32_is_refused_in_contract_mode():
    ops = load("npu-emulated", dtype="float32", threads=1)
    with pytest.raises(BackendError, match=r"model\.dtype.* takes bfloat16"):
        ops.new_cache(small_spec())


def test_cache_dtypes_follow_the_activations():
    with pytest.raises(BackendError, match="want the dtype of the activations"):
        emulated(dtype=BF16).new_cache(small_spec(kv_dtype=torch.float32))


def test_one_option_picks_the_extend():
    for kda_extend, kernel in (("fused", "npu::chunk_kda_fwd"), ("decomposed", "solve_tril_npu")):
        ops = load(f"npu-emulated:fp32,shape-relaxed,kda-extend={kda_extend}", dtype="float32", threads=1)
        assert isinstance(ops, NpuEmulated)
        device = Device(ops)
        device.extend(steps([(1, 0, 3)]), *device.inputs(3))
        found = {call.name for call in ops.session.calls} & {"npu::chunk_kda_fwd", "solve_tril_npu"}
        assert found == {kernel}
