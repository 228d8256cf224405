"""Errors through a gRPC status and back: the same class, message, reason, metadata and delay."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from k3svc.errors import (
    AlreadyExists,
    BackendError,
    Cancelled,
    CheckpointError,
    ConfigError,
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
from k3svc.rpc.status import DETAILS_KEY, code_of, error_from_rpc, status_of, unreachable

ERRORS = {
    "INVALID_ARGUMENT": InvalidRequest("sampling.top_p", 3.5, "a number in (0, 1]"),
    "ALREADY_EXISTS": AlreadyExists("request 'r' is live"),
    "UNAUTHENTICATED": Unauthenticated("no such token"),
    "PERMISSION_DENIED": PermissionDenied("not an admin", key="k"),
    "NOT_FOUND": NotFound("no request 'r'"),
    "RESOURCE_EXHAUSTED": ResourceExhausted("256 requests wait", retry_after_s=1.25, waiting=256),
    "FAILED_PRECONDITION": Incompatible("model differs", field="model"),
    "ABORTED": Superseded("attempt 2 exists"),
    "CANCELLED": Cancelled("aborted"),
    "DEADLINE_EXCEEDED": DeadlineExceeded("deadline passed in the queue", stage="queue"),
    "DATA_LOSS": TransferError("frame 3 fails its CRC32C", reason="HANDOFF_CRC"),
    "UNAVAILABLE": Unavailable("draining", reason="DRAINING", retry_after_s=0.5),
    "INTERNAL": EngineFault("step failed"),
}


def as_rpc_error(status: grpc.Status) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details)


def bare(code: grpc.StatusCode, **trailing: bytes) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*((key.replace("_", "-"), value) for key, value in trailing.items()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, "said the transport")


@pytest.mark.parametrize("code", list(ERRORS))
def test_every_error_returns_as_itself(code: str):
    error = ERRORS[code]
    status = status_of(error)
    assert status.code.name == code
    back = error_from_rpc(as_rpc_error(status))
    assert type(back) is type(error)
    assert vars(back) == {**vars(error), "reason": error.reason}
    assert str(back) == str(error)


def test_every_error_class_of_a_request_has_a_code_of_its_own():
    start_up = {ConfigError, CheckpointError, BackendError}
    classes = set(K3svcError.__subclasses__()) - start_up
    assert classes == {type(error) for error in ERRORS.values()}
    assert len({code_of(error) for error in ERRORS.values()}) == len(classes)
    assert code_of(ConfigError("x")) is grpc.StatusCode.INTERNAL


def test_details_on_the_wire():
    status = status_of(ERRORS["INVALID_ARGUMENT"], request_id="r-9")
    ((key, value),) = status.trailing_metadata
    assert key == DETAILS_KEY
    packed = status_pb2.Status.FromString(value)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert packed.code == 3
    assert packed.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_FIELD", "k3svc")
    assert info.metadata == {
        "field": "sampling.top_p",
        "given": "3.5",
        "allowed": "a number in (0, 1]",
        "request_id": "r-9",
    }
    assert packed.details[1].Unpack(bad)
    assert [v.field for v in bad.field_violations] == ["sampling.top_p"]

    packed = status_pb2.Status.FromString(status_of(ERRORS["RESOURCE_EXHAUSTED"]).trailing_metadata[0][1])
    retry = error_details_pb2.RetryInfo()
    assert packed.details[1].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 1.25


def test_a_long_message_fits_into_trailers():
    status = status_of(InvalidRequest("prompt", "x", "é" * 5000))
    assert len(status.details.encode()) <= 1024
    assert status.details.endswith("...")


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Incompatible),
        (grpc.StatusCode.UNIMPLEMENTED, Incompatible),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDenied),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.UNKNOWN, EngineFault),
        (grpc.StatusCode.INTERNAL, EngineFault),
    ],
)
def test_bare_codes_have_a_class(code: grpc.StatusCode, cls: type[K3svcError]):
    error = error_from_rpc(bare(code))
    assert type(error) is cls
    assert error.reason == code.name
    assert error.message == "said the transport"


def test_unreadable_and_hostile_details():
    garbage = error_from_rpc(bare(grpc.StatusCode.UNAVAILABLE, grpc_status_details_bin=b"\xff\xff\xff"))
    assert type(garbage) is Unavailable
    status = status_pb2.Status(code=9)
    keys = {"message": "m", "reason": "r", "self": "s"}
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="X", domain="k3svc", metadata=keys))
    error = error_from_rpc(
        bare(grpc.StatusCode.FAILED_PRECONDITION, grpc_status_details_bin=status.SerializeToString())
    )
    assert type(error) is Incompatible
    assert (error.reason, error.metadata) == ("X", keys)


async def no_grpc(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


async def test_a_server_of_another_protocol_is_called_one():
    server = await asyncio.start_server(no_grpc, "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, grpc.aio.insecure_channel(target) as channel:
        call: Any = channel.unary_unary("/k3svc.v1.DecodeService/GetModelInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    assert (unreachable(caught.value, target) or "").startswith(f"what listens at {target} does not speak gRPC: ")


def test_a_removed_stream_is_what_its_cause_is():
    def rpc(code: grpc.StatusCode, message: str) -> grpc.aio.AioRpcError:
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), message)

    target = "127.0.0.1:1"
    assert "does not speak gRPC" in (unreachable(rpc(grpc.StatusCode.UNKNOWN, "Stream removed"), target) or "")
    too_large = rpc(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Stream removed (CLIENT: Received message larger than max (5064 vs. 500))",
    )
    assert unreachable(too_large, target) is None
    assert type(error_from_rpc(too_large)) is Incompatible


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("errors resolving nosuch.invalid:1: [address lookup failed]", "here cannot be reached: errors resolving"),
        ("failed to connect to all addresses; last error: Connection refused", "nothing listens at here"),
    ],
)
def test_an_address_that_leads_nowhere_is_told_as_such(words: str, told: str):
    nobody = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=words)
    assert (unreachable(nobody, "here") or "").startswith(told)


def test_a_server_of_plain_http2_does_not_speak_grpc():
    words = "Stream removed (Data frame with END_STREAM flag received)"
    other = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata(), details=words)
    assert (unreachable(other, "here") or "").startswith("what listens at here does not speak gRPC: ")
