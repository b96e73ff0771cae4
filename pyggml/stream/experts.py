"""The experts of mixtures: read when a router picks them, and kept as long as others do not need their room."""

from __future__ import annotations

import mmap
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from pyggml.buffers.buffer import Bytes
from pyggml.system.memory import forget, reserve
from pyggml.tensor import Tensor

from .ring import Job, Ring

Key = tuple[int, int]  # the number of a layer, an expert


class Addresses:
    """Addresses for all experts of a tensor, `size` bytes each. Only the experts that are written there take memory."""

    def __init__(self, n_expert: int, size: int) -> None:
        self.size = size
        self._map = reserve(max(n_expert * size, 1))
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)

    @property
    def taken(self) -> int:
        """Bytes of memory that an expert takes at most: whole pages."""
        return (-(-self.size // mmap.PAGESIZE) + 1) * mmap.PAGESIZE

    def forget(self, expert: int, after_other: bool, before_other: bool) -> None:
        """Give the memory of an expert back, except pages that it shares with neighbours that stay."""
        start, end = expert * self.size, (expert + 1) * self.size
        first = (-(-start // mmap.PAGESIZE) if after_other else start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (end // mmap.PAGESIZE if before_other else -(-end // mmap.PAGESIZE)) * mmap.PAGESIZE
        last = min(last, -(-self.memory.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if first < last:
            forget(self._map, first, min(last, self.memory.nbytes) - first)


class Layer(NamedTuple):
    """The experts of a layer: how many, their addresses in each of its tensors, and the jobs that read one of them."""

    n_expert: int
    addresses: Sequence[Addresses]
    jobs: Callable[[int], list[Job]]

    @property
    def taken(self) -> int:
        """Bytes of memory of one expert."""
        return sum(a.taken for a in self.addresses)


class StreamedExperts:
    """The experts of a layer that a graph is about to use: `Streamed` of the scheduler."""

    def __init__(self, cache: ExpertCache, number: int, layer: Layer) -> None:
        self._cache, self.number, self.layer = cache, number, layer

    def acquire(self, nodes: Sequence[Tensor] = ()) -> None:
        """See `Streamed`. Raises what reading them raised."""
        self._cache.acquire(self, self._picked(nodes))

    def release(self) -> None:
        """See `Streamed`."""
        self._cache.release(self)

    def _picked(self, nodes: Sequence[Tensor]) -> list[int]:
        """The experts that products among the nodes use; all of them when another op reads the weights."""
        picked: set[int] = set()
        everyone = set(range(self.layer.n_expert))
        for t in nodes:
            for i, s in enumerate(t.src):
                if s is None or not self._has(s.root):
                    continue
                ids = t.src[2] if t.op == "mul_mat_id" and i == 0 else None
                picked |= everyone if ids is None else everyone & set(np.unique(ids.elements()).tolist())
        return sorted(picked)

    def _has(self, t: Tensor) -> bool:
        buffer = t.buffer if t.form.copy is None else t.form.copy
        return buffer is not None and buffer.streamed is self


class ExpertCache:
    """Keeps the experts that were used last within `capacity` bytes. All experts of any one layer fit in."""

    def __init__(self, capacity: int, ring: Ring, readers: ThreadPoolExecutor) -> None:
        self.capacity, self.bytes_read = capacity, 0
        self._ring, self._readers = ring, readers
        self._changed = threading.Condition()
        self._streamed: WeakValueDictionary[int, StreamedExperts] = WeakValueDictionary()
        self._here: OrderedDict[Key, int] = OrderedDict()  # bytes; the one used last at the end
        self._held: Counter[Key] = Counter()
        self._taken: dict[tuple[int, int], list[list[Key]]] = {}  # by thread and layer

    @property
    def used(self) -> int:
        """Bytes of memory that experts take now."""
        return sum(self._here.values())

    def streamed(self, number: int, layer: Layer) -> StreamedExperts:
        """The experts of layer `number`, as what the scheduler holds while a graph uses them."""
        made = self._streamed[number] = StreamedExperts(self, number, layer)
        return made

    def acquire(self, streamed: StreamedExperts, experts: Sequence[int]) -> None:
        """Have these experts in memory, until `release`."""
        self._ring.check()
        keys = [(streamed.number, e) for e in experts]
        size = streamed.layer.taken
        with self._changed:
            wanted = set(keys)
            while sum(n for k, n in self._here.items() if self._held[k] and k not in wanted) + size * len(keys) > (
                self.capacity
            ):
                self._changed.wait()  # for other threads, which hold what they use
            missing = [k for k in keys if k not in self._here]
            self._make_room(size * len(missing), wanted)
            self._read(streamed, missing)
            for k in keys:
                self._here.move_to_end(k)
            self._held.update(keys)
            self._taken.setdefault((threading.get_ident(), streamed.number), []).append(keys)

    def release(self, streamed: StreamedExperts) -> None:
        """The experts of a layer that this thread acquired last may go."""
        with self._changed:
            self._held.subtract(self._taken[threading.get_ident(), streamed.number].pop())
            self._changed.notify_all()

    def _make_room(self, n: int, wanted: set[Key]) -> None:
        used = self.used
        for k in [k for k in self._here if k not in wanted and not self._held[k]]:
            if used + n <= self.capacity:
                return
            used -= self._here.pop(k)
            streamed = self._streamed.get(k[0])
            if streamed is not None:
                for addresses in streamed.layer.addresses:
                    addresses.forget(k[1], (k[0], k[1] - 1) in self._here, (k[0], k[1] + 1) in self._here)

    def _read(self, streamed: StreamedExperts, keys: Sequence[Key]) -> None:
        try:
            futures = {k: [self._readers.submit(job) for job in streamed.layer.jobs(k[1])] for k in keys}
        except RuntimeError:  # they were shut down in this moment
            self._ring.check()
            raise
        try:
            wait([f for of in futures.values() for f in of])
        finally:
            for k, of in futures.items():
                if all(f.done() and f.exception() is None for f in of):
                    self._here[k] = streamed.layer.taken
        for of in futures.values():
            self.bytes_read += sum(f.result() for f in of)
