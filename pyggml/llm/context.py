"""A context: one model, a KV cache, and the graphs that run on it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, SupportsIndex
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from pyggml.backends.cpu import CpuBackend
from pyggml.buffers.buffer import IN_FILE, Buffer
from pyggml.dtypes import DType
from pyggml.errors import BatchError, GraphError, KVCacheFull, ModelError, not_sent, one_of, whole
from pyggml.graph import Graph
from pyggml.lock import changing, locked
from pyggml.models.hparams import Pooling
from pyggml.models.memory.kv_cache import CacheOptions
from pyggml.models.memory.kv_cells import LAST_POS
from pyggml.models.memory.memory import Memory, Slots
from pyggml.sched import Scheduler
from pyggml.scope import no_scope
from pyggml.stream.sizes import memory_size
from pyggml.system.memory import in_child
from pyggml.types import Floats, Ints

from .adapters.active import ActiveAdapters, Scaled
from .adapters.control import Directions
from .batch import Batch, check_size, check_values, token_ids
from .closeable import Closeable
from .figures.perf import Perf
from .figures.report import log_context
from .graphs import Graphs, GraphSize, ReadyGraph, ReadyGraphs
from .interrupt import uninterrupted
from .loaded import LoadedModel
from .media_prompt import MediaPrompt
from .options import SHORTER, check_types, warn_beyond
from .outputs import Members, checked_output, gathered, members, of_all, pool
from .ubatch import FIRST, SBatch, UBatch, texts_of, ubatches_of_tokens


class LlamaContext(Closeable):
    """Evaluates tokens: `decode` them, then read `logits`. Made by `Model.new_context`.

    Its memory is freed with the last reference to it, by `close()`, or at the end of a `with` block; after that all use
    raises ModelError.

    memory      the KV cache: cells, seq_rm, seq_cp, seq_keep, seq_add, seq_div, seq_pos_max, defrag, clear
    logits      float32 [n_outputs, n_vocab] of the last decode, in the order of the batch
    outputs     int32 [n_outputs]: the indices in the batch of the rows of `logits`, ascending
    embeddings  in a context of embeddings, instead of logits: float32 [n_outputs, n_embd], the vector of each token
                after the last norm. With pooling there is one row for each sequence of the batch, in ascending order.
                In an encoder-decoder these are the results of `encode`
    hidden      after `keep_hidden`: float32 [n_tokens, n_embd], the states of all tokens that draft heads read
    pooling     how embeddings are pooled: none, mean, cls (the first token of a sequence), last, or rank (the scores of
                a reranker)
    scheduler   runs the graphs
    lock        held by every method that uses the cache or the logits, and by those of `memory` that change sequences

    Threads that share a context take turns: each decode is whole. A thread that reads the logits of its own decode, or
    needs the cache as it left it, holds the lock itself: `with ctx.lock: ctx.decode(ids); row = ctx.logits_ith(-1)`.
    """

    def __init__(
        self,
        model: LoadedModel,
        n_ctx: int = 512,
        *,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        type_k: DType = DType.F16,
        type_v: DType = DType.F16,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        flash_attn: bool = False,
        backend: str | Sequence[str] = "cpu",
        defrag_thold: float = 0.0,
        embeddings: bool | None = None,
        pooling: str | None = None,
        layer: int = -1,
        kv_ram: int | str | None = None,
    ) -> None:
        """A cache of `n_ctx` cells (0: as many as the model was trained with; padded to 32, to 256 with `flash_attn`)
        for sequences 0 .. n_seq_max - 1. A cache that takes more than `kv_ram` ("2G") lies in a file (in TMPDIR, else
        /var/tmp). A decode takes up to `n_batch` tokens and runs `n_ubatch` of them at a time, on `n_threads` threads
        (default: one per core), or on `n_threads_batch` (default: the same) when it runs several tokens. `type_k` and
        `type_v` are the types that the cache stores. `backend` is "cpu", "ref", or several in order of priority. When
        holes are more than the fraction `defrag_thold` of the cells after a decode, they are closed before the next
        decode (0: only when room is needed).

        `embeddings`: decodes give embeddings instead of logits; the default for a model without logits (an encoder).
        All tokens of a sequence in one decode are pooled together, by default as the file says. `layer`: the embeddings
        are the output of this layer, not of the last norm. 0 stands for the embeddings that go into the first layer; a
        negative number counts from the end, so that -2 is the layer before the last (as in `hidden_states` of the
        transformers library).
        A model gets worse when a text grows longer than those it was trained on: the first decode that goes beyond
        warns. Raises ModelError for sizes and types that do not fit the model, BackendError for an unknown backend.
        """
        if model.vocab_only:
            raise ModelError("the model was loaded with vocab_only=True: it has no weights")
        hp = model.hparams
        n_ctx = whole("n_ctx", n_ctx, error=ModelError) or hp.n_ctx_train
        for name, value in (("n_ctx", n_ctx), ("n_batch", n_batch), ("n_ubatch", n_ubatch), ("n_seq_max", n_seq_max)):
            if whole(name, value, error=ModelError) < 1:
                raise ModelError(f"{name} must be at least 1, not {value}")
        whole("n_ctx", n_ctx, 1, LAST_POS, ModelError)
        check_types(
            type_k=type_k,
            type_v=type_v,
            n_threads=n_threads,
            backend=backend,
            defrag_thold=defrag_thold,
            flash_attn=flash_attn,
            embeddings=embeddings,
        )
        self._perf = Perf(t_start_ms=time.perf_counter() * 1e3)
        self.model, self.n_batch, self.defrag_thold = model, n_batch, defrag_thold
        if n_threads_batch is not None:
            whole("n_threads_batch", n_threads_batch, 1, error=ModelError)
        most = n_threads if n_threads is None or n_threads_batch is None else max(n_threads, n_threads_batch)
        self.scheduler = Scheduler((backend,) if isinstance(backend, str) else tuple(backend), most)
        self._threads = n_threads, n_threads_batch or n_threads  # for a ubatch of one token, and for larger ones
        self.scheduler.watches = model.watches
        cache = CacheOptions(n_seq_max=n_seq_max, type_k=type_k, type_v=type_v, flash_attn=flash_attn, held=model.stage)
        with no_scope():
            self.memory: Memory = model.architecture.new_memory(hp, n_ctx, n_batch=n_batch, **cache)
        self.lock = self.scheduler.lock = self.memory.lock
        self.n_ubatch = min(n_ubatch, n_batch, self.memory.size)
        self._n_encoded = max(self.n_ubatch, hp.n_heard)  # tokens, or rows, that the encoder takes at once
        buft = next(iter(self.scheduler.backends.values())).buft
        _allocate_cache(self, self.memory, buft, kv_ram)
        self._output = checked_output(hp, model.architecture.logits, embeddings, pooling, layer, model.stage)
        self._graphs = Graphs(model, self.memory, self._output, self.scheduler)
        self._ready = ReadyGraphs(hp, self.memory, self.n_ubatch, self.scheduler, self._graphs.build, model.repacking)
        self._encoder: ReadyGraphs | None = None
        if self.memory.encoding is not None:
            if self._output.layer is not None:
                raise ModelError(f"layer = {layer}: an encoder-decoder gives what its last layer gives (-1)")
            n = self._n_encoded
            build = self._graphs.encode
            self._encoder = ReadyGraphs(hp, self.memory.encoding, n, self.scheduler, build, model.repacking)
        self._may_exceed = bool(self.memory.caches) and self.memory.size > hp.n_ctx_scaled  # False after the warning
        self._taken: list[tuple[Memory, Slots]] = []  # slots that an unfinished decode has taken
        self.outputs: Ints = np.empty(0, np.int32)
        self.logits: Floats = np.empty((0, hp.n_vocab), np.float32)
        self.embeddings: Floats = np.empty((0, hp.n_embd), np.float32)
        self.hidden = self.embeddings
        self._pooled: list[int] = []  # the sequences of the rows of `embeddings`
        self._reserve = partial(self._graphs.reserve, self.n_ubatch)
        self._adapters = ActiveAdapters(model, hp, buft, self._reserve)
        self._reserve(self._adapters.graph)
        self.set_loras(model.loras)
        self.set_control_vector(model.control)
        model.contexts.add(self)
        log_context(self.memory, self.scheduler, self.n_threads, n_batch, self.n_ubatch)

    @property
    def n_ctx(self) -> int:
        """Cells of the cache: what was asked for, padded."""
        return self.memory.size

    @property
    def pooling(self) -> Pooling:
        """How the embeddings of a sequence's tokens become one."""
        return self._output.pooling

    @property
    def n_graphs(self) -> int:
        """Compiled graphs that it keeps, ready to run again."""
        return len(self._ready) + (0 if self._encoder is None else len(self._encoder))

    @property
    def n_threads(self) -> int:
        """Threads that the cpu backend computes on (1 without it)."""
        cpu = self.scheduler.backends.get("cpu")
        return cpu.n_threads if isinstance(cpu, CpuBackend) else 1

    # -- decoding -------------------------------------------------------------------------------------------------

    @changing
    def encode(self, batch: Batch | Sequence[int]) -> None:
        """Run the encoder of an encoder-decoder on the texts that the next decodes see; plain token ids are the text of
        sequence 0. The sequences of the batch begin anew: what they had encoded and decoded is forgotten. The whole
        text of a sequence must be in one batch, with at most n_ubatch tokens, at consecutive positions. Afterwards
        `embeddings` has what the encoder gave, for each token or pooled. For a model that is only an encoder this is
        `decode`.

        An error in the arguments changes nothing; a later error leaves the sequences of the batch empty. Raises
        ModelError for a model without an encoder, BatchError for a batch that cannot be taken, KVCacheFull when it does
        not fit.
        """
        if not self.model.architecture.logits:
            self.decode(batch)
            return
        if self._encoder is None:
            raise ModelError(f"{self.model.arch} has no encoder: `decode` takes all of the text")
        start = time.perf_counter()
        self._undo()
        texts = texts_of(batch, self.memory.n_seq_max)
        of = None if self.pooling == "none" else members(texts, self.pooling)
        n = texts.n_tokens
        self._check(n, texts.token, texts.embd, encodes=True)
        self.memory.begin(sorted({s for ids in texts.seq_ids for s in ids}), n)
        self._evaluated(list(texts.parts(self._n_encoded)), n, of, self._encoder)
        self._perf.decoded(start, n)

    @changing
    def decode(self, batch: Batch | Sequence[int] | MediaPrompt, logits: Literal["last", "all"] = "last") -> None:
        """Evaluate a batch. Plain token ids, and a prompt with pictures or sounds, are appended to sequence 0; the last
        of their tokens gets logits, or with "all" every one (or all of them embeddings). A `Batch` says itself which
        logits it wants. An encoder-decoder that hears (Whisper) encodes the sound of such a prompt first, and forgets
        what it had decoded.

        On any error the cache is as it was before the call. After Ctrl-C either the whole batch is evaluated, with
        `logits` set, or nothing has changed. Raises BatchError for a batch that cannot be taken, KVCacheFull when it
        does not fit.
        """
        start = time.perf_counter()
        self._undo()  # takes back an earlier decode that two signals broke off
        one_of("logits", logits, ("last", "all"), BatchError)
        if isinstance(batch, MediaPrompt) and self._encoder is not None:
            self.encode(batch.heard(self.model))
            batch = batch.ids
        if not isinstance(batch, Batch):
            first = self.memory.seq_pos_max(0) + 1
            if isinstance(batch, MediaPrompt):
                batch = batch.batch(self.model, first)
            elif self._output.embeddings or logits == "all" or self._drifts():
                batch = Batch.prompt(batch, first)
            if isinstance(batch, Batch) and (self._output.embeddings or logits == "all"):
                batch.logits = [True] * len(batch)
        of: Members | None = None
        if isinstance(batch, Batch):
            whole = SBatch(batch, simple_split=not self.memory.equal_seqs)
            whole.check(self.memory)
            if self.model.hparams.n_pos_per_embd > 1 and (batch.media or self._drifts()):
                whole.turn(self.memory)
            self.memory.check_encoded(whole.first, whole.sets)
            if self.pooling != "none":
                of = members(whole, self.model.hparams.rank_head.pooling if self.pooling == "rank" else self.pooling)
                whole.output[:] = np.isin(np.arange(whole.n_tokens), np.concatenate(list(of.values())))
            n = whole.n_tokens
            self._check(n, whole.token, whole.embd)
            parts = list(whole.parts(self.n_ubatch))
        else:
            tokens = token_ids(batch)
            n, first = len(tokens), self.memory.pos_max.item(0) + 1
            self.memory.check_encoded(FIRST, None)
            self._check(n, tokens, None)
            if first + n - 1 > LAST_POS:
                raise BatchError(f"{n} tokens from position {first} on reach beyond position {LAST_POS}")
            parts = list(ubatches_of_tokens(tokens.astype(np.int32, copy=False), first, self.n_ubatch))
        self._evaluated(parts, n, of, self._ready)
        self._perf.decoded(start, n)

    @locked
    def logits_ith(self, i: int) -> Floats:
        """Logits [n_vocab] of token `i` of the last batch; a negative `i` counts the rows of `logits` from the end.

        Raises BatchError for a token that did not ask for logits.
        """
        i = whole("logits_ith: a token", i, error=BatchError)
        outputs = self.outputs[: len(self.logits)]
        if i < 0:
            row = len(outputs) + i
        else:
            row = int(np.searchsorted(outputs, i))
            if row < len(outputs) and outputs[row] != i:
                row = -1
        if not 0 <= row < len(outputs):
            asked = outputs.tolist()
            raise BatchError(f"no logits of token {i}: the last batch asked for those of {asked if asked else 'none'}")
        return self.logits[row]

    @property
    def loras(self) -> tuple[Scaled, ...]:
        """The LoRA adapters of the next decode, and their scales."""
        return self._adapters.loras

    @changing
    def set_loras(self, loras: Iterable[Scaled]) -> None:
        """Run the next decodes with these adapters of `Model.load_lora`, each with its scale; `[]` takes all off.
        Changing only scales costs nothing; for another set of adapters the graphs are built once more. What the cache
        holds stays as it is.

        Raises ModelError for an adapter that does not fit the model, or occurs twice; then nothing has changed.
        """
        with uninterrupted():
            self._adapters.set_loras(loras)

    @changing
    def set_control_vector(
        self, vector: Directions | None, scale: float = 1.0, il_start: int = 1, il_end: int | None = None
    ) -> None:
        """In the next decodes, add `scale` times a direction to the output of each layer from `il_start` to `il_end`
        (both included; None: the last). None as `vector` takes the control vector off.

        vector: a GGUF file like llama.cpp's, a ControlVector, or an array [n, n_embd] whose first row is for layer 1
        (layer 0 has no direction). Raises GGUFError for a bad file, ModelError for a vector that does not fit the
        model; then nothing has changed.
        """
        with uninterrupted():
            self._adapters.set_control(vector, scale, il_start, il_end)

    @changing
    def keep_hidden(self) -> None:
        """Set `hidden` after each decode from now on. Raises ModelError in a context of embeddings."""
        if self._output.embeddings:
            raise ModelError("a context of embeddings has no hidden states beside them")
        self._graphs.hidden = True
        self._reserve(self._adapters.graph)

    @locked
    def embeddings_seq(self, seq: int) -> Floats:
        """The pooled embedding [n_embd] of a sequence of the last batch, or its scores. Raises BatchError when the
        sequence was not in the batch, or without pooling."""
        seq = whole("embeddings_seq: a sequence", seq, error=BatchError)
        if seq not in self._pooled:
            of = self._pooled or "none"
            raise BatchError(
                f"no pooled embeddings of sequence {seq}: the last batch (pooling {self.pooling}) gave {of}"
            )
        return self.embeddings[self._pooled.index(seq)]

    def save_state(self, path: str | os.PathLike[str], tokens: Sequence[int] = ()) -> None:
        """Write cache and logits to a file, see `state.save_state`."""
        from .state import save_load as state

        state.save_state(self, path, tokens)

    def load_state(self, path: str | os.PathLike[str]) -> list[int]:
        """Restore what `save_state` wrote; returns its tokens, see `state.load_state`."""
        from .state import save_load as state

        return state.load_state(self, path)

    def save_seq(self, path: str | os.PathLike[str], seq: int) -> None:
        """Write one sequence to a file, see `state.save_seq`."""
        from .state import save_load as state

        state.save_seq(self, path, seq)

    def load_seq(self, path: str | os.PathLike[str], seq: int | None = None) -> int:
        """Add a saved sequence to the cache, by default under a free id; returns the id, see `state.load_seq`."""
        from .state import save_load as state

        return state.load_seq(self, path, seq)

    @changing
    def update(self) -> None:
        """Do the work on the cache that was put off; every decode does this first. K is roped to the positions that
        seq_add and seq_div gave to its cells. Holes are closed when `memory.defrag()` or `defrag_thold` asked for it,
        and cells are sorted when an operation left a sequence out of order. Ctrl-C waits until the cache is consistent
        again."""
        for cache in self.memory.caches:
            if cache.has_shift:
                with uninterrupted():
                    self._graphs.shift(cache)
            if cache.wants_defrag:
                with uninterrupted():
                    self._graphs.defrag(cache)

    @changing
    def warmup(self) -> None:
        """Compute one token and forget it: weights are read into memory, threads are started. Counters, cache and
        logits stay as they are. Does nothing when the cache has no room."""
        u, hp = next(ubatches_of_tokens(np.zeros(1, np.int32), 0, 1)), self.model.hparams
        if self.model.first_layer or hp.is_head:  # these read hidden states
            u.embd = np.zeros((1, hp.n_embd), np.float32)
        try:
            self._run(u, self._take(u, self.memory), self._ready)
        except KVCacheFull:
            pass
        finally:
            self._undo()

    def perf(self) -> Perf:
        """The counters as they are now; printed, a summary."""
        return replace(self._perf)

    def perf_reset(self) -> None:
        """Count from zero again."""
        vars(self._perf).update(vars(Perf(t_start_ms=time.perf_counter() * 1e3)))

    def perf_sampled(self, start: float) -> None:
        """Count a token that was sampled since `start` (of time.perf_counter())."""
        self._perf.sampled(start)

    def perf_guessed(self, n: int) -> None:
        """Count the last decode, of `n` tokens, as that of a token and guesses; or, with 0, a guess that was right."""
        self._perf.guessed(n)

    @locked
    def build_graph(self, n_tokens: int, n_outputs: int | None = None, worst_case: bool = False) -> Graph:
        """The graph that would run for `n_tokens` tokens with logits of `n_outputs` of them (default: one), with the
        cache as it is now. `worst_case`: the graph over the whole cache, by default with logits of all tokens."""
        n_tokens = whole("n_tokens", n_tokens, error=GraphError)
        n_outputs = None if n_outputs is None else whole("n_outputs", n_outputs, error=GraphError)
        if worst_case:
            return self._graphs.largest(n_tokens, n_outputs or n_tokens, self._adapters.graph).graph
        return self._graphs.next(n_tokens, 1 if n_outputs is None else n_outputs, self._adapters.graph).graph

    @locked
    def seconds_to_build(self, n_tokens: int) -> float:
        """How many seconds the next decode of `n_tokens` tokens of one text, each with logits, would build its graph:
        as many as the last graph took, or 0 when there is one. Raises BatchError for more tokens than `n_ubatch`."""
        n_tokens = whole("n_tokens", n_tokens, 1, self.n_ubatch, BatchError)
        n_kv = tuple([c.n_kv() for c in self._ready.caches])
        size = GraphSize(n_tokens, n_tokens, False, n_kv, self._adapters.graph, hidden=self._graphs.hidden)
        return self._ready.seconds_to_build(size)

    @property
    def same_bits_in_batches(self) -> bool:
        """Whether the logits of a token are the same, bit for bit, alone and in a batch (docs/company.md)."""
        rounding = ["amx"] if self.model.precision == "fast" else []
        return all(type(b) is CpuBackend and b.isa not in rounding for b in self.scheduler.backends.values())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _drifts(self) -> bool:
        """Whether tokens of the memory are behind pictures that moved the positions of the rope."""
        return self.model.hparams.n_pos_per_embd > 1 and any(bool(c.drift.any()) for c in self.memory.caches[:1])

    def _check(
        self, n: int, tokens: npt.NDArray[np.integer[Any]] | None, embd: Floats | None, encodes: bool = False
    ) -> None:
        hp = self.model.hparams
        if encodes:
            check_size(n, max(self.n_batch, self._n_encoded), self._n_encoded, True)
        else:
            check_size(n, self.n_batch, self.n_ubatch, not hp.causal_attn)
        check_values(tokens, embd, hp, self.model.first_layer)
        if not encodes and n > self.memory.size - self.memory.used:
            raise self.memory.full(n)

    def _evaluated(self, parts: Sequence[UBatch], n: int, of: Members | None, graphs: ReadyGraphs) -> None:
        """Update the caches, then compute the parts, `n` tokens in all. When the cells that are free lie apart, close
        the holes and try again."""
        hp = self.model.hparams
        of_decoder = graphs is self._ready or not hp.learned_positions  # an encoder's positions are its own
        if self._may_exceed and of_decoder and any(u.pos.max() >= hp.n_ctx_scaled for u in parts):
            if hp.learned_positions:
                raise BatchError(f"the model has learned {hp.n_ctx_train} positions, and knows no others: {SHORTER}")
            warn_beyond(hp)
            self._may_exceed = False
        if len(parts) > 1:
            for cache in graphs.memory.caches:
                cache.make_room(parts)
        self.update()
        if self.model.repacking is not None:
            self.model.repacking.go_on(n)
        self._perf.n_queued = n
        try:
            self._evaluate(parts, of, graphs)
        except KVCacheFull:
            graphs.memory.settle()
            graphs.memory.defrag()
            self.update()
            self._evaluate(parts, of, graphs)
        finally:
            self._perf.n_queued = 0
        graphs.memory.settle()
        if self.defrag_thold > 0:
            for cache in self.memory.caches:
                cache.wants_defrag |= cache.fragmentation() > self.defrag_thold

    def _evaluate(self, parts: Sequence[UBatch], of: Members | None, graphs: ReadyGraphs) -> None:
        """Compute the parts, then set `outputs` and `logits`, or `embeddings`, which are pooled over the tokens `of`
        each sequence. On a failure the cells are as they were before."""
        rows: list[Floats] = []  # list[Floats]() would raise, and catch, an AttributeError inside
        hidden: list[Floats] = []
        try:
            for u in parts:
                ready = self._run(u, self._take(u, graphs.memory), graphs)
                if len(u.outputs):
                    rows.append(np.array(ready.result[: len(u.outputs)]))
                if ready.hidden is not None:
                    hidden.append(np.array(ready.hidden[: u.n_tokens]))
            name = "embeddings" if self._output.embeddings or graphs is self._encoder else "logits"
            outputs, result = gathered(parts, rows, vars(self)[name][:0])
            if of is not None:
                result = self._graphs.head(pool(result, outputs, of))
            new = {"outputs": outputs, "logits": self.logits[:0], name: result, "_pooled": list(of or ()), "_taken": []}
            if hidden:
                new["hidden"] = of_all(parts, hidden)
            vars(self).update(new)  # one call, so that no signal finds half of it
        except BaseException:
            self._undo()
            raise

    def _take(self, u: UBatch, memory: Memory) -> Slots:
        """Put a ubatch into the memory. Its slots are noted first, so that `_undo` finds them."""
        slots = memory.slot(u, [slots for _, slots in self._taken])
        self._taken.append((memory, slots))
        memory.take(slots, u)
        return slots

    def _undo(self) -> None:
        """Give back the slots of a decode that was not finished."""
        if self._taken:
            with uninterrupted():
                self._taken[0][0].undo([slots for _, slots in self._taken])
                self._taken = []

    def _run(self, u: UBatch, slots: Slots, graphs: ReadyGraphs) -> ReadyGraph:
        """Compute a ubatch in its slots. The graph's result is valid until the next run, which uses the same memory."""
        n_kv = tuple([c.n_kv() for c in graphs.caches])
        n_outputs, n_seqs = len(u.outputs) or 1, u.n_seqs if graphs.memory.equal_seqs else 1
        hidden = self._graphs.hidden
        mixed, group = (False, None) if u.media is None else (u.media.rows is not None, u.media.group)
        size = GraphSize(u.n_tokens, n_outputs, u.embd is not None, n_kv, self._adapters.graph, n_seqs, hidden, mixed)
        ready = graphs.get(size)
        ready.fill(u, graphs.memory)
        for mask, head, slot, n in zip(graphs.masks, ready.heads, slots, n_kv, strict=False):
            if mask is not None:
                mask.write(u.pos, u.seq, slot, n, u.sets is not None, group)
            if slot is not None:
                head.bind(slot.start)
        ready.schedule.run(n_threads=self._threads[u.n_tokens > 1])
        return ready

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        instead = "make one there (load_model, new_context); save_state writes what it holds, load_state reads it"
        raise not_sent(self, instead, ModelError)

    def _name(self) -> str:
        return f"LlamaContext of {self.model.path}, n_ctx {self.n_ctx}"


def cache_bytes(
    model: LoadedModel,
    n_ctx: int,
    n_batch: int = 2048,
    n_seq_max: int = 1,
    type_k: DType = DType.F16,
    type_v: DType = DType.F16,
    flash_attn: bool = False,
    **others: Any,
) -> int:
    """Bytes that the K/V cache of a context with these options takes; `others` do not change it. The model may be
    loaded with `vocab_only`. Raises ModelError for options that do not fit the model."""
    cache = CacheOptions(n_seq_max=n_seq_max, type_k=type_k, type_v=type_v, flash_attn=flash_attn, held=model.stage)
    with no_scope():
        return model.architecture.new_memory(model.hparams, n_ctx, n_batch=n_batch, **cache).nbytes


# -- where the K/V cache lies -----------------------------------------------------------------------------------------

_in_files: WeakSet[LlamaContext] = WeakSet()


def _allocate_cache(ctx: LlamaContext, memory: Memory, buft: str, kv_ram: int | str | None) -> None:
    """Give the cache of `ctx` its memory: of the buffer type `buft`, or in a file when it needs more than `kv_ram`.
    Raises ModelError for a bad `kv_ram`, and when such a cache would lie on a device; AllocError without room."""
    if kv_ram is None or memory.nbytes <= memory_size(kv_ram, "kv_ram"):
        memory.allocate(buft)
        return
    if buft in Buffer.device_types:
        raise ModelError(f"kv_ram: the cache is in memory of type {buft}, and cannot be in a file")
    memory.allocate(IN_FILE)
    _in_files.add(ctx)


def _close_all() -> None:
    for ctx in tuple(_in_files):
        ctx.close()


in_child(_close_all)  # a child would write into its parent's cache file
