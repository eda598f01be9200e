"""Hints page of a tenant, as the hooks of its processes read it."""

from __future__ import annotations

import mmap
import sys

from sharepod.protocol import HintsPage
from sharepod.protocol._wire import ffi


def test_each_start_and_each_end_of_co_running_counts_once() -> None:
    hints = HintsPage()
    at = ffi.offsetof("struct shp_hints", "co_runs")
    counts = []
    with mmap.mmap(hints.fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ) as page:
        for value in (False, True, True, False, False, True):
            hints.co_running = value
            assert hints.co_running is value
            counts.append(int.from_bytes(page[at : at + 8], sys.byteorder))
    hints.close()
    assert counts == [0, 1, 1, 2, 2, 3]
