"""Messages of k3svc.v1 to the values of core, engine and transfer, and back, as the services need them.

A request that cannot be turned into a value raises InvalidRequest with the path of the proto field; a message of a peer
that cannot raises TransferError. Ranges are the business of the values themselves and of the engines.
"""

import dataclasses
import secrets
import uuid
from collections.abc import Sequence
from typing import Any

from k3svc.core.batch import Sampled
from k3svc.core.events import Delta, Finished, Load
from k3svc.core.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StopParams,
)
from k3svc.engine.decode import TextOptions
from k3svc.engine.ports import Fingerprint, PrefillCall
from k3svc.errors import InvalidRequest, TransferError
from k3svc.text.chat import ChatMessage, ToolCall, encode_chat
from k3svc.text.tokenizer import Tokenizer
from k3svc.text.xtml import parse_json
from k3svc.transfer.manifest import DTYPE_BYTES, PrefillDone, StateManifest, TensorKind, TensorSpec
from k3svc.v1 import admin_service_pb2, decode_service_pb2, prefill_service_pb2, types_pb2

MAX_TENSOR_DIMS = 8
MAX_TEXT_BYTES_PER_TOKEN = 16
"""A prompt with more bytes for each token of the context is refused before it is encoded."""
MAX_CHAT_PARTS = 4096
"""Messages and tool calls of a conversation."""

_FINISH_TO_PB = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
}


def generate_request_from_pb(pb: decode_service_pb2.GenerateRequest, tokenizer: Tokenizer) -> GenerateRequest:
    """Tokenises text and chat; draws request_id and seed when the request has none. Blocks for long texts."""
    if pb.skip_text and pb.stop.stop:
        raise InvalidRequest("stop.stop", list(pb.stop.stop), "no stop strings together with skip_text")
    return GenerateRequest(
        request_id=pb.request_id or uuid.uuid4().hex,
        prompt=tuple(_prompt_from_pb(pb, tokenizer)),
        sampling=_sampling_from_pb(pb.sampling),
        stop=_stop_from_pb(pb.stop),
        n=pb.sampling.n if pb.sampling.HasField("n") else 1,
        generated=tuple(pb.generated_token_ids.ids),
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        priority=pb.priority,
    )


def check_size(pb: decode_service_pb2.GenerateRequest, max_context_tokens: int) -> None:
    """Raises InvalidRequest for a request that cannot fit, before anything is made of it."""
    num_parts = len(pb.chat.messages) + sum(len(message.tool_calls) for message in pb.chat.messages)
    if num_parts > MAX_CHAT_PARTS:
        raise InvalidRequest("chat.messages", f"{num_parts} messages and tool calls", f"at most {MAX_CHAT_PARTS}")
    kind = pb.WhichOneof("prompt")
    if kind == "tokens":
        check_num_tokens("tokens", len(pb.tokens.ids), max_context_tokens)
    elif kind is not None:
        num_bytes = len(pb.text.encode()) if kind == "text" else pb.chat.ByteSize()
        limit = MAX_TEXT_BYTES_PER_TOKEN * max_context_tokens
        if num_bytes > limit:
            raise InvalidRequest(kind, f"{num_bytes} bytes", f"at most {limit} bytes on this service")
    check_num_tokens("generated_token_ids", len(pb.generated_token_ids.ids), max_context_tokens)
    for name, count, most in (
        ("sampling.logit_bias", len(pb.sampling.logit_bias), MAX_LOGIT_BIAS),
        ("stop.stop_token_ids", len(pb.stop.stop_token_ids), MAX_STOP_TOKEN_IDS),
        ("stop.stop", len(pb.stop.stop), MAX_STOP_STRINGS),
    ):
        if count > most:
            raise InvalidRequest(name, f"{count} entries", f"at most {most}")


def check_num_tokens(name: str, count: int, max_context_tokens: int) -> None:
    """Raises InvalidRequest for tokens that leave no room for one of output."""
    if count >= max_context_tokens:
        raise InvalidRequest(name, f"{count} tokens", f"at most {max_context_tokens - 1} on this service")


def text_options_from_pb(pb: decode_service_pb2.GenerateRequest) -> TextOptions:
    return TextOptions(enabled=not pb.skip_text, include_control=pb.include_control_text)


def _prompt_from_pb(pb: decode_service_pb2.GenerateRequest, tokenizer: Tokenizer) -> Sequence[int]:
    kind = pb.WhichOneof("prompt")
    if kind == "tokens":
        return pb.tokens.ids
    if kind == "text":
        return tokenizer.encode(pb.text)
    if kind == "chat":
        return _chat_from_pb(pb.chat, tokenizer)
    raise InvalidRequest("prompt", "nothing", "one of tokens, text and chat")


def _chat_from_pb(pb: decode_service_pb2.Chat, tokenizer: Tokenizer) -> list[int]:
    try:
        return encode_chat(
            tokenizer,
            [_message_from_pb(message) for message in pb.messages],
            tools=_tools_from_json(pb.tools_json),
            thinking=pb.thinking,
            thinking_effort=pb.thinking_effort or None,
        )
    except InvalidRequest as error:
        # The text layer names its own arguments; the caller knows the fields of Chat.
        path = "chat.tools_json" if error.field == "tools" else f"chat.{error.field}"
        error.message = path + error.message.removeprefix(error.field)
        error.args, error.field, error.metadata["field"] = (error.message,), path, path
        raise
    except RecursionError as error:
        raise InvalidRequest("chat", "deeply nested JSON", "tools and arguments of moderate depth") from error


def _message_from_pb(pb: decode_service_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=pb.role,
        content=pb.content,
        name=pb.name,
        reasoning=pb.reasoning,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json) for call in pb.tool_calls
        ),
        tool_call_id=pb.tool_call_id,
    )


def _tools_from_json(text: str) -> list[dict[str, Any]]:
    if not text:
        return []
    try:
        tools = parse_json(text)
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools", text, "a JSON array of objects")
    return tools


def _sampling_from_pb(pb: types_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=pb.temperature if pb.HasField("temperature") else 1.0,
        top_k=pb.top_k,
        top_p=pb.top_p if pb.HasField("top_p") else 1.0,
        min_p=pb.min_p,
        repetition_penalty=pb.repetition_penalty if pb.HasField("repetition_penalty") else 1.0,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        logit_bias=dict(pb.logit_bias),
        seed=pb.seed if pb.HasField("seed") else secrets.randbits(64),
    )


def _stop_from_pb(pb: types_pb2.StopParams) -> StopParams:
    return StopParams(
        max_tokens=pb.max_tokens if pb.HasField("max_tokens") else None,
        min_tokens=pb.min_tokens,
        stop=tuple(pb.stop),
        stop_token_ids=frozenset(pb.stop_token_ids),
        ignore_eos=pb.ignore_eos,
    )


def started_to_pb(request: GenerateRequest, fingerprint: Fingerprint) -> decode_service_pb2.GenerateResponse:
    started = decode_service_pb2.GenerateStarted(
        request_id=request.request_id,
        seed=request.sampling.seed,
        prompt=types_pb2.TokenIds(ids=request.prompt),
        fingerprint=fingerprint_to_pb(fingerprint),
    )
    return decode_service_pb2.GenerateResponse(started=started)


def event_to_pb(event: Delta | Finished) -> decode_service_pb2.GenerateResponse:
    if isinstance(event, Delta):
        return decode_service_pb2.GenerateResponse(delta=_delta_to_pb(event))
    finished = decode_service_pb2.GenerateFinished(
        usage=types_pb2.Usage(**dataclasses.asdict(event.usage)),
        timings=decode_service_pb2.Timings(**dataclasses.asdict(event.timings)),
        speculation=decode_service_pb2.SpeculationStats(**dataclasses.asdict(event.speculation)),
    )
    return decode_service_pb2.GenerateResponse(finished=finished)


def _delta_to_pb(delta: Delta) -> decode_service_pb2.GenerateDelta:
    return decode_service_pb2.GenerateDelta(
        index=delta.index,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[_logprobs_to_pb(sampled) for sampled in delta.logprobs],
        finish_reason=None if delta.finish_reason is None else _FINISH_TO_PB[delta.finish_reason],
        stopped_by=delta.stopped_by,
    )


def _logprobs_to_pb(sampled: Sampled) -> decode_service_pb2.TokenLogprobs:
    return decode_service_pb2.TokenLogprobs(
        chosen=decode_service_pb2.Logprob(token_id=sampled.token_id, logprob=sampled.logprob),
        top=[decode_service_pb2.Logprob(token_id=token_id, logprob=value) for token_id, value in sampled.top],
    )


def fingerprint_to_pb(fingerprint: Fingerprint) -> types_pb2.Fingerprint:
    return types_pb2.Fingerprint(**dataclasses.asdict(fingerprint))


def fingerprint_from_pb(pb: types_pb2.Fingerprint) -> Fingerprint:
    return Fingerprint(
        protocol=pb.protocol,
        model=pb.model,
        tokenizer=pb.tokenizer,
        wire_layout=pb.wire_layout,
        variant=pb.variant,
    )


def prefill_call_to_pb(call: PrefillCall) -> prefill_service_pb2.PrefillRequest:
    return prefill_service_pb2.PrefillRequest(
        request_id=call.request_id,
        attempt=call.attempt,
        prompt=types_pb2.TokenIds(ids=call.prompt),
        fingerprint=fingerprint_to_pb(call.fingerprint),
        next_sequence=call.next_sequence,
        priority=call.priority,
        remaining_ms=None if call.remaining_s is None else max(0, round(call.remaining_s * 1e3)),
        room=call.room,
        draft_ticket=call.draft_ticket,
        tenant=call.tenant,
    )


def prefill_call_from_pb(pb: prefill_service_pb2.PrefillRequest) -> PrefillCall:
    return PrefillCall(
        request_id=pb.request_id,
        attempt=pb.attempt,
        prompt=tuple(pb.prompt.ids),
        fingerprint=fingerprint_from_pb(pb.fingerprint),
        next_sequence=pb.next_sequence,
        priority=pb.priority,
        remaining_s=pb.remaining_ms * 1e-3 if pb.HasField("remaining_ms") else None,
        room=pb.room if pb.HasField("room") else None,
        draft_ticket=pb.draft_ticket,
        tenant=pb.tenant,
    )


def manifest_to_pb(
    manifest: StateManifest, *, uses_shm: bool = False, state_port: int = 0, uses_read: bool = False
) -> prefill_service_pb2.StateManifest:
    return prefill_service_pb2.StateManifest(
        request_id=manifest.request_id,
        attempt=manifest.attempt,
        num_tokens=manifest.num_tokens,
        tensors=[
            prefill_service_pb2.TensorSpec(
                kind=spec.kind.value,  # type: ignore[arg-type]
                layer=spec.layer,
                dtype=spec.dtype,
                shape=spec.shape,
            )
            for spec in manifest.tensors
        ],
        total_bytes=manifest.total_bytes,
        uses_shm=uses_shm,
        state_port=state_port,
        uses_read=uses_read,
    )


def manifest_from_pb(pb: prefill_service_pb2.StateManifest) -> StateManifest:
    """Raises TransferError for a tensor of unknown kind, dtype or rank, and for a sum of bytes that does not hold."""
    manifest = StateManifest(
        request_id=pb.request_id,
        attempt=pb.attempt,
        num_tokens=pb.num_tokens,
        tensors=tuple(_tensor_from_pb(index, spec) for index, spec in enumerate(pb.tensors)),
    )
    if manifest.total_bytes != pb.total_bytes:
        raise TransferError(
            f"manifest of {manifest.request_id}: its tensors have {manifest.total_bytes} bytes, "
            f"total_bytes says {pb.total_bytes}"
        )
    return manifest


def _tensor_from_pb(index: int, pb: prefill_service_pb2.TensorSpec) -> TensorSpec:
    kinds = {kind.value: kind for kind in TensorKind}
    if pb.kind not in kinds or pb.dtype not in DTYPE_BYTES or len(pb.shape) > MAX_TENSOR_DIMS:
        raise TransferError(
            f"manifest: tensors[{index}] has kind {pb.kind}, dtype {pb.dtype[:20]!r} and {len(pb.shape)} dimensions; "
            f"allowed: kinds {list(kinds)}, dtypes {list(DTYPE_BYTES)}, at most {MAX_TENSOR_DIMS} dimensions"
        )
    return TensorSpec(kind=kinds[pb.kind], layer=pb.layer, dtype=pb.dtype, shape=tuple(pb.shape))


def done_to_pb(done: PrefillDone) -> prefill_service_pb2.PrefillDone:
    return prefill_service_pb2.PrefillDone(**dataclasses.asdict(done))


def done_from_pb(pb: prefill_service_pb2.PrefillDone) -> PrefillDone:
    return PrefillDone(
        num_frames=pb.num_frames,
        queue_ms=pb.queue_ms,
        compute_ms=pb.compute_ms,
        send_tail_ms=pb.send_tail_ms,
        chunks=pb.chunks,
        cached_tokens=pb.cached_tokens,
    )


def load_to_pb(load: Load, *, resident_bytes: int, pool_bytes: int) -> admin_service_pb2.GetLoadResponse:
    return admin_service_pb2.GetLoadResponse(
        **dataclasses.asdict(load), resident_bytes=resident_bytes, pool_bytes=pool_bytes
    )
