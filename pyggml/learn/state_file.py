"""States of trainings in files: parameters, what the optimiser remembers of them, and how many steps were made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.errors import GraphError, ModelError, StateError, path_name
from pyggml.gguf_io import tensor_file
from pyggml.gguf_io.atomic_file import AtomicFile
from pyggml.gguf_io.read import says
from pyggml.tensor import Tensor

_VERSION = "pyggml.training.version"
_FORMAT = 2
STEPS = "pyggml.training.steps"  # key of the number of steps


@dataclass(frozen=True)
class Trained:
    """What a state holds: parameters and what is remembered of each, by its name; and `of`, metadata that must be the
    same where the state is read."""

    params: Mapping[str, Tensor]
    states: Mapping[str, Sequence[Tensor]]
    of: Mapping[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by their names in a file."""
        remembered = {f"{name}/{i}": s for name, states in self.states.items() for i, s in enumerate(states)}
        return {**self.params, **remembered}


def check_output(path: str | os.PathLike[str], *read: str | os.PathLike[str] | None) -> str:
    """The name of what is to be written. Raises ModelError when it cannot be there (a file is made beside it, to see
    that, and removed), and when it is one of the files that are `read`."""
    out = path_name(path, ModelError)
    folder = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(folder):
        raise ModelError(f"{out}: there is no folder {folder}")
    if os.path.isdir(out):
        raise ModelError(f"{out}: is a folder that is there already; name another one, or a file")
    for other in read:
        if other is not None and os.path.exists(out) and os.path.exists(other) and os.path.samefile(out, other):
            raise ModelError(f"{out}: is read, too, and would be lost; name another file")
    try:
        AtomicFile(out).discard()
    except OSError as e:
        raise ModelError(f"{out}: cannot be written: {e.strerror}") from None
    return out


def write_state(path: str, trained: Trained, n_steps: int, more: Mapping[str, Any]) -> None:
    """Write a state, with `more` metadata; it appears when it is complete. Raises GGUFError, and GraphError when a
    parameter has an element that is no finite number: an older state in the file is worth more."""
    for name, w in trained.params.items():
        if not np.isfinite(w.numpy()).all():
            text = f"after {n_steps} steps {name} has elements that are no finite numbers: the training has failed"
            raise GraphError(f"{path}: the state is not written: {text}")
    tensor_file.save(path, trained.tensors, {_VERSION: _FORMAT, **trained.of, STEPS: n_steps, **more})


def read_state(path: str | os.PathLike[str], trained: Trained, check: Callable[[Mapping[str, Any]], None]) -> int:
    """Set all tensors to what a state has, and give the number of its steps. `check` is given its metadata. Raises
    GGUFError for a bad file, StateError for the state of another training, and what `check` raises; then nothing has
    changed."""
    name_of_file, file = os.fspath(path), tensor_file.load(path)
    if not says(file.metadata, _VERSION, _FORMAT):
        raise StateError(f"{name_of_file}: is no state of a training that this version reads")
    n_steps = file.metadata.get(STEPS)
    if type(n_steps) is not int or n_steps < 0:
        raise StateError(f"{name_of_file}: {STEPS} is {n_steps!r:.60}")
    check(file.metadata)
    for key, value in trained.of.items():
        if not says(file.metadata, key, value):
            raise StateError(f"{name_of_file}: {key} is {file.metadata.get(key)!r:.60}, here {value!r:.60}")
    targets = trained.tensors
    for name in sorted(file.keys() ^ targets.keys()):
        raise StateError(f"{name_of_file}: {name} is only {'there' if name in file else 'here'}")
    for name, w in targets.items():
        if file[name].ne != w.ne or file[name].dtype is not w.dtype:
            raise StateError(f"{name_of_file}: {file[name].describe()} does not fit {w.describe()}")
    for name, w in targets.items():
        w.set(file[name].numpy())
    return n_steps
