"""Admission policy on the claims that attach the GPUs of SharePods' Pods: only the operator creates them, each for one
Pod. Pure.

Otherwise a second Pod could use the share by naming the claim.
"""

from __future__ import annotations

from typing import Any

from sharepod.api.objects import DEVICE_CLASS, GROUP, SHARE_CLAIMS_POLICY, SHARE_REQUEST

from .cel import CLAIMS_RULE, in_force, listed, refuse, text

_REQUESTS = listed("object.?spec.?devices.?requests")
MARKED = (
    f"({_REQUESTS}.size() == 1 && {_REQUESTS}.all(r, r.name == {text(SHARE_REQUEST)} && "
    f"r.?exactly.?deviceClassName.orValue('') == {text(DEVICE_CLASS)} && "
    "r.?exactly.?capacity.?requests.orValue({}).size() == 0))"
)
"""CEL expression that is true if the object is a claim in the form that the operator creates for SharePods' Pods."""

NAMED_AS_SHARE = (
    f"{SHARE_REQUEST} without capacity is of a claim that the operator makes for a SharePod; use another name, and "
    "write capacity unless the claim is Exclusive"
)
"""Message that refuses such a claim, or a template of one, from another user."""

_PATCHES_LEDGER = f"authorizer.group({text(GROUP)}).resource('gpunodes').check('patch').allowed()"


def share_claim_policy() -> list[dict[str, Any]]:
    """Return the policy and its binding."""
    owners = "{}.metadata.?ownerReferences.orValue([]).filter(o, o.?controller.orValue(false)).map(o, o.uid)"
    now, before = owners.format("object"), owners.format("oldObject")
    reserved = "{}.?status.?reservedFor.orValue([])"
    strangers = (
        f"{reserved.format('object')}.filter(r, !(r.uid in {now}) && "
        f"!{reserved.format('oldObject')}.exists(o, o.uid == r.uid))"
    )
    rule = {**CLAIMS_RULE, "resources": ["resourceclaims", "resourceclaims/status"]}
    validations = [
        refuse(
            f"request.operation != 'CREATE' || {_PATCHES_LEDGER}",
            f"'spec.devices.requests: name: {NAMED_AS_SHARE}'",
        ),
        refuse(
            f"request.operation != 'UPDATE' || {now}.all(o, o in {before})",
            "'metadata.ownerReferences: the claim belongs to the Pod of a SharePod; write another claim'",
        ),
        refuse(
            f"request.operation != 'UPDATE' || {strangers}.size() == 0",
            "'status.reservedFor: the claim is for the Pod of the SharePod that it was made for, and not "
            f"for ' + {strangers}[0].name + '; write a claim of its own for that Pod'",
        ),
    ]
    return in_force(SHARE_CLAIMS_POLICY, rule, {"of-a-sharepod": MARKED}, validations)
