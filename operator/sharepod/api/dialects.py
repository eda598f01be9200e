"""Dialects: a SharePod's request for GPUs as the block `spec.gpu` or as annotations, read into one `GpuRequest`.

The annotations are `sharepod.dev/gpu-*` and, in manifests for KubeShare and Gemini, `kubeshare/gpu_request`,
`gemini/GPUID` and so on; each prefix may stand before every key. `KEYS` is the only table of these keys. The
translation here, the copying of annotations to the Pod and the generated admission policy use it.

Guarantees:
- A SharePod uses one way only: block and annotations together, or one field twice, are refused.
- An annotation under a known prefix is never ignored: an unknown key is refused.
- Every error names the annotation as the user wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from .bounds import MAX_ITEMS, MAX_QUANTITY, quoted
from .gpunode import CoRunningPolicy, Latency, MemoryIsolation, Mode
from .objects import GROUP, MAX_GPUS
from .sharepod import LABEL_PATTERN, GpuRequest, GpuSpec, PlacementPolicy, SpecError, resolve
from .units import UnitError, parse_fraction, parse_quantity

PREFIXES = (f"{GROUP}/", "kubeshare/", "gemini/")
"""Prefixes of the dialects; each can precede every key of `KEYS`."""

FOREIGN_PREFIXES = PREFIXES[1:]

NATIVE_PREFIX = f"{GROUP}/gpu-"
"""Prefix of SharePod's own annotations in examples and messages."""

STARTS = (NATIVE_PREFIX, f"{GROUP}/gpu_", f"{GROUP}/sched_", f"{GROUP}/GPUID", *FOREIGN_PREFIXES)
"""Beginnings of annotations that belong to a dialect. `sharepod.dev/` alone is too short: SharePod has other
annotations."""

FRACTION_PATTERN = r"^([0-9]{1,9}([.][0-9]{0,9})?|[.][0-9]{1,9})(m|%)?$"
"""Pattern of a fraction in an annotation: digits with an optional point. Suffix `m` means thousandths, `%` percent. No
sign, exponent or blank."""

A_FRACTION = '0 to 1 with at most three decimals, such as "0.4", "400m" or "40%"'
"""Examples of valid fractions, for messages that refuse one."""

BYTES_PATTERN = r"^[0-9]{1,18}$"

UUID_PATTERN = r"^GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"

UUID_SHAPE = "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"

MIN_MEMORY = "1Mi"
"""Smallest memory. A smaller value is a forgotten unit (`memory: 4`)."""

MIN_BYTES = parse_quantity(MIN_MEMORY)

MAX_MEMORY = "1Ei"
"""Largest memory: more than any GPU has, and far below the bound of 64 bits."""

MAX_LISTED = 64
"""Most UUIDs or models in one list. The bound keeps the cost of the CEL rules within the API server's budget."""

MAX_LIST_TEXT = 8192
"""Most characters of an annotation with a list: `MAX_LISTED` names of 96 characters, each with a comma and blanks."""

FLAGS = ("true", "false")
"""Values of a yes-or-no annotation."""

NEAR = len("/gpu-li")
"""Number of characters, from the slash on, in which annotations are near to a misspelt one. A message advises these
first."""

GPUID_KEY = "GPUID"
"""Key of KubeShare's shared virtual GPU: an affinity group of that name here. Only with this key may `spec.nodeName` be
set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Field of `GpuSpec` with the keys of its annotations: SharePod's own key, and the keys of KubeShare and Gemini."""

    field: str
    native: str
    foreign: tuple[str, ...] = ()

    @property
    def annotations(self) -> tuple[str, ...]:
        """All annotations that set this field."""
        return tuple(prefix + key for prefix in PREFIXES for key in (self.native, *self.foreign))

    def usual(self, prefix: str) -> str:
        """Return the annotation of this field that messages propose to a user of this prefix."""
        return prefix + (self.foreign[0] if self.foreign and prefix in FOREIGN_PREFIXES else self.native)


KEYS: tuple[Key, ...] = (
    Key(field="request", native="gpu-request", foreign=("gpu_request",)),
    Key(field="limit", native="gpu-limit", foreign=("gpu_limit",)),
    Key(field="memory", native="gpu-memory", foreign=("gpu_mem",)),
    Key(field="count", native="gpu-count"),
    Key(field="mode", native="gpu-mode"),
    Key(field="memoryIsolation", native="gpu-memory-isolation"),
    Key(field="latency", native="gpu-latency"),
    Key(field="coRunning", native="gpu-co-running"),
    Key(field="group", native="gpu-group"),
    Key(field="affinity", native="gpu-affinity", foreign=("sched_affinity", GPUID_KEY)),
    Key(field="antiAffinity", native="gpu-anti-affinity", foreign=("sched_anti-affinity",)),
    Key(field="exclusion", native="gpu-exclusion", foreign=("sched_exclusion",)),
    Key(field="placement", native="gpu-placement"),
    Key(field="uuids", native="gpu-uuids"),
    Key(field="models", native="gpu-models"),
    Key(field="movable", native="gpu-movable"),
)

_FIELDS = tuple(str(field.alias) for field in GpuSpec.model_fields.values())
"""Names of the fields of the block `spec.gpu`."""

FIELD_OF: Mapping[str, str] = {annotation: key.field for key in KEYS for annotation in key.annotations}
"""Annotation -> the field of `GpuSpec` that it sets."""


def is_dialect(annotation: str) -> bool:
    """Return whether an annotation belongs to a dialect. Its key may be unknown."""
    return annotation.startswith(STARTS)


def effective(sharepod: Mapping[str, Any]) -> GpuRequest:
    """Return the request of a SharePod from its `spec.gpu` or annotations, with defaults. `sharepod`: as the API server
    returns it.

    Raises `SpecError`, whose field is the path in `spec.gpu` or `metadata.annotations[...]`.
    """
    for name in ("annotations", "labels"):
        entries = (sharepod.get("metadata") or {}).get(name) or {}
        if len(entries) > MAX_ITEMS:
            raise SpecError(f"metadata.{name}", f"has {len(entries)} entries; write at most {MAX_ITEMS}")
    spec = sharepod.get("spec") or {}
    annotated = annotations_of(sharepod)
    block = spec.get("gpu")
    if block is not None and annotated:
        raise SpecError(
            f"metadata.annotations[{min(annotated)}]",
            "conflicts with spec.gpu; set only one of them",
        )
    if spec.get("nodeName") and not asks_for_node(sharepod):
        raise SpecError(
            "spec.nodeName",
            "would go past placement and the scheduler; remove it and use a nodeSelector on kubernetes.io/hostname",
        )
    if block is None and not annotated:
        raise SpecError("spec.gpu", "is required; write at least request, such as {request: 0.4}, or mode: Exclusive")
    return resolved(_from_block(block) if block is not None else from_annotations(annotated), annotated)


def resolved(gpu: GpuSpec, annotated: Mapping[str, str]) -> GpuRequest:
    """Fill the defaults of a request and check it. `annotated`: annotations that it was read from, if any. Raises
    `SpecError`, which names what the user wrote."""
    try:
        request = resolve(gpu)
        _check(gpu, request)
    except SpecError as error:
        raise _as_written(error, annotated) from None
    return request


def annotations_of(sharepod: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, str]:
    """Return the annotations of a SharePod that set fields of `spec.gpu`. Raises `SpecError` for an unknown key after a
    dialect's prefix. `without`: fields that the message does not advise."""
    annotations = (sharepod.get("metadata") or {}).get("annotations") or {}
    annotated = {str(name): str(value) for name, value in annotations.items() if is_dialect(name)}
    for name in sorted(annotated):
        if name not in FIELD_OF:
            prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
            beginning = name[: name.index("/") + NEAR]
            known = sorted(known_keys(prefix, without), key=lambda key: not key.startswith(beginning))
            raise SpecError(
                f"metadata.annotations[{name}]", f"is not known; use one of {', '.join(known)}, or remove it"
            )
    return annotated


def known_keys(prefix: str, without: Sequence[str] = ()) -> list[str]:
    """Return the annotations that a message advises for a manifest with this prefix. `without`: fields left out."""
    return [key.usual(prefix) for key in KEYS if key.field not in without]


def asks_for_node(sharepod: Mapping[str, Any]) -> bool:
    """Return whether `spec.nodeName` is read as required node affinity, which needs a `GPUID`."""
    return any(name.endswith(f"/{GPUID_KEY}") for name in annotations_of(sharepod))


def _from_block(block: Any) -> GpuSpec:
    if not isinstance(block, Mapping):
        raise SpecError("spec.gpu", f"is {quoted(block)}; write a map such as {{request: 0.4}}")
    # The API server drops fields that are not in the CRD. So an unknown field here may be a newer CRD's default:
    # refusing it would end every SharePod during an upgrade.
    try:
        return GpuSpec.model_validate({name: value for name, value in block.items() if name in _FIELDS})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise SpecError(f"spec.gpu{path}", f"{first['msg']}; got {quoted(first['input'])}") from None


def from_annotations(annotated: Mapping[str, str]) -> GpuSpec:
    """Read annotations of the dialects. Raises `SpecError` for an invalid one, and for a field that is set twice."""
    values: dict[str, Any] = {}
    first: dict[str, str] = {}
    for name, text in sorted(annotated.items()):
        field = FIELD_OF[name]
        if field in first:
            raise SpecError(
                f"metadata.annotations[{name}]",
                f"duplicates annotation {first[field]}; set only one of them",
            )
        first[field] = name
        values[field] = parse_annotation(name, text)
    return GpuSpec.model_validate(values)


def parse_annotation(name: str, text: str) -> Any:
    """Return the value of an annotation of `FIELD_OF`, as the block `spec.gpu` would have it. Raises `SpecError`."""
    try:
        return _PARSERS[name.partition("/")[2]](text)
    except ValueError as error:
        raise SpecError(f"metadata.annotations[{name}]", str(error)) from None


def _check(gpu: GpuSpec, request: GpuRequest) -> None:
    """Check rules that `resolve` does not contain: UUIDs, and bounds of the memory."""
    if 0 < len(gpu.uuids) < request.count:
        raise SpecError(
            "spec.gpu.uuids",
            f"names {len(gpu.uuids)} GPUs but count is {request.count}; name at least {request.count}, or none",
        )
    if request.memory is not None and request.memory < MIN_BYTES:
        raise SpecError(
            "spec.gpu.memory", f"{gpu.memory} is less than {MIN_MEMORY}; write a size with its unit, such as 4Gi"
        )
    if request.memory is not None and request.memory > parse_quantity(MAX_MEMORY):
        raise SpecError("spec.gpu.memory", f"{gpu.memory} is more memory than any GPU has; write a size such as 4Gi")
    for index, uuid in enumerate(gpu.uuids):
        if not re.fullmatch(UUID_PATTERN, uuid):
            raise SpecError(f"spec.gpu.uuids[{index}]", _no_uuid(uuid))


def _as_written(error: SpecError, annotated: Mapping[str, str]) -> SpecError:
    """Return an error about a field of the block as one about the annotation that set, or would set, this field."""
    if not annotated or not error.field.startswith("spec.gpu."):
        return error
    field = re.split(r"[.\[]", error.field)[2]
    key = next(key for key in KEYS if key.field == field)
    name = next((name for name in key.annotations if name in annotated), None)
    if name is None:
        used = (prefix for prefix in FOREIGN_PREFIXES if any(name.startswith(prefix) for name in annotated))
        name = key.usual(next(used, PREFIXES[0]))
    return SpecError(f"metadata.annotations[{name}]", error.message)


def _said(text: str) -> str:
    """Return an annotation's value as a message quotes it."""
    return f'"{text}"' if len(text) <= MAX_QUANTITY else quoted(text)


def _fraction(text: str) -> float:
    if not re.fullmatch(FRACTION_PATTERN, text):
        raise ValueError(f"{_said(text)} is not a fraction; write {A_FRACTION}")
    try:
        return parse_fraction(text) / 1000
    except UnitError as error:
        raise ValueError(str(error)) from None


def _quantity(text: str) -> str:
    try:
        parse_quantity(text)
    except UnitError as error:
        raise ValueError(str(error)) from None
    return text


def _bytes(text: str) -> int:
    if not re.fullmatch(BYTES_PATTERN, text):
        raise ValueError(
            f'{_said(text)} is not a number of bytes; write digits only, such as "4294967296", '
            f"or use annotation {NATIVE_PREFIX}memory, which takes 4Gi"
        )
    if int(text) < MIN_BYTES:
        raise ValueError(f"{text} is less than {MIN_MEMORY}; write the size in bytes, such as 4294967296")
    return int(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_GPUS:
        raise ValueError(f"{_said(text)} is not a number of GPUs; write a whole number from 1 to {MAX_GPUS}")
    return int(text)


def _label(text: str) -> str:
    if not re.fullmatch(LABEL_PATTERN, text):
        raise ValueError(
            f'{_said(text)} is not a label; write up to 63 letters, digits, ".", "_" and "-", '
            "beginning and ending with a letter or digit"
        )
    return text


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{_said(text)} is not known; write {' or '.join(choices)}")
        return text

    return parse


def _flag(text: str) -> bool:
    if text not in FLAGS:
        raise ValueError(f"{_said(text)} is not known; write {' or '.join(FLAGS)}")
    return text == "true"


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text[: MAX_LIST_TEXT + 1].split(",", MAX_LISTED))
    if len(text) > MAX_LIST_TEXT or not all(names) or len(names) > MAX_LISTED:
        raise ValueError(
            f"{_said(text)} is not a list of names; write up to {MAX_LISTED} names with commas between them"
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"names {_said(twice)} more than once; write each name once")
    return names


def _uuids(text: str) -> tuple[str, ...]:
    names = _names(text)
    for name in names:
        if not re.fullmatch(UUID_PATTERN, name):
            raise ValueError(_no_uuid(name))
    return names


def _no_uuid(text: str) -> str:
    return f"{_said(text)} is not the UUID of a GPU; write it as nvidia-smi -L prints it, {UUID_SHAPE}"


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "gpu-request": _fraction,
    "gpu_request": _fraction,
    "gpu-limit": _fraction,
    "gpu_limit": _fraction,
    "gpu-memory": _quantity,
    "gpu_mem": _bytes,
    "gpu-count": _count,
    "gpu-mode": _choice(*Mode),
    "gpu-memory-isolation": _choice(*MemoryIsolation),
    "gpu-latency": _choice(*Latency),
    "gpu-co-running": _choice(*CoRunningPolicy),
    "gpu-group": _label,
    "gpu-affinity": _label,
    "sched_affinity": _label,
    GPUID_KEY: _label,
    "gpu-anti-affinity": _label,
    "sched_anti-affinity": _label,
    "gpu-exclusion": _label,
    "sched_exclusion": _label,
    "gpu-placement": _choice(*PlacementPolicy),
    "gpu-uuids": _uuids,
    "gpu-models": _names,
    "gpu-movable": _flag,
}
"""Parser of the value, by key."""
