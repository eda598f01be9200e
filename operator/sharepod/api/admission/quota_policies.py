"""Admission policies for namespaces in which a ResourceQuota names the resources of the resource line. They refuse
requests that the quota could not count. Pure.

Each policy takes the namespace's quotas as its parameters, so the API server evaluates it once for each quota.

Guarantees, in a namespace whose quota names a resource of the line:
- A claim of class `sharepod.dev` or `scheduler.sharepod.dev` is created only for a Pod with a line, or by the writers
  of ledgers.
- Where memory is counted, each Pod with a line and each SharePod sets its memory.
- The Pod of a SharePod has a line.

In any namespace, the API server warns of
- a LimitRange with a default for a resource of the line, which each container would get;
- a ResourceQuota with a misspelt name of such a resource, which would count nothing.
"""

from __future__ import annotations

from typing import Any

from sharepod.api.dialects import KEYS
from sharepod.api.objects import API_VERSION, DEVICE_CLASS, LINE_REQUEST, SCHEDULER_CLASS
from sharepod.api.resource_line import MEMORY, MILLI
from sharepod.api.sharepod import PLURAL

from .cel import Validation, listed, refuse, text, texts
from .line_policies import OF_NO_SHAREPOD, PATCHES_LEDGER, asks, limit_field

NAME = "sharepod-quota"
COUNTED = {name: f"requests.{name}" for name in (MILLI, MEMORY)}
"""Resource of the line -> its name in a ResourceQuota."""

_API = "admissionregistration.k8s.io/v1"
_CHANGED = (
    "request.operation == 'CREATE' || object.spec != oldObject.spec || "
    "object.metadata.?annotations.orValue({}) != oldObject.metadata.?annotations.orValue({})"
)
_MEANT = "^[^/]*share-?pod[^/]*/"
"""Pattern of a resource's name in a quota that is meant for SharePod. `count/` precedes the name of a kind."""
_OF_CLASS = ".deviceclass.resource.k8s.io/devices"
_QUOTA = "ResourceQuota ' + params.metadata.name + '"


def quota_policies() -> list[dict[str, Any]]:
    """Return the policies on Pods, SharePods and claims, each with its binding."""
    return [*_pods(), *_sharepods(), *_claims(), *_limit_ranges(), *_quotas()]


def _counts(name: str) -> str:
    return f"({text(COUNTED[name])} in params.spec.?hard.orValue({{}}))"


def _cannot(name: str) -> str:
    return f"(QuotaCannotCount: {_QUOTA} names {COUNTED[name]})"


def _pods() -> list[dict[str, Any]]:
    containers = "(object.spec.containers + object.spec.?initContainers.orValue([]))"
    tenant = f"!({OF_NO_SHAREPOD})"
    takes_memory = f"{containers}.exists(c, {asks(MEMORY)})"
    first = f"{containers}.filter(c, {asks(MILLI)})[0]"
    whole = "a Pod of mode Exclusive takes memory that is not counted, and belongs in another namespace"
    return _policy(
        f"{NAME}-pods",
        ("", "v1", "pods", ["CREATE"]),
        [{"name": "has-a-share", "expression": f"{tenant} || {containers}.exists(c, {asks(MILLI)})"}],
        [
            refuse(
                f"!{_counts(MILLI)} || {containers}.exists(c, {asks(MILLI)})",
                f"'spec.containers[' + object.spec.containers[0].name + '].resources.limits[{MILLI}]: is required "
                f"{_cannot(MILLI)}; the operator writes it a few seconds after the policies were applied'",
            ),
            refuse(
                f"!{_counts(MEMORY)} || {takes_memory} || {tenant}",
                f"{limit_field(MEMORY, first)}is required {_cannot(MEMORY)}; write MiB such as 4096; {whole}'",
            ),
            refuse(f"!{_counts(MEMORY)} || {takes_memory}", f"'spec.gpu.memory: {_memory()}'"),
        ],
    )


def _memory() -> str:
    whole = "a SharePod of mode Exclusive takes memory that is not counted, and belongs in another namespace"
    return f"is required {_cannot(MEMORY)}; write a size such as 4Gi; {whole}"


def _sharepods() -> list[dict[str, Any]]:
    group, _, version = API_VERSION.partition("/")
    names = next(key.annotations for key in KEYS if key.field == "memory")
    annotated = f"object.metadata.?annotations.orValue({{}}).exists(k, k in {texts(names)})"
    return _policy(
        f"{NAME}-sharepods",
        (group, version, PLURAL, ["CREATE", "UPDATE"]),
        [{"name": "new-or-changed", "expression": _CHANGED}],
        [
            refuse(
                f"!{_counts(MEMORY)} || object.spec.?gpu.?memory.hasValue() || {annotated}",
                f"'spec.gpu.memory: {_memory()}'",
            )
        ],
    )


def _claims() -> list[dict[str, Any]]:
    template = "object.kind == 'ResourceClaimTemplate'"
    requests = listed(f"({template} ? object.spec.?spec : object.?spec).?devices.?requests")
    is_class = f"?deviceClassName.orValue('') in {texts((DEVICE_CLASS, SCHEDULER_CLASS))}"
    ours = f"(r.?exactly.{is_class} || r.?firstAvailable.orValue([]).exists(a, a.{is_class}))"
    of_line = (
        f"(r.name == {text(LINE_REQUEST)} && r.?exactly.?deviceClassName.orValue('') == {text(DEVICE_CLASS)} && "
        "r.?exactly.?capacity.?requests.orValue({}).size() == 0)"
    )
    return _policy(
        f"{NAME}-claims",
        ("resource.k8s.io", "v1", "resourceclaims,resourceclaimtemplates", ["CREATE"]),
        [
            {"name": "of-our-class", "expression": f"{requests}.exists(r, {ours} && !{of_line})"},
            {"name": "not-by-the-operator", "expression": f"!{PATCHES_LEDGER}"},
        ],
        [
            refuse(
                f"!{_counts(MILLI)} && !{_counts(MEMORY)}",
                f"'spec.devices.requests: a claim of class {DEVICE_CLASS} or {SCHEDULER_CLASS} is counted by no quota "
                f"on the line (QuotaCannotCount: {_QUOTA}); write resources.limits[{MILLI}] in the Pod, or use another "
                "namespace'",
            )
        ],
    )


def _limit_ranges() -> list[dict[str, Any]]:
    """Return the policy that warns of a LimitRange's default (or `max`) that every container would get."""
    given = f"l.?default.orValue({{}}).exists(k, k in {texts((MILLI, MEMORY))})"
    limits = "object.spec.limits"
    first = f"{limits}.filter(l, {given})[0].default.filter(k, k in {texts((MILLI, MEMORY))})[0]"
    return _policy(
        f"{NAME}-limit-ranges",
        ("", "v1", "limitranges", ["CREATE", "UPDATE"]),
        [],
        [
            refuse(
                f"!{limits}.exists(l, {given})",
                f"'spec.limits[].default[' + {first} + ']: gives it to every container without a value, also to "
                "containers that need no GPU (max is the default where there is no other); write it only where each "
                "container has a line'",
            )
        ],
        warns=True,
    )


def _quotas() -> list[dict[str, Any]]:
    """Return the policy that warns of a ResourceQuota with a name that counts nothing. The API server accepts any
    qualified name."""
    known = texts((*COUNTED.values(), f"{DEVICE_CLASS}{_OF_CLASS}", f"{SCHEDULER_CLASS}{_OF_CLASS}"))
    names = f"object.spec.?hard.orValue({{}}).filter(k, k.matches({text(_MEANT)}) && !(k in {known}))"
    return _policy(
        f"{NAME}-names",
        ("", "v1", "resourcequotas", ["CREATE", "UPDATE"]),
        [],
        [
            refuse(
                f"{names}.size() == 0",
                f"'spec.hard[' + {names}[0] + ']: counts nothing; write {' or '.join(COUNTED.values())}'",
            )
        ],
        warns=True,
    )


def _policy(
    name: str,
    of: tuple[str, str, str, list[str]],
    conditions: list[dict[str, str]],
    validations: list[Validation],
    *,
    warns: bool = False,
) -> list[dict[str, Any]]:
    """Return a policy on objects of one API group, and its binding. `of`: (group, version, resources, operations).
    `warns`: it takes no quota, and warns instead of refusing."""
    group, version, resources, operations = of
    rule = {
        "apiGroups": [group],
        "apiVersions": [version],
        "operations": operations,
        "resources": resources.split(","),
    }
    spec = {
        "failurePolicy": "Ignore" if warns else "Fail",
        **({} if warns else {"paramKind": {"apiVersion": "v1", "kind": "ResourceQuota"}}),
        "matchConstraints": {"resourceRules": [rule]},
        **({"matchConditions": conditions} if conditions else {}),
        "validations": validations,
    }
    binding = {
        "policyName": name,
        "validationActions": ["Warn" if warns else "Deny"],
        **({} if warns else {"paramRef": {"selector": {}, "parameterNotFoundAction": "Allow"}}),
    }
    return [
        {"apiVersion": _API, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name}, "spec": spec},
        {"apiVersion": _API, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": binding},
    ]
