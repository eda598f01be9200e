"""Structural OpenAPI schemas for our CRDs. Pure: models and documents in, schemas out.

The API server takes only structural schemas in a CRD: no `$ref`, no `anyOf` around types, every node typed. Two sources
are brought to that form: our pydantic models, and the PodSpec of a real API server's OpenAPI v3 document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/"
_POD_SPEC = "io.k8s.api.core.v1.PodSpec"
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
_OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"

_KEPT = (
    "type",
    "format",
    "required",
    "enum",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
)
"""Keys that a pod's field keeps of its schema. Descriptions would make the CRD five times as large; patch strategies
mean nothing in a CRD."""

_NOT_ON_CREATE = ("ephemeralContainers",)
"""Fields that no new pod may have."""


class SchemaError(ValueError):
    """Document of which no schema can be made."""


def model_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of one of our models, as it looks in YAML (camelCase). None means absent, not
    null."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    return _structural(document, document.get("$defs", {}))


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    if "$ref" in node:
        return _structural(definitions[node["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in node:
        some = [option for option in node["anyOf"] if option.get("type") != "null"]
        if len(some) != 1:
            raise SchemaError(f"a field of {len(some)} types has no structural schema: {node}")
        return _structural(some[0], definitions)
    schema: Schema = {}
    if "description" in node and node.get("type") == "object":
        schema["description"] = " ".join(str(node["description"]).replace("`", "").split())
    for key in ("type", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "enum"):
        if key in node:
            schema[key] = node[key]
    if "const" in node:
        schema |= {"type": "string", "enum": [node["const"]]}
    if node.get("type") == "integer":
        schema["format"] = "int64"
    if node.get("type") == "array":
        schema["items"] = _structural(node["items"], definitions)
    if node.get("type") == "object":
        schema["properties"] = {name: _structural(value, definitions) for name, value in node["properties"].items()}
        if node.get("required"):
            schema["required"] = list(node["required"])
    return schema


def by_key(schema: Schema, *path: str, key: str) -> None:
    """Make the list at `path` of properties a map by `key`: appliers own single entries, and no key may stand twice."""
    for step in path[:-1]:
        schema = schema["properties"][step]
        schema = schema.get("items", schema)
    schema["properties"][path[-1]] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def pod_spec_schema(openapi: Mapping[str, Any]) -> Schema:
    """Return the structural schema of a PodSpec, from an API server's document `/openapi/v3/api/v1`.

    Unknown fields are kept at every level, so that the fields of a newer cluster's pods pass. Quantities may be
    numbers (`cpu: 0.5`), which a CRD's int-or-string would refuse: they are checked when the Pod is created. Only the
    defaults of list keys stay. Raises `SchemaError` for another document.
    """
    schemas = openapi.get("components", {}).get("schemas", {})
    if _POD_SPEC not in schemas:
        raise SchemaError(
            f"the document has no {_POD_SPEC}; it must be what an API server serves at /openapi/v3/api/v1"
        )
    schema = _inlined(schemas[_POD_SPEC], schemas)
    for field in _NOT_ON_CREATE:
        schema["properties"].pop(field, None)
    return schema


def _inlined(node: Mapping[str, Any], schemas: Mapping[str, Any], keys: Sequence[str] = ()) -> Schema:
    reference = node.get("$ref") or (node["allOf"][0]["$ref"] if "allOf" in node else None)
    if reference is not None:
        name = reference.removeprefix(_REFERENCE)
        if name == _QUANTITY:
            return {"x-kubernetes-preserve-unknown-fields": True}
        if name == _INT_OR_STRING:
            return {"x-kubernetes-int-or-string": True}
        if name == _OBJECT_META:
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        return _inlined(schemas[name], schemas, keys)
    schema: Schema = {key: node[key] for key in _KEPT if key in node}
    if node.get("type") == "array":
        schema["items"] = _inlined(node["items"], schemas, node.get("x-kubernetes-list-map-keys", ()))
    elif "additionalProperties" in node:
        schema["additionalProperties"] = _inlined(node["additionalProperties"], schemas)
    elif node.get("type") == "object":
        schema["properties"] = {}
        for name, value in node.get("properties", {}).items():
            field = schema["properties"][name] = _inlined(value, schemas)
            if name in keys and name not in node.get("required", ()) and "default" in value:
                field["default"] = value["default"]
        if not schema["properties"]:
            del schema["properties"]
        schema["x-kubernetes-preserve-unknown-fields"] = True
    return schema
