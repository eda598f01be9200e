"""Physical memory (cuMemCreate), its mappings and multicast objects keep to the limit."""

from __future__ import annotations

from hook.conftest import MIB, TENANT_MEMORY
from hook.world.ledger_check import PAGE, MakeCheck
from hook.world.probe import OUT_OF_MEMORY


def test_physical_memory_counts_until_its_last_reference_and_mapping_are_gone(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    handle = probe.ok("physical", 100 * MIB)
    address = probe.ok("addresses", 256 * MIB)
    probe.ok("map", address, 100 * MIB, handle)
    probe.ok("map", address + 100 * MIB, 50 * MIB, handle)
    probe.ok("physical_release", handle)
    assert check.same() == 100 * MIB
    again = probe.ok("physical_of", address + 100 * MIB + 5)
    probe.ok("unmap", address, 150 * MIB)
    assert check.same() == 100 * MIB, "a reference is left"
    probe.ok("map", address, 100 * MIB, again)
    probe.ok("physical_release", again)
    assert probe.call("physical_release", again).code not in (0, OUT_OF_MEMORY)
    check.refused("physical", 158 * MIB)
    assert probe.call("unmap", address, PAGE).code != 0, "a part of a mapping"
    assert probe.call("unmap", address, 1 << 62).code != 0, "more than there is, and at once"
    assert check.same() == 100 * MIB
    probe.ok("unmap", address, 100 * MIB)
    assert check.same() == 0
    probe.ok("physical", TENANT_MEMORY)
    assert check.same() == TENANT_MEMORY


def test_physical_memory_of_another_size_or_place_is_the_drivers_word(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    assert probe.call("physical", PAGE + 512).code not in (0, OUT_OF_MEMORY)
    probe.ok("physical", 512 * MIB, 0, 2)
    assert check.same() == 0, "host memory is none of the device's"
    assert probe.call("physical", PAGE, 1).code == OUT_OF_MEMORY, "a GPU that is not the tenant's"
    own = probe.ok("physical", PAGE)
    imported = probe.ok("physical_again", own)
    assert check.same() == PAGE, "counted once"
    probe.ok("physical_release", imported)
    assert check.same() == PAGE
    probe.ok("physical_release", own)
    assert check.same() == 0


def test_a_failed_mapping_refers_to_nothing(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    handle = probe.ok("physical", 4 * PAGE)
    address = probe.ok("addresses", 16 * PAGE)
    probe.ok("map", address, 4 * PAGE, handle)
    assert probe.call("map", address + PAGE, PAGE, handle).code != 0, "mapped already"
    probe.ok("unmap", address, 4 * PAGE)
    probe.ok("physical_release", handle)
    assert check.same() == 0


def test_what_is_bound_to_a_multicast_object_counts_until_it_is_unbound(make_check: MakeCheck) -> None:
    check = make_check()
    probe = check.probe
    handle, unbound = probe.ok("physical", 50 * MIB), probe.ok("physical", 10 * MIB)
    multicast = probe.ok("multicast", 200 * MIB)
    assert check.same() == 60 * MIB
    probe.ok("multicast_bind", multicast, 0, handle, PAGE)
    assert probe.call("multicast_bind", multicast, 0, unbound, PAGE).code not in (0, OUT_OF_MEMORY), "bound already"
    address = probe.ok("addresses", 200 * MIB)
    probe.ok("map", address, 50 * MIB, handle)
    probe.ok("map", address + 50 * MIB, 10 * MIB, unbound)
    probe.ok("multicast_bind_address", multicast, 50 * MIB, address, PAGE)
    probe.ok("unmap", address, 60 * MIB)
    probe.ok("physical_release", handle)
    probe.ok("physical_release", unbound)
    assert check.same() == 50 * MIB
    probe.ok("multicast_unbind", multicast, 0, PAGE)
    probe.ok("map", address, 200 * MIB, multicast)
    probe.ok("physical_release", multicast)
    assert check.same() == 50 * MIB
    probe.ok("unmap", address, 200 * MIB)
    assert check.same() == 0
