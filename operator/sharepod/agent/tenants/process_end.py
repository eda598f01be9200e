"""Kill of a tenant's process, by the administrator's policy (`unenforced_policy`).

Guarantee: no other process is killed, whatever the driver reports and however often pids are reused.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

EndProcess = Callable[[str, int, Callable[[int], bool]], bool]
"""Function that kills a process of a tenant. Arguments: tenant id, pid, and a predicate by pid: True if the process
with this pid is the tenant's. Returns True if the process was killed, or is being killed."""


def end_here(_tenant_id: str, pid: int, is_the_tenants: Callable[[int], bool]) -> bool:
    """Kill a process if it is the tenant's. Return True if it was killed.

    Args:
        _tenant_id: the tenant; not needed here.
        pid: the process, in the agent's PID namespace.
        is_the_tenants: predicate: True if the process with this pid is the tenant's. It is called after a pidfd was
        opened, so the signal reaches the checked process or none.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # the process has exited, or its pid is of another namespace
        return False
    try:
        if not is_the_tenants(pid):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
