"""A context: one model, a KV cache, and the graphs that run on it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pyggml.backends.cpu import CpuBackend
from pyggml.dtypes import DType
from pyggml.errors import BatchError, KVCacheFull, ModelError
from pyggml.graph import Graph
from pyggml.models.blocks import Build, KVMemory
from pyggml.models.k_shift import build_k_shift
from pyggml.models.kv_cache import KVCache
from pyggml.models.kv_cells import Floats, Ints, Slot
from pyggml.models.kv_defrag import build_defrag
from pyggml.models.kv_iswa import KVCacheISWA
from pyggml.sched import Scheduler

from . import state
from .batch import Batch
from .interrupt import uninterrupted
from .perf import Perf
from .steps import Steps, StepSize
from .ubatch import SBatch, UBatch, ubatches_of_tokens

if TYPE_CHECKING:
    from .model import Model


class LlamaContext:
    """Evaluates tokens: `decode` them, then read `logits`. Made by `Model.new_context`.

    memory      the KV cache: cells, seq_rm, seq_cp, seq_keep, seq_add, seq_div, seq_pos_max, defrag, clear
    logits      float32 [n_outputs, n_vocab] of the last decode, in the order of the batch
    outputs     int32 [n_outputs]: the indices in the batch of the rows of `logits`, ascending
    scheduler   runs the graphs
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_seq_max: int,
        type_k: DType,
        type_v: DType,
        n_threads: int | None,
        flash_attn: bool,
        backend: str | Sequence[str],
        defrag_thold: float,
    ) -> None:
        hp = model.hparams
        n_ctx = n_ctx or hp.n_ctx_train
        for name, value in (("n_ctx", n_ctx), ("n_batch", n_batch), ("n_ubatch", n_ubatch), ("n_seq_max", n_seq_max)):
            if value < 1:
                raise ModelError(f"{name} must be at least 1, not {value}")
        self._perf = Perf(t_start_ms=time.perf_counter() * 1e3)
        self.model, self.n_batch, self.defrag_thold = model, n_batch, defrag_thold
        self.scheduler = Scheduler((backend,) if isinstance(backend, str) else tuple(backend), n_threads)
        self.memory: KVMemory
        if hp.n_swa:
            self.memory = KVCacheISWA(hp, n_ctx, n_seq_max, type_k, type_v, flash_attn, n_batch=n_batch)
        else:
            self.memory = KVCache(hp, n_ctx, n_seq_max, type_k, type_v, flash_attn)
        self.n_ubatch = min(n_ubatch, n_batch, self.memory.size)
        self.memory.allocate(next(iter(self.scheduler.backends.values())).buft)
        self._steps = Steps(hp, self.memory, self.n_ubatch, self.scheduler, self._build)
        self.outputs: Ints = np.empty(0, np.int32)
        self.logits: Floats = np.empty((0, hp.n_vocab), np.float32)
        self.scheduler.reserve(self.build_graph(self.n_ubatch, worst_case=True))

    @property
    def n_ctx(self) -> int:
        """Cells of the cache: what was asked for, padded."""
        return self.memory.size

    @property
    def n_threads(self) -> int:
        """Threads that the cpu backend computes on (1 without it)."""
        cpu = self.scheduler.backends.get("cpu")
        return cpu.n_threads if isinstance(cpu, CpuBackend) else 1

    # -- decoding -------------------------------------------------------------------------------------------------

    def decode(self, batch: Batch | Sequence[int]) -> None:
        """Evaluate a batch; a sequence of token ids is appended to sequence 0, with logits of the last.

        On any error the cache is as it was before the call. Raises BatchError for a batch that cannot be taken,
        KVCacheFull where it does not fit.
        """
        start = time.perf_counter()
        if isinstance(batch, Batch):
            whole = SBatch(batch)
            whole.check(self.memory)
            n = whole.n_tokens
            self._check(n, whole.token, whole.embd)
            parts = list(whole.parts(self.n_ubatch))
        else:
            tokens = _token_ids(batch)
            n = len(tokens)
            self._check(n, tokens, None)
            parts = list(ubatches_of_tokens(tokens, self.memory.seq_pos_max(0) + 1, self.n_ubatch))
        self.update()
        self._perf.n_queued = n
        try:
            rows = self._evaluate(parts)
        except KVCacheFull:  # it fits, but not side by side
            self.memory.defrag()
            self.update()
            rows = self._evaluate(parts)
        finally:
            self._perf.n_queued = 0
        self._gather(parts, rows)
        if isinstance(self.memory, KVCacheISWA):
            self.memory.settle()
        if self.defrag_thold > 0:
            for cache in self.memory.caches:
                cache.wants_defrag |= cache.fragmentation() > self.defrag_thold
        self._perf.decoded(start, n)

    def logits_ith(self, i: int) -> Floats:
        """Logits [n_vocab] of token `i` of the last batch; a negative `i` counts the rows of `logits` from the end.

        Raises BatchError for a token whose logits were not asked for.
        """
        if i < 0:
            row = len(self.outputs) + i
        else:
            row = int(np.searchsorted(self.outputs, i))
            if row < len(self.outputs) and self.outputs[row] != i:
                row = -1
        if not 0 <= row < len(self.outputs):
            asked = self.outputs.tolist()
            raise BatchError(f"no logits of token {i}: the last batch asked for those of {asked if asked else 'none'}")
        return self.logits[row]

    def save_state(self, path: str | os.PathLike[str], tokens: Sequence[int] = ()) -> None:
        """Write cache and logits to a file, see `state.save_state`."""
        state.save_state(self, path, tokens)

    def load_state(self, path: str | os.PathLike[str]) -> list[int]:
        """Restore what `save_state` wrote; returns its tokens, see `state.load_state`."""
        return state.load_state(self, path)

    def save_seq(self, path: str | os.PathLike[str], seq: int) -> None:
        """Write one sequence to a file, see `state.save_seq`."""
        state.save_seq(self, path, seq)

    def load_seq(self, path: str | os.PathLike[str], seq: int | None = None) -> int:
        """Add a saved sequence to the cache, by default under a free id; returns the id, see `state.load_seq`."""
        return state.load_seq(self, path, seq)

    def update(self) -> None:
        """Bring K and V up to the cells, as every decode does first: K is roped to the positions that seq_add and
        seq_div gave its cells, and holes are closed where `memory.defrag()` or `defrag_thold` asked for it. Ctrl-C
        waits until a cache is whole again."""
        for cache in self.memory.caches:
            if cache.has_shift:
                with uninterrupted():
                    self._shift(cache)
            if cache.wants_defrag:
                with uninterrupted():
                    self._defrag(cache)

    def warmup(self) -> None:
        """Compute one token and forget it: weights are read into memory, threads are started. Counters, cache and
        logits stay as they are. Does nothing where the cache has no room."""
        u = next(ubatches_of_tokens(np.zeros(1, np.int32), 0, 1))
        taken: list[tuple[KVCache, Slot]] = []
        try:
            self._run(u, self._take(u, taken))
        except KVCacheFull:
            pass
        finally:
            _undo(taken)

    def perf(self) -> Perf:
        """The counters as they are now; printed, a summary."""
        return replace(self._perf)

    def perf_reset(self) -> None:
        """Count from zero again."""
        self._perf = Perf(t_start_ms=time.perf_counter() * 1e3)

    def perf_sampled(self, start: float) -> None:
        """Count a token that was sampled since `start` (of time.perf_counter())."""
        self._perf.sampled(start)

    def build_graph(self, n_tokens: int, n_outputs: int | None = None, worst_case: bool = False) -> Graph:
        """The graph that would run for `n_tokens` tokens with logits of `n_outputs` of them (default: one), as the
        cache is now; for the worst case, over the whole cache and with all logits."""
        caches = self.memory.caches
        if worst_case:
            n_outputs = n_outputs or n_tokens
            return self._build(StepSize(n_tokens, n_outputs, False, tuple(c.size for c in caches))).graph
        ends = [c.find_slot(n_tokens) + n_tokens if 0 < n_tokens <= c.size else 0 for c in caches]
        n_kv = tuple(c.n_kv(end) for c, end in zip(caches, ends, strict=True))
        return self._build(StepSize(n_tokens, 1 if n_outputs is None else n_outputs, False, n_kv)).graph

    # -- inside ---------------------------------------------------------------------------------------------------

    def _check(self, n: int, tokens: Ints | None, embd: Floats | None) -> None:
        hp = self.model.hparams
        if n > self.n_batch:
            raise BatchError(f"{n} tokens in one batch, where n_batch is {self.n_batch}")
        if n > self.n_ubatch and not hp.causal_attn:
            raise BatchError(f"{n} tokens that all see each other, but only n_ubatch = {self.n_ubatch} run together")
        if tokens is not None:
            low, high = tokens.min(), tokens.max()
            if low < 0 or high >= hp.n_vocab:
                raise BatchError(f"token {low if low < 0 else high} is outside the vocabulary of {hp.n_vocab}")
        if embd is not None and embd.shape[1] != hp.n_embd:
            raise BatchError(f"embeddings of {embd.shape[1]} numbers, but n_embd is {hp.n_embd}")
        if n > self.memory.size - self.memory.used:
            raise self.memory.full(n)

    def _evaluate(self, parts: Sequence[UBatch]) -> list[Floats]:
        """Logits of each part that has outputs. On failure the cells are as they were."""
        rows: list[Floats] = []
        taken: list[tuple[KVCache, Slot]] = []
        try:
            for u in parts:
                logits = self._run(u, self._take(u, taken))
                if logits is not None:
                    rows.append(np.array(logits))
        except BaseException:
            _undo(taken)
            raise
        return rows

    def _take(self, u: UBatch, taken: list[tuple[KVCache, Slot]]) -> list[Slot]:
        """Slots for a ubatch in every cache, noted in `taken` too."""
        for cache in self.memory.caches:
            taken.append((cache, cache.take(u.pos, u.seq, u.sets)))
        return [slot for _, slot in taken[-len(self.memory.caches) :]]

    def _run(self, u: UBatch, slots: Sequence[Slot]) -> Floats | None:
        """Compute a ubatch in its slots; its logits, in memory that the next run uses again."""
        n_kv = tuple([c.n_kv() for c in self.memory.caches])
        outputs = u.outputs
        step = self._steps.get(StepSize(u.n_tokens, len(outputs) or 1, u.embd is not None, n_kv))
        if step.token is not None and u.token is not None:
            step.token[:] = u.token
        if step.embd is not None and u.embd is not None:
            step.embd[:] = u.embd
        step.pos[:] = u.pos
        step.out_ids[:] = outputs if len(outputs) else 0
        for mask, head, slot, n in zip(self._steps.masks, step.heads, slots, n_kv, strict=True):
            mask.write(u.pos, u.seq, slot, n, u.sets is not None)
            head.bind(slot.start)
        step.schedule.run()
        return step.logits if len(outputs) else None

    def _shift(self, cache: KVCache) -> None:
        graph, delta = build_k_shift(self.model.hparams, self.model.weights, cache)
        schedule = self.scheduler.alloc(graph)
        delta.numpy()[:] = cache.delta
        schedule.run(interruptible=False)
        cache.shift_done()

    def _defrag(self, cache: KVCache) -> None:
        if cache.used < cache.end:
            graph, order = build_defrag(cache)
            schedule = self.scheduler.alloc(graph)
            order.numpy()[:] = cache.order()
            schedule.run(interruptible=False)
        cache.defrag_done()

    def _gather(self, parts: Sequence[UBatch], rows: Sequence[Floats]) -> None:
        """Set `outputs` and `logits`, in the order of the batch."""
        ids = [u.ids[u.output] for u in parts]
        outputs = ids[0] if len(ids) == 1 else np.concatenate(ids)
        logits = rows[0] if len(rows) == 1 else np.concatenate(rows) if rows else self.logits[:0]
        if len(outputs) > 1 and (outputs[1:] < outputs[:-1]).any():
            order = np.argsort(outputs)
            outputs, logits = outputs[order], logits[order]
        self.outputs, self.logits = outputs, logits

    def _build(self, size: StepSize) -> Build:
        m = self.model
        b = Build(m.hparams, m.weights, self.memory, size.n_tokens, size.n_outputs, size.n_kv, size.embd)
        m.architecture.build(b)
        return b


def _undo(taken: Sequence[tuple[KVCache, Slot]]) -> None:
    """Take back slots: the cells are as they were before the first of them was taken."""
    for cache in dict.fromkeys(cache for cache, _ in taken):
        cache.undo([slot for c, slot in taken if c is cache])


def _token_ids(ids: Sequence[int]) -> Ints:
    """Raises BatchError for what are no ids, or none."""
    if len(ids) == 0:
        raise BatchError("the batch is empty")
    try:
        tokens = np.array(ids)
    except (ValueError, OverflowError):
        tokens = np.empty(0)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.max() >= 1 << 31:
        raise BatchError("tokens must be a sequence of whole numbers")
    return tokens.astype(np.int32)
