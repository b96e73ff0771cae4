"""Changes of inputs: by their structure where a harness has one, of their bytes where not."""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from ..deep.mutate import layout_of, mutated

Change = Callable[[np.random.Generator, bytes], bytes]
_NPY = (
    b"True",
    b"False",
    b"(2,)",
    b"()",
    b"(0, 3)",
    b"(-1,)",
    b"(9999999999,)",
    b"'|O'",
    b"'<f2'",
    b"'>i8'",
    b"'<U4'",
    b"'descr'",
)
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


def repeat_part(rng: np.random.Generator, data: bytes) -> bytes:
    """A part of the input repeated until there are 16 to 64 KB of it: some parsers take too long for such an input."""
    at = int(rng.integers(len(data) + 1))
    part = data[at : at + int(rng.choice([1, 2, 3, 5, 8, 16, 40, 100]))] or b" "
    return data[:at] + part * ((1 << int(rng.integers(14, 17))) // len(part)) + data[at:]


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


def change_parts(between: bytes, *changes: Change) -> Change:
    """Inputs of parts with `between` between them, of which one is changed, each by its own change."""

    def change(rng: np.random.Generator, data: bytes) -> bytes:
        parts = data.split(between, len(changes) - 1)
        i = int(rng.integers(len(parts)))
        parts[i] = changes[i](rng, parts[i])
        return between.join(parts)

    return change


def change_safetensors(rng: np.random.Generator, data: bytes) -> bytes:
    """A safetensors file whose header is changed, with its length right; of one change in four the bytes."""
    n = int.from_bytes(data[:8], "little")
    if n > len(data) or not rng.integers(4):
        return change_bytes(rng, data)
    head = change_json(rng, data[8 : 8 + n])
    return struct.pack("<Q", len(head)) + head + data[8 + n :]


def change_zip(rng: np.random.Generator, data: bytes) -> bytes:
    """An archive with a file in it that is changed, goes, comes twice, or gets another name."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as z:
            files = [(name, z.read(name)) for name in z.namelist()]
    except Exception:  # zipfile's are many
        return change_bytes(rng, data)
    if not files or not rng.integers(4):
        return change_bytes(rng, data)
    i, what = int(rng.integers(len(files))), int(rng.integers(6))
    name, inside = files[i]
    if what == 0:
        del files[i]
    elif what == 1:
        files.append((name, change_bytes(rng, inside)))
    elif what == 2:
        files[i] = change_bytes(rng, name.encode()).decode("latin-1"), inside
    elif name.endswith(".json"):
        files[i] = name, change_json(rng, inside)
    else:
        files[i] = name, change_bytes(rng, inside[:128], _NPY) + inside[128:]  # the header of an array, mostly
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(out, "w", int(rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))) as z:
            for name, inside in files:
                z.writestr(zipfile.ZipInfo(name or "x"), inside)
    return out.getvalue()


def change_protobuf(rng: np.random.Generator, data: bytes) -> bytes:
    """A message with fields that go, come twice, get another number, type or value; lengths around them stay right."""
    try:
        fields = _fields(data)
    except (IndexError, ValueError):
        return change_bytes(rng, data)
    if not fields or not rng.integers(5):
        return change_bytes(rng, data)
    i, what = int(rng.integers(len(fields))), int(rng.integers(7))
    number, kind, value = fields[i]
    if what == 0:
        del fields[i]
    elif what == 1:
        fields.insert(int(rng.integers(len(fields) + 1)), fields[i])
    elif what == 2:
        fields[i] = int(rng.choice([1, 2, 3, 10, 35, 36, 41, 44, 45, 46, 47, 1 << 28])), kind, value
    elif isinstance(value, int):
        fields[i] = number, kind, int(rng.choice([0, 1, 2, 3, 4, 5, 6, 127, 128, 1 << 31, (1 << 63) - 1]))
    elif kind == 2:
        fields[i] = number, kind, change_protobuf(rng, value)
    else:
        fields[i] = number, kind, rng.bytes(len(value))
    return b"".join(_varint(number << 3 | kind) + _written(kind, value) for number, kind, value in fields)


def _fields(data: bytes) -> list[tuple[int, int, int | bytes]]:
    """(number, wire type, value) of each field of a message."""
    found: list[tuple[int, int, int | bytes]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        x = shift = 0
        while True:
            byte = data[at]
            x, at, shift = x | (byte & 127) << shift, at + 1, shift + 7
            if byte < 128:
                return x

    while at < len(data):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            found.append((tag >> 3, kind, varint()))
            continue
        n = varint() if kind == 2 else {1: 8, 5: 4}.get(kind, -1)
        if n < 0 or at + n > len(data):
            raise ValueError("no message")
        found.append((tag >> 3, kind, data[at : at + n]))
        at += n
    return found


def _varint(x: int) -> bytes:
    out = bytearray()
    while x > 127:
        out.append(x & 127 | 128)
        x >>= 7
    return bytes([*out, x])


def _written(kind: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(value)
    return _varint(len(value)) + value if kind == 2 else value


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
