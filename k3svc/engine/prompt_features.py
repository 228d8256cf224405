"""PromptFeatures: what the draft service gets of one prompt: its newest rows, computed or from the prefix cache."""

from collections.abc import Sequence

from k3svc.core.prefix_cache import Node
from k3svc.engine.ports import FeatureSink, FeatureStream, PrefillCall


class PromptFeatures:
    """Opens a stream of the sink when there is something to push. Nothing here raises or blocks."""

    def __init__(self, sink: FeatureSink, call: PrefillCall) -> None:
        self.oldest = max(0, len(call.prompt) - sink.window)
        """The first token whose features are of use."""
        self._sink = sink
        self._call = call
        self._stream: FeatureStream | None = None

    def push(self, position: int, rows: memoryview, width: int) -> None:
        """Features of consecutive tokens from `position` on, `width` bytes each; those too old are left out."""
        skip = max(0, self.oldest - position)
        if skip * width >= rows.nbytes:
            return
        if self._stream is None:
            call = self._call
            self._stream = self._sink.open(ticket=call.draft_ticket, attempt=call.attempt, num_tokens=len(call.prompt))
        self._stream.push(position + skip, rows[skip * width :])

    def push_cached(self, path: Sequence[Node], page_size: int) -> None:
        """Those of the tokens with which the prompt begins, as far as they are known."""
        for index, node in enumerate(path):
            if node.features is not None:
                self.push(index * page_size, memoryview(node.features), len(node.features) // page_size)

    def close(self) -> None:
        """No more will come. Safe to repeat."""
        if self._stream is not None:
            self._stream.close()
