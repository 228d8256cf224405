"""Whole steps of the cuda backend against the reference: graphs on a GPU, and the kernels of few rows everywhere."""

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from k3svc.model.config import ModelConfig
from k3svc.model.kimi import Model, cache_spec
from k3svc.model.weights import Weights, tensor_shapes
from k3svc.ops.few_table import Unit
from k3svc.ops.reference import Reference
from k3svc.ops.table import Mode, Ops
from tests.conformance.cpu_cases import expert, poisoned_memory, rand
from tests.conformance.cuda_cases import DEVICE, close, cuda_ops, on_device
from tests.conformance.test_cpu_programs import LINEAR
from tests.oracles.loop import Tracked, step_meta

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]

K3 = json.loads(Path("models/k3-nano/config.json").read_text())
K3["text_config"] |= {
    "num_hidden_layers": 3, "vocab_size": 96, "attn_res_block_size": 2, "hidden_size": 48, "intermediate_size": 40,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 32,
    "moe_intermediate_size": 24, "routed_expert_hidden_size": 40, "num_experts": 4, "num_experts_per_token": 4,
}  # fmt: skip
K3["text_config"]["linear_attn_config"] |= {
    "full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 2,
}  # fmt: skip
TREES = {"linear": LINEAR | {"num_experts": 4, "num_experts_per_token": 4, "num_expert_group": 1}, "k3": K3}
"""Every expert is chosen, so that no rounding changes the choice."""
PAGE = 16


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


class RandomWeights:
    """Stands for `Weights`; a tensor's numbers come from its name."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype, self._shapes = config, dtype, tensor_shapes(config)

    def matrix(self, *names: str) -> Tensor:
        return torch.cat([self._normal(name, *self._shapes[f"{name}.weight"]) for name in names])

    def linear(self, ops: Ops, *names: str) -> Any:
        return ops.pack_linear(self.matrix(*names))

    def norm(self, name: str) -> Tensor:
        return 1 + 0.2 * self._normal(name, *self._shapes[f"{name}.weight"])

    def float32(self, name: str) -> Tensor:
        return self._normal(name, *self._shapes[name]).float()

    def head_decay(self, name: str) -> Tensor:
        return self._normal(name, self._config.kda_heads).float().exp()

    def has_quantized_experts(self, prefix: str) -> bool:
        del prefix
        return False

    def experts(self, prefix: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        width, inner = self._config.expert_width, self._config.moe_intermediate_size
        for number in range(self._config.num_experts):
            own = f"{prefix}{number}"
            w1, w3 = self._normal(f"{own}.w1", inner, width), self._normal(f"{own}.w3", inner, width)
            yield w1, w3, self._normal(f"{own}.w2", width, inner)

    def _normal(self, name: str, *shape: int) -> Tensor:
        source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        numbers: Tensor = torch.randn(shape, generator=source) * shape[-1] ** -0.5
        return numbers.to(self._dtype)


class Steps:
    """A model, its caches, and sequences without a token."""

    def __init__(self, kind: str, ops: Ops) -> None:
        self.ops = ops
        config = ModelConfig.from_tree(TREES[kind])
        self.model = Model(config, ops, cast("Weights", RandomWeights(config, ops.activation_dtype)))
        spec = cache_spec(self.model.config, num_slots=4, num_pages=8, page_size=PAGE, kv_dtype=ops.activation_dtype)
        self.cache: Any = ops.new_cache(spec)
        self.sequences = [Tracked(slot=index + 1, pages=[1 + 2 * index, 2 + 2 * index]) for index in range(3)]

    def run(
        self,
        mode: Mode,
        rows: Sequence[tuple[Tracked, Sequence[int]]],
        accepted: Sequence[int] | None = None,
        num_rows: int | None = None,
    ) -> Tensor:
        """Hidden rows, without padding."""
        ids = [token for _, tokens in rows for token in tokens]
        meta = step_meta([(sequence, len(tokens)) for sequence, tokens in rows], PAGE, num_rows)
        meta = on_device(meta) if self.ops.name == "cuda" else meta
        padded = ids + [0] * (meta.slot_mapping.shape[0] - len(ids))
        with torch.inference_mode():
            step = self.ops.prepare(meta, mode, self.cache.spec)
            tensor = torch.tensor(padded, device=self.ops.device)
            hidden = self.model.forward(tensor, meta, self.cache, mode, step=step)
            if accepted is not None:
                self.ops.commit(self.cache, step, accepted)
        for index, (sequence, tokens) in enumerate(rows):
            sequence.length += len(tokens) if accepted is None else 1 + accepted[index]
        return hidden[: len(ids)].float().cpu()

    def all(self) -> list[Tensor]:
        """Steps of one, two and three sequences, drafts among them, and of one again."""
        a, b, c = self.sequences
        return [
            self.run("decode", [(a, [5])]),
            self.run("decode", [(a, [6]), (b, [7])]),
            self.run("decode", [(a, [1]), (b, [2]), (c, [3])]),
            self.run("verify", [(b, [4, 9])], [1]),
            self.run("verify", [(a, [4, 9, 11]), (c, [8])], [1, 0]),
            self.run("decode", [(c, [12])]),
            self.run("decode", [(b, [13]), (a, [14])]),
        ]


@pytest.mark.parametrize("has_unit", [False, True])
@pytest.mark.parametrize("depth", [40, 1300])
def test_product_of_few_rows(depth: int, has_unit: bool):
    source = torch.Generator().manual_seed(1)
    x, norm = rand(source, 2, depth).to(torch.bfloat16), rand(source, depth).to(torch.bfloat16)
    weight, base = (rand(source, 2 * 37, depth) / depth**0.5).to(torch.bfloat16), rand(source, 2, 37).to(torch.bfloat16)
    unit = Unit(activation="situ", beta=4.0, linear_beta=25.0) if has_unit else None
    few = cuda_ops(torch.bfloat16, is_fast=True).few
    plain = Reference(torch.float32, threads=1)
    assert few is not None
    rows = slice(None) if has_unit else slice(37)
    out = few.product(
        x.to(DEVICE),
        few.part(weight.to(DEVICE), 0, 74)[rows],
        norm=(norm.to(DEVICE), 1e-5),
        unit=unit,
        base=base.to(DEVICE),
    )
    expected = plain.rms_norm(x.float(), norm.float(), 1e-5) @ weight[rows].float().T
    if has_unit:
        expected = plain.glu(expected, "situ", 4.0, 25.0)
    close(out, expected + base.float(), 1e-2)


def test_groups_of_few_rows():
    source = torch.Generator().manual_seed(2)
    x, weight = rand(source, 2, 3 * 20).to(torch.bfloat16), rand(source, 3, 24, 16).to(torch.bfloat16)
    few = cuda_ops(torch.bfloat16, is_fast=True).few
    assert few is not None
    out = few.product(x.to(DEVICE), few.pack_groups(weight), group_step=20)
    expected = torch.einsum("nhi,hoi->nho", x.float().view(2, 3, 20)[..., :16], weight.float()).flatten(1)
    close(out, expected, 1e-2)


@pytest.mark.parametrize("with_rest", [False, True])
def test_experts_of_few_rows(with_rest: bool):
    source = torch.Generator().manual_seed(3)
    width, inner, bf16 = 72, 24, torch.bfloat16
    weights = [tuple((part / 4).to(bf16) for part in expert(source, inner, width)) for _ in range(6)]
    x, norm, router = rand(source, 2, width).to(bf16), rand(source, width).to(bf16), rand(source, 6, width)
    bias, base = rand(source, 6), rand(source, 2, width).to(bf16)
    shared, shared_weight = rand(source, 2, 30).to(bf16), rand(source, width, 30).to(bf16)
    choice: dict[str, Any] = {"top_k": 3, "renormalize": True, "scale": 2.5, "num_groups": 1, "top_groups": 1}
    ops = cuda_ops(bf16, is_fast=True)
    few, plain = ops.few, Reference(torch.float32, threads=1)
    assert few is not None
    own_norm = (norm.to(DEVICE), 1e-5)
    unit = Unit(activation="silu", beta=0.0, linear_beta=None)
    inner_weight = (rand(source, 2 * 30, width) / 9).to(bf16)
    beside = (inner_weight.to(DEVICE), unit) if with_rest else None
    ids, shares, hidden = few.route(x.to(DEVICE), own_norm, router.to(DEVICE), bias.to(DEVICE), beside, **choice)
    normed = plain.rms_norm(x.float(), norm.float(), 1e-5)
    expected_ids, expected_shares = plain.route(normed, plain.pack_linear(router), bias, **choice)
    assert torch.equal(ids.cpu(), expected_ids)
    close(shares, expected_shares, 1e-4)
    out = few.experts(
        x.to(DEVICE),
        own_norm,
        ids,
        shares,
        ops.pack_experts(iter(weights)),  # type: ignore[arg-type]
        unit,
        shared=(shared.to(DEVICE), shared_weight.to(DEVICE)) if with_rest else None,
        base=base.to(DEVICE) if with_rest else None,
    )
    packed = plain.pack_experts(tuple(part.float() for part in parts) for parts in weights)  # type: ignore[misc]
    expected = plain.experts(normed, expected_ids, expected_shares, packed, "silu", 0.0, None)
    if with_rest:
        assert hidden is not None
        close(hidden, plain.glu(normed @ inner_weight.float().T, "silu", 0.0, None), 1e-2)
        expected = expected + shared.float() @ shared_weight.float().T + base.float()
    close(out, expected, 1e-2)


@pytest.mark.parametrize("kind", ["linear", "k3"])
def test_steps_of_few_rows_agree_with_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch):
    ops = cuda_ops(torch.bfloat16, is_fast=True)
    few = ops.few
    assert few is not None
    takes, taken = few.takes, set()

    def watched(step: Any) -> bool:
        if takes(step):
            taken.add((step.mode, step.num_rows))
        return takes(step)

    monkeypatch.setattr(few, "takes", watched)
    expected = Steps(kind, Reference(torch.bfloat16, threads=1)).all()
    for own, other in zip(Steps(kind, ops).all(), expected, strict=True):
        # The reference rounds too.
        close(own, other, 0.08)
    assert {("decode", 1), ("decode", 2), ("verify", 2)} <= taken


@pytest.mark.skipif(DEVICE.type == "cpu", reason="graphs need a GPU; test_cuda.py has the kernels")
@pytest.mark.parametrize("kind", ["linear", "k3"])
def test_steps_of_the_invariant_mode_agree_with_the_reference(kind: str):
    expected = Steps(kind, Reference(torch.float32, threads=1)).all()
    for own, other in zip(Steps(kind, cuda_ops()).all(), expected, strict=True):
        close(own, other, 1e-4)
