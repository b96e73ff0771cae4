"""A model in stages: actors with some of its layers each, and contexts whose batches go through all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from pyggml.errors import KVCacheFull, ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.loaded import LoadedModel
from pyggml.llm.ubatch import SBatch
from pyggml.models.memory.memory import Memory, Slots
from pyggml.types import Floats, Ints

from .actors import Actor, ActorDied, Actors, MemoryOp
from .pool import ATTEMPTS, WorkerDied

if TYPE_CHECKING:
    from pyggml.llm.adapters.active import Scaled
    from pyggml.llm.options import ContextOptions


class Chain:
    """The stages of a model: each takes what the one before it gave. Several threads evaluate batches at the same time:
    while one batch is in one stage, others are in other stages.

    `start(i)` starts the actor of stage i, with its layers loaded. `epoch` counts how often stages were replaced.
    """

    def __init__(self, model: LoadedModel, actors: Actors, n: int, start: Callable[[int], Actor]) -> None:
        self.model, self.epoch = model, 0
        self._actors, self._start = actors, start
        self._lock = threading.Lock()
        self._keys = count()
        self._stages = [self._started(i) for i in range(n)]

    def context(self, n_ctx: int, options: ContextOptions) -> StagedContext:
        """A context of all stages. Raises as `LlamaContext`, WorkerDied."""
        key, epoch = next(self._keys), self.epoch
        self._all(epoch, "open", key, n_ctx, options)
        return StagedContext(self, key, epoch, n_ctx, options)

    def close_context(self, epoch: int, key: int) -> None:
        """Let go of a context, when it is still there."""
        with suppress(WorkerDied):
            self._all(epoch, "close", key)

    def evaluate(self, epoch: int, key: int, ops: Sequence[MemoryOp], batch: Batch) -> Floats:
        """The logits of a batch. Raises as `LlamaContext.decode`, WorkerDied when a stage has died since `epoch`."""
        given = None
        with self._lock:  # so that all stages see the batches of all threads in the same order
            self._check(epoch)
            for stage in self._stages:
                given = stage.call("decode", key, ops, batch, given)
        return self._get(epoch, given)

    def repair(self, epoch: int) -> None:
        """Replace the stages that died since `epoch`, unless that was done already, and forget all contexts."""
        with self._lock:
            if epoch != self.epoch:
                return
            self.epoch += 1
            for i, stage in enumerate(self._stages):
                try:
                    self._actors.get(stage.call("reset"))
                except ActorDied:
                    self._stages[i] = self._started(i)

    def close(self) -> None:
        """End all stages."""
        for stage in self._stages:
            stage.kill()

    def _started(self, i: int) -> Actor:
        died = None
        for _ in range(ATTEMPTS):
            try:
                return self._start(i)
            except ActorDied as e:
                died = e
        raise ModelError(f"{ATTEMPTS} processes died loading stage {i + 1}: {died}") from died

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise WorkerDied("a stage was replaced")

    def _all(self, epoch: int, method: str, *args: object) -> None:
        with self._lock:
            self._check(epoch)
            results = [stage.call(method, *args) for stage in self._stages]
        for result in results:
            self._get(epoch, result)

    def _get(self, epoch: int, result: object) -> Floats:
        try:
            return self._actors.get(result)
        except ActorDied as e:
            raise WorkerDied(str(e)) from e
        except Exception:
            self._check(epoch)  # a context that was forgotten meanwhile
            raise


class StagedMemory(Memory):
    """The sequences of a StagedContext: cells without K and V. The driver fills and empties them as every stage fills
    and empties its own. Operations on sequences are noted in `ops`: the stages do them before the next batch."""

    def __init__(self, model: LoadedModel, n_ctx: int, n_batch: int, options: ContextOptions) -> None:
        n_seq_max, flash_attn = options.get("n_seq_max", 1), options.get("flash_attn", False)
        own = model.architecture.new_memory(
            model.hparams, n_ctx, n_batch=n_batch, n_seq_max=n_seq_max, flash_attn=flash_attn, held=()
        )
        super().__init__(*own.stores, encoding=own.encoding)
        self.ops: list[MemoryOp] = []

    def clear(self) -> None:
        self.seq_rm(-1)

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        removed = super().seq_rm(seq_id, p0, p1)
        if removed:
            self.ops.append(MemoryOp(Memory.seq_rm, (seq_id, p0, p1)))
        return removed

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        super().seq_cp(src, dst, p0, p1)
        self.ops.append(MemoryOp(Memory.seq_cp, (src, dst, p0, p1)))

    def seq_keep(self, seq_id: int) -> None:
        for other in set(range(self.n_seq_max)) - {seq_id}:
            self.seq_rm(other)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        super().seq_add(seq_id, p0, p1, delta)
        self.ops.append(MemoryOp(Memory.seq_add, (seq_id, p0, p1, delta)))

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        super().seq_div(seq_id, p0, p1, d)
        self.ops.append(MemoryOp(Memory.seq_div, (seq_id, p0, p1, d)))

    def take_all(self, batch: Batch, n_ubatch: int) -> list[Slots]:
        """Put the tokens of a batch into slots, which are returned. Raises as `LlamaContext.decode`, with nothing
        changed."""
        whole = SBatch(batch, simple_split=not self.equal_seqs)
        whole.check(self)
        taken: list[Slots] = []
        parts = list(whole.parts(n_ubatch))
        for cache in self.caches:  # as a stage does before it computes
            if len(parts) > 1:
                cache.make_room(parts)
            if cache.wants_defrag:
                cache.defrag_done()
        try:
            for u in parts:
                taken.append(self.slot(u, taken))
                self.take(taken[-1], u)
        except KVCacheFull:
            self.undo(taken)
            raise
        return taken

    def close_holes(self) -> None:
        """Move cells together, as a stage does when a batch has no room side by side."""
        self.settle()
        for cache in self.caches:
            cache.defrag_done()


class StagedContext:
    """A Decoder that runs a model in stages. It gives logits, and no embeddings."""

    n_threads = 1  # this process only waits for the stages

    def __init__(self, chain: Chain, key: int, epoch: int, n_ctx: int, options: ContextOptions) -> None:
        hp, self.n_batch = chain.model.hparams, options.get("n_batch", 2048)
        self.model, self.memory = chain.model, StagedMemory(chain.model, n_ctx, self.n_batch, options)
        self.n_ctx = self.memory.size
        self._n_ubatch = min(options.get("n_ubatch", 512), self.n_batch, self.n_ctx)
        self._chain, self._key, self._epoch = chain, key, epoch
        self.outputs: Ints = np.empty(0, np.int32)
        self.logits: Floats = np.empty((0, hp.n_vocab), np.float32)
        self.embeddings = self.hidden = np.empty((0, hp.n_embd), np.float32)

    def decode(self, batch: Batch | Sequence[int]) -> None:
        """See `LlamaContext.decode`. Raises WorkerDied, too."""
        memory = self.memory
        if not isinstance(batch, Batch):
            batch = Batch.prompt(batch, memory.seq_pos_max(0) + 1)
        if batch.media:
            raise ModelError("a model in stages takes no pictures and no sounds")
        try:
            taken = memory.take_all(batch, self._n_ubatch)
        except KVCacheFull:
            memory.close_holes()
            taken = memory.take_all(batch, self._n_ubatch)
        ops, memory.ops = memory.ops, []
        try:
            self.logits = self._chain.evaluate(self._epoch, self._key, ops, batch)
        except BaseException:
            memory.undo(taken)
            raise
        memory.settle()
        self.outputs = np.flatnonzero(batch.logits).astype(np.int32)

    def encode(self, batch: Batch | Sequence[int]) -> None:
        """Stages do not: raises ModelError."""
        raise ModelError(f"{self.model.arch} has an encoder: it does not run in stages")

    def keep_hidden(self) -> None:
        """Stages do not: raises ModelError."""
        raise ModelError("a model in stages does not give its hidden states")

    def set_loras(self, loras: Iterable[Scaled]) -> None:
        """Stages have the adapters that they began with: raises ModelError."""
        raise ModelError("a model in stages keeps the adapters that it began with")

    def save_state(self, path: str | os.PathLike[str], tokens: Sequence[int] = ()) -> None:
        """Stages do not: raises ModelError."""
        raise ModelError("the state of a model in stages cannot be saved")

    def load_state(self, path: str | os.PathLike[str]) -> list[int]:
        """Stages do not: raises ModelError."""
        raise ModelError("a model in stages cannot go on from a saved state")

    def perf_sampled(self, start: float) -> None:
        """Nothing is counted."""

    def perf_guessed(self, n: int) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        """Let all stages forget the context."""
        self._chain.close_context(self._epoch, self._key)

    def __enter__(self) -> StagedContext:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
