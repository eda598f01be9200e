"""The generated schemas: they are structural, contain nothing that a CRD cannot have, and match the models."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from sharepod.api.bounds import MAX_CONTAINERS, MAX_DEPTH, MAX_ITEMS, MAX_NAME, MAX_QUANTITY, MAX_SELECTION
from sharepod.api.crd.definitions import gpunode_crd, sharepod_crd
from sharepod.api.crd.gpu_schema import gpu_schema
from sharepod.api.crd.schema import SchemaError, model_schema, pod_spec_schema
from sharepod.api.gpunode import GPUNodeSpec, GPUNodeStatus
from sharepod.api.objects import VERSION
from sharepod.api.sharepod import OWN_FIELDS, GpuSpec, SharePodStatus
from sharepod.api.units import UnitError, parse_quantity

ROOT = Path(__file__).resolve().parents[4]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

REFERENCE = {"$ref": "#/components/schemas/io.k8s.apimachinery.pkg.api.resource.Quantity"}


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, schema) of every schema inside a schema."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    for part in ("items", "additionalProperties"):
        if isinstance(schema.get(part), dict):
            yield from nodes(schema[part], f"{path}[{part}]")


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


@pytest.fixture(scope="module")
def checked_in() -> dict[str, Any]:
    crd: dict[str, Any] = yaml.load((ROOT / "crds" / "sharepods.yaml").read_text(), Loader=_LOADER)
    return crd


def test_checked_in_files_are_what_the_models_make() -> None:
    command = [sys.executable, str(ROOT / "crds" / "generate.py"), "--check"]
    check = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert check.returncode == 0, check.stderr


@pytest.mark.promise("install-no-webhook")
@pytest.mark.parametrize("name", ["sharepods", "gpunodes", "gpubudgets", "gpustatements"])
def test_a_crd_has_one_version_and_no_conversion_webhook(name: str) -> None:
    spec = yaml.load((ROOT / "crds" / f"{name}.yaml").read_text(), Loader=_LOADER)["spec"]
    assert [(entry["name"], entry["served"], entry["storage"]) for entry in spec["versions"]] == [(VERSION, True, True)]
    assert spec.get("conversion", {"strategy": "None"}) == {"strategy": "None"}


@pytest.mark.parametrize("name", ["sharepods", "gpunodes", "gpustatements", "gpubudgets"])
def test_an_api_server_returns_each_schema_as_it_was_applied(name: str) -> None:
    """Else server-side apply of the same file by another manager, such as Helm after kubectl, is a conflict."""
    crd = yaml.load((ROOT / "crds" / f"{name}.yaml").read_text(), Loader=_LOADER)
    for path, schema in nodes(schema_of(crd)):
        assert schema.get("properties") != {}, f"{path}: API servers drop an empty map"
        for bound in ("minimum", "maximum"):
            if bound in schema:
                kept = int(Decimal(repr(float(schema[bound]))))
                assert schema[bound] == kept, f"{path}: API servers keep bounds as 64-bit floats"


def test_a_stale_file_is_named(tmp_path: Path) -> None:
    document = tmp_path / "v1.json"
    document.write_text('{"components": {"schemas": {}}}')
    command = [sys.executable, str(ROOT / "crds" / "generate.py"), "--check", "--openapi", str(document)]
    check = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert check.returncode == 1
    assert "it must be what an API server serves at /openapi/v3/api/v1" in check.stderr


def test_schemas_are_structural(checked_in: dict[str, Any]) -> None:
    for path, node in [*nodes(schema_of(checked_in)), *nodes(schema_of(gpunode_crd()))]:
        typed = "type" in node or "x-kubernetes-int-or-string" in node or "x-kubernetes-preserve-unknown-fields" in node
        assert typed, f"{path} has no type"
        assert not {"$ref", "anyOf", "oneOf", "allOf", "title", "nullable", "x-kubernetes-patch-strategy"} & set(
            node
        ), path


def test_pod_fields_point_to_the_pods_descriptions_and_keep_nothing_that_they_do_not_know(
    checked_in: dict[str, Any],
) -> None:
    spec = schema_of(checked_in)["properties"]["spec"]
    pod = {name: field for name, field in spec["properties"].items() if name not in OWN_FIELDS}
    assert {"containers", "volumes", "affinity", "tolerations", "resourceClaims"} <= set(pod)
    for name, field in pod.items():
        assert field["description"] == f"As of a Pod: kubectl explain pod.spec.{name}."
        for path, node in nodes(field, name):
            assert path == name or "description" not in node, path
    for path, node in nodes(schema_of(checked_in)):
        if "x-kubernetes-preserve-unknown-fields" in node and not path.startswith(".spec.ephemeralContainers"):
            assert (node["maxItems"], node["maxProperties"], node["maxLength"]) == (0, 0, MAX_QUANTITY), path
    made = pod_spec_schema(
        {
            "components": {
                "schemas": {
                    "io.k8s.api.core.v1.PodSpec": {"type": "object", "properties": {"overhead": REFERENCE}},
                    "io.k8s.apimachinery.pkg.api.resource.Quantity": {"type": "string"},
                }
            }
        }
    )
    assert (made["properties"]["overhead"]["maxItems"], made["properties"]["overhead"]["maxProperties"]) == (0, 0)


@pytest.mark.promise("operator-bounds")
def test_the_size_of_objects_that_the_crd_admits_is_bounded(checked_in: dict[str, Any]) -> None:
    spec = schema_of(checked_in)["properties"]["spec"]
    for path, node in nodes(spec):
        assert path.count(".") + path.count("[") < MAX_DEPTH
        assert node.get("type") != "array" or 0 < node["maxItems"] <= MAX_ITEMS, path
        assert "additionalProperties" not in node or 0 < node["maxProperties"] <= MAX_ITEMS, path
        if "x-kubernetes-int-or-string" in node:
            assert node["maxLength"] <= MAX_NAME, path
    assert spec["properties"]["containers"]["maxItems"] == MAX_CONTAINERS
    assert spec["properties"]["tolerations"]["maxItems"] == MAX_SELECTION


@pytest.mark.parametrize("text", ["1", "0.5", ".5", "5.", "+1", "4Gi", "100m", "1e3", "1E-3", "2E", "9n"])
def test_a_quantity_that_the_operator_reads_passes_the_schema(checked_in: dict[str, Any], text: str) -> None:
    assert re.search(quantity_of(checked_in)["pattern"], text)
    parse_quantity(text)


@pytest.mark.parametrize("text", ["", "4GB", "four", "1e", ".", "4 Gi", "0x1", "1e999", "٤"])
def test_an_invalid_quantity_is_refused_by_the_schema(checked_in: dict[str, Any], text: str) -> None:
    assert not re.search(quantity_of(checked_in)["pattern"], text)
    with pytest.raises(UnitError):
        parse_quantity(text)


def quantity_of(crd: dict[str, Any]) -> dict[str, Any]:
    container = schema_of(crd)["properties"]["spec"]["properties"]["containers"]["items"]
    limits = container["properties"]["resources"]["properties"]["limits"]
    found: dict[str, Any] = limits["additionalProperties"]
    return found


def test_an_object_without_fields_is_no_schema() -> None:
    pod_spec = {"type": "object", "properties": {"anything": {"type": "object"}}}
    with pytest.raises(SchemaError, match="anything is an object without fields"):
        pod_spec_schema({"components": {"schemas": {"io.k8s.api.core.v1.PodSpec": pod_spec}}})


def test_the_gpu_block_has_the_fields_of_its_model_with_its_defaults() -> None:
    properties = gpu_schema()["properties"]
    assert set(properties) == {field.alias for field in GpuSpec.model_fields.values()}
    model = GpuSpec()
    for name, field in GpuSpec.model_fields.items():
        if "default" in properties[field.alias]:
            assert properties[field.alias]["default"] == getattr(model, name), name


def test_every_rule_has_a_message_that_stands_alone() -> None:
    rules = [rule for _, node in nodes(gpu_schema()) for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) >= 15
    for rule in rules:
        assert rule["message"], rule["rule"]


def test_what_stays_is_ruled_at_its_own_field_as_a_rule_of_the_whole_spec_costs_every_status_write(
    checked_in: dict[str, Any],
) -> None:
    spec = schema_of(checked_in)["properties"]["spec"]
    assert [rule["rule"] for rule in spec["x-kubernetes-validations"]] == ["has(self.gpu) == has(oldSelf.gpu)"]
    for name, field in spec["properties"].items():
        stays = name not in OWN_FIELDS and name != "overhead"  # `overhead` has quantities, which CEL cannot compare
        ruled = "self == oldSelf" in [rule["rule"] for rule in field.get("x-kubernetes-validations", [])]
        assert ruled is stays, name


@pytest.mark.parametrize("model", [GPUNodeSpec, GPUNodeStatus, SharePodStatus])
def test_a_model_has_the_fields_of_its_schema(model: type[Any]) -> None:
    assert set(model_schema(model)["properties"]) == {field.alias for field in model.model_fields.values()}


@pytest.mark.promise("operator-explain")
def test_each_field_of_ours_has_a_text_in_the_words_of_yaml(checked_in: dict[str, Any]) -> None:
    spec, status = (schema_of(checked_in)["properties"][part] for part in ("spec", "status"))
    assert spec["description"]
    parts = {"spec.gpu": spec["properties"]["gpu"], "status": status}
    parts |= {f"spec.{name}": spec["properties"][name] for name in OWN_FIELDS}
    parts |= {f"gpunode.{part}": schema_of(gpunode_crd())["properties"][part] for part in ("spec", "status")}
    for part, schema in parts.items():
        for path, node in nodes(schema, part):
            if path.endswith("[items]") and node["type"] != "object":
                continue
            text = node.get("description", "")
            assert text.endswith("."), path
            assert not re.search(r"`|\b[a-z]+_[a-z]+\b", text), (path, text)


def test_only_list_keys_keep_their_defaults() -> None:
    item = {
        "type": "object",
        "properties": {
            "port": {"type": "integer"},
            "protocol": {"type": "string", "default": "TCP"},
            "note": {"type": "string", "default": ""},
        },
        "required": ["port"],
    }
    ports = {
        "type": "array",
        "items": item,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["port", "protocol"],
    }
    document = {
        "components": {"schemas": {"io.k8s.api.core.v1.PodSpec": {"type": "object", "properties": {"ports": ports}}}}
    }
    fields = pod_spec_schema(document)["properties"]["ports"]["items"]["properties"]
    assert fields["protocol"]["default"] == "TCP"
    assert "default" not in fields["note"]


def test_another_document_is_refused() -> None:
    with pytest.raises(SchemaError, match="PodSpec; it must be what an API server serves"):
        pod_spec_schema({"components": {"schemas": {}}})


def test_the_pod_spec_goes_in_as_it_is_and_is_not_changed() -> None:
    pod_spec = {
        "type": "object",
        "properties": {"containers": {"type": "array", "items": {"type": "object"}}},
        "required": ["containers"],
    }
    crd = sharepod_crd(pod_spec)
    spec = schema_of(crd)["properties"]["spec"]
    assert list(spec["properties"]) == [*OWN_FIELDS, "containers"]
    assert spec["required"] == ["containers"]
    assert list(pod_spec["properties"]) == ["containers"]
