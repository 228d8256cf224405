"""The marks of K3's chat format (XTML), shared by the prompt encoder and the output parser.

An element is `<|open|>TAG key="value"…<|sep|>` … `<|close|>TAG<|sep|>`, a message ends with
`<|end_of_msg|>`. In token ids the four names are control tokens; in text, where the parser meets them, they
are literal.
"""

import json
import re
from typing import Any

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def tag(name: str, /, **attributes: str) -> str:
    """The text between `<|open|>` and `<|sep|>`."""
    return name + "".join(f' {key}="{_escape(value)}"' for key, value in attributes.items())


def opening(name: str, /, **attributes: str) -> str:
    return f"{OPEN}{tag(name, **attributes)}{SEP}"


def closing(name: str) -> str:
    return f"{CLOSE}{name}{SEP}"


def parse_attributes(text: str) -> dict[str, str]:
    return {key: _unescape(value) for key, value in _ATTRIBUTE.findall(text)}


def compact_json(value: Any, *, sort_keys: bool = False) -> str:
    """JSON without spaces, other scripts unescaped; a surrogate without its partner becomes U+FFFD."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parse_json(text: str) -> Any:
    """The value of a JSON text. Errors: ValueError for anything else, also for NaN and bottomless nesting."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
