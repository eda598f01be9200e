"""Parser of an API server's JSON, fed in chunks of text, and safe against any content that a user can write.

Guarantees:
- An object that cannot be read (nested too deep, too large, a number too long) is replaced by an `Unreadable`, and the
  objects before and after it are read.
- managedFields that nest too deep are dropped, and the rest of the object is read. Any user may write such fields into
  an object.
- At most one object of a list, and the chunk that arrived last, are kept as text.
- The work is linear in the length of the text: a part of an object is parsed at most twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .bodies import loads

OBJECT_LIMIT = 1 << 22
"""Longest object that is read, in characters of JSON: 4 MiB, as etcd stores at most 1.5 MiB. Parsing 4 MiB takes 40
ms."""
_TOO_LARGE = f"is larger than {OBJECT_LIMIT >> 20} MiB"
_HEAD = 1 << 20
"""Characters of an unreadable object that are searched for its metadata, 1 MiB: the metadata precedes spec and
status."""
_TRY_AGAIN = 1 << 16
"""Length in characters above which an unfinished object is parsed again only after its text has doubled. So the work
stays linear."""
_IDENTITY = (
    "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
    "labels", "annotations", "ownerReferences",
)  # fmt: skip
"""Fields of the metadata that are read of an unreadable object. managedFields are not among them, as they may be what
nests too deep."""

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
"""The rest of a string, up to its end or the end of the text."""
_NUMBER = re.compile(r"[-+0-9.eE]+")
_STRING = re.compile(rf'"{_IN_STRING.pattern}"', re.DOTALL)
_WHOLE_STRINGS = re.compile(rf'(?:[^"]++|{_STRING.pattern})*+', re.DOTALL)
"""Pattern of text up to its end, or up to a string that the end of the text cuts off."""
_STRETCH = 1 << 14
"""Characters that are skipped in one step, 16 KiB. In one step, the brackets of a long text would take up to 5 ms each
time."""
_STEPS = bytes(1 if byte in b"{[" else 255 for byte in range(256))
"""Change of the depth by each kind of bracket: 1 for an opening bracket, -1 (in eight bits) for a closing one."""
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"{}[]")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Object of which at most the metadata can be read. `why`: cause as the end of a sentence that begins "the
    object"."""

    metadata: dict[str, Any]
    why: str


class NotAListError(ValueError):
    """The answer is not a list, or ends in the middle of one."""


class NotAnEventError(ValueError):
    """The line is not an event of a watch."""


class ListText:
    """Incremental reader of one page of a list: `feed` it with text, then `close` it.

    The metadata of the list may precede its items (built-in kinds) or follow them (custom resources).
    """

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        """Metadata of the list. Complete only after `close`, as they may follow the items."""
        self._has_items = False
        self._text = ""
        self._at = 0
        self._try_at = 0
        self._next: Callable[[], dict[str, Any] | Unreadable | None] = self._open
        self._skipped: _Skipped | None = None

    def feed(self, text: str) -> Iterator[dict[str, Any] | Unreadable]:
        """Add text; yield the items that are complete by now. Raise `NotAListError`."""
        self._text += text
        if self._skipped is None and len(self._text) < self._try_at:
            return
        yield from self._read(last=False)

    def close(self) -> Iterator[dict[str, Any] | Unreadable]:
        """Yield the remaining items. Raise `NotAListError` if the text is not a complete list."""
        yield from self._read(last=True)
        if self._next != self._done:
            raise NotAListError("the list ends in the middle")
        if not self._has_items:
            raise NotAListError("the answer is not a list: it has no items")

    def _read(self, *, last: bool) -> Iterator[dict[str, Any] | Unreadable]:
        while True:
            self._at = blank(self._text, self._at)
            if self._at == len(self._text) or self._next == self._done:
                break
            before = self._at
            try:
                found = self._next()
            except _Incomplete:
                self._at = before
                if last:
                    raise NotAListError("the list ends in the middle") from None
                break
            if found is not None:
                yield found
        self._text, self._at = self._text[self._at :], 0
        self._try_at = min(2 * len(self._text), OBJECT_LIMIT + 1) if len(self._text) > _TRY_AGAIN else 0

    # Steps of the parser: each reads one element at `_at` and sets `_next` to the following step. `_Incomplete` is
    # raised if more text is needed.

    def _open(self) -> None:
        self._expect("{")
        self._next = self._member

    def _member(self) -> None:
        if self._text[self._at] == "}":
            self._at += 1
            self._next = self._done
            return
        if self._text[self._at] == ",":
            self._at = blank(self._text, self._at + 1)
        key, at = _decode(self._text, self._at)
        at = _colon(self._text, at)
        if key == "items" and self._text.startswith("[", at):
            self._at = at + 1
            self._next = self._item
            self._has_items = True
            return
        value, self._at = _decode(self._text, at)
        self._has_items = self._has_items or (key == "items" and value is None)
        if key == "metadata" and isinstance(value, dict):
            self.metadata = value

    def _item(self) -> dict[str, Any] | Unreadable | None:
        if self._skipped is not None:
            return self._skip()
        first = self._text[self._at]
        if first == "]":
            self._at += 1
            self._next = self._member
            return None
        if first == ",":
            self._at += 1
            return None
        try:
            item, at = _decode(self._text, self._at)
        except _Incomplete:
            if len(self._text) - self._at <= OBJECT_LIMIT:
                raise
            self._skipped = _Skipped(_TOO_LARGE)
            return self._skip()
        except (RecursionError, ValueError) as error:
            self._skipped = _Skipped(_why(error), keep=OBJECT_LIMIT)
            return self._skip()
        begin, self._at = self._at, at
        if at - begin > OBJECT_LIMIT:  # the whole object came in one chunk
            return Unreadable(item_metadata(self._text[begin : begin + _HEAD]), _TOO_LARGE)
        return item if isinstance(item, dict) else Unreadable({}, "is not an object")

    def _skip(self) -> dict[str, Any] | Unreadable | None:
        assert self._skipped is not None
        self._at, ended = self._skipped.feed(self._text, self._at)
        if not ended:
            return None
        skipped, self._skipped = self._skipped, None
        return _without_managed_fields(skipped.head, 0) or Unreadable(item_metadata(skipped.head), skipped.why)

    def _done(self) -> None:
        raise AssertionError("nothing is read after the end")

    def _expect(self, character: str) -> None:
        if self._text[self._at] != character:
            raise NotAListError(f"the answer is not a list: it begins with {self._text[self._at : self._at + 20]!r}")
        self._at += 1


def parse_event(line: bytes, *, whole: bool = True) -> dict[str, Any] | tuple[str, Unreadable]:
    """Return an event of a watch. If its object cannot be read, return its type and the readable part of the object.

    `whole`: False if `line` is only the beginning of an event that is too large. Raise `NotAnEventError`.
    """
    try:
        if not whole:
            raise RecursionError
        event = loads(line)
    except json.JSONDecodeError as error:
        raise NotAnEventError(str(error)) from None
    except (RecursionError, ValueError) as error:
        why = _why(error) if whole else _TOO_LARGE
        text = line[: OBJECT_LIMIT if whole else _HEAD].decode(errors="replace")
        at = next((at for key, at in _positions(text, 0) if key == "object"), None)
        event = _without_managed_fields(text, at) if whole and at is not None else None
        if event is None:
            kind = next((value for key, value in _members(text, 0, only=("type",)) if key == "type"), "MODIFIED")
            return str(kind), Unreadable({} if at is None else item_metadata(text[at:]), why)
    if not isinstance(event, dict) or not isinstance(event.get("object"), dict) or "type" not in event:
        raise NotAnEventError("not an event of a watch")
    return event


def item_metadata(text: str) -> dict[str, Any]:
    """Return the readable metadata of an object whose text begins here, and may be cut off."""
    for key, at in _positions(text, 0):
        if key == "metadata":
            return dict(_members(text, at, only=_IDENTITY))
    return {}


def _without_managed_fields(text: str, at: int) -> dict[str, Any] | None:
    """Parse `text` as if the managedFields of the object at `at` were empty. Return None if that object has none, or
    the text is incomplete or still cannot be read."""
    for name in ("metadata", "managedFields"):
        found = next((begin for key, begin in _positions(text, at) if key == name), None)
        if found is None:
            return None
        at = found
    try:
        value = json.loads(f"{text[:at]}[]{text[deep_end(text, at) :]}")
    except (RecursionError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class _Incomplete(Exception):  # noqa: N818 - no fault: more text is needed
    """The text ends within a value."""


class _Skipped:
    """Skips one value of any depth and length, chunk by chunk. `head` keeps the first `keep` characters of the
    value."""

    def __init__(self, why: str, *, keep: int = _HEAD) -> None:
        self.why = why
        self._keep = keep
        self.head = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, at: int) -> tuple[int, bool]:
        """Skip the value, or the next part of it, from `at` on. Return the position where the value or the text ends,
        and whether the value has ended."""
        begin = at
        if not self.head and (number := _NUMBER.match(text, at)):
            return number.end(), True
        end, ended = self._end(text, at)
        if len(self.head) < self._keep:
            self.head += text[begin:end][: self._keep - len(self.head)]
        return end, ended

    def _end(self, text: str, at: int) -> tuple[int, bool]:
        if self._escaped:
            at, self._escaped = at + 1, False
        walk_to = at
        while at < len(text):
            if at >= walk_to and self._depth > 0 and not self._in_string:
                at, walk_to = self._stretch(text, at)
                continue
            if self._in_string:
                inside = _IN_STRING.match(text, at)
                at = inside.end() + 1 if inside is not None else at
                if at > len(text):
                    break
                self._escaped = text[at - 1] == "\\"  # then the next text begins with the escaped character
                self._in_string = self._escaped
                if self._in_string:
                    break
            elif (found := _STRUCTURE.search(text, at)) is None:
                break
            else:
                at = found.end()
                self._turn(found[0])
            if self._depth == 0 and not self._in_string:
                return at, True
        return len(text), False

    def _stretch(self, text: str, at: int) -> tuple[int, int]:
        """Skip a stretch of text in which the value does not end. Return the position at which to continue, and the
        position up to which brackets must be read one by one. The latter is at least one character later, so each call
        makes progress."""
        found = _WHOLE_STRINGS.match(text, at, at + _STRETCH)
        end = found.end() if found is not None else at
        brackets = _STRING.sub("", text[at:end]).encode("ascii", "replace").translate(_STEPS, _NO_BRACKETS)
        levels = list(accumulate(memoryview(brackets).cast("b"), initial=self._depth))
        if end == at or min(levels) <= 0:
            return at, max(end, at + 1)
        self._depth = levels[-1]
        return end, end

    def _turn(self, character: str) -> None:
        """Change the depth by a bracket, or enter a string at a quotation mark."""
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1


def _positions(text: str, at: int) -> Iterator[tuple[str, int]]:
    """Yield (key, position of its value) for each member of the object at `at`, as far as the text goes."""
    at = blank(text, at)
    if not text.startswith("{", at):
        return
    at += 1
    try:
        while True:
            at = blank(text, at)
            if text.startswith(",", at):
                at = blank(text, at + 1)
            if not text.startswith('"', at):
                return
            key, at = _decode(text, at)
            at = _colon(text, at)
            yield str(key), at
            try:
                _, at = _decode(text, at)
            except (RecursionError, ValueError):
                at, ended = _Skipped("").feed(text, at)
                if not ended:
                    return
    except (_Incomplete, ValueError):
        return


def _members(text: str, at: int, *, only: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each readable member of the object at `at` whose key is in `only`."""
    for key, begin in _positions(text, at):
        if key in only:
            try:
                yield key, _decode(text, begin)[0]
            except (_Incomplete, RecursionError, ValueError):
                continue


def deep_end(text: str, at: int) -> int:
    """Return the position after the object or array at `at`, which may nest to any depth. Raise `ValueError` if the
    text ends before."""
    end, ended = _Skipped("").feed(text, at)
    if not ended:
        raise ValueError("the text ends within a value")
    return end


def blank(text: str, at: int) -> int:
    """Return the position of the next character that is no space, or the end of the text."""
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at


def _decode(text: str, at: int) -> tuple[Any, int]:
    """Return the value at `at`, and the position after it. Raise `_Incomplete`, `RecursionError`, or `ValueError` (a
    number with too many digits)."""
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError:
        raise _Incomplete from None


def _colon(text: str, at: int) -> int:
    """Return the position of the value of a member whose key ends at `at`."""
    at = blank(text, at)
    at = blank(text, at + 1)
    if at >= len(text):
        raise _Incomplete
    return at


def _why(error: Exception) -> str:
    return "is nested too deep" if isinstance(error, RecursionError) else f"is not readable: {error}"
