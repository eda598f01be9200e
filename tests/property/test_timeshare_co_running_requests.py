"""Requests while co-running: up to its request, no tenant gets less than in exclusive turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from property.test_timeshare_co_running import DENSE, EAGER, WARM_UP, busy, work
from property.time_sliced_gpu import MS, US, Program, S, TimeSlicedGpu
from sharepod.timeshare import Samples, Sharing

pytestmark = pytest.mark.promise("time-co-run-request")


def done(make: Callable[[], list[Program]], sharing: Sharing | None) -> list[float]:
    programs = make()
    return work(programs, WARM_UP, WARM_UP + 3 * S, TimeSlicedGpu(programs, sharing=sharing))


@pytest.mark.parametrize(("request_milli", "kernels", "pause_ms"), [(200, 6, 4), (500, 12, 2), (500, 12, 6)])
def test_a_tenant_that_joins_gets_its_request_although_its_limit_is_the_same(
    request_milli: int, kernels: int, pause_ms: int
) -> None:
    def make() -> list[Program]:
        limited = Program(
            "a", request=request_milli, limit=request_milli, gpu_ns=MS, host_ns=20 * US, kernels=kernels,
            pause_ns=pause_ms * MS, waits=True,
        )  # fmt: skip
        return [limited, Program("b", request=1000 - request_milli, starts_ns=MS, **busy(MS))]

    in_turns, at_once = done(make, Sharing.EXCLUSIVE), done(make, Sharing.CONCURRENT)
    assert at_once[0] >= min(in_turns[0], request_milli / 1000) - 0.02, (in_turns, at_once)


@pytest.mark.parametrize("request_milli", [500, 700])
def test_a_lead_whose_limit_is_its_request_gets_it_although_a_service_joins(request_milli: int) -> None:
    def make() -> list[Program]:
        service: dict[str, Any] = {"gpu_ns": MS, "host_ns": 20 * US, "kernels": 10, "pause_ns": 15 * MS, "waits": True}
        return [
            Program("a", request=request_milli, limit=request_milli, **busy(MS)),
            Program("b", request=1000 - request_milli, starts_ns=MS, **service),
        ]

    in_turns, at_once = done(make, Sharing.EXCLUSIVE), done(make, Sharing.CONCURRENT)
    assert at_once[0] >= min(in_turns[0], request_milli / 1000) - 0.02, (in_turns, at_once)


@pytest.mark.parametrize("honest", [EAGER, DENSE, busy(5 * MS)], ids=["eager", "dense", "busy 5 ms"])
@pytest.mark.parametrize("kernel_ms", [1, 20])
def test_a_liar_whose_launches_grow_costs_an_honest_tenant_nothing(honest: dict[str, Any], kernel_ms: int) -> None:
    """At each reading the liar reports 1 % more new launches than at the reading before, so that its progress seems to
    rise.
    """
    grown, sent = 1.0, 0

    def lie(samples: Samples) -> Samples:
        nonlocal grown, sent
        grown *= 1.01
        sent += int(grown)
        return Samples(samples.looks, samples.looks, sent)

    def make() -> list[Program]:
        nonlocal grown, sent
        grown, sent = 1.0, 0
        return [
            Program("a", request=900, **honest),
            Program("b", request=100, starts_ns=MS, lie=lie, **busy(kernel_ms * MS)),
        ]

    in_turns, at_once = done(make, Sharing.EXCLUSIVE), done(make, Sharing.CONCURRENT)
    assert at_once[0] >= min(in_turns[0], 0.9) - 0.03, (in_turns, at_once)


@pytest.mark.parametrize("honest", [EAGER, DENSE], ids=["eager", "dense"])
@pytest.mark.parametrize(("request_milli", "kernel_ms"), [(900, 1), (900, 20), (500, 20), (500, 5)])
def test_next_to_a_busy_interactive_tenant_a_program_with_gaps_gets_no_less_than_in_turns(
    honest: dict[str, Any], request_milli: int, kernel_ms: int
) -> None:
    def make() -> list[Program]:
        return [
            Program("a", request=request_milli, **honest),
            Program("b", request=1000 - request_milli, starts_ns=MS, interactive=True, **busy(kernel_ms * MS)),
        ]

    in_turns, at_once = done(make, Sharing.EXCLUSIVE), done(make, Sharing.CONCURRENT)
    assert at_once[0] >= min(in_turns[0], request_milli / 1000) - 0.03, (in_turns, at_once)


def _service(gpu_ns: int, kernels: int, pause_ms: int, host_ns: int = 100 * US) -> dict[str, Any]:
    return {"gpu_ns": gpu_ns, "host_ns": host_ns, "kernels": kernels, "pause_ns": pause_ms * MS, "waits": True}


HONEST: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "short steps, bursts of 100 ms": [(50, _service(MS, 100, 100, 20 * US)), (950, _service(MS, 3, 2))],
    "eager, bursts of 500 ms": [
        (100, _service(5 * MS, 100, 400, 20 * US)),
        (900, {"gpu_ns": 800 * US, "host_ns": 700 * US, "kernels": 12, "pause_ns": 5 * MS}),
    ],
    "work of 40 ms, kernels of 100 ms": [(500, _service(4 * MS, 10, 10)), (500, busy(100 * MS))],
    "work of 10 ms, kernels of 100 ms": [(300, busy(100 * MS)), (700, _service(MS, 10, 2))],
    "three": [
        (500, {"gpu_ns": 800 * US, "host_ns": 300 * US, "kernels": 60, "pause_ns": 5 * MS}),
        (450, _service(4 * MS, 1, 2)),
        (50, busy(100 * MS)),
    ],
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_tenants_get_their_requests_as_in_turns(name: str) -> None:
    def make() -> list[Program]:
        return [Program(f"t{i}", request=part, starts_ns=i * MS, **kind) for i, (part, kind) in enumerate(HONEST[name])]

    in_turns, at_once = done(make, Sharing.EXCLUSIVE), done(make, Sharing.CONCURRENT)
    for alone_part, part, (request_milli, _) in zip(in_turns, at_once, HONEST[name], strict=True):
        assert part >= min(alone_part, request_milli / 1000) - 0.05, (in_turns, at_once)


@pytest.mark.parametrize("request_milli", [300, 700, 900])
@pytest.mark.parametrize("other", [EAGER, busy(MS)], ids=["eager", "busy"])
def test_a_program_that_waits_for_each_of_its_short_kernels_gets_its_request(
    request_milli: int, other: dict[str, Any]
) -> None:
    """Each short kernel of the program waits for a time slice of the other program, so co-running would leave the
    program nearly nothing."""

    def make() -> list[Program]:
        waits = Program("a", request=request_milli, gpu_ns=20 * US, host_ns=20 * US, waits=True)
        return [waits, Program("b", request=1000 - request_milli, starts_ns=MS, **other)]

    in_turns, at_once = done(make, Sharing.EXCLUSIVE), done(make, Sharing.CONCURRENT)
    for alone_part, part, each in zip(in_turns, at_once, (request_milli, 1000 - request_milli), strict=True):
        assert part >= min(alone_part, each / 1000) - 0.03, (in_turns, at_once)


@pytest.mark.promise("time-co-run-slices")
@pytest.mark.parametrize("request_milli", [300, 700, 900])
def test_a_program_that_gives_the_gpu_back_after_each_kernel_gets_what_time_slices_leave_it(request_milli: int) -> None:
    """The program pauses for 0.5 ms after each kernel, the idle time after which its hook releases the token."""

    def make() -> list[Program]:
        waits = Program("a", request=request_milli, gpu_ns=20 * US, host_ns=500 * US, waits=True)
        return [waits, Program("b", request=1000 - request_milli, starts_ns=MS, **busy(20 * MS))]

    bare, in_turns, at_once = done(make, None), done(make, Sharing.EXCLUSIVE), done(make, Sharing.CONCURRENT)
    assert at_once[0] >= min(bare[0], in_turns[0]) - 0.02, (bare, in_turns, at_once)
    assert sum(at_once) >= sum(in_turns), (in_turns, at_once)


@pytest.mark.parametrize("request_milli", [300, 700, 900])
@pytest.mark.parametrize(
    ("other", "kernel_ms"), [(EAGER, 2), (DENSE, 20), (busy(MS), 5)], ids=["eager", "dense", "busy"]
)
def test_a_program_of_two_streams_gets_its_request_although_one_of_them_launches_as_ever(
    request_milli: int, other: dict[str, Any], kernel_ms: int
) -> None:
    """Next to long kernels, a second stream launches tiny kernels at a constant rate. That must not hide that the first
    stream is slowed.
    """

    def make() -> list[Program]:
        two = Program("a", request=request_milli, lie=_with_tiny_kernels, **busy(kernel_ms * MS))
        return [two, Program("b", request=1000 - request_milli, starts_ns=MS, **other)]

    in_turns, at_once = done(make, Sharing.EXCLUSIVE), done(make, Sharing.CONCURRENT)
    for alone_part, part, each in zip(in_turns, at_once, (request_milli, 1000 - request_milli), strict=True):
        assert part >= min(alone_part, each / 1000) - 0.03, (in_turns, at_once)


def test_a_tenant_whose_long_kernels_drain_next_to_a_co_runner_is_not_charged_for_both() -> None:
    """The co-runner slows the tenant's last work, so the tenant drains later than it has announced. That time must be
    charged once.
    """

    def make() -> list[Program]:
        return [
            Program("a", request=350, **busy(20 * MS)),
            Program("b", request=650, starts_ns=MS, gpu_ns=2 * MS, host_ns=100 * US, waits=True),
        ]

    assert done(make, Sharing.CONCURRENT)[0] >= 0.33


def _with_tiny_kernels(samples: Samples) -> Samples:
    return replace(samples, launches=samples.launches + 10 * samples.looks, several=samples.flying)


def _of_several_streams(samples: Samples) -> Samples:
    return replace(samples, several=samples.flying)


def test_two_programs_of_several_streams_fill_each_others_gaps() -> None:
    def make() -> list[Program]:
        return [
            Program("a", request=500, lie=_of_several_streams, **EAGER),
            Program("b", request=500, starts_ns=MS, lie=_of_several_streams, **EAGER),
        ]

    assert min(done(make, Sharing.CONCURRENT)) >= 0.8
