"""Writes the C source of the extension module: pg.h as cffi (API mode) sees it. Called by CMake."""

import re
import sys
from pathlib import Path

import cffi
from digest import digest

HEADER = (Path(__file__).parent / "pg.h").read_text()


def declarations(header: str) -> str:
    """pg.h without what cffi's parser does not know: directives and comments."""
    text = re.sub(r"//[^\n]*", "", header)
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


def main(out: str) -> None:
    ffi = cffi.FFI()
    ffi.cdef(declarations(HEADER))
    ffi.cdef('extern "Python" int pg_host_call(const pg_task *t, int ith, int nth);')  # backends/cpu/host.py
    ffi.cdef("extern const char *const pg_sources;")  # backends/cpu/stale.py
    ffi.set_source("pyggml.backends._pggml", f'#include "pg.h"\nstatic const char *const pg_sources = "{digest()}";')
    ffi.emit_c_code(out)


if __name__ == "__main__":
    main(sys.argv[1])
