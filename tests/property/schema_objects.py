"""Objects that a CRD's schema allows, and the form in which an API server stores them: without unknown fields, with
defaults.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]

_MOST = 3
"""Most entries of a list or map. Few entries are enough to show faults."""
_TEXTS = st.one_of(st.sampled_from(["", "a", "4Gi", "4096Mi", "team/a", "/", "0.5", "1e3"]), st.text(max_size=6))
_QUANTITIES = st.sampled_from([4 << 30, "4Gi", "4096Mi", "1.5Gi", "4294967296", "1e9", "3T", "0", 7, "nonsense"])


def bodies(schema: Json) -> st.SearchStrategy[Json]:
    """Return a strategy for bodies (`spec` and `status`) that the schema of a kind allows."""
    fields = {name: field for name, field in schema["properties"].items() if name in ("spec", "status")}
    return _objects({"type": "object", "properties": fields, "required": ["spec"]})


def _values(schema: Json) -> st.SearchStrategy[Any]:
    if schema.get("x-kubernetes-int-or-string"):
        return _QUANTITIES
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return st.dictionaries(_TEXTS, _values(schema["additionalProperties"]), max_size=_MOST)
        case "object":
            return _objects(schema)
        case "array":
            items = _values(schema["items"])
            if keys := schema.get("x-kubernetes-list-map-keys"):
                return st.lists(items, max_size=_MOST, unique_by=lambda item: tuple(item.get(key) for key in keys))
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=_MOST)
        case "integer":
            return st.integers(schema.get("minimum", -(1 << 31)), schema.get("maximum", 1 << 40))
        case "number":
            return st.one_of(st.sampled_from([0, 1, 0.4, 0.25, 1.0]), st.floats(0, 1))
        case "boolean":
            return st.booleans()
        case "string":
            return _texts(schema)
    return _QUANTITIES


def _texts(schema: Json) -> st.SearchStrategy[str]:
    texts: st.SearchStrategy[str] = _TEXTS
    if "pattern" in schema:
        texts = st.from_regex(str(schema["pattern"]), fullmatch=True)
    return texts.filter(lambda text: schema.get("minLength", 0) <= len(text) <= schema.get("maxLength", 64))


def _objects(schema: Json) -> st.SearchStrategy[Json]:
    required = schema.get("required", ())
    fields = {name: _values(field) for name, field in schema.get("properties", {}).items()}
    return st.fixed_dictionaries(
        {name: field for name, field in fields.items() if name in required},
        optional={name: field for name, field in fields.items() if name not in required},
    )


def as_stored(item: Json, schema: Json) -> Json:
    """Return an object as an API server stores it: unknown fields of its body are pruned, defaults are set."""
    named = {name: item[name] for name in ("apiVersion", "kind", "metadata")}
    pruned: Json = _stored({name: value for name, value in item.items() if name not in named}, schema)
    return {**named, **pruned}


def _stored(value: Any, schema: Json) -> Any:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        return {name: _stored(item, schema["additionalProperties"]) for name, item in value.items()}
    if isinstance(value, dict) and "properties" in schema:
        fields = schema["properties"]
        defaults = {name: field["default"] for name, field in fields.items() if "default" in field}
        given = {name: _stored(item, fields[name]) for name, item in value.items() if name in fields}
        return {**defaults, **given}
    if isinstance(value, list) and "items" in schema:
        return [_stored(item, schema["items"]) for item in value]
    return value
