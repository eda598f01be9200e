"""Functions of the commands, by the parsed arguments.

`program.py` loads this module, and so the modules of all commands, while kubectl starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kubectl_sharepod import commands
from kubectl_sharepod.cordon import cordon, drain
from kubectl_sharepod.doctor import doctor
from kubectl_sharepod.kubectl import Kubectl
from kubectl_sharepod.output import Page
from kubectl_sharepod.preflight import preflight
from kubectl_sharepod.reading import Scope
from kubectl_sharepod.resize import pod_of, resize
from kubectl_sharepod.support import support
from kubectl_sharepod.trace import trace
from kubectl_sharepod.why import target, why


def command(kubectl: Kubectl, asked: argparse.Namespace) -> Callable[[], Page]:
    """Return the function that reads the requested command's page."""
    every = getattr(asked, "all_namespaces", False)
    needs = hasattr(asked, "namespace") and not every
    scope = Scope(kubectl, _namespace(kubectl, asked) if needs else None)
    if asked.command in ("why", "resize"):
        kind, name = target(asked.name)
        assert scope.namespace is not None, "both take a namespace"
        if asked.command == "why":
            return lambda: why(kubectl, scope.namespace or "", kind, name)
        change = {field: getattr(asked, field) for field in ("request", "limit", "memory")}
        return lambda: resize(kubectl, scope.namespace or "", kind, name, **change)
    pages: dict[str, Callable[[], Page]] = {
        "top": lambda: commands.top(scope),
        "free": lambda: commands.free(scope),
        "gpus": lambda: commands.all_gpus(scope),
        "who": lambda: commands.who(scope, asked.gpu),
        "cordon": lambda: cordon(kubectl, asked.gpu),
        "uncordon": lambda: cordon(kubectl, asked.gpu, undo=True),
        "drain": lambda: drain(kubectl, asked.gpu),
        "trace": lambda: trace(kubectl, asked.gpu, asked.length, asked.file),
        "bill": lambda: commands.bill(scope, asked.month),
        "budget": lambda: commands.budget(scope),
        "explain": lambda: commands.explain(asked.reason),
        "doctor": lambda: doctor(kubectl),
        "preflight": lambda: preflight(kubectl),
        "support": lambda: support(kubectl, scope.namespace or "", asked.file),
    }
    return pages[asked.command]


def pass_on(kubectl: Kubectl, asked: argparse.Namespace) -> None:
    """Replace this process by `kubectl logs`, `exec` or `port-forward` of the workload's Pod. Raise `KubectlError`."""
    namespace = _namespace(kubectl, asked)
    pod, container = pod_of(kubectl, namespace, *target(asked.name))
    chosen = [f"--container={container}"] if container and _takes_a_container(asked) else []
    kubectl.become([asked.command, "--namespace", namespace, pod, *chosen, *asked.rest])


def _takes_a_container(asked: argparse.Namespace) -> bool:
    """Return whether a default container may stand before the other arguments. A later `-c` replaces it."""
    end = asked.rest.index("--") if "--" in asked.rest else len(asked.rest)
    every = any(word.startswith("--all-containers") for word in asked.rest[:end])
    return asked.command != "port-forward" and not every


def _namespace(kubectl: Kubectl, asked: argparse.Namespace) -> str:
    return asked.namespace or kubectl.namespace()
