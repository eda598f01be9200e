"""Images of the demo: if they cannot be made, the demo continues without them and prints the reason in one line."""

from __future__ import annotations

import io
from contextlib import ExitStack
from pathlib import Path

import playground
import pytest
from harness.delivered import Delivery
from harness.machines import RealNode
from images.steps import ImageError, NotHadError
from screen import Screen


def made(
    monkeypatch: pytest.MonkeyPatch, *, node: str | None, images: str | None, with_roots: bool = True
) -> tuple[Delivery | str, str]:
    """Make the images; return them or the reason, and the output. `node`, `images`: reason why this machine can run no
    node or make no images; None if it can."""
    monkeypatch.setattr(RealNode, "unavailable", staticmethod(lambda: node))
    monkeypatch.setattr(playground, "why_no_images", lambda: images)
    out = io.StringIO()
    with ExitStack() as stack:
        return playground.make_images(
            Screen(playground.as_pods(), out=out), stack, with_roots=with_roots
        ), out.getvalue()


@pytest.mark.parametrize(("node", "images"), [("no root", None), (None, "no apt-get"), ("no root", "no apt-get")])
def test_a_machine_without_a_node_or_images_tries_none(
    monkeypatch: pytest.MonkeyPatch, node: str | None, images: str | None
) -> None:
    assert made(monkeypatch, node=node, images=images) == (node or images, "")


@pytest.mark.parametrize(
    ("missing", "with_roots", "tries"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_roots_that_take_minutes_are_made_only_on_request(
    monkeypatch: pytest.MonkeyPatch, missing: bool, with_roots: bool, tries: bool
) -> None:
    def fails(_source: Path, _into: Path) -> Delivery:
        raise ImageError("tried")

    monkeypatch.setattr(Delivery, "of", fails)
    monkeypatch.setattr(playground, "roots_to_make", lambda: missing)
    found, _ = made(monkeypatch, node=None, images=None, with_roots=with_roots)
    assert found == ("tried" if tries else playground.NO_ROOTS)


@pytest.mark.parametrize("failure", [NotHadError, ImageError])
def test_images_that_cannot_be_made_are_a_reason_of_one_line(
    monkeypatch: pytest.MonkeyPatch, failure: type[ImageError]
) -> None:
    def fails(_source: Path, _into: Path) -> Delivery:
        raise failure("Debian base with Python: status 25\nE: no mirror")

    monkeypatch.setattr(Delivery, "of", fails)
    reason, printed = made(monkeypatch, node=None, images=None)
    assert reason == "Debian base with Python: status 25"
    assert playground.IMAGES.title in printed
