"""Facts of SharePods.

Guarantees:
- No object that has a uid and a name makes these functions raise, whatever else is in it: an invalid SharePod becomes
  facts with `error`.
- Reading takes bounded time, whatever the size of the object: a few milliseconds.
- Little is kept of a SharePod, however large it is: one that is larger than most is read again when its Pod is made.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sharepod.api.bounds import MAX_DEPTH, MAX_LABEL, MAX_VALUES, beyond
from sharepod.api.dialects import effective
from sharepod.api.pod import PodSettings, check_pod_fields, requested_pod_spec
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
"""Values and characters of a SharePod that is kept whole: some 40 KB at most. A usual one has 60 and 2,000. Of larger
ones a user could make so many that the operator is killed for its memory, again after each restart."""
_ORPHAN = "orphan"
"""Finalizer of an object that is deleted without its dependents."""
_DECIDE = ("podUID", "podName", "node", "endTime")
"""Texts of a SharePod's status that are read whatever else is in it, beside `lastEnd` and, where there is no endTime,
the phase."""
_NO_STATUS = b"{}"
_NOT_ASKED = ("managedFields", "resourceVersion")
"""Fields of a SharePod's metadata that say nothing of what it asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePodFacts(ObjectFacts):
    """Facts of a SharePod. Exactly one of `gpu` and `error` is set."""

    generation: int
    created: str
    deleting: bool
    owner: str | None
    group: str | None = None
    """Group that it is in by default."""
    gpu: GpuRequest | None
    needs: PodNeeds
    error: SpecError | None
    status: SharePodStatus
    raw_text: bytes
    """The object itself, without status, managedFields and version, as JSON: a quarter of the memory that it takes as
    objects; empty where it is too large to be kept: see `is_as_read`."""
    digest: bytes | None = None
    """Digest of what it asks, where it is not kept and can be read."""
    status_text: bytes
    """Its status as JSON: a third of the memory that it takes as objects, and it is seldom looked at."""
    leaves_pod: bool = False
    """True if it is deleted with its Pod left alone (`kubectl delete --cascade=orphan`)."""
    ttl_s: int | None = None
    """Seconds after its end at which it is deleted; None: never."""
    restart_policy: RestartPolicy = RestartPolicy.NEVER
    """Runs that may follow one that ended; Never where that cannot be read."""
    readable: bool = True
    """False if only the metadata is known: neither what it asks nor its status."""
    plain: bool = False
    """True if there is no SharePod: a plain Pod with a resource line asks this, and is its own tenant."""

    @property
    def kind(self) -> str:
        """Kind of the object that asks."""
        return "Pod" if self.plain else KIND

    @property
    def ended(self) -> bool:
        """True if it has ended for good."""
        return self.status.ended

    @property
    def raw(self) -> Json:
        """The object itself, as it is kept in `raw_text`; empty where it is not."""
        return unpacked(self.raw_text) if self.raw_text else {}

    @property
    def raw_status(self) -> Json:
        """The status as it was read."""
        return unpacked(self.status_text)


def sharepod_facts(raw: Json, settings: PodSettings, before: SharePodFacts | None = None) -> SharePodFacts:
    """Read a SharePod. `before`: an earlier version of it; if it asks for the same, that is not read again."""
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
    """Return a status as JSON; None if it is beyond what is read."""
    try:
        text = packed(status)
    except (RecursionError, ValueError):
        return None
    # Few values, little text and few levels: the usual status is within the bounds without a walk through it.
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
    """Return the seconds for which a SharePod that has ended is kept; None: for ever, as where that cannot be read."""
    ttl = mapping(slim.get("spec")).get(TTL)
    return ttl if isinstance(ttl, int) and 0 <= ttl <= MAX_TTL_S else None


def is_as_read(raw: Json, facts: SharePodFacts) -> bool:
    """Return whether a SharePod asks what it did when it was read, and found too large to be kept."""
    metadata = mapping(raw.get("metadata"))
    if metadata.get("uid") == facts.uid and metadata.get("resourceVersion") == str(facts.version):
        return True  # however it was read: a list and a GET make different numbers of one beyond 64 bits
    return facts.digest is not None and _digest(_slim(raw)) == facts.digest


def _digest(slim: Json) -> bytes | None:
    """Return a digest of what a SharePod asks; None if it is too large to be read."""
    if beyond(slim) is not None:
        return None
    asked = json.dumps([slim.get("spec"), slim["metadata"]], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).digest()


def _asks_the_same(slim: Json, before: SharePodFacts) -> bool:
    """Return whether a SharePod differs from a version that could be read in nothing but its status and version.

    Texts are compared: for Python true, 1 and 1.0 are equal, and an API server writes the fields of an object in one
    order.
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
    """Return what a SharePod asks of GPUs and of its node, or what is wrong with it. `too_much`: see `beyond`."""
    if too_much is not None:
        return (
            None,
            PodNeeds(),
            SpecError("spec", f"{too_much}; keep what is large in a ConfigMap, a volume or the image"),
        )
    try:
        gpu = effective(raw)
        check_pod_fields(raw, settings)
        return gpu, parse_needs(requested_pod_spec(raw, settings)), None
    except SpecError as found:
        error = found
    except NeedsError as found:
        error = SpecError(found.field, found.message)
    except Exception as found:  # whatever a user has written costs that user alone
        error = SpecError("spec", f"cannot be read: {type(found).__name__}: {found}")
    return None, PodNeeds(), error


def unreadable_sharepod(metadata: Json, why: str) -> SharePodFacts:
    """Return the facts of a SharePod of which only the metadata is known. `why`: for its owner, after "the object"."""
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
    """Read a status, field by field where it was written by a newer operator, or by somebody else.

    What cannot be read of it is passed over, but for what decides whether work runs again: the Pods of this run and of
    the last one, and that the SharePod has ended. `fits`: it is not `beyond` what is read.
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
    """Return what a status says of whether work runs again."""
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
    """Return a text with question marks for halves of pairs, of which a model takes none."""
    return text.encode("utf-8", "replace").decode()
