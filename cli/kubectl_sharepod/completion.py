"""`kubectl_complete-sharepod`: completions in the format of kubectl's plugin completion.

kubectl calls the program with the words after `kubectl sharepod`, of which the last is unfinished. The program prints
one completion per line, and on the last line a directive of kubectl's completion library.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from kubectl_sharepod.commands import reasons
from kubectl_sharepod.kubectl import Kubectl, KubectlError, UsageError
from kubectl_sharepod.program import add_connection, arguments, connection_of
from kubectl_sharepod.reading import Scope, gpus, sharepods

_NO_FILES = ":4"
"""Directive for kubectl: do not complete file names."""
_NAMED = ("why", "resize", "logs", "exec", "port-forward")


def completions(words: Sequence[str], kubectl: Kubectl) -> list[str]:
    """Return the completions of the last word of `words`."""
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
        found = [one.name for one in sharepods(Scope(kubectl, asked(before).namespace or kubectl.namespace()))]
    else:
        found = []
    return [one for one in found if one.startswith(begun)]


def asked(words: Sequence[str]) -> argparse.Namespace:
    """Return the namespace and connection flags among these words. Raise `UsageError` if the value of a flag is
    missing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-n", "--namespace")
    add_connection(parser)
    try:
        return parser.parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from None


def main() -> None:
    """Print the completions for this process's arguments."""
    words = sys.argv[1:]
    try:
        with closing(Kubectl(connection_of(asked(words[:-1])))) as kubectl:
            found = completions(words, kubectl)
    except KubectlError:
        found = []
    print("\n".join([*found, _NO_FILES]))
