"""Long answers as JSON: written in parts, between which other threads have their turns.

`json.dumps` is one call of C: of an answer of 18 MB it held up all other clients for more than a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from .http import Json, dumps

_PART = 1 << 13  # values, and characters of texts, that are written at once
_PIECE = 1 << 18  # bytes that are sent at once
_ITEMS = 1 << 7  # items of a list that may be


async def long_json(value: Any) -> Response:
    """An answer in JSON that may be long, and may have NumPy arrays of numbers in it."""
    if _is_short(value):  # at once: all threads may be busy
        return Json(value)
    pieces = await run_in_threadpool(_pieces, value)
    headers = {"content-length": str(sum(map(len, pieces)))}
    return StreamingResponse(_taken(pieces), headers=headers, media_type=Json.media_type)


def _pieces(value: Any) -> deque[bytes]:
    """The JSON of a value in pieces of some size."""
    pieces, parts, n = deque[bytes](), list[bytes](), 0
    for part in _parts(value):
        parts.append(part)
        n += len(part)
        if n >= _PIECE:
            pieces.append(b"".join(parts))
            parts, n = [], 0
    pieces.append(b"".join(parts))
    return pieces


async def _taken(pieces: deque[bytes]) -> AsyncIterator[bytes]:
    """The pieces, each of which is forgotten when it has been sent: a client takes as much as it can read."""
    while pieces:
        yield pieces.popleft()


def size(value: Any, most: int) -> int:
    """How many characters and parts a value of a request or an answer has, counted up to a little more than `most`. An
    array has more than that: it is no JSON yet."""
    left, n = [value], 0
    while left and n <= most:
        part = left.pop()
        n += len(part) if isinstance(part, str) else 1
        if isinstance(part, Mapping):
            left += islice(cast("Mapping[Any, Any]", part).items(), most)
        elif isinstance(part, (list, tuple)):
            left += islice(cast("Sequence[Any]", part), most)
        elif isinstance(part, np.ndarray):
            n += most
    return n


def _is_short(value: Any) -> bool:
    return size(value, _PART) <= _PART


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, np.ndarray):
        rows = cast("np.ndarray[Any, Any]", value)
        value = list(rows) if rows.ndim > 1 else None
        if value is None:
            yield dumps(rows.tolist())
            return
    if not isinstance(value, (dict, list)) or _is_short(value):
        yield dumps(value)
    elif isinstance(value, dict):
        before = b"{"
        for name, x in cast("dict[str, Any]", value).items():
            yield before + dumps(name) + b":"
            yield from _parts(x)
            before = b","
        yield b"}"
    else:
        yield from _items(cast("list[Any]", value))


def _items(values: Sequence[Any]) -> Iterator[bytes]:
    """A list: some items at once, when they are short."""
    before = b"["
    for i in range(0, len(values), _ITEMS):
        part = values[i : i + _ITEMS]
        if _is_short(part):
            yield before + dumps(part)[1:-1]
            before = b","
            continue
        for x in part:
            yield before
            yield from _parts(x)
            before = b","
    yield b"]"
