"""Inserts the chart's values into kustomize's objects. Until an object is written as YAML, a marker text stands for
each value.

Guarantees:
- A value of the chart replaces exactly one field of the manifests, or the beginning of paths in it.
- Every other field is as kustomize has rendered it.
- Braces in the manifests never reach Helm as a template.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

OPERATOR, AGENT = "sharepod-operator", "sharepod-agent"
_SETTINGS = {
    "sharepod-operator-settings": "sharepod.operatorSettings",
    "sharepod-agent-settings": "sharepod.agentSettings",
}
_SETTINGS_NAME = re.compile(r"(sharepod-(?:operator|agent)-settings)-[a-z0-9]{10}")
FOLDERS = {"kubelet_root": "/var/lib/kubelet", "state_dir": "/var/lib/sharepod"}
"""Settings of the agent that name a folder of the node -> the folder in the manifests, which the setting's value
replaces."""

Object = dict[str, Any]


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: object) -> bool:
        return True


@dataclass
class Markers:
    """Markers in one object. `texts`: the template text that replaces each marker, by its number."""

    texts: list[str] = field(default_factory=list)

    def value(self, expression: str) -> str:
        """Return a marker for a whole field, whose value the template writes as JSON."""
        return self._add("v", f"{{{{ {expression} | toJson }}}}")

    def optional(self, expression: str) -> str:
        """Return a marker for a field that the template omits if the expression is empty."""
        return self._add("o", expression)

    def part(self, expression: str) -> str:
        """Return a marker for a part of a string."""
        return self._add("p", f"{{{{ {expression} }}}}")

    def _add(self, kind: str, text: str) -> str:
        self.texts.append(text)
        return f"@@{kind}{len(self.texts) - 1}@@"

    def written(self, content: Object) -> str:
        """Return an object as the text of a template, with all markers replaced."""
        text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120)
        text = text.replace("{{", '{{ "{{" }}')
        text = re.sub(r"(?m)^( *)([\w]+): '@@o(\d+)@@'\n", self._optional_line, text)
        text = re.sub(r"'@@v(\d+)@@'", lambda found: self.texts[int(found[1])], text)
        return re.sub(r"@@p(\d+)@@", lambda found: self.texts[int(found[1])], text)

    def _optional_line(self, found: re.Match[str]) -> str:
        indent, key, number = found.groups()
        return f"{{{{- with {self.texts[int(number)]} }}}}\n{indent}{key}: {{{{ toJson . }}}}\n{{{{- end }}}}\n"


def as_template(original: Object) -> str:
    """Return an object of the manifests as a template."""
    content, markers = copy.deepcopy(original), Markers()
    kind, name = content["kind"], content["metadata"]["name"]
    if kind in ("CustomResourceDefinition", "Namespace"):
        # "keep": `helm uninstall` would otherwise delete them with all custom resources, or the whole namespace.
        content["metadata"].setdefault("annotations", {})["helm.sh/resource-policy"] = "keep"
    elif kind == "ConfigMap" and plain_name(name) in _SETTINGS:
        name = plain_name(name)
        content["metadata"]["name"] = name
        content["data"] = {"settings.yaml": markers.value(f'include "{_SETTINGS[name]}" .')}
    elif kind in ("Deployment", "DaemonSet"):
        _workload(content, markers, "operator" if name == OPERATOR else "agent")
    return markers.written(content)


def plain_name(name: str) -> str:
    """Return the name of a ConfigMap of settings without the hash that kustomize appends."""
    return match[1] if (match := _SETTINGS_NAME.fullmatch(name)) else name


def _workload(content: Object, markers: Markers, part: str) -> None:
    """Insert the values of a part (operator, agent) into its Deployment, or into a DaemonSet that uses the agent's
    image."""
    template = content["spec"]["template"]
    pod, values = template["spec"], f".Values.{part}"
    main = content["metadata"]["name"] in (OPERATOR, AGENT)
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        container["image"] = markers.value(f'include "sharepod.image" (list . "{part}")')
        container["imagePullPolicy"] = markers.optional(".Values.image.pullPolicy")
    pod["imagePullSecrets"] = markers.optional(".Values.image.pullSecrets")
    pod["nodeSelector"] = markers.optional(f"{values}.nodeSelector")
    pod["tolerations"] = markers.optional(f"{values}.tolerations")
    if "runtimeClassName" in pod:
        pod["runtimeClassName"] = markers.optional(".Values.runtimeClass")
    if "replicas" in content["spec"]:
        content["spec"]["replicas"] = markers.value(f"{values}.replicas")
    if main:
        pod["containers"][0]["resources"] = markers.value(f"{values}.resources")
        settings = f'include "sharepod.{part}Settings" . | sha256sum'
        template["metadata"].setdefault("annotations", {})["checksum/settings"] = markers.value(settings)
    if part == "agent":
        for setting, folder in FOLDERS.items():
            _replace_folder(pod, folder, markers.part(f"{values}.settings.{setting}"))
    for volume in pod.get("volumes", []):
        if "configMap" in volume:
            volume["configMap"]["name"] = plain_name(volume["configMap"]["name"])


def _replace_folder(tree: Any, folder: str, marker: str) -> None:
    """Replace the folder by the marker in all paths of `tree`, a part of a manifest, that begin with the folder."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries):
        if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
            tree[key] = marker + value.removeprefix(folder)
        else:
            _replace_folder(value, folder, marker)
