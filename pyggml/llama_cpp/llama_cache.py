"""Caches of states: what a `Llama` has evaluated stays for later prompts, in memory or in a folder."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import StateError
from ..gguf_io.atomic_file import AtomicFile
from ..llm.generate.prefixes import common_prefix
from ..small_file import open_regular
from ..types import Floats

Entry = tuple[str, tuple[int, ...]]  # the adapters and the tokens of a state
_DAMAGED = (ValueError, TypeError, LookupError, RecursionError, StateError)
_HEADER_BYTES = 1 << 24  # the first line of a file of `LlamaDiskCache`


@dataclass
class LlamaState:
    """What a `Llama` had evaluated when `save_state` was called; it can be pickled.

    input_ids    int32 [n_tokens], the tokens
    scores       float32 [0, n_vocab]: logits are not kept, `Llama.scores` makes them again
    llama_state  the state itself, `llama_state_size` bytes
    seed         of `Llama.set_seed`
    adapters     which adapters were on, with their scales: other adapters need another state
    """

    input_ids: npt.NDArray[np.intc]
    scores: Floats = field(repr=False)
    n_tokens: int
    llama_state: bytes = field(repr=False)
    llama_state_size: int
    seed: int
    adapters: str = ""


class BaseLlamaCache(ABC):
    """States by their tokens. `cache[tokens]` is the state that begins most like `tokens`; it raises KeyError when none
    begins like them. `capacity_bytes` is the most that all states may take: those that were used longest ago go first.
    """

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes

    @property
    @abstractmethod
    def cache_size(self) -> int:
        """Bytes of all states."""

    @abstractmethod
    def __getitem__(self, key: Sequence[int]) -> LlamaState: ...

    @abstractmethod
    def __contains__(self, key: Sequence[int]) -> bool: ...

    @abstractmethod
    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None: ...

    def find(self, tokens: Sequence[int], adapters: str) -> LlamaState | None:
        """The state that begins most like `tokens` and had these adapters; None when there is none."""
        try:
            state = self[tokens]
        except KeyError:
            return None
        return state if state.adapters == adapters else None


class _OwnCache(BaseLlamaCache):
    """A cache that keeps with each state which adapters it had, and looks for both at once."""

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        found = self._find(key, None)
        if found is None:
            raise KeyError("no state begins like these tokens")
        return found

    def find(self, tokens: Sequence[int], adapters: str) -> LlamaState | None:
        return self._find(tokens, adapters)

    @abstractmethod
    def _find(self, tokens: Sequence[int], adapters: str | None) -> LlamaState | None:
        """The state that begins most like `tokens` and had these adapters (None: any); None when there is none."""


class LlamaRAMCache(_OwnCache):
    """States in memory. Several `Llama` of one model may share it."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self.cache_state: OrderedDict[Entry, LlamaState] = OrderedDict()

    @property
    def cache_size(self) -> int:
        return sum(state.llama_state_size for state in self.cache_state.values())

    def __contains__(self, key: Sequence[int]) -> bool:
        return _longest(key, self.cache_state, None) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        entry = value.adapters, tuple(key)
        self.cache_state.pop(entry, None)
        if value.llama_state_size > self.capacity_bytes:
            return
        self.cache_state[entry] = value
        while self.cache_size > self.capacity_bytes:
            self.cache_state.popitem(last=False)

    def _find(self, tokens: Sequence[int], adapters: str | None) -> LlamaState | None:
        entry = _longest(tokens, self.cache_state, adapters)
        if entry is None:
            return None
        self.cache_state.move_to_end(entry)
        return self.cache_state[entry]


LlamaCache = LlamaRAMCache


class LlamaDiskCache(_OwnCache):
    """States in the files of a folder, which stay when the program ends. A file has a line of JSON, then the state. A
    damaged file counts as none."""

    def __init__(self, cache_dir: str | os.PathLike[str] = ".cache/llama_cache", capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self._folder = Path(cache_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._read: dict[str, Entry | None] = {}  # what the files have, by name; no file changes

    @property
    def cache_size(self) -> int:
        return sum(_size(path) for path in self._paths())

    def __contains__(self, key: Sequence[int]) -> bool:
        return _longest(key, self._entries(), None) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        if value.llama_state_size > self.capacity_bytes:
            return
        about = {"adapters": value.adapters, "tokens": [int(t) for t in key], "seed": value.seed}
        line = json.dumps(about).encode() + b"\n"
        with AtomicFile(self._folder / f"{sha256(line).hexdigest()[:32]}.state") as f:
            f.file.write(line)
            f.file.write(value.llama_state)
        paths = sorted(self._paths(), key=_used)
        size = sum(map(_size, paths))
        for path in paths:
            if size <= self.capacity_bytes:
                break
            size -= _size(path)
            path.unlink(missing_ok=True)

    def _find(self, tokens: Sequence[int], adapters: str | None) -> LlamaState | None:
        entries = self._entries()
        entry = _longest(tokens, entries, adapters)
        if entry is None:
            return None
        path = entries[entry]
        try:
            with open_regular(path, StateError) as f:
                found, seed = _about(f)
                data = f.read()
            os.utime(path)
        except (OSError, *_DAMAGED):  # another process has removed or damaged it
            self._read[path.name] = None
            return None
        ids = np.array(found[1], np.intc)
        return LlamaState(ids, np.empty((0, 0), np.float32), len(ids), data, len(data), seed, found[0])

    def _paths(self) -> list[Path]:
        return list(self._folder.glob("*.state"))

    def _entries(self) -> dict[Entry, Path]:
        """The files, by what they have. Each is read once."""
        paths = {path.name: path for path in self._paths()}
        self._read = {name: self._read[name] if name in self._read else _entry(path) for name, path in paths.items()}
        return {entry: paths[name] for name, entry in self._read.items() if entry is not None}


def _about(f: BinaryIO) -> tuple[Entry, int]:
    """What a file has, by its first line, and the seed. Raises one of `_DAMAGED`."""
    about = json.loads(f.readline(_HEADER_BYTES))
    return (str(about["adapters"]), tuple(map(int, about["tokens"]))), int(about["seed"])


def _entry(path: Path) -> Entry | None:
    """What a file has; None when it is damaged."""
    try:
        with open_regular(path, StateError) as f:
            return _about(f)[0]
    except (OSError, *_DAMAGED):
        return None


def _longest(tokens: Sequence[int], entries: Iterable[Entry], adapters: str | None) -> Entry | None:
    """The entry that begins most like `tokens`, of those with these adapters (None: any)."""
    wanted, best, longest = tuple(tokens), None, 0
    for entry in entries:
        n = common_prefix(entry[1], wanted)
        if n > longest and adapters in (None, entry[0]):
            best, longest = entry, n
    return best


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
