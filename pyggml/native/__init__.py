"""The one door to the C library: its functions (`lib`), and cffi's view of C (`ffi`). What every room may use of it is
here, too: vocabularies, samplers, the guard of mapped files, the count of threads. Kernels and plans are the cpu
backend's."""

from . import _pggml
from ._pggml import ffi, lib

LIBRARY: str = _pggml.__file__  # pg.h lies beside it

__all__ = ["LIBRARY", "ffi", "lib"]
