"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from pyggml.errors import ModelError, whole

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def memory_size(ram: int | str, name: str = "ram") -> int:
    """Bytes: a number, or text as "2GiB", "700 MB" (powers of ten with B alone), "1.5G". Raises ModelError."""
    if isinstance(ram, str):
        found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)(b?)\s*", ram, re.IGNORECASE)
        if found is None or (found[3] and not found[2]):
            raise ModelError(f"{name} must be a number of bytes, or one as 2GiB, 700MB or 1.5G, not {ram!r:.40}")
        base = 1000 if found[4] and not found[3] else 1024
        ram = int(float(found[1]) * base ** _UNITS[found[2].lower()])
    return whole(name, ram, 1, error=ModelError)


def shown_size(n: int) -> str:
    """A number of bytes as people write it, rounded up."""
    return f"{-(-n // (1 << 20))} MiB" if n >= 1 << 20 else f"{n} bytes"
