"""Resources that the double serves, and the schemas of the CRDs among them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema
import yaml

from . import claims

Json: TypeAlias = dict[str, Any]

_CRDS = Path(__file__).parents[3] / "crds"
_LONGEST_FAULT = 300
"""Largest number of characters of a schema fault in the answer; the rest is cut off."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource: its path, and the behaviour of its objects."""

    prefix: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False
    """True if the kind has a status subresource: spec and status are then written by separate calls."""
    graceful: bool = False
    """True for Pods: a delete of a bound object only marks it, until `Storage.finish_deletion`."""
    schema: Json | None = None
    """OpenAPI schema of a CRD; None: objects of any shape are accepted."""
    strategy: Callable[[Json | None, Json], Json] | None = None
    """Function from the object before (None: it is created) and the new object to the stored object. May raise
    `Refused`.
    """

    @property
    def api_version(self) -> str:
        """apiVersion of the kind's objects: `v1`, `sharepod.dev/v1alpha1`, ..."""
        return self.prefix.removeprefix("/apis/").removeprefix("/api/")

    def fault(self, item: Json) -> str | None:
        """Return the fault that the schema finds in an object; None: there is none."""
        if self.schema is None:
            return None
        error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(self.schema).iter_errors(item))
        if error is None:
            return None
        field = ".".join(str(part) for part in error.absolute_path) or "<root>"
        return f"{field}: Invalid value: {error.message[:_LONGEST_FAULT]}"

    def pruned(self, item: Json) -> Json:
        """Return the object without the fields that its schema does not know, as the API server stores objects of a
        CRD.
        """
        return _prune(item, self.schema, top=True) if self.schema is not None else item


def _prune(value: Any, schema: Json, *, top: bool = False) -> Any:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, dict):
        known, rest = schema.get("properties") or {}, schema.get("additionalProperties")
        if not known and not isinstance(rest, dict):
            return value
        kept = {"apiVersion", "kind", "metadata"} if top else set()
        return {
            key: item if key in kept else _prune(item, known.get(key) or rest or {})
            for key, item in value.items()
            if key in kept or key in known or isinstance(rest, dict)
        }
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [_prune(item, schema["items"]) for item in value]
    return value


def _crd(name: str) -> Kind:
    crd = yaml.safe_load((_CRDS / f"{name}.yaml").read_text())
    spec, version = crd["spec"], crd["spec"]["versions"][0]
    schema = json.loads(json.dumps(version["schema"]["openAPIV3Schema"]))
    return Kind(
        f"/apis/{spec['group']}/{version['name']}",
        spec["names"]["plural"],
        spec["names"]["kind"],
        namespaced=spec["scope"] == "Namespaced",
        status="status" in (version.get("subresources") or {}),
        schema=schema,
    )


KINDS = (
    Kind("/api/v1", "pods", "Pod", status=True, graceful=True),
    Kind("/api/v1", "nodes", "Node", namespaced=False, status=True),
    Kind("/apis/events.k8s.io/v1", "events", "Event"),
    Kind("/apis/coordination.k8s.io/v1", "leases", "Lease"),
    Kind("/api/v1", "namespaces", "Namespace", namespaced=False),
    Kind("/api/v1", "resourcequotas", "ResourceQuota"),
    Kind("/apis/resource.k8s.io/v1", "resourceclaims", "ResourceClaim", status=True, strategy=claims.stored),
    _crd("sharepods"),
    _crd("gpunodes"),
    _crd("gpustatements"),
    _crd("gpubudgets"),
)


def without_schemas() -> tuple[Kind, ...]:
    """Return the kinds without schemas, because checking one object takes milliseconds."""
    return tuple(replace(kind, schema=None) for kind in KINDS)
