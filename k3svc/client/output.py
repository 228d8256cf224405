"""What has been given to the caller of one sample, across the attempts of a request.

An attempt that repeats the output from its beginning is compared with what was given and gives only what is new; an
attempt that resumes starts where the last one ended. Either way the caller sees one unbroken stream.
"""

from k3svc.client.events import FINISH_REASONS, Delta, Sample, TokenLogprobs, logprobs_from_pb
from k3svc.core.request import FinishReason
from k3svc.errors import EngineFault
from k3svc.text.chat import ToolCall
from k3svc.text.parse import ChatOutputParser, ContentDelta, ReasoningDelta
from k3svc.v1 import decode_service_pb2


class SampleOutput:
    """The output of one sample so far. With a parser, the text is that of a conversation's answer."""

    def __init__(self, index: int, parser: ChatOutputParser | None) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._parser = parser
        self._num_chars = 0
        self._skip_tokens = 0
        self._skip_chars = 0
        self._text = ""
        self._reasoning = ""
        self._tool_calls: list[ToolCall] = []
        self._logprobs: list[TokenLogprobs] = []
        self._stopped_by = ""

    def begin_attempt(self, *, repeats: bool) -> None:
        """`repeats`: the attempt gives the output from its beginning, not from where the last one ended."""
        self._skip_tokens = len(self.token_ids) if repeats else 0
        self._skip_chars = self._num_chars if repeats else 0

    def take(self, pb: decode_service_pb2.GenerateDelta) -> Delta | None:
        """What of a message is new, None when nothing is. Raises EngineFault when a repeated token differs."""
        token_ids, logprobs = self._new_tokens(pb)
        text = pb.text[self._skip_chars :]
        self._skip_chars -= len(pb.text) - len(text)
        if self.finish_reason is not None:
            return None
        self.token_ids += token_ids
        self._num_chars += len(text)
        self._logprobs += logprobs
        self.finish_reason = FINISH_REASONS.get(pb.finish_reason)
        self._stopped_by = pb.stopped_by
        answer = self._parse(text)
        delta = Delta(
            index=self._index,
            token_ids=token_ids,
            text=answer.text,
            reasoning=answer.reasoning,
            tool_calls=answer.tool_calls,
            replaces_reasoning=answer.replaces_reasoning,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stopped_by=pb.stopped_by,
        )
        self._reasoning = "" if delta.replaces_reasoning else self._reasoning + delta.reasoning
        self._text += delta.text
        self._tool_calls += delta.tool_calls
        return None if delta == Delta(index=self._index) else delta

    def sample(self) -> Sample:
        assert self.finish_reason is not None, "the sample has ended"
        return Sample(
            index=self._index,
            text=self._text,
            reasoning=self._reasoning,
            tool_calls=tuple(self._tool_calls),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=self.finish_reason,
            stopped_by=self._stopped_by,
        )

    def _new_tokens(self, pb: decode_service_pb2.GenerateDelta) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        skipped = min(self._skip_tokens, len(pb.token_ids))
        given_from = len(self.token_ids) - self._skip_tokens
        if self.token_ids[given_from : given_from + skipped] != list(pb.token_ids[:skipped]):
            raise EngineFault(
                f"sample {self._index} was resumed with other tokens than before: the decode services differ in "
                "kernels or model",
                reason="RESUME_DIFFERS",
            )
        self._skip_tokens -= skipped
        return tuple(pb.token_ids[skipped:]), logprobs_from_pb(pb.logprobs[skipped:])

    def _parse(self, text: str) -> Delta:
        if self._parser is None:
            return Delta(index=self._index, text=text)
        if self._stopped_by:
            text = text.removesuffix(self._stopped_by)
        events = self._parser.push(text)
        if self.finish_reason is not None:
            events += self._parser.finish()
        return Delta(
            index=self._index,
            text="".join(event.text for event in events if isinstance(event, ContentDelta)),
            reasoning="".join(event.text for event in events if isinstance(event, ReasoningDelta)),
            tool_calls=tuple(event for event in events if isinstance(event, ToolCall)),
            replaces_reasoning=any(isinstance(event, ContentDelta) and event.replaces_reasoning for event in events),
        )
