"""Coverage: decides which budget covers a namespace if several budgets select it.

Guarantees:
- CV1 one: a namespace is covered by one budget at most.
- A budget in the operator's namespace that selects the namespace has precedence over a budget in the namespace itself.
  So a user cannot replace a team's budget by another one. Otherwise the older one has precedence, then the first by
  name.
- A budget that cannot be read covers nothing, and affects no other budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sharepod.api.gpubudget import MAX_NAMESPACES, NamespaceSelector


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """Budget that selects namespaces. `created`: its creationTimestamp, RFC 3339. `readable`: True if its spec was
    read."""

    uid: str
    namespace: str
    name: str
    created: str
    selector: NamespaceSelector | None = None
    readable: bool = True


@dataclass(frozen=True, slots=True)
class Coverage:
    """Namespaces that one budget covers. `reason` and `message`: why some of the selected namespaces are not covered;
    None and empty if all are."""

    namespaces: tuple[str, ...] = ()
    reason: str | None = None
    message: str = ""


def coverages(
    claimants: Iterable[Claimant], labels: Mapping[str, Mapping[str, str]], operator_namespace: str
) -> dict[str, Coverage]:
    """Return the coverage of each readable budget, by uid. `labels`: labels of every namespace, by its name."""
    taken: dict[str, Claimant] = {}
    found: dict[str, Coverage] = {}
    central = operator_namespace
    for one in sorted(claimants, key=lambda one: _rank(one, central)):
        if not one.readable:
            continue
        if one.selector is not None and one.namespace != central:
            found[one.uid] = Coverage(
                reason="SelectorNotAllowed",
                message=f"namespaceSelector works only in a GPUBudget of namespace {central}; remove it, or move the "
                "GPUBudget there",
            )
            continue
        asked = [one.namespace]
        if one.selector is not None:
            asked = sorted(name for name, has in labels.items() if one.selector.matches(dict(has)))
        free = [name for name in asked if name not in taken]
        covered = tuple(free[:MAX_NAMESPACES])
        taken.update(dict.fromkeys(covered, one))
        found[one.uid] = _covered(covered, asked, free, taken)
    return found


def _rank(one: Claimant, central: str) -> tuple[bool, str, str, str]:
    """Return the sort key by which budgets that select the same namespace have precedence."""
    selects = one.selector is not None and one.namespace == central
    return (not selects, one.created, one.namespace, one.name)


def _covered(covered: tuple[str, ...], asked: list[str], free: list[str], taken: Mapping[str, Claimant]) -> Coverage:
    if not asked:
        return Coverage(reason="NoNamespace", message="namespaceSelector matches no namespace")
    if len(free) > MAX_NAMESPACES:
        message = f"{len(free)} namespaces match; the first {MAX_NAMESPACES} by name are covered: use several budgets"
        return Coverage(covered, "TooManyNamespaces", message)
    others = [name for name in asked if name not in covered]
    if others:
        by = taken[others[0]]
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        message = (
            f"namespace {others[0]}{more} is covered by GPUBudget {by.namespace}/{by.name}, which has precedence; "
            "delete one of them"
        )
        return Coverage(covered, "Superseded", message)
    return Coverage(covered)
