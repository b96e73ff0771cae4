"""What the C library was built from, in a few characters: compiled in by build_ffi.py, compared in a checkout."""

import hashlib
import os

FOLDER = os.path.dirname(os.path.abspath(__file__))


def sources() -> list[str]:
    """All C sources, in order of their names."""
    found = [os.path.join(folder, f) for folder, _, files in os.walk(FOLDER) for f in files]
    return sorted(p for p in found if p.endswith((".c", ".h", ".def")))


def digest() -> str:
    """A hash of their names and bytes."""
    h = hashlib.blake2b(digest_size=12)
    for path in sources():
        with open(path, "rb") as f:
            h.update(f"{os.path.relpath(path, FOLDER)} {hashlib.blake2b(f.read()).hexdigest()}\n".encode())
    return h.hexdigest()


def is_stale(library: str, built_from: str) -> bool:
    """Whether the library in that file, of that digest, is not what the sources would give."""
    built = os.stat(library).st_mtime
    return any(os.stat(p).st_mtime > built for p in sources()) and digest() != built_from
