"""Bounds of the objects that users write: length, number and depth of their parts. They also bound a user's value that
is quoted in a message.

Guarantees:
- Reading an object within the bounds takes a few milliseconds.
- Every pod that a kubelet could start is within the bounds.
- A quoted value has a bounded length and no control characters (`shown`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_QUANTITY = 64
"""Most characters of a quantity or fraction. The longest that Kubernetes itself prints has 24."""

MAX_CONTAINERS = 64
"""Most containers of a pod, and most init containers. The kubelet's default is 110 whole pods per node."""

MAX_ITEMS = 1024
"""Most entries of any other list or map of a pod."""

MAX_SELECTION = 64
"""Most entries each of nodeSelector, node affinity requirements and tolerations: each is compared with every node."""

MAX_SELECTION_VALUES = 1024
"""Most values of all requirements of node affinity together: enough to name each node of a large cluster."""

MAX_RESOURCES = 16
"""Most resources that a pod requests, by name: CPU, memory, storage, huge pages, and the devices of a dozen plugins."""

MAX_NODE_RESOURCES = 64
"""Most resources that a node has, by name."""

MAX_BYTES = 1_152_921_504_606_847_000
"""Most bytes of memory, 1Ei: more than any GPU has, and a sum of several still fits into 64 bits. Rounded up as an API
server returns it (it reads floats): otherwise server-side apply by another manager conflicts."""

MAX_COUNT = (1 << 31) - 1
"""Largest index or count: 32 bits."""

MAX_CONDITIONS = 32
"""Most conditions of one object. SharePod's objects have at most eight."""

MAX_LABEL = 63
"""Most characters of a label's value, as in Kubernetes."""

MAX_GROUP = 80
"""Most characters of a tenant's group: a label, or the kind of its controller with name or uid."""

MAX_NAME = 317
"""Most characters of the name of a label or a resource, as in Kubernetes: a prefix of 253, a slash, a name of 63."""

MAX_VALUES = 10_000
"""Most values in a SharePod; each map, list, text and number counts as one. A large real pod has a thousand."""

MAX_TEXT = 512 * 1024
"""Most characters of all texts and keys in a SharePod together. `kubectl apply` accepts only half of this."""

MAX_DEPTH = 32
"""Most levels of maps and lists in a SharePod. The deepest field of a pod is 14 levels down."""

MAX_MESSAGE = 1024
"""Most characters of a message to users, as in the note of an Event."""

MAX_FIELD = 384
"""Most characters of a field's path in such a message. The longest is an annotation's name, of at most 317."""

_QUOTED = 64
"""Most characters of a value that a message quotes."""


def shown(text: str) -> str:
    """Return a text that is safe for a terminal, a log or a table: each control character, line end and change of text
    direction becomes U+FFFD."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "\ufffd" for each in text)


def clipped(text: str, most: int = MAX_MESSAGE) -> str:
    """Return a safe text (`shown`) of at most `most` characters; a cut text ends with an ellipsis."""
    text = shown(text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 1]}…"


def quoted(value: object) -> str:
    """Return a value as a message quotes it: texts and numbers are shortened, a list or map becomes "a list" or "a
    map"."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _QUOTED else f"{value[:_QUOTED]!r}… ({len(value)} characters)"
    if isinstance(value, Mapping):
        return "a map"
    if isinstance(value, list | tuple):
        return "a list"
    return clipped(repr(value), _QUOTED)


def beyond(value: Any, *, most_values: int = MAX_VALUES, most_text: int = MAX_TEXT) -> str | None:
    """Return the bound that an object exceeds, as text for a message: `most_values`, `most_text` or `MAX_DEPTH`. None
    if it exceeds none. The check stops there, so its time is bounded."""
    values = text = depth = 0
    level: list[Any] = [value]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} levels deep"
        below: list[Any] = []
        for one in level:
            values += len(one)
            if values > most_values:
                return f"has more than {most_values} values"
            is_map = type(one) is dict
            if is_map:
                text += sum(map(len, one))
            for item in one.values() if is_map else one:
                kind = type(item)  # a JSON parser creates no subclasses
                if kind is str:
                    text += len(item)
                elif kind is dict or kind is list:
                    below.append(item)
            if text > most_text:
                return f"has more than {most_text} characters of text"
        level = below
    return None
