"""Hints page: one page of a memfd, which the agent writes and clients map read-only.

Guarantees:
- Only the agent's own mapping can write the page.
- A client can neither resize the page nor write it: memfd seals forbid both. All seals are set in one call, after the
  agent has mapped the page for writing.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from sharepod.protocol._wire import ffi as _ffi

from .frames import HINTS_BYTES, MAGIC, VERSION_MAX

_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; not in fcntl before Python 3.12
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE

assert _ffi.sizeof("struct shp_hints") <= HINTS_BYTES, "the page holds the struct"


class HintsPage:
    """Hints page of one tenant. Each client gets `fd`. The owner must call `close` when no further client will
    connect."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("sharepod-hints", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, HINTS_BYTES)
            self._map = mmap.mmap(self.fd, HINTS_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(self.fd)
            raise
        self._hints = _ffi.cast("struct shp_hints *", _ffi.from_buffer(self._map))
        self._hints.version = VERSION_MAX
        self._hints.magic = MAGIC

    @property
    def contended(self) -> bool:
        """True while another tenant wants one of these GPUs."""
        return bool(self._hints.contended)

    @contended.setter
    def contended(self, value: bool) -> None:
        self._hints.contended = int(value)

    @property
    def co_running(self) -> bool:
        """True while another tenant holds one of these GPUs at the same time."""
        return bool(self._hints.co_runs & 1)

    @co_running.setter
    def co_running(self, value: bool) -> None:
        self._hints.co_runs += value != self.co_running

    @property
    def limits_generation(self) -> int:
        """Number of LIMITS frames sent, modulo 2**32."""
        return int(self._hints.limits_generation)

    def limits_changed(self) -> None:
        """Count one more LIMITS frame."""
        self._hints.limits_generation = (self._hints.limits_generation + 1) & 0xFFFFFFFF

    def bar(self, grant_id: int) -> None:
        """Bar launches under the grant of that id, and of every lower id."""
        self._hints.barred = max(self._hints.barred, grant_id)

    def close(self) -> None:
        """Close the descriptor. Clients keep their mappings."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._hints = _ffi.NULL
