"""Log records as lines on stderr, one JSON object or one row of key=value pairs each.

Modules log through `logging.getLogger(__name__)` and put fields into `extra`. The request that a record belongs to
comes from a context variable, which the RPC layer sets for the task of a call.
"""

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime, timezone
from types import MappingProxyType

MAX_SHOWN_ID_CHARS = 128

_request_id: ContextVar[str] = ContextVar("request_id", default="")
_fields_of_call: ContextVar[Mapping[str, object]] = ContextVar("fields_of_call", default=MappingProxyType({}))
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def bind_request_id(request_id: str, **fields: object) -> None:
    """Names the request that the current task works for, until the task ends, with further fields of its records. An id
    of any length may come from outside; what is kept of it fits a log line and a header.
    """
    _request_id.set(request_id[:MAX_SHOWN_ID_CHARS])
    if fields:
        _fields_of_call.set(MappingProxyType(fields))


def current_request_id() -> str:
    """Empty outside a call."""
    return _request_id.get()


def configure_logging(*, level: str, as_json: bool) -> None:
    """Sends all records to stderr: those of k3svc and services from `level` on, those of libraries from warning on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("k3svc", "services"):
        logging.getLogger(name).setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """One JSON object a record; values that JSON lacks become their text."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """key=value pairs; a value with blanks, quotes or line breaks is a JSON string."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{key}={_shown(value)}" for key, value in _fields(record).items())


def _shown(value: object) -> str:
    text = str(value)
    is_plain = text.isprintable() and not any(char in text for char in ' "=')
    return text if text and is_plain else json.dumps(text, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: dict[str, object] = {
        "ts": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    if request_id := _request_id.get():
        fields["request_id"] = request_id
        fields.update(_fields_of_call.get())
    fields.update((key, value) for key, value in vars(record).items() if key not in _PLAIN)
    if record.exc_info and record.exc_info[0] is not None:
        fields["exception"] = "".join(traceback.format_exception(*record.exc_info))
    return fields
