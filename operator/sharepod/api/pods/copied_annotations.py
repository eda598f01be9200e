"""Annotations that are copied from a SharePod to its Pod: only annotations on an allow list.

Container runtimes and their plugins take devices, mounts, hypervisors and hooks from annotations of Pods, under names
that cannot all be listed. So the list names annotations that are known to be harmless.

Guarantees:
- An annotation that no pattern names is not copied.
- `kubectl.kubernetes.io/last-applied-configuration`, SharePod's own annotations and the dialects' are never copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sharepod.api.dialects import is_dialect
from sharepod.api.objects import GROUP

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation in which kubectl stores the applied manifest. On the Pod it would describe the wrong object."""

_OF_TOOLS = ("argocd.argoproj.io/*", "meta.helm.sh/*", "helm.sh/*", "*.fluxcd.io/*", "config.kubernetes.io/*")
"""Annotations in which tools store the applied manifest. They are left out without a warning."""

ANNOTATION_PATTERN = r"^(\*|(\*\.)?[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(/(\*|[A-Za-z0-9][-A-Za-z0-9_.]*))?)$"
"""Regular expression for the patterns of the allow list: `*`, or a name whose prefix may begin with `*.` and whose rest
may be `*`."""

DEFAULT_ANNOTATIONS = (
    # metrics, logs, traces
    "prometheus.io/*",
    "*.datadoghq.com/*",
    "fluentbit.io/*",
    "co.elastic.logs/*",
    "co.elastic.metrics/*",
    "*.opentelemetry.io/*",
    # service meshes and sidecars
    "*.istio.io/*",
    "linkerd.io/*",
    "*.linkerd.io/*",
    "kuma.io/*",
    "*.hashicorp.com/*",
    "dapr.io/*",
    "gke-gcsfuse/*",
    # queues, autoscalers, schedulers
    "kueue.x-k8s.io/*",
    "scheduling.k8s.io/*",
    "scheduling.volcano.sh/*",
    "cluster-autoscaler.kubernetes.io/*",
    "karpenter.sh/*",
    "descheduler.alpha.kubernetes.io/*",
    "controller.kubernetes.io/pod-deletion-cost",
    # identities from a cloud's webhook
    "iam.amazonaws.com/*",
    "eks.amazonaws.com/*",
    "iam.gke.io/*",
    "azure.workload.identity/*",
    # networks
    "kubernetes.io/ingress-bandwidth",
    "kubernetes.io/egress-bandwidth",
    "k8s.v1.cni.cncf.io/*",
    "cni.projectcalico.org/*",
    "k8s.ovn.org/*",
    # backups, profiles, and notes for people and Helm
    "*.velero.io/*",
    "container.apparmor.security.beta.kubernetes.io/*",
    "kubectl.kubernetes.io/*",
    "app.kubernetes.io/*",
    "checksum/*",
)
"""Default patterns: annotations that monitoring, meshes, autoscalers, queues and networks read from Pods, and from
which no container runtime reads devices."""


def missed(sharepod: Mapping[str, Any], patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the annotations of a SharePod that its Pod does not get although the user may have meant them for it."""
    names = sharepod["metadata"].get("annotations") or {}
    known = (*patterns, LAST_APPLIED, f"{GROUP}/*", *_OF_TOOLS)
    return tuple(
        sorted(name for name in names if not is_dialect(name) and not any(_matches(name, one) for one in known))
    )


def is_copied(name: str, patterns: Iterable[str]) -> bool:
    """Return whether the Pod of a SharePod gets an annotation of this name."""
    if name == LAST_APPLIED or name.startswith(f"{GROUP}/") or is_dialect(name):
        return False
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches the name of an annotation. A prefix that begins with `*.` matches all names
    below it."""
    if pattern == "*":
        return True
    prefix, slash, rest = name.rpartition("/")
    wanted, wanted_slash, wanted_rest = pattern.rpartition("/")
    if slash != wanted_slash or wanted_rest not in ("*", rest):
        return False
    return prefix.endswith(wanted[1:]) if wanted.startswith("*.") else prefix == wanted
