"""Writes the C source of the extension module: its headers as cffi (API mode) sees them. Called by CMake."""

import re
import sys
from pathlib import Path

import cffi
from digest import digest

HEADERS = ("pg.h", "operands.h", "vocab/vocab.h")


def declarations(header: str) -> str:
    """A header without what cffi's parser does not know: directives and comments."""
    text = re.sub(r"//[^\n]*", "", header)
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


def main(out: str) -> None:
    ffi = cffi.FFI()
    for header in HEADERS:
        ffi.cdef(declarations((Path(__file__).parent / header).read_text()))
    ffi.cdef('extern "Python" int pg_host_call(const pg_task *t, int ith, int nth);')  # backends/cpu/host.py
    ffi.cdef("extern const char *const pg_sources;")  # backends/cpu/stale.py
    includes = "".join(f'#include "{header}"\n' for header in HEADERS)
    source = f'{includes}static const char *const pg_sources = "{digest()}";'
    ffi.set_source("pyggml.native._pggml", source)
    ffi.emit_c_code(out)


if __name__ == "__main__":
    main(sys.argv[1])
