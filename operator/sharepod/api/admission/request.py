"""Admission policy on a SharePod's request for GPUs: only one way of requesting, and valid annotations. Pure.

It refuses at `kubectl apply` what `effective` would refuse later, in nearly the same words, from the same table. Each
message names the annotation as the user wrote it, and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharepod.api.bounds import MAX_ITEMS, MAX_QUANTITY
from sharepod.api.dialects import (
    A_FRACTION,
    BYTES_PATTERN,
    FIELD_OF,
    FLAGS,
    FOREIGN_PREFIXES,
    FRACTION_PATTERN,
    GPUID_KEY,
    KEYS,
    MAX_LIST_TEXT,
    MAX_LISTED,
    MAX_MEMORY,
    MIN_BYTES,
    MIN_MEMORY,
    NATIVE_PREFIX,
    NEAR,
    PREFIXES,
    STARTS,
    UUID_PATTERN,
    UUID_SHAPE,
    known_keys,
)
from sharepod.api.gpunode import CoRunningPolicy, Latency, MemoryIsolation, Mode
from sharepod.api.objects import MAX_GPUS
from sharepod.api.sharepod import LABEL_PATTERN, PlacementPolicy

from .cel import Validation, fraction, policy, refuse, text, texts


def _annotations(field: str, *, key: str = "") -> list[str]:
    """Return the annotations that set a field. `key`: only those with this key after the prefix."""
    names = next(entry.annotations for entry in KEYS if entry.field == field)
    return [name for name in names if not key or name.endswith(f"/{key}")]


def _each(names: Sequence[str], unless: str, wrong: str) -> Validation:
    """Return a validation that refuses an annotation of `names` unless `unless` holds. `unless` and `wrong` (the
    message) are CEL in `v`, its value."""
    here = f"variables.present.filter(k, k in {texts(names)})"
    bad = f"{here}.filter(k, ![variables.annotations[k]].all(v, {unless}))"
    return refuse(
        f"{here}.all(k, [variables.annotations[k]].all(v, {unless}))",
        f"{bad}.map(k, 'metadata.annotations[' + k + ']: ' + [variables.annotations[k]].map(v, {wrong})[0])[0]",
    )


def _quoted(rest: str) -> str:
    return f"'\"' + v + '\" {rest}'"


def request_policy() -> list[dict[str, Any]]:
    """Return the policy that refuses SharePods with several requests or invalid annotations."""
    validations = [*few(), *_one_way(), *readable(), *_together()]
    return policy("sharepod-request", ["CREATE", "UPDATE"], annotation_variables(), validations, suspect=_suspect())


def _suspect() -> str:
    """Return a CEL condition that is true for a SharePod that the full rules must check: it has no `spec.gpu`,
    has annotations of SharePod or many of others, or names a node."""
    annotations, labels = "object.metadata.?annotations.orValue({})", "object.metadata.?labels.orValue({})"
    ours = " || ".join(f"k.startsWith({text(prefix)})" for prefix in STARTS)
    return (
        f"!has(object.spec.gpu) || object.spec.?nodeName.orValue('') != '' || size({labels}) > {MAX_ITEMS} || "
        f"size({annotations}) > {MAX_ITEMS} || {annotations}.exists(k, {ours})"
    )


def annotation_variables() -> list[tuple[str, str]]:
    """Return the CEL variables that rules about annotations use: all annotations, SharePod's, unknown ones, and each
    field's."""
    prefixed = " || ".join(f"k.startsWith({text(prefix)})" for prefix in STARTS)
    return [
        ("annotations", "object.metadata.?annotations.orValue({})"),
        ("present", f"size(variables.annotations) > {MAX_ITEMS} ? [] : variables.annotations.filter(k, {prefixed})"),
        ("unknown", f"variables.present.filter(k, !(k in {texts(FIELD_OF)}))"),
        *((key.field, f"variables.present.filter(k, k in {texts(key.annotations)})") for key in KEYS),
        (
            "twice",
            "[" + ", ".join(f"variables.{key.field}" for key in KEYS) + "].filter(g, g.size() > 1)",
        ),
        (
            "exclusive",
            f"variables.mode.exists(k, variables.annotations[k] == '{Mode.EXCLUSIVE}')",
        ),
    ]


def few() -> list[Validation]:
    """Return validations that refuse too many annotations or labels; other rules check none of these."""
    fields = {"annotations": "variables.annotations", "labels": "object.metadata.?labels.orValue({})"}
    return [
        refuse(
            f"size({value}) <= {MAX_ITEMS}",
            f"'metadata.{name}: has ' + string(size({value})) + ' entries; write at most {MAX_ITEMS}'",
        )
        for name, value in fields.items()
    ]


def known(without: Sequence[str] = ()) -> Validation:
    """Return the validation that refuses an unknown annotation of a dialect. Its message lists the nearest annotations
    first. `without`: fields that the message does not advise."""
    name, keys = "variables.unknown[0]", [texts(known_keys(prefix, without)) for prefix in PREFIXES]
    choose = " : ".join(
        f"{name}.startsWith({text(prefix)}) ? {listed}" for prefix, listed in zip(PREFIXES, keys[:-1], strict=False)
    )
    end = f"{name}.indexOf('/') + {NEAR}"
    near = f"k.startsWith(size({name}) > {end} ? {name}.substring(0, {end}) : {name})"
    ordered = f"[{choose} : {keys[-1]}].map(l, (l.filter(k, {near}) + l.filter(k, !{near})).join(', '))[0]"
    return refuse(
        "variables.unknown.size() == 0",
        f"'metadata.annotations[' + {name} + ']: is not known; use one of ' + {ordered} + ', or remove it'",
    )


def once() -> Validation:
    """Return the validation that refuses a field that two annotations set."""
    return refuse(
        "variables.twice.size() == 0",
        "'metadata.annotations[' + variables.twice[0][1] + ']: duplicates annotation ' + "
        "variables.twice[0][0] + '; set only one of them'",
    )


def _one_way() -> list[Validation]:
    return [
        known(),
        refuse(
            "!has(object.spec.gpu) || variables.present.size() == 0",
            "'metadata.annotations[' + variables.present[0] + ']: conflicts with spec.gpu; set only one of them'",
        ),
        refuse(
            "has(object.spec.gpu) || variables.present.size() > 0",
            "'spec.gpu: is required; write at least request, such as {request: 0.4}, or mode: Exclusive'",
        ),
        once(),
        refuse(
            "!has(object.spec.nodeName) || object.spec.nodeName == '' || "
            f"variables.present.exists(k, k.endsWith('/{GPUID_KEY}'))",
            "'spec.nodeName: would go past placement and the scheduler; remove it and use a nodeSelector on "
            "kubernetes.io/hostname'",
        ),
    ]


def readable() -> list[Validation]:
    """Return validations that refuse invalid annotations, each by itself."""
    fractions = [*_annotations("request"), *_annotations("limit")]
    labels = [name for field in ("group", "affinity", "antiAffinity", "exclusion") for name in _annotations(field)]
    listed = f"v.split(',').size() <= {MAX_LISTED} && v.split(',').all(n, n.trim() != '')"
    lists = [*_annotations("uuids"), *_annotations("models")]
    milli = f"({fraction('v')} * 1000.0)"
    nearest = f"double(int({milli} + 0.5))"
    names, once = "[v.split(',').map(n, n.trim())]", "l.indexOf(n) == l.lastIndexOf(n)"
    twice = f"'names \"' + l.filter(n, !({once}))[0] + '\" more than once; write each name once'"
    return [
        _no_longer_than(MAX_QUANTITY, f"!(k in {texts(lists)})"),
        _no_longer_than(MAX_LIST_TEXT, f"k in {texts(lists)}"),
        _each(
            fractions,
            f"v.matches('{FRACTION_PATTERN}')",
            _quoted(f"is not a fraction; write {A_FRACTION}"),
        ),
        _each(
            fractions,
            f"{fraction('v')} <= 1.0",
            "v + ' is more than one GPU; ask for several GPUs with count, each at a fraction of 0 to 1'",
        ),
        _each(
            fractions,
            f"{milli} == 0.0 || ({nearest} >= 1.0 && {milli} - {nearest} < 0.001 && {nearest} - {milli} < 0.001)",
            "v + ' is finer than a thousandth of a GPU; write at most three decimals, such as ' + "
            f"string(({milli} < 1.0 ? 1.0 : {nearest}) / 1000.0)",
        ),
        _each(
            _annotations("limit"), f"{fraction('v')} > 0.0", "v + ' would never run; write at least 0.001 or remove it'"
        ),
        _each(
            _annotations("memory", key="gpu_mem"),
            f"v.matches('{BYTES_PATTERN}')",
            _quoted(
                'is not a number of bytes; write digits only, such as "4294967296", '
                f"or use annotation {NATIVE_PREFIX}memory, which takes 4Gi"
            ),
        ),
        _each(
            _annotations("memory", key="gpu_mem"),
            f"int(v) >= {MIN_BYTES}",
            f"v + ' is less than {MIN_MEMORY}; write the size in bytes, such as 4294967296'",
        ),
        _each(
            _annotations("memory", key="gpu-memory"),
            f"isQuantity(v) && quantity(v).compareTo(quantity('{MAX_MEMORY}')) <= 0",
            _quoted("is not a quantity; write a size such as 4Gi, 512Mi or a number of bytes"),
        ),
        _each(
            _annotations("memory", key="gpu-memory"),
            f"quantity(v).compareTo(quantity('{MIN_MEMORY}')) >= 0",
            f"v + ' is less than {MIN_MEMORY}; write a size with its unit, such as 4Gi'",
        ),
        _each(
            _annotations("count"),
            f"v.matches('^[0-9]{{1,4}}$') && int(v) >= 1 && int(v) <= {MAX_GPUS}",
            _quoted(f"is not a number of GPUs; write a whole number from 1 to {MAX_GPUS}"),
        ),
        _one_of("mode", [*Mode]),
        _one_of("memoryIsolation", [*MemoryIsolation]),
        _one_of("latency", [*Latency]),
        _one_of("coRunning", [*CoRunningPolicy]),
        _one_of("placement", [*PlacementPolicy]),
        _one_of("movable", FLAGS),
        _each(
            labels,
            f"v.matches('{LABEL_PATTERN}')",
            '\'"\' + v + \'" is not a label; write up to 63 letters, digits, ".", "_" and "-", \' + '
            "'beginning and ending with a letter or digit'",
        ),
        *(
            _each(
                _annotations(field),
                listed,
                _quoted(f"is not a list; write up to {MAX_LISTED} with commas between them"),
            )
            for field in ("uuids", "models")
        ),
        _each(lists, f"{names}.all(l, l.all(n, {once}))", f"{names}.map(l, {twice})[0]"),
        _each(
            _annotations("uuids"),
            f"v.split(',').all(n, n.trim().matches('{UUID_PATTERN}'))",
            "'\"' + v.split(',').filter(n, !n.trim().matches('" + UUID_PATTERN + "'))[0] + "
            f"'\" is not the UUID of a GPU; write it as nvidia-smi -L prints it, {UUID_SHAPE}'",
        ),
    ]


def _no_longer_than(most: int, which: str) -> Validation:
    """Return a validation that refuses annotations longer than `most` characters. It comes first, because the cost of
    other rules grows with the length."""
    longer = f"variables.present.filter(k, {which} && size(variables.annotations[k]) > {most})"
    return refuse(
        f"{longer}.size() == 0",
        f"'metadata.annotations[' + {longer}[0] + ']: has ' + string(size(variables.annotations[{longer}[0]])) + "
        f"' characters; write at most {most}'",
    )


def _one_of(field: str, choices: Sequence[str]) -> Validation:
    return _each(_annotations(field), f"v in {texts(choices)}", _quoted(f"is not known; write {' or '.join(choices)}"))


def _together() -> list[Validation]:
    """Return validations that refuse annotations that contradict each other. They come last, because they need each
    annotation to be valid by itself."""
    key = {field: f"variables.{field}[0]" for field in ("request", "limit", "memory")}
    value = {field: fraction(f"variables.annotations[{key[field]}]") for field in ("request", "limit")}
    given = {field: f"variables.{field}.size() > 0" for field in ("request", "limit", "memory")}

    def missing(field: str) -> str:
        """Return a CEL expression for the missing annotation in the SharePod's dialect."""
        entry = next(entry for entry in KEYS if entry.field == field)
        used = [
            f"variables.present.exists(k, k.startsWith({text(p)})) ? {text(entry.usual(p))}" for p in FOREIGN_PREFIXES
        ]
        return f"({' : '.join(used)} : {text(entry.usual(PREFIXES[0]))})"

    count = "(variables.count.size() > 0 ? int(variables.annotations[variables.count[0]]) : 1)"
    block = "has(object.spec.gpu)"
    foreign = " || ".join(f"variables.present.exists(k, k.startsWith({text(p)}))" for p in FOREIGN_PREFIXES)
    interactive = f"variables.latency.exists(k, variables.annotations[k] == '{Latency.INTERACTIVE}')"
    return [
        *(
            refuse(
                f"!variables.exclusive || !({given[field]})"
                + (f" || {value[field]} == 1.0" if field == "limit" else ""),
                f"'metadata.annotations[' + {key[field]} + ']: an Exclusive SharePod has the whole GPU; "
                f"remove it or use {NATIVE_PREFIX}mode: Shared'",
            )
            for field in ("request", "limit", "memory")
        ),
        refuse(
            f"!variables.exclusive || !{interactive}",
            "'metadata.annotations[' + variables.latency[0] + ']: an Exclusive SharePod has the whole GPU "
            f"to itself; remove it or use {NATIVE_PREFIX}mode: Shared'",
        ),
        refuse(
            f"!{interactive} || !({given['request']}) || {value['request']} > 0.0",
            "'metadata.annotations[' + variables.latency[0] + ']: Interactive spends guaranteed time, and ' + "
            f"{key['request']} + ' is 0; write a request such as 0.3, or remove it'",
        ),
        refuse(
            f"{block} || variables.exclusive || {given['request']}",
            f"'metadata.annotations[' + {missing('request')} + ']: is required; write the fraction "
            f'of the time of a GPU to guarantee, such as "0.4", or use {NATIVE_PREFIX}mode: Exclusive\'',
        ),
        refuse(
            f"!({given['limit']}) || !({given['request']}) || {value['limit']} >= {value['request']}",
            f"'metadata.annotations[' + {key['limit']} + ']: ' + variables.annotations[{key['limit']}] + "
            f"' is less than the request ' + variables.annotations[{key['request']}] + '; write ' + "
            f"variables.annotations[{key['request']}] + ' or more'",
        ),
        refuse(
            f"!({given['request']}) || {given['memory']} || {value['request']} > 0.0",
            f"'metadata.annotations[' + {missing('memory')} + ']: is required with request 0 (best effort); "
            f"write a size, such as ' + ({foreign} ? '4294967296' : '4Gi')",
        ),
        refuse(
            f"variables.uuids.all(k, variables.annotations[k].split(',').size() >= {count})",
            "'metadata.annotations[' + variables.uuids[0] + ']: names fewer GPUs than count; name at least ' + "
            f"string({count}) + ', or none'",
        ),
    ]
