"""What a harness is: what the bytes of the fuzzer become, which exceptions are allowed, and what must hold."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np

import pyggml as gg
from pyggml.errors import GGMLError

from ..tiny_model import write_gguf

Run = Callable[[bytes], object]
Change = Callable[[np.random.Generator, bytes], bytes]


@dataclass(frozen=True)
class Harness:
    """`run` takes any bytes: it returns, or raises one of `allowed`, within `seconds`; else something is wrong.

    covers   the parsers, as modules: their coverage is what counts
    seeds    inputs that a parser understands, from which changes are made
    words    what its format has in its middle, for the fuzzer to put in
    change   changes an input by its structure; None: only its bytes are changed
    limits   those of pyggml.limits that are lower than usual, so that what is just within them is quick
    """

    name: str
    run: Run
    allowed: tuple[type[Exception], ...]
    covers: tuple[str, ...]
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[bytes, ...]
    change: Change | None
    seconds: float
    limits: Mapping[str, int]


HARNESSES: dict[str, Harness] = {}


def harness(
    *covers: str,
    seeds: Callable[[], Iterable[bytes]],
    allowed: type[Exception] | tuple[type[Exception], ...] = GGMLError,
    words: str = "",
    change: Change | None = None,
    seconds: float = 2.0,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> Callable[[Run], Run]:
    """Make a function a harness of its name. `words` are separated by spaces."""

    def put(run: Run) -> Run:
        name = run.__name__
        kinds = allowed if isinstance(allowed, tuple) else (allowed,)
        own = tuple(words.encode().split())
        HARNESSES[name] = Harness(name, run, kinds, covers, seeds, own, change, seconds, limits)
        return run

    return put


@cache
def folder() -> Path:
    """A folder of this process, in memory when the machine has one there."""
    shm = Path("/dev/shm")
    made = tempfile.mkdtemp(prefix="pyggml-fuzz-", dir=shm if shm.is_dir() else None)
    return Path(made)


def put_file(name: str, data: bytes) -> Path:
    """A file with this content; a new one, because the last one of its name may still be mapped."""
    path = folder() / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


SMALL = {
    "llama.embedding_length": 8,
    "llama.block_count": 2,
    "llama.feed_forward_length": 8,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
}


@cache
def small_model() -> gg.Model:
    """A random llama model of two layers and 259 tokens."""
    return gg.load_model(write_gguf(folder() / "small.gguf", SMALL))


@cache
def small_gguf() -> bytes:
    """The file of `small_model`."""
    return write_gguf(folder() / "bytes.gguf", SMALL).read_bytes()
