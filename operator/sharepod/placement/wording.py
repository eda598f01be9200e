"""Wording of amounts and places in messages to users.

Guarantees:
- Free amounts are rounded down and requested amounts up, so a user who requests the amount that a message calls free
  gets it.
- Advised amounts are round, and large enough for a program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sharepod.api.resource_line import MEMORY, MILLI
from sharepod.api.units import MIB, Bytes, Milli, parse_quantity

_STEPS = (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", MIB))

MEMORY_STEP = 256 * MIB
"""Advised memory is a multiple of this many bytes: 0.25Gi, so that advice is a short number."""
LEAST_MEMORY = 3 * MEMORY_STEP
"""Least memory that is advised, in bytes: room for a CUDA context of about 512 MiB, and 256 MiB for the program."""
TIME_STEP = 50
"""Step of advised requests, in thousandths, and the least of them."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 GPU`, `3 GPUs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_down(size: int) -> str:
    """Format bytes to a tenth of the largest fitting unit, rounded down: `19.9Gi`. The result is a valid quantity."""
    return _size(size, 0)


def size_up(size: int) -> str:
    """Format bytes like `size_down`, rounded up."""
    return _size(size, 1)


def size_near(size: int) -> str:
    """Format bytes like `size_down`, rounded to the nearest tenth. For example, 0.4 of 16Gi, rounded down to whole MiB,
    is `6.4Gi`."""
    up, down = _size(size, 1), _size(size, 0)
    return min(down, up, key=lambda text: abs(parse_quantity(text) - size))


def size_exact(size: int) -> str:
    """Format bytes as the shortest exact quantity: `3840Mi`, or `6.4Gi` if a user could have written exactly that."""
    exact = (f"{size * 10 // step / 10:g}{unit}" for unit, step in _STEPS if size >= step and size * 10 % step == 0)
    return next(exact, str(size))


def advised_memory(most: int) -> Bytes | None:
    """Return the round size, in bytes, to advise if `most` bytes are free; None if they are too few."""
    return None if most < LEAST_MEMORY else Bytes(most - most % MEMORY_STEP)


def advised_request(most: int) -> Milli | None:
    """Return the round request, in thousandths, to advise if `most` is free; None if it is too little."""
    return None if most < TIME_STEP else Milli(most - most % TIME_STEP)


def advised_size(size: Bytes) -> str:
    """Format an advised size: `4.25Gi`, `768Mi`."""
    return f"{size / (1 << 30):g}Gi" if size >= 1 << 30 else f"{size // MIB}Mi"


_FIELDS_OF_CLAIMS = {
    "spec.gpu.memory": "capacity memory",
    "spec.gpu.count": "count",
    "spec.gpu.uuids": "the UUIDs asked for",
    "spec.gpu.models": "the models asked for",
    "spec.gpu.affinity": "annotation sharepod.dev/gpu-affinity",
    "spec.gpu.antiAffinity": "annotation sharepod.dev/gpu-anti-affinity",
    "spec.gpu.exclusion": "annotation sharepod.dev/gpu-exclusion",
}
"""Field of a SharePod -> the text that names it for a claim."""
_REQUEST = re.compile(r"spec\.gpu\.request ([0-9]+(?:\.[0-9]+)?)")


def of_claims(text: str) -> str:
    """Return a message about a SharePod's fields in the terms of a claim. For example, request 0.3 becomes `timeMilli
    300`."""
    text = _REQUEST.sub(lambda found: f"timeMilli {round(float(found[1]) * 1000)}", text)
    for field, words in _FIELDS_OF_CLAIMS.items():
        text = text.replace(field, words)
    return text


_FIELDS_OF_LINES = {
    "spec.gpu.memory": MEMORY,
    **{
        f"spec.gpu.{field}": f"annotation sharepod.dev/gpu-{key}"
        for field, key in (
            ("count", "count"),
            ("uuids", "uuids"),
            ("models", "models"),
            ("affinity", "affinity"),
            ("antiAffinity", "anti-affinity"),
            ("exclusion", "exclusion"),
        )
    },
}
"""Field of a SharePod -> the text that names it for a resource line."""
_MEMORY = re.compile(r"spec\.gpu\.memory ([0-9.]+[A-Z]i)")


def of_lines(text: str, count: int = 1) -> str:
    """Return a message about a SharePod's fields in the terms of a resource line, whose amounts cover all `count` GPUs
    of the Pod. For example, request 0.3 of two GPUs becomes `sharepod.dev/gpu-milli: 600`."""
    text = _REQUEST.sub(lambda found: f"{MILLI}: {round(float(found[1]) * 1000) * count}", text)
    text = _MEMORY.sub(lambda found: f"{MEMORY}: {parse_quantity(found[1]) // MIB * count}", text)
    for field, words in _FIELDS_OF_LINES.items():
        text = text.replace(field, words)
    return text


def _size(size: int, upwards: int) -> str:
    for unit, step in _STEPS:
        if size >= step:
            tenths = -(-size * 10 // step) if upwards else size * 10 // step
            whole, tenth = divmod(tenths, 10)
            return f"{whole}.{tenth}{unit}" if tenth else f"{whole}{unit}"
    return "1Mi" if size > 0 and upwards else "0"


def gpus_of(node: str, indexes: Iterable[int]) -> str:
    """Return GPUs by node and index: `node-a GPU 1`, `node-a GPUs 0 and 1`."""
    listed = [str(index) for index in sorted(indexes)]
    if len(listed) == 1:
        return f"{node} GPU {listed[0]}"
    return f"{node} GPUs {', '.join(listed[:-1])} and {listed[-1]}"


def some_of(words: Iterable[str], most: int = 4) -> str:
    """Join the words, sorted, without repetition, at most `most` of them: `a, b, c, d and 3 more`."""
    listed = sorted(set(words))
    if len(listed) <= most:
        return ", ".join(listed)
    return f"{', '.join(listed[:most])} and {len(listed) - most} more"


def grouped(reasons: Iterable[tuple[str, str]], noun: str, most: int = 4) -> str:
    """Group names by reason, for a message: `node-a is cordoned, 2 nodes (b, c): each is not ready`. At most `most`
    reasons, frequent ones first."""
    groups: dict[str, list[str]] = {}
    for name, why in reasons:
        groups.setdefault(why, []).append(name)
    ranked = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    parts = [
        f"{names[0]} {why}" if len(names) == 1 else f"{counted(len(names), noun)} ({some_of(names)}): each {why}"
        for why, names in ranked[:most]
    ]
    rest = sum(len(names) for _, names in ranked[most:])
    if rest:
        parts.append(f"{counted(rest, noun)} for other reasons")
    return ", ".join(parts)
