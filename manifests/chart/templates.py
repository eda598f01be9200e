"""Templates of the chart: the objects of all overlays, each with the condition under which it is applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chart.overlays import BASE, Overlay
from chart.values import as_template, plain_name

Object = dict[str, Any]
CREATES_NAMESPACE = ".Values.namespace.create"
OPTIONAL = {"sharepod-free": ".Values.freeShares"}
"""Name of an object of the base -> the chart's value that decides whether it is in the chart."""
_CHECKS = '{{- include "sharepod.checks" . }}\n'


def identity(content: Object) -> tuple[str, str, str]:
    """Return (kind, namespace, name) of an object. The hash that kustomize appends to the name of a ConfigMap is left
    out."""
    metadata = content["metadata"]
    return content["kind"], metadata.get("namespace", ""), plain_name(metadata["name"])


def templates(rendered: Mapping[Overlay, Iterable[Object]]) -> dict[str, str]:
    """Return the chart's templates, by file name. `rendered`: the objects of each overlay, including the base."""
    found: dict[tuple[str, str, str], dict[Overlay, Object]] = {}
    for overlay, objects in rendered.items():
        for content in objects:
            found.setdefault(identity(content), {})[overlay] = content
    files: dict[str, str] = {}
    for (kind, _namespace, name), variants in found.items():
        text = _template(variants)
        if kind == "Namespace":
            text = _when([CREATES_NAMESPACE], text)
        elif name in OPTIONAL:
            text = _when([OPTIONAL[name]], text)
        file = f"{kind}-{name}.yaml".lower().replace(":", "-")
        files[file] = files.get(file, "") + text
    files["checks.yaml"] = _CHECKS
    return files


def _template(variants: Mapping[Overlay, Object]) -> str:
    """Return the template of one object. `variants`: the object as each overlay renders it; overlays that render it
    equally share one branch."""
    alike: list[tuple[Object, list[str]]] = []
    base = variants.get(BASE)
    for overlay, content in variants.items():
        if content == base:
            continue
        same = next((conditions for other, conditions in alike if other == content), None)
        if same is None:
            alike.append((content, [overlay.when]))
        else:
            same.append(overlay.when)
    if base is None:
        return "".join(_when(conditions, f"---\n{as_template(content)}") for content, conditions in alike)
    text = ""
    for content, conditions in alike:
        text += f"{{{{- {'else ' if text else ''}if {_any(conditions)} }}}}\n---\n{as_template(content)}"
    return f"{text}{{{{- else }}}}\n---\n{as_template(base)}{{{{- end }}}}\n" if text else f"---\n{as_template(base)}"


def _when(conditions: Sequence[str], text: str) -> str:
    return f"{{{{- if {_any(conditions)} }}}}\n{text}{{{{- end }}}}\n"


def _any(conditions: Sequence[str]) -> str:
    return f"or {' '.join(f'({each})' for each in conditions)}" if len(conditions) > 1 else conditions[0]
