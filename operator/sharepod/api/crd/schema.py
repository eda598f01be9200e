"""Structural OpenAPI schemas for SharePod's CRDs. Pure: returns schemas made from models and documents.

The API server takes only structural schemas in a CRD: no `$ref`, no `anyOf` around types, every node typed. Two sources
are converted to that form: SharePod's pydantic models, and the PodSpec of a real API server's OpenAPI v3 document.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from sharepod.api.bounds import MAX_CONTAINERS, MAX_ITEMS, MAX_NAME, MAX_QUANTITY, MAX_RESOURCES, MAX_SELECTION

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
"""Keys of a pod field's schema that are copied. With descriptions, the CRD would be five times as large; patch
strategies have no meaning in a CRD."""

_QUANTITY_PATTERN = r"^[+-]?([0-9]+|[0-9]+[.][0-9]*|[.][0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"

_LONGEST = {
    "containers": MAX_CONTAINERS,
    "initContainers": MAX_CONTAINERS,
    "tolerations": MAX_SELECTION,
    "nodeSelector": MAX_SELECTION,
    "nodeSelectorTerms": MAX_SELECTION,
    "matchExpressions": MAX_SELECTION,
    "matchFields": MAX_SELECTION,
    "limits": MAX_RESOURCES,
    "requests": MAX_RESOURCES,
    "overhead": MAX_RESOURCES,
}
"""Most entries of a pod's list or map, by field; `MAX_ITEMS` for all others. The operator reads no more."""

_BOUNDS = (
    "type",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "enum",
)
"""Keys of a pydantic schema that are copied."""


class SchemaError(ValueError):
    """Error for a document that cannot be converted to a schema."""


def model_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of one of SharePod's models, with the names of YAML (camelCase). A field that is
    None is absent, never null."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    for known in (model, *_models(BaseModel)):
        described = document if known is model else document.get("$defs", {}).get(known.__name__, {})
        for name, text in _texts_of_fields(known).items():
            alias = known.model_fields[name].alias or name
            if alias in described.get("properties", {}):
                described["properties"][alias]["description"] = text
    return _structural(document, document.get("$defs", {}))


def _models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield all models that derive from `base`."""
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


def _texts_of_fields(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a model's fields and of its base models' fields, by field name."""
    if not model.__module__.startswith("sharepod.api."):
        return {}
    texts = {name: text for base in model.__bases__ for name, text in _texts_of_fields(base).items()}
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    for field, after in pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            texts[field.target.id] = str(ast.literal_eval(after.value))
    return texts


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    if "$ref" in node:
        own = {"description": _sentence(node)} if "description" in node else {}
        return _structural(definitions[node["$ref"].rpartition("/")[2]], definitions) | own
    if "anyOf" in node:
        some = [option for option in node["anyOf"] if option.get("type") != "null"]
        if len(some) != 1:
            raise SchemaError(f"a field of {len(some)} types has no structural schema: {node}")
        return _structural({**some[0], **{key: node[key] for key in ("description",) if key in node}}, definitions)
    schema: Schema = {}
    if "description" in node:
        schema["description"] = _sentence(node)
    for key in _BOUNDS:
        if key in node:
            schema[key] = node[key]
    if "const" in node:
        schema |= {"type": "string", "enum": [node["const"]]}
    if node.get("type") == "integer":
        schema["format"] = "int64"
    if node.get("type") == "array":
        schema["items"] = _structural(node["items"], definitions)
    if isinstance(node.get("additionalProperties"), Mapping):
        schema["additionalProperties"] = _structural(node["additionalProperties"], definitions)
    elif node.get("type") == "object":
        if fields := {name: _structural(value, definitions) for name, value in node["properties"].items()}:
            schema["properties"] = fields
        if node.get("required"):
            schema["required"] = list(node["required"])
    return schema


def _sentence(node: Mapping[str, Any]) -> str:
    """Return the description of a model or field as plain text."""
    return " ".join(str(node["description"]).replace("`", "").split())


def by_key(schema: Schema, name: str, *, key: str) -> None:
    """Make a list of an object a map by `key`: each applier then owns single entries, and no key may repeat.

    Entries are atomic. Otherwise the API server would record, and read at each write, the owner of each field.
    """
    field = schema["properties"][name]
    field |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    field["items"]["x-kubernetes-map-type"] = "atomic"


def pod_spec_schema(openapi: Mapping[str, Any]) -> Schema:
    """Return the structural schema of a PodSpec, from an API server's document `/openapi/v3/api/v1`.

    Unknown fields are pruned, so stored objects are as deep as the schema, and `kubectl apply` refuses a misspelt
    field. Lists, maps and quantities are bounded. Quantities may be numbers (`cpu: 0.5`), which a CRD's int-or-string
    would refuse. Defaults are dropped, except of list keys. Raises `SchemaError` for another document.
    """
    schemas = openapi.get("components", {}).get("schemas", {})
    if _POD_SPEC not in schemas:
        raise SchemaError(
            f"the document has no {_POD_SPEC}; it must be what an API server serves at /openapi/v3/api/v1"
        )
    schema = _inlined(schemas[_POD_SPEC], schemas)
    if "ephemeralContainers" in schema["properties"]:
        schema["properties"]["ephemeralContainers"] = _not_on_create("use kubectl debug once the pod runs")
    return schema


def _not_on_create(instead: str) -> Schema:
    """Return the schema of a list that must be empty. Every entry is refused, so nothing is stored. `instead`: advice,
    for the message."""
    return {
        "type": "array",
        "maxItems": MAX_ITEMS,
        "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        "x-kubernetes-validations": [
            {"rule": "size(self) == 0", "message": f"cannot be set on a new pod; remove it and {instead}"}
        ],
    }


def _quantity() -> Schema:
    """Return the schema of a quantity: a number or a short text. No single CRD type covers both."""
    return {
        "x-kubernetes-preserve-unknown-fields": True,
        "maxLength": MAX_QUANTITY,
        "pattern": _QUANTITY_PATTERN,
        "maxItems": 0,
        "maxProperties": 0,
    }


def _texts() -> Schema:
    return {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": MAX_ITEMS}


def _inlined(node: Mapping[str, Any], schemas: Mapping[str, Any], keys: Sequence[str] = (), field: str = "") -> Schema:
    reference = node.get("$ref") or (node["allOf"][0]["$ref"] if "allOf" in node else None)
    if reference is not None:
        name = reference.removeprefix(_REFERENCE)
        if name == _QUANTITY:
            return _quantity()
        if name == _INT_OR_STRING:
            return {"x-kubernetes-int-or-string": True, "maxLength": MAX_NAME}
        if name == _OBJECT_META:  # metadata in a volume claim template; only these two fields are allowed there
            return {"type": "object", "properties": {"annotations": _texts(), "labels": _texts()}}
        return _inlined(schemas[name], schemas, keys, field)
    schema: Schema = {key: node[key] for key in _KEPT if key in node}
    if node.get("type") == "array":
        schema["maxItems"] = _LONGEST.get(field, MAX_ITEMS)
        schema["items"] = _inlined(node["items"], schemas, node.get("x-kubernetes-list-map-keys", ()))
    elif "additionalProperties" in node:
        schema["maxProperties"] = _LONGEST.get(field, MAX_ITEMS)
        schema["additionalProperties"] = _inlined(node["additionalProperties"], schemas)
    elif node.get("type") == "object":
        schema["properties"] = {}
        for name, value in node.get("properties", {}).items():
            inner = schema["properties"][name] = _inlined(value, schemas, field=name)
            if name in keys and name not in node.get("required", ()) and "default" in value:
                inner["default"] = value["default"]
        if not schema["properties"]:
            raise SchemaError(f"{field or 'an entry'} is an object without fields; its depth would have no bound")
    return schema
