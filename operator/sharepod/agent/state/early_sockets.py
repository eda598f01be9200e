"""Early sockets: the first process of a container listens for the tenants that the previous agent had served.

Connections wait in a socket's backlog until the agent has loaded its program and serves. So attempts to connect fail
only until this process runs.

Guarantees:
- There is no slow import. No setting is read except the path of the state directory.
- Nothing is done while another agent serves the state directory, or is its standby.
- A tenant whose directory has no socket gets none: its share may have been released.
- A directory that takes no socket, or unreadable settings, are no error here. The agent listens later, and reports the
  error.
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
    """Turn at a state directory, and listening sockets of its tenants. Empty without arguments.

    Args:
        state_dir: The state directory.
        held: Descriptors by their names at the supervisor, each with its mark.
    """

    def __init__(self, state_dir: str = "", held: Mapping[str, tuple[int, str]] | None = None) -> None:
        self._state_dir = state_dir
        self._held = dict(held or {})

    def of(self, state_dir: Path) -> Mapping[str, tuple[int, str]]:
        """Return the descriptors if they belong to this state directory; the caller owns them. Otherwise close them and
        return none.
        """
        if str(state_dir) != self._state_dir:
            for descriptor, _mark in self._held.values():
                os.close(descriptor)
            self._held = {}
        return self._held


def listen(arguments: Sequence[str], environment: Mapping[str, str]) -> EarlySockets:
    """Listen for the tenants of the state directory of a program with these arguments."""
    try:
        state_dir = _state_dir(arguments, environment)
        return EarlySockets(state_dir, _held(Path(state_dir)))
    except Exception:  # the program will meet the error again, and report it
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
        with contextlib.suppress(OSError):  # the agent tries again, and reports the error
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
