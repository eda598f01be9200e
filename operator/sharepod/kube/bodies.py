"""Bodies of calls: encoding and decoding of JSON.

Guarantees:
- Encoded JSON is also valid YAML, because the API server parses the body of an apply as YAML.
- Every text that Python's own JSON library reads or writes is accepted. orjson, five times as fast, handles the usual
  texts; the rest falls back to the standard library.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from .errors import UnavailableError

Json = dict[str, Any]

_ESCAPED = re.compile("[\x7f-\uffff]")
"""Characters of a body that are sent as escapes. JSON itself escapes the control characters, those below the space."""


def encoded(body: Json | list[Json]) -> bytes:
    """Return a body as JSON that is also valid YAML.

    YAML does not combine two escapes to one character, as JSON does, so characters beyond 16 bits are sent unescaped.
    Other characters that are not ASCII are escaped, because YAML refuses some of them and reads some as ends of lines.
    """
    try:
        text = orjson.dumps(body)
    except TypeError:  # orjson refuses a lone surrogate and a number of more than 64 bits
        text = b"\x7f"
    if text.isascii() and b"\x7f" not in text:
        return text
    return _ESCAPED.sub(_escape, json.dumps(body, ensure_ascii=False)).encode()


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\u{0xFFFD if 0xD800 <= code <= 0xDFFF else code:04x}"  # a lone surrogate is no character


def loads(text: bytes) -> Any:
    """Return the value of a JSON text. Raises the errors of `json.loads`."""
    try:
        return orjson.loads(text)
    # orjson refuses a lone surrogate, NaN, a number beyond a double, and more than 1,024 levels
    except orjson.JSONDecodeError:
        return json.loads(text)


def parsed(call: str, status: int, text: bytes) -> Json:
    """Return the object in the body of an answer. Raises `UnavailableError` if the body is no JSON object."""
    try:
        found = loads(text)
    except (ValueError, RecursionError) as error:
        raise UnavailableError(call, status, "NotJson", str(error)) from None
    if not isinstance(found, dict):
        raise UnavailableError(call, status, "NotJson", "the answer is not an object")
    return found
