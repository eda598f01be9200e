"""`kubectl_complete-sharepod`: completions in the format of kubectl's plugin completion.

kubectl calls the program with the words after `kubectl sharepod`, the last one unfinished. The program prints one
completion per line, and a directive of kubectl's completion library on the last line.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

from kubectl_sharepod.commands import reasons
from kubectl_sharepod.kubectl import Kubectl, KubectlError
from kubectl_sharepod.program import arguments
from kubectl_sharepod.reading import Scope, gpus, sharepods

_NO_FILES = ":4"
"""Directive to kubectl: do not complete file names."""
_NAMED = ("why", "resize", "logs", "exec", "port-forward")


def completions(words: Sequence[str], kubectl: Kubectl) -> list[str]:
    """Return the completions of the last word."""
    *before, begun = words or [""]
    parsers = next(action.choices for action in arguments()._actions if isinstance(action, argparse._SubParsersAction))
    command = next((word for word in before if word in parsers), None)
    if command is None:
        found = list(parsers)
    elif begun.startswith("-"):
        found = [option for action in parsers[command]._actions for option in action.option_strings]
    elif command == "explain":
        found = sorted(reasons())
    elif command in ("who", "trace", "cordon", "uncordon", "drain"):
        found = [gpu.place for gpu in gpus(kubectl).gpus]
    elif command in _NAMED:
        namespace = next((after for flag, after in itertools.pairwise(before) if flag == "-n"), None)
        found = [one.name for one in sharepods(Scope(kubectl, namespace or kubectl.namespace()))]
    else:
        found = []
    return [one for one in found if one.startswith(begun)]


def main() -> None:
    """Print the completions of this process's arguments."""
    try:
        found = completions(sys.argv[1:], Kubectl())
    except KubectlError:
        found = []
    print("\n".join([*found, _NO_FILES]))
