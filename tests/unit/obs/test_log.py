"""What a log line says."""

import asyncio
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from k3svc.obs.log import (
    JsonFormatter,
    TextFormatter,
    bind_request_id,
    configure_logging,
    current_request_id,
)


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("k3svc.x").makeRecord(
        "k3svc.x", logging.WARNING, "f.py", 1, message, args, None, extra=extra
    )


def test_a_json_line_has_message_and_fields():
    made = record("sent %d frames", 3, peer="127.0.0.1:1", error=ValueError("x"))
    made.created = 1.5
    fields = json.loads(JsonFormatter().format(made))
    assert fields == {
        "ts": "1970-01-01T00:00:01.500+00:00",
        "level": "warning",
        "logger": "k3svc.x",
        "message": "sent 3 frames",
        "peer": "127.0.0.1:1",
        "error": "x",
    }


def test_a_text_line_quotes_what_would_be_ambiguous():
    made = record("two words", a="plain", b='say "hi"', c="x=y", d="line\nbreak", e="", f=7)
    made.created = 0.0
    assert TextFormatter().format(made) == (
        'ts=1970-01-01T00:00:00.000+00:00 level=warning logger=k3svc.x message="two words" a=plain '
        'b="say \\"hi\\"" c="x=y" d="line\\nbreak" e="" f=7'
    )


def test_an_exception_comes_with_its_traceback():
    try:
        _ = 1 // 0
    except ZeroDivisionError:
        made = logging.getLogger("k3svc.x").makeRecord("x", logging.ERROR, "f", 1, "broken", (), sys.exc_info())
    fields = json.loads(JsonFormatter().format(made))
    assert fields["exception"].startswith("Traceback")
    assert "ZeroDivisionError: integer division" in fields["exception"]


async def test_each_task_has_its_own_request_id():
    async def call(name: str) -> str:
        bind_request_id(name)
        await asyncio.sleep(0)
        assert current_request_id() == name
        made: str = json.loads(JsonFormatter().format(record("x")))["request_id"]
        return made

    assert list(await asyncio.gather(call("a"), call("b"))) == ["a", "b"]
    assert current_request_id() == ""
    assert "request_id" not in json.loads(JsonFormatter().format(record("x")))


@pytest.fixture
def root_as_found() -> Iterator[None]:
    root = logging.getLogger()
    found = root.handlers[:], root.level
    yield
    root.handlers[:], level = found
    root.setLevel(level)
    for name in ("k3svc", "services"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.usefixtures("root_as_found")
def test_levels_hold_for_our_loggers_and_libraries_are_quiet(capsys: pytest.CaptureFixture[str]):
    configure_logging(level="info", as_json=True)
    logging.getLogger("k3svc.engine").debug("too much")
    logging.getLogger("services.decode").info("ours")
    logging.getLogger("grpc").info("not ours")
    logging.getLogger("grpc").warning("a warning")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(line)["message"] for line in captured.err.splitlines()] == ["ours", "a warning"]
