"""Claims: a ResourceClaim of class `sharepod.dev`, read into the same request as a SharePod.

A claim requests time, limit and memory by `capacity.requests`, the number of GPUs by `count`, and certain GPUs or
models by CEL selectors. SharePod's annotations (`sharepod.dev/gpu-mode` and so on) set the rest.

Guarantees:
- Any claim becomes a `ClaimRequest` or a `SpecError`; no other exception is raised.
- Every error names the field and the remedy.
- A CEL expression is parsed by a grammar of two comparisons and never evaluated; every other expression is refused.
- A field that could change the claim's share is never ignored: an unsupported one is refused.
- A claim without capacity gets no default: it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharepod.api.bounds import MAX_ITEMS, beyond, clipped, quoted
from sharepod.api.dialects import (
    FIELD_OF,
    MAX_LISTED,
    MAX_MEMORY,
    MIN_BYTES,
    MIN_MEMORY,
    NATIVE_PREFIX,
    UUID_PATTERN,
    UUID_SHAPE,
    is_dialect,
    parse_annotation,
)
from sharepod.api.gpunode import CoRunningPolicy, Latency, MemoryIsolation, Mode, SchedulingLabels
from sharepod.api.objects import CLAIM_DRIVER, DEVICE_CLASS, LINE_REQUEST, MAX_GPUS
from sharepod.api.sharepod import GpuRequest, PlacementPolicy, SpecError
from sharepod.api.units import WHOLE_GPU, Bytes, Milli, UnitError, format_fraction, parse_quantity, parse_whole

KIND = "ResourceClaim"
API_VERSION = "resource.k8s.io/v1"

TIME, LIMIT, MEMORY = "timeMilli", "limitMilli", "memory"
CAPACITIES = (TIME, LIMIT, MEMORY)
"""Names of capacities that a claim may request."""

FIELDS_OF_ANNOTATIONS = (
    "request",
    "mode",
    "memoryIsolation",
    "latency",
    "coRunning",
    "group",
    "affinity",
    "antiAffinity",
    "exclusion",
    "placement",
    "uuids",
    "models",
    "movable",
)
"""Fields that a claim may set by annotation, because its spec has no place for them."""

ANNOTATIONS = tuple(
    name for name, field in FIELD_OF.items() if field in FIELDS_OF_ANNOTATIONS and name.startswith(NATIVE_PREFIX)
)
"""Annotations that a claim may have."""

GATE_HINT = (
    f'is required; write capacity: {{requests: {{{TIME}: "400", {MEMORY}: 4Gi}}}}. If the claim was written so, the '
    "API server has dropped it: turn on the feature gate DRAConsumableCapacity (on by default from Kubernetes 1.36)"
)
"""Message that refuses a request without capacity."""
NOT_MILLI = "is not a whole number of thousandths of one GPU (400 is 0.4 of it)"
"""Message that refuses an amount of time at apply."""
NAMED_AS_LINE = f"{LINE_REQUEST} without capacity is for claims that the resource line of a Pod sizes; use another name"
"""Message that refuses a request named `line` without capacity in a claim that belongs to no resource line."""

EXAMPLE = 'device.attributes["gpu.sharepod.dev"].model == "NVIDIA A100-SXM4-80GB"'
FIELDS = {
    "constraints": "are not supported: the GPUs of a claim are of one node, the nearest to each other",
    "config": f"is not read: set the share by capacity and the annotations {NATIVE_PREFIX}*",
    "firstAvailable": (
        "alternatives are not supported: the operator chooses among all GPUs; write one request under exactly"
    ),
}
"""Fields of a claim that are refused -> the reason, for the message."""
_ATTRIBUTES = ("uuid", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """Request that a claim makes. `devices`: (name, number of GPUs) of each request in its spec; `gpu.count` is their
    sum."""

    gpu: GpuRequest
    devices: tuple[tuple[str, int], ...]
    most_milli: Milli
    """Thousandths that the spec requests. An annotation may only lower the share."""


def is_ours(claim: Mapping[str, Any]) -> bool:
    """Return whether a claim requests a device of SharePod's class in any of its requests."""
    return any(item.get("deviceClassName") == DEVICE_CLASS for item in _all_requests(claim))


def of_line(claim: Mapping[str, Any]) -> bool:
    """Return whether a claim belongs to a Pod's resource line, which has the size."""
    spec = claim.get("spec")
    devices = spec.get("devices") if isinstance(spec, Mapping) else None
    if not isinstance(devices, Mapping) or not devices.keys() <= {"requests"}:
        return False
    requests = devices.get("requests")
    if not isinstance(requests, list) or len(requests) != 1 or not isinstance(requests[0], Mapping):
        return False
    filled = {"deviceClassName": DEVICE_CLASS, "allocationMode": "ExactCount", "count": 1}
    return requests[0] == {"name": LINE_REQUEST, "exactly": filled}


def lower(claim: Mapping[str, Any]) -> ClaimRequest:
    """Read a claim of SharePod's class into a request. Raises `SpecError`."""
    if (why := beyond(claim)) is not None:
        raise SpecError("spec", f"{why}; write a smaller claim")
    annotated = _annotations(claim)
    devices = _map(_map(claim.get("spec"), "spec").get("devices"), "spec.devices")
    _refuse_unsupported(devices)
    requests = _list(devices.get("requests"), "spec.devices.requests")
    if not requests:
        raise SpecError("spec.devices.requests", f"is required; write a request of deviceClassName {DEVICE_CLASS}")
    read = [_Exactly.of(item, f"spec.devices.requests[{number}]") for number, item in enumerate(requests)]
    first = read[0]
    for other in read[1:]:
        if other.shape != first.shape:
            raise SpecError(
                other.path,
                f"asks for another share than {first.path}; a claim's GPUs have equal shares: write a claim for each",
            )
    count = sum(item.count for item in read)
    if count > MAX_GPUS:
        raise SpecError(
            f"{first.path}.count", f"{count} GPUs are more than a node has; write at most {MAX_GPUS} in all"
        )
    gpu = _request(first, count, annotated)
    for number, item in enumerate(read):
        if item.name == LINE_REQUEST and not item.capacity:
            raise SpecError(f"spec.devices.requests[{number}].name", NAMED_AS_LINE)
    devices_of = tuple((item.name, item.count) for item in read)
    return ClaimRequest(gpu=gpu, devices=devices_of, most_milli=first.most_milli(gpu))


@dataclass(frozen=True, slots=True)
class _Exactly:
    """One request in the spec of a claim. `path`: its field in the claim."""

    path: str
    name: str
    count: int
    capacity: tuple[tuple[str, int], ...]
    """(name, amount) of the requested capacities, in thousandths or bytes."""
    uuids: tuple[str, ...] | None
    """UUIDs that its selectors allow; None: any."""
    models: tuple[str, ...] | None

    @property
    def shape(self) -> tuple[object, ...]:
        """Return the fields in which all requests of one claim must be equal."""
        return self.capacity, self.uuids, self.models

    def most_milli(self, gpu: GpuRequest) -> Milli:
        """Return the thousandths that the spec requests."""
        return Milli(dict(self.capacity).get(TIME, gpu.request_milli))

    @classmethod
    def of(cls, raw: object, path: str) -> _Exactly:
        item = _map(raw, path)
        if item.get("firstAvailable"):
            raise SpecError(f"{path}.firstAvailable", FIELDS["firstAvailable"])
        path_of_all = f"{path}.exactly"
        asked = _map(item.get("exactly"), path_of_all)
        _refuse_class(asked, path_of_all)
        if asked.get("adminAccess"):
            raise SpecError(f"{path_of_all}.adminAccess", "goes past every share; leave it out")
        mode = asked.get("allocationMode", "ExactCount")
        if mode != "ExactCount":
            text = f"{quoted(mode)} is not supported; write ExactCount with the number of GPUs in count"
            raise SpecError(f"{path_of_all}.allocationMode", text)
        uuids, models = _selected(asked.get("selectors"), f"{path_of_all}.selectors")
        return cls(
            path=path_of_all,
            name=str(item.get("name") or "")[:MAX_ITEMS],
            count=_count(asked.get("count", 1), f"{path_of_all}.count"),
            capacity=_capacity(asked.get("capacity"), f"{path_of_all}.capacity"),
            uuids=uuids,
            models=models,
        )


def _all_requests(claim: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the requests and alternatives of an unchecked claim."""
    spec = claim.get("spec")
    devices = spec.get("devices") if isinstance(spec, Mapping) else None
    requests = devices.get("requests") if isinstance(devices, Mapping) else None
    for item in requests[:MAX_ITEMS] if isinstance(requests, list) else ():
        if isinstance(item, Mapping):
            several = item.get("firstAvailable")
            yield from (one for one in (item.get("exactly"), item) if isinstance(one, Mapping))
            yield from (one for one in (several if isinstance(several, list) else ()) if isinstance(one, Mapping))


def _refuse_unsupported(devices: Mapping[str, Any]) -> None:
    for name in ("constraints", "config"):
        if devices.get(name):
            raise SpecError(f"spec.devices.{name}", f"{FIELDS[name]}; leave it out")


def _refuse_class(asked: Mapping[str, Any], path: str) -> None:
    name = asked.get("deviceClassName")
    if name != DEVICE_CLASS:
        text = f"{quoted(name)} is another class than {DEVICE_CLASS}; write a claim of its own for it"
        raise SpecError(f"{path}.deviceClassName", text)


def _count(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_GPUS:
        raise SpecError(path, f"{quoted(value)} is not a number of GPUs; write a whole number from 1 to {MAX_GPUS}")
    return value


def _capacity(value: object, path: str) -> tuple[tuple[str, int], ...]:
    """Return the requested capacity of each GPU, as (name, amount); empty if there is none."""
    asked = _map(_map({} if value is None else value, path).get("requests") or {}, f"{path}.requests")
    found: dict[str, int] = {}
    for name in sorted(asked, key=str):
        where = f"{path}.requests.{clipped(str(name), 64)}"
        if name not in CAPACITIES:
            raise SpecError(where, f"is not known; use {', '.join(CAPACITIES)}, or remove it")
        try:
            found[name] = parse_quantity(asked[name]) if name == MEMORY else parse_whole(asked[name])
        except UnitError as error:
            raise SpecError(where, str(error)) from None
        _refuse_value(name, found[name], asked[name], where)
    if found.get(LIMIT, WHOLE_GPU) < found.get(TIME, 0):
        text = f"{found[LIMIT]} is less than the {TIME} {found[TIME]}; write {found[TIME]} or more"
        raise SpecError(f"{path}.requests.{LIMIT}", text)
    return tuple(found.items())


def _refuse_value(name: str, value: int, written: object, path: str) -> None:
    """Raise `SpecError` for an amount that no GPU has."""
    if name == MEMORY:
        if value < MIN_BYTES:
            raise SpecError(path, f"{written} is less than {MIN_MEMORY}; write a size with its unit, such as 4Gi")
        if value > parse_quantity(MAX_MEMORY):
            raise SpecError(path, f"{written} is more memory than any GPU has; write a size such as 4Gi")
    elif value > WHOLE_GPU:
        text = f"{written} is more than the 1000 thousandths of one GPU; ask for several GPUs with count"
        raise SpecError(path, text)
    elif value == 0 and name == LIMIT:
        raise SpecError(path, "0 would never run; write at least 1 or leave it out")


def _request(first: _Exactly, count: int, annotated: Mapping[str, Any]) -> GpuRequest:
    """Return a claim's request, from spec and annotations. `annotated`: their values, by field."""
    asked = dict(first.capacity)
    capacity = f"{first.path}.capacity"
    exclusive = annotated.get("mode") == Mode.EXCLUSIVE
    latency = Latency(annotated.get("latency", Latency.NORMAL))
    if exclusive:
        if asked:
            text = f"an Exclusive claim has whole GPUs; leave it out or remove the annotation {NATIVE_PREFIX}mode"
            raise SpecError(capacity, text)
        if "request" in annotated:
            text = f"an Exclusive claim has whole GPUs; remove it or the annotation {NATIVE_PREFIX}mode"
            raise SpecError(_annotation("request"), text)
        if latency is Latency.INTERACTIVE:
            text = f"an Exclusive claim has the whole GPU; remove it or the annotation {NATIVE_PREFIX}mode"
            raise SpecError(_annotation("latency"), text)
        request, limit, memory = WHOLE_GPU, WHOLE_GPU, None
    else:
        if not asked:
            raise SpecError(capacity, GATE_HINT)
        if TIME not in asked:
            text = 'is required; write the thousandths of each GPU\'s time to guarantee, such as "400"'
            raise SpecError(f"{capacity}.requests.{TIME}", text)
        request, limit = Milli(asked[TIME]), Milli(asked.get(LIMIT, WHOLE_GPU))
        memory = Bytes(asked[MEMORY]) if MEMORY in asked else None
        if request == 0 and memory is None:
            text = f"is required with {TIME} 0 (best effort); write a size such as 4Gi"
            raise SpecError(f"{capacity}.requests.{MEMORY}", text)
        if request == 0 and latency is Latency.INTERACTIVE:
            text = f"Interactive spends guaranteed time, and {TIME} is 0; write a {TIME} such as 300, or remove it"
            raise SpecError(_annotation("latency"), text)
        request = _lowered(request, memory, annotated)
    return GpuRequest(
        request_milli=request,
        limit_milli=limit,
        memory=memory,
        count=count,
        mode=Mode.EXCLUSIVE if exclusive else Mode.SHARED,
        memory_isolation=MemoryIsolation(annotated.get("memoryIsolation", MemoryIsolation.ENFORCED)),
        latency=latency,
        co_running=CoRunningPolicy(annotated.get("coRunning", CoRunningPolicy.ALLOW)),
        group=annotated.get("group"),
        labels=SchedulingLabels(
            affinity=annotated.get("affinity"),
            anti_affinity=annotated.get("antiAffinity"),
            exclusion=annotated.get("exclusion"),
        ),
        placement=PlacementPolicy(annotated.get("placement", PlacementPolicy.BINPACK)),
        uuids=_one_of(first, "uuids", first.uuids, annotated, count),
        models=_one_of(first, "models", first.models, annotated, count),
        movable=annotated.get("movable"),
    )


def _lowered(request: Milli, memory: Bytes | None, annotated: Mapping[str, Any]) -> Milli:
    """Return the request in thousandths: by the annotation if there is one, which may only lower the spec's."""
    if "request" not in annotated:
        return request
    asked = Milli(round(annotated["request"] * WHOLE_GPU))
    if asked > request:
        text = f"{format_fraction(asked)} is more than {TIME} {request}; write less, or raise {TIME}"
        raise SpecError(_annotation("request"), text)
    if asked == 0 and memory is None:
        text = f"0 (best effort) needs {MEMORY} among the claim's capacity; write more than 0"
        raise SpecError(_annotation("request"), text)
    return asked


def _one_of(
    first: _Exactly, field: str, selected: tuple[str, ...] | None, annotated: Mapping[str, Any], count: int
) -> tuple[str, ...]:
    """Return the GPUs or models to which selectors or an annotation restrict a claim; empty: no restriction."""
    if selected is not None and field in annotated:
        raise SpecError(_annotation(field), f"duplicates a selector of {first.path}; set only one of them")
    found: tuple[str, ...] = selected if selected is not None else annotated.get(field, ())
    named = len(set(found))
    if field == "uuids" and 0 < named < count:
        where = _annotation(field) if selected is None else f"{first.path}.selectors"
        raise SpecError(where, f"names {named} GPUs but count is {count}; name at least {count}, or none")
    return found


def _annotation(field: str) -> str:
    name = next(name for name in ANNOTATIONS if FIELD_OF[name] == field)
    return f"metadata.annotations[{name}]"


def _annotations(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of SharePod's annotations of a claim, by field. Raises `SpecError`."""
    metadata = _map(claim.get("metadata") or {}, "metadata")
    annotations = _map(metadata.get("annotations") or {}, "metadata.annotations")
    if len(annotations) > MAX_ITEMS:
        raise SpecError("metadata.annotations", f"has {len(annotations)} entries; write at most {MAX_ITEMS}")
    annotated: dict[str, Any] = {}
    for name in sorted(name for name in annotations if isinstance(name, str) and is_dialect(name)):
        if name not in ANNOTATIONS:
            known = ", ".join(ANNOTATIONS)
            text = f"is not known on a claim, whose spec has size and number; use one of {known}, or remove it"
            raise SpecError(f"metadata.annotations[{name}]", text)
        annotated[FIELD_OF[name]] = parse_annotation(name, str(annotations[name]))
    return annotated


# Selectors

_TOKEN = re.compile(r"""\s*(?:(?P<text>"[^"\\\n]*"|'[^'\\\n]*')|(?P<mark>&&|==|[\[\](),.])|(?P<word>[A-Za-z_]\w*))""")
_DEVICE = [(token, token == CLAIM_DRIVER) for token in ("device", ".", "attributes", "[", CLAIM_DRIVER, "]", ".")]
"""First tokens of an attribute of SharePod's devices, as `_tokens` yields them."""


def _selected(value: object, path: str) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return the UUIDs, and the models, that all selectors together allow. None: any."""
    left: dict[str, tuple[str, ...]] = {}
    for number, item in enumerate(_list(value, path)):
        where = f"{path}[{number}].cel.expression"
        cel = _map(_map(item, f"{path}[{number}]").get("cel"), f"{path}[{number}].cel")
        expression = cel.get("expression")
        if not isinstance(expression, str):
            raise SpecError(where, f"is required; write an expression such as {EXAMPLE}")
        for attribute, names in _parse(expression, where):
            if attribute == "uuid":
                for name in names:
                    if not re.fullmatch(UUID_PATTERN, name):
                        text = f"is not the UUID of a GPU; write it as nvidia-smi -L prints it, {UUID_SHAPE}"
                        raise SpecError(where, f"{quoted(name)} {text}")
            left[attribute] = tuple(name for name in left.get(attribute, names) if name in names)
            if not left[attribute]:
                raise SpecError(where, f"leaves no {attribute} that the other comparisons allow; keep one of them")
    return left.get("uuid"), left.get("model")


def _parse(expression: str, path: str) -> list[tuple[str, tuple[str, ...]]]:
    """Parse a selector: comparisons joined by &&. Return each as (attribute, allowed texts)."""
    refused = SpecError(
        path,
        f"{quoted(expression)} is not understood: only == and in on uuid and model, joined by &&; write one such as "
        f"{EXAMPLE}",
    )
    tokens = list(_tokens(expression, refused))
    found: list[tuple[str, tuple[str, ...]]] = []
    names: tuple[str, ...]
    while True:
        begins = len(_DEVICE)
        if tokens[:begins] != _DEVICE:
            raise refused
        head, tokens = tokens[begins : begins + 2], tokens[begins + 2 :]
        if len(head) < 2 or head[0][0] not in _ATTRIBUTES or any(is_text for _, is_text in head):
            raise refused
        if head[1][0] == "==" and tokens and tokens[0][1]:
            names, tokens = (tokens[0][0],), tokens[1:]
        elif head[1][0] == "in":
            names, tokens = _listed(tokens, path, refused)
        else:
            raise refused
        found.append((head[0][0], tuple(dict.fromkeys(names))))
        if not tokens:
            return found
        if tokens[0] != ("&&", False):
            raise refused
        if len(found) == MAX_LISTED:
            raise SpecError(path, f"has more than {MAX_LISTED} comparisons; write at most {MAX_LISTED}, or a list")
        tokens = tokens[1:]


def _tokens(expression: str, refused: SpecError) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it is a string literal) for each token. Literals have no quotes."""
    place, end = 0, len(expression.rstrip())
    while place < end:
        match = _TOKEN.match(expression, place, end)
        if match is None:
            raise refused
        place = match.end()
        if match["text"] is not None:
            yield match["text"][1:-1], True
        else:
            yield match["mark"] or match["word"], False


def _listed(
    tokens: Sequence[tuple[str, bool]], path: str, refused: SpecError
) -> tuple[tuple[str, ...], list[tuple[str, bool]]]:
    """Parse the list with which the tokens begin. Return its texts, and the tokens after it."""
    names: list[str] = []
    if not tokens or tokens[0] != ("[", False):
        raise refused
    place = 1
    while place + 1 < len(tokens) and tokens[place][1]:
        if len(names) == MAX_LISTED:
            raise SpecError(path, f"has a list of more than {MAX_LISTED} texts; write at most {MAX_LISTED}")
        names.append(tokens[place][0])
        if tokens[place + 1] == ("]", False):
            return tuple(names), list(tokens[place + 2 :])
        if tokens[place + 1] != (",", False):
            break
        place += 2
    raise refused


# Shapes


def _map(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(path, f"is {quoted(value)}; write a map")
    return value


def _list(value: object, path: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise SpecError(path, f"is {quoted(value)}; write a list")
    if len(value) > MAX_ITEMS:
        raise SpecError(path, f"has {len(value)} entries; write at most {MAX_ITEMS}")
    return value
