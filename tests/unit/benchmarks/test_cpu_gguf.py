"""GGUF files that the CPU benchmark writes, read back by the format's description."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.cpu_gguf import write_gguf
from benchmarks.cpu_models import small_tree, write_checkpoint

FORMATS = {4: "<I", 6: "<f", 7: "<?"}


class Reader:
    """Fields and tensors of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        self._at = 0
        assert self._data[:4] == b"GGUF"
        self._at = 4
        version, num_tensors, num_fields = self._next("<IQQ")
        assert version == 3
        self.fields = {self._string(): self._value(self._next("<I")[0]) for _ in range(num_fields)}
        infos = [self._info() for _ in range(num_tensors)]
        base = -(-self._at // 32) * 32
        self.tensors = {}
        for name, shape, dtype, offset in infos:
            assert offset % 32 == 0
            count = torch.Size(shape).numel()
            self.tensors[name] = torch.frombuffer(
                bytearray(self._data), dtype=dtype, count=count, offset=base + offset
            ).view(shape)

    def _next(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (length,) = self._next("<Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._string()
        if kind == 9:
            inner, count = self._next("<IQ")
            return [self._value(inner) for _ in range(count)]
        return self._next(FORMATS[kind])[0]

    def _info(self) -> tuple[str, list[int], torch.dtype, int]:
        name = self._string()
        (rank,) = self._next("<I")
        shape = list(self._next(f"<{rank}Q"))
        kind, offset = self._next("<IQ")
        return name, shape[::-1], {0: torch.float32, 30: torch.bfloat16}[kind], offset


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = small_tree()
    tree["text_config"] |= {
        "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48, "q_lora_rank": 12,
        "moe_intermediate_size": 8, "num_experts": 4, "routed_expert_hidden_size": 16, "kv_lora_rank": 20,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
    }  # fmt: skip
    tree["text_config"]["linear_attn_config"]["head_dim"] = 8
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_checkpoint(path, tree)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_holds_the_weights_of_the_checkpoint(checkpoint: Path, tmp_path: Path, dtype: torch.dtype):
    path = tmp_path / "tiny.gguf"
    write_gguf(checkpoint, path, dtype)
    read, stored = Reader(path), load_file(checkpoint / "model.safetensors")
    tensors = read.tensors
    kda, mla = "model.layers.1.self_attn.", "model.layers.3.self_attn."

    assert torch.equal(tensors["token_embd.weight"], stored["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(tensors["blk.1.attn_v.weight"], stored[f"{kda}v_proj.weight"].to(dtype))
    assert torch.equal(tensors["blk.1.ssm_g.weight"], stored[f"{kda}g_proj.weight"].to(dtype))
    assert torch.equal(tensors["blk.3.attn_gate.weight"], stored[f"{mla}g_proj.weight"].to(dtype))
    assert torch.equal(tensors["blk.1.ssm_a"], -stored[f"{kda}A_log"].exp())
    assert torch.equal(tensors["blk.1.ssm_conv1d_k.weight"][0, :, 0], stored[f"{kda}k_conv1d.weight"][:, 0].float())
    keys, values = torch.split(stored[f"{mla}kv_b_proj.weight"].to(dtype).view(4, 20, 20), [8, 12], dim=1)
    assert torch.equal(tensors["blk.3.attn_k_b.weight"], keys.mT)
    assert torch.equal(tensors["blk.3.attn_v_b.weight"], values)
    assert torch.equal(
        tensors["blk.2.ffn_down_exps.weight"][3], stored["model.layers.2.mlp.experts.3.w2.weight"].to(dtype)
    )
    assert torch.equal(
        tensors["blk.2.ffn_up_exps.weight"][0], stored["model.layers.2.mlp.experts.0.w3.weight"].to(dtype)
    )
    score = stored["model.layers.2.mlp_res_norm.weight"] * stored["model.layers.2.mlp_res_proj.weight"][0]
    assert torch.equal(tensors["blk.2.ffn_res_score.weight"], score.float())
    assert tensors["blk.2.ffn_gate_inp.weight"].dtype == torch.float32


def test_a_file_tells_the_geometry(checkpoint: Path, tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    write_gguf(checkpoint, path, torch.bfloat16)
    fields = Reader(path).fields
    own = {name.removeprefix("kimi-k3."): value for name, value in fields.items()}

    assert fields["general.architecture"] == "kimi-k3"
    assert own["attention.head_count_kv"] == [0, 0, 0, 1]
    assert (own["attention.key_length"], own["attention.key_length_mla"], own["kda.head_dim"]) == (24, 12, 8)
    assert (own["expert_count"], own["expert_used_count"], own["expert_latent_length"]) == (4, 2, 16)
    assert own["kda.gate_lower_bound"] == -5.0
    assert own["expert_weights_norm"] is True


def test_a_model_that_is_not_all_of_k3_is_refused(checkpoint: Path, tmp_path: Path):
    tree = json.loads((checkpoint / "config.json").read_text())
    tree["text_config"] |= {"q_lora_rank": None, "mla_use_output_gate": False}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ValueError, match=r"q_lora_rank.*mla_use_output_gate"):
        write_gguf(tmp_path, tmp_path / "x.gguf", torch.float32)
