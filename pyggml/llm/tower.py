"""A loaded tower: it makes features of what a processor gives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError, OneSite
from pyggml.inspect.watch import Watches
from pyggml.models.towers import get_tower
from pyggml.models.towers.tower import Arrays, Encoded, Tower, TowerBuild, TowerSize
from pyggml.models.weights import Weights
from pyggml.sched import Schedule, Scheduler
from pyggml.scope import no_scope
from pyggml.tensor import Tensor

Array = npt.NDArray[Any]
_MAX_GRAPHS = 4  # graphs kept for reuse: pictures come in few sizes


class LoadedTower:
    """A tower with its weights: those of a folder, or of an mmproj file.

    Calling it runs the tower's graph (see `TowerRun`). Raises ModelError for metadata or tensors that are no tower's.
    """

    def __init__(self, path: str, kv: Mapping[str, Any], tensors: Mapping[str, Tensor], side: str = "vision") -> None:
        self.path, self.kv = path, kv
        name = kv.get(f"clip.{side}.projector_type", kv.get("clip.projector_type"))
        if not isinstance(name, str):
            raise ModelError(f"{path}: the key clip.projector_type, which names the tower, is missing or no string")
        try:
            self.tower: Tower = get_tower(name)
            self.hparams = self.tower.hparams(kv)
            self.weights = Weights(tensors)
            self.tower.declare(self.hparams, self.weights)
        except ModelError as e:
            raise ModelError(f"{path}: {e}") from None
        self.name = name
        self.scheduler: Scheduler | None = None
        self.watches = Watches()
        self._graphs: OrderedDict[object, tuple[TowerBuild[Any], Schedule]] = OrderedDict()

    @property
    def unused(self) -> list[str]:
        """The names of the tensors that nothing asks for."""
        return self.weights.unused

    def tensor(self, name: str) -> Array | None:
        """See `TowerRun`."""
        t = self.weights.get(name)
        return None if t is None else np.asarray(t.numpy(), np.float32)

    def encode(self, arrays: Arrays, n_threads: int | None = None) -> Encoded:
        """Features (and, of encoders for search, the embedding) of what the processor made of one picture or sound.
        Raises ShapeError for arrays that do not fit."""
        self._n_threads = n_threads
        return self.tower.encode(self, arrays)

    def __call__(self, size: TowerSize, **inputs: Array) -> dict[str, Array]:
        """See `TowerRun`."""
        if self.scheduler is None:
            self.scheduler = Scheduler(("cpu",), self._n_threads)
            self.scheduler.watches = self.watches
        with self.scheduler.lock:
            b, schedule = self._ready(size)
            for leaf, values in b.constants.values():
                leaf.set(values)
            for name, leaf in b.given.items():
                leaf.set(inputs[name])
            schedule.run(n_threads=self._n_threads)
            return {name: np.array(t.numpy(), np.float32) for name, t in b.results.items()}

    @no_scope()
    def _ready(self, size: TowerSize) -> tuple[TowerBuild[Any], Schedule]:
        """The graph of that size, ready to run."""
        assert self.scheduler is not None
        key = size, self.watches.patterns
        if key not in self._graphs:
            b: TowerBuild[Any] = TowerBuild(self.hparams, self.weights, self.tower.side, size)
            b.asked = self.watches.asks
            with OneSite(), b.ctx:
                self.tower.build(b)
            self._graphs[key] = b, self.scheduler.alloc(b.graph)
            if len(self._graphs) > _MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        b, _ = self._graphs[key]
        return b, self.scheduler.alloc(b.graph)
