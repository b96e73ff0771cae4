"""What calls of the C functions for vocabularies have in common: the seed of hashes, packed texts, Ctrl-C."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import lib

Ends = np.ndarray[Any, np.dtype[np.int64]]

_PRIME = (1 << 61) - 1
_LONG = 1 << 14  # bytes or symbols from which on Ctrl-C is worth being watched for


def _random(bits: int) -> int:
    return int.from_bytes(os.urandom(bits // 8), "little")


def _new_seed() -> dict[str, Any]:
    base = 256 + _random(128) % (_PRIME - 256)
    powers = [pow(base, i, _PRIME) for i in range(1, 5)]
    factors = [_random(64) | 1, _random(64) | 1]
    inverse = pow(base, -1, _PRIME)
    return {"base": base, "inverse": inverse, "powers": powers, "flip": _random(64), "factors": factors}


SEED = _new_seed()  # pg_seed


def pack(texts: Sequence[str]) -> tuple[bytes, Ends]:
    """All texts in one, with a NUL after each, and the places of these NULs."""
    data = ("\0".join(texts) + "\0").encode("utf-8", "surrogateescape")
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 0)
    if len(ends) != len(texts):  # there are no texts, or one contains a NUL
        ends = np.cumsum([len(text.encode("utf-8", "surrogateescape")) + 1 for text in texts], dtype=np.int64) - 1
    return data, ends


def interruptible(size: int, call: Callable[[bool], int]) -> int:
    """Call `call`, a C function for a text of `size`, and return what it returns. It watches for SIGINT when it is
    given True. When it was stopped, Python's handler has its turn; when that raises nothing, the call begins anew."""
    watch = size >= _LONG and threading.current_thread() is threading.main_thread()
    while (result := call(watch)) == lib.PG_STOPPED:
        pass
    return result
