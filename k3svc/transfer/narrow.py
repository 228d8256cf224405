"""KDA states that travel as bfloat16 while both pools hold float32: half the bytes, 8 bits of precision left.

Values are rounded to the nearest, ties to even. NaN stays NaN, infinities and zeros keep their sign, denormals are
rounded like others; what is larger than the largest bfloat16 by half its last place or more becomes infinite.
"""

import torch

from k3svc.errors import TransferError
from k3svc.ops.table import WireBytes

NARROW_BYTES, WIDE_BYTES = 2, 4


class NarrowState:
    """Float32 pool memory as the bytes of bfloat16 (`k3svc.ops.table.WireBytes`). A slice is a copy."""

    def __init__(self, pool: WireBytes) -> None:
        self._pool = pool

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes // WIDE_BYTES * NARROW_BYTES

    def __getitem__(self, span: slice) -> memoryview:
        wide = _tensor(self._pool[self._wide(span)], torch.float32)
        return wide.to(torch.bfloat16).view(torch.uint8).numpy().data

    def __setitem__(self, span: slice, data: memoryview | bytes) -> None:
        place = self._wide(span)
        wide = _tensor(data, torch.bfloat16).to(torch.float32)
        self._pool[place] = wide.view(torch.uint8).numpy().data

    def _wide(self, span: slice) -> slice:
        """The same elements in the pool. Raises TransferError where an element would be cut."""
        begin, end, _ = span.indices(self.nbytes)
        if begin % NARROW_BYTES or end % NARROW_BYTES:
            raise TransferError(
                f"bytes {begin} to {end} of a bfloat16 state cut an element", reason="HANDOFF_MALFORMED"
            )
        return slice(begin // NARROW_BYTES * WIDE_BYTES, end // NARROW_BYTES * WIDE_BYTES)


def _tensor(data: memoryview | bytes, dtype: torch.dtype) -> torch.Tensor:
    is_writable = isinstance(data, memoryview) and not data.readonly
    return torch.frombuffer(data if is_writable else bytearray(data), dtype=dtype)
