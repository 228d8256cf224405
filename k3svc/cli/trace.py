"""`k3svc trace`: the time line of one request from the spans that services have written."""

import json
from pathlib import Path
from typing import Annotated

import typer

from k3svc.cli.session import show
from k3svc.errors import ConfigError, NotFound
from k3svc.obs.chrome_trace import chrome_trace, read_spans, request_ids


def trace(
    files: Annotated[list[Path], typer.Argument(help="Files that tracing.file named; services may share one.")],
    request_id: Annotated[str | None, typer.Option(help="Id of the request; default: the last one.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: standard output.")] = None,
) -> None:
    """Write the time line of a request over all services, for chrome://tracing or ui.perfetto.dev.

    Example: k3svc trace spans.jsonl --out request.json
    """
    spans = read_spans(files)
    if request_id is None:
        known = request_ids(spans)
        if not known:
            raise NotFound(f"no request in {', '.join(map(str, files))}", reason="UNKNOWN_REQUEST")
        request_id = known[-1]
    text = json.dumps(chrome_trace(spans, request_id))
    if out is None:
        typer.echo(text)
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    show(f"request {request_id}: {out}")
