"""The files of a checkpoint: which tensors there are, under one spelling of their names, and what they hash to.

Names are those of model.md 3.1 and 3.2 without `language_model.`, and with `mlp.` for both `mlp.` and
`block_sparse_moe.`; vision tensors, rotary tables and layers past the last one are left out.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3svc.errors import CheckpointError
from k3svc.model.modelslim import Description

INDEX_FILE = "model.safetensors.index.json"
WHOLE_HASH_BYTES = 1 << 30
"""Checkpoints up to this size are hashed whole."""
SAMPLE_BYTES = 4096
"""Bytes at either end of a tensor that are hashed of larger checkpoints."""

Progress = Callable[[int, int], None]
"""progress(done_bytes, total_bytes), called after every tensor."""

_SKIPPED = re.compile(r"(vision_tower|mm_projector)\.|.*\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class Checkpoint:
    """Open safetensors files of a directory. Tensors stay valid after it is closed."""

    def __init__(self, directory: Path, *, num_layers: int | None = None, progress: Progress | None = None) -> None:
        """num_layers: leave out the tensors of later layers. Raises CheckpointError naming files and tensors."""
        self._files = ExitStack()
        self._handles: dict[str, Any] = {}
        self._sources: dict[str, str] = {}
        self._done_bytes = 0
        self._progress = progress
        self.description = Description.read(directory)
        try:
            for file in _weight_files(directory):
                self._open(file, num_layers)
        except BaseException:
            self._files.close()
            raise
        self.names = frozenset(self._handles)
        self.total_bytes = sum(self.nbytes(name) for name in self.names)

    def close(self) -> None:
        """Lets go of the files."""
        self._handles.clear()
        self._files.close()

    def _open(self, file: Path, num_layers: int | None) -> None:
        try:
            handle = self._files.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error
        for source in handle.keys():  # noqa: SIM118 - it is no mapping
            name = canonical_name(source)
            layer = _LAYER.match(name)
            if _SKIPPED.match(name) or (layer and num_layers is not None and int(layer[1]) >= num_layers):
                continue
            if name in self._sources:
                raise CheckpointError(f"{file}: {source} is the same tensor as {self._sources[name]}")
            self._handles[name] = handle
            self._sources[name] = source

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype of a tensor as the file spells it, such as BF16."""
        return str(self._slice(name).get_dtype())

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        count = 1
        for size in self.shape(name):
            count *= size
        dtype = self.dtype(name)
        if dtype not in _ITEM_BYTES:
            raise CheckpointError(f"{self._sources[name]}: dtype {dtype} is not one of {', '.join(_ITEM_BYTES)}")
        return count * _ITEM_BYTES[dtype]

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Copy of a tensor, in `dtype` if one is given."""
        stored: Tensor = self._handles[name].get_tensor(self._sources[name])
        copied = stored.to(dtype or stored.dtype, copy=True)
        self._done_bytes += self.nbytes(name)
        if self._progress is not None:
            self._progress(self._done_bytes, self.total_bytes)
        return copied

    def content(self, name: str, limit: int | None) -> Iterator[memoryview]:
        """Bytes of a tensor; with a limit only that many from either end."""
        flat = self._handles[name].get_tensor(self._sources[name]).reshape(-1).view(torch.uint8).numpy()
        if limit is None or flat.nbytes <= 2 * limit:
            yield flat.data
        else:
            yield flat[:limit].data
            yield flat[-limit:].data

    def _slice(self, name: str) -> Any:
        return self._handles[name].get_slice(self._sources[name])


def canonical_name(source: str) -> str:
    """The one spelling of a tensor's name."""
    name = source.removeprefix("language_model.")
    if name.startswith("layers."):
        name = f"model.{name}"
    return name.replace(".block_sparse_moe.", ".mlp.")


def model_hash(directory: Path) -> str:
    """sha256 in hex over config.json, a description of quantised weights, and name, dtype, shape and content of every
    text tensor.

    Of checkpoints over 1 GiB only 4 KiB at either end of each tensor are read. Raises CheckpointError.
    """
    digest = hashlib.sha256()
    config = directory / "config.json"
    try:
        digest.update(config.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {config}: {error.strerror}") from error
    with closing(Checkpoint(directory)) as checkpoint:
        if checkpoint.description is not None:
            digest.update(checkpoint.description.path.read_bytes())
        limit = None if checkpoint.total_bytes <= WHOLE_HASH_BYTES else SAMPLE_BYTES
        for name in sorted(checkpoint.names):
            digest.update(f"\0{name}\0{checkpoint.dtype(name)}\0{checkpoint.shape(name)}\0".encode())
            for part in checkpoint.content(name, limit):
                digest.update(part)
    return digest.hexdigest()


def _weight_files(directory: Path) -> list[Path]:
    """The files that the index names, or all safetensors files when there is no index."""
    index = directory / INDEX_FILE
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{directory}: no *.safetensors files")
        return files
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: expected an object with weight_map: {error}") from error
    # A checkpoint names files of its own folder and no others.
    if foreign := [
        name for name in names if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]*[^./\\\0]", name)
    ]:
        raise CheckpointError(f"{index}: weight_map names {foreign[0]!r}, which is no file of this folder")
    return [directory / name for name in sorted(names)]
