"""The one door to the C library: its functions (`lib`), and cffi's view of C (`ffi`).

Functions that every room may use lie in this room: vocabularies, samplers, the packing of weights, the guard of mapped
files, the count of threads. Kernels and plans are the cpu backend's."""

from importlib import import_module
from typing import Any

try:
    _library: Any = import_module("._pggml", __name__)
except ModuleNotFoundError as e:
    if e.name != f"{__name__}._pggml":
        raise
    from pathlib import Path  # takes a while, and is not needed else

    package = Path(__file__).resolve().parents[1]
    if not (package.parent / "csrc").is_dir():
        raise ImportError(
            f"{package} lacks the C library of this system: pyggml was installed for another system or kind of Python, "
            "is imported from a zip, or was frozen without it (PyInstaller: --collect-all pyggml)"
        ) from None
    raise ImportError(
        f"{package} is a checkout of pyggml whose C library is not built: install it with `pip install -e "
        f"{package.parent}`, or start Python in another folder to use the installed one"
    ) from None

ffi, lib = _library.ffi, _library.lib
LIBRARY: str = _library.__file__  # pg.h lies beside it

__all__ = ["LIBRARY", "ffi", "lib"]
