"""The part of the table of operations that draft models need beside `Ops`, under the same rules."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from k3svc.ops.table import SampleRows, Step


@dataclass(frozen=True, kw_only=True)
class BlockMeta:
    """Which context a step of draft blocks sees: R requests with a ring of cells each, where position p is in cell
    p % capacity. `host_*` are host copies.
    """

    slots: Tensor
    """int64 [R], the ring of each request."""
    base_lens: Tensor
    """int64 [R], positions before the block."""
    starts: Tensor
    """int64 [R], the first position that was written."""
    host_lengths: tuple[int, ...]
    """Visible context rows of each request: the newest min(base_len - start, window)."""
    window: int
    capacity: int
    num_cells: int
    """C: of each ring all visible cells are among the first C."""
    num_rows: int
    """G, rows of a block."""


class DraftOps(Protocol):
    """What draft models need beyond `Ops`. Letters as there; D and V are key and value width of an attention head, S
    the slots of a context pool, r the rank of a Markov head.
    """

    def prepare(self, meta: BlockMeta) -> Step:
        """Derive once a step what the attention of all layers shares."""
        ...

    def rotation(
        self, positions: Tensor, num_rows: int, frequencies: Tensor, amplitude: float
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [R · num_rows, D/2], of num_rows consecutive positions from each of int64 [R] on.

        frequencies float32 [D/2], radians a position; both results are multiplied by the amplitude.
        """
        ...

    def norm_rope(
        self, qkv: Tensor, heads: int, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits grouped-query rows, norms the heads of q and k and turns them (channels i and D/2 + i together).

        qkv [N, (NH + 2·KVH)·D] with `heads` = NH, which may be 0, weights [D], cos and sin float32 [N, D/2] of the
        rows' positions → q [N, NH, D], k and v [N, KVH, D].
        """
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
        """RoPE: x [N, heads, D], cos and sin float32 [N, D/2] → [N, heads, D].

        interleaved: channels 2i and 2i + 1 turn together (published latent-attention checkpoints); else i and D/2 + i.
        """
        ...

    def pack_heads(self, weight: Tensor) -> Any:
        """Re-lay a weight [NH, out, in] for `project_heads`, once at load."""
        ...

    def project_heads(self, x: Tensor, weight: Any) -> Tensor:
        """Each head by a matrix of its own: x [N, NH, in] → [N, NH, out]."""
        ...

    def write_context(self, rows: Tensor, pool: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Stores rows [N, KVH, D] in the rings of a layer, position p in cell p % capacity: pool [S, capacity, KVH, D],
        slots and positions int64 [N]. No two rows share a cell.
        """
        ...

    def block_attention(
        self,
        query: Tensor,
        block_keys: Tensor,
        block_values: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        step: Step,
        *,
        scale: float,
        is_causal: bool,
    ) -> Tensor:
        """Attention of block rows over the visible context and the block, whose part is causal only if `is_causal`.

        query [R, G, NH, D], block_keys [R, G, KVH, D], block_values [R, G, KVH, V], context_keys [S, capacity, KVH, D],
        context_values [S, capacity, KVH, V] → [R, G, NH, V]. Query heads share key heads in groups of NH / KVH. V < D
        is latent attention: the values are the first V channels of the keys. Cells that are not visible may hold
        anything.
        """
        ...

    def gate(self, x: Tensor, logits: Tensor) -> Tensor:
        """x · sigmoid(logits): x [R, r], logits float32 [R, r] → [R, r] (gated Markov head)."""
        ...

    def recur(self, joint: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the recurrent Markov head: joint float32 [R, 3·r] = [g | c | o], memory [R, r] → tanh(o) and the
        new memory, sigmoid(g) · memory + (1 - sigmoid(g)) · tanh(c), both [R, r].
        """
        ...

    def choose(
        self, logits: Tensor, bias: Tensor | None, banned: int, rows: SampleRows | None, offset: int
    ) -> tuple[Tensor, Tensor]:
        """`Ops.sample` of logits + bias without the id `banned`, at the rows' positions + offset; None: greedy.

        logits float32 [R, X], bias [R, X] → int64 [R], and the sums that were chosen from, float32 [R, X].
        """
        ...

    def confidences(
        self, states: Tensor, embedded: Tensor | None, weight: Tensor, bias: float, temperatures: Tensor
    ) -> Tensor:
        """sigmoid(([state | embedded] · weight + bias) / temperature) of each row: states [R, γ, H], embedded
        [R, γ, r], weight float32 [H (+ r)], temperatures float32 [γ] or more → float32 [R, γ].
        """
        ...
