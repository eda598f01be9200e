"""Descriptors that the supervisor holds for the next agent."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from sharepod.agent.state.kept_descriptors import NOTHING_KEPT, DescriptorShelf, KeptDescriptors
from sharepod.agent.state.succession import Succession


@pytest.fixture
def shelf() -> Iterator[DescriptorShelf]:
    shelf = DescriptorShelf()
    yield shelf
    shelf.close()


def written(text: str) -> int:
    """Return the descriptor of a file in memory with this text."""
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd


def read(kept: KeptDescriptors, name: str) -> tuple[str, str] | None:
    """Take the descriptor with this name. Return its content and mark; None if there is none."""
    found = kept.take(name)
    if found is None:
        return None
    return os.pread(found.fd, 100, 0).decode(), found.mark


def keep(kept: KeptDescriptors, name: str, text: str, mark: str = "") -> None:
    fd = written(text)
    kept.keep(name, fd, mark)
    os.close(fd)


def test_what_was_kept_is_the_next_agents_with_its_mark(shelf: DescriptorShelf) -> None:
    first = shelf.connect()
    keep(first, "a", "one", "first")
    keep(first, "a", "two", "second")
    keep(first, "b", "three")
    keep(first, "c", "four")
    first.drop("b")
    assert shelf.take_in()
    second = shelf.connect()
    assert (read(second, "a"), read(second, "b"), read(second, "c")) == (("two", "second"), None, ("four", ""))
    assert second.take("a") is None


def test_an_agents_last_messages_are_followed_after_its_end(shelf: DescriptorShelf) -> None:
    first = shelf.connect()
    keep(first, "a", "one")
    shelf.in_parent()
    first.close()
    assert not shelf.take_in()
    assert read(shelf.connect(), "a") == ("one", "")


def test_of_what_nobody_has_taken_nothing_stays_but_what_is_named(shelf: DescriptorShelf) -> None:
    first = shelf.connect()
    for name in ("a", "b", "c"):
        keep(first, name, name)
    shelf.take_in()
    second = shelf.connect()
    child = os.fork()
    if child == 0:
        shelf.in_child()
        taken = second.take("c")
        second.drop_all_but({"a"})
        os._exit(0 if taken is not None else 1)
    shelf.in_parent()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not shelf.take_in()
    third = shelf.connect()
    assert (read(third, "a"), read(third, "b"), read(third, "c")) == (("a", ""), None, ("c", ""))


def test_nothing_is_inherited_by_programs_that_the_supervisor_would_start(shelf: DescriptorShelf) -> None:
    first = shelf.connect()
    keep(first, "a", "one")
    shelf.take_in()
    kept = shelf.connect().take("a")
    assert kept is not None
    assert not os.get_inheritable(kept.fd)


def test_without_a_supervisor_nothing_is_kept() -> None:
    with socket.socket() as sock:
        NOTHING_KEPT.keep("a", sock.fileno())
        NOTHING_KEPT.drop("a")
    assert NOTHING_KEPT.take("a") is None


@pytest.mark.promise("install-standby")
@pytest.mark.parametrize("left", [True, False])
def test_a_turn_that_is_left_to_the_supervisor_ends_with_the_supervisor(
    shelf: DescriptorShelf, tmp_path: Path, left: bool
) -> None:
    with Succession(tmp_path, shelf.connect()) as serving:
        assert serving.free()
        assert shelf.take_in()
        serving.left_to_supervisor = left
    with Succession(tmp_path) as following:
        assert following.free() != left
        turn = shelf.connect().take("turn")
        assert turn is not None
        os.close(turn.fd)
        assert following.free()
