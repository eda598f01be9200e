"""Bodies of calls: JSON as it is sent, and as it is read.

Guarantees:
- What is sent is JSON that is YAML too, as which the API server reads what is applied.
- What Python's own JSON reads or writes is read or written; a second library does the usual at a fifth of the cost.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from .errors import UnavailableError

Json = dict[str, Any]

_ESCAPED = re.compile("[\x7f-\uffff]")
"""Characters of a body that are sent as escapes; JSON itself escapes those below the blank."""


def encoded(body: Json | list[Json]) -> bytes:
    """Return a body as JSON that is YAML too.

    YAML knows no surrogate pairs of escapes, so characters beyond 16 bits are sent as they are; others that are not
    ASCII are escaped, because YAML refuses some of them and reads some as ends of lines.
    """
    try:
        text = orjson.dumps(body)
    except TypeError:  # half a pair, a number of more than 64 bits
        text = b"\x7f"
    if text.isascii() and b"\x7f" not in text:
        return text
    return _ESCAPED.sub(_escape, json.dumps(body, ensure_ascii=False)).encode()


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\u{0xFFFD if 0xD800 <= code <= 0xDFFF else code:04x}"  # half a pair is no character


def loads(text: bytes) -> Any:
    """Return a JSON value. Raises as `json.loads` does."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # half a pair, NaN, a number beyond a double, nested deeper than 1,024
        return json.loads(text)


def parsed(call: str, status: int, text: bytes) -> Json:
    """Return the object that an answer is. Raises `UnavailableError`."""
    try:
        found = loads(text)
    except (ValueError, RecursionError) as error:
        raise UnavailableError(call, status, "NotJson", str(error)) from None
    if not isinstance(found, dict):
        raise UnavailableError(call, status, "NotJson", "the answer is not an object")
    return found
