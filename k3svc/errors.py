"""The exceptions of k3svc, one tree. `rpc/status.py` alone maps them to gRPC codes.

    K3svcError
    ├── InvalidRequest        the caller's mistake, names field, value and allowed range   INVALID_ARGUMENT
    ├── ConfigError           a configuration value or file cannot be used                 (start-up)
    ├── CheckpointError       a checkpoint or tokenizer file cannot be used                (start-up)
    ├── BackendError          a device, kernel or package is missing                       (start-up)
    ├── Unauthenticated       the caller shows no key, or none that is known               UNAUTHENTICATED
    ├── PermissionDenied      the caller's key does not allow this call                    PERMISSION_DENIED
    ├── AlreadyExists         a live request has this id                                   ALREADY_EXISTS
    ├── NotFound              no such request                                              NOT_FOUND
    ├── ResourceExhausted     a bounded queue or pool is full; carries a retry delay       RESOURCE_EXHAUSTED
    ├── Incompatible          peers differ in model, layout, dtype or protocol             FAILED_PRECONDITION
    ├── Superseded            a newer attempt of the request exists                        ABORTED
    ├── Cancelled             the caller or an Abort ended the request                     CANCELLED
    ├── DeadlineExceeded      the request's deadline passed                                DEADLINE_EXCEEDED
    ├── TransferError         a hand-off is corrupt, incomplete or broken                  DATA_LOSS
    ├── Unavailable           the service drains, or its peer cannot be reached            UNAVAILABLE
    └── EngineFault           a step failed; the fault is ours                             INTERNAL

`reason` is a stable UPPER_SNAKE word that machines match (ErrorInfo.reason); `metadata` are short strings for the
same message.
"""


class K3svcError(Exception):
    """Base of all errors that k3svc raises on purpose."""

    reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidRequest(K3svcError):
    """A field of a request is out of its range."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, given: object, allowed: str) -> None:
        shown = repr(given)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field}: got {shown}; allowed: {allowed}", field=field, given=shown, allowed=allowed)
        self.field = field


class ConfigError(K3svcError):
    reason = "BAD_CONFIG"


class CheckpointError(K3svcError):
    reason = "BAD_CHECKPOINT"


class BackendError(K3svcError):
    reason = "BACKEND_MISSING"


class Unauthenticated(K3svcError):
    reason = "BAD_TOKEN"


class PermissionDenied(K3svcError):
    reason = "NOT_ALLOWED"


class AlreadyExists(K3svcError):
    reason = "DUPLICATE_REQUEST_ID"


class NotFound(K3svcError):
    reason = "UNKNOWN_REQUEST"


class ResourceExhausted(K3svcError):
    """A bound was reached. `retry_after_s` is the service's own estimate."""

    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, retry_after_s: float, reason: str | None = None, **metadata: object) -> None:
        super().__init__(message, reason=reason, **metadata)
        self.retry_after_s = retry_after_s


class Incompatible(K3svcError):
    reason = "FINGERPRINT_MISMATCH"


class Superseded(K3svcError):
    reason = "SUPERSEDED_ATTEMPT"


class Cancelled(K3svcError):
    reason = "CANCELLED"


class DeadlineExceeded(K3svcError):
    reason = "DEADLINE"


class TransferError(K3svcError):
    reason = "HANDOFF_CORRUPT"


class Unavailable(K3svcError):
    """Try again later, or elsewhere. `retry_after_s` None: at once, elsewhere."""

    reason = "UNAVAILABLE"

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, reason: str | None = None, **metadata: object
    ) -> None:
        super().__init__(message, reason=reason, **metadata)
        self.retry_after_s = retry_after_s


class EngineFault(K3svcError):
    reason = "STEP_FAILED"
