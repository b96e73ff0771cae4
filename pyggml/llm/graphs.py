"""The graphs that a context runs beside and in its steps: built for its model, memory and output."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from weakref import WeakKeyDictionary

import numpy as np

from pyggml.errors import OneSite
from pyggml.graph import Graph
from pyggml.models.blocks import NO_ADAPTERS, Adapters, Build, build_head
from pyggml.models.memory.k_shift import build_k_shift
from pyggml.models.memory.kv_cache import KVCache
from pyggml.models.memory.kv_defrag import build_defrag
from pyggml.models.memory.memory import Memory
from pyggml.models.twins import Twin, find_twins
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor
from pyggml.types import Floats, Ints

from .loaded import LoadedModel
from .pooling import Output
from .steps import StepSize


class Graphs:
    """Builds the graphs of a context, and runs those that are no steps. `hidden`: steps also give hidden states."""

    def __init__(self, model: LoadedModel, memory: Memory, output: Output, scheduler: Scheduler) -> None:
        self._model, self._memory, self._output, self._scheduler = model, memory, output, scheduler
        self.hidden = False
        self._twins: WeakKeyDictionary[Adapters, dict[tuple[bool, int, bool], Mapping[int, Twin]]] = WeakKeyDictionary()

    def build(self, size: StepSize) -> Build:
        """The graph of a ubatch of that size; of a stage from its first layer on."""
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
        )
        b.asked = self._model.watches.asks
        whole = not first and self._output.layer is None
        known = self._twins.setdefault(size.adapters, {}) if whole and not self._model.watches.patterns else None
        of = size.embd, size.n_seqs, size.hidden
        b.twins = {} if known is None else known.get(of, {})
        with OneSite():
            self._model.architecture.build_stage(b)
        if known is not None and of not in known:
            known[of] = find_twins(b.graph, b.built)
        return b

    def encode(self, size: StepSize) -> Build:
        """The graph that an encoder-decoder's encoder runs for a ubatch of that size."""
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
        with OneSite():
            encode(b)
        return b

    def largest(self, n_tokens: int, n_outputs: int, adapters: Adapters = NO_ADAPTERS) -> Build:
        """The largest graph of so many tokens: over whole caches, of as many sequences as there can be."""
        memory = self._memory
        n_seqs = gcd(n_tokens, memory.n_seq_max) if memory.equal_seqs else 1
        n_kv = tuple(c.size for c in memory.caches)
        return self.build(StepSize(n_tokens, n_outputs, False, n_kv, adapters, n_seqs, self.hidden))

    def next(self, n_tokens: int, n_outputs: int, adapters: Adapters) -> Build:
        """The graph that so many tokens of one sequence would run, as the caches are now."""
        caches = self._memory.caches
        ends = [c.find_slot(n_tokens) + n_tokens if 0 < n_tokens <= c.size and not c.cross else 0 for c in caches]
        n_kv = tuple(c.n_kv(end) for c, end in zip(caches, ends, strict=True))
        return self.build(StepSize(n_tokens, n_outputs, False, n_kv, adapters, hidden=self.hidden))

    def reserve(self, n_tokens: int, adapters: Adapters) -> None:
        """Make room for the largest graph with these adapters."""
        self._scheduler.reserve(self.largest(n_tokens, n_tokens, adapters).graph)
        if self._memory.encoding is not None:
            n_kv = tuple(c.size for c in self._memory.encoding.caches)
            self._scheduler.reserve(self.encode(StepSize(n_tokens, n_tokens, False, n_kv, adapters)).graph)

    def head(self, pooled: Floats) -> Floats:
        """What the model makes of pooled embeddings, see `build_head`."""
        sizes = tuple(c.size for c in self._memory.caches)
        b = Build(self._model.hparams, self._model.weights, self._memory, len(pooled), len(pooled), sizes)
        graph = build_head(b, self._output.pooling == "rank")
        if not graph.nodes:
            return pooled
        schedule = self._scheduler.alloc(graph)
        b.inputs["inp_pooled"].tensor.numpy()[:] = pooled
        schedule.run()
        return np.array(graph.nodes[-1].numpy(), np.float32)

    def shift(self, cache: KVCache) -> None:
        """Rope K to where its cells are now."""
        graph, delta = build_k_shift(self._model.hparams, self._model.weights, cache)
        self._move(graph, delta, cache.delta)
        cache.shift_done()

    def defrag(self, cache: KVCache) -> None:
        """Close the holes between cells."""
        if cache.used < cache.end:
            graph, order = build_defrag(cache)
            self._move(graph, order, cache.order())
        cache.defrag_done()

    def _move(self, graph: Graph, given: Tensor, values: Ints) -> None:
        """Run a graph over a cache, which is empty where the cache has no layers."""
        if graph.nodes:
            schedule = self._scheduler.alloc(graph)
            given.numpy()[:] = values
            schedule.run(interruptible=False)
