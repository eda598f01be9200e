"""Early sockets: the first process of an agent's container opens the listening sockets of the tenants that the previous
agent had served.

Connections wait in a socket's backlog until the agent has imported its modules and serves. So attempts to connect fail
only until this first process runs.

Guarantees:
- This module has no slow import, and reads only one setting: the path of the state directory.
- No socket is opened while another agent serves the state directory, or is its standby.
- A tenant whose directory has no socket gets none: its share may have been released.
- A socket that cannot be created, or settings that cannot be read, are ignored here. The agent tries again later, and
  reports the error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import tenant_socket, turn_lock

DEFAULT_STATE_DIR = "/var/lib/sharepod"
"""Default state directory."""


class EarlySockets:
    """Lock of the serving agent on a state directory, and sockets of its tenants.

    Args:
        held: (descriptor, its mark) by the name under which the supervisor keeps it (`kept_descriptors`).
    """

    def __init__(self, state_dir: str = "", held: Mapping[str, tuple[int, str]] | None = None) -> None:
        self._state_dir = state_dir
        self._held = dict(held or {})

    def of(self, state_dir: Path) -> Mapping[str, tuple[int, str]]:
        """Return the descriptors, by name, if they belong to this state directory; the caller then owns them. Otherwise
        close them, and return an empty mapping."""
        if str(state_dir) != self._state_dir:
            for descriptor, _mark in self._held.values():
                os.close(descriptor)
            self._held = {}
        return self._held


def listen(arguments: Sequence[str], environment: Mapping[str, str]) -> EarlySockets:
    """Open the tenants' sockets in the state directory of a program with these arguments and environment. Never
    raises."""
    try:
        state_dir = _state_dir(arguments, environment)
        return EarlySockets(state_dir, _held(Path(state_dir)))
    except Exception:  # the program will meet the same error, and report it
        return EarlySockets()


def _state_dir(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the state directory by the environment variable, else by the file of settings, else the default."""
    given = environment.get("SHAREPOD_AGENT_STATE_DIR")
    if given is not None:
        return given
    config = environment.get("SHAREPOD_AGENT_CONFIG")
    for number, argument in enumerate(arguments):
        if argument == "--config":
            config = arguments[number + 1]
        elif argument.startswith("--config="):
            config = argument.removeprefix("--config=")
    if config is None:
        return DEFAULT_STATE_DIR
    import yaml  # imported late, because it takes some 10 ms

    settings = yaml.safe_load(Path(config).read_text(encoding="utf-8")) or {}
    return str(settings.get("state_dir", DEFAULT_STATE_DIR))


def _held(state_dir: Path) -> dict[str, tuple[int, str]]:
    sockets = (state_dir / "tenants").glob(f"*/{tenant_socket.FILE}")
    directories = [path.parent for path in sockets if tenant_socket.serves(path.parent.name)]
    turn = _turn(state_dir) if directories else None
    if turn is None:
        return {}
    held = {turn_lock.KEPT_NAME: (turn, "")}
    for directory in directories:
        with contextlib.suppress(OSError):  # the agent tries again later, and reports the error
            listener, identity = tenant_socket.listen(directory)
            held[tenant_socket.kept_name(directory.name)] = (listener.detach(), identity)
    return held


def _turn(state_dir: Path) -> int | None:
    """Take the serving agent's lock and return its descriptor. None if another agent serves or is next."""
    turn, following = turn_lock.opened(state_dir / turn_lock.SERVING), turn_lock.opened(state_dir / turn_lock.NEXT)
    free = turn_lock.taken(turn) and turn_lock.taken(following)
    os.close(following)
    if not free:
        os.close(turn)
        return None
    return turn
