from k3svc.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("role", "version", "fingerprint", "model_name", "vocab_size", "max_context_tokens", "device", "stop_token_ids")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    role: str
    version: str
    fingerprint: _types_pb2.Fingerprint
    model_name: str
    vocab_size: int
    max_context_tokens: int
    device: str
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, role: _Optional[str] = ..., version: _Optional[str] = ..., fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., model_name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., device: _Optional[str] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running", "waiting", "in_transfer", "free_pages", "total_pages", "free_slots", "total_slots", "draining", "num_tokens", "outcomes", "handoff_bytes", "resident_bytes", "pool_bytes", "preemptions", "draft_steps", "accepted_drafts", "drafter", "speculation_rests", "prefix_pages", "prefix_snapshots", "prefix_queried_tokens", "prefix_hit_tokens", "prefix_evicted_pages", "prefix_evicted_snapshots", "queued_tokens", "prefill_targets", "drafter_health")
    class OutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    IN_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_RESTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_EVICTED_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TARGETS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_HEALTH_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    in_transfer: int
    free_pages: int
    total_pages: int
    free_slots: int
    total_slots: int
    draining: bool
    num_tokens: int
    outcomes: _containers.ScalarMap[str, int]
    handoff_bytes: int
    resident_bytes: int
    pool_bytes: int
    preemptions: int
    draft_steps: int
    accepted_drafts: int
    drafter: str
    speculation_rests: bool
    prefix_pages: int
    prefix_snapshots: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    prefix_evicted_pages: int
    prefix_evicted_snapshots: int
    queued_tokens: int
    prefill_targets: _containers.RepeatedCompositeFieldContainer[PrefillTarget]
    drafter_health: str
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., in_transfer: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., free_slots: _Optional[int] = ..., total_slots: _Optional[int] = ..., draining: _Optional[bool] = ..., num_tokens: _Optional[int] = ..., outcomes: _Optional[_Mapping[str, int]] = ..., handoff_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., preemptions: _Optional[int] = ..., draft_steps: _Optional[int] = ..., accepted_drafts: _Optional[int] = ..., drafter: _Optional[str] = ..., speculation_rests: _Optional[bool] = ..., prefix_pages: _Optional[int] = ..., prefix_snapshots: _Optional[int] = ..., prefix_queried_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., prefix_evicted_pages: _Optional[int] = ..., prefix_evicted_snapshots: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., prefill_targets: _Optional[_Iterable[_Union[PrefillTarget, _Mapping]]] = ..., drafter_health: _Optional[str] = ...) -> None: ...

class PrefillTarget(_message.Message):
    __slots__ = ("address", "state", "chosen", "queued_tokens")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: str
    chosen: int
    queued_tokens: int
    def __init__(self, address: _Optional[str] = ..., state: _Optional[str] = ..., chosen: _Optional[int] = ..., queued_tokens: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
