"""Facts of SharePods, read from objects of the API server.

Guarantees:
- These functions do not raise for any object with a uid and a name: an invalid SharePod becomes facts with `error`.
- Reading takes a few milliseconds at most, whatever the size of the object.
- Facts of a large SharePod are small, because the object itself is not kept. It is read again when its Pod is created.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sharepod.api.bounds import MAX_DEPTH, MAX_LABEL, MAX_VALUES, beyond
from sharepod.api.dialects import effective
from sharepod.api.pods.pod import PodSettings, check_pod_fields, requested_pod_spec
from sharepod.api.sharepod import (
    KIND,
    MAX_TTL_S,
    TTL,
    GpuRequest,
    Phase,
    RestartPolicy,
    SharePodStatus,
    SpecError,
)
from sharepod.controller.state.reading.compact import once, packed, unpacked, with_parts_once, without_notes
from sharepod.controller.state.reading.fitting import METADATA
from sharepod.placement.state.needs import NeedsError, parse_needs
from sharepod.placement.state.types import PodNeeds

from .object_facts import Json, ObjectFacts, common, controller_of, mapping, texts_of, whole_number

_KEPT_VALUES, _KEPT_TEXT = 256, 8 * 1024
"""Most values, and most characters, of a SharePod that is kept whole: about 40 KB. A usual SharePod has 60 values and
2,000 characters. If larger ones were kept, a user could exhaust the operator's memory, again after each restart."""
_ORPHAN = "orphan"
"""Finalizer with which Kubernetes deletes an object without its dependents (`--cascade=orphan`)."""
_DECIDE = ("podUID", "podName", "node", "endTime")
"""Fields that are read even from a status that is too large. In addition, `lastEnd` is read and, without an endTime,
the phase."""
_NO_STATUS = b"{}"
_NOT_ASKED = ("managedFields", "resourceVersion")
"""Metadata fields of a SharePod that do not affect its request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePodFacts(ObjectFacts):
    """Facts of a SharePod. Exactly one of `gpu` and `error` is set."""

    generation: int
    created: str
    deleting: bool
    owner: str | None
    group: str | None = None
    """Default group of the SharePod, from its controller, such as `Job/UID` of an indexed Job (`default_groups`). It
    applies if the SharePod names no group."""
    gpu: GpuRequest | None
    needs: PodNeeds
    error: SpecError | None
    status: SharePodStatus
    raw_text: bytes
    """The object without status, managedFields and resourceVersion, as JSON text. This takes a quarter of the memory of
    Python objects. Empty if the object is too large to keep (see `is_as_read`)."""
    digest: bytes | None = None
    """Digest of its request. Only for an object that is readable but too large to keep."""
    status_text: bytes
    """Its status as JSON text, which takes a third of the memory of Python objects and is rarely read."""
    leaves_pod: bool = False
    """True if its deletion leaves the Pod running (`kubectl delete --cascade=orphan`)."""
    ttl_s: int | None = None
    """Seconds from its end to its deletion. None: it is kept indefinitely."""
    restart_policy: RestartPolicy = RestartPolicy.NEVER
    """Decides whether another run follows an ended run. `Never` if the spec is unreadable."""
    readable: bool = True
    """False if only the metadata is known, so that request and status are unknown."""
    plain: bool = False
    """True for a plain Pod that is a tenant itself; there is no SharePod then."""

    @property
    def kind(self) -> str:
        """Kind of the object: SharePod, or Pod if it is plain."""
        return "Pod" if self.plain else KIND

    @property
    def ended(self) -> bool:
        """True if its last run has ended."""
        return self.status.ended

    @property
    def raw(self) -> Json:
        """The object, parsed from `raw_text`. Empty if the object was too large to keep."""
        return unpacked(self.raw_text) if self.raw_text else {}

    @property
    def raw_status(self) -> Json:
        """The status, parsed from `status_text`."""
        return unpacked(self.status_text)


def sharepod_facts(raw: Json, settings: PodSettings, before: SharePodFacts | None = None) -> SharePodFacts:
    """Return the facts of a SharePod. `before`: facts of an earlier version, whose parsed request is reused if the
    request has not changed.
    """
    metadata, status_raw = mapping(raw.get("metadata")), mapping(raw.get("status"))
    slim = _slim(raw)
    if before is not None and _asks_the_same(slim, before):
        gpu, needs, error, digest = before.gpu, before.needs, before.error, before.digest
        kept = before.raw_text
    else:
        is_small = beyond(slim, most_values=_KEPT_VALUES, most_text=_KEPT_TEXT) is None
        gpu, needs, error = _asked(slim, None if is_small else beyond(slim), settings)
        gpu = once(gpu) if gpu is not None else None
        kept, digest = (packed(slim), None) if is_small else (b"", _digest(slim))
    status_text = _text(status_raw)
    status_fits = status_text is not None
    return SharePodFacts(
        **common(metadata),
        generation=whole_number(metadata.get("generation")),
        created=str(metadata.get("creationTimestamp") or ""),
        deleting=bool(metadata.get("deletionTimestamp")),
        owner=controller_of(metadata, None),
        gpu=gpu,
        needs=needs,
        error=error,
        status=with_parts_once(without_notes(_sharepod_status(status_raw, fits=status_fits))),
        raw_text=kept,
        digest=digest,
        status_text=status_text if status_text is not None else _NO_STATUS,
        leaves_pod=_ORPHAN in texts_of(metadata.get("finalizers")),
        ttl_s=_ttl_s(slim),
        restart_policy=_restart_policy(slim),
    )


def _text(status: Json) -> bytes | None:
    """Return a status as JSON text. None if it exceeds the limits for reading."""
    try:
        text = packed(status)
    except (RecursionError, ValueError):
        return None
    # A short text cannot exceed these limits, so the usual status needs no walk through its values.
    if len(text) <= MAX_VALUES and text.count(b"{") + text.count(b"[") <= MAX_DEPTH:
        return text
    return text if beyond(status) is None else None


def _restart_policy(slim: Json) -> RestartPolicy:
    """Return the restartPolicy of a SharePod: Always by default, as for a Pod."""
    policy = mapping(slim.get("spec")).get("restartPolicy")
    try:
        return RestartPolicy(policy) if policy else RestartPolicy.ALWAYS
    except ValueError:
        return RestartPolicy.NEVER


def _ttl_s(slim: Json) -> int | None:
    """Return the seconds for which an ended SharePod is kept. None: indefinitely, also if the field is unreadable."""
    ttl = mapping(slim.get("spec")).get(TTL)
    return ttl if isinstance(ttl, int) and 0 <= ttl <= MAX_TTL_S else None


def is_as_read(raw: Json, facts: SharePodFacts) -> bool:
    """Return True if an object that was too large to keep still has the request from which `facts` were read."""
    metadata = mapping(raw.get("metadata"))
    if metadata.get("uid") == facts.uid and metadata.get("resourceVersion") == str(facts.version):
        return True  # the digest may differ: a list and a GET read a number beyond 64 bits differently
    return facts.digest is not None and _digest(_slim(raw)) == facts.digest


def _digest(slim: Json) -> bytes | None:
    """Return a digest of a SharePod's request. None if the SharePod is too large to read."""
    if beyond(slim) is not None:
        return None
    asked = json.dumps([slim.get("spec"), slim["metadata"]], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).digest()


def _asks_the_same(slim: Json, before: SharePodFacts) -> bool:
    """Return True if a SharePod differs from an earlier readable version only in status and resourceVersion.

    JSON texts are compared, because Python treats true, 1 and 1.0 as equal. An API server always writes the fields of
    an object in the same order.
    """
    if not before.readable:
        return False
    if not before.raw_text:
        return before.digest is not None and _digest(slim) == before.digest
    try:
        return packed(slim) == before.raw_text
    except (RecursionError, ValueError):
        return False


def _asked(
    raw: Json, too_much: str | None, settings: PodSettings
) -> tuple[GpuRequest | None, PodNeeds, SpecError | None]:
    """Return (requested GPUs, requirements for the node, error) of a SharePod. With an error, the first is None and the
    second is empty. `too_much`: text on the limit that the object exceeds (`beyond`); None if it exceeds none.
    """
    if too_much is not None:
        return (
            None,
            PodNeeds(),
            SpecError("spec", f"{too_much}; move large values to a ConfigMap, a volume or the image"),
        )
    try:
        gpu = effective(raw)
        check_pod_fields(raw, settings)
        return gpu, parse_needs(requested_pod_spec(raw, settings)), None
    except SpecError as found:
        error = found
    except NeedsError as found:
        error = SpecError(found.field, found.message)
    except Exception as found:  # invalid content must affect this SharePod only
        error = SpecError("spec", f"cannot be read: {type(found).__name__}: {found}")
    return None, PodNeeds(), error


def unreadable_sharepod(metadata: Json, why: str) -> SharePodFacts:
    """Return the facts of a SharePod of which only the metadata is known. `why`: cause, for its owner, as the end of a
    sentence that begins "the object".
    """
    known = METADATA(metadata) or {}
    return SharePodFacts(
        **common(known),
        generation=whole_number(known.get("generation")),
        created=str(known.get("creationTimestamp") or ""),
        deleting=bool(known.get("deletionTimestamp")),
        owner=controller_of(known, None),
        gpu=None,
        needs=PodNeeds(),
        error=SpecError("spec", f"cannot be read: the object {why}"),
        status=SharePodStatus(),
        raw_text=packed({"metadata": known}),
        status_text=_NO_STATUS,
        readable=False,
    )


def _slim(raw: Json) -> Json:
    metadata = {key: value for key, value in mapping(raw.get("metadata")).items() if key not in _NOT_ASKED}
    return {key: value for key, value in raw.items() if key != "status"} | {"metadata": metadata}


def _sharepod_status(raw: Json, *, fits: bool) -> SharePodStatus:
    """Return a status as a model. A status that does not match the schema, because a newer operator or another client
    wrote it, is read field by field.

    Unreadable fields are ignored, except the fields that decide whether work runs again: the Pods of the present and of
    the last run, and the SharePod's end. `fits`: True if the status is within the limits for reading.
    """
    readable = raw
    for _ in range(2 if fits else 0):
        try:
            return SharePodStatus.model_validate(readable, extra="ignore")
        except ValidationError as error:
            unread = {item["loc"][0] for item in error.errors(include_url=False, include_input=False) if item["loc"]}
            readable = {key: value for key, value in raw.items() if key not in unread} | _decides(raw)
        except Exception:
            break
    return SharePodStatus.model_validate(_decides(raw))


def _decides(raw: Json) -> dict[str, Any]:
    """Return the fields of a status that decide whether work runs again."""
    decides: dict[str, Any] = {key: _without_halves(raw[key]) for key in _DECIDE if isinstance(raw.get(key), str)}
    if raw.get("endTime") is not None:
        decides.setdefault("endTime", "")
    elif raw.get("phase") in tuple(Phase):
        decides["phase"] = raw["phase"]
    former = mapping(raw.get("lastEnd")).get("podUID")
    if isinstance(former, str) and len(former) <= MAX_LABEL:
        decides["lastEnd"] = {"podUID": _without_halves(former)}
    return decides


def _without_halves(text: str) -> str:
    """Return a text with a question mark for each half of a surrogate pair, which pydantic models refuse."""
    return text.encode("utf-8", "replace").decode()
