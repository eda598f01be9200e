"""Admission policy on claims of class `scheduler.sharepod.dev` and their templates: refuses requests that
kube-scheduler cannot fulfil as intended. Pure.

It refuses what `scheduled_claims.fault` would refuse later, in nearly the same words. It also refuses a claim for only
one of time and memory: kube-scheduler would allocate all of the other.
"""

from __future__ import annotations

from typing import Any

from sharepod.api.bounds import MAX_ITEMS
from sharepod.api.claims.claims import LIMIT, MEMORY, NOT_MILLI, TIME
from sharepod.api.claims.scheduled_claims import ADMIN_ACCESS, ANNOTATED, SEVERAL
from sharepod.api.dialects import STARTS
from sharepod.api.objects import SCHEDULER_CLASS

from .cel import CLAIMS_RULE, NEW_OR_ANNOTATED, Validation, in_force, listed, number, refuse, text

NAME = "sharepod-scheduler-claims"

BOTH = (
    f"kube-scheduler gives all of what a claim does not name; write both {TIME} and {MEMORY}, or neither for whole GPUs"
)


def scheduler_claim_policy() -> list[dict[str, Any]]:
    """Return the policy on claims and templates, and its binding."""
    template = "object.kind == 'ResourceClaimTemplate'"
    is_class = f"?deviceClassName.orValue('') == {text(SCHEDULER_CLASS)}"
    ours = f"(r.?exactly.{is_class} || r.?firstAvailable.orValue([]).exists(a, a.{is_class}))"
    spec = f"({template} ? object.spec.?spec : object.?spec)"
    requests = listed(f"{spec}.?devices.?requests")
    annotations = f"({template} ? object.spec.?metadata.?annotations : object.metadata.?annotations).orValue({{}})"
    alternatives = f"r.?firstAvailable.orValue([]).filter(a, a.{is_class})"
    starts = " || ".join(f"k.startsWith({text(prefix)})" for prefix in STARTS)
    variables = [
        ("present", f"size({annotations}) > {MAX_ITEMS} ? [] : {annotations}.filter(k, {starts})"),
        ("requests", f"{requests}.filter(r, {ours})"),
        ("asked", f"variables.requests.map(r, {alternatives} + (r.?exactly.{is_class} ? [r.exactly] : []))"),
        ("amounts", "variables.asked.map(l, l.map(e, e.?capacity.?requests.orValue({})))"),
    ]
    conditions = {"of-the-class": f"{requests}.exists(r, {ours})", "new-or-annotations-changed": NEW_OR_ANNOTATED}
    return in_force(NAME, CLAIMS_RULE, conditions, _validations(), variables)


def _validations() -> list[Validation]:
    def each(unless: str, message: str) -> Validation:
        return refuse(
            f"variables.amounts.all(l, l.all(a, {unless}))", f"'spec.devices.requests: capacity.requests{message}'"
        )

    time, limit = (f"quantity(string(a['{name}']))" for name in (TIME, LIMIT))
    whole = "({0}.isInteger() && {0}.asInteger() >= {1} && {0}.asInteger() <= 1000)"

    def sized(name: str, holds: str, wrong: str) -> Validation:
        bad = f"variables.amounts.map(l, l.filter(a, !({holds}))).filter(l, l.size() > 0)[0][0]['{name}']"
        return refuse(
            f"variables.amounts.all(l, l.all(a, {holds}))",
            f"'spec.devices.requests: capacity.requests.{name}: ' + {number(bad)} + ' {wrong}'",
        )

    return [
        refuse(
            "variables.present.size() == 0",
            f"'metadata.annotations[' + variables.present[0] + ']: ' + {text(ANNOTATED)}",
        ),
        refuse(
            "variables.asked.all(l, l.all(e, !e.?adminAccess.orValue(false)))",
            f"'spec.devices.requests: adminAccess: {ADMIN_ACCESS}'",
        ),
        refuse("variables.requests.size() <= 1", f"'spec.devices.requests: ' + {text(SEVERAL)}"),
        each(f"('{TIME}' in a) == ('{MEMORY}' in a)", f": {BOTH}"),
        sized(
            TIME,
            f"!('{TIME}' in a) || {whole.format(time, 0)}",
            f"{NOT_MILLI}; write 0 to 1000, and several GPUs with count",
        ),
        sized(
            LIMIT, f"!('{LIMIT}' in a) || {whole.format(limit, 1)}", f"{NOT_MILLI}; write 1 to 1000, or leave it out"
        ),
        sized(
            LIMIT,
            f"!('{LIMIT}' in a) || ('{TIME}' in a && {limit}.compareTo({time}) >= 0)",
            f"is less than {TIME}; write that or more",
        ),
    ]
