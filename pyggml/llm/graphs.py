"""The graphs of a context: `Graphs` builds them, and `ReadyGraphs` keeps those of decodes, ready to run again."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import gcd
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import ModelError, OneSite
from pyggml.form import Repacking
from pyggml.graph import Graph
from pyggml.inspect.watch import Patterns
from pyggml.models.blocks import MASK_PADDING, NO_ADAPTERS, Adapters, Build, build_pooling, mask_name
from pyggml.models.blocks.build import Fill, FillOne, Values
from pyggml.models.hparams import HParams
from pyggml.models.memory.k_shift import build_k_shift
from pyggml.models.memory.kv_cache import KVCache
from pyggml.models.memory.kv_defrag import build_defrag
from pyggml.models.memory.kv_mask import KVMask
from pyggml.models.memory.memory import Memory
from pyggml.models.twins import Twin, find_twins
from pyggml.sched import Schedule, Scheduler
from pyggml.scope import no_scope
from pyggml.tensor import Context, Tensor, Var, allocate_tensors
from pyggml.types import Floats, Ints
from pyggml.var import Varies, for_all_values, largest

from .loaded import LoadedModel
from .outputs import Output
from .ubatch import UBatch

_MAX_GRAPHS = 64  # graphs kept for reuse


class GraphSize(NamedTuple):
    """What distinguishes one graph of a context from another."""

    n_tokens: int
    n_outputs: int
    embd: bool
    n_kv: tuple[int, ...]  # cells that attention looks at, for each cache
    adapters: Adapters = NO_ADAPTERS
    n_seqs: int = 1  # sequences, for a memory with states: see `Build`
    hidden: bool = False  # the graph also gives the hidden states of all tokens
    mixed: bool = False  # some tokens are rows of pictures or sounds

    def with_n_kv(self, n_kv: Sequence[int]) -> GraphSize:
        """The same size, with these n_kv for the first caches."""
        return self._replace(n_kv=(*n_kv, *self.n_kv[len(n_kv) :]))


class Graphs:
    """Builds the graphs of a context. It also runs those that do not belong to a decode: moving cells, pooling heads.
    When `hidden` is set, the graphs of decodes also give hidden states."""

    def __init__(self, model: LoadedModel, memory: Memory, output: Output, scheduler: Scheduler) -> None:
        self._model, self._memory, self._output, self._scheduler = model, memory, output, scheduler
        self.hidden = False
        self._twins: WeakKeyDictionary[Adapters, dict[tuple[bool, int, bool], Mapping[int, Twin]]] = WeakKeyDictionary()

    @no_scope()
    def build(self, size: GraphSize) -> Build:
        """The graph for a ubatch of that size. The graph of a stage begins with the stage's first layer."""
        first = self._model.first_layer
        b = Build(
            self._model.hparams,
            self._model.weights,
            self._memory,
            size.n_tokens,
            size.n_outputs,
            size.n_kv,
            size.embd and not first,
            size.adapters,
            size.n_seqs,
            embeddings=self._output.embeddings,
            layer=self._output.layer,
            first=first,
            hidden=size.hidden,
            mixed=size.mixed,
        )
        b.asked = self._model.watches.asks
        whole = not first and self._output.layer is None and not size.mixed  # deepstack differs by layer
        known = self._twins.setdefault(size.adapters, {}) if whole and not self._model.watches.patterns else None
        of = size.embd, size.n_seqs, size.hidden
        b.twins = {} if known is None else known.get(of, {})
        with OneSite(), _undone(b), for_all_values():
            self._model.architecture.build_stage(b)
        if known is not None and of not in known:
            known[of] = find_twins(b.graph, b.built)
        return b

    @no_scope()
    def encode(self, size: GraphSize) -> Build:
        """The graph of an encoder-decoder's encoder for a ubatch of that size."""
        encode, memory = self._model.architecture.encode, self._memory.encoding
        assert encode is not None and memory is not None, self._memory
        b = Build(
            self._model.hparams,
            self._model.weights,
            memory,
            size.n_tokens,
            size.n_outputs,
            size.n_kv,
            size.embd,
            size.adapters,
        )
        b.asked = self._model.watches.asks
        with OneSite(), _undone(b), for_all_values():
            encode(b)
        return b

    def largest(self, n_tokens: int, n_outputs: int, adapters: Adapters = NO_ADAPTERS) -> Build:
        """The largest graph for `n_tokens` tokens: over whole caches, with as many sequences as possible."""
        memory = self._memory
        n_seqs = gcd(n_tokens, memory.n_seq_max) if memory.equal_seqs else 1
        n_kv = tuple(c.size for c in memory.caches)
        return self.build(GraphSize(n_tokens, n_outputs, False, n_kv, adapters, n_seqs, self.hidden))

    def next(self, n_tokens: int, n_outputs: int, adapters: Adapters) -> Build:
        """The graph that would run for `n_tokens` tokens of one sequence, with the caches as they are now."""
        caches = self._memory.caches
        ends = [c.find_slot(n_tokens) + n_tokens if 0 < n_tokens <= c.size and not c.cross else 0 for c in caches]
        n_kv = tuple(c.n_kv(end) for c, end in zip(caches, ends, strict=True))
        return self.build(GraphSize(n_tokens, n_outputs, False, n_kv, adapters, hidden=self.hidden))

    def reserve(self, n_tokens: int, adapters: Adapters) -> None:
        """Make room for the largest graph with these adapters."""
        self._scheduler.reserve(self.largest(n_tokens, n_tokens, adapters).graph)
        if self._memory.encoding is not None:
            n_kv = tuple(c.size for c in self._memory.encoding.caches)
            self._scheduler.reserve(self.encode(GraphSize(n_tokens, n_tokens, False, n_kv, adapters)).graph)

    @no_scope()
    def head(self, pooled: Floats) -> Floats:
        """The output of the model's head for pooled embeddings, see `build_pooling`."""
        sizes = tuple(c.size for c in self._memory.caches)
        b = Build(self._model.hparams, self._model.weights, self._memory, len(pooled), len(pooled), sizes)
        graph = build_pooling(b, self._output.pooling == "rank")
        if not graph.nodes:
            return pooled
        schedule = self._scheduler.alloc(graph)
        b.inputs["inp_pooled"].tensor.numpy()[:] = pooled
        schedule.run()
        return np.array(graph.nodes[-1].numpy(), np.float32)

    @no_scope()
    def shift(self, cache: KVCache) -> None:
        """Rope K to the positions that its cells have now."""
        graph, delta = build_k_shift(self._model.hparams, self._model.weights, cache)
        self._move(graph, delta, cache.delta)
        cache.shift_done()

    @no_scope()
    def defrag(self, cache: KVCache) -> None:
        """Close the holes between cells, and bring them into order."""
        if not cache.is_packed():
            graph, order = build_defrag(cache)
            self._move(graph, order, cache.order())
        cache.defrag_done()

    def _move(self, graph: Graph, given: Tensor, values: Ints) -> None:
        """Run a graph that changes a cache, after setting its input `given`. A cache without layers has an empty
        graph."""
        if graph.nodes:
            schedule = self._scheduler.alloc(graph)
            given.numpy()[:] = values
            schedule.run(interruptible=False)


@contextmanager
def _undone(b: Build) -> Generator[None]:
    """When building fails (Ctrl-C), let go of what there is: a node that was to store into the cache, and is in no
    graph, must not count as a hazard for the next graphs."""
    try:
        yield
    except BaseException:
        b.ctx.clear()
        raise


# -- graphs that run again and again ----------------------------------------------------------------------------------

_Key = tuple[GraphSize, bool, Patterns]  # its size; whether it runs for all n_kv; which nodes are watched


@dataclass(slots=True)
class ReadyGraph:
    """A graph ready to run.

    heads   for each cache the cell where the slot of the ubatch begins, bound before each run
    inputs  for each input with its own fill function: the function, the input's name and a flat view of it
    groups  for each group of inputs that one function fills: the function, and names and flat views of the inputs
    result  logits or embeddings, a row for each token that wants them; rows behind these are for larger ubatches
    hidden  hidden states, a row for each token, and such rows; None when the graph does not give them
    """

    schedule: Schedule
    heads: tuple[Var, ...]
    inputs: list[tuple[FillOne, str, Values]]
    groups: list[tuple[Fill, tuple[str, ...], tuple[Values, ...]]]
    result: Floats
    hidden: Floats | None

    def fill(self, u: UBatch, memory: Memory) -> None:
        """Set the inputs for a ubatch that has been put into the memory."""
        for fill, name, to in self.inputs:
            _set(name, to, fill(u, memory))
        for fill, names, inputs in self.groups:
            given = fill(u, memory)
            try:
                pairs = [*zip(names, inputs, given, strict=True)]
            except (TypeError, ValueError) as e:
                rule = f"fill gives an array for each, not {given!r:.60}"
                raise ModelError(f"the inputs {', '.join(names)}: {rule}") from e
            for name, to, values in pairs:
                _set(name, to, values)


def _set(name: str, to: Values, values: Values) -> None:
    """Write `values` to the beginning of the input `to`, which may have room for more tokens or cells. Raises
    ModelError for what is no array of at most as many numbers."""
    try:
        to[: values.size] = values if values.ndim == 1 else values.reshape(-1)
    except (AttributeError, TypeError, ValueError) as e:  # nothing is asked before: it runs for each token
        is_array = isinstance(values, np.ndarray)  # pyright: ignore[reportUnnecessaryIsInstance]
        given = f"shape {values.shape}, {values.dtype}" if is_array else f"{values!r:.60}"
        raise ModelError(f"the input {name}: fill gives an array of up to {to.size} numbers, not {given}") from e


@contextmanager
def _uncollected() -> Generator[None]:
    """Pause garbage collection. Building a graph makes thousands of objects that all stay, and searching them for
    garbage would take half as long as building."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _blocks_of(cache: KVCache) -> tuple[int, Var]:
    """The n_kv of a cache as a product: a block of cells, and the number of blocks as a Var."""
    block = cache.padding if cache.size % cache.padding == 0 else 1
    return block, Var("n_kv", cache.size // block, lo=min(cache.padding, cache.size) // block)


def _sizes(n_ubatch: int) -> list[tuple[Var, Var]]:
    """For each range of sizes that one graph serves (2, 3 and 4, 5 to 8, 9 to 16 ...): the tokens of a ubatch, and how
    many of them have an output."""
    sizes: list[tuple[Var, Var]] = []
    lo = 2
    while lo <= n_ubatch:
        hi = min(1 << (lo - 1).bit_length(), n_ubatch)
        n_tokens = Var("n_tokens", hi, lo=lo)
        sizes.append((n_tokens, Var("n_outputs", n_tokens + 0, lo=1)))
        lo = hi + 1
    return sizes


class ReadyGraphs:
    """The graphs of a context, by size; the least recently used ones are dropped.

    A graph runs for every n_kv, and for a range of numbers of tokens and outputs, see `_sizes`. Where an architecture
    has no such graph, it has one for every n_kv alone, or for one size. `caches` are the memory's. `masks` has the mask
    of each cache; None for the cache of encoded text in the graphs of an encoder, because those only write to it.
    """

    def __init__(
        self,
        hp: HParams,
        memory: Memory,
        n_ubatch: int,
        scheduler: Scheduler,
        build: Callable[[GraphSize], Build],
        repacking: Repacking | None,
    ) -> None:
        self.memory, self.caches = memory, memory.caches
        self._repacking = None if repacking is None or repacking.done else repacking  # of weights that graphs read
        self._scheduler, self._build = scheduler, build
        self._graphs: OrderedDict[_Key, ReadyGraph] = OrderedDict()
        self._last: tuple[GraphSize, Patterns, ReadyGraph] | None = None  # what `get` gave
        transient = any(c.transient for c in self.caches)  # such a cache only has the batch's cells
        self._n_kv = [_blocks_of(c) for c in self.caches]
        self._n_vary = 0 if transient or not scheduler.varies else len(self.caches)  # caches whose n_kv varies
        self._tokens = _sizes(n_ubatch)
        self._seconds = 0.0  # that building the last graph took
        self._fixed: set[GraphSize] = set()  # kinds of graphs that are built for one number of tokens
        rows = -(-n_ubatch // MASK_PADDING) * MASK_PADDING
        ctx = Context()
        self._inputs: dict[str, Tensor] = {}
        masks = {c: ctx.new_tensor(DType.F32, (c.size, rows)) for c in self.caches if not (c.cross and memory.fills(c))}
        self._buft = next(iter(scheduler.backends.values())).buft
        allocate_tensors(masks.values(), self._buft)
        self._inputs |= {mask_name(c): t for c, t in masks.items()}
        alibi = hp.f_max_alibi_bias > 0
        made = {c: KVMask(c, t.numpy(), c.causal, c.n_swa, alibi, c.swa_type) for c, t in masks.items()}
        self.masks = tuple(made.get(c) for c in self.caches)

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, size: GraphSize) -> ReadyGraph:
        """The graph for a ubatch of that size."""
        if self._repacking is not None and self._repacking.done:
            self._graphs.clear()  # those compiled before read the weights as they are stored
            self._repacking = self._last = None
        watched, last = self._scheduler.watches.patterns, self._last
        if last is not None and last[0] == size and last[1] == watched:
            return last[2]
        self._last = None  # until all Vars are bound again: building a graph binds others
        key = self._key(size, watched) or self._make(size)
        self._graphs.move_to_end(key)
        ready = self._graphs[key]
        self._bind(size)
        self._last = size, watched, ready
        return ready

    def seconds_to_build(self, size: GraphSize) -> float:
        """How long `get` would build a graph of that size, by the last one that was built; 0 when there is one."""
        return 0.0 if self._key(size, self._scheduler.watches.patterns) else self._seconds

    def _key(self, size: GraphSize, watched: Patterns) -> _Key | None:
        """The key of the graph that runs for that size; None when there is none yet."""
        keys = [(whole, True, watched) for whole in self._wholes(size)] + [(size, False, watched)]
        return next((key for key in keys if key in self._graphs), None)

    def _tokens_of(self, size: GraphSize) -> tuple[Var, Var] | None:
        """The tokens and outputs of the range in which a size lies; None for those of one token, and of texts that run
        beside each other."""
        if size.n_tokens == 1 or size.n_seqs > 1:
            return None
        return self._tokens[(size.n_tokens - 1).bit_length() - 1]

    def _bind(self, size: GraphSize) -> None:
        """Let the graphs run for that size."""
        for (block, n_blocks), n_kv in zip(self._n_kv, size.n_kv, strict=True):
            n_blocks.bind(n_kv // block)
        for var, n in zip(self._tokens_of(size) or (), size[:2], strict=False):
            var.bind(n)

    def _wholes(self, size: GraphSize) -> list[GraphSize]:
        """What stands for the graphs that run for that size and others: one for a range of tokens and every n_kv, and
        one for every n_kv alone. Its n_kv, tokens and outputs are the largest ones."""
        whole = size.with_n_kv([c.size for c in self.caches[: self._n_vary]])
        tokens = self._tokens_of(size)
        if tokens is None or not self._n_vary:
            return [whole]
        return [whole._replace(n_tokens=tokens[0].hi, n_outputs=0), whole]

    def _make(self, size: GraphSize) -> _Key:
        """Build a graph, and return its key."""
        watched, start = self._scheduler.watches.patterns, perf_counter()
        with _uncollected():
            made = self._varying(size)
            whole, ready = made or (size, self._made(size))
        key = (whole, made is not None, watched)
        self._graphs[key], self._seconds = ready, perf_counter() - start
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return key

    def _varying(self, size: GraphSize) -> tuple[GraphSize, ReadyGraph] | None:
        """A graph that runs for more than one size, and what stands for it; None when there is no such graph. Try to
        vary the n_kv of all caches and the tokens; if a graph of that kind cannot, vary only n_kv; if it cannot do that
        either, vary only the first cache's from now on; if that fails too, vary none."""
        kind, tokens = size._replace(n_tokens=0, n_outputs=0, n_kv=()), self._tokens_of(size)
        while self._n_vary:
            varying = self._n_kv[: self._n_vary]
            of_tokens = tokens is not None and kind not in self._fixed
            if all(n_blocks.lo == n_blocks.hi for _, n_blocks in varying) and not of_tokens:
                return None
            for _, n_blocks in varying:
                n_blocks.bind(n_blocks.hi)  # so that the graph sees its inputs at full size
            largest_one = size.with_n_kv([block * n_blocks for block, n_blocks in varying])
            if tokens is not None and of_tokens:
                for var in tokens:
                    var.bind(var.hi)
                largest_one = largest_one._replace(n_tokens=tokens[0] + 0, n_outputs=tokens[1] + 0)
            try:
                return self._wholes(size)[0 if of_tokens else -1], self._made(largest_one)
            except Varies:
                if of_tokens:
                    self._fixed.add(kind)
                else:
                    self._n_vary = 1 if self._n_vary > 1 else 0
        return None

    def _made(self, size: GraphSize) -> ReadyGraph:
        """A graph of that size, ready to run."""
        b = self._attached(size)
        rows, last = b.n_logits or b.n_outputs, b.graph.nodes[-1]
        if last.n_rows != rows:  # rows of all tokens, say: what is read would belong to other tokens
            rule = f"not with a row for each output ({rows}): build_out_rows picks these rows"
            raise ModelError(f"the architecture's graph (b.graph) ends with {last.describe()}, {rule}")
        with nullcontext() if self._repacking is None else self._repacking.lock:
            schedule = self._scheduler.alloc(b.graph)

        def view(name: str) -> Values:
            return b.inputs[name].tensor.numpy().reshape(-1)

        return ReadyGraph(
            schedule=schedule,
            heads=tuple(u.head for u in b.uses),
            inputs=[(i.fill, name, view(name)) for name, i in b.inputs.items() if i.fill is not None],
            groups=[(g.fill, g.names, tuple(map(view, g.names))) for g in b.input_groups],
            result=last.numpy().reshape(largest(rows), -1),
            hidden=None if b.hidden is None else b.hidden.numpy().reshape(largest(b.n_tokens), -1),
        )

    def _attached(self, size: GraphSize) -> Build:
        """The graph, with its inputs in the memory that all graphs share."""
        b = self._build(size)
        for name, i in b.inputs.items():
            shared = self._shared(name, i.tensor)
            i.tensor.buffer, i.tensor.offset = shared.buffer, shared.offset
        return b

    def _shared(self, name: str, t: Tensor) -> Tensor:
        """The memory of the input with this name, large enough for `t`. When it has to grow, earlier graphs keep the
        memory that they have."""
        shared = self._inputs.get(name)
        if shared is None or shared.nbytes < largest(t.nbytes):
            n = 1 << (largest(t.n_elements) - 1).bit_length()  # so that it grows a few times only
            shared = self._inputs[name] = Context().new_tensor(t.dtype, (n,), name)
            allocate_tensors([shared], self._buft)
        return shared
