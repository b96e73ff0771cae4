"""Lists of strings as GGUF has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import ffi, lib

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def walk_strings(data: Bytes, at: int, n: int) -> tuple[int, int]:
    """Step over `n` strings from `at` on. Returns how many of them lie within `data`, and where the next one begins."""
    where = ffi.new("int64_t *", at)
    found = lib.pg_gguf_strings(ffi.from_buffer("uint8_t[]", data), len(data), where, n, ffi.NULL)
    return found, where[0]


def read_strings(data: Bytes, at: int, end: int, n: int) -> list[str]:
    """The `n` strings that lie between `at` and `end`, as `walk_strings` found them. Bytes that are not UTF-8 become
    surrogates ("surrogateescape")."""
    packed = bytearray(end - at - 7 * n)
    where = ffi.new("int64_t *", at)
    lib.pg_gguf_strings(ffi.from_buffer("uint8_t[]", data), end, where, n, ffi.from_buffer("uint8_t[]", packed))
    texts = packed.decode("utf-8", "surrogateescape").split("\0")[:-1]
    if len(texts) == n:
        return texts
    lengths, out = data[at:end], list[str]()  # a string contains a NUL
    pos = 0
    for _ in range(n):
        start = pos + 8
        pos = start + int(lengths[pos:start].view("<u8")[0])
        out.append(lengths[start:pos].tobytes().decode("utf-8", "surrogateescape"))
    return out
