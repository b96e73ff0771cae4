"""Forms with files (multipart/form-data, RFC 7578), read in a time and memory that are proportional to their size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import NamedTuple

from .errors import HTTPError

_PARTS = 100  # of a form
_HEAD = 1 << 12  # bytes of the headers of a part
_REST = re.compile(rb"(--)?[ \t]*(?=\r\n|\Z)")  # of a line that begins with a boundary


class Part(NamedTuple):
    """A field of a form: the name of its file, if it has one, and its bytes."""

    filename: str | None
    data: bytes


def read_form(kind: str, body: bytes) -> dict[str, Part]:
    """The fields of a form by name; of several with one name the last. `kind`: the Content-Type. Raises HTTPError for
    what is no form."""
    about = _with("content-type", kind)
    boundary = about.get_param("boundary")
    if about.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise HTTPError(400, "a form (multipart/form-data) with a file is wanted")
    marks = _marks(b"--" + boundary.encode("latin-1", "replace"), body)
    fields: dict[str, Part] = {}
    begin = next(marks, None)
    for _ in range(_PARTS):
        if begin is None or begin.is_last:
            return fields
        if (end := next(marks, None)) is None:
            raise HTTPError(400, "the form has no end")
        told = body.find(b"\r\n\r\n", begin.end, end.start + 2)
        if not 0 <= told - begin.end <= _HEAD:
            raise HTTPError(400, f"a part of the form has no headers that end, or more than {_HEAD} bytes of them")
        name, filename = _about(body[begin.end : told])
        if name is not None:
            fields[name] = Part(filename, body[told + 4 : end.start])
        begin = end
    raise HTTPError(400, f"the form has more than {_PARTS} parts")


class _Mark(NamedTuple):
    """A line with the boundary: where it begins, with the line break before it, and where it ends."""

    start: int
    end: int
    is_last: bool


def _marks(mark: bytes, body: bytes) -> Iterator[_Mark]:
    """The lines of the boundary. One regular expression would look for the next one in a single call of C, and others
    wait for a second if 60 MB have millions of lines that begin like it."""
    at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark)
    while at >= 0:
        end = at + len(mark) + (0 if body.startswith(mark, at) else 2)
        found = _REST.match(body, end)
        if found is not None:
            end = found.end()
            yield _Mark(at, end, found[1] is not None)
        at = body.find(b"\r\n" + mark, end)


def _about(head: bytes) -> tuple[str | None, str | None]:
    """The name of a field and of its file, as the headers of its part say them."""
    name = filename = None
    for line in head.decode("utf-8", "replace").split("\r\n"):
        header, _, value = line.partition(":")
        match header.strip().lower():
            case "content-disposition":
                about = _with("content-disposition", value)
                found = about.get_param("name", header="content-disposition")
                try:
                    name, filename = None if found is None else collapse_rfc2231_value(found), about.get_filename()
                except ValueError as e:  # a name in an encoding that Python has, and that cannot be read
                    raise HTTPError(400, f"a part of the form has a name that cannot be read: {e}") from None
            case "content-type" if value.strip().lower().startswith("multipart/"):
                raise HTTPError(400, "the fields of a form must be bytes, not forms of their own")
            case _:
                pass
    return name, filename


def _with(header: str, value: str) -> Message:
    about = Message()
    about[header] = value.strip()
    return about
