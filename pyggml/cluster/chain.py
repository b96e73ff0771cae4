"""A model in stages: actors with some of its layers each, and contexts whose batches go through all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from pyggml.errors import ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.loaded import LoadedModel
from pyggml.types import Floats

from .actors import Actor, ActorDied, Actors, Edit
from .pool import ATTEMPTS, WorkerDied

if TYPE_CHECKING:
    from pyggml.llm.options import ContextOptions


class Chain:
    """Stages, each of which takes what the one before gave. Several threads evaluate batches: while one stage has that
    of one, others have those of others.

    `start(i)` starts the actor of stage i, with its layers loaded. `epoch`: how often stages were replaced.
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
        """Let go of one, where it is still there."""
        with suppress(WorkerDied):
            self._all(epoch, "close", key)

    def evaluate(self, epoch: int, key: int, edits: Sequence[Edit], batch: Batch) -> Floats:
        """The logits of a batch. Raises as `LlamaContext.decode`, WorkerDied where a stage has died since `epoch`."""
        given = None
        with self._lock:  # every stage has the batches of all threads in one order
            self._check(epoch)
            for stage in self._stages:
                given = stage.call("decode", key, edits, batch, given)
        return self._get(epoch, given)

    def repair(self, epoch: int) -> None:
        """Replace stages that died since `epoch`, where that was not done, and forget all contexts."""
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


class StagedMemory:
    """The sequences of a StagedContext. What is done with them is told to the stages with the next batch."""

    def __init__(self, model: LoadedModel, n_ctx: int, options: ContextOptions) -> None:
        self.n_seq_max = options.get("n_seq_max", 1)
        like = model.architecture.new_memory(model.hparams, n_ctx, n_seq_max=self.n_seq_max, held=())
        self.keeps_all = like.keeps_all
        self.edits: list[Edit] = []

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> None:
        """See `KVCells.seq_rm`."""
        self.edits.append(("seq_rm", (seq_id, p0, p1)))

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """See `KVCells.seq_cp`."""
        self.edits.append(("seq_cp", (src, dst, p0, p1)))


class StagedContext:
    """What generations use of a context, of a model in stages."""

    def __init__(self, chain: Chain, key: int, epoch: int, n_ctx: int, options: ContextOptions) -> None:
        self.n_batch = options.get("n_batch", 2048)
        self.model, self.memory = chain.model, StagedMemory(chain.model, n_ctx, options)
        self._chain, self._key, self._epoch = chain, key, epoch
        self.logits: Floats = np.empty((0, chain.model.hparams.n_vocab), np.float32)

    def decode(self, batch: Batch) -> None:
        """See `LlamaContext.decode`. Raises WorkerDied, too."""
        edits, self.memory.edits = self.memory.edits, []
        self.logits = self._chain.evaluate(self._epoch, self._key, edits, batch)

    def encode(self, batch: Batch) -> None:
        """Stages do not: raises ModelError."""
        raise ModelError(f"{self.model.arch} has an encoder: it does not run in stages")

    def perf_sampled(self, start: float) -> None:
        """Nothing is counted."""

    def __enter__(self) -> StagedContext:
        return self

    def __exit__(self, *exc: object) -> None:
        self._chain.close_context(self._epoch, self._key)
