"""Versions of each kind, and conversion between them by way of one, the hub, that the operator reads and writes.

Guarantees:
- V1 lossless: an object that is converted to another version and back is the same object. What a version cannot say is
  kept in the annotation `sharepod.dev/kept-VERSION`, VERSION being the one that can.
- V2 honest: kept fields come back only where the object then still reads the same in the version that it was converted
  from. So an annotation that somebody wrote, or one that an edit has made obsolete, changes nothing of that.
- V3 bounded: where the kept fields would make the annotations larger than an API server takes, they are left out: that
  object loses them when it is written in the other version, and no other object pays for it.
- `metadata` is otherwise left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from sharepod.api.bounds import MAX_MESSAGE, clipped
from sharepod.api.gpubudget import KIND as GPUBUDGET
from sharepod.api.gpunode import KIND as GPUNODE
from sharepod.api.objects import GROUP, VERSION
from sharepod.api.sharepod import KIND as SHAREPOD

from .kept_fields import Json, copied, entries, read, restored, same, written

BodyConversion = Callable[[Json], Json]
"""Function from a body in one version to the body in another. It may change what it is given. Values of a wrong type
pass as they are: the API server calls for every stored object, and one that fails would hide all others of its list."""

MAX_ANNOTATIONS: Final = 256 * 1024
"""Bytes that all annotations of an object may have, keys and values: the API server's own limit."""


class ConversionError(ValueError):
    """Object that cannot be converted. The message names it and says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Version of a kind other than the hub.

    `from_hub(to_hub(from_hub(x)))` is `from_hub(x)`, and the same the other way round: what both can say is stable.
    Each fills the defaults of fields that only its result's version has: an API server fills none after a conversion,
    and rules that compare an object with its former self would see a field come that nobody wrote.
    """

    name: str
    to_hub: BodyConversion
    from_hub: BodyConversion
    definition: BodyConversion
    """Makes the version's entry in the CRD (`spec.versions[]`) of the hub's."""
    served: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KindVersions:
    """Versions of one kind. `stored`: the one that the API server stores."""

    kind: str
    hub: str = VERSION
    hub_served: bool = True
    stored: str = VERSION
    further: tuple[Version, ...] = ()

    def names(self) -> list[str]:
        """Return the names of all versions, the hub first."""
        return [self.hub, *(version.name for version in self.further)]

    def named(self, name: str) -> Version | None:
        """Return the version of this name; None for the hub and for unknown ones."""
        return next((version for version in self.further if version.name == name), None)


VERSIONS: Final[Mapping[str, KindVersions]] = MappingProxyType(
    {kind: KindVersions(kind=kind) for kind in (SHAREPOD, GPUNODE, GPUBUDGET)}
)
"""Versions of our kinds, by kind."""


def kept_annotation(version: str) -> str:
    """Return the annotation for what this version can say and the object's version cannot."""
    return f"{GROUP}/kept-{version}"


def convert(item: Json, to: str, kinds: Mapping[str, KindVersions]) -> Json:
    """Return an object in the version `to` of our group. Raise `ConversionError`; `RecursionError` for one that nests
    too deep."""
    group, _slash, name = str(item.get("apiVersion")).rpartition("/")
    versions = kinds.get(str(item.get("kind")))
    if versions is None or group != GROUP or not {name, to} <= set(versions.names()):
        known = "; ".join(f"{kind}: {', '.join(each.names())}" for kind, each in sorted(kinds.items()))
        what = clipped(f"{item.get('kind')} of {item.get('apiVersion')}", MAX_MESSAGE // 4)
        raise ConversionError(
            f"{_shown(item)}: no conversion from {what} to {clipped(to, 64)}; this operator knows {known}. "
            "Update the operator before the CRDs"
        )
    metadata = item.get("metadata")
    if not isinstance(metadata, dict):
        raise ConversionError(f"{_shown(item)}: metadata is missing; an API server sends whole objects")
    given = metadata.get("annotations")
    annotations = dict(given) if isinstance(given, dict) else {}
    body = {key: value for key, value in item.items() if key not in ("apiVersion", "kind", "metadata")}
    try:
        for source, target in _steps(versions, name, to):
            body = _step(body, annotations, versions, source, target)
    except RecursionError:
        raise
    except Exception as error:
        raise ConversionError(
            f"{_shown(item)}: cannot be converted from {name} to {to}: {clipped(repr(error), MAX_MESSAGE // 4)}. "
            f"Correct or delete it in {name}"
        ) from error
    if annotations or given:
        metadata = {key: value for key, value in metadata.items() if key != "annotations"}
        metadata |= {"annotations": annotations} if annotations else {}
    return {"apiVersion": f"{GROUP}/{to}", "kind": item["kind"], "metadata": metadata, **body}


def _steps(versions: KindVersions, name: str, to: str) -> list[tuple[str, str]]:
    if name == to:
        return []
    return [(name, to)] if versions.hub in (name, to) else [(name, versions.hub), (versions.hub, to)]


def _step(body: Json, annotations: dict[str, Any], versions: KindVersions, source: str, target: str) -> Json:
    """Convert a body from or to the hub; bring its kept fields in `annotations` up to date."""
    forth, back = _functions(versions, source, target)
    annotations.pop(kept_annotation(source), None)  # of a body in this version nothing is left out
    kept = read(annotations.pop(kept_annotation(target), None))
    result = forth(copied(body))
    said = back(copied(result))
    if kept:
        result = restored(result, kept, lambda candidate: _reads_as(candidate, said, back))
        said = back(copied(result))
    if left := entries(said, body):
        text = written(left)
        if _size(annotations) + len(kept_annotation(source)) + len(text.encode()) <= MAX_ANNOTATIONS:
            annotations[kept_annotation(source)] = text
    return result


def _functions(versions: KindVersions, source: str, target: str) -> tuple[BodyConversion, BodyConversion]:
    """Return the functions from source to target and back; one of the two is the hub."""
    if (version := versions.named(source)) is not None:
        return version.to_hub, version.from_hub
    version = versions.named(target)
    assert version is not None
    return version.from_hub, version.to_hub


def _reads_as(candidate: Json, said: Json, back: BodyConversion) -> bool:
    try:
        return same(back(copied(candidate)), said)
    except Exception:  # kept fields are whatever somebody wrote there
        return False


def _size(annotations: Mapping[str, Any]) -> int:
    return sum(len(str(key).encode()) + len(str(value).encode()) for key, value in annotations.items())


def _shown(item: Json) -> str:
    """Return kind, namespace and name of an object, for a message."""
    metadata = item.get("metadata")
    names = [metadata.get(part) for part in ("namespace", "name")] if isinstance(metadata, dict) else []
    return clipped(f"{item.get('kind')} {'/'.join(str(name) for name in names if name)}", MAX_MESSAGE // 4)
