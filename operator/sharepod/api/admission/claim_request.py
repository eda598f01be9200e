"""Admission policy on claims of class `sharepod.dev` and their templates: refuses unsupported requests at apply. Pure.

It refuses the same as `claims.lower` does later, in nearly the same words, from the same tables. Rules that CEL can
hardly express are left to `claims.lower`: selectors that contradict each other, and sums over requests.
"""

from __future__ import annotations

from typing import Any

from sharepod.api.bounds import MAX_ITEMS
from sharepod.api.claims.claims import (
    ANNOTATIONS,
    CAPACITIES,
    EXAMPLE,
    FIELDS,
    GATE_HINT,
    LIMIT,
    MEMORY,
    NAMED_AS_LINE,
    NOT_MILLI,
    TIME,
)
from sharepod.api.dialects import (
    A_FRACTION,
    FIELD_OF,
    FLAGS,
    FRACTION_PATTERN,
    MAX_LIST_TEXT,
    MAX_MEMORY,
    MIN_MEMORY,
    NATIVE_PREFIX,
    STARTS,
)
from sharepod.api.gpunode import CoRunningPolicy, Latency, MemoryIsolation, Mode
from sharepod.api.objects import CLAIM_DRIVER, DEVICE_CLASS, LINE_CLAIM, LINE_REQUEST, MAX_GPUS, SHARE_REQUEST
from sharepod.api.sharepod import LABEL_PATTERN, PlacementPolicy

from .cel import CLAIMS_RULE, NEW_OR_ANNOTATED, Validation, fraction, in_force, listed, number, refuse, text, texts
from .share_claim_policy import MARKED, NAMED_AS_SHARE

LINE_FIELDS = ("deviceClassName", "allocationMode", "count")
"""Fields of the request of a resource line's claim. With any other field, such as tolerations, a claim is not a
line's."""

NAME = "sharepod-claims"

_TEXT = r"""("[^"\\\n]*"|'[^'\\\n]*')"""
_ONE = (
    r"\s*device\s*\.\s*attributes\s*\[\s*[\"']" + CLAIM_DRIVER.replace(".", "[.]") + r"[\"']\s*\]\s*\.\s*(uuid|model)"
    rf"\s*(==\s*{_TEXT}|in\s*\[\s*{_TEXT}(\s*,\s*{_TEXT})*\s*\])\s*"
)
_EXPRESSION = f"^{_ONE}(&&{_ONE})*$"
"""Regular expression of the supported selectors."""

_REQUESTS = "variables.devices.?requests.orValue([])"


def claim_policy() -> list[dict[str, Any]]:
    """Return the policy on claims and templates, and its binding."""
    template = "object.kind == 'ResourceClaimTemplate'"
    is_class = f"?deviceClassName.orValue('') == {text(DEVICE_CLASS)}"
    ours = f"(r.?exactly.{is_class} || r.?firstAvailable.orValue([]).exists(a, a.{is_class}))"
    spec = f"({template} ? object.spec.?spec : object.?spec)"
    variables = [
        ("devices", f"{spec}.?devices.orValue({{}})"),
        (
            "annotations",
            f"({template} ? object.spec.?metadata.?annotations : object.metadata.?annotations).orValue({{}})",
        ),
        (
            "present",
            f"size(variables.annotations) > {MAX_ITEMS} ? [] : variables.annotations.filter(k, "
            + " || ".join(f"k.startsWith({text(prefix)})" for prefix in STARTS)
            + ")",
        ),
        ("asked", f"{_REQUESTS}.map(r, r.?exactly.orValue({{}}))"),
        ("amounts", "variables.asked.map(e, e.?capacity.?requests.orValue({}))"),
        ("ofLine", _of_line(template)),
        (
            "exclusive",
            f"variables.annotations.?['{NATIVE_PREFIX}mode'].orValue('') == '{Mode.EXCLUSIVE}'".replace(".?[", "[?"),
        ),
    ]
    devices = listed(f"{spec}.?devices.?requests")
    conditions = {
        "of-our-class": f"{devices}.exists(r, {ours})",
        "of-no-sharepod": f"{template} || !{MARKED}",
        "new-or-annotations-changed": NEW_OR_ANNOTATED,
    }
    validations = [*_annotations(), *_supported(), *_capacity()]
    return in_force(NAME, CLAIMS_RULE, conditions, validations, variables)


def _of_line(template: str) -> str:
    """Return a CEL expression: whether an object is a line's claim, without a size. It is the line's template, or a
    claim that a Pod owns."""
    owned = "object.metadata.?ownerReferences.orValue([]).exists(o, o.kind == 'Pod' && o.?controller.orValue(false))"
    return (
        f"({template} ? object.metadata.name == {text(LINE_CLAIM)} : {owned}) && {_REQUESTS}.size() == 1 && "
        f"{_REQUESTS}.all(r, r.name == {text(LINE_REQUEST)} && r.?exactly.?count.orValue(1) == 1 && "
        f"dyn(r.?exactly.orValue({{}})).all(k, k in {texts(LINE_FIELDS)}))"
    )


def _annotations() -> list[Validation]:
    """Return validations that refuse annotations that a claim cannot have, and invalid values."""
    unknown = f"variables.present.filter(k, !(k in {texts(ANNOTATIONS)}))"
    known = ", ".join(ANNOTATIONS)
    choices: dict[str, list[str]] = {
        "mode": [*Mode],
        "memoryIsolation": [*MemoryIsolation],
        "latency": [*Latency],
        "coRunning": [*CoRunningPolicy],
        "placement": [*PlacementPolicy],
        "movable": [*FLAGS],
    }
    labels = [name for name in ANNOTATIONS if FIELD_OF[name] in ("group", "affinity", "antiAffinity", "exclusion")]
    rules = [
        refuse(
            f"size(variables.annotations) <= {MAX_ITEMS}",
            "'metadata.annotations: has ' + string(size(variables.annotations)) + "
            f"' entries; write at most {MAX_ITEMS}'",
        ),
        refuse(
            f"{unknown}.size() == 0",
            f"'metadata.annotations[' + {unknown}[0] + ']: is not known on a claim, whose spec has size and number; "
            f"use one of {known}, or remove it'",
        ),
        refuse(
            f"variables.present.all(k, size(variables.annotations[k]) <= {MAX_LIST_TEXT})",
            "'metadata.annotations: one of them is too long; write names with commas between them'",
        ),
    ]
    for name in ANNOTATIONS:
        value = f"variables.annotations[?{text(name)}]"
        if (field := FIELD_OF[name]) in choices:
            some = choices[field]
            rules.append(
                refuse(
                    f"!{value}.hasValue() || {value}.value() in {texts(some)}",
                    f"'metadata.annotations[{name}]: \"' + {value}.value() + "
                    f"'\" is not known; write {' or '.join(some)}'",
                )
            )
        elif name in labels:
            rules.append(
                refuse(
                    f"!{value}.hasValue() || {value}.value().matches('{LABEL_PATTERN}')",
                    f"'metadata.annotations[{name}]: \"' + {value}.value() + '\" is not a label; write up to 63 "
                    'letters, digits, ".", "_" and "-", beginning and ending with a letter or digit\'',
                )
            )
        elif field == "request":
            rules.append(
                refuse(
                    f"!{value}.hasValue() || {value}.value().matches('{FRACTION_PATTERN}')",
                    f"'metadata.annotations[{name}]: \"' + {value}.value() + "
                    f"'\" is not a fraction; write {A_FRACTION}'",
                )
            )
    return rules


def _supported() -> list[Validation]:
    """Return validations that refuse requests of a claim that SharePod does not support."""
    ours = f"e.?deviceClassName.orValue('') == {text(DEVICE_CLASS)}"
    exact = "e.?allocationMode.orValue('ExactCount') in ['', 'ExactCount']"
    few = f"e.?count.orValue(1) <= {MAX_GPUS}"
    return [
        refuse(
            "variables.devices.?constraints.orValue([]).size() == 0",
            f"'spec.devices.constraints: {FIELDS['constraints']}; leave it out'",
        ),
        refuse(
            "variables.devices.?config.orValue([]).size() == 0",
            f"'spec.devices.config: {FIELDS['config']}; leave it out'",
        ),
        refuse(
            f"{_REQUESTS}.all(r, r.?firstAvailable.orValue([]).size() == 0)",
            f"'spec.devices.requests: firstAvailable: {FIELDS['firstAvailable']}'",
        ),
        refuse(
            f"variables.asked.all(e, {ours})",
            f"'spec.devices.requests: deviceClassName: \"' + variables.asked.filter(e, !({ours}))[0]"
            f".?deviceClassName.orValue('') + '\" is another class than {DEVICE_CLASS}; "
            "write a claim of its own for it'",
        ),
        refuse(
            "variables.asked.all(e, !e.?adminAccess.orValue(false))",
            "'spec.devices.requests: adminAccess: goes past every share; leave it out'",
        ),
        refuse(
            f"variables.asked.all(e, {exact})",
            f"'spec.devices.requests: allocationMode: \"' + variables.asked.filter(e, !({exact}))[0].allocationMode + "
            "'\" is not supported; write ExactCount with the number of GPUs in count'",
        ),
        refuse(
            f"variables.asked.all(e, {few})",
            f"'spec.devices.requests: count: ' + string(variables.asked.filter(e, !({few}))[0].count) + ' is more GPUs "
            f"than a node has; write a whole number from 1 to {MAX_GPUS}'",
        ),
        refuse(
            "variables.asked.all(e, e.?selectors.orValue([]).all(s, "
            f"s.?cel.?expression.orValue('').matches(r'''{_EXPRESSION}''')))",
            "'spec.devices.requests: selectors: only == and in on uuid and model are understood, joined by &&; write "
            f"one such as {EXAMPLE}'",
        ),
    ]


def _capacity() -> list[Validation]:
    """Return validations that refuse amounts that no GPU has."""

    def each(name: str, unless: str, message: str) -> Validation:
        holds = f"!('{name}' in a) || {unless}"
        bad = f"variables.amounts.filter(a, !({holds}))[0]['{name}']"
        value = f"string({bad})" if name == MEMORY else number(bad)
        return refuse(
            f"variables.amounts.all(a, {holds})",
            f"'spec.devices.requests: capacity.requests.{name}: ' + {value} + ' {message}'",
        )

    others = f"k, !(k in {texts(CAPACITIES)})"
    unknown = f"variables.amounts.filter(a, a.exists({others}))[0].filter({others})[0]"
    amount = "quantity(string(a['{}']))"
    time, limit, memory = (amount.format(name) for name in (TIME, LIMIT, MEMORY))
    whole = f"{NOT_MILLI}; write 0 to 1000, and several GPUs with count"
    request = f"variables.annotations['{NATIVE_PREFIX}request']"
    below = f"!('{TIME}' in a) || {fraction(request)} * 1000.0 <= {time}.asApproximateFloat() + 0.001"
    limited = f"!('{LIMIT}' in a) || !('{TIME}' in a) || {limit}.compareTo({time}) >= 0"
    short = f"variables.amounts.filter(a, !({limited}))[0]"
    return [
        refuse(
            "!variables.ofLine || variables.present.size() == 0",
            "'metadata.annotations[' + variables.present[0] + ']: the claim is sized by the resource line of its Pod; "
            "annotate the Pod'",
        ),
        refuse(
            "!variables.exclusive || variables.amounts.all(a, size(a) == 0)",
            "'spec.devices.requests: capacity: an Exclusive claim has whole GPUs; leave it out or remove "
            f"the annotation {NATIVE_PREFIX}mode'",
        ),
        refuse(
            "variables.exclusive || variables.ofLine || variables.amounts.all(a, size(a) > 0)",
            f"'spec.devices.requests: capacity: {GATE_HINT}'",
        ),
        refuse(
            f"variables.ofLine || {_REQUESTS}.all(r, r.name != {text(LINE_REQUEST)} || "
            "size(r.?exactly.?capacity.?requests.orValue({})) > 0)",
            f"'spec.devices.requests: name: {NAMED_AS_LINE}'",
        ),
        refuse(  # a claim with that name is refused only when it is created: too late for a Pod with its template
            f"object.kind != 'ResourceClaimTemplate' || {_REQUESTS}.size() != 1 || "
            f"{_REQUESTS}.all(r, r.name != {text(SHARE_REQUEST)}) || variables.amounts.all(a, size(a) > 0)",
            f"'spec.devices.requests: name: {NAMED_AS_SHARE}'",
        ),
        refuse(
            f"variables.amounts.all(a, a.all(k, k in {texts(CAPACITIES)}))",
            f"'spec.devices.requests: capacity.requests.' + {unknown} + ': is not known; use {', '.join(CAPACITIES)}, "
            "or remove it'",
        ),
        refuse(
            f"variables.exclusive || variables.ofLine || variables.amounts.all(a, '{TIME}' in a)",
            f"'spec.devices.requests: capacity.requests.{TIME}: is required; write the thousandths of the time of each "
            'GPU to guarantee, such as "400"\'',
        ),
        each(TIME, f"({time}.isInteger() && {time}.asInteger() >= 0 && {time}.asInteger() <= 1000)", whole),
        each(
            LIMIT,
            f"({limit}.isInteger() && {limit}.asInteger() >= 1 && {limit}.asInteger() <= 1000)",
            f"{NOT_MILLI}; write 1 to 1000, or leave it out",
        ),
        refuse(
            f"variables.amounts.all(a, {limited})",
            f"'spec.devices.requests: capacity.requests.{LIMIT}: ' + string({short}['{LIMIT}']) + ' is less than the "
            f"{TIME} ' + string({short}['{TIME}']) + '; write that or more'",
        ),
        refuse(
            f"variables.exclusive || !('{NATIVE_PREFIX}request' in variables.annotations) || "
            f"variables.amounts.all(a, {below})",
            f"'metadata.annotations[{NATIVE_PREFIX}request]: ' + {request} + ' is more than {TIME} ' + "
            f"string(variables.amounts.filter(a, !({below}))[0]['{TIME}']) + '; write less, or raise {TIME}'",
        ),
        each(
            MEMORY,
            f"({memory}.compareTo(quantity('{MIN_MEMORY}')) >= 0 && {memory}.compareTo(quantity('{MAX_MEMORY}')) <= 0)",
            "is no size that a GPU has; write a size with its unit, such as 4Gi",
        ),
        refuse(
            f"variables.amounts.all(a, !('{TIME}' in a) || {time}.compareTo(quantity('0')) > 0 || '{MEMORY}' in a)",
            f"'spec.devices.requests: capacity.requests.{MEMORY}: is required with {TIME} 0 (best effort); write a "
            "size such as 4Gi'",
        ),
    ]
