"""The loop of a training: epochs of steps, validation, results with uncertainties, progress, and states to go on from.

`gg.fit` trains graphs of one's own with it, `Trainer.fit` models.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from pyggml.bars import bar
from pyggml.codec import Array
from pyggml.errors import BatchError, StateError, whole
from pyggml.gguf_io.read import says
from pyggml.llm.interrupt import uninterrupted
from pyggml.small_file import parse_json
from pyggml.types import Floats

from .dataset import Batches
from .state_file import STEPS, check_output

B = TypeVar("B", contravariant=True)
# Keys of a state: what was measured, what it is of, and a hash of the optimiser's numbers in all steps so far.
_RUN, _ABOUT, _NUMBERS = "pyggml.training.run", "pyggml.training.about", "pyggml.training.numbers"


class Mean(NamedTuple):
    """The mean of samples, and its standard uncertainty: the standard deviation of the samples divided by the root of
    their number (NaN for a single sample). Source: ggml_opt_result."""

    mean: float
    uncertainty: float


@dataclass(frozen=True)
class Epoch:
    """What an epoch of a training gave.

    number  of the epoch, from 1 on
    n_steps the steps that were made at its end
    train   the loss ("loss") and all metrics on the batches that were learned from, each
            before its step (metrics that read the parameters: after it)
    val     the same on the examples held back for validation, at the end of the epoch; empty when there are none
    """

    number: int
    n_steps: int
    train: Mapping[str, Mean]
    val: Mapping[str, Mean]

    @property
    def loss(self) -> float:
        """The mean loss of training."""
        return self.train["loss"].mean

    @property
    def val_loss(self) -> float:
        """The mean loss of validation; NaN without one."""
        return self.val["loss"].mean if self.val else math.nan

    def __str__(self) -> str:
        val = f"; validation: {_shown_means(self.val)}" if self.val else ""
        return f"epoch {self.number}: {_shown_means(self.train)}{val}"


def _shown_means(means: Mapping[str, Mean]) -> str:
    parts = [f"{n} {x:.4f}" + ("" if math.isnan(u) else f" ± {u:.4f}") for n, (x, u) in means.items()]
    return ", ".join(parts)


class Progress(NamedTuple):
    """Where a training is, after a step.

    step          how many steps were made, of `n_steps`
    epoch         the epoch that the step belongs to, from 1 on
    loss          the loss of the step's batch, before the step
    per_second    how many examples (of a `Trainer`: tokens) were read per second
    seconds_left  about how long the rest takes
    result        the result of the epoch, after its last step
    """

    step: int
    n_steps: int
    epoch: int
    loss: float
    per_second: float
    seconds_left: float
    result: Epoch | None


class Samples(NamedTuple):
    """Values of a loss or metric, and how much each counts in their mean."""

    values: Array
    weight: float


Measured = Mapping[str, Sequence[Samples]]  # by name
Callback = Callable[[Progress], object]


class Learner(Protocol[B]):
    """What the loop trains. `unit`: what `n_read` counts."""

    unit: str

    @property
    def n_steps(self) -> int:
        """How many steps were made."""
        ...

    def numbers(self, step: int) -> Floats:
        """What the optimiser reads in a step."""
        ...

    def learn(self, batch: B) -> Measured:
        """Make a step, and tell what was measured before it. `n_steps` is one more afterwards."""
        ...

    def measure(self, batch: B) -> Measured:
        """The same without a step."""
        ...

    def n_read(self, batch: B) -> int:
        """The size of a batch."""
        ...

    def write(self, path: str | os.PathLike[str], more: Mapping[str, str]) -> None:
        """Write the state, with `more` metadata."""
        ...

    def read(self, path: str | os.PathLike[str], check: Callable[[Mapping[str, Any]], None]) -> None:
        """Go on from a state. `check` is given its metadata, and may raise before anything has changed."""
        ...


class Options(NamedTuple):
    """How the loop runs.

    callback    called after each step
    progress    whether stderr, when it is a terminal, shows a bar
    state       the file to save the state in: each `save_every` steps (0: at the end of each epoch), and at the end,
                also when the training is interrupted
    resume      the state to go on from
    about       what a state is of (data, options ...), by name: a state of anything else is refused
    """

    callback: Callback | None = None
    progress: bool = False
    state: str | os.PathLike[str] | None = None
    save_every: int = 0
    resume: str | os.PathLike[str] | None = None
    about: Mapping[str, Any] | None = None


def checked(how: Options, *read: str) -> Options:
    """`how`, before any work is done. Raises BatchError for a bad `save_every`; ModelError for a state that cannot be
    written, or would be written over one of the files that are `read`."""
    whole("fit: save_every", how.save_every, 0, error=BatchError)
    if how.state is not None:
        check_output(how.state, *read)
    return how


_L = TypeVar("_L")


def run(learner: Learner[_L], batches: Batches[_L], held: Sequence[_L], n_steps: int, how: Options) -> list[Epoch]:
    """Make the steps that are left of `n_steps`. The results of all epochs, those before a resumed state too. Raises
    StateError for a state of another training."""
    about = dict(how.about or {})
    run = _Run()
    if how.resume is not None:
        path = os.fspath(how.resume)

        def check(kv: Mapping[str, Any]) -> None:
            nonlocal run
            _check(path, kv, about, learner, n_steps)
            run = _Run.of(path, kv)

        learner.read(path, check)
    numbers = _hash_of(learner, learner.n_steps) if how.state is not None else ""
    first = n_saved = learner.n_steps
    start, n_read = time.monotonic(), 0

    def save() -> None:
        nonlocal n_saved
        if how.state is not None and learner.n_steps > n_saved:
            more = {_RUN: run.text(), _ABOUT: json.dumps(about, default=repr), _NUMBERS: numbers}
            learner.write(how.state, more)
            n_saved = learner.n_steps

    def ended() -> Epoch:
        """The result of the epoch that the last step belongs to."""
        val = _Run()
        for each in held:
            val.add(learner.measure(each))
        with uninterrupted():
            return run.end((learner.n_steps - 1) // batches.n_epoch + 1, learner.n_steps, val)

    def is_end(step: int) -> bool:
        return step % batches.n_epoch == 0 or step == n_steps

    try:
        with bar("training") if how.progress else nullcontext(_silent) as show:
            if run.is_open and is_end(learner.n_steps):  # it was interrupted at the end of an epoch
                ended()
            while learner.n_steps < n_steps:
                batch = batches[learner.n_steps]
                with uninterrupted():  # a step is made, and counted, or not
                    measured = learner.learn(batch)
                    run.add(measured)
                    if how.state is not None:
                        numbers = _hashed(numbers, learner, learner.n_steps - 1)
                step, loss = learner.n_steps, _loss(measured)
                n_read += learner.n_read(batch)
                result = ended() if is_end(step) else None
                seconds = max(time.monotonic() - start, 1e-9)
                left = seconds / (step - first) * (n_steps - step)
                speed = n_read / seconds
                show(step, n_steps, f"loss {loss:.4f}, {speed:.0f} {learner.unit}/s")
                if (step % how.save_every == 0) if how.save_every else result is not None:
                    save()
                if how.callback is not None:
                    epoch = (step - 1) // batches.n_epoch + 1
                    how.callback(Progress(step, n_steps, epoch, loss, speed, left, result))
    finally:  # also when it is interrupted: nothing that was learned is lost
        save()
    return run.epochs


def _silent(done: float, total: float, text: str = "") -> None:
    pass


def _loss(measured: Measured) -> float:
    """The mean loss of a batch."""
    tally = _Tally()
    for samples in measured["loss"]:
        tally.add(samples)
    return tally.mean().mean


def _check(path: str, kv: Mapping[str, Any], about: Mapping[str, Any], learner: Learner[Any], n_steps: int) -> None:
    """Raises StateError when a state is of another training, or of more steps than this one has."""
    if _ABOUT not in kv:
        return  # `Trainer.save_state` does not know
    was, now = _object(path, kv[_ABOUT]), json.loads(json.dumps(about, default=repr))  # as JSON has them
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            text = f"{name} was {_shown(was.get(name))} there, and is {_shown(now.get(name))} here"
            raise StateError(f"{path}: is the state of another training: {text}")
    if kv.get(STEPS, 0) > n_steps:  # before the numbers of each of them are looked at
        raise StateError(f"{path}: has made {kv[STEPS]} steps; the training ends after {n_steps}")
    if not says(kv, _NUMBERS, _hash_of(learner, kv.get(STEPS, 0))):
        text = "the learning rates of the steps that were made differ (a schedule may depend on the number of steps)"
        raise StateError(f"{path}: is the state of another training: {text}")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]} ..."


def _hash_of(learner: Learner[Any], n_steps: int) -> str:
    """A hash of the optimiser's numbers in the first steps."""
    so_far = ""
    for step in range(n_steps):
        so_far = _hashed(so_far, learner, step)
    return so_far


def _hashed(so_far: str, learner: Learner[Any], step: int) -> str:
    """The hash of one step more."""
    return hashlib.blake2b(so_far.encode() + learner.numbers(step).tobytes(), digest_size=16).hexdigest()


def named(x: object) -> Any:
    """An optimiser or an adapter as JSON: its name and numbers, without what depends on the step."""
    if isinstance(x, str):
        return x
    fields = vars(x) if hasattr(x, "__dict__") else {}
    return [type(x).__name__, {k: v for k, v in fields.items() if k != "lr" and not callable(v)}]


def _object(path: str, text: Any) -> dict[str, Any]:
    found = parse_json(path, text, StateError) if isinstance(text, str) else None
    if not isinstance(found, dict):
        raise StateError(f"{path}: is no state of a training that this version reads")
    return cast("dict[str, Any]", found)


class _Tally:
    """Sums of samples: their number, their weights, and their weighted values and squares."""

    def __init__(self, n: int = 0, weights: float = 0.0, values: float = 0.0, squares: float = 0.0) -> None:
        self.n, self.weights, self.values, self.squares = n, weights, values, squares

    def add(self, samples: Samples) -> None:
        x = np.asarray(samples.values, np.float64).reshape(-1)
        self.n += x.size
        self.weights += x.size * samples.weight
        self.values += float(x.sum()) * samples.weight
        self.squares += float(x @ x) * samples.weight

    def mean(self) -> Mean:
        mean = self.values / self.weights
        variance = max(self.squares / self.weights - mean * mean, 0.0)
        return Mean(mean, math.sqrt(variance / (self.n - 1)) if self.n > 1 else math.nan)


class _Run:
    """What a training has measured: results of epochs, and sums of the one that is under way."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []
        self._sums: dict[str, _Tally] = {}

    def add(self, measured: Measured) -> None:
        for name, several in measured.items():
            for samples in several:
                self._sums.setdefault(name, _Tally()).add(samples)

    @property
    def is_open(self) -> bool:
        """Whether an epoch is under way."""
        return bool(self._sums)

    def end(self, number: int, n_steps: int, val: _Run) -> Epoch:
        """End an epoch."""
        train, self._sums = self._sums, {}
        means = [{name: t.mean() for name, t in of.items()} for of in (train, val._sums)]
        self.epochs.append(Epoch(number, n_steps, *means))
        return self.epochs[-1]

    def text(self) -> str:
        """All of it, as JSON. Python's JSON has the bits of floats."""
        epochs = [(e.number, e.n_steps, e.train, e.val) for e in self.epochs]
        return json.dumps({"epochs": epochs, "sums": {name: [*vars(t).values()] for name, t in self._sums.items()}})

    @staticmethod
    def of(path: str, kv: Mapping[str, Any]) -> _Run:
        """What `text` wrote into a state; nothing, when the state has none. Raises StateError."""
        run = _Run()
        if _RUN not in kv:
            return run
        found = _object(path, kv[_RUN])
        try:
            for number, n_steps, *both in found["epochs"]:
                run.epochs.append(Epoch(number, n_steps, *({n: Mean(*m) for n, m in of.items()} for of in both)))
            run._sums = {name: _Tally(*sums) for name, sums in found["sums"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise StateError(f"{path}: is no state of a training that this version reads") from None
        return run
