"""GGUF files, damaged on purpose. A walk over a sound file says where its counts, lengths, types and values lie."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_NUMBERS = [
    0,
    1,
    2,
    3,
    5,
    7,
    31,
    33,
    64,
    127,
    255,
    256,
    1 << 15,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
]
_NUMBERS += [1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]
_FLOATS = [0.0, -0.0, -1.0, 1e-45, 1e-30, 0.5, 3e38, float("inf"), float("-inf"), float("nan")]


@dataclass
class Layout:
    """Byte positions in a sound file; `kv` and `infos` are the ends of each record."""

    lengths: list[int] = field(default_factory=list)  # u64: counts, string and array lengths, dims, offsets
    types: list[int] = field(default_factory=list)  # u32: value types, n_dims, tensor types
    values: list[tuple[int, int]] = field(default_factory=list)  # position and type of single values
    texts: list[tuple[int, int]] = field(default_factory=list)  # begin and end of keys, names and strings
    kv: list[int] = field(default_factory=list)
    infos: list[int] = field(default_factory=list)


def layout_of(data: bytes) -> Layout:
    out, pos = Layout(lengths=[8, 16]), 24

    def u32() -> int:
        nonlocal pos
        out.types.append(pos)
        pos += 4
        return struct.unpack_from("<I", data, pos - 4)[0]

    def u64() -> int:
        nonlocal pos
        out.lengths.append(pos)
        pos += 8
        return struct.unpack_from("<Q", data, pos - 8)[0]

    def text() -> None:
        nonlocal pos
        n = u64()
        out.texts.append((pos, pos + n))
        pos += n

    def value(kind: int) -> None:
        nonlocal pos
        if kind == _STRING:
            text()
        elif kind == _ARRAY:
            item, n = u32(), u64()
            for _ in range(n if item == _STRING else 0):
                text()
            pos += 0 if item == _STRING else n * _SIZES[item]
        else:
            out.values.append((pos, kind))
            pos += _SIZES[kind]

    n_tensors, n_kv = struct.unpack_from("<QQ", data, 8)
    out.kv.append(pos)
    for _ in range(n_kv):
        text()
        value(u32())
        out.kv.append(pos)
    out.infos.append(pos)
    for _ in range(n_tensors):
        text()
        for _ in range(u32()):
            u64()
        u32(), u64()
        out.infos.append(pos)
    # A vocabulary has hundreds of lengths: a few of them are enough.
    out.lengths = [p for p in out.lengths if p >= out.infos[0]] * 2 + out.lengths[::7] + out.lengths[:40]
    return out


def _pick(rng: np.random.Generator, items: Sequence[Any]) -> Any:
    return items[int(rng.integers(len(items)))]


def _flip(rng: np.random.Generator, d: bytearray, at: Layout) -> None:
    end = len(d) if rng.integers(2) else at.infos[-1]
    for _ in range(int(rng.integers(1, 9))):
        d[int(rng.integers(end))] = int(rng.integers(256))


def _truncate(rng: np.random.Generator, d: bytearray, at: Layout) -> None:
    del d[int(rng.integers(len(d))) if rng.integers(2) else _pick(rng, at.kv + at.infos + at.lengths) :]


def _length(rng: np.random.Generator, d: bytearray, at: Layout) -> None:
    pos = _pick(rng, at.lengths)
    (old,) = struct.unpack_from("<Q", d, pos)
    new = _pick(rng, [*_NUMBERS, old + 1, old - 1, old * 2, old // 2, old + 32, old - 32, len(d), len(d) - pos])
    struct.pack_into("<Q", d, pos, new % (1 << 64))


def _type(rng: np.random.Generator, d: bytearray, at: Layout) -> None:
    struct.pack_into("<I", d, _pick(rng, at.types), int(_pick(rng, [*range(45), 1 << 31, (1 << 32) - 1])))


def _value(rng: np.random.Generator, d: bytearray, at: Layout) -> None:
    pos, kind = _pick(rng, at.values)
    if kind in (6, 12):
        struct.pack_into("<f" if kind == 6 else "<d", d, pos, _pick(rng, _FLOATS))
    else:
        size = _SIZES[kind]
        (old,) = struct.unpack_from({1: "<B", 2: "<H", 4: "<I", 8: "<Q"}[size], d, pos)
        new = _pick(rng, [*_NUMBERS, old + 1, old - 1, old * 2, old // 2])
        d[pos : pos + size] = (new % (1 << 8 * size)).to_bytes(size, "little")


def _text(rng: np.random.Generator, d: bytearray, at: Layout) -> None:
    begin, end = _pick(rng, at.texts)
    if rng.integers(2):
        a, b = _pick(rng, at.texts)  # a name of something else, cut to fit: often twice the same
        d[begin:end] = bytes(d[a:b]).ljust(end - begin, b"x")[: end - begin]
    elif end > begin:
        d[int(rng.integers(begin, end))] = int(rng.integers(256))


def _records(rng: np.random.Generator, d: bytearray, at: Layout) -> None:
    """A record twice, gone, moved, or made an array of arrays."""
    ends, count_at = _pick(rng, [(at.kv, 16), (at.infos, 8)])
    i = int(rng.integers(len(ends) - 1))
    record = bytes(d[ends[i] : ends[i + 1]])
    (count,) = struct.unpack_from("<Q", d, count_at)
    what = int(rng.integers(4))
    if what == 0:
        d[ends[i] : ends[i]] = record
        count += int(rng.integers(2))
    elif what == 1:
        del d[ends[i] : ends[i + 1]]
        count -= int(rng.integers(2))
    elif what == 2:
        del d[ends[i] : ends[i + 1]]
        d[ends[0] : ends[0]] = record
    else:
        nested = struct.pack("<Q1sIIQIQ", 1, b"n", _ARRAY, _ARRAY, 1 << int(rng.integers(60)), _ARRAY, 1)
        d[at.kv[0] : at.kv[0]] = nested * int(rng.integers(1, 200))
        count_at, count = 16, struct.unpack_from("<Q", d, 16)[0] + 1
    struct.pack_into("<Q", d, count_at, max(count, 0))


def _version(rng: np.random.Generator, d: bytearray, at: Layout) -> None:
    d[4:8] = struct.pack(_pick(rng, ["<I", ">I"]), int(_pick(rng, [0, 1, 2, 3, 4, 1 << 31])))


def _data(rng: np.random.Generator, d: bytearray, at: Layout) -> None:
    """The tensors' values: noise, NaN and infinities among it."""
    begin = int(rng.integers(at.infos[-1], len(d)))
    noise = (
        rng.integers(0, 256, int(rng.integers(1, 4096)), np.uint8) if rng.integers(2) else np.full(2048, 255, np.uint8)
    )
    d[begin : begin + len(noise)] = noise.tobytes()[: len(d) - begin]


_MUTATIONS = [_flip, _truncate, _length, _length, _type, _type, _text, _records, _version]
_MUTATIONS += [_value, _value, _value, _value, _data, _data]  # what may well load


def mutated(rng: np.random.Generator, data: bytes, layout: Layout) -> bytes:
    """The file after one to three of the mutations."""
    d = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        try:
            _pick(rng, _MUTATIONS)(rng, d, layout)
        except (struct.error, IndexError, ValueError):  # the one before has cut off what this one changes
            continue
    return bytes(d)
