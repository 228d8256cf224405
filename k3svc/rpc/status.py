"""The one table between the exceptions of k3svc and gRPC statuses, in both directions.

A status carries a google.rpc.Status in `grpc-status-details-bin`: ErrorInfo (reason, domain "k3svc", metadata) always,
BadRequest for InvalidRequest, RetryInfo where a delay is known. A peer that is no k3svc, or the transport itself, sends
a bare code; `error_from_rpc` maps those too.
"""

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from k3svc.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    Incompatible,
    InvalidRequest,
    K3svcError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Superseded,
    TransferError,
    Unauthenticated,
    Unavailable,
)

DOMAIN = "k3svc"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 1024
"""A status travels in HTTP/2 trailers, of which peers accept 8 KiB in all; the message is in there three times."""
CONNECT_FAILURES = ("failed to connect", "DNS resolution failed", "errors resolving")
"""How gRPC begins what it says of an address that it cannot reach."""
OTHER_PROTOCOL = (
    "Failed parsing HTTP/2",
    "Trying to connect an http1.x server",
    "Data frame with END_STREAM flag received",
)
"""What gRPC says of a server that speaks something else."""
STREAM_REMOVED = "Stream removed"
"""What it says of such a server, too. Where a cause follows, as of a message beyond the size limit, that one counts."""
CALL_LIMIT_MESSAGE = "Concurrent RPC limit exceeded!"
"""What gRPC says when a server has all the calls that it may have; it gives no delay."""
CALL_LIMIT_RETRY_S = 1.0

_CODES: Mapping[type[K3svcError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    NotFound: grpc.StatusCode.NOT_FOUND,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Incompatible: grpc.StatusCode.FAILED_PRECONDITION,
    Superseded: grpc.StatusCode.ABORTED,
    Cancelled: grpc.StatusCode.CANCELLED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    TransferError: grpc.StatusCode.DATA_LOSS,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    EngineFault: grpc.StatusCode.INTERNAL,
}
_CLASSES = {code: cls for cls, code in _CODES.items()}

# Codes that k3svc never sends: what they mean when gRPC itself, or a server that is no k3svc, gives them.
_FOREIGN: Mapping[grpc.StatusCode, type[K3svcError]] = {
    grpc.StatusCode.UNIMPLEMENTED: Incompatible,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Incompatible,  # a message beyond the size limit of either side
}


def code_of(error: K3svcError) -> grpc.StatusCode:
    """INTERNAL for the errors of start-up, which no request should meet."""
    return _CODES.get(type(error), grpc.StatusCode.INTERNAL)


def status_of(error: K3svcError, *, request_id: str = "") -> grpc.Status:
    """Code, message and trailing metadata that `error_from_rpc` turns back into the same error."""
    metadata = {**error.metadata, "request_id": request_id} if request_id else error.metadata
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    message = _shortened(error.message)
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhausted | Unavailable) and error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code_of(error).value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    result: grpc.Status = rpc_status.to_status(status)
    return result


def error_from_rpc(rpc: grpc.aio.AioRpcError) -> K3svcError:
    """The error that the server raised, or the one that fits a bare status of gRPC."""
    code, message = rpc.code(), rpc.details() or "no details"
    details = _details(rpc)
    info = details.get(error_details_pb2.ErrorInfo)
    if info is None or info.domain != DOMAIN:
        if message == CALL_LIMIT_MESSAGE:
            return ResourceExhausted(message, retry_after_s=CALL_LIMIT_RETRY_S, reason="TOO_MANY_CALLS")
        cls = _FOREIGN.get(code) or _CLASSES.get(code, EngineFault)
        return _build(cls, message, code.name, {}, None)
    retry = details.get(error_details_pb2.RetryInfo)
    retry_after_s = None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9
    return _build(_CLASSES.get(code, EngineFault), message, info.reason, dict(info.metadata), retry_after_s)


def unreachable(rpc: grpc.aio.AioRpcError, target: str) -> str | None:
    """What to say of a call that found nobody at `target`; None: it came further. A service that could not reach
    another one says so with details, and was itself reached.
    """
    message = rpc.details() or ""
    speaks_other = message == STREAM_REMOVED or any(sign in message for sign in OTHER_PROTOCOL)
    if speaks_other and not _details(rpc):
        return f"what listens at {target} does not speak gRPC: {message}"
    if rpc.code() is not grpc.StatusCode.UNAVAILABLE or not message.startswith(CONNECT_FAILURES) or _details(rpc):
        return None
    if "Connection refused" in message:
        return f"nothing listens at {target}"
    return f"{target} cannot be reached: {message}"


def _details(rpc: grpc.aio.AioRpcError) -> dict[type[Message], Any]:
    """The details of a status by their type; empty when there are none or they cannot be read."""
    found: dict[type[Message], Any] = {}
    for key, value in rpc.trailing_metadata() or ():
        if key == DETAILS_KEY:
            try:
                packed = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
                for detail in packed.details:
                    for cls in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
                        message = cls()
                        if detail.Unpack(message):
                            found[cls] = message
            except DecodeError:
                return {}
    return found


def _build(
    cls: type[K3svcError], message: str, reason: str, metadata: dict[str, str], retry_after_s: float | None
) -> K3svcError:
    error: K3svcError
    if cls is InvalidRequest:
        error = InvalidRequest(metadata.get("field", ""), metadata.get("given", ""), metadata.get("allowed", ""))
    elif cls is ResourceExhausted:
        error = ResourceExhausted(message, retry_after_s=retry_after_s or 0.0)
    elif cls is Unavailable:
        error = Unavailable(message, retry_after_s=retry_after_s)
    else:
        error = cls(message)
    # What the peer said, word for word; its keys may be any, so they do not pass as keyword arguments.
    error.message, error.args, error.reason, error.metadata = message, (message,), reason, metadata
    return error


def _shortened(message: str) -> str:
    data = message.encode()
    return message if len(data) <= MAX_MESSAGE_BYTES else data[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
