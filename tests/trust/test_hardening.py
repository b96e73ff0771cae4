"""What the installed C library is built with, as its ELF file says (csrc/CMakeLists.txt)."""

from __future__ import annotations

import platform
import struct
from pathlib import Path
from typing import NamedTuple

import pytest

from pyggml.native import LIBRARY

PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 2, 0x6474E551, 0x6474E552
DT_STRTAB, DT_STRSZ, DT_FLAGS, DT_TEXTREL = 5, 10, 30, 22
BIND_NOW, EXECUTABLE = 8, 1
SANITIZED = b"__asan_init"


class Segment(NamedTuple):
    flags: int
    offset: int
    address: int
    size: int


class ELF:
    """Segments by type, and entries of the dynamic section by tag, of a 64-bit little-endian file."""

    def __init__(self, data: bytes) -> None:
        assert data[:6] == b"\x7fELF\x02\x01"
        start, size, n = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
        self.segments: dict[int, Segment] = {}
        self.loaded: list[Segment] = []
        for i in range(n):
            kind, flags, offset, address, _, in_file = struct.unpack_from("<IIQQQQ", data, start + i * size)
            self.segments[kind] = Segment(flags, offset, address, in_file)
            self.loaded += [self.segments[kind]] if kind == 1 else []
        dynamic = self.segments[PT_DYNAMIC]
        self.dynamic = dict(struct.iter_unpack("<QQ", data[dynamic.offset : dynamic.offset + dynamic.size]))
        names = self.dynamic[DT_STRTAB]
        part = next(s for s in self.loaded if s.address <= names < s.address + s.size)
        first = names - part.address + part.offset
        self.strings = data[first : first + self.dynamic[DT_STRSZ]].split(b"\0")


@pytest.fixture(scope="module")
def data() -> bytes:
    data = Path(LIBRARY).read_bytes()
    if SANITIZED in data or b"__tsan_init" in data:
        pytest.skip("built with sanitizers, which have checks of their own")
    return data


def test_tables_are_read_only_and_no_stack_runs(data: bytes) -> None:
    elf = ELF(data)
    assert PT_GNU_RELRO in elf.segments and elf.dynamic[DT_FLAGS] & BIND_NOW  # full RELRO
    assert not elf.segments[PT_GNU_STACK].flags & EXECUTABLE
    assert DT_TEXTREL not in elf.dynamic
    assert all(not (s.flags & EXECUTABLE and s.flags & 2) for s in elf.loaded)  # nothing is writable and runs


def test_stacks_and_lengths_are_guarded(data: bytes) -> None:
    strings = ELF(data).strings
    assert b"__stack_chk_fail" in strings
    assert any(s.startswith(b"__mem") and s.endswith(b"_chk") for s in strings)  # _FORTIFY_SOURCE


@pytest.mark.skipif(platform.machine() != "x86_64", reason="marks of x86")
def test_targets_of_indirect_jumps_are_marked(data: bytes) -> None:
    """-fcf-protection: functions begin with endbr64. The kernels stand in tables, by the hundred."""
    assert data.count(b"\xf3\x0f\x1e\xfa") > 1000
