"""Keeps the weights of a model within a budget of memory. Which weights are needed, and in which form, follows from the
model's graph."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from typing import Any

from pyggml.buffers.buffer import Buffer, Bytes, FetchedBuffer, MappedFile, Streamed
from pyggml.dtypes import DType
from pyggml.form import BUFT, repacked
from pyggml.gguf_io.bind import read_only
from pyggml.graph import Graph
from pyggml.native.packing import copy_size, matrix_size
from pyggml.native.thread_pool import ThreadPool
from pyggml.system.memory import forget, read_few
from pyggml.tensor import Ne, Tensor

from .experts import Addresses, ExpertCache, Layer
from .layout import Item, lay_out, padded
from .read import Files, Origin, staging_size
from .ring import READERS, Group, Job, Ring, in_turn
from .sizes import shown_size

ROWS, PACKED, STORED = "rows", "packed", "stored"
Packs = Callable[[Tensor, Tensor | None], bool]  # see WeightStream
_WORTH = 1 << 16  # bytes from which on an expert is read by itself: it takes whole pages
_LAYER = re.compile(r"(\w+\.)*?blk\.\d+\.")


class StreamedRows:
    """A mapped tensor that graphs read a few rows of. Their pages are given back after each run."""

    def __init__(self, file: MappedFile, offset: int, nbytes: int) -> None:
        self._file = file
        self._start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._size = offset + nbytes - self._start
        read_few(file.map, self._start, self._size)

    def acquire(self, nodes: Sequence[Any] = ()) -> None:
        """See `Streamed`: they are read when they are looked at."""

    def release(self) -> None:
        """See `Streamed`."""
        forget(self._file.map, self._start, self._size)


class WeightStream:
    """Keeps the weights of a model within `budget` bytes of memory: `pinned` bytes stay, `streamed` are read for each
    run of a graph into `ring` bytes that they share, through `staging` bytes. `bytes_read` counts what was read from
    the files since the model was loaded.

    A tensor looks the same to everyone else: NumPy reads its bytes from the file, or makes them anew.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        origins: Mapping[str, Origin],
        graph: Graph,
        budget: int,
        packs: Packs | None,
    ) -> None:
        """weights  the weights of a model, by name
        origins  where they come from
        graph    the graph of one token
        packs    `packs(weight, node)` says whether `node` (None: a product that is not in the graph) reads a repacked
                 copy of the weight; without it nothing does

        Raises ModelError when `budget` is too small, AllocError when there is not enough memory."""
        self.budget = budget
        self._files = Files()
        uses = _uses(weights, graph, packs)
        for name, forms in uses.items():
            if ROWS in forms and origins[name].file is None:  # no file has the rows: the whole tensor must be there
                forms.remove(ROWS)
                forms.add(STORED)
        items = {name: _items(weights[name], forms) for name, forms in uses.items()}
        packed = [weights[i.name] for of in items.values() for i in of if i.packed and origins[i.name].packed is None]
        self.staging = max((staging_size(t.dtype, t.ne) for t in packed), default=0)
        self._readers = ThreadPool(READERS, "pyggml-reader")
        self._ring = Ring(self._readers)
        total = self.staging + sum(padded(i.size) for of in items.values() for i in of)
        mixed = _experts(weights, origins, graph, items) if total > budget else {}
        layers = {name: self._layer([(weights[i.name], i, origins[i.name]) for i in of]) for name, of in mixed.items()}
        least = max((layer.taken * layer.n_expert for layer in layers.values()), default=0)
        apart = {i for of in mixed.values() for i in of}
        in_graph = {t.name for t in graph.leafs}
        groups: dict[str, list[Item]] = {}
        fixed: list[Item] = []
        for name, of in items.items():
            moves = name in in_graph and weights[name].rank > 1
            (groups.setdefault(_group(name), []) if moves else fixed).extend(i for i in of if i not in apart)
        layout = lay_out([of for of in groups.values() if of], fixed, budget, self.staging + least)
        self.pinned = sum(padded(i.size) for i in layout.pinned)
        self.ring = layout.size - self.pinned
        self._cache = ExpertCache(budget - self.staging - layout.size if layers else 0, self._ring, self._readers)
        self.streamed = sum(weights[i.name].nbytes for of in (*layout.groups, apart) for i in of)
        self._arena = Buffer.allocate(layout.size, BUFT)
        places = {i: self._arena.memory[at : at + padded(i.size)] for i, at in layout.offsets.items()}
        jobs: dict[Item, list[Job]] = {}
        for i, place in places.items():
            t = weights[i.name]
            jobs[i] = self._files.jobs(origins[i.name], i.packed, t.dtype, t.ne, place)
        self._pinned_jobs = [job for i in layout.pinned for job in jobs[i]]
        self._groups: list[Group] = []
        streamed: dict[Item, Streamed] = {}
        for n, of in enumerate(layout.groups):
            group = Group(self._ring, _group(of[0].name), *layout.span(n), [job for i in of for job in jobs[i]])
            self._groups.append(group)
            streamed |= dict.fromkeys(of, group)
        in_turn(self._groups)
        for n, (name, layer) in enumerate(layers.items()):
            streamed |= dict.fromkeys(mixed[name], self._cache.streamed(n, layer))
            places |= {i: a.memory for i, a in zip(mixed[name], layer.addresses, strict=True)}
        for name, t in weights.items():
            _bind(t, origins[name], ROWS in uses[name], {i: (places[i], streamed.get(i)) for i in items[name]})
        files = [f for o in origins.values() for f in (o.file, o.packed and o.packed[0])]
        self._mapped = {f for f in files if f is not None}

    def __repr__(self) -> str:
        parts = {"pinned": self.pinned, "streamed": self.streamed, "ring": self.ring, "staging": self.staging}
        parts |= {"for experts": self.experts} if self.experts else {}
        return f"<WeightStream {', '.join(f'{shown_size(n)} {what}' for what, n in parts.items())}>"

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that were read from the model's files."""
        return self._ring.bytes_read + self._cache.bytes_read

    @property
    def nbytes(self) -> int:
        """Bytes of memory for weights: what stays, what takes turns, and what reading needs."""
        return self.memory.nbytes + self.staging + self.experts

    @property
    def experts(self) -> int:
        """Bytes for the experts of mixtures: those that were used last stay."""
        return self._cache.capacity

    @property
    def memory(self) -> Bytes:
        """All memory that it holds for weights other than such experts, uint8."""
        return self._arena.memory

    def load(self, progress: Callable[[float], None] = lambda done: None) -> None:
        """Read what stays, then begin with what comes first. Raises GGUFError for a file that cannot be read, and what
        `progress` (the fraction done) raises."""
        jobs, self._pinned_jobs = self._pinned_jobs, []
        waiting = [self._readers.submit(job) for job in jobs]
        try:
            for i, done in enumerate(as_completed(waiting)):
                self._ring.bytes_read += done.result()
                if i % 64 == 0:
                    progress(i / len(jobs))
        except BaseException:
            for future in waiting:
                future.cancel()
            self.close()
            raise
        for file in self._mapped:
            forget(file.map, 0, len(file.map))  # what was looked at to open it
        for group in self._groups[:1]:
            self._ring.prefetch(group)

    def close(self) -> None:
        """Stop reading; graphs that want more of the weights raise ModelError."""
        self._ring.close()
        self._readers.shutdown()

    def _layer(self, experts: Sequence[tuple[Tensor, Item, Origin]]) -> Layer:
        """The experts in such tensors of one layer."""
        parts: list[tuple[DType, Ne, int, bool, Origin, Addresses]] = []
        for t, item, origin in experts:
            size = matrix_size(t.dtype, t.ne) if item.packed else t.nb[2]
            parts.append((t.dtype, (*t.ne[:2], 1, 1), t.nb[2], item.packed, origin, Addresses(t.ne[2], size)))

        def jobs(e: int) -> list[Job]:
            found: list[Job] = []
            for dtype, ne, stored, is_packed, origin, addresses in parts:
                here = replace(origin, offset=origin.offset + e * stored)
                if origin.packed is not None:
                    here = replace(here, packed=(origin.packed[0], origin.packed[1] + e * addresses.size))
                memory = addresses.memory[e * addresses.size : (e + 1) * addresses.size]
                found += files.jobs(here, is_packed, dtype, ne, memory)
            return found

        files = self._files
        return Layer(experts[0][0].ne[2], [addresses for *_, addresses in parts], jobs)


def _group(name: str) -> str:
    """The group that a weight comes and goes with: its layer."""
    layer = _LAYER.match(name)
    return layer[0] if layer else name


def _experts(
    weights: Mapping[str, Tensor], origins: Mapping[str, Origin], graph: Graph, items: Mapping[str, Sequence[Item]]
) -> dict[str, list[Item]]:
    """For each layer, the weights that only products by expert read and that a file stores expert by expert."""
    read = dict.fromkeys(weights.values(), True)
    for node in graph.nodes:
        for i, t in enumerate(node.src):
            if t is not None and t in read and (node.op != "mul_mat_id" or i):
                read[t] = False
    used = {t for node in graph.nodes if node.op == "mul_mat_id" for t in node.src[:1]}
    found: dict[str, list[Item]] = {}
    for name, t in weights.items():
        apart = t in used and read[t] and t.nb[2] >= _WORTH
        if apart and len(items[name]) == 1 and _is_in_file(origins[name], items[name][0]):
            found.setdefault(f"{_group(name)}{t.ne[2]}", []).extend(items[name])
    return found


def _is_in_file(origin: Origin, item: Item) -> bool:
    """Whether a file has the bytes of one expert by themselves."""
    return origin.file is not None or (item.packed and origin.packed is not None)


def _uses(weights: Mapping[str, Tensor], graph: Graph, packs: Packs | None) -> dict[str, set[str]]:
    """How each weight is read, in the order in which the graph needs them whole. Weights that the graph does not read
    come last, and are read as products would read them."""

    def form(t: Tensor, node: Tensor | None) -> str:
        return PACKED if packs is not None and packs(t, node) else STORED

    names = {t: name for name, t in weights.items()}
    uses: dict[str, set[str]] = {}
    has_rows: set[str] = set()
    for node in graph.nodes:
        for i, t in enumerate(node.src):
            if t is None or t not in names:
                continue
            if node.op == "get_rows" and i == 0:
                has_rows.add(names[t])
            else:
                uses.setdefault(names[t], set()).add(form(t, node))
    for name in has_rows:
        uses.setdefault(name, set()).add(ROWS)
    for name, t in weights.items():
        uses.setdefault(name, {form(t, None)})
    return uses


def _items(t: Tensor, forms: set[str]) -> list[Item]:
    """The items of a weight that must be in memory, by the forms it is read in. Single rows are read from the file."""
    size = {PACKED: copy_size(t.dtype, t.ne), STORED: t.nbytes}
    return [Item(t.name, form == PACKED, size[form]) for form in sorted(forms - {ROWS})]


def _bind(t: Tensor, origin: Origin, has_rows: bool, items: Mapping[Item, tuple[Bytes, Streamed | None]]) -> None:
    """Give a weight its memory and its form."""
    file, nbytes = origin.file, t.nbytes
    stored = next((found for item, found in items.items() if not item.packed), None)
    if stored is not None:
        memory, streamed = stored[0][:], stored[1]
        memory.flags.writeable = False
        t.buffer = Buffer(memory) if streamed is None else FetchedBuffer(memory, lambda: origin.fetch(nbytes), file)
        t.buffer.streamed, t.offset = streamed, 0
    elif file is None:
        t.buffer, t.offset = FetchedBuffer(None, lambda: origin.fetch(nbytes)), 0
    elif has_rows:
        t.buffer, t.offset = read_only(file.data, file), origin.offset
        t.buffer.streamed = StreamedRows(file, origin.offset, nbytes)
    for item, (place, streamed) in items.items():
        if item.packed:
            copy = Buffer(place, BUFT)
            copy.streamed = streamed
            t.form = repacked(copy)
