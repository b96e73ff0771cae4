"""Changes of inputs: by their structure where a harness has one, of their bytes where not."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from ..deep.mutate import layout_of, mutated

_EDGES = [0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x20, 0x22, 0x5B, 0x7B]
_ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.0, 2**31, 2**53, 2**63, 10**12, 10**400, 1e308, -1e-308),
    *(
        "",
        "a",
        " ",
        "\0",
        "\ud800",
        "é",
        "x" * 300,
        "(a+)+$",
        [],
        [[]],
        [None],
        {},
        {"type": "Sequence"},
        [1, 2],
        ["a b"],
    ),
    *([["a", 1]], {"a": None}, {"id": 1}, {"String": 1}, {"$ref": "#"}, {"not": {}}, {"items": True}),
]


def change_bytes(rng: np.random.Generator, data: bytes, words: tuple[bytes, ...] = ()) -> bytes:
    """One to eight changes: of bits and bytes, of whole numbers; parts that go, come twice, or are moved; words."""
    d = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        at, what, n = int(rng.integers(len(d) + 1)), int(rng.integers(9)), int(rng.choice([1, 2, 4, 8, 30]))
        if what == 0 and at < len(d):
            d[at] ^= 1 << int(rng.integers(8))
        elif what == 1 and at < len(d):
            d[at] = int(rng.choice(_EDGES))
        elif what == 2:
            del d[at : at + n]
        elif what == 3:
            d[at:at] = d[at : at + n]
        elif what == 4:
            other = int(rng.integers(len(d) + 1))
            d[at:at] = d[other : other + n]
        elif what == 5 and words:
            d[at : at + n * int(rng.integers(2))] = words[int(rng.integers(len(words)))]
        elif what == 6:
            d[at:at] = rng.bytes(n)
        elif what == 7 and at + 4 <= len(d):
            (old,) = struct.unpack_from("<I", d, at)
            new = int(
                rng.choice([old + 1, old - 1, old * 2, 1 << 31, (1 << 32) - 1, len(d), 1 << int(rng.integers(32))])
            )
            struct.pack_into("<I", d, at, new % (1 << 32))
        elif what == 8 and not rng.integers(4):
            del d[at:]
    return bytes(d)


def change_gguf(rng: np.random.Generator, data: bytes) -> bytes:
    """A GGUF file with counts, lengths, types, values, records or data changed."""
    try:
        return mutated(rng, data, layout_of(data))
    except (struct.error, LookupError, ValueError, ArithmeticError):  # it has been changed too much for a walk
        return change_bytes(rng, data)


def change_json(rng: np.random.Generator, data: bytes) -> bytes:
    """JSON with values somewhere inside changed; of one change in four the bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(rng, data)
    if not isinstance(value, (dict, list)) or not rng.integers(4):
        return change_bytes(rng, data)
    for _ in range(int(rng.integers(1, 4))):
        _change_inside(rng, value)
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return change_bytes(rng, data)


def _change_inside(rng: np.random.Generator, value: Any) -> None:
    while value:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[int(rng.integers(len(keys)))]
        inside, what = value[key], rng.random()
        if isinstance(inside, (dict, list)) and inside and what < 0.7:
            value = inside
        elif what < 0.76:
            del value[key]
            return
        elif what < 0.82:  # what stands elsewhere here
            value[key] = value[keys[int(rng.integers(len(keys)))]]
            return
        elif what < 0.88:
            value[key] = [inside] if rng.integers(2) else {str(rng.choice(["type", "a", "properties"])): inside}
            return
        else:
            value[key] = _ODD[int(rng.integers(len(_ODD)))]
            return
