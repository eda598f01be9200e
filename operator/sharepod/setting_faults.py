"""Messages about invalid settings and files, as both programs print them: the field and the reason.

Guarantees:
- For an unknown setting, the message names the most similar setting, if one is similar.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import ValidationError


def first_fault(error: ValidationError, whole: str = "") -> str:
    """Return the field and the reason of the first fault. `whole`: name to use for a fault that concerns no single
    field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


def explain(error: ValidationError, known: Iterable[str]) -> str:
    """Return all faults in one line. `known`: the names of all settings."""
    names, found = tuple(known), []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
            near = get_close_matches(path, names, n=1)
            found.append(f"{path}: is not a setting; " + (f"did you mean {near[0]}?" if near else "remove it"))
        else:
            found.append(f"{path}: {item['msg']} (given: {item['input']!r})" if path else item["msg"])
    return "; ".join(found)
