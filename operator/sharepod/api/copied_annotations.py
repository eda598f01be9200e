"""Annotations of a SharePod that its Pod gets: those that a list names, and no others.

Container runtimes and their plugins take annotations of Pods for devices, mounts, hypervisors and hooks, by names that
nobody can list: the list names what is known to be harmless instead.

Guarantees:
- An annotation that no pattern names is not copied.
- `kubectl.kubernetes.io/last-applied-configuration`, our own annotations and the dialects' are never copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .dialects import is_dialect
from .objects import GROUP

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation in which kubectl remembers what it has applied: it would take the Pod for that."""

_OF_TOOLS = ("argocd.argoproj.io/*", "meta.helm.sh/*", "helm.sh/*", "*.fluxcd.io/*", "config.kubernetes.io/*")
"""Annotations by which tools know what they have applied: nobody misses them on a Pod."""

ANNOTATION_PATTERN = r"^(\*|(\*\.)?[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(/(\*|[A-Za-z0-9][-A-Za-z0-9_.]*))?)$"
"""Pattern of annotations, as a regular expression: `*`, or a name whose prefix may begin with `*.` and rest be `*`."""

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
    # identities that a cloud's webhook gives
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
    # backups, profiles, and what people and Helm read
    "*.velero.io/*",
    "container.apparmor.security.beta.kubernetes.io/*",
    "kubectl.kubernetes.io/*",
    "app.kubernetes.io/*",
    "checksum/*",
)
"""Annotations that are copied unless an administrator says otherwise: read by monitoring, meshes, autoscalers, queues
and networks off Pods, and by no container runtime for devices."""


def missed(sharepod: Mapping[str, Any], patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the annotations of a SharePod that its Pod does not get, and that somebody may have meant for it."""
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
    """Return whether a pattern names an annotation. The prefix is compared as a whole, or below `*.`."""
    if pattern == "*":
        return True
    prefix, slash, rest = name.rpartition("/")
    wanted, wanted_slash, wanted_rest = pattern.rpartition("/")
    if slash != wanted_slash or wanted_rest not in ("*", rest):
        return False
    return prefix.endswith(wanted[1:]) if wanted.startswith("*.") else prefix == wanted
