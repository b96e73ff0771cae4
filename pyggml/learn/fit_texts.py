"""The loop of a training (`loop.py`) over texts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from pyggml.errors import BatchError, whole
from pyggml.types import Floats

from . import saved
from .dataset import split, steps_of
from .loop import Epoch, Measured, Options, Samples, named, run
from .texts_file import Batches, Example, Masks, Texts, columns


class Trains(saved.Training, Protocol):
    """What the loop needs of a `Trainer`, see there."""

    n_ubatch: int | None
    clip: float | None
    dropout: float
    seed: int

    def step(self, sequences: Texts, masks: Masks | None = None, encoded: Texts | None = None) -> float: ...
    def loss(self, sequences: Texts, masks: Masks | None = None, encoded: Texts | None = None) -> float: ...


def fit_texts(
    t: Trains,
    sequences: Texts,
    masks: Masks | None,
    encoded: Texts | None,
    epochs: float,
    val_split: float,
    n_batch: int,
    seed: int,
    n_steps: int | None,
    how: Options,
) -> list[Epoch]:
    """See `Trainer.fit`."""
    n_batch = whole("n_batch", n_batch, 1, error=BatchError)
    seed = whole("seed", seed, 0, error=BatchError)
    examples = [
        Example(x, masks[i] if masks is not None else np.ones(len(x), np.bool_), encoded[i] if encoded else None)
        for i, x in enumerate(sequences)
    ]
    parts = split(len(examples), val_split, seed)
    train, held = (cast("list[int]", part.tolist()) for part in parts)
    batches = Batches([examples[i] for i in sorted(train)], n_batch, seed)
    kept = [examples[i] for i in held]
    n_steps = steps_of(epochs, batches.n_epoch) if n_steps is None else whole("n_steps", n_steps, 1, error=BatchError)
    if how.state is not None or how.resume is not None:
        about = {"texts": _digest(examples), "n_batch": n_batch, "n_ubatch": t.n_ubatch, "clip": t.clip, "seed": seed}
        about |= {"val_split": val_split, "train": named(t.train), "optimiser": named(t.opt)}
        how = how._replace(about=about)
    return run(_Texts(t), batches, [kept[i : i + n_batch] for i in range(0, len(kept), n_batch)], n_steps, how)


class _Texts:
    """See `Learner`."""

    unit = "tokens"

    def __init__(self, t: Trains) -> None:
        self._t = t

    @property
    def n_steps(self) -> int:
        return self._t.n_steps

    def numbers(self, step: int) -> Floats:
        return self._t.opt.numbers(step)

    def learn(self, batch: Sequence[Example]) -> Measured:
        return _measured(batch, self._t.step(*columns(batch)))

    def measure(self, batch: Sequence[Example]) -> Measured:
        return _measured(batch, self._t.loss(*columns(batch)))

    def n_read(self, batch: Sequence[Example]) -> int:
        return sum(len(e.ids) + (0 if e.encoded is None else len(e.encoded)) for e in batch)

    def write(self, path: str | os.PathLike[str], more: Mapping[str, str]) -> None:
        saved.save_state(self._t, path, more)

    def read(self, path: str | os.PathLike[str], check: Callable[[Mapping[str, Any]], None]) -> None:
        saved.load_state(self._t, path, check)


def _measured(batch: Sequence[Example], loss: float) -> Measured:
    """A loss, which counts once for each prediction."""
    n = sum(e.n_counted for e in batch)
    return {"loss": [Samples(np.array([loss]), float(n))]}


def _digest(examples: Sequence[Example]) -> str:
    """What tells these texts from other ones."""
    found = hashlib.blake2b(digest_size=16)
    for e in examples:
        found.update(np.int64(len(e.ids)).tobytes() + np.asarray(e.ids, np.int64).tobytes())
        found.update((np.asarray(e.mask) != 0).tobytes())
        if e.encoded is not None:
            found.update(np.int64(len(e.encoded)).tobytes() + np.asarray(e.encoded, np.int64).tobytes())
    return found.hexdigest()
