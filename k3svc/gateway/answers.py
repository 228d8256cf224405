"""What an engine says of a request as messages of the gateway's protocol."""

from collections.abc import Collection, Sequence

from k3svc.core.batch import Sampled
from k3svc.core.events import Delta, Finished
from k3svc.core.request import FinishReason, GenerateRequest
from k3svc.gateway.protos import sglang_scheduler_pb2 as pb2


class Answer:
    """The messages of one request. Chunks carry what is new, one Complete a sample carries all of it.

    The Complete of the sample that ends last waits for Finished, which follows at once and brings the counts of the
    whole request: cached prompt tokens and speculation. Without chunks all wait and come in the order of samples, since
    a gateway numbers them as they come.
    """

    def __init__(self, request: GenerateRequest, *, stream: bool, eos_token_ids: Collection[int]) -> None:
        """`stream`: whether chunks are wanted."""
        self._request = request
        self._stream = stream
        self._stop_token_ids = set(request.stop.stop_token_ids)
        if not request.stop.ignore_eos:
            self._stop_token_ids.update(eos_token_ids)
        self._token_ids: list[list[int]] = [[] for _ in range(request.n)]
        self._logprobs: list[list[Sampled]] = [[] for _ in range(request.n)]
        self._unfinished = request.n
        self._held: list[pb2.GenerateComplete] = []

    def messages(self, event: Delta | Finished) -> list[pb2.GenerateResponse]:
        """What is to be sent now."""
        if isinstance(event, Finished):
            assert not self._unfinished, "Finished comes after the end of every sample"
            last = self._held[-1]
            last.cached_tokens = event.usage.cached_tokens
            last.spec_accepted_tokens = event.speculation.accepted
            last.spec_draft_tokens = event.speculation.proposed
            return [self._response(complete=held) for held in sorted(self._held, key=lambda held: held.index)]
        self._token_ids[event.index] += event.token_ids
        self._logprobs[event.index] += event.logprobs
        messages = []
        if self._stream and event.token_ids:
            messages.append(self._response(chunk=self._chunk(event)))
        if event.finish_reason is not None:
            complete = self._complete(event, event.finish_reason)
            self._unfinished -= 1
            if self._stream and self._unfinished:
                messages.append(self._response(complete=complete))
            else:
                self._held.append(complete)
        return messages

    def _response(
        self, chunk: pb2.GenerateStreamChunk | None = None, complete: pb2.GenerateComplete | None = None
    ) -> pb2.GenerateResponse:
        return pb2.GenerateResponse(request_id=self._request.request_id, chunk=chunk, complete=complete)

    def _chunk(self, delta: Delta) -> pb2.GenerateStreamChunk:
        return pb2.GenerateStreamChunk(
            index=delta.index,
            token_ids=delta.token_ids,
            prompt_tokens=len(self._request.prompt),
            completion_tokens=len(self._token_ids[delta.index]),
            output_logprobs=_logprobs_to_pb(delta.logprobs) if delta.logprobs else None,
        )

    def _complete(self, delta: Delta, reason: FinishReason) -> pb2.GenerateComplete:
        token_ids, logprobs = self._token_ids[delta.index], self._logprobs[delta.index]
        complete = pb2.GenerateComplete(
            index=delta.index,
            output_ids=token_ids,
            finish_reason=reason.value,
            prompt_tokens=len(self._request.prompt),
            completion_tokens=len(token_ids),
            output_logprobs=_logprobs_to_pb(logprobs) if logprobs else None,
        )
        if reason is FinishReason.STOP:
            if token_ids and token_ids[-1] in self._stop_token_ids:
                complete.matched_token_id = token_ids[-1]
            else:
                complete.matched_stop_str = delta.stopped_by
        return complete


def sign_of_life(request: GenerateRequest) -> pb2.GenerateResponse:
    """Says that a request was taken in: gateways give up on a prefill service that is silent for seconds, which a long
    prompt or a full decode service may well take.
    """
    return pb2.GenerateResponse(
        request_id=request.request_id, chunk=pb2.GenerateStreamChunk(prompt_tokens=len(request.prompt))
    )


def ended_early(
    request: GenerateRequest, reason: str, index: int = 0, *, cached_tokens: int = 0
) -> pb2.GenerateResponse:
    """The end of a sample without a token: of a leg on prefill, since decode samples all of them, or of an abort.
    Gateways take cached_tokens of a pair from prefill.
    """
    complete = pb2.GenerateComplete(
        index=index, finish_reason=reason, prompt_tokens=len(request.prompt), cached_tokens=cached_tokens
    )
    return pb2.GenerateResponse(request_id=request.request_id, complete=complete)


def _logprobs_to_pb(logprobs: Sequence[Sampled]) -> pb2.OutputLogProbs:
    return pb2.OutputLogProbs(
        token_ids=[sampled.token_id for sampled in logprobs],
        token_logprobs=[sampled.logprob or 0.0 for sampled in logprobs],
        top_logprobs=[
            pb2.TopLogProbs(
                token_ids=[token_id for token_id, _ in sampled.top], values=[value for _, value in sampled.top]
            )
            for sampled in logprobs
        ],
    )
