"""Arrays, mipmapped arrays and sparse arrays keep to the limit."""

from __future__ import annotations

import pytest
from hook.conftest import DEVICE_MEMORY, MIB, Tenant
from hook.world.ledger_check import MakeCheck
from hook.world.probe import OUT_OF_MEMORY


def test_arrays_and_their_levels_keep_to_the_limit(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    shapes = [(1000, 0, 0, 0, 0), (512, 300, 0, 0, 0), (64, 64, 20, 0, 0), (256, 256, 0, 0, 5), (128, 64, 6, 1, 3)]
    made = [(probe.ok("array", *shape), shape[4]) for shape in shapes]
    assert check.same() > 0
    check.fill(512 * 304 * 16 - 512)
    check.refused("array", 512, 300)
    for array, levels in made:
        probe.ok("array_free", array, levels)
    assert check.taken("array") == 0
    again = probe.ok("array", 512, 300)
    probe.ok("array_free", again)
    check.same()


def test_an_array_that_the_driver_refuses_is_rolled_back(make_check: MakeCheck) -> None:
    check = make_check(2 * DEVICE_MEMORY)
    check.refused("array", 1 << 14, 1 << 14)
    assert check.probe.call("array", 0, 5).code not in (0, OUT_OF_MEMORY), "the driver reports the fault"
    assert check.probe.call("array_free", 12345).code != 0
    assert check.same() == 0


@pytest.mark.promise("program-error-codes")
def test_an_array_beyond_any_gpus_memory_is_refused_by_the_driver(tenant: Tenant) -> None:
    tenant.agent()
    bare, hooked = tenant.probe(more={"LD_PRELOAD": ""}), tenant.probe()
    most = (1 << 64) - 1
    shapes = [(most, 0), (1, most), (most, most), (1, 1, most), (most, 1, 1), (most, 0, 0, 0, 5)]
    codes = []
    for probe in (bare, hooked):
        probe.start_cuda()
        codes.append([probe.call("array", *shape).code for shape in shapes])
    assert codes[0] == codes[1]
    assert 0 not in codes[0]


def test_what_is_mapped_into_a_sparse_array_counts_until_the_array_is_gone(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    array = probe.ok("array", 4096, 4096, 0, 0x40, 0, 1)
    assert check.same() == 0
    first, second = (probe.ok("physical", 50 * MIB) for _ in range(2))
    for x in (0, 128):
        probe.ok("sparse_map", array, x, first)
    probe.ok("physical_release", first)
    probe.ok("sparse_map", array, 0, 0)
    assert check.same() == 100 * MIB
    probe.ok("sparse_map", array, 128, second)
    assert check.same() == 50 * MIB, "the second took the place of the first"
    probe.ok("physical_release", second)
    assert check.same() == 50 * MIB
    probe.ok("array_free", array)
    assert check.same() == 0
