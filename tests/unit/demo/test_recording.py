"""docs/recording.py: the animation of README.md shows a run of `make taste` as a terminal draws it."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
BYTES = 60_000
"""Largest size of the file in bytes, because README.md is also read over slow connections."""


@pytest.fixture(scope="module")
def recording() -> ModuleType:
    """Return docs/recording.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_recording", ROOT / "docs" / "recording.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def shown(picture: str) -> str:
    """Return the text in a picture."""
    return " ".join("".join(part.itertext()) for part in ET.fromstring(picture).iter() if part.tag.endswith("tspan"))


def test_the_recording_has_the_text_of_make_taste(recording: ModuleType) -> None:
    picture = recording.FILE.read_text()
    assert len(picture.encode()) <= BYTES
    source = (ROOT / "demo" / "taste.py").read_text()
    columns = re.findall(r'for column in \(("program".*?)\)', source)
    expected = [*re.findall(r'keys = "(.*)"', source), *re.findall(r'console.print\("(.*?)"', source), *columns]
    assert len(expected) == 3
    words = recording.words(re.findall(r"[^\s\",]+", " ".join(expected)))
    assert not words - recording.words(re.findall(r"[^\s\",]+", shown(picture))), "run make docs"


def test_a_terminal_keeps_the_last_text_of_each_cell_with_its_style(recording: ModuleType) -> None:
    terminal = recording.Terminal()
    rest = terminal.feed("\x1b[?1049h\x1b[Hxx\x1b[H\x1b[1ma\x1b[0mb\r\n\x1b[31mc\x1b[")
    assert rest == "\x1b["
    assert terminal.feed(rest + "0md") == ""
    rows = terminal.screen()
    assert rows[0][:3] == (("a", "bold"), ("b", ""), (" ", ""))
    assert rows[1][:3] == (("c", "red"), ("d", ""), (" ", ""))


def test_a_terminal_refuses_a_sequence_that_it_does_not_draw(recording: ModuleType) -> None:
    with pytest.raises(recording.RecordingError, match=r"unknown control sequence ESC\[2J"):
        recording.Terminal().feed("\x1b[2J")


def test_a_reader_of_reduced_motion_sees_one_frame(recording: ModuleType) -> None:
    empty = recording.Terminal().screen()
    screens = [(((str(scene), ""), *empty[0][1:]), *empty[1:]) for scene, _ in enumerate(recording.SCENES)]
    picture = recording.drawn("first", screens)
    (still,) = re.findall(
        r"\(prefers-reduced-motion: reduce\) \{ \.f \{ animation: none \} \.(\w+) \{ visibility: visible \} \}", picture
    )
    frames = {match[1]: match[2] for match in re.finditer(r'<g class="f (\w+)">(.*?)</g>', picture, re.DOTALL)}
    assert len(frames) == len(screens)
    assert f">{recording.STILL}</tspan>" in frames[still]
