"""Landing: the receiving side of one hand-off. It checks every frame and writes it into reserved pool memory.

Nothing is trusted: the manifest must equal the one computed here, frames must come in sequence, without gap, overlap or
overrun in any tensor, and with a right CRC32C, which is taken of the bytes while they land. After `close` no byte is
written. Copies and checksums leave other threads their turn.
"""

from collections.abc import Iterator, Sequence

from k3svc.errors import Incompatible, TransferError
from k3svc.ops.table import Cache, WireBytes
from k3svc.transfer.checked_copy import copy_in
from k3svc.transfer.manifest import DTYPE_BYTES, Frame, StateManifest, TensorKind, TensorSpec
from k3svc.transfer.outbox import page_spans, tensor_bytes


class Landing:
    """Where the state of one prompt arrives: a slot and pages that are reserved until `close`."""

    def __init__(self, expected: StateManifest, cache: Cache, *, slot: int, block_table: Sequence[int]) -> None:
        self.expected = expected
        self.next_sequence = 0
        self.landed_bytes = 0
        self._cache = cache
        self._slot = slot
        self._block_table = tuple(block_table)
        self._filled = [0] * len(expected.tensors)
        self._accepted = False
        self._closed = False
        self._writer = None if cache.staging is None else cache.staging.writer()

    @property
    def missing(self) -> list[str]:
        """Names of tensors of which bytes have not landed."""
        return [
            spec.name for spec, filled in zip(self.expected.tensors, self._filled, strict=True) if filled < spec.nbytes
        ]

    def close(self) -> None:
        """Ends the landing; its memory may be given to others now. Waits for copies to a device, which end soon."""
        self._closed = True
        if self._writer is not None:
            self._writer.settle()

    def accept_manifest(self, manifest: StateManifest) -> None:
        """Raises Incompatible naming the first difference from what this process expects."""
        want = self.expected
        if (manifest.request_id, manifest.attempt) != (want.request_id, want.attempt):
            raise TransferError(
                f"manifest of {manifest.request_id!r} attempt {manifest.attempt}, expected {want.request_id!r} "
                f"attempt {want.attempt}",
                reason="HANDOFF_FOREIGN",
            )
        if manifest.num_tokens != want.num_tokens or len(manifest.tensors) != len(want.tensors):
            raise Incompatible(
                f"manifest covers {manifest.num_tokens} tokens in {len(manifest.tensors)} tensors, expected "
                f"{want.num_tokens} tokens in {len(want.tensors)}",
                reason="MANIFEST_MISMATCH",
            )
        for given, own in zip(manifest.tensors, want.tensors, strict=True):
            if given != own:
                raise Incompatible(
                    f"manifest has {given.name} {given.dtype} {list(given.shape)}, expected {own.name} {own.dtype} "
                    f"{list(own.shape)}",
                    reason="MANIFEST_MISMATCH",
                )
        self._accepted = True

    def accept(self, frame: Frame) -> None:
        """Writes one frame. Raises TransferError and leaves `next_sequence` alone when it is not the one that fits, and
        then nothing is written, or its bytes are wrong, and then nothing but their place.
        """
        if self._closed:
            raise TransferError("frame after the end of the hand-off", reason="HANDOFF_CLOSED")
        if not self._accepted:
            raise TransferError("frame before the manifest")
        if frame.sequence != self.next_sequence:
            raise TransferError(f"frame {frame.sequence} where {self.next_sequence} was expected")
        if not 0 <= frame.tensor < len(self._filled):
            raise TransferError(f"frame {frame.sequence} names tensor {frame.tensor} of {len(self._filled)}")
        spec, size = self.expected.tensors[frame.tensor], frame.nbytes
        if frame.offset != self._filled[frame.tensor] or size == 0 or frame.offset + size > spec.nbytes:
            raise TransferError(
                f"frame {frame.sequence} has bytes {frame.offset} to {frame.offset + size} of {spec.name}; "
                f"{self._filled[frame.tensor]} of {spec.nbytes} have landed"
            )
        if not self._land(frame, spec):
            raise TransferError(f"frame {frame.sequence} of {spec.name} fails its CRC32C", reason="HANDOFF_CRC")
        self._filled[frame.tensor] += size
        self.landed_bytes += size
        self.next_sequence += 1

    def _land(self, frame: Frame, spec: TensorSpec) -> bool:
        """Whether the bytes that have landed are right. Those of a wrong frame are written over by the right one."""
        checksum = 0
        for target, begin, source, count in self._targets(frame, spec):
            data = frame.data[source : source + count]
            if isinstance(target, memoryview):
                checksum = copy_in(data, target[begin : begin + count], checksum)
            elif self._writer is not None and self._writer.takes(target, count):
                with self._writer.place(target, begin, count) as room:
                    checksum = copy_in(data, room, checksum)
            else:
                # Pools of other devices are no memoryviews, but are written like them.
                landed = memoryview(bytearray(count))
                checksum = copy_in(data, landed, checksum)
                target[begin : begin + count] = landed
        return checksum == frame.crc32c

    def _targets(self, frame: Frame, spec: TensorSpec) -> Iterator[tuple[WireBytes, int, int, int]]:
        """Where the bytes of a frame belong: (pool memory, first byte in it, first byte of the frame, number)."""
        if spec.kind is TensorKind.MLA_ROWS:
            page_bytes = self._cache.spec.page_size * spec.shape[1] * DTYPE_BYTES[spec.dtype]
            for page, pages, begin, source, count in page_spans(
                self._block_table, page_bytes, frame.offset, frame.nbytes
            ):
                yield self._cache.rows_bytes(spec.layer, page, pages), begin, source, count
        else:
            yield tensor_bytes(self._cache, spec.kind, spec.layer, self._slot), frame.offset, 0, frame.nbytes

    def finish(self, num_frames: int) -> None:
        """Raises TransferError unless every byte of every tensor has landed in exactly num_frames frames. Steps that
        are asked for afterwards see them.
        """
        if self.missing:
            raise TransferError(
                f"hand-off ended without {', '.join(self.missing[:4])} ({len(self.missing)} tensors incomplete)",
                reason="HANDOFF_INCOMPLETE",
            )
        if num_frames != self.next_sequence:
            raise TransferError(f"hand-off of {num_frames} frames ended after {self.next_sequence}")
        if self._writer is not None:
            self._writer.settle()
