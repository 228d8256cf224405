from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftProfile(_message.Message):
    __slots__ = ("protocol", "model", "tokenizer", "draft", "target_layers", "feature_width", "feature_dtype", "num_proposals", "anchor_predicts", "mask_token_id", "vocab_size", "window", "model_name", "draft_name")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    FEATURE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_PREDICTS_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NAME_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: str
    tokenizer: str
    draft: str
    target_layers: _containers.RepeatedScalarFieldContainer[int]
    feature_width: int
    feature_dtype: str
    num_proposals: int
    anchor_predicts: bool
    mask_token_id: int
    vocab_size: int
    window: int
    model_name: str
    draft_name: str
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[str] = ..., tokenizer: _Optional[str] = ..., draft: _Optional[str] = ..., target_layers: _Optional[_Iterable[int]] = ..., feature_width: _Optional[int] = ..., feature_dtype: _Optional[str] = ..., num_proposals: _Optional[int] = ..., anchor_predicts: _Optional[bool] = ..., mask_token_id: _Optional[int] = ..., vocab_size: _Optional[int] = ..., window: _Optional[int] = ..., model_name: _Optional[str] = ..., draft_name: _Optional[str] = ...) -> None: ...

class DraftHello(_message.Message):
    __slots__ = ("profile", "shm_name", "shm_token", "socket_name", "socket_token")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    SHM_NAME_FIELD_NUMBER: _ClassVar[int]
    SHM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SOCKET_NAME_FIELD_NUMBER: _ClassVar[int]
    SOCKET_TOKEN_FIELD_NUMBER: _ClassVar[int]
    profile: DraftProfile
    shm_name: str
    shm_token: bytes
    socket_name: str
    socket_token: bytes
    def __init__(self, profile: _Optional[_Union[DraftProfile, _Mapping]] = ..., shm_name: _Optional[str] = ..., shm_token: _Optional[bytes] = ..., socket_name: _Optional[str] = ..., socket_token: _Optional[bytes] = ...) -> None: ...

class DraftWelcome(_message.Message):
    __slots__ = ("profile", "max_requests", "context_rows", "uses_shm", "max_message_bytes", "uses_socket")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ROWS_FIELD_NUMBER: _ClassVar[int]
    USES_SHM_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USES_SOCKET_FIELD_NUMBER: _ClassVar[int]
    profile: DraftProfile
    max_requests: int
    context_rows: int
    uses_shm: bool
    max_message_bytes: int
    uses_socket: bool
    def __init__(self, profile: _Optional[_Union[DraftProfile, _Mapping]] = ..., max_requests: _Optional[int] = ..., context_rows: _Optional[int] = ..., uses_shm: _Optional[bool] = ..., max_message_bytes: _Optional[int] = ..., uses_socket: _Optional[bool] = ...) -> None: ...

class DraftOpens(_message.Message):
    __slots__ = ("handles", "attempts", "base_lens", "anchors", "wants", "tickets", "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "sample_indices", "with_probs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    ANCHORS_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    TOP_KS_FIELD_NUMBER: _ClassVar[int]
    TOP_PS_FIELD_NUMBER: _ClassVar[int]
    MIN_PS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDICES_FIELD_NUMBER: _ClassVar[int]
    WITH_PROBS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    anchors: _containers.RepeatedScalarFieldContainer[int]
    wants: _containers.RepeatedScalarFieldContainer[int]
    tickets: _containers.RepeatedScalarFieldContainer[str]
    temperatures: _containers.RepeatedScalarFieldContainer[float]
    top_ks: _containers.RepeatedScalarFieldContainer[int]
    top_ps: _containers.RepeatedScalarFieldContainer[float]
    min_ps: _containers.RepeatedScalarFieldContainer[float]
    seeds: _containers.RepeatedScalarFieldContainer[int]
    sample_indices: _containers.RepeatedScalarFieldContainer[int]
    with_probs: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., anchors: _Optional[_Iterable[int]] = ..., wants: _Optional[_Iterable[int]] = ..., tickets: _Optional[_Iterable[str]] = ..., temperatures: _Optional[_Iterable[float]] = ..., top_ks: _Optional[_Iterable[int]] = ..., top_ps: _Optional[_Iterable[float]] = ..., min_ps: _Optional[_Iterable[float]] = ..., seeds: _Optional[_Iterable[int]] = ..., sample_indices: _Optional[_Iterable[int]] = ..., with_probs: _Optional[_Iterable[bool]] = ...) -> None: ...

class DraftFeatures(_message.Message):
    __slots__ = ("handles", "attempts", "starts", "counts", "payload", "shm")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    payload: bytes
    shm: ShmPayload
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., payload: _Optional[bytes] = ..., shm: _Optional[_Union[ShmPayload, _Mapping]] = ...) -> None: ...

class ShmPayload(_message.Message):
    __slots__ = ("offset", "size", "sequence")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    size: int
    sequence: int
    def __init__(self, offset: _Optional[int] = ..., size: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class DraftCommits(_message.Message):
    __slots__ = ("handles", "attempts", "base_lens", "counts", "anchors", "wants")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ANCHORS_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    anchors: _containers.RepeatedScalarFieldContainer[int]
    wants: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., anchors: _Optional[_Iterable[int]] = ..., wants: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "step", "closes", "opens", "features", "commits", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: DraftHello
    step: int
    closes: _containers.RepeatedScalarFieldContainer[int]
    opens: DraftOpens
    features: DraftFeatures
    commits: DraftCommits
    ping: int
    def __init__(self, hello: _Optional[_Union[DraftHello, _Mapping]] = ..., step: _Optional[int] = ..., closes: _Optional[_Iterable[int]] = ..., opens: _Optional[_Union[DraftOpens, _Mapping]] = ..., features: _Optional[_Union[DraftFeatures, _Mapping]] = ..., commits: _Optional[_Union[DraftCommits, _Mapping]] = ..., ping: _Optional[int] = ...) -> None: ...

class DraftProposals(_message.Message):
    __slots__ = ("handles", "attempts", "base_lens", "counts", "tokens", "confidences", "truncated", "probs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    truncated: _containers.RepeatedScalarFieldContainer[bool]
    probs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ..., truncated: _Optional[_Iterable[bool]] = ..., probs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DraftGaps(_message.Message):
    __slots__ = ("handles", "attempts", "starts")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "step", "proposals", "draft_us", "gaps", "refused", "credits", "shm_read", "pong")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    SHM_READ_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    welcome: DraftWelcome
    step: int
    proposals: DraftProposals
    draft_us: int
    gaps: DraftGaps
    refused: _containers.RepeatedScalarFieldContainer[int]
    credits: int
    shm_read: int
    pong: int
    def __init__(self, welcome: _Optional[_Union[DraftWelcome, _Mapping]] = ..., step: _Optional[int] = ..., proposals: _Optional[_Union[DraftProposals, _Mapping]] = ..., draft_us: _Optional[int] = ..., gaps: _Optional[_Union[DraftGaps, _Mapping]] = ..., refused: _Optional[_Iterable[int]] = ..., credits: _Optional[int] = ..., shm_read: _Optional[int] = ..., pong: _Optional[int] = ...) -> None: ...

class PushContextRequest(_message.Message):
    __slots__ = ("start", "position", "payload")
    START_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    start: PushContextStart
    position: int
    payload: bytes
    def __init__(self, start: _Optional[_Union[PushContextStart, _Mapping]] = ..., position: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushContextStart(_message.Message):
    __slots__ = ("profile", "ticket", "attempt", "num_tokens")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    profile: DraftProfile
    ticket: str
    attempt: int
    num_tokens: int
    def __init__(self, profile: _Optional[_Union[DraftProfile, _Mapping]] = ..., ticket: _Optional[str] = ..., attempt: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PushContextResponse(_message.Message):
    __slots__ = ("num_rows",)
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    def __init__(self, num_rows: _Optional[int] = ...) -> None: ...
