from k3svc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_KIND_UNSPECIFIED: _ClassVar[TensorKind]
    TENSOR_KIND_KDA_STATE: _ClassVar[TensorKind]
    TENSOR_KIND_CONV_STATE: _ClassVar[TensorKind]
    TENSOR_KIND_MLA_ROWS: _ClassVar[TensorKind]
    TENSOR_KIND_LOGITS: _ClassVar[TensorKind]
TENSOR_KIND_UNSPECIFIED: TensorKind
TENSOR_KIND_KDA_STATE: TensorKind
TENSOR_KIND_CONV_STATE: TensorKind
TENSOR_KIND_MLA_ROWS: TensorKind
TENSOR_KIND_LOGITS: TensorKind

class ReadRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("frames", "done")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    frames: StateFrames
    done: PrefillDone
    def __init__(self, frames: _Optional[_Union[StateFrames, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt", "fingerprint", "next_sequence", "priority", "remaining_ms", "room", "draft_ticket", "shm", "tenant", "read_ticket")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TICKET_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    READ_TICKET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt: _types_pb2.TokenIds
    fingerprint: _types_pb2.Fingerprint
    next_sequence: int
    priority: int
    remaining_ms: int
    room: int
    draft_ticket: str
    shm: ShmObject
    tenant: str
    read_ticket: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., next_sequence: _Optional[int] = ..., priority: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., room: _Optional[int] = ..., draft_ticket: _Optional[str] = ..., shm: _Optional[_Union[ShmObject, _Mapping]] = ..., tenant: _Optional[str] = ..., read_ticket: _Optional[bytes] = ...) -> None: ...

class ShmObject(_message.Message):
    __slots__ = ("name", "token", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    token: bytes
    size: int
    def __init__(self, name: _Optional[str] = ..., token: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("kind", "layer", "dtype", "shape")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    kind: TensorKind
    layer: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Union[TensorKind, str]] = ..., layer: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class StateManifest(_message.Message):
    __slots__ = ("request_id", "attempt", "num_tokens", "tensors", "total_bytes", "uses_shm", "state_port", "uses_read")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    USES_SHM_FIELD_NUMBER: _ClassVar[int]
    STATE_PORT_FIELD_NUMBER: _ClassVar[int]
    USES_READ_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    num_tokens: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    total_bytes: int
    uses_shm: bool
    state_port: int
    uses_read: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., total_bytes: _Optional[int] = ..., uses_shm: _Optional[bool] = ..., state_port: _Optional[int] = ..., uses_read: _Optional[bool] = ...) -> None: ...

class StateFrame(_message.Message):
    __slots__ = ("sequence", "tensor", "offset", "crc32c", "data", "shm_bytes", "shm_position")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHM_POSITION_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    tensor: int
    offset: int
    crc32c: int
    data: bytes
    shm_bytes: int
    shm_position: int
    def __init__(self, sequence: _Optional[int] = ..., tensor: _Optional[int] = ..., offset: _Optional[int] = ..., crc32c: _Optional[int] = ..., data: _Optional[bytes] = ..., shm_bytes: _Optional[int] = ..., shm_position: _Optional[int] = ...) -> None: ...

class StateFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[StateFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[StateFrame, _Mapping]]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("num_frames", "queue_ms", "compute_ms", "send_tail_ms", "chunks", "cached_tokens")
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    SEND_TAIL_MS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_frames: int
    queue_ms: float
    compute_ms: float
    send_tail_ms: float
    chunks: int
    cached_tokens: int
    def __init__(self, num_frames: _Optional[int] = ..., queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., send_tail_ms: _Optional[float] = ..., chunks: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("manifest", "frames", "done")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    manifest: StateManifest
    frames: StateFrames
    done: PrefillDone
    def __init__(self, manifest: _Optional[_Union[StateManifest, _Mapping]] = ..., frames: _Optional[_Union[StateFrames, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("was_held",)
    WAS_HELD_FIELD_NUMBER: _ClassVar[int]
    was_held: bool
    def __init__(self, was_held: _Optional[bool] = ...) -> None: ...
