"""Machines and Pythons that pyggml does not run on."""

from __future__ import annotations

import sys


def check_machine() -> None:
    """Raises ImportError, which says why, on a machine or in a Python that pyggml does not run on: big-endian, 32 bits,
    free-threaded."""
    if sys.byteorder != "little":
        raise ImportError("pyggml runs on little-endian machines only, and this one is big-endian")
    if sys.maxsize < 2**32:
        raise ImportError("pyggml needs a Python of 64 bits, and this one has 32")
    if "free-threading" in sys.version:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ImportError(
            f"pyggml does not run in free-threaded Python yet: use python{version}, this is python{version}t"
        )
