"""What a hand-off contains: an ordered list of tensors in the wire layout, computed alike by both sides.

The same two values, StateManifest and Frame, serve every transport. This module knows no socket and no encoding.
"""

import enum
import hashlib
import math
from dataclasses import dataclass

import torch

from k3svc.ops.table import CacheSpec

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class TensorKind(enum.IntEnum):
    """Kinds of tensors; the numbers are those of k3svc.v1.TensorKind."""

    KDA_STATE = 1
    CONV_STATE = 2
    MLA_ROWS = 3
    LOGITS = 4


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a hand-off in wire layout."""

    kind: TensorKind
    layer: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def name(self) -> str:
        return f"{self.kind.name.lower()}[{self.layer}]"


@dataclass(frozen=True, kw_only=True)
class StateManifest:
    """All tensors of one hand-off; Frame.tensor indexes `tensors`."""

    request_id: str
    attempt: int
    num_tokens: int
    tensors: tuple[TensorSpec, ...]

    @property
    def total_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Bytes of one tensor. `data` may view pool memory (sending), a received message or shared memory (landing)."""

    sequence: int
    tensor: int
    offset: int
    crc32c: int
    data: memoryview
    position: int | None = None
    """Where in a sink, which others can write into, the bytes of `data` are; None: they travel in the frame."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Bytes that a sink took: their position and checksum."""

    position: int
    nbytes: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class PrefillDone:
    """End of a hand-off stream, with the times that prefill measured."""

    num_frames: int
    queue_ms: float
    compute_ms: float
    send_tail_ms: float
    chunks: int
    cached_tokens: int


def build_manifest(spec: CacheSpec, *, request_id: str, attempt: int, num_tokens: int) -> StateManifest:
    """The manifest of a prompt of num_tokens: layers in order (KDA: state, conv; MLA: rows), logits last."""
    state, kv = DTYPE_NAMES[spec.wire_state_dtype or spec.state_dtype], DTYPE_NAMES[spec.kv_dtype]
    tensors: list[TensorSpec] = []
    for layer in sorted(spec.kda_layers + spec.mla_layers):
        if layer in spec.kda_layers:
            shape = (spec.kda_heads, spec.kda_value_dim, spec.kda_key_dim)
            conv = (spec.conv_width - 1, spec.conv_channels)
            tensors.append(TensorSpec(kind=TensorKind.KDA_STATE, layer=layer, dtype=state, shape=shape))
            tensors.append(TensorSpec(kind=TensorKind.CONV_STATE, layer=layer, dtype=kv, shape=conv))
        else:
            rows = (num_tokens, spec.kv_lora_rank + spec.rope_dim)
            tensors.append(TensorSpec(kind=TensorKind.MLA_ROWS, layer=layer, dtype=kv, shape=rows))
    tensors.append(TensorSpec(kind=TensorKind.LOGITS, layer=0, dtype="float32", shape=(spec.vocab_size,)))
    return StateManifest(request_id=request_id, attempt=attempt, num_tokens=num_tokens, tensors=tuple(tensors))


def wire_layout(spec: CacheSpec) -> str:
    """Text that two processes share iff their manifests agree for every prompt; pool sizes and pages are private.

    Dtype of conv states and MLA rows, dtype of KDA states, hash of the manifest: `bfloat16/float32/0f1e2d3c4b5a6978`.
    """
    manifest = build_manifest(spec, request_id="", attempt=0, num_tokens=1)
    text = ";".join(f"{t.name}:{t.dtype}:{t.shape}" for t in manifest.tensors)
    state, kv = DTYPE_NAMES[spec.wire_state_dtype or spec.state_dtype], DTYPE_NAMES[spec.kv_dtype]
    return f"{kv}/{state}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"


LAYOUT_KEYS = ("model.dtype", "transfer.state_dtype")
"""What decides the first parts of a wire layout."""


def layout_difference(prefill: str, decode: str) -> str:
    """What keeps apart two services of different wire layouts, and what to change."""
    sides = prefill.split("/"), decode.split("/")
    if [len(parts) for parts in sides] == [3, 3]:
        for key, at_prefill, at_decode in zip(LAYOUT_KEYS, *sides, strict=False):
            if at_prefill != at_decode:
                return (
                    f"{key}: prefill has {at_prefill[:16]!r}, decode has {at_decode[:16]!r}; start both with the same "
                    f"{key}"
                )
    return (
        f"wire_layout: prefill has {prefill[:64]!r}, decode has {decode[:64]!r}; the shapes of states and rows follow "
        "from config.json, so start both with the same checkpoint and release"
    )
